"""A byte-level tokenizer with special tokens and a chat template, as files."""

import json
import pathlib

import tokenizers

from mtpjax.data.tokenizer import HuggingFaceTokenizer, load_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>"]  # ids behind bytes and merges


def save_tokenizer(folder: pathlib.Path, template=CHATML, ends=("<|im_end|>",), merges=()) -> HuggingFaceTokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(alphabet)}
    vocab |= {"".join(pair): 256 + index for index, pair in enumerate(merges)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=list(merges)))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    content = json.loads(made.to_str())
    content["added_tokens"] = [
        {"id": len(vocab) + index, "content": name, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for index, name in enumerate(SPECIAL)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    ids = [len(vocab) + SPECIAL.index(end) for end in ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder, 300)
