"""Places experts on devices according to how many tokens are routed to each, with copies of the busiest experts.

If experts are split over devices, a layer is as slow as its busiest device. Routers send a large share of the tokens to
a few experts. Copying these experts and mixing busy with idle experts on each device balances the load, as in
DeepSeek's expert-parallel load balancer ("EPLB"). Results do not change, because a copy has the same weights as its
expert. Placements apply only to decoding. `mtpjax.models.expert_counts` counts the tokens, and
`mtpjax.models.expert_moves` changes a placement on the devices.
"""

import dataclasses
import heapq
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.messages import require
from mtpjax.models.parallel import axes_that_divide

STACKS = ("gate_up", "gate_up_bias", "down", "down_bias")  # parameters whose first axis is experts


@dataclasses.dataclass(frozen=True)
class Placement:
    """The placement of one layer's experts on devices.

    Attributes:
        expert_of_slot: `[S]` int32, the expert in each slot; each device has S / devices consecutive slots.
        loads: `[devices]` float, the measured share of the tokens that each device processes.
    """

    expert_of_slot: np.ndarray
    loads: np.ndarray

    @classmethod
    def measured(cls, expert_of_slot: np.ndarray, counts: np.ndarray, num_devices: int) -> "Placement":
        """Makes a placement and computes its device loads. An expert's tokens are divided equally among its copies.

        Args:
            expert_of_slot: `[S]` int32.
            counts: `[E]` tokens that chose each expert.
            num_devices: devices over which the slots are split.
        """
        counts = np.asarray(counts, float)
        share = counts / np.bincount(expert_of_slot, minlength=len(counts))
        loads = share[expert_of_slot].reshape(num_devices, -1).sum(axis=1)
        return cls(expert_of_slot, loads / max(counts.sum(), 1))

    @property
    def imbalance(self) -> float:
        """Load of the busiest device divided by the mean load; 1 is perfectly balanced."""
        return float(self.loads.max() / self.loads.mean()) if self.loads.sum() else 1.0


def num_expert_slots(params: dict) -> int | None:
    """Returns the number of expert slots per layer, copies included; None for a model without experts."""
    trunk = params.get("trunk")
    layers = trunk.values() if isinstance(trunk, Mapping) else ()
    stacks = (layer["experts"].get("down") for layer in layers if isinstance(layer, Mapping) and "experts" in layer)
    return next((stack.shape[0] for stack in stacks if stack is not None), None)


def num_expert_devices(params: dict, sizes: Mapping[str, int]) -> int:
    """Returns the number of devices over which decoding splits the experts on a mesh; 1 if it does not split them."""
    parts = lambda axis: sizes.get(axis, 1)
    return math.prod(map(parts, axes_that_divide(num_expert_slots(params) or 1, parts)))


