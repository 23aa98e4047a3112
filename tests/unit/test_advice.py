"""The advisor: what it says of loads, when it is silent, and what it needs to know."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from lanterne.collector.analyse import advice, placement, rebalance
from lanterne.collector.analyse.advice import Advisor, Group
from lanterne.collector.snapshot import AdviceView, EngineView, ExpertView

LAYERS, EXPERTS, GPUS = 3, 16, 4
GROUPS = {"job": Group(GPUS, 1)}


def _view(load: np.ndarray, when: float, **more: object) -> ExpertView:
    facts: dict[str, object] = {
        "workload": "job",
        "engine": "vllm",
        "source": "intake",
        "model": "",
        "unit": "logical",
        "layer": tuple(range(3, 3 + len(load))),
        "load": load,
        "tokens": load.sum(axis=1) / 2,
        "physical_load": None,
        "rank_of_expert": None,
        "logical_of_physical": None,
        "measures": {},
        "summary": {},
        "window_end": when,
        "primary": True,
    }
    return ExpertView(**(facts | more))  # type: ignore[arg-type]


def _skewed(rng: np.random.Generator) -> np.ndarray:
    """Experts 0 to 3, which start on GPU 0, take half of all."""
    p = np.full(EXPERTS, 0.5 / 12)
    p[:4] = 0.125
    return np.array([rng.multinomial(10_000, p) for _ in range(LAYERS)], dtype=float)


def _even(rng: np.random.Generator) -> np.ndarray:
    return np.array([rng.multinomial(10_000, np.full(EXPERTS, 1 / EXPERTS)) for _ in range(LAYERS)])


def _run(
    loads: Iterable[np.ndarray],
    config: advice.AdviceConfig | None = None,
    engines: tuple[EngineView, ...] = (),
    groups: dict[str, Group] | None = None,
    **more: object,
) -> dict[str, AdviceView]:
    """One planning window for each load; -> the last advice by kind."""
    advisor = Advisor(config or advice.AdviceConfig(seconds=1.0))
    now = 1000.0
    advisor.add([_view(np.zeros((LAYERS, EXPERTS)), now, **more)], GROUPS)
    for load in loads:
        now += 1.0
        advisor.add([_view(load, now, **more)], GROUPS if groups is None else groups, engines)
    return {a.kind: a for a in advisor.advice()}


def test_skew_is_planned_away() -> None:
    rng = np.random.default_rng(1)
    config = advice.AdviceConfig(seconds=1.0, expert_bytes=float(1 << 30))
    found = _run([_skewed(rng) for _ in range(6)], config)
    (piece,) = found.values()
    assert piece.kind == "placement"  # as good as with more memory: half of 4 GPUs' work fits
    # GPU 0 had a half, a quarter is the best there is.
    assert piece.gain == pytest.approx(0.5, abs=0.04)
    assert piece.cost["added_gib"] == 0
    assert piece.cost["migration_gib"] == piece.cost["moved_experts"] > 0
    assert piece.evidence["assumed_order"] == 1
    assert {o.kind for o in piece.options} == {"placement", "hot_set", "replication", "nothing"}
    assert piece.plan is not None
    assert piece.layers == (3, 4, 5)
    new = placement.from_slots(piece.plan, EXPERTS, piece.gpus)
    old = placement.in_order(LAYERS, EXPERTS, GPUS)
    assert rebalance.gain(old, new, _skewed(rng)) == pytest.approx(piece.gain, abs=0.04)


def test_after_the_plan_there_is_nothing_to_do() -> None:
    rng = np.random.default_rng(2)
    plan = _run([_skewed(rng) for _ in range(6)])["placement"].plan
    assert plan is not None
    rank_of = np.empty_like(plan)
    np.put_along_axis(rank_of, plan, np.broadcast_to(np.arange(EXPERTS) // 4, plan.shape), axis=1)
    found = _run([_skewed(rng) for _ in range(6)], rank_of_expert=rank_of)
    assert list(found) == ["nothing"]
    assert "assumed" not in found["nothing"].reason


def test_even_load_says_nothing_and_why() -> None:
    rng = np.random.default_rng(3)
    found = _run([_even(rng) for _ in range(8)])
    assert list(found) == ["nothing"]
    assert "gained" in found["nothing"].reason
    assert found["nothing"].gain == 0


def test_unknown_places_say_so() -> None:
    rng = np.random.default_rng(4)
    found = _run([_skewed(rng) for _ in range(6)], groups={})
    assert list(found) == ["nothing"]
    assert "where the experts are" in found["nothing"].reason
    uneven = np.tile(np.minimum(np.arange(EXPERTS) // 3, 3), (LAYERS, 1))
    assert "where" in _run([_skewed(rng)], rank_of_expert=uneven)["nothing"].reason


def test_physical_experts_are_in_their_slots() -> None:
    """Replicas as the engine placed them: expert 0 twice, slots given out of rank order."""
    logical = np.array([[0, 0, 1, 2]])
    ranks = np.array([[1, 0, 0, 1]])
    view = _view(
        np.ones((1, 3)), 1.0, unit="physical", rank_of_expert=ranks, logical_of_physical=logical
    )
    where, assumed = advice.current_placement(view, None)
    assert where is not None
    assert where.phy2log.tolist() == [[0, 1, 0, 2]]
    assert not assumed


def test_bias_only_in_training() -> None:
    rng = np.random.default_rng(5)
    loads = [_skewed(rng) for _ in range(5)]
    assert "bias" not in _run(loads)
    piece = _run(loads, engine="megatron")["bias"]
    assert piece.warning
    assert piece.evidence["share_of_experts"] == 1.0
    assert np.isnan(piece.gain)


def test_shared_experts_beside_hot_ones() -> None:
    rng = np.random.default_rng(6)
    config = advice.AdviceConfig(seconds=1.0, shared_expert_ranks={"job": 0})
    piece = _run([_skewed(rng) for _ in range(5)], config)["move_shared"]
    assert piece.evidence["layers"] == LAYERS
    assert piece.gain > 0.2
    config = advice.AdviceConfig(seconds=1.0, shared_expert_ranks={"job": 3})
    assert "move_shared" not in _run([_skewed(rng) for _ in range(5)], config)


def test_drops_are_told_by_the_engine_only() -> None:
    rng = np.random.default_rng(7)
    loads = [_even(rng) for _ in range(5)]
    assert "stop_dropping" not in _run(loads)
    told = EngineView("job", "vllm", "", {"dropped_assignments": 300.0})
    piece = _run(loads, engines=(told,))["stop_dropping"]
    assert piece.evidence["dropped_share"] == pytest.approx(300 / 30_000)
    assert 1 < piece.evidence["capacity_factor_needed"] < 1.3


def test_one_plan_a_window_and_the_gone_forgotten() -> None:
    rng = np.random.default_rng(8)
    advisor = Advisor(advice.AdviceConfig(seconds=1.0))
    names = ("a", "b", "c")
    for now in (1.0, 2.0):
        advisor.add([_view(_even(rng), now, workload=n) for n in names], {})
    assert [a.workload for a in advisor.advice()] == ["a"]
    advisor.add([_view(_even(rng), 2.5, workload=n) for n in names], {})
    assert [a.workload for a in advisor.advice()] == ["a", "b"]
    advisor.add([_view(_even(rng), 2.6, workload="b")], {})
    assert [a.workload for a in advisor.advice()] == ["b"]
    # Views of ranks, and those that are not the workload's first, are not planned for.
    advisor.add([_view(_even(rng), 9.0, unit="rank"), _view(_even(rng), 9.0, primary=False)], {})
    assert advisor.advice() == ()
