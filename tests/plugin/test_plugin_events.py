"""What the plugin makes of NCCL's events, played to it in every version of the interface."""

from __future__ import annotations

import platform

import numpy as np
import pytest

from lanterne.probes.layout import Func
from lanterne.probes.nccl_profiler import usdt
from lanterne.probes.nccl_profiler.usdt import OpFlag
from tests.plugin.play import COLL_API, P2P_API, Play

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the driver's breakpoints are x86-64 code"
)
VERSIONS = (4, 5, 6, 7)
every_version = pytest.mark.parametrize("version", VERSIONS)


def listening(version: int = 5, **options: str) -> Play:
    play = Play(version, env=options)
    play.arm()
    play.init()
    return play


@every_version
def test_collective_is_told_when_its_last_channel_has_gone(version: int) -> None:
    play = listening(version)
    op = play.coll(7, "AllReduce", 1000, channels=3)
    play.stop(op)
    for channel, (start, stop) in enumerate([(500, 900), (400, 800), (450, 990)]):
        play.channel(op, start, stop, channel)
    (row,) = play.run().ops
    assert (row["comm_hash"], row["rank"], row["n_ranks"]) == (0xABC, 3, 8)
    assert (row["func"], row["seq"], row["bytes"], row["dtype"]) == (4, 7, 4000, 7)
    assert (row["channels"], row["channels_expected"], row["tasks"]) == (3, 3, 1)
    assert (row["peer"], row["flags"], row["version"], row["dropped"]) == (-1, 0, 1, 0)
    assert row["start_ns"] - np.uint64(row["offset_ns"]) == 400
    assert row["stop_ns"] - row["start_ns"] == 590
    assert row["enqueue_ns"] > 0


def test_channels_may_come_and_go_before_the_launch_has_returned() -> None:
    play = listening()
    op = play.coll(channels=2)
    play.channel(op, 100, 200)
    play.channel(op, 110, 230)
    play.stop(op)
    (row,) = play.run().ops
    assert row["stop_ns"] - row["start_ns"] == 130


def test_nothing_is_told_before_the_end() -> None:
    play = listening()
    op = play.coll(channels=2)
    play.stop(op)
    play.channel(op, 100, 200)
    op = play.coll(channels=1)
    play.channel(op, 100, 200)  # the launch has not returned
    op = play.coll(channels=1)
    play.stop(op)
    play.begin(op, 100)
    play.channel(op, 100, 200)  # one more than was announced, and one is still running
    assert len(play.run().ops) == 0


@pytest.mark.parametrize(
    ("name", "func", "root"),
    [("Broadcast", Func.BROADCAST, 5), ("Reduce", Func.REDUCE, 5), ("Gather", Func.GATHER, 5),
     ("Scatter", Func.SCATTER, 5), ("AllGather", Func.ALL_GATHER, -1),
     ("ReduceScatter", Func.REDUCE_SCATTER, -1), ("AlltoAll", Func.ALL_TO_ALL, -1),
     ("AllGatherV", Func.ALL_GATHER_V, -1), ("SomethingNew", Func.UNKNOWN, -1)],
)  # fmt: skip
def test_function_and_root(name: str, func: Func, root: int) -> None:
    play = listening()
    op = play.coll(func=name, root=5)
    play.stop(op)
    play.channel(op, 1, 2)
    (row,) = play.run().ops
    assert (row["func"], row["peer"]) == (func, root)


@pytest.mark.parametrize(
    ("dtype", "number", "size"),
    [("ncclInt8", 0, 1), ("ncclUint32", 3, 4), ("ncclFloat16", 6, 2), ("ncclFloat64", 8, 8),
     ("ncclBfloat16", 9, 2), ("ncclFloat8e5m2", 11, 1), ("ncclFloat4", 255, 0)],
)  # fmt: skip
def test_bytes_by_data_type(dtype: str, number: int, size: int) -> None:
    play = listening()
    op = play.coll(count=10, dtype=dtype)
    play.stop(op)
    play.channel(op, 1, 2)
    (row,) = play.run().ops
    assert (row["dtype"], row["bytes"]) == (number, 10 * size)
    assert bool(row["flags"] & OpFlag.NO_SIZE) == (size == 0)


