"""Names of tensors: which tensors of a Hugging Face checkpoint hold which parameters of the model.

`param_specs` lists every parameter with the tensor slices that it is assembled from. Loading, export and `inspect` all
use this one table.
"""

import dataclasses
from collections.abc import Callable, Iterator

from conversion.families import Layout
from conversion.layer_names import decoder_layer
from conversion.tensor_slice import ParamSpec, copied, linear, prefixed
from mtpjax.models.config import ModelConfig

HEADS = ("lm_head.weight", "language_model.lm_head.weight")
TRUNK_PREFIXES = ("model.", "model.language_model.", "language_model.model.")  # of embedding, layers and final norm
# MiMo's and MiMo-V2's list of modules, and the names of a module's projection and of its input norms.
MIMO = {
    "mimo": ("mtp_layers", "input_proj", "token_layernorm", "hidden_layernorm"),
    "mimo_v2": ("mtp.layers", "eh_proj", "enorm", "hnorm"),
}

# The tensors around the decoder layer of a module.
AROUND_LAYER = ("project", "norm_embedding", "norm_hidden", "norm_output", "embedding", "head")


def param_specs(config: ModelConfig, layout: Layout, has: Callable[[str], bool]) -> dict[str, ParamSpec]:
    """Lists every parameter of a model.

    Args:
        has: returns whether the checkpoint contains a tensor of this name. Experts are stored one by one or stacked,
            and this decides which.

    Returns:
        The specs by flat parameter name, such as "trunk/layer_0/attention/qkv".
    """
    D, V = config.hidden_size, config.vocab_size
    # The trunk: embedding, final norm, head (unless it is the embedding), and the decoder layers.
    specs = {"embedding": copied(layout.embedding, V, D)}
    specs["norm_final/scale"] = copied(f"{layout.trunk}norm.weight", D)
    if not config.tie_word_embeddings:
        specs["head"] = linear(layout.head, D, V)
    for layer, kind in enumerate(config.trunk_kinds):
        specs |= prefixed(
            f"trunk/layer_{layer}/", decoder_layer(config, kind, f"{layout.trunk}layers.{layer}.", layout, has)
        )
    # The MTP modules: a projection of [embedding | hidden], two or three norms, and one decoder layer each. Embedding
    # and head are the trunk's, unless the checkpoint has separate ones for the modules.
    norms = ("norm_embedding", "norm_hidden", "norm_output")[: 3 if config.mtp_output_norm == "own" else 2]
    of_modules = dataclasses.replace(layout, feed_forward_norm=layout.mtp_feed_forward_norm)
    for number in range(config.num_mtp_modules):
        prefix, around = mtp_names(config, layout, number)
        module = {
            "project": linear(around["project"], 2 * D, D),
            **{f"{norm}/scale": copied(around[norm], D) for norm in norms},
            **prefixed("block/", decoder_layer(config, config.mtp_kind, prefix, of_modules, has)),
        }
        specs |= prefixed(f"mtp_{number}/", module)
        if config.mtp_own_embedding:
            specs[f"mtp_embedding_{number}"] = copied(around["embedding"], V, D)
        if config.mtp_own_head:
            specs[f"mtp_head_{number}"] = linear(around["head"], D, V)
    return specs


