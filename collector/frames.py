"""One frame of an agent, and what it is answered: checked, taken once, refused, or to come again.

No network and no waiting, in one thread. What passes goes to `on_batch`, which must not block and
says whether it took the item (False: full, the agent is told to keep the batch and come again).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from google.protobuf.message import DecodeError

from lanterne.collector.admission import Admission, Peer
from lanterne.collector.batch import DecodedBatch
from lanterne.collector.checks import check_node
from lanterne.collector.clock import ClockObservation
from lanterne.collector.complaints import Complaints
from lanterne.collector.decode import decode
from lanterne.collector.errors import BatchRefused
from lanterne.collector.ingest_config import IngestConfig
from lanterne.collector.journal import Journal
from lanterne.collector.rates import Rates
from lanterne.collector.recording import BATCH, CLOCK, Received
from lanterne.collector.seen import Seen
from lanterne.proto import telemetry_pb2 as pb

Item = DecodedBatch | ClockObservation


class Answer(NamedTuple):
    node: str  # empty where the frame names none
    ack: pb.Ack  # without its times and stride
    position: int = 0  # in the journal: the ack may leave once that is kept


class Frames:
    """answer(data, received_ns, peer). Counters may be read from any thread."""

    def __init__(self, *, on_batch: Callable[[Item], bool], config: IngestConfig) -> None:
        self._on_batch = on_batch
        self._config = config
        # Takes the frames of which something was taken, to be recorded; set before the first.
        self.on_frame: Callable[[Received], object] | None = None
        self.journal: Journal | None = None  # likewise
        self.admission = Admission()
        self.seen = Seen(config.nodes)
        self.complaints = Complaints()
        self._rates = Rates(config.rate, config.nodes)
        self.refused: Counter[str] = Counter()
        self.counts: Counter[str] = Counter(
            frames=0,
            batches_accepted=0,
            batches_duplicate=0,
            batches_refused=0,
            batches_retried=0,
            batches_rate_limited=0,
            batches_unkept=0,
            clock_dropped=0,
            unknown_communicators=0,
            unknown_rows=0,
            unknown_values=0,
            streams_token=0,
            streams_node_name=0,
        )

    def answer(self, data: bytes, received_ns: int, peer: Peer) -> Answer:
        """Raises StreamRefused where the peer may not speak for the node that it names."""
        self.counts["frames"] += 1
        try:
            frame = pb.Frame.FromString(data)
        except DecodeError as error:
            reason = f"not a lanterne.v1.Frame: {error}"
            return Answer("", self._refuse(peer, "", pb.Ack(), "frame", reason))
        ack = pb.Ack(frame_sent_ns=frame.sent_ns)
        try:
            check_node(frame.node)
        except BatchRefused as refusal:
            return Answer("", self._refuse(peer, "", ack, refusal.code, str(refusal)))
        self.admission.check_node(peer, frame.node)
        used = CLOCK if frame.HasField("clock") and self._clock(frame) else 0
        position = 0
        if not frame.batch:
            ack.status = pb.STATUS_ACCEPTED
        elif not self._rates.take(frame.node, len(data), received_ns / 1e9):
            self.counts["batches_rate_limited"] += 1
            ack.status = pb.STATUS_RETRY
            ack.reason = "more than one node may send: send again later"
        else:
            position = self._batch(frame, ack, received_ns, peer)
            if ack.status == pb.STATUS_ACCEPTED:
                used |= BATCH
        self._keep(frame, data, received_ns, used)
        return Answer(frame.node, ack, position)

    def _batch(self, frame: pb.Frame, ack: pb.Ack, received_ns: int, peer: Peer) -> int:
        """-> its position in the journal."""
        try:
            batch = decode(
                frame.batch,
                received_ns=received_ns,
                limits=self._config.limits,
                left_out=self.counts,
            )
        except BatchRefused as refusal:
            self._refuse(peer, frame.node, ack, refusal.code, str(refusal))
            return 0
        ack.epoch, ack.sequence = batch.epoch, batch.sequence
        if batch.node != frame.node:
            reason = f"batch of node {batch.node} in a frame of node {frame.node}"
            self._refuse(peer, frame.node, ack, "node", reason)
            return 0
        if not self._rates.communicators(batch.node, batch.communicators, received_ns / 1e9):
            reason = "more new communicators than one node may name"
            self._refuse(peer, frame.node, ack, "cardinality", reason)
            return 0
        return self._take(batch, ack, peer)

    def _take(self, batch: DecodedBatch, ack: pb.Ack, peer: Peer) -> int:
        """Hand a new batch on, once -> its position in the journal. Nothing comes between the
        question and the mark: one thread."""
        key = batch.node, batch.epoch, batch.sequence
        verdict = self.seen.verdict(*key)
        if verdict == "duplicate":
            self.counts["batches_duplicate"] += 1
            ack.status = pb.STATUS_DUPLICATE
            return 0 if self.journal is None else self.journal.position(*key)
        if verdict == "stale":
            reason = f"epoch {batch.epoch} is older than those remembered: cannot rule out a repeat"
            self._refuse(peer, batch.node, ack, "stale_epoch", reason)
            return 0
        crowded = self.journal is not None and self.journal.full
        if crowded or not self._on_batch(batch):
            self.counts["batches_retried"] += 1
            ack.status = pb.STATUS_RETRY
            what = "disk cannot keep up" if crowded else "queue is full"
            ack.reason = f"the collector's {what}: send again later"
            return 0
        self.seen.add(*key)
        self.counts["batches_accepted"] += 1
        ack.status = pb.STATUS_ACCEPTED
        return 0 if self.journal is None else self.journal.add(*key)

    def unkept(self, ack: pb.Ack) -> None:
        """The batch has been taken, and is not on the disk in time: the agent must not forget it.
        Sent again, it is a duplicate."""
        self.counts["batches_unkept"] += 1
        ack.status, ack.taken = pb.STATUS_RETRY, True
        ack.reason = "the collector's disk does not answer: send again later"

    def _keep(self, frame: pb.Frame, data: bytes, received_ns: int, used: int) -> None:
        """For the recording: as received where its batch was taken, else without the batch."""
        if self.on_frame is None or not used:
            return
        if not used & BATCH and frame.batch:
            frame.ClearField("batch")
            data = frame.SerializeToString()
        self.on_frame(Received(received_ns, used, data))

    def _clock(self, frame: pb.Frame) -> bool:
        """Whether it was taken."""
        c = frame.clock
        limit = 1 << 62
        if max(c.agent_sent_ns, c.collector_received_ns, c.collector_sent_ns) >= limit:
            return False
        taken = c.agent_received_ns < limit and self._on_batch(
            ClockObservation(
                node=frame.node,
                agent_sent_ns=c.agent_sent_ns,
                collector_received_ns=c.collector_received_ns,
                collector_sent_ns=c.collector_sent_ns,
                agent_received_ns=c.agent_received_ns,
            )
        )
        if not taken:
            self.counts["clock_dropped"] += 1
        return taken

    def _refuse(self, peer: Peer, node: str, ack: pb.Ack, code: str, reason: str) -> pb.Ack:
        self.counts["batches_refused"] += 1
        self.refused[code] += 1
        self.complaints.batch(peer.host, node, code, reason)
        ack.status = pb.STATUS_REFUSED
        ack.reason = f"{code}: {reason}"
        return ack
