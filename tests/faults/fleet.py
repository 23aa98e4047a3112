"""One collector and agents of several nodes as real processes, a job of the rig across the nodes,
and the account of every event: made by the job, seen by the kernel, delivered, or lost and why.

Each node has its own copy of the rig's libraries, so each agent sees only its node's ranks, as on
hosts of their own. Between agents and collector stands a Ledger, unless a test has a reason not to.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType

import psutil

from lanterne.agent import segments
from tests.faults.kernel_counts import KernelCounts
from tests.faults.ledger import Entry, Ledger
from tests.rig.known import ENQUEUED
from tests.rig.rig import Job, JobConfig, RigPaths, build
from tests.stack import SCRIPTS, Stack, wait_for

Sections = Mapping[str, Mapping[str, object]]

PATIENCE = 120.0  # for a condition, on a machine with other things to do
RANKS, LAYERS = 4, 2
SLOW = 1
# Steps are long against what else this machine does: an agent that comes back counts each rank's
# operations from anew, and the ranks are brought into step again by the times of their arrivals.
CONFIG = JobConfig(
    ranks=RANKS,
    ranks_per_node=2,
    tokens=32,
    hidden=64,
    layers=LAYERS,
    zipf=0.3,
    attn_us=30_000,
    expert_us=15_000,
    mode="eager",
)
SLOWER = 1.2


class Node(Stack):
    """The agent of one node; `prefix` goes before its command line."""

    prefix: Sequence[str] = ()

    def _start(self, script: str, config: Path) -> subprocess.Popen[bytes]:
        command = [*self.prefix, str(SCRIPTS / script), "--config", str(config)]
        with (self.folder / f"{script}.log").open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, env=self._env, start_new_session=True
            )


@dataclass
class Run:
    """From the start of an agent to its end."""

    node: str
    counts: KernelCounts
    started_ns: int
    ended_ns: int = 0
    killed: bool = False
    submitted: int = 0
    lost: int = 0  # in the kernel, by whatever cause
    on_disk: set[tuple[int, int]] = field(default_factory=set)  # batches in the spool at its end


@dataclass
class Account:
    """Events, unless it says otherwise."""

    made: int = 0  # calls of the ranks
    not_attached: int = 0  # while no agent of the node was running
    lost_in_kernel: int = 0
    lost_with_agent: int = 0  # read, or still in the ring, and neither sent nor on disk at the kill
    lost_damaged: int = 0  # on disk, and damaged there
    delivered: int = 0
    batches: int = 0
    duplicates: int = 0  # batches that were sent again and known
    runs: int = 0

    @property
    def adds_up(self) -> bool:
        lost = self.not_attached + self.lost_in_kernel + self.lost_with_agent + self.lost_damaged
        return self.made == self.delivered + lost


class Fleet:
    def __init__(
        self,
        folder: Path,
        nodes: Sequence[str] = ("a", "b"),
        *,
        agent: Sections | None = None,
        collector: Sections | None = None,
        env: Mapping[str, str] | None = None,
        collector_env: Mapping[str, str] | None = None,
        relay: bool = True,
    ) -> None:
        self.folder = folder
        # Batches that a test has damaged in a spool -> events that they alone told of.
        self.damaged: dict[tuple[str, int, int], int] = {}
        keep: dict[str, dict[str, object]] = {
            "analysis": {"ended_seconds": 600},
            "state": {"path": str(folder / "state")},
        }
        for section, keys in (collector or {}).items():
            keep.setdefault(section, {}).update(keys)
        self.collector = Stack(folder, [], collector=keep, env=collector_env)
        self.ledger = Ledger(f"127.0.0.1:{self.collector.grpc_port}") if relay else None
        port = self.ledger.port if self.ledger else self.collector.grpc_port
        self.paths: dict[str, RigPaths] = {}
        self.nodes: dict[str, Node] = {}
        self.runs: list[Run] = []
        for name in nodes:
            own = folder / name
            own.mkdir()
            self.paths[name] = build(dest=own / "lib")
            sections: dict[str, dict[str, object]] = {
                "collector": {"addresses": [f"127.0.0.1:{port}"], "backoff_max_seconds": 2.0},
                "spool": {"path": str(own / "spool"), "sync_seconds": 0.5},
                "experts": {"socket": ""},
            }
            for section, keys in (agent or {}).items():
                sections.setdefault(section, {}).update(keys)
            include = [f"{self.paths[name].root}/*"]
            self.nodes[name] = Node(own, include, node=name, agent=sections, env=env)

    def __enter__(self) -> Fleet:
        if self.ledger:
            self.ledger.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in self.nodes.values():
            node.stop_one("agent")
        self.collector.stop_one("collector")
        if self.ledger:
            self.ledger.__exit__(kind, error, trace)
        for run in self.runs:
            run.counts.close()

    def start(self) -> Fleet:
        self.collector.start_collector()
        for name in self.nodes:
            self.start_agent(name)
        return self

    def start_agent(self, name: str) -> None:
        began = time.time_ns()
        node = self.nodes[name]
        node.start_agent()
        assert node.agent is not None
        self.runs.append(Run(name, KernelCounts(node.agent.pid), began))

    def end_agent(self, name: str, *, kill: bool) -> Run:
        """kill -9, or a stop in good order; what the kernel counted and the disk holds is noted."""
        node = self.nodes[name]
        if kill:
            node.kill("agent")
        else:
            node.stop_one("agent", timeout=30)
        run = self.last_run(name)
        counts = run.counts.read()
        run.killed, run.ended_ns = kill, time.time_ns()
        run.submitted = counts["submitted"]
        run.lost = sum(v for k, v in counts.items() if k in ("lost_ring", "lost_scratch"))
        run.on_disk = set(self.spooled(name))
        return run

    def last_run(self, name: str) -> Run:
        return next(run for run in reversed(self.runs) if run.node == name)

    def spool(self, name: str) -> Path:
        return self.folder / name / "spool"

    def spooled(self, name: str) -> Iterator[tuple[int, int]]:
        """(epoch, sequence) of each sound batch on disk."""
        for path in sorted(self.spool(name).glob("*.seg")):
            for record in segments.scan(path.read_bytes()).records:
                if record.kind == segments.BATCH:
                    yield record.epoch, record.sequence

    # -- jobs -------------------------------------------------------------------------------

    def job(self, workload: str = "w", *, slow: int = SLOW, config: JobConfig = CONFIG) -> Job:
        """Not released yet: wait until it is `attached`."""
        names = list(self.nodes)
        per_node = config.ranks // len(names)
        rank_env = {
            rank: {"LD_LIBRARY_PATH": str(self.paths[names[rank // per_node]].root)}
            for rank in range(config.ranks)
        }
        faults = (f"slow-rank:{slow}:{SLOWER}",) if slow >= 0 else ()
        made = replace(config, faults=faults, ranks_per_node=per_node)
        return Job(
            made,
            paths=self.paths[names[0]],
            env={"LANTERNE_WORKLOAD": workload},
            rank_env=rank_env,
            hold="start",
        )

    def release(self, job: Job) -> None:
        for name, node in self.nodes.items():
            wait_for(partial(attached, node), PATIENCE, f"libraries of {name} attached")
        job.release()
        job.wait_ready()

    def named(self) -> set[tuple[str, int]]:
        """(workload, rank) that the collector names now."""
        try:
            return {(row["workload"], row["rank"]) for row in self.collector.named()}
        except (OSError, ValueError):
            return set()

    def wait_named(self, *expected: tuple[str, int]) -> float:
        """-> seconds until exactly these are named."""
        began = time.monotonic()
        try:
            wait_for(lambda: self.named() == set(expected), PATIENCE, f"{expected} named")
        except TimeoutError as error:
            absent = self.collector.collector_metrics().get("lanterne_communicator_waits_absent")
            raise TimeoutError(f"{error}: {self.named()}, {absent}\n{self.logs()}") from None
        return time.monotonic() - began

    def wait_named_anew(self, *expected: tuple[str, int]) -> float:
        """The same, of operations that came since: the fault may have left old figures."""
        began = time.monotonic()
        workload = expected[0][0]
        seen = self.counted(workload)
        wait_for(lambda: self.counted(workload) > seen + 100, PATIENCE, "new operations")
        self.wait_named(*expected)
        return time.monotonic() - began

    def counted(self, workload: str) -> float:
        metrics = self.collector.collector_metrics()
        return metrics.total("lanterne_collective_calls_total", workload=workload)

    def wait_counted(self, job: Job, workload: str = "w") -> int:
        """Until the collector has every operation of an ended job, and no more; -> how many."""
        expected = operations(job)
        wait_for(
            lambda: self.counted(workload) >= expected,
            PATIENCE,
            f"{expected} operations at the collector\n{self.logs()}",
        )
        counted = self.counted(workload)
        assert counted == expected, (counted, expected)
        return expected

    def wait_taken(self, *jobs: Job) -> int:
        """The same of all jobs that there were together: of one that is long over no page tells
        any more. While every operation is asked for, each is a row."""
        expected = sum(operations(job) for job in jobs)

        def taken() -> float:
            metrics = self.collector.collector_metrics()
            return metrics.total("lanterne_collector_rows_total", status="taken")

        wait_for(lambda: taken() >= expected, PATIENCE, f"{expected} rows\n{self.logs()}")
        found = taken()
        assert found == expected, (found, expected)
        return expected

    def logs(self) -> str:
        return "\n".join(stack.logs(1500) for stack in (self.collector, *self.nodes.values()))

    # -- figures ----------------------------------------------------------------------------

    def use(self) -> dict[str, dict[str, float]]:
        """Memory (unique, MB), descriptors and threads of each program, with its children."""
        running = {f"agent {name}": node.agent for name, node in self.nodes.items()}
        running["collector"] = self.collector.collector
        return {name: use_of(process.pid) for name, process in running.items() if process}

    def account(self, jobs: Sequence[Job]) -> Account:
        """After all agents have ended. Fails where the parts contradict each other."""
        assert self.ledger is not None
        total = Account(runs=len(self.runs))
        total.made = sum(events(job) for job in jobs)
        for name in self.nodes:
            epochs = self.ledger.runs(name)
            for run in (run for run in self.runs if run.node == name):
                found = [e for e in epochs if run.started_ns <= e <= run.ended_ns]
                assert len(found) <= 1, (run, found)
                entries = epochs[found[0]] if found else {}
                total.batches += len(entries)
                gone = {s: n for (of, e, s), n in self.damaged.items() if of == name and e in found}
                self._add(total, run, {s: e for s, e in entries.items() if e.delivered}, gone)
                undelivered = {k for k in run.on_disk if k[0] in found} - {
                    (found[0], s) for s, e in entries.items() if e.delivered
                }
                undelivered = {k for k in undelivered if (name, *k) not in self.damaged}
                assert not undelivered, f"on disk at its end, and never delivered: {undelivered}"
        total.not_attached = total.made - sum(run.submitted + run.lost for run in self.runs)
        total.duplicates = self.ledger.answered(2)
        assert total.not_attached >= 0
        assert not self.ledger.accepted_twice()
        return total

    @staticmethod
    def _add(
        total: Account, run: Run, delivered: Mapping[int, Entry], damaged: Mapping[int, int]
    ) -> None:
        read = max((entry.events_read for entry in delivered.values()), default=0)
        last = max(delivered, default=0)
        gaps = set(range(1, last + 1)) - set(delivered)
        assert gaps <= set(damaged), f"batches {sorted(gaps)} of {run} are missing"
        assert read <= run.submitted
        assert run.killed or read == run.submitted, f"{run.submitted - read} events unread: {run}"
        total.delivered += read - sum(damaged[gap] for gap in gaps)
        total.lost_in_kernel += run.lost
        total.lost_damaged += sum(damaged.values())
        behind = sum(events for sequence, events in damaged.items() if sequence > last)
        total.lost_with_agent += run.submitted - read - behind


def attached(node: Stack) -> bool:
    return node.agent_metrics().total("lanterne_agent_libraries", state="attached") >= 2


def events(job: Job) -> int:
    """Calls of an ended job that a probe takes note of."""
    return sum(int(truth["calls"].get(name, 0)) for truth in job.truths() for name in ENQUEUED)


def operations(job: Job) -> int:
    """The same as operations: a group of sends and receives is one."""
    each = 2 * job.config.layers + 1
    return each * sum(int(truth["steps"]) for truth in job.truths())


def use_of(pid: int) -> dict[str, float]:
    process = psutil.Process(pid)
    every = [process, *process.children(recursive=True)]
    return {
        "mb": round(sum(one.memory_full_info().uss for one in every) / 1e6, 1),
        "fds": sum(one.num_fds() for one in every),
        "threads": sum(one.num_threads() for one in every),
    }


def assert_bounded(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]
) -> None:
    """What was needed in the fault has been given back, but for pools and caches."""
    for name, now in after.items():
        was = before[name]
        assert now["fds"] <= was["fds"] + 6, (name, was, now)
        assert now["threads"] <= was["threads"] + 6, (name, was, now)
        assert now["mb"] <= was["mb"] * 1.5 + 24, (name, was, now)


def scale(variable: str, default: float) -> float:
    """A figure of the run, from the environment: the full run asks for more."""
    return float(os.environ.get(variable) or default)