def mtp_names(config: ModelConfig, layout: Layout, number: int) -> tuple[str, dict[str, str]]:
    """Names the tensors of an MTP module.

    Returns:
        `(prefix, around)`: the prefix of the module's decoder layer, and the names of the tensors around that layer by
        what they are (`AROUND_LAYER`); "embedding" and "head" where the family may repeat them.
    """
    # Qwen: modules share the projection and the norms, if there are several. Dense models of mtpjax ("mtp_each") have
    # the same names, and repeat these tensors in the layer of each module if there are several.
    if layout.is_under_mtp:
        prefix = f"{layout.modules}layers.{number}."
        shared = prefix if layout.mtp == "mtp_each" and config.num_mtp_modules > 1 else layout.modules
        norms = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"
        return prefix, _around(shared, "fc", *norms, "embed_tokens", "lm_head")
    # MiMo: a separate list of layers, which never repeats embedding and head.
    if layout.mtp in MIMO:
        layers, *names = MIMO[layout.mtp]
        prefix = f"{layout.modules}{layers}.{number}."
        return prefix, _around(prefix, *names, "final_layernorm")
    # Ernie: a list per part of the module.
    if layout.mtp == "ernie":
        names = (f"mtp_{name}.{number}" for name in ("linear_proj", "emb_norm", "hidden_norm"))
        return f"{layout.modules}mtp_block.{number}.", _around(layout.modules, *names)
    # DeepSeek-V3, GLM, Kimi and Hunyuan: further decoder layers after the trunk's.
    prefix = f"{layout.modules}layers.{config.num_hidden_layers + number}."
    return prefix, _around(prefix, "eh_proj", "enorm", "hnorm", layout.mtp_norm, "embed_tokens", layout.mtp_head)


def _around(prefix: str, *names: str) -> dict[str, str]:
    """Names the tensors around a module's layer by what they are; the last ones may be missing."""
    return {what: f"{prefix}{name}.weight" for what, name in zip(AROUND_LAYER, names, strict=False)}


def stored_layout(layout: Layout, config: ModelConfig, has: Callable[[str], bool]) -> Layout:
    """Adapts a family's layout to a checkpoint, because programs save the same family under several prefixes.

    Returns:
        The layout with the prefix of the trunk that the checkpoint has, the tensor of a tied embedding, and the place
        of its MTP modules.
    """
    # transformers saves the text model of Qwen3.5 as `model.`; the published files have `model.language_model.`.
    trunks = (layout.trunk, *TRUNK_PREFIXES)
    trunk = next((trunk for trunk in trunks if has(f"{trunk}embed_tokens.weight") or has(f"{trunk}norm.weight")), None)
    layout = dataclasses.replace(layout, trunk=trunk or layout.trunk)
    layout = dataclasses.replace(layout, head=next(filter(has, (layout.head, *HEADS)), layout.head))
    # A tied tensor that is stored once may have the name of the head.
    if config.tie_word_embeddings and has(layout.head) and not has(layout.embedding):
        layout = dataclasses.replace(layout, shared_embedding=layout.head)
    # The modules may have another prefix than the trunk: `language_model.mtp.`, or `mtp.` beside `model.`.
    for root in (layout.module_root, "", *TRUNK_PREFIXES, "language_model."):
        moved = dataclasses.replace(layout, module_root=root)
        prefix, around = mtp_names(config, moved, 0)
        if has(f"{prefix}input_layernorm.weight") or has(around["project"]):
            layout = moved
            break
    # Several modules that share nothing repeat the projection and the norms in the layer of each.
    if layout.mtp == "mtp" and has(f"{layout.modules}layers.0.fc.weight"):
        layout = dataclasses.replace(layout, mtp="mtp_each")
    # Modules of dense models may also be further layers, as DeepSeek's are.
    if layout.mtp == "mtp_each" and has(f"{layout.trunk}layers.{config.num_hidden_layers}.input_layernorm.weight"):
        layout = dataclasses.replace(layout, mtp="layers")
    return layout


def module_prefixes(config: ModelConfig, layout: Layout) -> tuple[str, ...]:
    """Lists the prefixes of the tensor names of MTP modules.

    Returns:
        The prefixes; at least one, even without modules.
    """
    if layout.is_under_mtp:
        return (layout.modules,)
    if layout.mtp == "ernie":
        return (f"{layout.modules}mtp_",)
    return tuple(mtp_names(config, layout, number)[0] for number in range(max(config.num_mtp_modules, 1)))


def tied_copies(config: ModelConfig, layout: Layout) -> Iterator[tuple[str, str]]:
    """Lists tensors that may repeat the trunk's embedding or head.

    Some checkpoints store a copy of both in every MTP module, and a copy of a tied embedding as the head.
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
