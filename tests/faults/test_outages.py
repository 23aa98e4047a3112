"""What keeps an agent and its collector apart, or their disk and clock from them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import psutil
import pytest

from lanterne.agent import segments
from lanterne.proto import telemetry_pb2 as pb
from tests.faults.fleet import PATIENCE, SLOW, Fleet, assert_bounded, scale
from tests.faults.kills import settle
from tests.faults.network import Namespace
from tests.faults.preload import Preload
from tests.rig.rig import Job
from tests.stack import wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.faults, pytest.mark.timeout(1800)]

CUT_SECONDS = scale("CUT_SECONDS", 15)
STOP_SECONDS = scale("STOP_SECONDS", 10)
HOUR = 3600
Figures = Callable[..., None]


@contextmanager
def judged(fleet: Fleet) -> Iterator[Job]:
    """A job of the fleet whose slow rank is named."""
    fleet.start()
    with fleet.job() as job:
        fleet.release(job)
        fleet.wait_named(("w", SLOW))
        yield job


def spool_metric(fleet: Fleet, name: str, **labels: str) -> float:
    return fleet.nodes["a"].agent_metrics().total(f"lanterne_agent_spool_{name}", **labels)


def nothing_lost(fleet: Fleet) -> None:
    for node in fleet.nodes.values():
        metrics = node.agent_metrics()
        assert metrics.total("lanterne_agent_batches_dropped_total") == 0
        assert metrics.total("lanterne_agent_events_lost_total") == 0


def test_network_cut(tmp_path: Path, figures: Figures) -> None:
    """The job that ran before it ends in the cut, and another one with another slow rank begins."""
    with Namespace() as network:
        fleet = Fleet(tmp_path, relay=False)
        for node in fleet.nodes.values():
            node.prefix = network.prefix
            text = node.agent_config.read_text()
            text = text.replace(
                f"127.0.0.1:{fleet.collector.grpc_port}",
                f"{network.here}:{fleet.collector.grpc_port}",
            )
            text = text.replace(f"127.0.0.1:{node.agent_port}", f"0.0.0.0:{node.agent_port}")
            node.agent_config.write_text(text)
            node.agent_url = f"http://{network.there}:{node.agent_port}"
        config = fleet.collector.collector_config
        listen = f'"127.0.0.1:{fleet.collector.grpc_port}"'
        config.write_text(
            config.read_text().replace(listen, listen.replace("127.0.0.1", "0.0.0.0"))
        )
        with fleet, judged(fleet) as first:
            before = fleet.use()
            network.cut()
            began = time.monotonic()
            time.sleep(CUT_SECONDS / 3)
            first.stop()
            with fleet.job("later", slow=2) as second:
                fleet.release(second)
                time.sleep(max(0.0, began + CUT_SECONDS - time.monotonic()))
                queued = fleet.nodes["a"].agent_metrics().total("lanterne_agent_queue_batches")
                network.heal()
                verdict = fleet.wait_named(("later", 2))
                second.stop()
                fleet.wait_counted(second, "later")
                delivered = fleet.wait_taken(first, second)
            nothing_lost(fleet)
            after = fleet.use()
    figures(
        cut_seconds=CUT_SECONDS,
        batches_waiting=queued,
        verdict_seconds=round(verdict, 1),
        operations=delivered,
        before=before,
        after=after,
    )
    assert queued >= CUT_SECONDS / 2
    assert_bounded(before, after)


@pytest.mark.parametrize("which", ["agent", "collector"])
def test_stopped_process(which: str, tmp_path: Path, figures: Figures) -> None:
    with Fleet(tmp_path, relay=False) as fleet, judged(fleet) as job:
        before = fleet.use()
        stopped = fleet.nodes["a"].agent if which == "agent" else fleet.collector.collector
        assert stopped is not None
        process = psutil.Process(stopped.pid)
        every = [process, *process.children(recursive=True)]
        for one in every:
            one.send_signal(signal.SIGSTOP)
        time.sleep(STOP_SECONDS)
        for one in every:
            one.send_signal(signal.SIGCONT)
        verdict = fleet.wait_named_anew(("w", SLOW))
        job.stop()
        delivered = fleet.wait_counted(job)
        nothing_lost(fleet)
        after = fleet.use()
    figures(
        stopped_seconds=STOP_SECONDS,
        verdict_seconds=round(verdict, 1),
        operations=delivered,
        before=before,
        after=after,
    )
    assert_bounded(before, after)


def test_disk_full(tmp_path: Path, figures: Figures) -> None:
    """Nowhere to put a batch while there is no collector: memory bridges it, and the disk again as
    soon as there is room."""
    with Fleet(tmp_path) as fleet:
        spool = fleet.spool("a")
        spool.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "lnfault", spool], check=True)
        try:
            with judged(fleet) as job:
                fleet.collector.kill("collector")
                ballast = spool / "ballast"
                fill(ballast)
                wait_for(
                    lambda: spool_metric(fleet, "errors_total", reason="full") >= 1,
                    PATIENCE,
                    "a full disk is counted",
                )
                kept = fleet.nodes["a"].agent_metrics().total("lanterne_agent_queue_batches")
                ballast.unlink()
                wait_for(lambda: spool_metric(fleet, "success") == 1, PATIENCE, "it works again")
                fleet.collector.start_collector()
                verdict = fleet.wait_named(("w", SLOW))
                job.stop()
                settle(fleet)
                nothing_lost(fleet)
                for name in fleet.nodes:
                    fleet.end_agent(name, kill=False)
                account = fleet.account([job])
        finally:
            for node in fleet.nodes.values():
                node.stop_one("agent")
            subprocess.run(["umount", spool], check=False)
    figures(**asdict(account), in_memory_batches=kept, verdict_seconds=round(verdict, 1))
    assert account.adds_up
    assert account.made == account.delivered


def fill(path: Path) -> None:
    """Until the disk is full."""
    with path.open("wb") as file, contextlib.suppress(OSError):
        while True:
            os.write(file.fileno(), b"\0" * 4096)


def test_torn_spool(tmp_path: Path, figures: Figures) -> None:
    """One batch damaged in the middle and the newest cut off: these two are lost, and counted."""
    with Fleet(tmp_path) as fleet:
        with judged(fleet) as job:
            fleet.collector.kill("collector")
            wait_for(lambda: len(set(fleet.spooled("a"))) >= 5, PATIENCE, "batches on disk")
            fleet.end_agent("a", kill=True)
            damage(fleet)
            fleet.collector.start_collector()
            fleet.start_agent("a")
            dropped = wait_for(partial(damaged, fleet), PATIENCE, "the damage is counted")
            verdict = fleet.wait_named(("w", SLOW))
            job.stop()
            settle(fleet)
            for name in fleet.nodes:
                fleet.end_agent(name, kill=False)
            account = fleet.account([job])
    figures(
        **asdict(account),
        damaged_batches=len(fleet.damaged),
        counted=dropped,
        verdict_seconds=round(verdict, 1),
    )
    assert dropped == len(fleet.damaged) == 2
    assert account.adds_up


def damaged(fleet: Fleet) -> float:
    metrics = fleet.nodes["a"].agent_metrics()
    return metrics.total("lanterne_agent_batches_dropped_total", reason="spool_damaged")


def damage(fleet: Fleet) -> None:
    """Of the segment that was written last: a byte of its second batch, and the end of its last."""
    path = max(fleet.spool("a").glob("*.seg"))
    data = bytearray(path.read_bytes())
    batches = [r for r in segments.scan(bytes(data)).records if r.kind == segments.BATCH]
    told = [
        pb.Batch.FromString(bytes(data[r.at + segments.HEAD_BYTES : r.end])).health.events_read
        for r in batches
    ]
    for n in (1, len(batches) - 1):
        key = ("a", batches[n].epoch, batches[n].sequence)
        fleet.damaged[key] = told[n] - told[n - 1]
        fleet.last_run("a").on_disk.discard(key[1:])
    data[batches[1].at + segments.HEAD_BYTES + 20] ^= 0x40
    path.write_bytes(bytes(data[: batches[-1].end - 10]))


def test_slow_disk(tmp_path: Path, figures: Figures) -> None:
    """Every sync of the spool takes seven seconds while there is no collector."""
    preload = Preload(tmp_path, slow=tmp_path / "a" / "spool")
    with Fleet(tmp_path, env=preload.env) as fleet:
        with judged(fleet) as job:
            preload.set(sync_ms=7000)
            fleet.collector.kill("collector")
            wait_for(
                lambda: spool_metric(fleet, "errors_total", reason="slow") >= 1,
                PATIENCE,
                "a slow disk is counted",
            )
            fleet.collector.start_collector()
            verdict = fleet.wait_named(("w", SLOW))
            preload.set()
            wait_for(lambda: spool_metric(fleet, "success") == 1, PATIENCE, "it works again")
            job.stop()
            settle(fleet)
            nothing_lost(fleet)
            for name in fleet.nodes:
                fleet.end_agent(name, kill=False)
            account = fleet.account([job])
    preload.close()
    figures(**asdict(account), verdict_seconds=round(verdict, 1))
    assert account.adds_up
    assert account.made == account.delivered


def test_collectors_disk_stalls(tmp_path: Path, figures: Figures) -> None:
    """No sync of the collector's state comes to an end for a while: verdicts go on, agents keep
    what is not on its disk, and all arrives once."""
    preload = Preload(tmp_path, slow=tmp_path / "state")
    with Fleet(tmp_path, collector_env=preload.env) as fleet:
        with judged(fleet) as job:
            preload.set(sync_ms=600_000)

            def metric(name: str, **labels: str) -> float:
                page = fleet.collector.collector_metrics()
                return page.total(f"lanterne_collector_{name}", **labels)

            wait_for(
                lambda: metric("state_errors_total", reason="journal_stalled") >= 1,
                PATIENCE,
                "a stalled disk is counted",
            )
            wait_for(
                lambda: metric("batches_total", status="unkept") >= 1, PATIENCE, "agents keep them"
            )
            time.sleep(STOP_SECONDS)
            assert fleet.named() == {("w", SLOW)}
            kept = fleet.nodes["a"].agent_metrics().total("lanterne_agent_queue_batches")
            preload.set()
            verdict = fleet.wait_named_anew(("w", SLOW))
            job.stop()
            settle(fleet)
            nothing_lost(fleet)
            for name in fleet.nodes:
                fleet.end_agent(name, kill=False)
            account = fleet.account([job])
    preload.close()
    figures(
        **asdict(account),
        stalled_seconds=STOP_SECONDS,
        batches_waiting=kept,
        verdict_seconds=round(verdict, 1),
    )
    assert kept >= 1
    assert account.adds_up
    assert account.made == account.delivered


def test_clock_steps(tmp_path: Path, figures: Figures) -> None:
    """CLOCK_REALTIME of the agents an hour ahead, an hour behind, and right again; the same for the
    collector; and an agent that is started anew an hour before it was last. CLOCK_MONOTONIC cannot
    be stepped, here or anywhere."""
    agents = Preload(tmp_path)
    (tmp_path / "c").mkdir()
    collector = Preload(tmp_path / "c")
    verdicts = []
    with Fleet(tmp_path, env=agents.env, collector_env=collector.env) as fleet:
        with judged(fleet) as job:
            for clock in (agents, collector):
                for seconds in (HOUR, -HOUR, 0):
                    clock.set(clock_seconds=seconds)
                    verdicts.append(fleet.wait_named_anew(("w", SLOW)))
            fleet.end_agent("a", kill=False)
            agents.set(clock_seconds=-HOUR)
            fleet.start_agent("a")
            fleet.runs[-1].started_ns -= HOUR * 10**9
            verdicts.append(fleet.wait_named(("w", SLOW)))
            job.stop()
            settle(fleet)
            for name in fleet.nodes:
                fleet.end_agent(name, kill=False)
            fleet.runs[-1].ended_ns -= HOUR * 10**9
            account = fleet.account([job])
    agents.close()
    collector.close()
    figures(**asdict(account), verdict_seconds=round(max(verdicts), 1))
    assert account.adds_up
    assert account.lost_with_agent == account.lost_in_kernel == 0
