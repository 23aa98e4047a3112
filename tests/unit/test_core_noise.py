"""Who is named in noise: stragglers, transients, and nobody where it is all noise."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from lanterne.collector.analyse import own, straggler
from lanterne.collector.analyse.engine import Engine
from lanterne.collector.analyse.settings import EngineConfig
from lanterne.collector.decode import decode
from tests.unit.test_core_engine import BOOT, MS, SMALL, simulate

F64 = npt.NDArray[np.float64]
STEP_MS = 20.0


def noise(rng: np.random.Generator, steps: int, ranks: int, *, sigma: float, memory: float) -> F64:
    """[step, rank] lognormal factors of median 1; `memory`: correlation of neighbouring steps."""
    shocks = rng.normal(0, sigma * np.sqrt(1 - memory**2), (steps, ranks))
    level = np.empty_like(shocks)
    level[0] = rng.normal(0, sigma, ranks)
    for k in range(1, steps):
        level[k] = memory * level[k - 1] + shocks[k]
    return np.exp(level)


def follow(own_ms: F64, config: EngineConfig = SMALL) -> list[set[int]]:
    """Ranks named in the snapshot after each second."""
    engine = Engine(config, boot_id=BOOT)
    found = []
    for n, batch in enumerate(simulate((own_ms * MS).astype(np.int64)).batches()):
        batch.sequence = n + 1
        engine.apply(decode(batch.SerializeToString(), received_ns=batch.end_ns))
        snapshot = engine.snapshot(0.0)
        found.append(set(snapshot.ranks.rank[snapshot.ranks.straggler == 1].tolist()))
    return found


@pytest.mark.parametrize("memory", [0.0, 0.9, 0.97])
@pytest.mark.parametrize(("ranks", "sigma"), [(4, 0.1), (8, 0.05), (8, 0.2), (32, 0.1)])
def test_pure_noise_names_nobody(ranks: int, sigma: float, memory: float) -> None:
    rng = np.random.default_rng(int(1000 * memory) + ranks)
    times = STEP_MS * noise(rng, 2500, ranks, sigma=sigma, memory=memory)
    assert set().union(*follow(times)) == set()


@pytest.mark.parametrize("sigma", [0.02, 0.08])
def test_a_straggler_in_the_noise_is_named_alone_and_stays_named(sigma: float) -> None:
    rng = np.random.default_rng(7)
    times = STEP_MS * noise(rng, 2000, 8, sigma=sigma, memory=0.9)
    times[:, 3] *= 1.3
    found = follow(times)
    assert set().union(*found) == {3}
    assert all(names == {3} for names in found[12:])


def test_ten_slow_seconds_are_a_transient_that_passes() -> None:
    rng = np.random.default_rng(8)
    times = STEP_MS * noise(rng, 2500, 8, sigma=0.01, memory=0.9)
    times[750:1250, 5] *= 1.1
    found = follow(times)
    assert set().union(*found) <= {5}  # it was slow: naming it is right, nobody else
    slow_until = 15 + 11
    assert all(not names for names in found[:15])
    assert all(not names for names in found[slow_until + 12 :])


def test_a_second_straggler_that_the_first_one_hides() -> None:
    rng = np.random.default_rng(9)
    times = STEP_MS * noise(rng, 1500, 8, sigma=0.02, memory=0.5)
    times[:, 2] *= 1.5
    times[:, 6] *= 1.2  # nobody ever waits for it, as long as rank 2 is slower
    assert follow(times)[-1] == {2, 6}


def test_slower_than_its_peers_but_not_worth_naming() -> None:
    """Above the ratio and far outside its peers' spread, but little of the time is own time."""
    rng = np.random.default_rng(10)
    times = 2.0 * noise(rng, 1200, 8, sigma=0.01, memory=0.5)
    times[:, 4] *= 1.1

    def run(least: float) -> set[int]:
        engine = Engine(
            EngineConfig(
                cells=1 << 18,
                rows=1 << 14,
                communicators=16,
                members=1024,
                processes=256,
                own_cells=1 << 20,
                min_gain_share=least,
            ),
            boot_id=BOOT,
        )
        job = simulate((times * MS).astype(np.int64), transfer=18 * MS)
        for n, batch in enumerate(job.batches()):
            batch.sequence = n + 1
            engine.apply(decode(batch.SerializeToString(), received_ns=batch.end_ns))
            snapshot = engine.snapshot(0.0)
        assert snapshot.ranks.straggler_ratio[4] > straggler.RATIO
        return set(snapshot.ranks.rank[snapshot.ranks.straggler == 1].tolist())

    assert run(0.02) == set()
    assert run(0.005) == {4}


def test_gain_counts_what_the_others_would_stop_waiting() -> None:
    own = np.array([[1.0, 1.0], [1.2, 1.0], [3.0, 1.5], [2.2, np.nan]], np.float32)
    np.testing.assert_allclose(straggler.gain(own, np.array([2])), [(0.8 + 0.5) / 2])
    np.testing.assert_allclose(
        straggler.gain(own, np.array([2, 3])), [(1.8 + 0.5) / 2, 0.5], rtol=1e-6
    )
    np.testing.assert_allclose(straggler.gain(own, np.arange(4)), np.zeros(4))


def test_noise_is_what_the_ranks_do_not_have_in_common() -> None:
    rng = np.random.default_rng(11)
    steps, ranks = 512, 8
    swing = 1 + 0.3 * np.sin(np.arange(steps) / 40)[:, None]  # another batch size, for all
    quiet = 20 * np.exp(rng.normal(0, 0.02, (steps, ranks))) * swing
    restless = 20 * noise(rng, steps, ranks, sigma=0.2, memory=0.97) * swing
    both = np.stack([quiet.T, restless.T], axis=1).astype(np.float32)
    found, _ = own.noise(both)
    assert found[0] < 0.01 * 20
    # The medians of many such windows differ by about as much.
    medians = np.median(
        [noise(rng, steps, 1, sigma=0.2, memory=0.97)[:, 0] for _ in range(60)], axis=1
    )
    assert found[1] == pytest.approx(20 * medians.std(), rel=0.6)
