"""Sampling of communicators that were met running: agents and collector agree on the numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from lanterne.agent import origins as agent
from lanterne.agent.identity import Communicator
from lanterne.collector.analyse.engine import Engine
from lanterne.collector.analyse.settings import EngineConfig
from lanterne.collector.analyse.turns import PAUSE_NS, TURN_NS, Turns
from lanterne.collector.decode import decode
from lanterne.collector.origins import Origins
from lanterne.collector.snapshot import Snapshot
from lanterne.proto import telemetry_pb2 as pb

S, MS = 10**9, 10**6
RANKS, NODES = 8, 2
SLOW = 6
SLOW_BY = 2 * MS
START = 100 * S
# Two and two: where ranks sample different ones of a pair, those look like one operation.
PERIOD = 40 * MS
IN_PERIOD = np.array([0, 4, 20, 25]) * MS
SECOND = S // PERIOD * len(IN_PERIOD)  # operations


def operations(second: int) -> np.ndarray:
    """True numbers of the operations that begin in a second of the job."""
    return np.arange(second * SECOND, (second + 1) * SECOND)


def began(number: np.ndarray) -> np.ndarray:
    at: np.ndarray = START + number // 4 * PERIOD + IN_PERIOD[number % 4]
    return at


@dataclass
class Agent:
    """One node of the job; counts each rank's operations from where it met them."""

    node: int
    first: dict[int, int]  # by rank: true number of its number 0
    epoch: int = 1
    complete: bool = False
    obeys: bool = True
    blind: int = -1  # remainder by 2 of the numbers that have no evidence
    stride: int = 1
    origins: agent.Origins = agent.UNTOLD
    sequence: int = 0
    told: dict[str, int] = field(default_factory=dict)  # of its stream, the collector's end
    sampled: dict[int, set[int]] = field(default_factory=dict)  # by rank, in the last window

    @property
    def name(self) -> str:
        return f"n{self.node}"

    def window(self, second: int) -> pb.Batch:
        self.sequence += 1
        ranks = np.array(sorted(self.first))
        known = self.origins if self.obeys and self.origins.epoch == self.epoch else agent.UNTOLD
        mine = [Communicator(i, 10, 0, 1, comm_hash=7, rank=r) for i, r in enumerate(self.first)]
        wanted = agent.sampling(self.stride, len(ranks), known, mine)
        slot, number = (a.ravel() for a in np.meshgrid(
            np.arange(len(ranks)), operations(second), indexing="ij"))  # fmt: skip
        seq = number - np.array([self.first[r] for r in ranks.tolist()])[slot]
        keep = (seq >= 0) & wanted.wanted(
            slot.astype(np.uint16), np.zeros(len(slot), np.uint8), seq.astype(np.uint32)
        )
        slot, number, seq = slot[keep], number[keep], seq[keep]
        self.sampled = {r: set(number[slot == i].tolist()) for i, r in enumerate(ranks.tolist())}
        slow, blind = ranks[slot] == SLOW, number % 2 == self.blind
        n = len(seq)
        slots = np.arange(len(ranks), dtype=np.uint16)
        return pb.Batch(
            schema=1, node=self.name, epoch=self.epoch, sequence=self.sequence, boot_id="b",
            stride=self.stride, start_ns=START + second * S, end_ns=START + (second + 1) * S,
            strides=wanted.strides(slots).tobytes() if wanted.whole.any() else b"",
            communicators=[
                pb.Communicator(comm_hash=7, library=1, n_ranks=RANKS, rank=r, pid=10 + r,
                                pid_start_ticks=1, workload="w", gpu_index=-1,
                                complete=self.complete)
                for r in ranks.tolist()
            ],
            processes=[pb.Process(pid=10 + r, pid_start_ticks=1) for r in ranks.tolist()],
            instances=pb.Instances(
                rows=n, communicator=slot.astype("<u4").tobytes(),
                seq=seq.astype("<u4").tobytes(), lane=bytes(n), op=bytes([4]) * n, role=bytes(n),
                evidence=np.where(blind, 0, 2).astype("u1").tobytes(), flags=bytes(n),
                arrival_ns=(began(number) + np.where(slow, SLOW_BY, 0)).astype("<u8").tobytes(),
                duration_ns=np.where(blind, 0, np.where(slow, MS, MS + SLOW_BY)).astype("<u8")
                .tobytes(),
                # Every number has a size of its own: a wrong join shows.
                payload_bytes=(64 + number % 1009).astype("<u8").tobytes(),
                sync_blocked_ns=np.zeros(n, "<u8").tobytes(),
            ),
        )  # fmt: skip


