"""GGUF files, written by the `gguf` package, load as the Hugging Face checkpoint of the same weights."""

import json
import logging
import os
import struct
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mtpjax
from conversion.files import CheckpointFiles
from conversion.gguf_config import describe_config
from conversion.gguf_header import GGUFHeader, GGUFTensor
from conversion.gguf_tokenizer import tokenizer_files
from conversion.hf_config import parse_config
from mtpjax.cli.main import main
from mtpjax.data.tokenizer import load_tokenizer
from mtpjax.errors import CheckpointError, ConfigError, TokenizerError
from mtpjax.models.rope_scaling import LinearScaling

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")

D, F, V, LAYERS, HEADS, KV_HEADS, H = 64, 96, 290, 2, 4, 2, 16
TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"


def weights(architecture):
    """Random float32 weights under Hugging Face's names."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (F, D) for name in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": (D, F)}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (KV_HEADS * H, D) for name in "kv"}
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (HEADS * H, D),
            f"{prefix}self_attn.o_proj.weight": (D, HEADS * H),
        }
        if architecture == "qwen3":
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (H,) for name in "qk"}
    # Multiples of 1/64 below 4 fit bfloat16 for the norms, which llama.cpp widens to float32 in bfloat16 files.
    draws = {
        name: rng.integers(-60, 60, shape) if shape[1:] else rng.integers(32, 96, shape)
        for name, shape in shapes.items()
    }
    return {name: (draw / 64).astype(np.float32) for name, draw in draws.items()}


def run(arguments):
    """Runs a command; returns its exit code."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code


