"""`mtpjax bench-serving`: a benchmark over HTTP. Works with any OpenAI-compatible server; imports no JAX, no engine."""
