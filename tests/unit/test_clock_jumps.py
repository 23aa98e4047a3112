"""Suspend, reboot and steps of the wall clock: offsets, epochs and verdicts stay right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lanterne.collector.analyse.engine import Engine
from lanterne.collector.analyse.load_history import History
from lanterne.collector.batch import DecodedBatch
from lanterne.collector.clock import DRIFT_LIMIT, ClockObservation, NodeClock
from lanterne.collector.decode import decode
from lanterne.proto import telemetry_pb2 as pb

S = 10**9
MS = 10**6
US = 10**3


def exchange(at: float, offset: float, out: float, back: float) -> ClockObservation:
    """Begun at collector time `at`; collector = agent + offset."""
    return ClockObservation(
        node="n",
        agent_sent_ns=int(at - offset),
        collector_received_ns=int(at + out),
        collector_sent_ns=int(at + out),
        agent_received_ns=int(at + out + back - offset),
    )


@pytest.mark.parametrize(
    ("before", "after", "pause"),
    [
        (5 * S, 3605 * S, 3600),  # the agent's host slept for an hour: its clock stood still
        (5 * S, -3595 * S, 3600),  # the collector's did
        (100 * S, 290 * S, 400),  # booted anew, and up for longer by now than when last heard
        (5 * S, 5.5 * S, 10),  # half a second
    ],
)
def test_the_offset_is_right_again_at_the_first_exchange(
    before: float, after: float, pause: int
) -> None:
    clock = NodeClock()
    for n in range(60):
        clock.add(exchange((1000 + n) * S, before, 50 * US, 50 * US))
    # Worse round trips than those of before: these must not win.
    first = exchange((1060 + pause) * S, after, 3 * MS, MS)
    clock.add(first)
    estimate = clock.estimate(first.agent_received_ns)
    assert estimate is not None
    assert abs(estimate.offset_ns - after) <= estimate.error_ns
    assert estimate.error_ns <= 2 * MS


@settings(max_examples=150, deadline=None)
@example(-0.00016, 0.0, [(4.58e8, 1e4, 1.0), (1e4, 1e4, 0.5)])  # drifts while the first one lasts
@given(
    st.floats(-0.9 * DRIFT_LIMIT, 0.9 * DRIFT_LIMIT),
    st.floats(-1e13, 1e13),
    st.lists(
        st.tuples(st.floats(1e4, 1e9), st.floats(1e4, 1e9), st.floats(0.5, 600)),
        min_size=2,
        max_size=30,
    ),
)
def test_slow_and_lopsided_networks_and_drift_are_no_jump(
    drift: float, offset: float, exchanges: list[tuple[float, float, float]]
) -> None:
    clock, at = NodeClock(), 1e14
    for out, back, pause in exchanges:
        at += pause * S
        clock.add(exchange(at, offset + drift * (at - 1e14), out, back))
        at += out + back
    assert len(clock._samples) == len(exchanges)


def batch(epoch: int, sequence: int, *, boot: str = "b", end: int = 100 * S) -> DecodedBatch:
    message = pb.Batch(
        schema=1, node="n", epoch=epoch, sequence=sequence, stride=1, boot_id=boot,
        agent_version=f"{epoch}", start_ns=end - S, end_ns=end,
    )  # fmt: skip
    return decode(message.SerializeToString(), received_ns=1000 * S + sequence)


def test_the_newest_run_is_the_one_heard_of_last_whatever_the_wall_clock_said() -> None:
    engine = Engine()
    hour = 3600 * S
    for epoch, sequence in ((5 * hour, 1), (5 * hour, 2), (4 * hour, 1), (4 * hour, 2)):
        engine.apply(batch(epoch, sequence))
        (node,) = engine.snapshot(0.0).nodes
        assert (node.epoch, node.agent_version) == (epoch, str(epoch))
    engine.apply(batch(4 * hour, 1))  # late, of the same run
    engine.flush()
    assert engine.registry.nodes[0].head.sequence == 2


def test_a_reboot_of_the_collectors_own_host_is_not_taken_for_the_same_clock() -> None:
    engine = Engine(boot_id="now")
    engine.apply(batch(1, 1, boot="before"))  # spooled before the host went down
    (node,) = engine.snapshot(0.0).nodes
    assert np.isnan(node.clock_offset_seconds)
    engine.apply(batch(2, 1, boot="now", end=S))
    (node,) = engine.snapshot(0.0).nodes
    assert node.clock_offset_seconds == 0


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_load_of_the_hour_is_kept_when_the_wall_clock_steps(step: float) -> None:
    history = History(1, 2)
    total = np.zeros((1, 2))
    now = 1_700_000_000.0
    for minute in range(10):
        load = np.array([[float(minute), 1.0]])
        history.add(load, now + 60 * minute + (step if minute >= 5 else 0))
        total += load
    hour, seconds = history.hour(now + 60 * 9 + step)
    assert 0 <= seconds <= 3660
    if step < 0:
        np.testing.assert_allclose(hour, total)
    else:  # what was before is more than an hour ago, by this clock
        np.testing.assert_allclose(hour, [[5.0 + 6 + 7 + 8 + 9, 5.0]])
