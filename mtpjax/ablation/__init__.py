"""`mtpjax ablate`: a grid of draft settings, each timed beside plain decoding."""
