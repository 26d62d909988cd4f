"""Maps a Hugging Face checkpoint's tensors to the model's parameters.

`param_specs` lists every parameter with the tensor slices from which it is assembled. Loading, export and `inspect` use
this table.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator

from conversion.attention_names import ATTENTION_NAMES
from conversion.families import Layout
from conversion.feed_forward_names import dense_names, expert_names
from conversion.tensor_slice import ParamSpec, copied, linear, prefixed
from mtpjax.errors import CheckpointFileError
from mtpjax.models.attention_kinds import ATTENTION_KINDS
from mtpjax.models.config import LayerKind, ModelConfig

HEADS = ("lm_head.weight", "language_model.lm_head.weight")
TRUNK_PREFIXES = ("model.", "model.language_model.", "language_model.model.")  # for embedding, layers and final norm
# MiMo's and MiMo-V2's names for the module list, and for a module's projection and input norms.
MIMO = {
    "mimo": ("mtp_layers", "input_proj", "token_layernorm", "hidden_layernorm"),
    "mimo_v2": ("mtp.layers", "eh_proj", "enorm", "hnorm"),
}

# The tensors around a module's decoder layer.
AROUND_LAYER = ("project", "norm_embedding", "norm_hidden", "norm_output", "embedding", "head")

# The weights file in an export, and the prefixes of the tensors around a module's decoder layer.
EXPORT_FILE = "mtp_layer_parameters.safetensors"
EXPORTED_AROUND = (
    *("embed_tokens.", "shared_head.", "transformer.shared_head.", "final_layernorm."),
    *("enorm.", "hnorm.", "eh_proj."),
)


def param_specs(config: ModelConfig, layout: Layout, has: Callable[[str], bool]) -> dict[str, ParamSpec]:
    """Lists every parameter of a model.

    Args:
        has: shows whether experts are stored one by one or stacked.

    Returns:
        The specs by flat parameter name, such as "trunk/layer_0/attention/qkv".
    """
    D, V = config.hidden_size, config.vocab_size
    # The trunk has an embedding, a final norm, a head (unless it is the embedding), and decoder layers.
    specs = {"embedding": copied(layout.embedding, V, D)}
    specs["norm_final/scale"] = copied(f"{layout.trunk}norm.weight", D)
    if not config.tie_word_embeddings:
        specs["head"] = linear(layout.head, D, V)
    for layer, kind in enumerate(config.trunk_kinds):
        specs |= prefixed(
            f"trunk/layer_{layer}/", _decoder_layer(config, kind, f"{layout.trunk}layers.{layer}.", layout, has)
        )
    # Each MTP module has a projection of [embedding | hidden], two or three norms, and one decoder layer. It uses the
    # trunk's embedding and head, unless the checkpoint has separate ones for the modules.
    norms = ("norm_embedding", "norm_hidden", "norm_output")[: 3 if config.mtp_output_norm == "own" else 2]
    of_modules = dataclasses.replace(layout, feed_forward_norm=layout.mtp_feed_forward_norm)
    for number in range(config.num_mtp_modules):
        prefix, around = mtp_names(config, layout, number)
        module = {
            "project": linear(around["project"], 2 * D, D),
            **{f"{norm}/scale": copied(around[norm], D) for norm in norms},
            **prefixed("block/", _decoder_layer(config, config.mtp_kind, prefix, of_modules, has)),
        }
        specs |= prefixed(f"mtp_{number}/", module)
        if config.mtp_own_embedding:
            specs[f"mtp_embedding_{number}"] = copied(around["embedding"], V, D)
        if config.mtp_own_head:
            specs[f"mtp_head_{number}"] = linear(around["head"], D, V)
    return specs


def _decoder_layer(
    config: ModelConfig, kind: LayerKind, prefix: str, layout: Layout, has: Callable[[str], bool]
) -> dict[str, ParamSpec]:
    """Lists the parameters of a decoder layer.

    Args:
        prefix: prefix of the layer's tensor names, such as "model.layers.0.".
    """
    D = config.hidden_size
    specs = {
        "norm_attention/scale": copied(f"{prefix}input_layernorm.weight", D),
        "norm_feed_forward/scale": copied(f"{prefix}{layout.feed_forward_norm}.weight", D),
    }
    attention = ATTENTION_NAMES[kind.attention](config, kind, prefix, layout)
    specs |= prefixed(f"{ATTENTION_KINDS[kind.attention].scope}/", attention)
    # The feed-forward layer is a mixture of experts or one dense SwiGLU.
    if kind.is_moe:
        return specs | prefixed("experts/", expert_names(config, prefix, layout, has))
    return specs | prefixed("dense/", dense_names(config, prefix))


def mtp_names(config: ModelConfig, layout: Layout, number: int) -> tuple[str, dict[str, str]]:
    """Returns the names of an MTP module's tensors.

    Returns:
        `(prefix, around)`: the prefix of the module's decoder layer, and the names of the tensors around that layer by
        role (`AROUND_LAYER`). "embedding" and "head" are included only if the family may store copies of them.
    """
    # All modules of Qwen share one projection and its norms. mtpjax's dense models ("mtp_each") use the same names, but
    # with several modules, each layer has a projection and norms.
    if layout.is_under_mtp:
        prefix = f"{layout.modules}layers.{number}."
        shared = prefix if layout.mtp == "mtp_each" and config.num_mtp_modules > 1 else layout.modules
        norms = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"
        return prefix, _around(shared, "fc", *norms, "embed_tokens", "lm_head")
    # MiMo has a separate list of layers, with no copies of embedding or head.
    if layout.mtp in MIMO:
        layers, *names = MIMO[layout.mtp]
        prefix = f"{layout.modules}{layers}.{number}."
        return prefix, _around(prefix, *names, "final_layernorm")
    # Ernie has a separate list for each part of the module.
    if layout.mtp == "ernie":
        names = (f"mtp_{name}.{number}" for name in ("linear_proj", "emb_norm", "hidden_norm"))
        return f"{layout.modules}mtp_block.{number}.", _around(layout.modules, *names)
    # DeepSeek-V3, GLM, Kimi and Hunyuan have additional decoder layers after the trunk's layers.
    prefix = f"{layout.modules}layers.{config.num_hidden_layers + number}."
    return prefix, _around(prefix, "eh_proj", "enorm", "hnorm", layout.mtp_norm, "embed_tokens", layout.mtp_head)


def _around(prefix: str, *names: str) -> dict[str, str]:
    """Returns the names of the tensors around a module's layer by role. The last roles may be missing."""
    return {what: f"{prefix}{name}.weight" for what, name in zip(AROUND_LAYER, names, strict=False)}


