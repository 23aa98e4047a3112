"""Clock estimates from exchanges whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from lanterne.collector.clock import WINDOW, ClockObservation, NodeClock

S = 10**9
US = 1000


def exchange(
    sent: int, *, offset: float, out: int, back: int, stay: int = 10 * US, drift: float = 0.0
) -> ClockObservation:
    """An exchange that leaves the agent at collector time `sent`; collector = agent + offset."""

    def agent(collector: int) -> int:
        return int(collector - offset - drift * (collector - S))

    return ClockObservation(
        node="n",
        agent_sent_ns=agent(sent),
        collector_received_ns=sent + out,
        collector_sent_ns=sent + out + stay,
        agent_received_ns=agent(sent + out + stay + back),
    )


def test_nothing_known_at_first() -> None:
    assert NodeClock().estimate(0) is None


def test_symmetric_exchange_is_exact() -> None:
    clock = NodeClock()
    o = exchange(S, offset=5e12, out=50 * US, back=50 * US)
    assert clock.add(o)
    estimate = clock.estimate(o.agent_received_ns)
    assert estimate is not None
    assert estimate.offset_ns == pytest.approx(5e12, abs=1)
    assert estimate.error_ns == pytest.approx(50 * US, abs=1)


def test_shortest_round_trip_decides_and_bounds_the_error() -> None:
    rng = np.random.default_rng(0)
    clock = NodeClock()
    for i in range(5):
        out, back = 50 * US + rng.integers(0, 5000 * US, 2)
        clock.add(exchange(S + i * S, offset=-7e11, out=int(out), back=int(back)))
    clock.add(exchange(7 * S, offset=-7e11, out=40 * US, back=60 * US))
    estimate = clock.estimate(int(7 * S + 7e11))
    assert estimate is not None
    assert abs(estimate.offset_ns + 7e11) <= estimate.error_ns
    assert estimate.error_ns < 55 * US


def test_drift_is_followed() -> None:
    rng = np.random.default_rng(1)
    clock, drift = NodeClock(), 30e-6
    for i in range(50):
        out, back = 50 * US + rng.exponential(20 * US, 2).astype(int)
        clock.add(exchange(S + i * S, offset=1e10, out=int(out), back=int(back), drift=drift))
    later = 55 * S
    estimate = clock.estimate(int(later - 1e10 - drift * (later - S)))
    assert estimate is not None
    truth = 1e10 + drift * (later - S)
    assert abs(estimate.offset_ns - truth) <= estimate.error_ns
    assert estimate.error_ns < 150 * US  # without the fit 50 ppm of unknown drift add up


def test_one_lucky_exchange_does_not_decide_for_minutes() -> None:
    rng = np.random.default_rng(2)
    clock, drift = NodeClock(), 50e-6
    clock.add(exchange(S, offset=1e10, out=10 * US, back=10 * US, drift=drift))
    for i in range(1, WINDOW - 1):
        out, back = 50 * US + rng.exponential(500 * US, 2).astype(int)
        clock.add(exchange(S + i * 5 * S, offset=1e10, out=int(out), back=int(back), drift=drift))
    later = 315 * S
    estimate = clock.estimate(int(later - 1e10 - drift * (later - S)))
    assert estimate is not None
    truth = 1e10 + drift * (later - S)
    assert abs(estimate.offset_ns - truth) <= estimate.error_ns
    assert estimate.error_ns < 1000 * US  # by its age it would be 15 ms


def test_unknown_drift_widens_the_error() -> None:
    clock = NodeClock()
    o = exchange(S, offset=0, out=10 * US, back=10 * US)
    clock.add(o)
    near, far = (clock.estimate(o.agent_received_ns + s * S) for s in (0, 10))
    assert near is not None
    assert far is not None
    assert far.error_ns - near.error_ns == pytest.approx(10 * S * 50e-6)


@pytest.mark.parametrize(
    "times", [(100, 50, 40, 200), (200, 50, 60, 100), (0, 50, 500, 100), (0, 1, 2, 61 * S)]
)
def test_impossible_exchanges_are_counted(times: tuple[int, int, int, int]) -> None:
    clock = NodeClock()
    assert not clock.add(ClockObservation("n", *times))
    assert clock.rejected == 1
    assert clock.estimate(0) is None


def test_reboot_of_the_agents_machine_starts_anew() -> None:
    clock = NodeClock()
    clock.add(exchange(100 * S, offset=0, out=US, back=US))
    clock.add(exchange(200 * S, offset=199 * S, out=500 * US, back=500 * US))
    estimate = clock.estimate(S)
    assert estimate is not None
    assert estimate.offset_ns == pytest.approx(199 * S, abs=1)


def test_memory_is_bounded_and_old_exchanges_leave() -> None:
    clock = NodeClock()
    clock.add(exchange(S, offset=0, out=US, back=US))
    for i in range(WINDOW):
        clock.add(exchange(2 * S + i, offset=500, out=900 * US, back=900 * US))
    estimate = clock.estimate(2 * S)
    assert estimate is not None
    assert estimate.error_ns >= 900 * US