@every_version
def test_sends_and_receives_of_a_group_are_one_operation(version: int) -> None:
    play = listening(version)
    for _ in range(2):
        play.group(("Send", 10, 1), ("Send", 20, 2), ("Send", 5, 3), ("Recv", 7, 3),
                   ("Recv", 300, 4))  # fmt: skip
    rows = play.run().ops
    assert rows["seq"].tolist() == [0, 1]
    assert set(rows["func"]) == {Func.P2P_GROUP}
    assert rows["bytes"].tolist() == [35, 35]
    assert rows["bytes_received"].tolist() == [307, 307]
    assert set(rows["tasks"]) == {5}
    assert set(rows["channels"]) == set(rows["channels_expected"]) == {3}, "none to itself"
    # From the first that any peer began to the last that any peer ended.
    assert (rows["start_ns"].view("<i8") - rows["offset_ns"]).tolist() == [1001, 1001]
    assert (rows["stop_ns"] - rows["start_ns"]).tolist() == [2040 - 1001] * 2
    assert not rows["flags"].any()


def test_group_in_several_plans_keeps_its_number() -> None:
    play = listening(5)
    tasks = [("Send", 10, 1), ("Recv", 10, 1), ("Send", 10, 2), ("Recv", 10, 2)]
    play.group(*tasks, parts=2)
    play.group(*tasks)
    rows = play.run().ops
    assert rows["seq"].tolist() == [0, 0, 1]
    assert rows["part"].tolist() == [0, 1, 0]


def test_replays_of_a_captured_group_are_counted_one_by_one() -> None:
    play = listening(5)
    play.group(("Send", 10, 1), ("Recv", 10, 2))
    play.group(("Send", 10, 1), ("Recv", 10, 2), captured=True, times=3)
    play.group(("Send", 10, 1), ("Recv", 10, 2))
    rows = play.run().ops
    replay = (rows["flags"] & OpFlag.GRAPH) != 0
    assert replay.tolist() == [False, True, True, True, False]
    assert rows["seq"].tolist() == [0, 0, 1, 2, 1]
    assert rows["part"].tolist() == [0] * 5
    assert ((rows["flags"] & OpFlag.SEQ_LOCAL) != 0).tolist() == replay.tolist()


def test_captured_collective_is_marked() -> None:
    play = listening(6)
    call = play.call(COLL_API, captured=True)
    op = play.coll(parent=call)
    play.stop(op)
    play.channel(op, 1, 2)
    (row,) = play.run().ops
    assert row["flags"] == OpFlag.GRAPH


@every_version
def test_lone_p2p_without_a_plan(version: int) -> None:
    play = listening(version)
    for func, peer in (("Send", 2), ("Recv", 5), ("Send", 3)):
        op = play.p2p(func, 100, peer)
        play.stop(op)
        if peer != 3:
            play.channel(op, 1, 2)
    rows = play.run().ops
    assert rows["func"].tolist() == [Func.SEND, Func.RECV]
    assert rows["peer"].tolist() == [2, 5]
    assert rows["bytes"].tolist() == [100, 0]
    assert rows["bytes_received"].tolist() == [0, 100]


def test_p2p_numbers_go_on_while_nobody_listens() -> None:
    """So that ranks whose agents came at different moments agree."""
    for version in VERSIONS:
        play = Play(version)
        play.init()
        for _ in range(5):
            play.group(("Send", 1, 1), ("Recv", 1, 1))
        play.arm()
        play.group(("Send", 1, 1), ("Recv", 1, 1))
        (row,) = play.run().ops
        assert row["seq"] == 5, version


