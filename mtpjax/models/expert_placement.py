"""Places the experts of a mixture on devices by how often tokens choose them, with copies of the busiest.

Where experts are split over devices, a layer takes as long as its busiest device. Routers are uneven: a few experts get
a large share of the tokens. Copies of these and a placement that mixes frequent with rare experts balance the devices,
as in DeepSeek's expert-parallel load balancer ("EPLB"). Results do not change, because a copy has its expert's weights.
A placement is for decoding only. `mtpjax.models.expert_counts` counts the tokens, and `mtpjax.models.expert_moves`
changes a placement on the devices.
"""

import dataclasses
import heapq
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.models.expert_placement import num_expert_slots
from mtpjax.models.parallel import axes_that_divide

STACKS = ("gate_up", "gate_up_bias", "down", "down_bias")  # parameters with a first axis of experts


@dataclasses.dataclass(frozen=True)
class Placement:
    """The experts of one layer on a number of devices.

    Attributes:
        expert_of_slot: `[S]` int32, the expert in each slot; a device has S / devices neighbouring slots.
        loads: `[devices]` float, the measured share of the tokens that each device processes.
    """

    expert_of_slot: np.ndarray
    loads: np.ndarray

    @classmethod
    def measured(cls, expert_of_slot: np.ndarray, counts: np.ndarray, num_devices: int) -> "Placement":
        """Computes the loads of devices from counts; the copies of an expert share its tokens equally.

        Args:
            expert_of_slot: `[S]` int32.
            counts: `[E]` tokens that chose each expert.
            num_devices: devices that share the slots.
        """
        counts = np.asarray(counts, float)
        share = counts / np.bincount(expert_of_slot, minlength=len(counts))
        loads = share[expert_of_slot].reshape(num_devices, -1).sum(axis=1)
        return cls(expert_of_slot, loads / max(counts.sum(), 1))

    @property
    def imbalance(self) -> float:
        """Load of the busiest device over the mean; 1 is even."""
        return float(self.loads.max() / self.loads.mean()) if self.loads.sum() else 1.0


def num_expert_devices(params: dict, sizes: Mapping[str, int]) -> int:
    """Returns the number of devices over which a mesh shards the experts in decoding; 1 if it does not."""
    parts = lambda axis: sizes.get(axis, 1)
    return math.prod(map(parts, axes_that_divide(num_expert_slots(params) or 1, parts)))


