"""Serving: requests in, tokens out."""
