"""`mtpjax ablate`: a grid of draft settings, each timed in turns with plain decoding."""
