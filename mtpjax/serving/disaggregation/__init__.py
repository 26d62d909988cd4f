"""Prefill and decode on different machines: a decode server fetches the pages of a prompt from a prefill server.

Pages are those of the prefix cache (`mtpjax.serving.page_pool`), so the decode server finds them as if it had computed
them. It computes the rest of the prompt, or all of it if the prefill server cannot help.
"""