def place_experts(counts: np.ndarray, num_devices: int, num_slots: int | None = None) -> Placement:
    """Places one layer's experts.

    First, each extra slot is given to the expert with the most tokens per copy. Then slots are assigned to devices in
    order of decreasing load, each to the least loaded device that has a free slot.

    Args:
        counts: `[E]` tokens that chose each expert.
        num_devices: number of devices over which the experts are split, `data x expert` of the mesh.
        num_slots: total slots, a multiple of the number of devices; None: E, rounded up to such a multiple.

    Raises:
        ValueError: there are fewer slots than experts, or the number of devices does not divide the slots.

    Example:
        >>> import numpy as np
        >>> from mtpjax.models.expert_placement import place_experts
        >>> placement = place_experts(np.array([70, 10, 10, 10]), num_devices=2, num_slots=6)
        >>> sorted(placement.expert_of_slot.tolist())
        [0, 0, 0, 1, 2, 3]
    """
    counts = np.asarray(counts, float)
    num_experts = len(counts)
    num_slots = -(-num_experts // num_devices) * num_devices if num_slots is None else num_slots
    if num_slots < num_experts or num_slots % num_devices:
        raise ValueError(
            f"num_slots must be at least {num_experts} and a multiple of the {num_devices} devices, got {num_slots}"
        )
    # 1. Copies.
    copies = np.ones(num_experts, int)
    for _ in range(num_slots - num_experts):
        copies[np.argmax(counts / copies)] += 1
    slots = np.repeat(np.arange(num_experts), copies)
    slot_loads = (counts / copies)[slots]
    # 2. Devices.
    members: list[list[int]] = [[] for _ in range(num_devices)]
    free = [(0.0, device) for device in range(num_devices)]  # a heap of (load, index) of devices with a free slot
    for slot in np.argsort(-slot_loads, kind="stable").tolist():
        load, device = heapq.heappop(free)
        members[device].append(int(slots[slot]))
        if len(members[device]) < num_slots // num_devices:
            heapq.heappush(free, (load + float(slot_loads[slot]), device))
    return Placement.measured(np.array(members, np.int32).ravel(), counts, num_devices)


def apply_placement(params: dict, placements: dict[str, Placement]) -> dict:
    """Applies placements to a model's experts.

    Args:
        placements: placements keyed by trunk layer name, such as "layer_3". All layers must have the same number of
            slots, so layers without a placement and the MTP modules get copies of their first experts.

    Returns:
        The parameters, for decoding with the same model.

    Raises:
        ValueError: there are no placements, their numbers of slots differ, or a layer has no experts.
    """
    counts = {len(placement.expert_of_slot) for placement in placements.values()}
    require(len(counts) == 1, f"placements must all have the same number of slots, got {sorted(counts)}")
    [num_slots] = counts
    trunk = dict(params["trunk"])
    for name in placements:
        require("experts" in trunk.get(name, {}), f"{name} is not a trunk layer with experts")

    def place(layer: dict[str, Any], placement: Placement | None) -> dict[str, Any]:
        slots = np.arange(num_slots, dtype=np.int32) % layer["experts"]["router"].shape[-1]
        return {**layer, "experts": _with_slots(layer["experts"], placement.expert_of_slot if placement else slots)}

    for name, layer in trunk.items():
        if "experts" in layer:
            trunk[name] = place(layer, placements.get(name))
    modules = {}
    for name, module in params.items():
        if isinstance(module, dict) and "experts" in module.get("block", {}):
            modules[name] = {**module, "block": place(module["block"], None)}
    return {**params, "trunk": trunk, **modules}


def place_all_layers(
    params: dict, *, num_devices: int, num_redundant: int = 0, counts: dict[str, np.ndarray] | None = None
) -> dict:
    """Places the experts of every layer of the trunk, with the same number of copies in each.

    Args:
        num_devices: number of devices over which the experts are split, `data x expert` of the mesh.
        num_redundant: number of additional slots per layer, for copies.
        counts: result of `count_expert_tokens`. In layers without counts, all experts are assumed to be used equally.
            None: no layer has counts.

    Returns:
        The parameters, for decoding with the same model.

    Raises:
        ValueError: the model has no routed experts, the number of devices does not divide the slots, or the counts are
            for a different number of experts.
    """
    placements = {}
    for name, layer in params["trunk"].items():
        if "experts" in layer:
            num_experts = layer["experts"]["router"].shape[-1]
            chosen = (counts or {}).get(name, np.ones(num_experts))
            if np.shape(chosen) != (num_experts,):
                raise ValueError(f"{name} has {num_experts} experts, but its counts have shape {np.shape(chosen)}")
            placements[name] = place_experts(chosen, num_devices, num_experts + num_redundant)
    require(bool(placements), "the model has no routed experts")
    return apply_placement(params, placements)


def _with_slots(experts: dict[str, Any], expert_of_slot: np.ndarray) -> dict[str, Any]:
    """Copies a layer's experts into these slots, and adds the tables that `choose_slots` reads."""
    # In fp8 weights, experts are the first axis of both values and scales.
    taken = {name: jax.tree.map(lambda leaf: leaf[expert_of_slot], experts[name]) for name in STACKS if name in experts}
    tables = placement_tables(expert_of_slot, experts["router"].shape[-1])
    return {**experts, **taken, "placement": jax.tree.map(jnp.asarray, tables)}


def placement_tables(expert_of_slot: np.ndarray, num_experts: int) -> dict[str, np.ndarray]:
    """Makes the tables of a placement, which are stored as "placement" in a layer's parameters.

    Their shapes depend only on the numbers of slots S and experts E, so one compiled program works for every placement.

    Args:
        expert_of_slot: `[S]` the expert in each slot.
        num_experts: E.

    Returns:
        int32 arrays: `expert_of_slot [S]`, `slots_of_expert [E, S - E + 1]`, in which each expert's slots repeat to
        fill its row, and `num_slots [E]`, the number of slots per expert.

    Raises:
        ValueError: an expert has no slot.
    """
    slots = [np.flatnonzero(expert_of_slot == expert) for expert in range(num_experts)]
    require(all(map(len, slots)), "a placement must have a slot for every expert")
    max_copies = len(expert_of_slot) - num_experts + 1
    return {
        "expert_of_slot": np.asarray(expert_of_slot, np.int32),
        "slots_of_expert": np.array([np.resize(found, max_copies) for found in slots], np.int32),
        "num_slots": np.array([len(found) for found in slots], np.int32),
    }