@every_version
def test_quiet_plugin_keeps_nothing_and_asks_for_little(version: int) -> None:
    kernels = 2 | 64
    play = Play(version)
    play.init()
    play.say("mask")
    play.call(256)
    plan = play.plan()
    op = play.coll(plan=plan)
    early = play.p2p("Send", 1, 1, plan=plan)
    play.arm()
    late = play.p2p("Send", 1, 2, plan=plan)  # its plan began before anybody listened
    play.channel(op, 1, 2)
    play.channel(late, 1, 2)
    play.stop(op, early, late, plan)
    play.call(256)
    play.plan()
    play.say("mask")
    play.arm(by=-1)
    play.call(256)
    play.plan()
    play.say("mask")
    for handle in (op, early, late, plan):
        play.say("handle", handle)
    told = play.run()
    quiet, full, again = (mask for (mask,) in told.answers["mask"])
    assert quiet & kernels == 0
    assert full & kernels == kernels
    assert again == quiet
    kept = {number: bool(there) for number, there in told.answers["handle"]}
    # A plan always has a handle: NCCL numbers replayed collectives only where there is one.
    assert kept == {op: False, early: False, late: False, plan: True}
    assert len(told.ops) == 0


def test_mask_set_by_somebody_else_is_left_alone() -> None:
    play = Play()
    play.init()
    play.say("setmask", 8)
    play.arm()
    play.call(256)
    play.say("mask")
    assert play.run().answers["mask"] == [(8,)]


def test_always_asks_from_the_start() -> None:
    play = Play(env={"LANTERNE_PROFILER": "always"})
    play.init()
    play.say("mask")
    ((mask,),) = play.run().answers["mask"]
    assert mask & 66 == 66


def test_off_takes_no_part() -> None:
    play = Play(env={"LANTERNE_PROFILER": "off"})
    play.arm()
    play.say("setmask", 2)
    play.init()
    play.say("mask")
    told = play.run()
    assert told.answers == {"context": [(1, 0)], "mask": [(2,)]}


def test_listener_that_leaves_gets_no_more() -> None:
    play = listening()
    op = play.coll(0, channels=1)
    play.stop(op)
    play.arm(by=-1)
    play.channel(op, 1, 2)
    play.arm()
    op = play.coll(1)
    play.stop(op)
    play.channel(op, 1, 2)
    assert play.run().ops["seq"].tolist() == [1]


def test_channels_of_a_collective_are_limited() -> None:
    play = listening(LANTERNE_PROFILER_CHANNELS="2")
    op = play.coll(channels=4)
    play.stop(op)
    for channel in range(4):
        play.channel(op, 100 + channel, 200 + 10 * channel, channel)
    (row,) = play.run().ops
    assert (row["channels"], row["channels_expected"]) == (2, 2)
    assert row["flags"] == OpFlag.LIMITED
    assert row["stop_ns"] - row["start_ns"] == 110


def test_missing_channels_are_told_once_later_work_is_over() -> None:
    play = listening()
    op = play.coll(0, channels=2)
    play.stop(op)
    play.channel(op, 100, 200)
    for seq in (1, 2, 3, 4):
        play.say("sleep", 60)
        op = play.coll(seq)
        play.stop(op)
        play.channel(op, 1000 * seq, 1000 * seq + 1)
    rows = play.run().ops
    (row,) = rows[rows["seq"] == 0]
    assert row["flags"] == OpFlag.PARTIAL
    assert (row["channels"], row["channels_expected"]) == (1, 2)
    assert row["stop_ns"] - row["start_ns"] == 100


def test_no_usable_stop_time() -> None:
    play = listening()
    op = play.coll()
    play.stop(op)
    play.channel(op, 100, 0)
    (row,) = play.run().ops
    assert row["stop_ns"] == 0
    assert row["flags"] == OpFlag.NO_STOP | OpFlag.PARTIAL


