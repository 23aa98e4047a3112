"""A simulated job -> the encoded batches and clock exchanges that a collector would get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanterne.collector.clock import ClockObservation
from lanterne.proto import telemetry_pb2 as pb
from tests.bench.detect import noise, receives, tables
from tests.bench.detect.cases import EVIDENCE, Case
from tests.bench.detect.context import NS, Context, bus_id
from tests.bench.detect.job import Job, Stage
from tests.bench.detect.tables import Rows

I64 = npt.NDArray[np.int64]

T0 = 10**15  # the collector's clock at the start
EPOCH = 1_700_000_000 * NS
HASH = 0x5EED_0000
GROUPS = 4  # communicators of a job, at most
SHORTEST_NS = 100_000  # of a round trip
KEPT_NS = 60 * NS  # how long an agent waits for the GPU's times of a call
ORDER, BLOCKING = 0, 2  # evidence


def ranks_per_node(size: int) -> int:
    """Two nodes at least from 4 ranks on: their clocks differ."""
    return {2: 1, 3: 3, 4: 2, 8: 4, 16: 8}.get(size, 32)


@dataclass(frozen=True)
class Origin:
    """Where a job's numbers and times begin, and how long a batch's window is."""

    job: int = 0
    at_ns: int = 0
    step: int = 0
    batch: int = 0  # batches before
    window_ns: int = NS


class Wire:
    """Encodes one run; `batches(window)` is what arrives at the end of it, a second by default."""

    def __init__(
        self, case: Case, job: Job, origin: Origin = Origin(), *, readings: bool = True
    ) -> None:
        """readings: whether batches tell of processes and GPUs."""
        self.case, self.job, self.origin = case, job, origin
        self._setting = noise.SETTINGS[case.noise]
        self._rng = np.random.default_rng([*case.seed, 7])
        per_node = ranks_per_node(case.size)
        self.nodes = -(-case.size // per_node)
        self._node_of = np.arange(case.size) // per_node
        self._ranks = [
            np.setdiff1d(np.flatnonzero(self._node_of == node), job.absent)
            for node in range(self.nodes)
        ]
        self._offset = self._rng.integers(0, 10**12, self.nodes)
        self._drift = self._rng.uniform(-1, 1, self.nodes) * self._setting.drift
        # Each (group, rank) is described on the rank's node, in this order.
        self.series = [(g, int(r)) for g, group in enumerate(job.groups) for r in group.ranks]
        away = np.isin([r for _, r in self.series], job.absent)
        self._series_node = self._node_of[[r for _, r in self.series]]
        self._place = np.zeros(len(self.series), np.int64)
        for node in range(self.nodes):
            mine = np.flatnonzero((self._series_node == node) & ~away)
            self._place[mine] = np.arange(len(mine))
        self._described = [self._describe(node) for node in range(self.nodes)]
        self._rows = self._collect()
        key = self._rows.window * self.nodes + self._rows.node
        self.windows = -(-job.seconds * NS // origin.window_ns)
        marks = np.arange(self.windows * self.nodes + 1)
        self._bounds = np.searchsorted(key, marks)
        self._lost = self._losses()
        self._context = Context(case, job, origin.at_ns) if readings else None
        self._receives = receives.Receives(case, job, self._rng) if receives.told(case) else None

    def batches(self, window: int) -> Iterator[bytes]:
        """That window of every node whose batch arrives."""
        second = window * self.origin.window_ns // NS
        if self._receives is not None:
            edges = window * self.origin.window_ns, (window + 1) * self.origin.window_ns
            self._pairs = self._receives.window(*edges)
        for node in range(self.nodes):
            if not self._quiet(node, second):
                yield self._described[node] + self._batch(node, window, second)

    def clocks(self, window: int) -> Iterator[ClockObservation]:
        """One exchange with every node, at the end of the window."""
        end = self.origin.at_ns + (window + 1) * self.origin.window_ns
        there, back = self._rng.exponential(self._setting.rtt_ns, (2, self.nodes)).astype(np.int64)
        there += SHORTEST_NS // 2
        back += SHORTEST_NS // 2
        sent = np.full(self.nodes, end)
        agent_sent = self._agent(sent, np.arange(self.nodes))
        agent_received = self._agent(sent + there + back + 20_000, np.arange(self.nodes))
        for node in range(self.nodes):
            received = T0 + end + int(there[node])
            yield ClockObservation(
                node=self._name(node),
                agent_sent_ns=int(agent_sent[node]),
                collector_received_ns=received,
                collector_sent_ns=received + 20_000,
                agent_received_ns=int(agent_received[node]),
            )

    def _name(self, node: int) -> str:
        return f"node-{self.origin.job}-{node}"

    def _agent(self, at_ns: I64, node: I64) -> I64:
        """Times since the start -> the nodes' own clocks."""
        skew = (at_ns * self._drift[node]).astype(np.int64)
        clock: I64 = at_ns + skew + T0 + self._offset[node]
        return clock

    def _quiet(self, node: int, second: int) -> bool:
        ranks = self._ranks[node]
        return not len(ranks) or bool(self.job.silent[second, ranks].any())

    def _describe(self, node: int) -> bytes:
        """What every batch of a node repeats. Encoded messages that follow each other are one."""
        batch = pb.Batch(
            schema=1,
            node=self._name(node),
            epoch=EPOCH,
            agent_version="0.1.0",
            boot_id=f"boot-{self._name(node)}",
            stride=1,
        )
        cpu_job = self.case.evidence == "blocking"
        for group, rank in self.series:
            if self._node_of[rank] != node or rank in self.job.absent:
                continue
            members = self.job.groups[group].ranks
            batch.communicators.add(
                comm_hash=HASH + GROUPS * self.origin.job + group,
                library=pb.LIBRARY_GLOO if cpu_job else pb.LIBRARY_NCCL,
                n_ranks=len(members),
                rank=int(np.searchsorted(members, rank)),
                name=self.job.groups[group].name,
                pid=1000 + rank,
                pid_start_ticks=7,
                workload="bench",
                gpu_index=rank % 32,
                gpu_bus_id=bus_id(rank),
                identity=pb.IDENTITY_STORE if cpu_job else pb.IDENTITY_INIT_ARGUMENTS,
                complete=True,
                role=self.job.roles[rank],
            )
        data: bytes = batch.SerializeToString()
        return data

    def _collect(self) -> Rows:
        parts: list[I64] = []
        counted: dict[int, int] = {}
        first = {g: n for n, (g, _) in reversed(list(enumerate(self.series)))}
        of_group = {g: sum(s.group == g for s in self.job.stages) for g in first}
        for stage in self.job.stages:
            turn = counted.get(stage.group, 0)
            counted[stage.group] = turn + 1
            parts.append(self._stage(stage, first[stage.group], turn, of_group[stage.group]))
        columns = np.concatenate(parts, axis=1)
        at, node = columns[0], self._series_node[columns[1]]
        window = at // self.origin.window_ns
        # By steps already, so that within a batch time nearly decides.
        order = np.argsort(window * self.nodes + node, kind="stable")
        columns, node = columns[1:, order], node[order]
        series, seq, lane, op, role, evidence, arrival, duration, size, blocked = columns
        return Rows(
            window=window[order],
            node=node,
            place=self._place[series],
            kind=(evidence * 256 + op) * 4 + role,
            seq=seq,
            lane=lane,
            op=op,
            role=role,
            arrival=self._agent(arrival + self.origin.at_ns, node),
            duration=duration,
            size=size,
            blocked=blocked,
            evidence=evidence,
        )

    def _stage(self, stage: Stage, first: int, turn: int, turns: int) -> I64:
        """[column, event] of the events that are seen; the first column is when, ns."""
        step, rank = np.nonzero(stage.sees)
        arrival = stage.arrival[step, rank].astype(np.int64)
        timed = self.case.evidence != "enqueue"
        duration = (stage.end - stage.arrival)[step, rank].astype(np.int64) * timed
        evidence = np.full(len(step), EVIDENCE.index(self.case.evidence) + 1)
        told = arrival + duration
        if self.case.evidence == "device" and self.job.faults.hang >= 0:
            hung = (step == self.job.faults.hang) & (stage.group == 0)
            evidence[hung], duration[hung] = ORDER, 0
            told[hung] = arrival[hung] + KEPT_NS
        blocked = stage.blocked[step, rank].astype(np.int64) * (not timed)
        return np.stack(
            [
                told,
                first + rank,
                (step + self.origin.step) * turns + turn,
                np.full(len(step), stage.lane),
                np.full(len(step), stage.op),
                np.full(len(step), stage.role),
                evidence,
                arrival,
                duration,
                stage.size[step, rank].astype(np.int64),
                blocked,
            ]
        )

    def _losses(self) -> I64:
        """[window, node] events lost so far: agents know how many, not which."""
        found = np.zeros((self.windows, self.nodes), np.int64)
        for stage in self.job.stages:
            ranks = self.job.groups[stage.group].ranks
            step, place = np.nonzero(~stage.sees & ~np.isin(ranks, self.job.absent))
            at = np.minimum(stage.end[step, place] // self.origin.window_ns, self.windows - 1)
            ran = step != self.job.faults.hang  # what nobody did is not lost
            np.add.at(found, (at[ran].astype(np.int64), self._node_of[ranks[place[ran]]]), 1)
        total: I64 = np.cumsum(found, axis=0)
        return total

    def _health(self, node: int, window: int, read: int) -> pb.Health:
        lost = int(self._lost[window, node])
        return pb.Health(
            events_read=read,
            events_submitted=read,
            events_lost={"ring_full": lost} if lost else {},
            source_success={"uprobes": True},
        )

    def _batch(self, node: int, window: int, second: int) -> bytes:
        at = window * self.nodes + node
        rows = slice(int(self._bounds[at]), int(self._bounds[at + 1]))
        edges = self.origin.at_ns + np.array([window, window + 1]) * self.origin.window_ns
        edges = self._agent(edges, np.array([node, node]))
        batch = pb.Batch(
            sequence=self.origin.batch + window + 1,
            start_ns=int(edges[0]),
            end_ns=int(edges[1]),
            instances=tables.instances(self._rows, rows),
            summaries=tables.summaries(self._rows, rows),
            health=self._health(node, window, rows.stop),
        )
        if self._receives is not None:
            batch.traffic.CopyFrom(self._receives.traffic(self._ranks[node], self._pairs))
        self._add_pending(batch, node, edges[0])
        if self._context is not None:
            self._context.add(batch, self._ranks[node], second)
        data: bytes = batch.SerializeToString()
        return data

    def _add_pending(self, batch: pb.Batch, node: int, start_ns: int) -> None:
        """Calls of a hang: they do not return, and were entered before the window began."""
        hang = self.job.faults.hang
        if hang < 0 or self.case.evidence != "blocking":
            return
        stage = self.job.stages[-1]  # the operation of all ranks
        stuck = np.setdiff1d(self._ranks[node], self.job.faults.busy)
        entered = self._agent(
            stage.arrival[hang, stuck].astype(np.int64), np.full(len(stuck), node)
        )
        stuck, entered = stuck[entered < start_ns], entered[entered < start_ns]
        n = len(stuck)
        turns = sum(s.group == stage.group for s in self.job.stages)
        batch.pending.CopyFrom(
            pb.Pending(
                rows=n,
                communicator=self._place[stuck].astype("<u4").tobytes(),
                seq=np.full(n, (hang + 1) * turns - 1, "<u4").tobytes(),
                lane=np.full(n, stage.lane, "u1").tobytes(),
                op=np.full(n, stage.op, "u1").tobytes(),
                evidence=np.full(n, BLOCKING, "u1").tobytes(),
                entered_ns=entered.astype("<u8").tobytes(),
            )
        )
