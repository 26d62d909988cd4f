"""Decoding: propose, verify, accept, commit, in one `lax.while_loop`."""