def test_start_time_of_zero_is_no_channel() -> None:
    play = listening()
    op = play.coll()
    play.stop(op)
    play.channel(op, 0, 100)
    assert len(play.run().ops) == 0


@every_version
def test_exhausted_pool_loses_the_newest_and_counts_it(version: int) -> None:
    play = Play(version, env={"LANTERNE_PROFILER_POOL": "16"})
    play.arm()
    play.arm("comm_end")
    play.init()
    ops = [play.coll(seq) for seq in range(40)]
    play.group(("Send", 1, 1), ("Recv", 1, 1))
    for op in ops:
        play.say("handle", op)
        play.stop(op)
    for op in ops:
        play.channel(op, 1, 2)
    op = play.coll(99)
    play.stop(op)
    play.channel(op, 1, 2)
    play.say("finalize", 1)
    told = play.run()
    assert [bool(there) for _, there in told.answers["handle"]] == [True] * 16 + [False] * 24
    assert told.ops["seq"].tolist() == [*range(16), 99]
    assert set(told.ops["dropped"]) == {25}, "24 collectives and the group"
    assert told.probes["comm_end"] == [(0xABC, 3, 17, 25)]


def test_offset_is_the_smallest_delay_seen() -> None:
    """The GPU's clock is 5 s behind; what is told of it is some time old."""
    play = listening()
    for seq, delay in enumerate((900_000, 50_000, 700_000)):
        op = play.coll(seq)
        play.stop(op)
        play.channel(op, f"@{delay}", f"@{delay // 2}")
    told = play.run()
    bounds = [bound for (bound,) in told.answers["bound"]]
    for index, row in enumerate(told.ops):
        assert 5_000_000_000 <= row["offset_ns"] <= min(bounds[: index + 1])


def test_every_call_with_nothing_is_borne() -> None:
    for version in VERSIONS:
        play = listening(version)
        play.say("nulls")
        play.run()


@every_version
def test_foreign_events_are_ignored(version: int) -> None:
    """Proxy and copy-engine events: the parent may be an address of another process."""
    play = listening(version)
    kinds = [8, 16, 32, 128] + [2048, 4096, 8192, 16384, 32768] * (version >= 5)
    handles = [play.other(kind) for kind in kinds]
    for handle in handles:
        play.say("handle", handle)
        play.say("state", handle, 9, 1)
        play.stop(handle)
    told = play.run()
    assert {there for _, there in told.answers["handle"]} == {0}


def test_handle_of_another_communicator_is_no_parent() -> None:
    play = listening()
    play.init(2, 0xDEF)
    op = play.coll(context=1)
    play.stop(op)
    play.channel(op, 1, 2, context=2)
    assert len(play.run().ops) == 0


def test_late_stops_after_the_end_touch_nothing() -> None:
    play = listening()
    play.arm("comm_end")
    ops = [play.coll(seq) for seq in range(4)]
    open_channel = play.begin(ops[0], 50)
    gone = play.begin(ops[1], 60)
    play.end(gone, 90)
    play.stop(*ops[:2])
    play.say("finalize", 1)
    play.init(2, 0xDEF)  # takes the same memory
    fresh = [play.coll(seq, context=2, channels=2) for seq in range(4)]
    play.end(open_channel, 99)
    play.stop(*ops, gone)
    for op in ops:
        play.channel(op, 1, 2)
        play.channel(op, 1, 2, context=2)
    for op in fresh:
        play.stop(op)
        play.channel(op, 300, 400, context=2)
        play.channel(op, 310, 440, context=2)
    told = play.run()
    assert told.ops["comm_hash"].tolist() == [0xABC] + [0xDEF] * 4
    assert (told.ops["stop_ns"] - told.ops["start_ns"]).tolist() == [30] + [140] * 4
    assert told.probes["comm_end"] == [(0xABC, 3, 1, 3)]