def stored_layout(layout: Layout, config: ModelConfig, has: Callable[[str], bool]) -> Layout:
    """Adapts a family's layout to a checkpoint, because programs save a family under different prefixes.

    Returns:
        The layout with the trunk's prefix, the name of a tied embedding, and the location of the MTP modules.
    """
    # transformers saves Qwen3.5's text model under `model.`, but the published files have `model.language_model.`.
    trunks = (layout.trunk, *TRUNK_PREFIXES)
    trunk = next((trunk for trunk in trunks if has(f"{trunk}embed_tokens.weight") or has(f"{trunk}norm.weight")), None)
    layout = dataclasses.replace(layout, trunk=trunk or layout.trunk)
    layout = dataclasses.replace(layout, head=next(filter(has, (layout.head, *HEADS)), layout.head))
    # A tied tensor may be stored only under the head's name.
    if config.tie_word_embeddings and has(layout.head) and not has(layout.embedding):
        layout = dataclasses.replace(layout, shared_embedding=layout.head)
    # The modules' prefix may differ from the trunk's, as in `language_model.mtp.`, or `mtp.` next to `model.`.
    for root in (layout.module_root, "", *TRUNK_PREFIXES, "language_model."):
        moved = dataclasses.replace(layout, module_root=root)
        prefix, around = mtp_names(config, moved, 0)
        if has(f"{prefix}input_layernorm.weight") or has(around["project"]):
            layout = moved
            break
    # Modules that share nothing have a projection and norms in each layer.
    if layout.mtp == "mtp" and has(f"{layout.modules}layers.0.fc.weight"):
        layout = dataclasses.replace(layout, mtp="mtp_each")
    # Modules of dense models may also be additional layers, as in DeepSeek.
    if layout.mtp == "mtp_each" and has(f"{layout.trunk}layers.{config.num_hidden_layers}.input_layernorm.weight"):
        layout = dataclasses.replace(layout, mtp="layers")
    return layout


