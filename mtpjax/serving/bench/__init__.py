"""`mtpjax bench-serving`, an HTTP benchmark for any OpenAI-compatible server. Imports neither JAX nor the engine."""
