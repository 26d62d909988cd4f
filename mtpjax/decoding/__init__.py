"""Speculative decoding: draft, verify, accept and commit in one `lax.while_loop`."""
