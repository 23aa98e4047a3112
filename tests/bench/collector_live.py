"""The real collector under the load of many agents, over real gRPC, and how fresh its figures are.

    python -m tests.bench.collector_live [--ranks 16384] [--rate 20] [--seconds 20]

One process stands for all agents: a stream for each node of eight ranks over a few dozen
connections, a batch a second on each, evenly spread over the second. The batches are encoded once
and re-stamped: protobuf merges the parts of a message, so what changes is appended to the rest.
Freshness is seen from outside: the collector's list of nodes is polled, and a window counts as
there when the reply that shows it has arrived. An event lies anywhere in its window, hence the
uniform second on top. Prometheus's part is played, too: /metrics is read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import psutil

from lanterne.proto import telemetry_pb2 as pb
from tests.bench.collector_pipeline import RANKS_PER_NODE, T0, node_batch
from tests.stack import SCRIPTS, fetch, wait_for

NS = 10**9
CONNECTIONS = 64
SETTLE_SECONDS = 8.0  # streams open, memory is touched for the first time, the first verdicts
POLL_SECONDS = 0.2
SCRAPE_SECONDS = 15.0


class Agent:
    """One node's batches, re-stamped."""

    def __init__(self, rng: np.random.Generator, number: int, *, ranks: int, size: int, rate: int):
        whole = pb.Batch.FromString(node_batch(rng, number, 0, ranks=ranks, size=size, rate=rate))
        self.name = whole.node
        self._rate = rate
        self._seq = np.frombuffer(whole.instances.seq, "<u4")
        self._arrival = np.frombuffer(whole.instances.arrival_ns, "<u8") - np.uint64(T0)
        whole.boot_id = f"boot-{number}"
        whole.epoch = time.time_ns()
        for field in ("sequence", "start_ns", "end_ns", "stride"):
            whole.ClearField(field)
        whole.instances.ClearField("seq")
        whole.instances.ClearField("arrival_ns")
        self._fixed = whole.SerializeToString()
        self.clock: pb.ClockSample | None = None

    def frame(self, window: int, start_ns: int) -> bytes:
        """The frame of the window from `start_ns` (CLOCK_MONOTONIC) on."""
        changing = pb.Batch(
            sequence=window + 1,
            start_ns=start_ns,
            end_ns=start_ns + NS,
            realtime_offset_ns=time.time_ns() - time.monotonic_ns(),
            stride=1,
            instances=pb.Instances(
                seq=(self._seq + np.uint32(window * self._rate)).tobytes(),
                arrival_ns=(self._arrival + np.uint64(start_ns)).tobytes(),
            ),
        ).SerializeToString()
        frame = pb.Frame(
            node=self.name,
            clock=self.clock,
            batch=self._fixed + changing,
            sent_ns=time.monotonic_ns(),
        )
        return frame.SerializeToString()


