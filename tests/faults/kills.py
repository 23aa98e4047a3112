"""kill -9 of a random program, again and again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tests.faults.fleet import PATIENCE, SLOW, Fleet, assert_bounded, operations
from tests.stack import wait_for


def run(folder: Path, kills: int, seed: int, figures: Callable[..., None]) -> None:
    rng = random.Random(seed)
    killed = dict.fromkeys(("collector", "a", "b"), 0)
    with Fleet(folder) as fleet:
        fleet.start()
        with fleet.job() as job:
            fleet.release(job)
            fleet.wait_named(("w", SLOW))
            before = fleet.use()
            for number in range(kills):
                time.sleep(rng.uniform(0.2, 3.0))
                # Whatever chance says, the first ones meet a collector and an agent.
                victim = ("a", "collector", *rng.choices(tuple(killed)))[min(number, 2)]
                killed[victim] += 1
                if victim == "collector":
                    fleet.collector.kill("collector")
                    time.sleep(rng.uniform(0.0, 1.0))
                    fleet.collector.start_collector()
                else:
                    fleet.end_agent(victim, kill=True)
                    time.sleep(rng.uniform(0.0, 1.0))
                    fleet.start_agent(victim)
            verdict = fleet.wait_named(("w", SLOW))
            after = fleet.use()
            settle(fleet)
            # The job goes on: of a stop in good order nothing may be lost, to the last call.
            for name in fleet.nodes:
                fleet.end_agent(name, kill=False)
            job.stop()
            assert [truth["state"] for truth in job.truths()] == ["stopped"] * job.config.ranks
            assert all(truth["data_errors"] == 0 for truth in job.truths())
            account = fleet.account([job])
            assert fleet.ledger is not None
            assert fleet.ledger.delivered_operations() <= operations(job)
    figures(
        kills=kills,
        **{f"killed_{k}": v for k, v in killed.items()},
        **asdict(account),
        verdict_seconds=round(verdict, 1),
        before=before,
        after=after,
    )
    assert account.adds_up
    assert account.delivered > 0
    assert_bounded(before, after)


def settle(fleet: Fleet) -> None:
    """Until the agents have sent what earlier runs left, and have no more than a window waiting."""

    def settled() -> bool:
        pages = [node.agent_metrics() for node in fleet.nodes.values()]
        waiting = ("lanterne_agent_queue_batches", "lanterne_agent_spool_batches")
        return all(page.total(name) <= 1 for page in pages for name in waiting)

    wait_for(settled, PATIENCE, f"everything sent\n{fleet.logs()}")
