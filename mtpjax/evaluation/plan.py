"""Computes the memory that a model needs on a mesh of GPUs, for `mtpjax plan`.

The bytes of weights, caches and state are computed exactly, from the shapes of the decoding call's arguments and their
sharding. Temporary memory is an estimate; `mtpjax.evaluation.compiled_call` compiles the call to get the exact size.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import jax

from mtpjax.decoding.capacity import choose_prefill_chunk
from mtpjax.evaluation.compiled_call import bytes_of_shards, call_shapes
from mtpjax.evaluation.roofline import Device, check_numbers
from mtpjax.models.config import ModelConfig
from mtpjax.models.decoding_layout import find_copies
from mtpjax.models.layers.latent_attention import is_expanded_cheaper
from pallas_kernels.block_scaled_matmul import MAX_ROWS

USABLE_SHARE = 0.9  # usable share of a GPU's memory; the rest is for the driver, the allocator and collectives


@dataclasses.dataclass(frozen=True)
class Temp:
    """Estimated temporary memory while one kind of layer runs in a prefill pass.

    Attributes:
        name: "experts", "matrices", "attention" or "indexer".
        nbytes: bytes per device.
        bytes_per_slot: additional bytes for one more slot per row.
    """

    name: str
    nbytes: float
    bytes_per_slot: float = 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """The memory that a model needs on one mesh.

    Attributes:
        mesh: sizes of the mesh axes.
        rows: rows in the batch, padded to a multiple of `data`.
        slots: cache slots per row.
        weights: bytes of parameters per device.
        state: bytes of decoding state per device, including the caches.
        temps: estimated temporary memory for each kind of layer. The largest one counts, not the sum.
        bytes_per_row: additional bytes of state per device for one more row per device.
        bytes_per_slot: additional bytes of state per device for one more slot per row.
        prefill_chunk: tokens per row in a prefill pass.
    """

    mesh: dict[str, int]
    rows: int
    slots: int
    weights: int
    state: int
    temps: tuple[Temp, ...]
    bytes_per_row: float
    bytes_per_slot: float
    prefill_chunk: int

    @property
    def temp(self) -> int:
        """Estimated bytes of temporary memory per device, for the kind of layer that needs the most."""
        return round(max(temp.nbytes for temp in self.temps))

    @property
    def arguments(self) -> int:
        """Bytes of weights and state per device."""
        return self.weights + self.state

    @property
    def total(self) -> int:
        """Bytes per device, including the estimated temporary memory."""
        return self.arguments + self.temp

    def free(self, device: Device) -> float:
        """Returns how many bytes of a device's usable memory remain free."""
        return USABLE_SHARE * device.memory - self.total

    def largest_batch(self, device: Device) -> int:
        """Returns how many rows fit with this number of slots; temporary memory grows with the rows."""
        data = self.mesh.get("data", 1)
        per_row = self.bytes_per_row + self.temp * data / self.rows
        return max(0, self.rows // data + math.floor(self.free(device) / per_row)) * data

    def largest_slots(self, device: Device) -> int:
        """Returns how many cache slots per row fit with this number of rows."""
        usable = USABLE_SHARE * device.memory - self.arguments
        more = min((usable - temp.nbytes) / max(self.bytes_per_slot + temp.bytes_per_slot, 1) for temp in self.temps)
        return max(0, self.slots + math.floor(more))


def list_meshes(count: int) -> list[dict[str, int]]:
    """Lists the `data x tensor` meshes with `count` GPUs, largest `tensor` first.

    The axis `data` shards both experts and rows.
    """
    return [{"data": count // tensor, "tensor": tensor} for tensor in range(count, 0, -1) if count % tensor == 0]


def plan_layout(
    config: ModelConfig,
    params: dict,
    sizes: Mapping[str, int],
    *,
    rows: int,
    slots: int,
    num_steps: int,
    prefill_chunk: int | None = None,
) -> Plan:
    """Computes the memory that a decoding call needs on a mesh.

    Raises:
        ValueError: a number is out of range, there are draft levels but no MTP modules, or the mesh does not divide
            the model.
    """
    # 1. Check that the numbers are in range and that the mesh divides the model.
    check_numbers(config, num_steps, {"batch": (rows, 1), "context": (slots, 2), "num_steps": (num_steps, 0)})
    for problem in find_copies(config, sizes):
        raise ValueError(problem)
    data = sizes.get("data", 1)
    rows = -(-rows // data) * data
    # 2. Get the shapes of the state at this size, with one more row per device, and with 128 more slots per row.
    fitted, params, state = call_shapes(config, params, sizes, rows=rows, slots=slots, num_steps=num_steps)
    _, _, more_rows = call_shapes(config, {}, sizes, rows=rows + data, slots=slots, num_steps=num_steps)
    _, _, more_slots = call_shapes(config, {}, sizes, rows=rows, slots=slots + 128, num_steps=num_steps)
    # 3. Count the bytes on one device. The differences between the states are the bytes per row and per slot.
    weights, *states = (
        round(sum(nbytes for _, _, nbytes in bytes_of_shards(tree, fitted, sizes, is_state=tree is not params)))
        for tree in (params, state, more_rows, more_slots)
    )
    if prefill_chunk is None:
        prefill_chunk = choose_prefill_chunk(
            fitted, rows, "cuda", implementation="triton", longest_prompt=slots // 2, max_length=slots
        )
    return Plan(
        mesh=dict(sizes),
        rows=rows,
        slots=slots,
        weights=weights,
        state=states[0],
        temps=tuple(estimate_temps(fitted, params, sizes, rows=rows, slots=slots, prefill_chunk=prefill_chunk)),
        bytes_per_row=states[1] - states[0],
        bytes_per_slot=(states[2] - states[0]) / 128,
        prefill_chunk=prefill_chunk,
    )


def estimate_temps(
    config: ModelConfig, params: dict, sizes: Mapping[str, int], *, rows: int, slots: int, prefill_chunk: int
) -> Iterator[Temp]:
    """Estimates, for each kind of layer, the temporary memory of a decoding call that uses kernels.

    The estimate is the sum of the largest arrays in a prefill pass, in bfloat16.
    """
    tensor, data = sizes.get("tensor", 1), sizes.get("data", 1)
    local_rows, width = rows // data, config.hidden_size
    tokens = local_rows * prefill_chunk
    # Every layer keeps the residual stream, its input and its output.
    shared = 2.0 * 3 * tokens * width
    # For linear attention, XLA keeps the inputs of all convolutions until the end of the pass.
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    channels += config.linear_num_value_heads * config.linear_value_head_dim
    inputs = local_rows * (prefill_chunk + config.linear_conv_kernel_dim - 1) * channels / tensor
    shared += 2 * inputs * sum(kind.attention == "delta" for kind in config.trunk_kinds)
    # 1. Experts process the rows of all `data` devices. The outputs of each token's experts are in memory first with
    # the experts' activations, and then with the sums of the outputs.
    if config.is_moe:
        all_tokens = rows * prefill_chunk
        chosen = all_tokens * config.num_experts_per_tok
        activations = chosen * config.moe_intermediate_size / tensor
        yield Temp("experts", shared + 2 * chosen * width + 2 * max(activations, all_tokens * width))
    # 2. In passes over many tokens, XLA stores fp8 matrices as bfloat16. Dense layers have the widest product.
    written = 0.0
    if tokens > MAX_ROWS:
        for (name, _, nbytes), leaf in zip(
            bytes_of_shards(params, config, sizes), jax.tree.leaves(params), strict=True
        ):
            if leaf.dtype.itemsize == 1 and "/experts/" not in name:
                written = max(written, 2 * nbytes)
    is_dense = any(not kind.is_moe for kind in config.trunk_kinds)
    product = tokens * 2 * config.intermediate_size / tensor if is_dense else 0
    yield Temp("matrices", shared + written + 2 * product)
    # 3. Expanded latent attention stores queries, and keys and values for every slot, with part of the keys twice.
    if config.attention == "latent" and is_expanded_cheaper(config, prefill_chunk):
        local_heads = config.num_attention_heads / tensor
        content, value = config.qk_nope_head_dim, config.v_head_dim
        key = content + config.qk_rope_head_dim
        per_slot = 2 * local_rows * local_heads * (key + content + value)
        yield Temp("attention", shared + slots * per_slot + 2 * tokens * local_heads * (2 * key + value), per_slot)
    # 4. A sparse indexer stores float32 products for every head, token and slot, and their transpose.
    if config.index_topk and slots > config.index_topk:
        per_slot = 2 * 4 * tokens * config.index_n_heads
        yield Temp("indexer", shared + slots * per_slot, per_slot)