class Feed:
    """All agents, in one event loop."""

    def __init__(self, address: str, agents: list[Agent], seconds: float) -> None:
        self._address = address
        self._agents = agents
        self._seconds = seconds
        self.sent = 0
        self.late = 0.0  # seconds by which a batch left after its time, at worst
        self.acks: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()  # streams, by why they ended early
        self.stride = 1
        self.round_trips: list[float] = []

    async def run(self) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection for each channel
        channels = [grpc.aio.insecure_channel(self._address, options) for _ in range(CONNECTIONS)]
        start = time.monotonic_ns() + NS
        await asyncio.gather(
            *(
                self._talk(channels[i % len(channels)], agent, start + i * NS // len(self._agents))
                for i, agent in enumerate(self._agents)
            )
        )
        for channel in channels:
            await channel.close(None)

    async def _talk(self, channel: grpc.aio.Channel, agent: Agent, start: int) -> None:
        report = channel.stream_stream(
            "/lanterne.v1.Telemetry/Report",
            request_serializer=None,
            response_deserializer=pb.Ack.FromString,
        )
        try:
            await self._stream(agent, start, report(None))
        except grpc.aio.AioRpcError as error:
            self.broken[str(error.code())] += 1

    async def _stream(self, agent: Agent, start: int, call: Any) -> None:
        for window in range(int(self._seconds)):
            due = start + (window + 1) * NS
            await asyncio.sleep(max(0, due - time.monotonic_ns()) / NS)
            self.late = max(self.late, (time.monotonic_ns() - due) / NS)
            await call.write(agent.frame(window, due - NS))
            self.sent += 1
            ack = await call.read()
            if not isinstance(ack, pb.Ack):
                self.broken["ended"] += 1
                return
            self._answered(agent, ack)
        await call.done_writing()

    def _answered(self, agent: Agent, ack: pb.Ack) -> None:
        now = time.monotonic_ns()
        self.acks[pb.Status.Name(ack.status)] += 1
        self.stride = max(self.stride, ack.stride)
        self.round_trips.append((now - ack.frame_sent_ns) / NS)
        agent.clock = pb.ClockSample(
            agent_sent_ns=ack.frame_sent_ns,
            collector_received_ns=ack.collector_received_ns,
            collector_sent_ns=ack.collector_sent_ns,
            agent_received_ns=now,
        )


def feed(options: argparse.Namespace) -> None:
    rng = np.random.default_rng(1)
    agents = [
        Agent(rng, n, ranks=options.ranks, size=options.size, rate=options.rate)
        for n in range(options.ranks // RANKS_PER_NODE)
    ]
    work = Feed(options.feed, agents, options.seconds)
    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(work.run())
    spent = sum(psutil.Process().cpu_times()[:2])
    print(
        json.dumps(
            {
                "batches_sent": work.sent,
                "acks": dict(work.acks),
                "streams_broken": dict(work.broken),
                "stride": work.stride,
                "ack_p99_s": round(float(np.quantile(work.round_trips, 0.99)), 3),
                "feeder_late_s": round(work.late, 3),
                "feeder_cpu_s": round(spent, 1),
            }
        )
    )


class Watch:
    """Polls the collector: when did each window of each node show?"""

    def __init__(self, url: str, process: psutil.Process) -> None:
        self._url = url
        self._process = process
        self._ends: dict[str, float] = {}
        self.seen: list[tuple[float, float]] = []  # (window's end, seconds until it was there)
        self.scrapes: list[float] = []
        self.rss = 0

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        scrape = time.monotonic() + 2.0
        while time.monotonic() < end:
            self._poll()
            if time.monotonic() >= scrape:
                before = time.monotonic()
                fetch(f"{self._url}/metrics", timeout=30)
                self.scrapes.append(time.monotonic() - before)
                scrape += SCRAPE_SECONDS
            time.sleep(POLL_SECONDS)

    def _poll(self) -> None:
        nodes = json.loads(fetch(f"{self._url}/api/v1/nodes", timeout=30))["nodes"]
        now = time.time()
        for node in nodes:
            name, shown = node["name"], node["last_window_end"]
            before = self._ends.get(name)
            if before is not None:
                # Several windows at once: the older ones were not there any earlier.
                for k in range(round(shown - before)):
                    self.seen.append((shown - k, now - shown + k))
            self._ends[name] = shown
        self.rss = max(self.rss, _rss(self._process))

    def delays(self) -> npt.NDArray[np.float64]:
        """Seconds from an event to its figure."""
        late = np.array([delay for _, delay in self.seen])
        return late + np.random.default_rng(2).random(len(late))

    def growth(self) -> float:
        """By how much the delay of the last third exceeds that of the first, s."""
        order = np.array([delay for _, delay in sorted(self.seen)])
        third = max(1, len(order) // 3)
        return float(np.median(order[-third:]) - np.median(order[:third]))


def measure(*, ranks: int, size: int, rate: int, seconds: float) -> dict[str, Any]:
    """Starts a collector and its agents, watches for `seconds` -> figures, and `keeps_up`."""
    with tempfile.TemporaryDirectory() as name:
        ports_file, log = Path(name) / "ports.json", Path(name) / "collector.log"
        with log.open("wb") as out:
            collector = subprocess.Popen(
                [
                    SCRIPTS / "lanterne-collector",
                    "--ingest-address=127.0.0.1:0",
                    "--http-address=127.0.0.1:0",
                    f"--ports-file={ports_file}",
                ],
                stderr=out,
                env=os.environ | {"LANTERNE_COLLECTOR_STATE_PATH": name},
                start_new_session=True,  # sessions share the CPUs evenly: not at our expense
            )
        try:
            ports = json.loads(wait_for(lambda: _text(ports_file), 30, "the collector's ports"))
            return _measure(collector.pid, ports, ranks, size, rate, seconds)
        finally:
            collector.terminate()
            try:
                collector.wait(30)
            except subprocess.TimeoutExpired:
                collector.kill()
                collector.wait()


def _family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _cpu(process: psutil.Process) -> float:
    """CPU seconds of the collector, its ingest process included."""
    return sum(sum(p.cpu_times()[:2]) for p in _family(process))


def _busy() -> float:
    """CPU seconds of the whole machine."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _rss(process: psutil.Process) -> int:
    return sum(p.memory_info().rss for p in _family(process))


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _measure(
    pid: int, ports: dict[str, int], ranks: int, size: int, rate: int, seconds: float
) -> dict[str, Any]:
    process = psutil.Process(pid)
    idle = _rss(process)
    feeder = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.bench.collector_live"),
            f"--feed=127.0.0.1:{ports['ingest']}",
            *(f"--ranks={ranks}", f"--size={size}", f"--rate={rate}"),
            f"--seconds={SETTLE_SECONDS + seconds:.0f}",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert feeder.stdin is not None
        assert feeder.stdout is not None
        feeder.stdout.readline()
        feeder.stdin.write("go\n")
        feeder.stdin.flush()
        time.sleep(1 + SETTLE_SECONDS)
        watch = Watch(f"http://127.0.0.1:{ports['http']}", process)
        generator = psutil.Process(feeder.pid)
        cpu, start = _cpu(process), time.monotonic()
        before, fed = _busy(), _cpu(generator)
        watch.run(seconds - 1)
        spent, elapsed = _cpu(process) - cpu, time.monotonic() - start
        others = _busy() - before - spent - (_cpu(generator) - fed)
        sent = json.loads(feeder.communicate(timeout=60)[0])
    finally:
        feeder.kill()
        feeder.wait()
    load = {"ranks": ranks, "comm_size": size, "operations_per_s_per_rank": rate}
    cpu_shares = {
        "collector_cpu_share": round(spent / elapsed, 3),
        "other_cpu_share": round(others / elapsed, 3),  # neither the collector nor its agents
    }
    return _figures(watch, {**load, **cpu_shares, **sent}, idle)


def _figures(watch: Watch, known: dict[str, Any], idle: int) -> dict[str, Any]:
    delays, growth = watch.delays(), watch.growth()
    accepted = known["acks"].get("STATUS_ACCEPTED", 0)
    return {
        **known,
        "event_to_metric_p50_s": round(float(np.quantile(delays, 0.5)), 3),
        "event_to_metric_p99_s": round(float(np.quantile(delays, 0.99)), 3),
        "delay_growth_s": round(growth, 3),
        "idle_rss_mb": round(idle / 1e6, 1),
        "rss_mb": round(watch.rss / 1e6, 1),
        "scrape_s": round(max(watch.scrapes), 3),
        "keeps_up": accepted == known["batches_sent"]
        and known["stride"] == 1
        and not known["streams_broken"]
        and growth < 0.5
        and float(np.median(delays)) < 3.0,  # a backlog that does not grow is one, too
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--size", type=int, default=0, help="ranks of a communicator; 0: all")
    parser.add_argument("--rate", type=int, default=20, help="operations a second and rank")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--feed", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.size = options.size or options.ranks
    if options.feed:
        feed(options)
        return 0
    found = measure(
        ranks=options.ranks, size=options.size, rate=options.rate, seconds=options.seconds
    )
    print(json.dumps(found, indent=2))
    return 0 if found["keeps_up"] else 1


if __name__ == "__main__":
    sys.exit(main())