def test_other_probes() -> None:
    play = Play()
    for probe in ("op_done", "comm_init", "p2p_task", "comm_end"):
        play.arm(probe)
    play.init()
    play.group(("Send", 10, 1), ("Recv", 30, 2))
    play.group(("Send", 20, 4))
    play.say("finalize", 1)
    told = play.run()
    ((*identity, name),) = told.probes["comm_init"]
    assert identity == [0xABC, 3, 8, 2]
    assert name != 0
    assert told.probes["p2p_task"] == [
        (0xABC, 3, 0, 1, 10, 1), (0xABC, 3, 0, 2, 30, 0), (0xABC, 3, 1, 4, 20, 1),
    ]  # fmt: skip
    assert told.probes["comm_end"] == [(0xABC, 3, 2, 0)]


def test_p2p_call_without_its_group_counts_for_itself() -> None:
    play = listening()
    for _ in range(2):
        call = play.call(P2P_API)
        op = play.p2p("Send", 1, 1, parent=call)
        play.stop(op)
        play.channel(op, 1, 2)
    assert play.run().ops["seq"].tolist() == [0, 1]


def storm_of(kind: str, version: int, comms: int, count: int) -> None:
    # The storm reports channels in any order, and a thread may be stopped for long in between.
    env = {"LANTERNE_PROFILER_POOL": "4096", "LANTERNE_PROFILER_SETTLE_MS": "10000"}
    play = Play(version, kind=kind, env=env)
    for probe in ("op_done", "comm_init", "p2p_task", "comm_end"):
        play.arm(probe)
    play.say("storm", comms, count, 100 * version)
    told = play.run()
    # Sums of waits come twice a second: where all this takes longer.
    ops = told.ops[told.ops["func"] != usdt.PEER_WAIT]
    assert len(ops) == comms * count
    assert not ops["flags"].any()
    assert not ops["dropped"].any()
    assert (ops["channels"] == ops["channels_expected"]).all()
    for hash_ in np.unique(ops["comm_hash"]):
        mine = ops[ops["comm_hash"] == hash_]
        groups = mine[mine["func"] == Func.P2P_GROUP]
        others = mine[mine["func"] == Func.ALL_REDUCE]
        assert np.sort(groups["seq"]).tolist() == list(range(count // 3))
        assert np.sort(others["seq"]).tolist() == [n for n in range(count) if n % 3 != 2]
        last = others["channels"].astype(int) - 1
        assert (last == others["seq"] % 6).all()
        assert (others["stop_ns"] - others["start_ns"] == 500 + 3 * last).all()
        assert (groups["stop_ns"] - groups["start_ns"] == 515).all()
        assert (groups["bytes"] == 20).all()
        assert (groups["bytes_received"] == 10).all()
    assert sorted(told.probes["comm_end"])[0][2:] == (count, 0)


@pytest.mark.parametrize("kind", ["plain", "memory", "thread"])
@every_version
def test_threads_in_random_order(kind: str, version: int) -> None:
    storm_of(kind, version, comms=3, count=300 if kind == "plain" else 150)


@every_version
def test_all_of_it_under_the_address_sanitizer(version: int) -> None:
    play = Play(version, kind="memory", env={"LANTERNE_PROFILER_POOL": "16"})
    for probe in ("op_done", "comm_init", "p2p_task", "comm_end"):
        play.arm(probe)
    for context in range(1, 6):
        play.init(context, context)
        play.say("nulls")
    for context in range(1, 6):
        ops = [play.coll(seq, context=context, channels=2) for seq in range(20)]
        for op in ops[:10]:
            play.stop(op)
            play.channel(op, 1, 2, context=context)
            play.channel(op, 2, 3, context=context)
        play.group(("Send", 10, 1), ("Recv", 30, 2), ("Send", 3, 3))
        play.other(8, context)
        play.say("finalize", context)
        play.stop(*ops)
    told = play.run()
    assert len(told.ops) >= 50
