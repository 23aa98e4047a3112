"""What processes do at libcuda, as the programs count it: by device, kind of stream, and steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lanterne.probes import layout

from . import bpf
from .slots import SlotTable

MAX_BINS = 16384
MAX_ENDED = 4096
UNKNOWN_DEVICE = -1


@dataclass(frozen=True)
class Bin:
    """Calls on one device and kind of stream (layout.Stream); times in nanoseconds.

    ``device``: the process's own number of it, as CUDA_VISIBLE_DEVICES orders them; -1: unknown."""

    device: int
    stream: int
    launches: int
    graph_launches: int
    syncs: int
    sync_ns: int


@dataclass(frozen=True)
class Use:
    """Totals of one process since its libcuda was attached; steps are defined in bpf/row.h."""

    launches: int
    graph_launches: int
    syncs: int
    sync_ns: int
    sync_bins: np.ndarray  # bin b counts synchronise calls of [2^b, 2^(b+1)) ns
    captured_ops: int
    steps: int
    silent_steps: int
    replay_steps: int
    bins: tuple[Bin, ...]


class CudaUses:
    """Reads the programs' maps; keeps the last totals of processes that have ended until asked."""

    def __init__(self, fd: int, processes: SlotTable) -> None:
        self._fd = fd
        self._processes = processes
        self._ended: dict[int, Use] = {}

    def read(self, only: Iterable[int] | None = None) -> dict[int, Use]:
        """By tgid; ``only``: of these."""
        wanted = None if only is None else frozenset(only)
        keys: dict[int, list[np.ndarray]] = {}
        values: dict[int, list[np.ndarray]] = {}
        for raw in bpf.keys(self._fd, layout.CUDA_KEY.itemsize, MAX_BINS):
            key = np.frombuffer(raw, layout.CUDA_KEY)
            tgid = int(key["tgid"][0])
            if wanted is not None and tgid not in wanted:
                continue
            value = bpf.lookup(self._fd, raw, layout.CUDA.itemsize)
            if value is not None:
                keys.setdefault(tgid, []).append(key)
                values.setdefault(tgid, []).append(np.frombuffer(value, layout.CUDA))
        slots = self._processes.slots
        of = {int(slots["tgid"][at]): at for at in np.flatnonzero(slots["tgid"]).tolist()}
        tgids = (keys.keys() | of.keys()) & (wanted if wanted is not None else keys.keys() | of)
        no_key, no_value = np.empty(0, layout.CUDA_KEY), np.empty(0, layout.CUDA)
        nothing: np.void = np.zeros(1, slots.dtype)[0]
        return {
            tgid: _use(
                np.concatenate(keys.get(tgid) or [no_key]),
                np.concatenate(values.get(tgid) or [no_value]),
                slots[of[tgid]] if tgid in of else nothing,
            )
            for tgid in sorted(tgids)
        }

    def forget(self, tgids: Iterable[int]) -> None:
        """Of processes that have ended: frees what the programs hold of them."""
        gone = frozenset(tgids)
        if not gone:
            return
        self._ended |= self.read(gone)
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        for raw in list(bpf.keys(self._fd, layout.CUDA_KEY.itemsize, MAX_BINS)):
            if int(np.frombuffer(raw, layout.CUDA_KEY)["tgid"][0]) in gone:
                bpf.delete(self._fd, raw)
        self._processes.free(np.isin(self._processes.slots["tgid"], list(gone)))

    def ended(self) -> dict[int, Use]:
        """Each once."""
        found, self._ended = self._ended, {}
        return found

    def close(self) -> None:
        self._processes.close()


def _use(keys: np.ndarray, values: np.ndarray, process: np.void) -> Use:
    order = np.lexsort((keys["stream"], keys["device"]))
    bins = tuple(
        Bin(
            int(key["device"]) - 1,
            int(key["stream"]),
            int(value["launches"]),
            int(value["graph_launches"]),
            int(value["syncs"]),
            int(value["sync_ns"]),
        )
        for key, value in zip(keys[order], values[order], strict=True)
    )
    return Use(
        launches=int(values["launches"].sum()),
        graph_launches=int(values["graph_launches"].sum()),
        syncs=int(values["syncs"].sum()),
        sync_ns=int(values["sync_ns"].sum()),
        sync_bins=values["sync_bins"].sum(axis=0),
        captured_ops=int(process["captured_ops"]),
        steps=int(process["steps"]),
        silent_steps=int(process["silent_steps"]),
        replay_steps=int(process["replay_steps"]),
        bins=bins,
    )
