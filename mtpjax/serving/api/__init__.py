"""The HTTP API: from bodies to engine requests, and from tokens to responses."""
