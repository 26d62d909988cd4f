"""Prefill and decode on different machines: a decode server fetches the pages of a prompt from a prefill server.

The pages enter the decode server's prefix cache (`mtpjax.serving.page_pool`), which treats them as if this server had
computed them. It computes the rest of the prompt, or all of it if the prefill server cannot help.
"""
