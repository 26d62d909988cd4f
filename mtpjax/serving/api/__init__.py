"""The HTTP API, which turns request bodies into engine requests, and tokens into responses."""
