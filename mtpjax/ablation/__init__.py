"""The grid behind `mtpjax ablate`: draft settings, each timed in turns with plain decoding."""
