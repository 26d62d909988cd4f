"""Ranges and defaults of generation options, which `options` uses to check bodies and `schemas` to describe them."""

import dataclasses
from typing import Any

from mtpjax.serving.api.errors import FLAG, NAME, Field

MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 512
MAX_STOP_TOKENS = 32  # including the model's end tokens; the engine compares each new token with all of them
MAX_BIASES = 1024
GREEDY_TEMPERATURE = 1e-5  # below this temperature, float32 logits divided by it overflow
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
DEFAULT_GENERATE_TOKENS = 128  # SGLang's

# Options that have the same name and meaning in OpenAI's and SGLang's routes.
SAMPLING = {
    "temperature": Field("number", 1.0, 0, 2),
    "top_p": Field("number", 1.0, 0, 1, is_above=True),
    "top_k": Field("integer", -1, -1),
    "min_p": Field("number", 0.0, 0, 1),
    "frequency_penalty": Field("number", 0.0, -2, 2),
    "presence_penalty": Field("number", 0.0, -2, 2),
    "repetition_penalty": Field("number", 1.0, 0, 100, is_above=True),
    "ignore_eos": FLAG,
    "n": Field("integer", 1, 1, MAX_CHOICES),
}
# Options that `SamplingParams` takes unchanged.
SAME_NAMES = ("top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
_SEED = Field("integer", None, -(2**63), 2**64 - 1)
_TOKENS = Field("integer", None, 1)
_MIN_TOKENS = Field("integer", 0, 0)
ADD_SPECIAL_TOKENS = Field("boolean", default=True)
BIAS = Field("number", None, -100, 100)
_OPENAI = {
    **SAMPLING,
    "model": NAME,
    "user": NAME,
    "rid": NAME,
    "cache_salt": NAME,
    "max_tokens": _TOKENS,
    "min_tokens": _MIN_TOKENS,
    "seed": _SEED,
    "stream": FLAG,
    "speculative": Field("boolean", default=True),
    # Adds `draft_levels` to each choice in a stream, with each new token's text and the draft level that proposed it.
    "return_draft_levels": FLAG,
}
COMPLETION = {
    **_OPENAI,
    "add_special_tokens": ADD_SPECIAL_TOKENS,
    "best_of": Field("integer", None, 1, MAX_CHOICES),
    "echo": FLAG,
    "logprobs": Field("integer", None, 0, MAX_LOGPROBS),
}
CHAT = {
    **_OPENAI,
    "max_completion_tokens": _TOKENS,
    "logprobs": FLAG,
    "top_logprobs": Field("integer", 0, 0, MAX_LOGPROBS),
    "add_generation_prompt": Field("boolean", default=True),
    "reasoning_effort": NAME,  # a variable of the chat template
}
GENERATE = {
    "add_special_tokens": ADD_SPECIAL_TOKENS,
    "rid": NAME,
    "stream": FLAG,
    "return_logprob": FLAG,
    "speculative": Field("boolean", default=True),
}
GENERATE_SAMPLING = {
    **SAMPLING,
    "max_new_tokens": dataclasses.replace(_TOKENS, default=DEFAULT_GENERATE_TOKENS),
    "min_new_tokens": _MIN_TOKENS,
    "sampling_seed": _SEED,
}
ABORT = {"rid": NAME, "abort_all": FLAG}
TOKENIZE = {
    "model": NAME,
    "add_generation_prompt": Field("boolean", default=True),
    "add_special_tokens": ADD_SPECIAL_TOKENS,  # only for a text; in a conversation, the chat template adds them
    "reasoning_effort": NAME,
}
DETOKENIZE = {"model": NAME}
STREAM_OPTIONS = {"include_usage": FLAG, "continuous_usage_stats": FLAG}
# Options without a table entry: lists and objects, which are checked separately.
_STRUCTURED = """
    prompt messages text input_ids sampling_params stream_options stop stop_token_ids logit_bias chat_template_kwargs
    tool_choice response_format json_schema regex guided_json guided_regex structured_outputs
"""
STRUCTURED = frozenset(_STRUCTURED.split())

# Unsupported options of OpenAI, vLLM and SGLang that would change the text, with the values that have no effect.
# Silently ignoring any other value would give a wrong answer.
_NEVER = """
    allowed_token_ids audio chat_template custom_logit_processor ebnf enable_thinking grammar guided_choice
    guided_grammar guided_whitespace_pattern input_embeds lora_path prompt_embeds prompt_logprobs reasoning
    reasoning_effort repetition_detection session_params structural_tag thinking thinking_token_budget
    truncate_prompt_tokens web_search_options
"""
_EMPTY_LISTS = (
    "audio_data bad_words documents functions image_data logits_processors stop_regex token_ids_logprob tools"
)
_FALSE = """
    add_special_tokens continue_final_message echo include_stop_str_in_output no_stop_trim return_hidden_states
    return_tokens_as_token_ids use_beam_search
"""
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NEVER.split(), ()),
    **dict.fromkeys(_EMPTY_LISTS.split(), ([],)),
    **dict.fromkeys(_FALSE.split(), (False,)),
    **dict.fromkeys(("custom_params", "mm_processor_kwargs"), ({},)),
    **dict.fromkeys(("function_call", "tool_choice"), ("none", "auto")),  # without tools, neither changes anything
    "length_penalty": (1,),
    "logprob_start_len": (-1,),
    "modalities": (["text"], []),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "top_logprobs_num": (0,),
    "verbosity": ("medium",),
}
