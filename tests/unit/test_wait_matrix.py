"""Slow senders, receivers and paths from matrices of waits: published ones, and made ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanterne.collector.analyse import WaitDiagnosis, diagnose_wait_matrix

F64 = npt.NDArray[np.float64]
DATA = Path(os.environ.get("LANTERNE_DATA", Path(__file__).parents[3] / "shared" / "data"))


def published() -> dict[str, dict[str, object]]:
    path = DATA / "wait_matrices.json"
    if not path.exists():
        pytest.skip(f"{path} is absent: set LANTERNE_DATA to the folder of the published data")
    matrices: dict[str, dict[str, object]] = json.loads(path.read_text())["matrices"]
    return matrices


def test_published_matrices_give_exactly_the_listed_ranks_and_paths() -> None:
    matrices = published()
    assert matrices
    for name, one in matrices.items():
        expected: dict[str, list[object]] = one["expected"]  # type: ignore[assignment]
        found = diagnose_wait_matrix(one["wait"])  # type: ignore[arg-type]
        assert list(found.slow_senders) == expected.get("slow_sender_ranks", []), name
        assert list(found.slow_receivers) == expected.get("slow_receiver_ranks", []), name
        paths = [list(path) for path in found.slow_paths]
        assert paths == expected.get("slow_paths", []), name


def quiet(n: int, seed: int, level: float = 100.0) -> F64:
    return np.random.default_rng(seed).lognormal(np.log(level), 0.15, (n, n))


def slowed(
    n: int,
    seed: int,
    senders: tuple[int, ...] = (),
    receivers: tuple[int, ...] = (),
    paths: tuple[tuple[int, int], ...] = (),
    delay: float = 500.0,
) -> F64:
    wait = quiet(n, seed)
    wait[:, list(senders)] += delay
    wait[list(receivers)] += delay
    for path in paths:
        wait[path] += 2 * delay
    return wait


@pytest.mark.parametrize("n", [3, 4, 8, 16, 64])
@pytest.mark.parametrize("seed", range(5))
def test_one_of_each(n: int, seed: int) -> None:
    rank = seed % n
    other = (rank + 1) % n
    assert diagnose_wait_matrix(slowed(n, seed, senders=(rank,))).slow_senders == (rank,)
    assert diagnose_wait_matrix(slowed(n, seed, receivers=(rank,))).slow_receivers == (rank,)
    found = diagnose_wait_matrix(slowed(n, seed, paths=((rank, other),)))
    assert found.slow_paths == ((rank, other),)
    assert not found.slow_senders
    assert not found.slow_receivers


@pytest.mark.parametrize(
    ("n", "senders", "receivers", "paths"),
    [
        (8, (2, 4), (), ()),
        (8, (), (0, 7), ()),
        (8, (0, 3, 5), (), ()),
        (4, (0, 1), (), ()),  # half of the ranks
        (8, (1, 3, 5, 7), (), ()),
        (4, (), (2, 3), ()),
        (8, (2,), (6,), ()),
        (8, (2,), (), ((6, 1),)),
        (16, (2, 9), (4,), ((6, 1), (7, 0))),
        (64, tuple(range(0, 64, 3)), (), ()),  # a third
    ],
)
def test_several_at_once(
    n: int, senders: tuple[int, ...], receivers: tuple[int, ...], paths: tuple[tuple[int, int], ...]
) -> None:
    for seed in range(5):
        found = diagnose_wait_matrix(slowed(n, seed, senders, receivers, paths))
        assert found.slow_senders == senders
        assert found.slow_receivers == receivers
        assert found.slow_paths == paths


def test_delays_are_told() -> None:
    found = diagnose_wait_matrix(slowed(8, 1, senders=(2,), receivers=(5,), delay=1000.0))
    assert found.sender_delay == pytest.approx((1000,), rel=0.1)
    assert found.receiver_delay == pytest.approx((1000,), rel=0.1)


def test_topology_by_design_is_no_fault() -> None:
    node = np.arange(16) // 8
    wait = quiet(16, 3)
    wait[node[:, None] != node] *= 20
    assert not diagnose_wait_matrix(wait, node=node)
    assert diagnose_wait_matrix(wait)  # without the topology it looks like one
    wait[:, 5] += 10_000
    wait[3, 12] += 20_000
    found = diagnose_wait_matrix(wait, node=node)
    assert (found.slow_senders, found.slow_receivers) == ((5,), ())
    assert found.slow_paths == ((3, 12),)


def test_a_slow_block_is_paths_not_ranks() -> None:
    """Each rank of one half waits for each of the other: no row or column is to blame alone."""
    wait = quiet(4, 4)
    wait[np.ix_([0, 1], [2, 3])] += 1000
    found = diagnose_wait_matrix(wait)
    assert not found.slow_senders
    assert not found.slow_receivers
    assert found.slow_paths == ((0, 2), (0, 3), (1, 2), (1, 3))


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_nothing_where_nothing_stands_out(n: int) -> None:
    assert not diagnose_wait_matrix(np.zeros((n, n)))
    assert not diagnose_wait_matrix(np.full((n, n), 7.0))
    assert not diagnose_wait_matrix(np.full((n, n), np.nan))
    assert diagnose_wait_matrix(np.zeros((0, 0))) == WaitDiagnosis()


def test_two_ranks_have_a_path_and_no_more() -> None:
    found = diagnose_wait_matrix([[0, 900], [100, 0]])
    assert found.slow_paths == ((0, 1),)
    assert not found.slow_senders
    assert not found.slow_receivers


def test_zeros_but_one_column() -> None:
    wait = np.zeros((5, 5))
    wait[:, 3] = 1.0
    assert diagnose_wait_matrix(wait).slow_senders == (3,)


def test_missing_cells_cost_only_themselves() -> None:
    wait = slowed(8, 6, senders=(2,))
    wait[4] = np.nan
    wait[1, 2] = np.nan
    wait[np.eye(8, dtype=bool)] = np.nan
    assert diagnose_wait_matrix(wait).slow_senders == (2,)


@pytest.mark.parametrize("wait", [np.zeros((2, 3)), np.zeros(4), np.zeros((2, 2, 2))])
def test_what_is_not_square_is_refused(wait: F64) -> None:
    with pytest.raises(ValueError, match="square"):
        diagnose_wait_matrix(wait)


def test_nodes_must_fit() -> None:
    with pytest.raises(ValueError, match="one entry for each of 4 ranks"):
        diagnose_wait_matrix(np.zeros((4, 4)), node=[0, 1])


@pytest.mark.parametrize("seed", range(200))
def test_noise_names_nobody(seed: int) -> None:
    n = int(np.random.default_rng(seed).choice([2, 3, 4, 8, 16, 64]))
    assert not diagnose_wait_matrix(quiet(n, seed))


FAULTS = st.fixed_dictionaries(
    {
        "n": st.sampled_from([4, 5, 8, 12]),
        "seed": st.integers(0, 1000),
        "senders": st.sampled_from([(), (0,), (1, 3)]),
        "receivers": st.sampled_from([(), (2,)]),
        "paths": st.sampled_from([(), ((3, 0),), ((1, 2),)]),
    }
)


@settings(max_examples=60, deadline=None)
@given(FAULTS, st.randoms(use_true_random=False))
def test_names_follow_a_permutation(faults: dict[str, object], random: object) -> None:
    wait = slowed(**faults)  # type: ignore[arg-type]
    order = list(range(len(wait)))
    random.shuffle(order)  # type: ignore[attr-defined]
    before = diagnose_wait_matrix(wait)
    after = diagnose_wait_matrix(wait[np.ix_(order, order)])
    assert sorted(order[r] for r in after.slow_senders) == list(before.slow_senders)
    assert sorted(order[r] for r in after.slow_receivers) == list(before.slow_receivers)
    assert sorted((order[i], order[j]) for i, j in after.slow_paths) == list(before.slow_paths)


@settings(max_examples=60, deadline=None)
@given(FAULTS, st.integers(-30, 30))
def test_only_ratios_matter(faults: dict[str, object], exponent: int) -> None:
    wait = slowed(**faults)  # type: ignore[arg-type]
    before, after = diagnose_wait_matrix(wait), diagnose_wait_matrix(wait * 2.0**exponent)
    assert before.slow_senders == after.slow_senders
    assert before.slow_receivers == after.slow_receivers
    assert before.slow_paths == after.slow_paths


@settings(max_examples=60, deadline=None)
@given(FAULTS)
def test_transposed_senders_are_receivers(faults: dict[str, object]) -> None:
    wait = slowed(**faults)  # type: ignore[arg-type]
    before, after = diagnose_wait_matrix(wait), diagnose_wait_matrix(wait.T)
    assert before.slow_senders == after.slow_receivers
    assert before.slow_receivers == after.slow_senders
    assert sorted((j, i) for i, j in after.slow_paths) == list(before.slow_paths)
