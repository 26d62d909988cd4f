"""Conversations through a chat template as it is, without probes of its forms."""

from mtpjax.data import chat_template


def render_chat(template, messages, **variables) -> str:
    chat_template._check_size(template, messages)
    variables = {"add_generation_prompt": True, **variables}
    return chat_template._render_once(template, messages, variables, with_generation=False).text
