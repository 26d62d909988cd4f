"""Prefill and decode on different machines. A decode server fetches the pages of a prompt from a prefill server.

The pages are added to the decode server's prefix cache (`mtpjax.serving.page_pool`), as if this server had computed
them. The decode server then computes the rest of the prompt, or all of it if the prefill server cannot help.
"""
