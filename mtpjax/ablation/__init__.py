"""`mtpjax ablate`: times a grid of draft settings, alternating each with plain decoding."""