class Collector:
    """The analysis and the end of ingest that answers."""

    def __init__(self, stride: int) -> None:
        config = EngineConfig(window_seconds=1.0, max_stride=stride)
        self.engine = Engine(config, boot_id="b")
        self.origins = Origins()

    def second(self, second: int, agents: list[Agent]) -> Snapshot:
        """What they tell of it, worked off and answered. The load never ends."""
        for one in agents:
            batch = one.window(second)
            now = batch.end_ns + 10 * MS
            self.engine.apply(decode(batch.SerializeToString(), received_ns=now))
        self.engine.overloaded()
        found = self.engine.snapshot(now / 1e9, now_ns=now)
        self.origins.take(self.engine.origins_news())
        for one in agents:
            ack = pb.Ack(stride=self.engine.stride)
            self.origins.add(ack, one.name, one.told)
            ack = pb.Ack.FromString(ack.SerializeToString())
            one.stride = ack.stride
            if ack.HasField("origins"):
                one.origins = agent.read(ack.origins)
        return found


def halves(first: int, second: int) -> list[Agent]:
    """Two agents that began at these true numbers, each at a few different ones."""
    per = RANKS // NODES
    return [
        Agent(node, {node * per + i: begin + i % 3 for i in range(per)})
        for node, begin in enumerate((first, second))
    ]


def common(agents: list[Agent]) -> set[int]:
    """True numbers that every rank told in the last window; all of them told the same ones."""
    told = [rank for one in agents for rank in one.sampled.values()]
    assert all(rank == told[0] for rank in told)
    return told[0]


def named(snapshot: Snapshot) -> list[int]:
    found: list[int] = snapshot.ranks.rank[snapshot.ranks.straggler == 1].tolist()
    return found


def misaligned(collector: Collector) -> int:
    return collector.engine.engine_counts()["rows_misaligned"]


def until_common(collector: Collector, agents: list[Agent], second: int, limit: int = 30) -> int:
    """-> the second after the first in which all ranks told the same operations, sampled."""
    for at in range(second, second + limit):
        collector.second(at, agents)
        told = [rank for one in agents for rank in one.sampled.values()]
        if all(rank == told[0] for rank in told) and 0 < len(told[0]) < SECOND:
            return at + 1
    raise AssertionError(f"not within {limit} s: {collector.engine.origins.states()}")


def joined(collector: Collector, agents: list[Agent], second: int, seconds: int = 10) -> Snapshot:
    """Every operation that is told for some seconds is joined, rightly."""
    before = collector.second(second, agents).communicators[0]
    for at in range(second + 1, second + 1 + seconds):
        told = len(common(agents))
        assert told == SECOND // collector.engine.stride
        found = collector.second(at, agents)
    comm = found.communicators[0]
    new = comm.complete_share * comm.instances - before.complete_share * before.instances
    assert new == pytest.approx(told * seconds, abs=1)
    return found


