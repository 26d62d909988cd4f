"""One MTP module of GLM-4.7-Flash, Hunyuan-3 or Ernie-4.5 in plain NumPy, by the names and keys of the files."""

import numpy as np

# Names of the tensors around a module's layer, which begins with `prefix`.
NAMES = {
    "glm4_moe_lite": {"prefix": "model.layers.{L}.", "embedding": "enorm", "hidden": "hnorm", "project": "eh_proj"},
    "hy_v3": {"prefix": "model.layers.{L}.", "embedding": "enorm", "hidden": "hnorm", "project": "eh_proj"},
    "ernie4_5_moe": {
        "prefix": "model.mtp_block.0.",
        "embedding": "model.mtp_emb_norm.0",
        "hidden": "model.mtp_hidden_norm.0",
        "project": "model.mtp_linear_proj.0",
    },
}
# Of the module, or the trunk's.
OUTPUT_NORM = {"glm4_moe_lite": "shared_head.norm", "hy_v3": "final_layernorm", "ernie4_5_moe": "model.norm"}


def run_module(
    tensors: dict, config: dict, hidden: np.ndarray, tokens: np.ndarray, *, as_engines: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Runs the first module over a prompt: `hidden [T, D]`, the tokens after them `[T]` to outputs and logits.

    `as_engines`: no norm before the head, and no embedding at position 0, as SGLang and vLLM run Ernie's module.
    """
    kind, eps = config["model_type"], config["rms_norm_eps"]
    names = NAMES[kind]
    prefix = names["prefix"].format(L=config["num_hidden_layers"])

    def weight(name: str) -> np.ndarray:
        return tensors[f"{name if name.startswith('model.') else prefix + name}.weight"]

    # The input: [norm(embedding of the next token) | norm(hidden state)], projected.
    embedded = tensors["model.embed_tokens.weight"][tokens]
    if as_engines:
        embedded[0] = 0
    pair = [_norm(embedded, weight(names["embedding"]), eps), _norm(hidden, weight(names["hidden"]), eps)]
    x = np.concatenate(pair, axis=-1) @ weight(names["project"]).T
    # One decoder layer: latent attention (GLM) or grouped-query attention; experts, or one dense layer (Ernie).
    attention = _latent_attention if kind == "glm4_moe_lite" else _grouped_attention
    x = x + attention(weight, config, _norm(x, weight("input_layernorm"), eps))
    y = _norm(x, weight("post_attention_layernorm"), eps)
    if kind == "ernie4_5_moe":
        x = x + _swiglu(weight, "mlp", y)
    else:
        x = x + _experts(weight, tensors, prefix, config, y)
    if not as_engines:
        x = _norm(x, weight(OUTPUT_NORM[kind]), eps)
    head = tensors["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return x, x @ head.T


def _norm(x, scale, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * scale


def _rotate(x, theta, interleaved):
    """Rotates `[T, heads, H]` by position: pairs (2j, 2j+1), or halves."""
    T, _, H = x.shape
    angles = np.arange(T)[:, None, None] * theta ** (-2 * np.arange(H // 2) / H)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., : H // 2], x[..., H // 2 :])
    turned = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)
    return np.stack(turned, axis=-1).reshape(x.shape) if interleaved else np.concatenate(turned, axis=-1)


def _attend(q, k, v):
    """Causal attention of `[T, heads, H]`, one key head per query head."""
    T, _, H = q.shape
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(H)
    scores = np.where(np.tril(np.ones((T, T), bool))[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, v).reshape(T, -1)


def _grouped_attention(weight, config, x):
    T, theta = len(x), config["rope_parameters"]["rope_theta"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    q, k, v = ((x @ weight(f"self_attn.{name}_proj").T).reshape(T, heads[name], -1) for name in heads)
    if config["model_type"] == "hy_v3":
        q, k = (
            _norm(each, weight(f"self_attn.{name}_norm"), config["rms_norm_eps"])
            for name, each in zip("qk", (q, k), strict=True)
        )
    q, k = (_rotate(each, theta, config["model_type"] == "ernie4_5_moe") for each in (q, k))
    group = heads["q"] // heads["k"]
    return _attend(q, np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)) @ weight("self_attn.o_proj").T


def _latent_attention(weight, config, x):
    T, N, theta = len(x), config["num_attention_heads"], config["rope_parameters"]["rope_theta"]
    C, R = config["qk_nope_head_dim"], config["kv_lora_rank"]
    q = _norm(x @ weight("self_attn.q_a_proj").T, weight("self_attn.q_a_layernorm"), 1e-6)
    q = (q @ weight("self_attn.q_b_proj").T).reshape(T, N, -1)
    down = x @ weight("self_attn.kv_a_proj_with_mqa").T
    up = _norm(down[:, :R], weight("self_attn.kv_a_layernorm"), 1e-6) @ weight("self_attn.kv_b_proj").T
    up = up.reshape(T, N, -1)
    # All heads share the rotated part of the key.
    shared = np.repeat(_rotate(down[:, None, R:], theta, True), N, axis=1)
    q = np.concatenate([q[..., :C], _rotate(q[..., C:], theta, True)], axis=-1)
    return _attend(q, np.concatenate([up[..., :C], shared], axis=-1), up[..., C:]) @ weight("self_attn.o_proj").T


def _swiglu(weight, name, x):
    gate = x @ weight(f"{name}.gate_proj").T
    return (gate / (1 + np.exp(-gate)) * (x @ weight(f"{name}.up_proj").T)) @ weight(f"{name}.down_proj").T


def _experts(weight, tensors, prefix, config, x):
    """Sigmoid scores; score plus bias chooses, the score weighs: normalised, times the scaling factor."""
    if config["model_type"] == "hy_v3":
        router, bias, shared, factor = "mlp.router.gate", "mlp.expert_bias", "mlp.shared_mlp", "router_scaling_factor"
    else:
        router, bias, shared = "mlp.gate", "mlp.gate.e_score_correction_bias", "mlp.shared_experts"
        factor = "routed_scaling_factor"
    scores = 1 / (1 + np.exp(-(x @ weight(router).T)))
    chosen = np.argsort(-(scores + tensors[prefix + bias]), axis=-1)[:, : config["num_experts_per_tok"]]
    output = _swiglu(weight, shared, x)
    for token, experts in enumerate(chosen):
        weights = scores[token, experts] / scores[token, experts].sum() * config[factor]
        for expert, scale in zip(experts, weights, strict=True):
            output[token] += scale * _swiglu(weight, f"mlp.experts.{expert}", x[token])
    return output