def module_prefixes(config: ModelConfig, layout: Layout) -> tuple[str, ...]:
    """Returns the prefixes of the MTP modules' tensor names. There is at least one, even without modules."""
    if layout.is_under_mtp:
        return (layout.modules,)
    if layout.mtp == "ernie":
        return (f"{layout.modules}mtp_",)
    return tuple(mtp_names(config, layout, number)[0] for number in range(max(config.num_mtp_modules, 1)))


def tied_copies(config: ModelConfig, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yields `(copy, original)` for each tensor that may be a duplicate of the trunk's embedding or head.

    Some checkpoints store a copy of embedding and head in every MTP module, and a copy of a tied embedding as the head.
    """
    embedding = layout.embedding
    head = embedding if config.tie_word_embeddings else layout.head
    if config.tie_word_embeddings and embedding != layout.head:
        yield layout.head, embedding
    for number in range(config.num_mtp_modules):
        _, around = mtp_names(config, layout, number)
        if "embedding" in around and not config.mtp_own_embedding:
            yield around["embedding"], embedding
        if "head" in around and not config.mtp_own_head:
            yield around["head"], head


def exported_name(name: str, config: ModelConfig, layout: Layout) -> str | None:
    """Returns a tensor's name in an export, or None if the tensor does not belong to a module.

    The decoder layer of module k becomes `model.layers.k`. Tensors around it become `model.X` if there is one module,
    or `model.layers.k.X` if there are several modules (which xLLM's script rejects). The tensors of Qwen, MiMo and
    Ernie keep their names under `mtp.` and `model.`.
    """
    if layout.is_under_mtp:
        return f"mtp.{name.removeprefix(layout.modules)}" if name.startswith(layout.modules) else None
    if layout.mtp in ("mimo", "mimo_v2", "ernie"):
        is_of_module = name.startswith((f"{layout.modules}mtp_", f"{layout.modules}mtp."))
        return f"model.{name.removeprefix(layout.modules)}" if is_of_module else None
    if name == "rot.weight":  # a rotation that some quantized checkpoints have
        return "model.rot.weight"
    # Modules are the decoder layers after the trunk's layers.
    found = re.fullmatch(rf"{re.escape(layout.modules)}layers\.(\d+)\.(.+)", name)
    if found is None or int(found[1]) < config.num_hidden_layers:
        return None
    if config.num_mtp_modules == 1 and found[2].startswith(EXPORTED_AROUND):
        return f"model.{found[2]}"
    return f"model.layers.{int(found[1]) - config.num_hidden_layers}.{found[2]}"


def original_name(name: str, config: ModelConfig, layout: Layout) -> str:
    """Inverts `exported_name`.

    Raises:
        CheckpointFileError: no tensor in an export has this name.
    """
    if layout.is_under_mtp:
        return re.sub(r"^(?:[\w.]+\.)?mtp\.", layout.modules, name)
    if layout.mtp != "layers":
        return layout.modules + name.removeprefix("model.")
    if name == "model.rot.weight":
        return "rot.weight"
    # If there is a single module, only the tensors of its decoder layer have a layer number.
    found = re.fullmatch(r"model\.(?:layers\.(\d+)\.)?(.+)", name)
    if found is None:
        raise CheckpointFileError(f"tensor {name} does not belong to an MTP module")
    return f"{layout.modules}layers.{config.num_hidden_layers + int(found[1] or 0)}.{found[2]}"


def shared_tensors(config: ModelConfig, layout: Layout) -> list[str]:
    """Lists the trunk's tensors (embedding and head) that Qwen exports contain in addition to the modules."""
    # Inference engines run a Qwen export as a complete model, which needs both.
    return [layout.embedding] if config.tie_word_embeddings else [layout.embedding, layout.head]
