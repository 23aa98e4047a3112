"""Expert placement: the published example, and what must hold for any load."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanterne.collector.analyse import placement

DATA = Path(os.environ.get("LANTERNE_DATA", Path(__file__).parents[3] / "shared" / "data"))


def test_published_example() -> None:
    path = DATA / "eplb_golden.json"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    golden = json.loads(path.read_text())
    found = placement.place(
        golden["weight"],
        golden["num_replicas"],
        groups=golden["num_groups"],
        nodes=golden["num_nodes"],
        gpus=golden["num_gpus"],
    )
    assert found.phy2log.tolist() == golden["phy2log"]
    assert found.logcnt.sum(axis=1).tolist() == [16, 16]
    # Groups of three experts stay whole on a node of eight slots.
    for layer in found.phy2log:
        nodes = [{int(e) // 3 for e in half} for half in layer.reshape(2, 8)]
        assert not nodes[0] & nodes[1]
        assert nodes[0] | nodes[1] == {0, 1, 2, 3}


def test_global_mode_by_hand() -> None:
    """Groups that do not divide by the nodes: one pool. Loads 8 1 1 2, six slots, three GPUs."""
    found = placement.place([[8.0, 1.0, 1.0, 2.0]], 6, groups=1, nodes=3, gpus=3)
    # Expert 0 gets both spare slots (8, then 4 against 2): three replicas of 8/3 each.
    assert found.logcnt.tolist() == [[3, 1, 1, 1]]
    # Heaviest first: a replica of 0 to each GPU, then 2, 1, 1 to GPUs 0, 1, 2.
    assert found.phy2log.tolist() == [[0, 3, 0, 1, 0, 2]]
    assert found.log2phy.tolist() == [[[0, 2, 4], [3, -1, -1], [5, -1, -1], [1, -1, -1]]]
    np.testing.assert_allclose(
        placement.gpu_load(found, [[8.0, 1.0, 1.0, 2.0]]), [[8 / 3 + 2, 8 / 3 + 1, 8 / 3 + 1]]
    )


@st.composite
def _problems(draw: st.DrawFn) -> tuple[np.ndarray, int, int, int, int]:
    nodes = draw(st.sampled_from([1, 2, 4]))
    gpus = nodes * draw(st.sampled_from([1, 2, 4]))
    groups = draw(st.sampled_from([1, 2, 4, 8]))
    experts = groups * draw(st.integers(1, 4)) * gpus
    slots = experts + gpus * draw(st.integers(0, 3))
    layers = draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**32 - 1))
    load = np.random.default_rng(seed).pareto(1.5, (layers, experts)) * draw(
        st.sampled_from([0.0, 1.0, 1e6])
    )
    return load, slots, groups, nodes, gpus


@settings(max_examples=60, deadline=None)
@given(_problems())
def test_any_load(problem: tuple[np.ndarray, int, int, int, int]) -> None:
    load, slots, groups, nodes, gpus = problem
    found = placement.place(load, slots, groups=groups, nodes=nodes, gpus=gpus)
    experts = load.shape[1]
    assert found.phy2log.shape == (len(load), slots)
    assert (found.logcnt >= 1).all()
    assert (found.logcnt.sum(axis=1) == slots).all()
    for layer in range(len(load)):
        for expert in range(experts):
            where = found.log2phy[layer, expert]
            assert (where[: found.logcnt[layer, expert]] >= 0).all()
            assert (where[found.logcnt[layer, expert] :] == -1).all()
            assert (found.phy2log[layer, where[where >= 0]] == expert).all()
    np.testing.assert_allclose(
        placement.gpu_load(found, load).sum(axis=1), load.sum(axis=1), rtol=1e-9
    )
    scaled = placement.place(load * 4.0, slots, groups=groups, nodes=nodes, gpus=gpus)
    assert (scaled.phy2log == found.phy2log).all()


def test_moved_counts_new_residents_only() -> None:
    old = placement.in_order(1, 4, 2)  # GPU 0: 0 1, GPU 1: 2 3
    assert placement.moved(old, old) == 0
    assert placement.moved(old, placement.from_slots([[1, 0, 3, 2]], 4, 2)) == 0
    assert placement.moved(old, placement.from_slots([[0, 2, 1, 3]], 4, 2)) == 2


@pytest.mark.parametrize(
    ("load", "arguments", "text"),
    [
        ([[1.0, float("nan")]], (2, 1, 1, 1), "finite"),
        ([[1.0, -1.0]], (2, 1, 1, 1), "not negative"),
        ([1.0, 2.0], (2, 1, 1, 1), "layers, experts"),
        ([[1.0, 2.0]], (1, 1, 1, 1), "cannot hold"),
        ([[1.0, 2.0]], (3, 1, 1, 2), "slots must be a multiple of gpus"),
        ([[1.0, 2.0]], (6, 1, 2, 3), "gpus must be a multiple of nodes"),
        ([[1.0, 2.0, 3.0]], (4, 2, 1, 2), "experts must be a multiple of groups"),
        ([[1.0, 2.0]], (2, 0, 1, 1), "at least 1"),
    ],
)
def test_refused(load: object, arguments: tuple[int, int, int, int], text: str) -> None:
    slots, groups, nodes, gpus = arguments
    with pytest.raises(ValueError, match=text):
        placement.place(load, slots, groups=groups, nodes=nodes, gpus=gpus)  # type: ignore[arg-type]


def test_slots_refused() -> None:
    with pytest.raises(ValueError, match="expert 1 has no slot"):
        placement.from_slots([[0, 0]], 2, 1)
    with pytest.raises(ValueError, match="outside"):
        placement.from_slots([[0, 2]], 2, 1)
