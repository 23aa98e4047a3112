"""The rows that people see: order, who waits, and why nothing is named."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from rich.console import Console

from lanterne.collector.screen import clean, headline, screen
from lanterne.collector.snapshot import Snapshot
from lanterne.collector.view import View, spans, view
from tests.fixtures.snapshots import (
    NAN,
    NOW,
    blind,
    communicator,
    joined,
    large,
    node,
    ranks,
    snapshot,
)


def test_the_straggler_comes_first_with_what_it_costs() -> None:
    row = view(snapshot()).rows[0]
    assert (row.rank, row.node, row.gpu, row.comm, row.workload) == (
        5,
        "node0",
        "5",
        "ep-8",
        "demo",
    )
    assert row.straggler
    assert row.klass == "slow_compute"
    assert row.straggler_ratio == pytest.approx(1.4545)
    assert row.recoverable_seconds_per_hour == pytest.approx(0.37 * 3600)
    assert (row.waiting, row.peers, row.waiting_ranks) == (7, 7, "0-4,6-7")
    assert row.others_wait_share == pytest.approx(0.38)
    assert row.others_wait_seconds == pytest.approx(7 * 22.8)
    assert row.own_wait_share == pytest.approx(0.01)
    assert row.evidence == "blocking"
    assert row.confidence == pytest.approx(0.92)
    assert row.samples == 120


def test_victims_are_not_waited_for() -> None:
    base = ranks()
    shares = base.wait_share + np.linspace(0, 0.05, 8)  # victims differ a little
    for row in view(snapshot(ranks=replace(base, wait_share=shares))).rows[1:]:
        assert not row.straggler
        assert row.klass == "none"
        assert row.waiting == 0
        assert row.others_wait_share is None


def test_a_named_rank_stands_before_a_costlier_one_and_only_named_drops_the_rest() -> None:
    base = ranks()
    blame = base.blame_share.copy()
    blame[2] = 0.9
    shot = snapshot(ranks=replace(base, blame_share=blame))
    assert [r.rank for r in view(shot).rows][:2] == [5, 2]
    assert [r.rank for r in view(shot, only_named=True).rows] == [5]
    assert len(view(shot, limit=3).rows) == 3


def test_unknown_numbers_are_none_and_sort_last() -> None:
    base = ranks()
    blame = base.blame_share.copy()
    ratio = base.straggler_ratio.copy()
    blame[0] = ratio[0] = NAN
    row = view(snapshot(ranks=replace(base, blame_share=blame, straggler_ratio=ratio))).rows[-1]
    assert row.rank == 0
    assert row.blame_share is None
    assert row.recoverable_seconds_per_hour is None
    assert row.straggler_ratio is None


def test_peers_are_those_of_the_same_communicator() -> None:
    other = ranks(4, slow=None, comm=1)
    shot = snapshot(
        communicators=(communicator(), communicator("dp-4", 4)), ranks=joined(ranks(), other)
    )
    rows = view(shot).rows
    assert {r.peers for r in rows if r.comm == "ep-8"} == {7}
    assert {r.peers for r in rows if r.comm == "dp-4"} == {3}


def test_blind_jobs_name_nobody_and_say_why() -> None:
    shown = view(blind("only enqueue times, and the host runs ahead"))
    assert shown.rows == ()
    assert shown.totals.stragglers == 0
    (message,) = shown.messages
    assert message.kind == "blind"
    assert message.subject == "demo/ep-8"
    assert message.text == "only enqueue times, and the host runs ahead"


def test_lost_events_stale_nodes_and_failed_libraries_are_told() -> None:
    nodes = (
        node("a", events_lost={"ring_full": 3, "state": 0}),
        node("b", connected=False, last_window_end=NOW - 90),
        node("c", libraries_failed=("/x/libnccl.so.2: truncated",)),
    )
    found = {(m.kind, m.subject): m.text for m in view(snapshot(nodes=nodes)).messages}
    assert found == {
        ("lost", "a"): "3 events lost (ring_full 3)",
        ("stale", "b"): "agent not connected, last data 90 s ago",
        ("library", "c"): "/x/libnccl.so.2: truncated",
    }
    assert view(snapshot(nodes=nodes)).totals.events_lost == 3
    assert view(snapshot(nodes=nodes)).totals.nodes_connected == 2


def test_an_empty_collector_says_what_to_do() -> None:
    nothing = snapshot(nodes=(), communicators=(), ranks=ranks(0), gpus=(), processes=())
    assert "lanterne-agent" in view(nothing).messages[0].text
    assert view(nothing).totals.last_window_end is None
    idle = snapshot(communicators=(), ranks=ranks(0))
    assert "doctor" in view(idle).messages[0].text


def test_json_gives_the_same_view_back() -> None:
    shown = view(snapshot())
    assert msgspec.json.decode(msgspec.json.encode(shown), type=View) == shown


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1, 2, 5], "0-2,5"),
        ([5, 4, 5], "4-5"),
        (list(range(0, 40, 2)), "0,2,4,6,8,10,12,14,..."),
    ],
)
def test_spans(numbers: list[int], text: str) -> None:
    assert spans(np.array(numbers, dtype=np.int64)) == text


def printed(shot: Snapshot, width: int, height: int = 24, late: float = 1.0) -> list[str]:
    shown = msgspec.structs.replace(view(shot), served_at=shot.taken_at + late)
    console = Console(width=width, height=height, color_system=None, force_terminal=False)
    with console.capture() as out:
        console.print(screen(shown, width=width, height=height, address="http://c:1"))
    return out.get().splitlines()


def test_the_screen_fits_80_by_24_and_says_it_all() -> None:
    lines = printed(large(64), 80)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    text = " ".join(lines)
    assert "64 ranks, 8/8 nodes, 1 communicator, 0 events lost, data 1.8 s old" in text
    assert "rank 32 (node00004:0) holds up ep-64 of demo: slow_compute" in text
    first = next(line for line in lines if line.startswith("  32"))
    for part in ("slow_compute", "22 min", "63/63", "38%", "blocking"):
        assert part in first
    assert lines[-1].strip() == "metrics: http://c:1/metrics"


def test_the_wide_screen_adds_confidence_and_who_waits() -> None:
    lines = printed(snapshot(), 140)
    row = next(line for line in lines if line.startswith("   5"))
    assert "92%" in row
    assert "0-4,6-7" in row


def test_the_screen_tells_blindness_health_and_a_stalled_analysis() -> None:
    blinded = " ".join(printed(blind("no device times"), 80))
    assert "Waits unknown for demo/ep-8: no device times" in blinded
    assert "No straggler" not in blinded
    assert "No straggler" in " ".join(printed(snapshot(ranks=ranks(slow=None)), 80))
    assert "stalled 60 s ago" in " ".join(printed(snapshot(), 80, late=60))


def test_names_of_jobs_cannot_steer_the_terminal() -> None:
    evil = communicator("ep\x1b[2J\n[bold]x")
    text = "\n".join(printed(snapshot(communicators=(evil,)), 140))
    assert "\x1b" not in text
    assert "[bold]x" in text
    assert clean("a\x1b\x07b") == "a??b"
    assert "\n" not in headline(view(snapshot(communicators=(evil,))).rows[0])
