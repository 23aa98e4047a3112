"""Classes from made figures: one rank is late, and the readings tell why, or do not."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from lanterne.collector.analyse import attribution, ops
from lanterne.collector.analyse.attribution import Kind, Witness, classify
from lanterne.collector.analyse.throttle import throttled
from lanterne.collector.readings import Gpu

F64 = npt.NDArray[np.float64]
SLOW = 2


def kind(**change: object) -> Kind:
    base: dict[str, object] = {
        "op": ops.ALL_REDUCE,
        "role": 0,
        "evidence": ops.ENQUEUE,
        "instances": 50,
        "own": np.array([10.0, 10, 15]),
        "blocked": np.array([8.0, 8, 13]),
        "size": np.ones(3),
    }
    found = base | change
    return Kind(**({"mean": found["own"]} | found))  # type: ignore[arg-type]


def witness(**change: object) -> Witness:
    """The late rank is so for 250 of 1000 ns; all others know nothing."""
    base: dict[str, object] = {
        "synced": np.full(3, math.nan),
        "starved": np.full(3, math.nan),
        "cpu": np.full(3, math.nan),
        "span_ns": 1000.0,
    }
    return Witness(**(base | change))  # type: ignore[arg-type]


NO_SYNC = np.zeros(3)
DEVICE = {"evidence": ops.DEVICE, "blocked": NO_SYNC}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "slow_compute"),
        ({"blocked": np.array([8.0, 8, 8])}, "slow_host"),
        ({"blocked": NO_SYNC}, "unknown"),
        ({"evidence": ops.BLOCKING, "blocked": NO_SYNC}, "slow_compute"),
        (DEVICE, "unknown"),
        ({"role": 2, "size": np.array([1, 1, 1.5])}, "hot_expert"),
        ({"role": 2, "size": np.array([1, 1, 1.1])}, "slow_compute"),
        ({"role": 1, "size": np.array([1, 1, 1.5])}, "slow_compute"),
        ({"own": np.array([10.0, 10, 9])}, "unknown"),
        (DEVICE | {"role": 2, "size": np.array([1, 1, 1.5])}, "hot_expert"),
        (DEVICE | {"role": 2, "size": np.array([1, 1, 1.1])}, "unknown"),
    ],
)
def test_classes(change: dict[str, object], expected: str) -> None:
    found = classify([kind(**change)], SLOW)
    assert attribution.CLASSES[found.klass] == expected


def test_class_comes_from_the_kind_that_costs_most() -> None:
    host = kind(blocked=np.array([8.0, 8, 8]), instances=10)
    assert classify([host, kind()], SLOW).klass == attribution.SLOW_COMPUTE


@pytest.mark.parametrize(
    ("synced", "expected"),
    [
        # A late host is blocked by so much less than the ranks that wait for it.
        ([0.7, 0.7, 0.45], "slow_host"),
        # A slow GPU blocks its own host as long as it does the others'.
        ([0.7, 0.7, 0.7], "slow_compute"),
        # Hosts that do not synchronise tell nothing, nor do readings that are missing.
        ([0.01, 0.01, 0.0], "unknown"),
        ([math.nan, math.nan, 0.4], "unknown"),
        ([0.7, 0.7, math.nan], "unknown"),
    ],
)
def test_device_times_and_synchronise_calls(synced: list[float], expected: str) -> None:
    found = classify([kind(**DEVICE)], SLOW, witness(synced=np.array(synced)))
    assert attribution.CLASSES[found.klass] == expected


@pytest.mark.parametrize("slow_host", [False, True])
def test_who_is_slow_every_other_time_has_lost_what_its_mean_says(slow_host: bool) -> None:
    """Its median is that of the slow half, by chance: twice the time that was lost."""
    halves = {"own": np.array([10.0, 10, 30]), "mean": np.array([10.0, 10, 20]), "instances": 40}
    expected = attribution.SLOW_HOST if slow_host else attribution.SLOW_COMPUTE
    blocked = np.array([8.0, 8, 8 if slow_host else 17])
    assert classify([kind(**halves, blocked=blocked)], SLOW).klass == expected
    synced = witness(synced=np.array([0.39, 0.39, 0.1 if slow_host else 0.38]))
    assert classify([kind(**(DEVICE | halves))], SLOW, synced).klass == expected


def test_hot_expert_on_device_times_needs_no_synchronise_calls() -> None:
    hot = kind(**DEVICE, role=ops.COMBINE, size=np.array([1, 1, 1.5]))
    assert classify([hot], SLOW, witness()).klass == attribution.HOT_EXPERT
    late = witness(synced=np.array([0.7, 0.7, 0.45]))
    assert classify([hot], SLOW, late).klass == attribution.SLOW_HOST


@pytest.mark.parametrize(
    ("starved", "cpu", "words"),
    [([0, 0, 0.2], [0.5, 0.5, 0.5], "run queue"), ([0, 0, 0], [0.5, 0.5, 0.7], "busy"),
     ([0, 0, 0], [0.5, 0.5, 0.5], "not on the CPU")],
)  # fmt: skip
def test_what_a_late_host_did(starved: list[float], cpu: list[float], words: str) -> None:
    seen = witness(synced=np.array([0.7, 0.7, 0.45]), starved=np.array(starved), cpu=np.array(cpu))
    found = classify([kind(**DEVICE)], SLOW, seen)
    assert found.klass == attribution.SLOW_HOST
    assert words in found.why


def test_cpu_job_that_was_starved_or_off_the_cpu() -> None:
    blocking = kind(evidence=ops.BLOCKING, blocked=NO_SYNC)
    none = np.zeros(3)

    def of(starved: list[float], cpu: list[float]) -> int:
        seen = witness(synced=none, starved=np.array(starved), cpu=np.array(cpu), has_gpu=False)
        return classify([blocking], SLOW, seen).klass

    assert of([0, 0, 0.2], [0.4, 0.4, 0.4]) == attribution.SLOW_HOST
    assert of([0, 0, 0], [0.4, 0.4, 0.4]) == attribution.SLOW_HOST  # asleep, or reading files
    assert of([0, 0, 0], [0.4, 0.4, 0.65]) == attribution.SLOW_COMPUTE


def test_load_explains_own_time_by_the_peers_time_per_token() -> None:
    """Only the time before the dispatch is known, and it holds the expert layer, too."""
    load = np.array([1.0, 1.2, 1.4, 1.1, 3.0])
    own = 5 + 2 * load
    of = {"own": own, "blocked": own, "size": np.ones(5), "role": ops.DISPATCH}
    nothing = np.full(5, math.nan)
    seen = Witness(nothing, nothing, nothing, load=load)
    assert classify([kind(**of)], 4, seen).klass == attribution.HOT_EXPERT
    slower = own.copy()
    slower[4] += 20  # far more than its tokens cost elsewhere
    found = classify([kind(**(of | {"own": slower, "blocked": slower}))], 4, seen)
    assert found.klass == attribution.SLOW_COMPUTE
    even = Witness(nothing, nothing, nothing, load=np.ones(5))
    assert classify([kind(**of)], 4, even).klass == attribution.SLOW_COMPUTE


def gpu(clock: float, *reasons: str, most: float = 2e9) -> Gpu:
    values = {"sm_clock_hertz": clock, "sm_clock_max_hertz": most}
    return Gpu(0, "", "", "", values, reasons, {})


@pytest.mark.parametrize(
    ("own", "peers", "expected"),
    [
        (gpu(1.2e9, "sw_thermal"), [gpu(1.9e9), gpu(1.9e9)], True),
        (gpu(1.2e9, "sw_power_cap"), [gpu(1.9e9), gpu(1.9e9)], True),
        (gpu(1.2e9, "sw_power_cap"), [gpu(1.2e9, "sw_power_cap")] * 2, False),  # all at the cap
        (gpu(1.2e9), [gpu(1.9e9)], False),  # no reason: idle, or between two boosts
        (gpu(1.2e9, "idle"), [gpu(1.9e9)], False),
        (gpu(1.2e9, "hw_slowdown"), [None], True),  # no peer known: its own maximum
        (gpu(1.2e9, "sw_power_cap"), [], False),
        (None, [gpu(1.9e9)], False),
    ],
)
def test_throttled(own: Gpu | None, peers: list[Gpu | None], expected: bool) -> None:
    assert bool(throttled(own, peers)) is expected


def test_throttled_gpu_is_a_slow_gpu_with_a_reason() -> None:
    seen = witness(synced=np.full(3, 0.7), throttle=("", "", "SM clock 1200 MHz, peers 1900 MHz"))
    found = classify([kind(**DEVICE)], SLOW, seen)
    assert (found.klass, found.why) == (attribution.THROTTLED, seen.throttle[SLOW])
    # Its clock is no reason for the host to be late.
    late = witness(synced=np.array([0.7, 0.7, 0.45]), throttle=seen.throttle)
    assert classify([kind(**DEVICE)], SLOW, late).klass == attribution.SLOW_HOST