def place_experts(counts: np.ndarray, num_devices: int, num_slots: int | None = None) -> Placement:
    """Places the experts of a layer.

    First, each extra slot goes to the expert whose copies have the most tokens each. Then slots are assigned in order
    of decreasing load, each to the least loaded device with a free slot.

    Args:
        counts: `[E]` tokens that chose each expert.
        num_devices: devices over which experts are split: `data x expert` of the mesh.
        num_slots: slots of all devices together, a multiple of their number; None: E, rounded up.

    Raises:
        ValueError: there are fewer slots than experts, or the devices do not divide them.

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
            f"num_slots must be a multiple of {num_devices} devices and at least {num_experts}, got {num_slots}"
        )
    # 1. Copies.
    copies = np.ones(num_experts, int)
    for _ in range(num_slots - num_experts):
        copies[np.argmax(counts / copies)] += 1
    slots = np.repeat(np.arange(num_experts), copies)
    slot_loads = (counts / copies)[slots]
    # 2. Devices.
    members: list[list[int]] = [[] for _ in range(num_devices)]
    free = [(0.0, device) for device in range(num_devices)]  # a heap: load and number of devices with a free slot
    for slot in np.argsort(-slot_loads, kind="stable").tolist():
        load, device = heapq.heappop(free)
        members[device].append(int(slots[slot]))
        if len(members[device]) < num_slots // num_devices:
            heapq.heappush(free, (load + float(slot_loads[slot]), device))
    return Placement.measured(np.array(members, np.int32).ravel(), counts, num_devices)


def apply_placement(params: dict, placements: dict[str, Placement]) -> dict:
    """Applies placements to the experts of a model.

    Args:
        placements: of trunk layers by name, such as "layer_3". Layers that are missing, and the MTP modules, get the
            same number of slots, with copies of their first experts: experts of all layers are split alike.

    Returns:
        The parameters, for decoding with the same model.

    Raises:
        ValueError: no placement is given, they differ in their number of slots, or a layer has no experts.
    """
    counts = {len(placement.expert_of_slot) for placement in placements.values()}
    if len(counts) != 1:
        raise ValueError(f"placements must have one number of slots, got {sorted(counts)}")
    [num_slots] = counts
    trunk = {name: dict(layer) for name, layer in params["trunk"].items()}
    for name in placements:
        if "experts" not in trunk.get(name, {}):
            raise ValueError(f"{name} is not a trunk layer with experts")

    def slots_of(name: str | None, num_experts: int) -> np.ndarray:
        if name in placements:
            return placements[name].expert_of_slot
        return np.arange(num_slots, dtype=np.int32) % num_experts

    for name, layer in trunk.items():
        if "experts" in layer:
            layer["experts"] = _with_slots(layer["experts"], slots_of(name, layer["experts"]["router"].shape[-1]))
    modules = {}
    for name, module in params.items():
        block = module.get("block", {}) if isinstance(module, dict) else {}
        if "experts" in block:
            experts = _with_slots(block["experts"], slots_of(None, block["experts"]["router"].shape[-1]))
            modules[name] = {**module, "block": {**block, "experts": experts}}
    return {**params, "trunk": trunk, **modules}


def place_all_layers(
    params: dict, *, num_devices: int, num_redundant: int = 0, counts: dict[str, np.ndarray] | None = None
) -> dict:
    """Places the experts of every layer of the trunk, with the same number of copies in each.

    Args:
        num_devices: devices over which experts are split: `data x expert` of the mesh.
        num_redundant: copies per layer, of all experts together.
        counts: `[E]` tokens that chose each expert, by layer, as `count_expert_tokens` returns them. In missing layers
            all experts count the same. None: in all layers.

    Returns:
        The parameters, for decoding with the same model.

    Raises:
        ValueError: the model has no routed experts, the devices do not divide the experts and their copies, or the
            counts are for a different number of experts.
    """
    placements = {}
    for name, layer in params["trunk"].items():
        if "experts" in layer:
            num_experts = layer["experts"]["router"].shape[-1]
            chosen = (counts or {}).get(name, np.ones(num_experts))
            if np.shape(chosen) != (num_experts,):
                raise ValueError(f"{name} has {num_experts} experts, but there are counts {np.shape(chosen)}")
            placements[name] = place_experts(chosen, num_devices, num_experts + num_redundant)
    if not placements:
        raise ValueError("the model has no routed experts")
    return apply_placement(params, placements)


def _with_slots(experts: dict[str, Any], expert_of_slot: np.ndarray) -> dict[str, Any]:
    """Returns a layer's experts in these slots, with the tables that `choose_slots` reads."""
    # Values and scales of fp8 weights have the experts as their first axis, too.
    taken = {name: jax.tree.map(lambda leaf: leaf[expert_of_slot], experts[name]) for name in STACKS if name in experts}
    tables = placement_tables(expert_of_slot, experts["router"].shape[-1])
    return {**experts, **taken, "placement": jax.tree.map(jnp.asarray, tables)}


def placement_tables(expert_of_slot: np.ndarray, num_experts: int) -> dict[str, np.ndarray]:
    """Makes the tables of a placement, which a layer's parameters hold under "placement".

    Their shapes depend only on the numbers of slots S and experts E, so a program works for every placement.

    Args:
        expert_of_slot: `[S]` the expert in each slot.
        num_experts: E.

    Returns:
        int32 arrays: `expert_of_slot [S]`, `slots_of_expert [E, S - E + 1]`, whose rows repeat the slots of an expert,
        and `num_slots [E]`, how many these are.

    Raises:
        ValueError: an expert has no slot.
    """
    slots = [np.flatnonzero(expert_of_slot == expert) for expert in range(num_experts)]
    if not all(map(len, slots)):
        raise ValueError("a placement leaves out an expert")
    max_copies = len(expert_of_slot) - num_experts + 1
    return {
        "expert_of_slot": np.asarray(expert_of_slot, np.int32),
        "slots_of_expert": np.array([np.resize(found, max_copies) for found in slots], np.int32),
        "num_slots": np.array([len(found) for found in slots], np.int32),
    }
