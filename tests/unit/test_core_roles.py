"""Ranks are compared with those that do the same, told by configuration or by their operations."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from lanterne.collector.analyse import roles
from lanterne.collector.analyse.engine import Engine
from lanterne.collector.analyse.registry import Registry
from lanterne.collector.decode import decode
from lanterne.proto import telemetry_pb2 as pb
from tests.unit.test_core_engine import BOOT, MS, SMALL, noisy, simulate

I64 = npt.NDArray[np.int64]
RANKS = 8
FIRST = range(RANKS * 5 // 8)


def configured(batch: pb.Batch) -> None:
    for c in batch.communicators:
        c.role = "prefill" if c.rank in FIRST else "decode"


def by_operations(batch: pb.Batch) -> None:
    """Each role has a communicator of its own; nothing is timed in it."""
    count = []
    for r in range(RANKS):
        name, ranks = ("prefill", len(FIRST)) if r in FIRST else ("decode", RANKS - len(FIRST))
        batch.communicators.add(
            comm_hash=90 + (r in FIRST),
            library=1,
            n_ranks=ranks,
            rank=r if r in FIRST else r - len(FIRST),
            pid=100 + r,
            pid_start_ticks=7,
            workload="train",
            name=name,
            complete=True,
        )
    count = np.full(2 * RANKS, 50, "<u8")
    rows, zero = len(count), np.zeros(2 * RANKS, "<u8")
    batch.summaries.CopyFrom(
        pb.Summaries(
            rows=rows,
            communicator=np.arange(rows, dtype="<u4").tobytes(),
            op=bytes([4] * rows),
            role=bytes(rows),
            evidence=bytes(rows),
            count=count.tobytes(),
            errors=zero.tobytes(),
            payload_bytes=zero.tobytes(),
            duration_sum_ns=zero.tobytes(),
            duration_min_ns=zero.tobytes(),
            duration_max_ns=zero.tobytes(),
            histogram=bytes(4 * 48 * rows),
        )
    )


def unknown(batch: pb.Batch) -> None:
    pass


def follow(own: I64, change: object) -> set[int]:
    engine = Engine(SMALL, boot_id=BOOT)
    found: set[int] = set()
    for n, batch in enumerate(simulate(own).batches()):
        change(batch)  # type: ignore[operator]
        batch.sequence = n + 1
        engine.apply(decode(batch.SerializeToString(), received_ns=batch.end_ns))
        snapshot = engine.snapshot(0.0)
        found |= set(snapshot.ranks.rank[snapshot.ranks.straggler == 1].tolist())
    return found


def two_roles(slow: int | None) -> I64:
    own = noisy(np.random.default_rng(3), 2400, RANKS)
    own[:, len(FIRST) :] = (own[:, len(FIRST) :] * 1.5).astype(np.int64)  # by design
    if slow is not None:
        own[:, slow] += 2 * MS
    return own


@pytest.mark.parametrize("told", [configured, by_operations])
@pytest.mark.parametrize("slow", [None, 1, 6])
def test_a_rank_is_compared_within_its_role(told: object, slow: int | None) -> None:
    assert follow(two_roles(slow), told) == ({slow} if slow is not None else set())


def test_without_roles_the_slower_ones_would_be_named() -> None:
    assert follow(two_roles(None), unknown) == set(range(len(FIRST), RANKS))


def test_another_jobs_coming_and_going_does_not_void_what_is_known() -> None:
    """Roles get other numbers then; whom a rank is compared with stays the same."""
    members = np.arange(6)
    registry = Registry(slots=4, members=16, processes=16, nodes=2)
    registry.process[:6] = members
    before, mine = _slot("before", 0), _slot("mine", 3)
    found = roles.Roles(16)
    for slot in (before, mine):
        found.forget(slot.base, slot.ranks)
    registry.slots = [before, mine]
    assert found.close(registry).tolist() == []
    registry.slots = [None, mine]
    assert found.close(registry).tolist() == []
    later = _slot("later", 0)
    found.forget(later.base, later.ranks)
    registry.slots = [later, mine]
    assert found.close(registry).tolist() == []


def test_who_changes_its_role_and_who_is_left_are_compared_anew() -> None:
    registry = Registry(slots=4, members=16, processes=16, nodes=2)
    registry.process[:8] = np.arange(8)
    registry.slots = [_slot("a", 0, 8)]
    found = roles.Roles(16)
    found.forget(0, 8)
    count = found._count
    count[:8, 4] = 50
    assert found.close(registry).tolist() == []
    count[:4, 7] = 50
    assert found.close(registry).tolist() == list(range(8))
    assert found.close(registry).tolist() == []
    for alone in (2, 1):  # one alone: all are one group
        count[:8], count[:alone, 7], count[:8, 4] = 0, 50, 50
        changed = [m for _ in range(roles.EVERY) for m in found.close(registry).tolist()]
        assert changed == list(range(8))


def _slot(workload: str, base: int, ranks: int = 3) -> roles.Slot:
    return roles.Slot(base + 1, ranks, base, "nccl", workload, "", "", "")


def test_levels_part_where_values_lie_far_apart() -> None:
    rng = np.random.default_rng(4)
    values = np.concatenate([0.3 + 0.02 * rng.random(50), 0.5 + 0.02 * rng.random(50)])
    order = rng.permutation(100)
    level = roles.levels(values[order])
    assert set(level[order < 50].tolist()) == {0}
    assert set(level[order >= 50].tolist()) == {1}


def test_numbers_in_names_do_not_make_a_kind() -> None:
    def slot(name: str) -> roles.Slot:
        return roles.Slot(1, 4, 0, "nccl", "w", name, "", "")

    assert roles.kind_of(slot("tp_0")) == roles.kind_of(slot("tp_17"))
    assert roles.kind_of(slot("tp_0")) != roles.kind_of(slot("dp_0"))
    assert roles.kind_of(slot("")) == "nccl-4"
