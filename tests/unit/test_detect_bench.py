"""The benchmark of the detector measures what it says: jobs, baselines, events, figures."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from lanterne.collector.decode import decode
from lanterne.collector.snapshot import CLASSES
from tests.bench.detect import baselines, cases, document, job, matrices, plots, summary
from tests.bench.detect.cases import Case
from tests.bench.detect.context import NS
from tests.bench.detect.scoring import Score, Span, median, per_hour, score, spans, wilson
from tests.bench.detect.wire import Wire

SLOW = Case("slow_compute", 8, 1.5, "lognormal", "blocking")


def test_the_same_case_is_the_same_run_and_the_seed_sets_differ() -> None:
    first, again = job.simulate(SLOW), job.simulate(SLOW)
    np.testing.assert_array_equal(first.stages[0].arrival, again.stages[0].arrival)
    other = job.simulate(dataclasses.replace(SLOW, seeds="tune"))
    assert other.stages[0].own[0, 0] != first.stages[0].own[0, 0]


def test_nobody_leaves_before_the_last_has_come() -> None:
    simulated = job.simulate(SLOW)
    stage = simulated.stages[0]
    assert (stage.end >= stage.arrival.max(axis=1, keepdims=True)).all()
    # Own time is what lies between one end and the next arrival.
    np.testing.assert_allclose(stage.arrival[1:] - stage.end[:-1], stage.own[1:], rtol=1e-6)


@pytest.mark.parametrize("kind", cases.RANK_KINDS)
def test_a_slow_rank_is_as_much_slower_as_the_case_says(kind: str) -> None:
    simulated = job.simulate(Case(kind, 16, 1.5, "lognormal", "blocking"))
    own = sum(s.own for s in simulated.stages)
    for e in simulated.faults.episodes:
        others = [r for r in range(16) if r not in e.ranks]
        during = own[e.full : e.last]
        usual = during[:, others].mean()
        np.testing.assert_allclose(during[:, list(e.ranks)].mean(axis=0) / usual, 1.5, rtol=0.1)


def test_with_roles_the_halves_differ_by_design() -> None:
    simulated = job.simulate(Case("none", 8, 1.0, "roles", "blocking"))
    assert [g.name for g in simulated.groups] == ["world", "prefill", "decode"]
    world = next(s for s in simulated.stages if s.group == 0)
    ratio = np.median(world.own[:, 4:]) / np.median(world.own[:, :4])
    assert ratio == pytest.approx(job.ROLE_FACTOR, rel=0.02)
    assert len({s.op for s in simulated.stages}) == 3


@pytest.mark.parametrize("evidence", cases.EVIDENCE)
@pytest.mark.parametrize("noise", cases.NOISES)
def test_every_event_that_is_seen_is_on_the_wire_once(noise: str, evidence: str) -> None:
    case = Case("slow_compute", 8, 1.2, noise, evidence)
    simulated = job.simulate(case)
    wire = Wire(case, simulated)
    rows = 0
    for second in range(simulated.seconds):
        for data in wire.batches(second):
            rows += len(decode(data, received_ns=second * NS).instances)
    seen = sum(int(s.sees.sum()) for s in simulated.stages)
    assert rows == seen  # 8 ranks: no batch is lost as a whole
    assert bool(simulated.absent.size) == (noise == "missing")


def test_a_hang_leaves_the_last_operation_without_its_culprit() -> None:
    for evidence, seen in (("enqueue", 7), ("device", 7), ("blocking", 0)):
        simulated = job.simulate(Case("hang", 8, 1.0, "lognormal", evidence))
        assert simulated.stages[-1].sees[-1].sum() == seen
        (span,) = spans(simulated)
        assert span.end <= simulated.seconds + 1


def test_an_event_begins_in_the_fault_or_is_a_false_alarm() -> None:
    named = np.zeros((120, 3), bool)
    named[52:90, 1] = True  # found after 3 s, two windows and more too long
    named[55:57, 2] = named[60:61, 2] = True  # two alarms about somebody else
    named[110:115, 1] = True  # long after the fault
    found = score(named, [Span(1, 50.0, 50.0, 80.0, "hang")], named * 9, CLASSES)
    assert (found.found, found.missed, found.false, found.stayed) == (1, 0, 3, 0)
    assert found.delays == [pytest.approx(3 / 5)]
    assert found.stays == [pytest.approx(2.0)]
    assert found.classes == {"hang": 1}
    named[80:108, 1] = True  # it never gets over it
    assert score(named, [Span(1, 50.0, 50.0, 80.0, "hang")]).false == 4
    before = np.zeros((120, 3), bool)
    before[20:100, 1] = True  # named all along: it says nothing
    nothing = score(before, [Span(1, 50.0, 50.0, 80.0, "hang")])
    assert (nothing.found, nothing.missed, nothing.false) == (0, 1, 1)


def test_intervals_against_published_values() -> None:
    p, low, high = wilson(8, 10) or (0, 0, 0)
    assert (p, round(low, 3), round(high, 3)) == (0.8, 0.49, 0.943)
    assert wilson(0, 0) is None
    assert (wilson(5, 5) or (0, 0, 0))[2] == 1.0
    rate, low, high = per_hour(0, 24 * 3600) or (1, 1, 1)
    assert (rate, low) == (0, 0)
    assert high * 24 == pytest.approx(3.69, abs=0.1)  # exact Poisson bound
    middle, low, high = median([1.0, 2.0, 3.0]) or (0, 0, 0)
    assert low <= middle == 2.0 <= high


def windows(own: list[list[float]], wait: list[list[float]] | None = None) -> baselines.Windows:
    x = np.array(own)
    w = np.zeros_like(x) if wait is None else np.array(wait)
    return baselines.Windows(x, x, w, np.zeros((*x.shape, x.shape[1])))


def test_relative_score_names_below_three_quarters() -> None:
    found = baselines.nvrx_relative(windows([[1.0, 1.3, 1.34]]))
    assert found.tolist() == [[False, False, True]]
    found = baselines.nvrx_individual(windows([[2.0, 1.0], [2.0, 1.4], [2.0, 1.0]]))
    assert found.tolist() == [[False, False], [False, True], [False, False]]


def test_z_cannot_fire_below_eleven_ranks() -> None:
    for ranks, fires in ((10, False), (11, True)):
        own = np.ones((1, ranks))
        own[0, 3] = 100.0
        assert baselines.z_score(windows(own.tolist()))[0, 3] == fires


def test_mad_rules() -> None:
    own = [[1.0, 1.01, 0.99, 1.02, 0.98, 1.2]]
    assert np.flatnonzero(baselines.mad_z(windows(own))[0]).tolist() == [5]
    found = baselines.short_wait(windows(own, [[10.0, 11.0, 9.0, 10.5, 9.5, 1.0]]))
    assert np.flatnonzero(found[0]).tolist() == [5]


def test_a_ratio_to_the_mean_of_means_cannot_reach_three_where_a_third_is_slow() -> None:
    wait = np.ones((9, 9))
    wait[:, 2] = 1000.0
    assert baselines.diagnose(wait)[0] == {2}
    wait[:, [4, 6]] = 1000.0
    assert baselines.diagnose(wait)[0] == set()


def test_own_history_needs_five_windows_and_leaves_out_what_it_named() -> None:
    steady = [[1.0 + 0.01 * (k % 2)] for k in range(6)]
    found = baselines.own_history(windows([*steady, [1.2], [1.2], [1.0]]))[:, 0]
    assert found.tolist() == [False] * 6 + [True, True, False]


def test_the_windows_of_the_baselines_are_the_truth_of_the_run() -> None:
    simulated = job.simulate(SLOW)
    seen = baselines.windows(simulated)
    (e, _) = simulated.faults.episodes
    middle = simulated.step_end[(e.first + e.last) // 2] / 1e9
    at = int((middle - 1) // 5)
    ratio = seen.median[at] / np.median(seen.median[at])
    assert ratio[e.ranks[0]] == pytest.approx(1.5, rel=0.05)
    assert seen.wait[at].argmin() == e.ranks[0]
    assert seen.matrix[at].sum(axis=0).argmax() == e.ranks[0]


def test_a_matrix_has_what_its_case_says() -> None:
    case = matrices.MatrixCase("slow_path", 16, 2.0, "nodes", "several", 0)
    wait, (senders, receivers, paths) = matrices.build(case)
    assert (senders, receivers, len(paths)) == (set(), set(), 2)
    assert all(wait[i, j] > 10 * np.median(wait) for i, j in paths)


def test_where_a_baseline_is_ahead_it_is_named() -> None:
    scores = {"ours": Score(found=1, missed=1), "z_score": Score(found=2)}
    scores |= {name: Score(missed=2) for name in baselines.NAMES if name != "z_score"}
    result = summary.build([(SLOW, scores)], [], [], "report")
    assert result["baseline_ahead"] == ["slow_compute 8 1.5 blocking: z_score"]
    floors = {f["what"]: f for f in result["floors"]}
    recall = floors["1.2 and above, 4 ranks and more: recall"]
    assert (recall["value"], recall["holds"]) == (0.5, False)
    text = document.overview({"wall_seconds": 0, **result})
    assert "z_score" in text


def test_a_false_alarm_in_one_of_the_days_breaks_the_promise() -> None:
    days = [{"noise": n, "ranks": 64, "hours": 24.0, "events": e} for n, e in (("a", 0), ("b", 2))]
    (floor,) = summary.floor_of_days(days)
    assert (floor["value"], floor["holds"], floor["by_size"]) == (2, False, {64: 2})
    assert summary.floor_of_days(days[:1])[0]["holds"]
    assert summary.floor_of_days([]) == []


def test_a_plot_is_xml_and_has_every_series() -> None:
    series = {"ours & <b>": [(0.5, 0.4, 0.6), None], "other": [(1.0, 0.9, 1.0), (0.0, 0.0, 0.1)]}
    root = ET.fromstring(plots.lines("t", "x", "y", ["a", "b"], series))
    lines = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert len(lines) == 2
    assert "ours & <b>" in "".join(root.itertext())
