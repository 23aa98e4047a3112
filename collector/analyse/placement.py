"""Replicas of experts, and the GPUs they go to: the published EPLB procedure, on numpy arrays.

Greedy in both modes: the heaviest item goes to the lightest bin with room. Where the expert groups
divide by the nodes, groups are packed to nodes first, so that group-limited routing stays inside a
node (hierarchical); else all GPUs are one pool (global). All layers are placed at once.

Source: the description and the example that DeepSeek published with EPLB; the tests hold that
example. Ties go to the lower index, as there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import moe

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Placement:
    """Where every replica lives. Slot s of a layer is on GPU s // (slots / GPUs).

    phy2log: int64[layers, slots], the expert in each slot.
    log2phy: int64[layers, experts, most replicas], slots of each expert, padded with -1.
    logcnt: int64[layers, experts], replicas of each expert.
    """

    phy2log: I64
    log2phy: I64
    logcnt: I64
    gpus: int

    @property
    def slots_per_gpu(self) -> int:
        return int(self.phy2log.shape[1]) // self.gpus


def place(
    weight: npt.ArrayLike, slots: int, *, groups: int = 1, nodes: int = 1, gpus: int
) -> Placement:
    """Replicate and place the experts of every layer.

    weight: [layers, experts] load of each expert, finite and not negative; may be fractional.
    slots: physical experts of a layer over all GPUs, replicas included.
    groups: expert groups of group-limited routing; nodes, gpus: of the expert-parallel group.

    Raises ValueError where the numbers do not divide or the load is not one.
    """
    load = _checked(weight, slots, groups, nodes, gpus)
    if groups % nodes:
        groups = nodes = 1
    experts = load.shape[1]
    order = _groups_to_nodes(load, groups, nodes)  # [layers, experts]: expert at each place
    layers = np.arange(len(load))
    per_node = load[layers[:, None], order].reshape(-1, experts // nodes)
    expert, count = replicate(per_node, slots // nodes)
    rows = np.arange(len(per_node))[:, None]
    share = (per_node / count)[rows, expert]
    gpu, seat = pack(share, gpus // nodes)
    slot = gpu * (slots // gpus) + seat
    placed = np.empty_like(expert)
    placed[rows, slot] = expert
    first = np.arange(nodes)[:, None] * (experts // nodes)
    in_order = (placed.reshape(-1, nodes, slots // nodes) + first).reshape(-1, slots)
    phy2log = order[layers[:, None], in_order]
    return from_slots(phy2log, experts, gpus)


def from_slots(phy2log: npt.ArrayLike, experts: int, gpus: int) -> Placement:
    """The placement that a table of slots describes.

    phy2log: [layers, slots] expert in each slot. Raises ValueError where an expert has no slot or
    is not one of `experts`, or the slots do not divide by the GPUs.
    """
    table = np.asarray(phy2log, dtype=np.int64)
    if table.ndim != 2 or table.shape[1] == 0 or table.shape[1] % gpus:
        raise ValueError(f"slots {table.shape} must be [layers, slots], slots a multiple of {gpus}")
    if table.size and (table.min() < 0 or table.max() >= experts):
        raise ValueError(f"a slot names an expert outside 0..{experts - 1}")
    layers, slots = table.shape
    flat = (table + np.arange(layers)[:, None] * experts).ravel()
    logcnt = np.bincount(flat, minlength=layers * experts).reshape(layers, experts)
    if (logcnt == 0).any():
        layer, expert = np.argwhere(logcnt == 0)[0].tolist()
        raise ValueError(f"layer {layer}: expert {expert} has no slot")
    by_expert = np.argsort(flat, kind="stable")
    start = np.concatenate([[0], np.cumsum(logcnt.ravel())[:-1]])
    nth = np.arange(len(flat)) - start[flat[by_expert]]
    log2phy = np.full((layers * experts, int(logcnt.max(initial=1))), -1, np.int64)
    log2phy[flat[by_expert], nth] = by_expert % slots
    return Placement(table, log2phy.reshape(layers, experts, -1), logcnt, gpus)


def in_order(layers: int, experts: int, gpus: int) -> Placement:
    """What an engine starts with: one replica each, in order. experts a multiple of gpus."""
    return from_slots(np.tile(np.arange(experts), (layers, 1)), experts, gpus)


def gpu_load(placement: Placement, weight: npt.ArrayLike) -> F64:
    """[layers, gpus] load of each GPU if `weight` [layers, experts] is spread over the replicas.

    Replicas share their expert's load evenly, which is what the engines' round robin aims at.
    """
    load = np.asarray(weight, dtype=np.float64)
    share = load / placement.logcnt
    per_slot = np.take_along_axis(share, placement.phy2log, axis=1)
    found: F64 = per_slot.reshape(len(load), placement.gpus, -1).sum(axis=2)
    return found


def moved(old: Placement, new: Placement) -> int:
    """Expert copies that a GPU needs and does not have: what a migration has to send."""
    if old.gpus != new.gpus or old.logcnt.shape != new.logcnt.shape:
        raise ValueError("placements of different models or numbers of GPUs")
    had, wants = _resident(old), _resident(new)
    return int((wants & ~had).sum())


def _resident(placement: Placement) -> npt.NDArray[np.bool_]:
    layers, slots = placement.phy2log.shape
    gpu = np.arange(slots) // placement.slots_per_gpu
    there = np.zeros((layers, placement.gpus, placement.logcnt.shape[1]), bool)
    there[np.arange(layers)[:, None], gpu, placement.phy2log] = True
    return there


def replicate(weight: F64, slots: int) -> tuple[I64, I64]:
    """Give every further slot to the expert whose replicas carry most each.

    weight: [rows, experts]. -> (expert in each slot [rows, slots], replicas [rows, experts]).
    """
    rows, experts = weight.shape
    expert = np.tile(np.arange(slots), (rows, 1))
    count = np.ones((rows, experts), np.int64)
    row = np.arange(rows)
    for slot in range(experts, slots):
        heaviest = np.argmax(weight / count, axis=1)
        expert[:, slot] = heaviest
        count[row, heaviest] += 1
    return expert, count


def pack(weight: F64, bins: int) -> tuple[I64, I64]:
    """Equal numbers of items to each bin: the heaviest first, to the lightest bin with room.

    weight: [rows, items], items a multiple of bins. -> (bin, place in the bin), both [rows, items].
    """
    rows, items = weight.shape
    room = items // bins
    where, seat = np.zeros((2, rows, items), np.int64)
    if room == 1:  # nothing to choose: one each, in order
        where[:] = np.arange(items)
        return where, seat
    order = np.argsort(-weight, axis=1, kind="stable")
    filled = np.zeros((rows, bins), np.int64)
    total = np.zeros((rows, bins))
    row = np.arange(rows)
    for item in order.T:
        lightest = np.argmin(np.where(filled < room, total, np.inf), axis=1)
        where[row, item] = lightest
        seat[row, item] = filled[row, lightest]
        filled[row, lightest] += 1
        total[row, lightest] += weight[row, item]
    return where, seat


def _groups_to_nodes(load: F64, groups: int, nodes: int) -> I64:
    """[layers, experts] the expert at each place, places of one node together, groups whole."""
    layers, experts = load.shape
    size = experts // groups
    node, seat = pack(load.reshape(layers, groups, size).sum(axis=2), nodes)
    place = node * (groups // nodes) + seat
    group_at = np.empty_like(place)
    group_at[np.arange(layers)[:, None], place] = np.arange(groups)
    found: I64 = (group_at[:, :, None] * size + np.arange(size)).reshape(layers, experts)
    return found


def _checked(weight: npt.ArrayLike, slots: int, groups: int, nodes: int, gpus: int) -> F64:
    load = moe.checked_layers(weight)
    experts = load.shape[1]
    if min(slots, groups, nodes, gpus) < 1:
        raise ValueError("slots, groups, nodes and gpus must be at least 1")
    if slots < experts:
        raise ValueError(f"{slots} slots cannot hold {experts} experts")
    for name, whole, part in (
        ("slots must be a multiple of gpus", slots, gpus),
        ("gpus must be a multiple of nodes", gpus, nodes),
        ("experts must be a multiple of groups", experts, groups),
    ):
        if whole % part:
            raise ValueError(f"{name}: {whole} and {part}")
    return load