def permute(weight, heads):
    """The reordering of llama.cpp's `convert_hf_to_gguf.py` for the rotary embedding of llama."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def byte_tokens():
    """GPT-2's 256 letters for bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_gguf(
    path, architecture="llama", kind="F32", drop=(), metadata=None, layers=LAYERS, factors=None, base=10000.0
):
    """Writes a small model with a tokenizer; returns the weights under Hugging Face's names, as the file holds them."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], LAYERS)
    kind = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(H)
    writer.add_value_length(H)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(base)
    letters = byte_tokens()
    tokens = ["<s>", "</s>", *letters, "he", "ll", "hell", "hello", *(f"<{i}>" for i in range(V - 262))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if architecture == "llama" else "qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["h e", "l l", "he ll", "hell o"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template([{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "x"}])
    for key, value in (metadata or {}).items():
        writer.add_uint32(key, value)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    held = {}
    for name, weight in weights(architecture).items():
        stored, heads = weight, {"q": HEADS, "k": KV_HEADS}.get(name.split(".")[-2][0])
        rotary = architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight"))
        if rotary:
            stored = permute(weight, heads)
        # Norms stay float32, as llama.cpp writes them.
        of = kind if stored.ndim > 1 else gguf.GGMLQuantizationType.F32
        content = gguf.quants.quantize(stored, of)
        held[name] = gguf.quants.dequantize(content, of).reshape(stored.shape)
        if rotary:
            held[name] = held[name].reshape(heads, -1, 2, D).swapaxes(1, 2).reshape(stored.shape)
        if name not in drop:
            writer.add_tensor(names.get_name(name, (".weight",)), content, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def write_hugging_face(folder, architecture, tensors):
    """Writes the directory that the GGUF file corresponds to."""
    from safetensors.numpy import save_file

    folder.mkdir()
    config = {
        **{"model_type": architecture, "vocab_size": V, "hidden_size": D, "intermediate_size": F, "head_dim": H},
        **{"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS},
        **{"max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_logits_equal_those_of_the_dequantized_checkpoint(architecture, kind, tmp_path):
    # Q4_1 has blocks of 32, and every axis here is a multiple of 32.
    held = write_gguf(tmp_path / "model.gguf", architecture, kind)
    write_hugging_face(tmp_path / "plain", architecture, held)
    tokens = jnp.arange(12)[None]
    results = []
    for path in (tmp_path / "model.gguf", tmp_path / "plain"):
        model, params = mtpjax.load(path, dtype=jnp.float32)
        results.append(mtpjax.forward(params, tokens, model=model).logits)
    # The same bits, so the same logits; the configurations hold rms_norm_eps in float32 and in float64.
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-4)


def test_dtypes_are_float32_or_all_bfloat16(tmp_path):
    write_gguf(tmp_path / "half.gguf", kind="BF16")
    write_gguf(tmp_path / "quantized.gguf", kind="Q8_0")
    for name, dtype in (("half", jnp.bfloat16), ("quantized", jnp.float32)):
        params = mtpjax.load(tmp_path / f"{name}.gguf")[1]
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}


def test_tokenizer_and_chat_template_come_from_the_file(tmp_path):
    write_gguf(tmp_path / "model.gguf")
    tokenizer = load_tokenizer(tmp_path / "model.gguf", V)
    hello = tokenizer.encode("hello")
    assert len(hello) == 1 and tokenizer.eos_token_ids == (1,)
    # Every digit is a token, special tokens are found in text, and other bytes come back.
    assert len(tokenizer.encode("123")) == 3
    assert tokenizer.encode("<s>hello") == [0, *hello]
    text = "hello, 日本 42\n\té"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}]) == [0, *hello, 1]
    assert tokenizer.chat_templates.templates == {"default": TEMPLATE, "tool_use": "x"}


def test_conversion_writes_the_dequantized_checkpoint(tmp_path):
    held = write_gguf(tmp_path / "model.gguf", kind="Q4_1")
    assert run(["convert", str(tmp_path / "model.gguf"), str(tmp_path / "ours")]) == 0
    assert run(["convert", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    with CheckpointFiles(tmp_path / "back") as files:
        assert files.tensors.keys() == held.keys()
        for name, tensor in held.items():
            np.testing.assert_array_equal(files.read(name), tensor)
    # The tokenizer travels along.
    assert load_tokenizer(tmp_path / "back", V).digest == load_tokenizer(tmp_path / "model.gguf", V).digest


def test_commands_take_a_file(tmp_path, capsys):
    write_gguf(tmp_path / "model.gguf")
    assert run(["inspect", str(tmp_path / "model.gguf")]) == 0
    assert "GGUF" in capsys.readouterr().out
    arguments = ["--prompt", "hello", "--max-new-tokens", "3", "--num-steps", "0"]
    assert run(["generate", "--model-path", str(tmp_path / "model.gguf"), *arguments]) == 0
    assert "3 tokens" in capsys.readouterr().err


def test_inspect_says_what_the_file_holds_and_what_it_becomes(tmp_path, capsys):
    """Types and bytes of the file by llama.cpp's names, as its own package reads them, and those in memory."""
    gguf = pytest.importorskip("gguf")
    for name, kind in (("small", "Q4_1"), ("half", "BF16")):
        path = tmp_path / f"{name}.gguf"
        write_gguf(path, kind=kind)
        assert run(["inspect", str(path), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        expected: dict = {}
        for tensor in gguf.GGUFReader(path).tensors:
            found = expected.setdefault(tensor.tensor_type.name, {"tensors": 0, "bytes": 0})
            found["tensors"] += 1
            found["bytes"] += int(tensor.n_bytes)
        assert kind in expected and facts["stored_types"] == expected
        assert facts["dtypes"].keys() == {"BF16" if kind == "BF16" else "F32"}
        assert facts["bytes"] == path.stat().st_size
        assert run(["inspect", str(path)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"stored as {next(iter(expected.values()))['tensors']} {next(iter(expected))} (" in shown
        assert f"loaded as {facts['dtypes'][next(iter(facts['dtypes']))]['tensors']} " in shown
        quantized = "Q4_1, dequantized when the file is loaded" if kind == "Q4_1" else "none"
        assert f"quantization {quantized} files 1 shard, " in shown


def test_a_missing_tensor_is_named(tmp_path):
    write_gguf(tmp_path / "model.gguf", drop=("model.norm.weight",))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        mtpjax.load(tmp_path / "model.gguf")


def test_experts_are_rejected(tmp_path):
    write_gguf(tmp_path / "model.gguf", metadata={"llama.expert_count": 8})
    with pytest.raises(CheckpointError, match="expert_count is 8"):
        mtpjax.load(tmp_path / "model.gguf")


def test_a_count_of_layers_beyond_the_tensors_is_rejected(tmp_path):
    write_gguf(tmp_path / "model.gguf", layers=1 << 30)
    with pytest.raises(CheckpointError, match=r"block_count is 1073741824, but the file has 20 tensors"):
        mtpjax.load(tmp_path / "model.gguf")


def test_values_of_the_wrong_kind_are_rejected():
    header = GGUFHeader({"general.architecture": "llama", "llama.expert_count": np.zeros(3)}, {})
    with pytest.raises(CheckpointError, match="expert_count is an array of 3 values"):
        describe_config(header, {})
    with pytest.raises(TokenizerError, match="unsupported GGUF tokenizer"):
        tokenizer_files({"tokenizer.ggml.model": np.zeros(3)})


def test_rotary_factors_of_llama3_are_recognized(tmp_path):
    write_gguf(tmp_path / "model.gguf", factors=np.linspace(1, 8, H // 2, dtype=np.float32), base=1e6)
    with pytest.raises(CheckpointError, match="differs from Llama"):
        mtpjax.load(tmp_path / "model.gguf")
    # As llama.cpp writes them: 1 for short waves, the factor for long ones, and a smooth change between.
    waves = 2 * np.pi * 1e6 ** (np.arange(0, H, 2) / H)
    smooth = (8192 / waves - 1) / 3
    factors = np.where(waves < 2048, 1, np.where(waves > 8192, 8, 1 / ((1 - smooth) / 8 + smooth)))
    write_gguf(tmp_path / "model.gguf", factors=factors.astype(np.float32), base=1e6)
    scaling = mtpjax.load(tmp_path / "model.gguf")[0].config.rope_scaling
    assert (scaling.factor, scaling.low_freq_factor, scaling.original_max_position_embeddings) == (8, 1, 8192)


def test_every_truncation_is_one_plain_line(tmp_path):
    write_gguf(tmp_path / "model.gguf")
    whole = (tmp_path / "model.gguf").read_bytes()
    for size in [*range(0, 60), *range(60, len(whole) - 64, len(whole) // 40)]:
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(CheckpointError) as error:
            mtpjax.load(tmp_path / "cut.gguf")
        assert "\n" not in str(error.value), str(error.value)


def test_flipped_header_bytes_never_end_in_another_exception(tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    write_gguf(tmp_path / "model.gguf")
    whole = (tmp_path / "model.gguf").read_bytes()
    # Everything before the first tensor's data: its offset is known from the size of the data.
    end = len(whole) - sum(weight.nbytes for weight in weights("llama").values())
    rng = np.random.default_rng(1)
    from conversion.gguf_files import GGUFFiles

    failed = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for place in rng.integers(0, end, 2):
            damaged[place] = rng.integers(0, 256)
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        try:
            GGUFFiles(tmp_path / "damaged.gguf").close()
        except CheckpointError as error:
            failed += 1
            assert "\n" not in str(error)
    assert failed > 30


@pytest.mark.parametrize(
    "content, message",
    [
        (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0), "tensors and 0 keys in its header"),
        (struct.pack("<4sIQQ", b"GGUF", 9, 0, 0), "version 9"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 62), "a string of"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 8, 1 << 40), "does not fit"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 4, 1 << 40), "the array of 1099511627776 numbers"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 9, 4), "unsupported array type 9"),
    ],
)
def test_huge_counts_allocate_nothing(content, message, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        mtpjax.load(tmp_path / "bad.gguf")


def test_a_named_pipe_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        mtpjax.load(tmp_path / "pipe.gguf")


def test_other_tokenizers_are_rejected():
    with pytest.raises(TokenizerError, match="'llama'"):
        tokenizer_files({"tokenizer.ggml.model": "llama"})
    broken = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.merges": []}
    with pytest.raises(TokenizerError, match="1 duplicate token"):
        tokenizer_files(broken)


def test_without_the_package_the_error_names_the_extra(tmp_path, monkeypatch):
    write_gguf(tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install -e '\.\[gguf\]'"):
        mtpjax.load(tmp_path / "model.gguf")


def parsed_llama(**metadata):
    """Parses a header of a llama with further metadata."""
    names = {
        "embedding_length": D,
        "block_count": 1,
        "feed_forward_length": F,
        "context_length": 64,
        "attention.head_count": HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
    } | metadata
    values = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in names.items()}
    tensor = GGUFTensor("token_embd.weight", (V, D), 0, 0, 0)
    return parse_config(describe_config(GGUFHeader(values, {tensor.name: tensor}), {})).model


def test_a_factor_without_a_type_is_linear_scaling():
    """As llama.cpp reads it."""
    assert parsed_llama(**{"rope.scaling.factor": 4.0}).rope_scaling == LinearScaling(factor=4.0)
    assert parsed_llama(**{"rope.scale_linear": 4.0}).rope_scaling == LinearScaling(factor=4.0)
    assert parsed_llama(**{"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}).rope_scaling.factor == 2.0
    assert parsed_llama(**{"rope.scaling.type": "none", "rope.scaling.factor": 4.0}).rope_scaling is None
    assert parsed_llama(**{"rope.scaling.factor": 1.0}).rope_scaling is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("attention.scale", 0.5), ("attention.clamp_kqv", 8.0), ("logit_scale", 0.1), ("residual_scale", 0.2)),
        *(("embedding_scale", 12.0), ("attention.sliding_window", 32), ("final_logit_softcapping", 30.0)),
        *(("attention.causal", False), ("rope.scaling.type", "longrope")),
    ],
)
def test_metadata_that_would_change_every_logit_is_refused(key, value):
    with pytest.raises(ConfigError, match=value if isinstance(value, str) else f"is {value!r}; supported"):
        parsed_llama(**{key: value})
