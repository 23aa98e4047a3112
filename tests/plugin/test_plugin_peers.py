"""How long each peer was waited for: the sums that the plugin tells beside operations."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from lanterne.probes.nccl_profiler.usdt import PEER_WAIT
from tests.plugin.play import Play

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the driver's breakpoints are x86-64 code"
)
every_version = pytest.mark.parametrize("version", [4, 5, 6, 7])
TOLD_MS = 600  # longer than from one telling to the next


def listening(version: int = 5, ranks: int = 8) -> Play:
    play = Play(version)
    play.arm()
    play.init(ranks=ranks)
    return play


def sums(play: Play) -> dict[int, tuple[int, int]]:
    """sender -> (receives, ns) of all tellings together."""
    rows = play.run().ops
    rows = rows[rows["func"] == PEER_WAIT]
    found: dict[int, tuple[int, int]] = {}
    for peer, receives, ns in rows[["peer", "seq", "bytes_received"]].tolist():
        before = found.get(peer, (0, 0))
        found[peer] = before[0] + receives, before[1] + ns
    return found


@every_version
def test_receives_of_groups_are_summed_by_sender(version: int) -> None:
    """A channel of peer p runs from 1000 + p to 2000 + 10 p; the group began at the first start."""
    play = listening(version)
    play.group(("Send", 10, 1), ("Recv", 10, 1), ("Recv", 20, 4), times=3)
    play.say("sleep", TOLD_MS)
    play.group(("Recv", 10, 1))
    told = sums(play)
    each = {1: 2010 - 1001, 4: 2040 - 1001}
    assert told == {1: (4, 4 * each[1]), 4: (3, 3 * each[4])}


def test_rows_say_whose_they_are_and_since_when() -> None:
    play = listening()
    play.group(("Recv", 10, 1))
    play.say("sleep", TOLD_MS)
    play.group(("Recv", 10, 1))
    rows = play.run().ops
    (row,) = rows[rows["func"] == PEER_WAIT]
    assert (row["comm_hash"], row["rank"], row["n_ranks"], row["version"]) == (0xABC, 3, 8, 1)
    assert 0 < row["start_ns"] < row["stop_ns"]
    assert row["stop_ns"] - row["start_ns"] >= 500_000_000


def test_nothing_is_told_in_between_or_of_what_has_no_group() -> None:
    play = listening()
    play.group(("Recv", 10, 1), times=20)
    assert not sums(play)
    play = listening()
    for _ in range(2):
        lone = play.p2p("Recv", 10, 1)
        play.stop(lone)
        play.channel(lone, 100, 300)
        play.say("sleep", TOLD_MS)
    assert not sums(play)


def test_large_communicators_have_none() -> None:
    play = listening(ranks=65)
    for _ in range(2):
        play.group(("Recv", 10, 1))
        play.say("sleep", TOLD_MS)
    assert not sums(play)


def test_a_channel_without_a_usable_stop_is_not_summed() -> None:
    play = listening()
    for stop in (0, 2010):
        plan = play.plan()
        task = play.p2p("Recv", 10, 1, plan=plan)
        play.channel(task, 1001, stop)
        play.stop(task, plan)
        play.say("sleep", TOLD_MS)
    play.group(("Recv", 10, 1))
    assert sums(play) == {1: (2, 2 * 1009)}


@pytest.mark.parametrize("kind", ["memory", "thread"])
def test_handles_hold_the_peer_cleanly(kind: str) -> None:
    play = Play(5, kind=kind)
    play.arm()
    play.init(ranks=64)
    play.group(*(("Recv", 10, peer) for peer in (0, 1, 2, 62, 63)), times=4)
    play.say("sleep", TOLD_MS)
    play.group(("Recv", 10, 63))
    assert set(sums(play)) == {0, 1, 2, 62, 63}


def test_the_header_and_its_mirror_agree() -> None:
    header = Path(__file__).parents[2] / "probes" / "nccl_profiler" / "lanterne_usdt.h"
    assert f"#define LANTERNE_FUNC_PEER_WAIT {PEER_WAIT}\n" in header.read_text()
