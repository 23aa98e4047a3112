"""The numbered things of the registry: communicators, nodes, and a batch's place among them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lanterne.collector.batch import Head

KINDS = 8


@dataclass
class Slot:
    """One live communicator."""

    comm_hash: int
    ranks: int
    base: int
    library: str
    workload: str
    name: str
    role: str
    label: str
    kinds: dict[tuple[int, int, int], int] = field(default_factory=dict)
    last_ns: int = 0
    late_attached: bool = False
    named_by: int = -1  # the member whose word the workload is


@dataclass
class Node:
    """What the newest batch of a node said."""

    name: str
    head: Head
    lists_processes: bool = False
    listed: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    listed_keys: tuple[tuple[int, int], ...] = ()
    listed_generation: int = -1


@dataclass
class Resolved:
    """A batch's communicators as numbers; -1 where dropped."""

    slot: npt.NDArray[np.int32]
    rank: npt.NDArray[np.int64]
    member: npt.NDArray[np.int64]
    process: npt.NDArray[np.int32]
    good_members: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    good_processes: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    slots: list[int] = field(default_factory=list)  # distinct

    def settle(self) -> None:
        """Work out what every later batch with the same communicators touches."""
        good = self.slot >= 0
        self.good_members, self.good_processes = self.member[good], self.process[good]
        self.slots = sorted(set(self.slot[good].tolist()))
