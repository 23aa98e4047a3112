"""Kernels that parcagpu tells of: stage times, and operations with numbers that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanterne.agent.events import DEVICE, ENQUEUE, Operations, empty_operations
from lanterne.agent.identity import DEEPEP, NCCL
from lanterne.agent.kernel_names import Stage
from lanterne.agent.kernel_places import NUMBERS_FROM
from lanterne.agent.kernel_rows import Facts
from lanterne.agent.kernels import PATIENCE, Kernels, Told
from lanterne.agent.roles import COMBINE, DISPATCH
from lanterne.agent.stages import StageColumns, union
from lanterne.probes.layout import Func
from lanterne.probes.parcagpu import KERNEL, TOLD

PID, MS = 100, 1_000_000
NAMES = {
    1: "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    3: "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
    5: "_ZN7deep_ep9intranode15notify_dispatchILi8EEEvPKiPi",
    7: "_ZN7deep_ep9intranode8dispatchILi8ELi768ELi8192EEEvP4int4",
    9: "_ZN7deep_ep9intranode7combineI13__nv_bfloat16Li8EEvPT_",
    11: "fused_moe_kernel",
    13: "nvjet_tst_128x8",
}
SEND_RECV, ALL_REDUCE, NOTIFY, DISPATCHES, COMBINES, GEMM, DENSE = NAMES
NO_PLUGIN = np.zeros(64, np.bool_)


@dataclass
class Comm:
    slot: int
    tgid: int = PID
    start_ticks: int = 77
    library: int = NCCL
    complete: bool = True
    born_ns: int = 500


def operations(slots: list[int], **columns: Any) -> Operations:
    """Everything else is 0."""
    empty = empty_operations()
    found = {f.name: np.zeros(len(slots), getattr(empty, f.name).dtype) for f in fields(empty)}
    values = {"slot": slots, **columns}
    return Operations(**(found | {k: np.array(v, found[k].dtype) for k, v in values.items()}))


def kernels() -> Kernels:
    return Kernels(64, NAMES.get)


def records(
    rows: list[tuple[int, int, int]], *, pid: int = PID, seq: int = 0, graph: int = 0,
    late: int = 0, device: int = 0, shift: int = 0,
) -> np.ndarray:  # fmt: skip
    """rows: (name, start, length), times in ms. Told a millisecond after the end."""
    found = np.zeros(len(rows), KERNEL)
    name, start, length = np.array(rows, np.int64).reshape(-1, 3).T
    found["name"] = name
    found["start_ns"], found["end_ns"] = start * MS + shift, (start + length) * MS + shift
    found["told_ns"] = (start + length + 1 + late) * MS
    found["tgid"], found["graph"], found["device"] = pid, graph, device
    found["seq"] = np.arange(seq, seq + len(rows))
    return found


def facts(*owners: Comm, missed: int = 0, whole: int = 10**15, based: int = 1) -> Facts:
    row = np.zeros(1, TOLD)[0]
    row["missed"], row["whole_ns"], row["based"] = missed, whole, based
    told = {owner.tgid: row for owner in owners}
    return Facts(owners, told, 100)


def run(k: Kernels, rows: np.ndarray, known: Facts, *, covered: Any = NO_PLUGIN) -> Told:
    k.add(rows, 10**18)
    k.close(known, covered)
    return k.close(known, covered)


def test_replays_of_a_graph_are_numbered_in_their_order() -> None:
    k = kernels()
    rows = [(SEND_RECV, 10, 3), (GEMM, 13, 5), (SEND_RECV, 18, 4), (ALL_REDUCE, 30, 1)]
    told = run(k, records(rows, graph=4), facts(Comm(2)))
    found = told.replayed
    assert found.slot.tolist() == [2, 2, 2]
    assert dict(zip(found.op.tolist(), found.lane.tolist(), strict=True)) == {
        Func.P2P_GROUP: 1, Func.ALL_REDUCE: 0}  # fmt: skip
    assert sorted(found.seq[found.lane == 1].tolist()) == [NUMBERS_FROM, NUMBERS_FROM + 1]
    assert found.seq[found.lane == 0].tolist() == [NUMBERS_FROM]
    assert set(found.evidence.tolist()) == {DEVICE}
    assert found.duration_ns[found.lane == 1].tolist() == [3 * MS, 4 * MS]
    assert len(told.called) == 0
    later = run(k, records([(SEND_RECV, 50, 2)], seq=4, graph=4), facts(Comm(2)))
    assert later.replayed.seq.tolist() == [NUMBERS_FROM + 2]


def test_buffers_in_any_order_and_windows_of_any_size() -> None:
    """Only the order on the GPU counts."""
    rows = records([(SEND_RECV, 10 * i, i + 1) for i in range(20)])
    mixed = rows.copy()
    mixed[["start_ns", "end_ns"]] = rows[["start_ns", "end_ns"]][
        np.random.default_rng(3).permutation(20)
    ]
    mixed["told_ns"] = rows["told_ns"].max()
    one = run(kernels(), mixed, facts(Comm(0))).called
    k = kernels()
    parts = []
    for at in range(0, 20, 3):
        k.add(rows[at : at + 3], 10**18)
        parts.append(k.close(facts(Comm(0)), NO_PLUGIN).called)
    parts.append(k.close(facts(Comm(0)), NO_PLUGIN).called)
    assert one.duration_ns.tolist() == np.concatenate([p.duration_ns for p in parts]).tolist()
    assert one.seq.tolist() == np.concatenate([p.seq for p in parts]).tolist()


def test_dispatch_begins_with_its_notify() -> None:
    k = kernels()
    rows = [(NOTIFY, 10, 4), (DISPATCHES, 20, 2), (GEMM, 22, 9), (COMBINES, 31, 3)]
    found = run(k, records(rows), facts(Comm(1, library=DEEPEP))).called
    assert found.op.tolist() == [Func.DISPATCH, Func.COMBINE]
    assert found.duration_ns.tolist() == [6 * MS, 3 * MS]
    assert found.arrival_ns.tolist() == [10 * MS, 31 * MS]


def test_a_notify_waits_for_its_dispatch_across_windows() -> None:
    k = kernels()
    known = facts(Comm(1, library=DEEPEP))
    k.add(records([(NOTIFY, 10, 4)]), 10**18)
    assert len(k.close(known, NO_PLUGIN).called) == 0
    assert len(k.close(known, NO_PLUGIN).called) == 0
    found = run(k, records([(DISPATCHES, 20, 2)], seq=1), known).called
    assert found.duration_ns.tolist() == [6 * MS]


def test_roles_are_the_kernels_own() -> None:
    told = run(
        kernels(), records([(DISPATCHES, 1, 1), (COMBINES, 3, 1)]), facts(Comm(0, library=DEEPEP))
    )
    assert told.called_role.tolist() == [DISPATCH, COMBINE]


def test_which_communicator() -> None:
    """The only one on which such an operation is called; the only one there is; else none."""
    k = kernels()
    both = facts(Comm(3), Comm(5), Comm(6, library=DEEPEP), Comm(7, tgid=PID + 1))
    k.note_calls(operations([3, 5], op=[Func.ALL_REDUCE, Func.ALL_TO_ALL]))
    rows = [(SEND_RECV, 1, 1), (ALL_REDUCE, 3, 1), (DISPATCHES, 5, 1)]
    found = run(k, records(rows), both).called
    assert dict(zip(found.op.tolist(), found.slot.tolist(), strict=True)) == {
        Func.ALL_TO_ALL: 5, Func.ALL_REDUCE: 3, Func.DISPATCH: 6}  # fmt: skip
    k.note_calls(operations([5], op=[Func.ALL_REDUCE]))
    found = run(k, records([(ALL_REDUCE, 30, 1)], seq=3), both).called
    assert len(found) == 0
    assert k.left_out["communicator"] == 1


def test_sends_and_receives_are_an_all_to_all_only_where_all_calls_are() -> None:
    k = kernels()
    known = facts(Comm(0), Comm(1, tgid=PID + 1), Comm(2, tgid=PID + 2))
    k.note_calls(
        operations(
            [0, 0, 1, 1, 2],
            op=[
                Func.ALL_TO_ALL,
                Func.ALL_TO_ALL_V,
                Func.ALL_TO_ALL,
                Func.P2P_GROUP,
                Func.ALL_TO_ALL,
            ],
        )
    )
    for pid in range(PID, PID + 3):
        k.add(records([(SEND_RECV, 10, 1)], pid=pid), 10**18)
    k.close(known, NO_PLUGIN)
    found = k.close(known, NO_PLUGIN).called
    assert dict(zip(found.slot.tolist(), found.op.tolist(), strict=True)) == {
        0: Func.ALL_TO_ALL_V, 1: Func.P2P_GROUP, 2: Func.ALL_TO_ALL}  # fmt: skip
    assert set(found.lane.tolist()) == {1}


def test_a_sample_gives_no_operations_from_there_on() -> None:
    """The rate of launches that parcagpu tells of is limited: what is certain has its number."""
    k = kernels()
    k.add(records([(SEND_RECV, 10, 1), (SEND_RECV, 20, 1), (SEND_RECV, 30, 1)]), 10**18)
    sampled = facts(Comm(0), missed=1, whole=25 * MS)
    k.close(sampled, NO_PLUGIN)
    found = k.close(sampled, NO_PLUGIN).called
    assert found.arrival_ns.tolist() == [10 * MS, 20 * MS]
    for _ in range(PATIENCE):
        told = k.close(sampled, NO_PLUGIN)
        assert len(told.called) == 0
    assert k.left_out["sampled"] == 1
    # For good, even if the counts came to agree.
    told = run(k, records([(SEND_RECV, 90, 1)], seq=3), facts(Comm(0)))
    assert len(told.called) == 0
    assert k.left_out["sampled"] == 2


def test_a_launch_under_way_on_another_thread_is_waited_for() -> None:
    k = kernels()
    k.add(records([(SEND_RECV, 10, 1)]), 10**18)
    for _ in range(PATIENCE - 1):
        assert len(k.close(facts(Comm(0), missed=1, whole=0), NO_PLUGIN).called) == 0
    assert len(k.close(facts(Comm(0)), NO_PLUGIN).called) == 1


def test_without_libcuda_nothing_can_be_checked() -> None:
    k = kernels()
    k.add(records([(SEND_RECV, 10, 1)]), 10**18)
    for _ in range(PATIENCE + 2):
        assert len(k.close(facts(Comm(0), based=0), NO_PLUGIN).called) == 0
    assert k.left_out["unchecked"] == 1


@pytest.mark.parametrize("first", [1, 0])
def test_a_record_that_the_ring_lost(first: int) -> None:
    """Also the very first ones of a process."""
    k = kernels()
    rows = records([(SEND_RECV, 10 * i, 1) for i in range(1, 5)])
    told = run(k, np.delete(rows, 0 if first else 2), facts(Comm(0)))
    assert len(told.called) == 0
    assert k.left_out["lost"] == 3
    assert not told.stages.whole.any()


def test_a_kernel_that_comes_after_a_later_one_has_its_number() -> None:
    k = kernels()
    assert len(run(k, records([(SEND_RECV, 50, 1)]), facts(Comm(0))).called) == 1
    rows = records([(SEND_RECV, 20, 1), (SEND_RECV, 60, 1)], seq=1, late=50)
    assert len(run(k, rows, facts(Comm(0))).called) == 0
    assert k.left_out["order"] == 2


def test_the_plugins_word_goes_first() -> None:
    k = kernels()
    covered = NO_PLUGIN.copy()
    covered[0] = True
    told = run(k, records([(SEND_RECV, 10, 1)]), facts(Comm(0)), covered=covered)
    assert len(told.called) == 0
    assert k.left_out["plugin"] == 1
    assert not k.replaced(calls()).any()


def calls() -> Operations:
    return operations([0, 0, 0], op=[Func.ALL_TO_ALL, Func.ALL_REDUCE, Func.ALL_TO_ALL],
                      evidence=[ENQUEUE, ENQUEUE, DEVICE])  # fmt: skip


def test_kernels_take_the_place_of_calls_of_their_kind_for_a_while() -> None:
    k = kernels()
    assert not k.replaced(calls()).any()
    run(k, records([(SEND_RECV, 10, 1)]), facts(Comm(0)))
    assert k.replaced(calls()).tolist() == [True, False, False]
    for _ in range(10):
        k.close(facts(Comm(0)), NO_PLUGIN)
    assert not k.replaced(calls()).any()


def test_met_running() -> None:
    """A communicator that was made before the probes stood has other numbers on every rank, unless
    it was met running by all: then the collector aligns them."""
    k = kernels()
    old = Comm(0, born_ns=50)
    assert len(run(k, records([(SEND_RECV, 10, 1)]), facts(old)).called) == 0
    assert k.left_out["unplaced"] == 1
    old.complete = False
    assert len(run(k, records([(SEND_RECV, 30, 1)], seq=1), facts(old)).called) == 1


def test_times_of_either_clock() -> None:
    k = kernels()
    k.add(records([(SEND_RECV, 10, 1)]), 10**18)
    k.add(records([(SEND_RECV, 20, 1)], seq=1, shift=10**18), 10**18)
    k.add(records([(SEND_RECV, 30, 1)], seq=2, shift=5 * 10**17), 10**18)
    k.close(facts(Comm(0)), NO_PLUGIN)
    found = k.close(facts(Comm(0)), NO_PLUGIN).called
    assert found.arrival_ns.tolist() == [10 * MS, 20 * MS]
    assert k.left_out["clock"] == 1


def test_nonsense_is_counted() -> None:
    rows = records([(SEND_RECV, 10, 1)] * 4)
    rows["end_ns"][0] = rows["start_ns"][0] - 1
    rows["start_ns"][1] = 0
    rows["end_ns"][2] = 2**64 - 1
    k = kernels()
    assert len(run(k, rows, facts(Comm(0))).called) == 1
    assert k.left_out["malformed"] == 3


def test_a_name_that_is_lost_is_no_operation_and_asked_for_again() -> None:
    names: dict[int, str] = {}
    k = Kernels(64, names.get)
    assert len(run(k, records([(21, 10, 1)]), facts(Comm(0))).called) == 0
    names[21] = NAMES[SEND_RECV]
    assert len(run(k, records([(21, 20, 1)], seq=1), facts(Comm(0))).called) == 1


def test_slots_that_are_used_again_start_anew() -> None:
    k = kernels()
    run(k, records([(SEND_RECV, 10, 1)]), facts(Comm(0)))
    k.forget(np.array([0], np.uint16))
    found = run(k, records([(SEND_RECV, 20, 1)], seq=1), facts(Comm(0))).called
    assert found.seq.tolist() == [NUMBERS_FROM]


def test_a_process_number_that_is_used_again() -> None:
    k = kernels()
    run(k, records([(SEND_RECV, 10, 1)] * 3), facts(Comm(0)))
    k.forget_processes([PID])
    k.forget(np.array([0], np.uint16))
    assert len(run(k, records([(SEND_RECV, 20, 1)]), facts(Comm(1))).called) == 1


# -- stages -----------------------------------------------------------------------------------


def table(stages: StageColumns) -> dict[tuple[int, Stage], tuple[int, ...]]:
    """(device, stage) -> (count, sum, union, span), times in ms."""
    return {
        (int(stages.device[i]), Stage(int(stages.stage[i]))): (
            int(stages.count[i]),
            *(int(getattr(stages, name)[i]) // MS for name in ("sum_ns", "union_ns", "span_ns")),
        )
        for i in range(len(stages))
    }


def test_stage_times() -> None:
    k = kernels()
    rows = [(GEMM, 10, 10), (SEND_RECV, 15, 10), (DENSE, 18, 4), (GEMM, 40, 10)]
    k.add(records(rows), 10**18)
    stages = k.close(facts(Comm(0)), NO_PLUGIN).stages
    assert table(stages) == {
        (0, Stage.EXPERT_GEMM): (2, 20, 20, 0),
        (0, Stage.COLLECTIVE): (1, 10, 10, 0),
        (0, Stage.OTHER): (1, 4, 4, 0),
        (0, Stage.COMPUTE): (3, 24, 22, 0),
        (0, Stage.ALL): (4, 34, 25, 40),
    }
    assert set(stages.pid.tolist()) == {PID}
    assert set(stages.start_ticks.tolist()) == {77}
    assert stages.whole.all()
    # The next window begins where this one has ended; time is counted once.
    k.add(records([(GEMM, 45, 10), (GEMM, 60, 5)], seq=4), 10**18)
    later = table(k.close(facts(Comm(0)), NO_PLUGIN).stages)
    assert later[0, Stage.EXPERT_GEMM] == (2, 15, 10, 0)
    assert later[0, Stage.ALL] == (2, 15, 10, 15)


def test_devices_and_processes_apart() -> None:
    k = kernels()
    k.add(records([(GEMM, 10, 5)], device=0), 10**18)
    k.add(records([(GEMM, 10, 7)], seq=1, device=1), 10**18)
    k.add(records([(GEMM, 10, 9)], pid=PID + 1), 10**18)
    k.add(records([(GEMM, 10, 9)], pid=PID + 2), 10**18)  # holds no communicator: no rank
    stages = k.close(facts(Comm(0), Comm(1, tgid=PID + 1)), NO_PLUGIN).stages
    gemm = stages.stage == Stage.EXPERT_GEMM
    found = {
        (int(p), int(d)): int(n) // MS
        for p, d, n in zip(stages.pid[gemm], stages.device[gemm], stages.sum_ns[gemm], strict=True)
    }
    assert found == {(PID, 0): 5, (PID, 1): 7, (PID + 1, 0): 9}
    assert k.left_out["process"] == 1


def test_a_sample_says_so() -> None:
    k = kernels()
    k.add(records([(GEMM, 10, 5)]), 10**18)
    assert not k.close(facts(Comm(0), missed=3), NO_PLUGIN).stages.whole.any()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=30))
def test_union_covers_each_moment_once(intervals: list[tuple[int, int]]) -> None:
    start = np.array([a for a, _ in intervals], np.int64)
    stop = start + np.array([n for _, n in intervals], np.int64)
    covered = {at for a, n in intervals for at in range(a, a + n)}
    assert union(start, stop) == len(covered)