@pytest.mark.parametrize("stride", [2, 4])
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_agents_that_come_at_different_moments_sample_the_same(stride: int, shift: int) -> None:
    collector = Collector(stride)
    agents = halves(SECOND // 2, 4 * SECOND + shift)
    for at in range(4):
        collector.second(at, agents[:1])
    assert collector.engine.stride == stride
    at = until_common(collector, agents, 4)
    found = joined(collector, agents, at)
    assert misaligned(collector) == 0
    assert named(found) == [SLOW]
    assert found.communicators[0].waits_for == SLOW
    assert collector.engine.origins.states() == {"aligned": 1, "whole": 0, "waiting": 0}


@pytest.mark.parametrize("blind", [0, 1])
def test_what_is_sampled_has_evidence(blind: int) -> None:
    """Every second operation has none: by chance, the sample could be those."""
    collector = Collector(2)
    agents = halves(5, 3 * SECOND + 2)
    for one in agents:
        one.blind = blind
    at = until_common(collector, agents, 3)
    for second in range(at, at + 12):
        found = collector.second(second, agents)
    assert common(agents) == {n for n in operations(at + 11).tolist() if n % 2 != blind}
    assert named(found) == [SLOW]
    assert found.communicators[0].absent_reason == ""


@pytest.mark.parametrize("stride", [2, 4])
def test_ranks_seen_from_the_beginning_sample_as_ever(stride: int) -> None:
    collector = Collector(stride)
    agents = halves(0, 3 * SECOND + 1)
    agents[0] = Agent(0, dict.fromkeys(agents[0].first, 0), complete=True)
    for at in range(3):
        collector.second(at, agents[:1])
    joined(collector, agents, until_common(collector, agents, 3))
    assert all(number % stride == 0 for number in common(agents))
    assert misaligned(collector) == 0


def test_an_agent_that_is_replaced_under_load_joins_again() -> None:
    collector = Collector(2)
    agents = [Agent(n, dict.fromkeys(one.first, 0), complete=True)
              for n, one in enumerate(halves(0, 0))]  # fmt: skip
    at = until_common(collector, agents, 0)
    joined(collector, agents, at)
    at += 12
    agents[1] = Agent(1, halves(0, at * SECOND + 1)[1].first, epoch=2)
    at = until_common(collector, agents, at)
    joined(collector, agents, at)
    assert misaligned(collector) == 0
    # What an agent was told does not hold for the one after it.
    assert agents[1].origins.epoch == 2


def test_a_second_collector_aligns_by_itself() -> None:
    first, second = Collector(4), Collector(4)
    agents = halves(7, 3 * SECOND + 2)
    at = until_common(first, agents, 3)
    for one in agents:  # a new stream: what was told on the other is no more
        one.origins, one.told = agent.UNTOLD, {}
    joined(second, agents, until_common(second, agents, at))
    assert misaligned(second) == 0


@pytest.mark.parametrize("shift", [1, 3])
def test_samples_by_own_numbers_are_not_joined_wrongly(shift: int) -> None:
    """Agents of an earlier version sample by their own numbers, whatever they are told."""
    collector = Collector(2)
    agents = halves(0, 3 * SECOND + shift)
    for one in agents:
        one.obeys = False
    for at in range(3):
        collector.second(at, agents[:1])
    agents[1].stride = collector.engine.stride
    for at in range(3, 20):
        found = collector.second(at, agents)
    comm = found.communicators[0]
    assert misaligned(collector) == 0
    assert "not aligned" in comm.absent_reason
    assert named(found) == []


def test_a_rank_that_loses_count_is_aligned_anew() -> None:
    collector = Collector(2)
    agents = halves(7, 3 * SECOND + 2)
    at = until_common(collector, agents, 3)
    agents[1].first[5] -= 1
    collector.second(at, agents)
    assert misaligned(collector) > 0
    at = until_common(collector, agents, at + 1)
    while collector.second(at, agents).communicators[0].absent_reason:
        at += 1
    joined(collector, agents, at + 1)


def test_what_is_told_comes_once_and_again_on_a_new_stream() -> None:
    origins = Origins()
    origins.take({"a": (5, 1, b"\7" + bytes(7), b"\1\0\0\0", b"\0", b"\3" + bytes(7), b"\0")})
    told: dict[str, int] = {}
    first, again, other, new = (pb.Ack() for _ in range(4))
    origins.add(first, "a", told)
    origins.add(again, "a", told)
    origins.add(other, "b", told)
    origins.add(new, "a", {})
    assert [a.HasField("origins") for a in (first, again, other, new)] == [1, 0, 0, 1]
    assert agent.read(first.origins) == agent.Origins(5, {(7, 1): agent.Origin((3, 0))})
    origins.take({"a": (5, 0, b"", b"", b"", b"", b"")})
    withdrawn = pb.Ack()
    origins.add(withdrawn, "a", told)
    assert withdrawn.HasField("origins")
    assert agent.read(withdrawn.origins) == agent.Origins(5)


@pytest.mark.parametrize("spoil", [
    {"rows": 2}, {"rank": b""}, {"whole": b"\1\1"}, {"rows": 1 << 31},
])  # fmt: skip
def test_what_cannot_be_understood_tells_nothing(spoil: dict[str, object]) -> None:
    good: dict[str, object] = {
        "epoch": 5, "rows": 1, "comm_hash": bytes(8), "rank": bytes(4), "lane": b"\1",
        "offset": b"\xff" * 8, "whole": b"\1",
    }  # fmt: skip
    assert agent.read(pb.Origins(**good)).of == {(0, 0): agent.Origin((0, -1), whole=True)}  # type: ignore[arg-type]
    assert agent.read(pb.Origins(**good | spoil)) == agent.UNTOLD  # type: ignore[arg-type]


def test_few_are_told_whole_at_a_time() -> None:
    turns = Turns()
    waiting = {1: 8, 2: 8, 3: 64, 4: 8}
    turns.choose(waiting, 20, 0)
    assert set(turns.asked) == {1, 2}
    del waiting[1]  # aligned
    turns.choose(waiting, 20, S)
    assert set(turns.asked) == {2}  # the large one is next, and alone
    del waiting[2]
    turns.choose(waiting, 20, 2 * S)
    assert set(turns.asked) == {3}
    turns.choose(waiting, 20, 3 * S + TURN_NS)  # not aligned: the others are not kept from it
    assert set(turns.asked) == {4}
    del waiting[4]
    turns.choose(waiting, 20, 4 * S + TURN_NS)
    assert set(turns.asked) == set()
    turns.choose(waiting, 20, 4 * S + TURN_NS + PAUSE_NS)
    assert set(turns.asked) == {3}
    turns.choose({}, 20, 4 * S + TURN_NS + PAUSE_NS)
    assert set(turns.asked) == set()
