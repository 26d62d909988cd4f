"""The inference engine, which generates tokens for requests, and its HTTP server."""
