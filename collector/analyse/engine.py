"""The collector's state machine: batches in, snapshots out. No IO, no clock, no threads.

`apply` only queues; the work is done on many batches at once when enough have come, or when a
snapshot is taken. Rows of the alignment tables are scored as they become complete, or at their
deadline, counted from when the collector received their first event: agents' clocks cannot stall
or hurry it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from lanterne.collector.align import Tables
from lanterne.collector.analyse import (
    gather,
    hang,
    kinds,
    load,
    ops,
    scoring,
    totals,
    verdicts,
    view,
)
from lanterne.collector.analyse import window as w
from lanterne.collector.analyse.account import Accounts
from lanterne.collector.analyse.advice import AdviceConfig, Advisor, expert_groups
from lanterne.collector.analyse.carry import Carry
from lanterne.collector.analyse.causes import Causes
from lanterne.collector.analyse.experts import Experts
from lanterne.collector.analyse.joining import Joining
from lanterne.collector.analyse.origins import Origins, Told
from lanterne.collector.analyse.paths import Paths, Span
from lanterne.collector.analyse.progress import Progress
from lanterne.collector.analyse.registry import Registry
from lanterne.collector.analyse.roles import Roles
from lanterne.collector.analyse.settings import EngineConfig
from lanterne.collector.analyse.stages import Stages
from lanterne.collector.analyse.stride import Stride
from lanterne.collector.analyse.transfers import Transfers
from lanterne.collector.analyse.who import Resolved
from lanterne.collector.batch import DecodedBatch, Head
from lanterne.collector.clock import SAME_CLOCK, ClockObservation, Estimate, NodeClock
from lanterne.collector.snapshot import Snapshot

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
NS = 10**9
WILD_SPREAD = 1 << 22  # sequence numbers further apart are not a backlog


class Engine:
    """apply(batch or clock observation); snapshot(now)."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        boot_id: str = "",
        shared_expert_ranks: Mapping[str, int] | None = None,
    ) -> None:
        """`boot_id`: the collector's own; nodes that report the same share its clock exactly.
        shared_expert_ranks: workload -> the rank that holds its shared experts.
        """
        c = self.config = config or EngineConfig()
        self.boot_id = boot_id
        self.registry = Registry(
            slots=c.communicators, members=c.members, processes=c.processes, nodes=c.nodes
        )
        self.tables = Tables(cells=c.cells, rows=c.rows, tables=2 * c.communicators)
        window_ns = int(c.window_seconds * NS)
        self.window = w.Window(c.communicators, c.members, c.own_cells, window_ns)
        self.verdicts = verdicts.Verdicts(c.members, c.min_gain_share)
        self.summaries = totals.Grouped(totals.SUMMARY_WIDTH, 1 << 18)
        self.waits = totals.Grouped(totals.WAIT_WIDTH, 1 << 18)
        self.traffic = totals.TrafficTotals(c.members)
        self.loads = load.Loads(c.members)
        self.roles = Roles(c.members)
        self.hangs = hang.Hangs(c.communicators, c.members, c.hang_seconds)
        self.paths = Paths(c.min_gain_share)
        self.transfers = Transfers(c.communicators, c.members, self.paths.wanted)
        self.causes = Causes(c.members, self.registry)
        self.accounts = Accounts(self.tables, self.window, self.waits, self.registry)
        self.carry = Carry(c.processes)
        self.progress = Progress(c.members)
        self.experts = Experts()
        self.advisor = Advisor(
            AdviceConfig(
                seconds=c.advice_seconds,
                min_gain=c.advice_min_gain,
                spare_slots=int(c.advice_spare_slots),
                expert_bytes=c.expert_bytes,
                groups=int(c.expert_groups),
                shared_expert_ranks=shared_expert_ranks or {},
            )
        )
        self.stages = Stages()
        self.joining = Joining(2 * c.communicators, c.members)
        self.origins = Origins(self.joining, self.registry)
        self.clocks: dict[str, NodeClock] = {}
        self.counts: Counter[str] = Counter(rows_misaligned=0)
        self._pending: list[DecodedBatch] = []
        self._pending_rows = 0
        self._now_ns = 0
        self._window_end = 0
        self._stride = Stride(c.window_seconds, c.max_stride)

    @property
    def now_ns(self) -> int:
        """The newest CLOCK_MONOTONIC it was told."""
        return self._now_ns

    @property
    def stride(self) -> int:
        """Instances wanted of the agents: sequence % stride == 0. A power of two."""
        return self._stride.value

    def origins_news(self) -> dict[str, Told]:
        """By node: what its agent is to be told of communicators that were met running, where that
        has changed since this was last asked.
        """
        return self.origins.news()

    def overloaded(self) -> None:
        """More comes in than is worked off (a full queue): ask for fewer instances from the next
        window on. May be called from any thread.
        """
        self._stride.crowded()

    def apply(self, item: DecodedBatch | ClockObservation) -> None:
        """Take one item; batches must not be applied twice (see `seen`)."""
        if isinstance(item, ClockObservation):
            if item.node in self.clocks or len(self.clocks) < self.config.nodes:
                self.clocks.setdefault(item.node, NodeClock()).add(item)
            return
        self._pending.append(item)
        self._pending_rows += len(item.instances)
        if (
            self._pending_rows >= self.config.flush_rows
            or len(self._pending) >= self.config.flush_batches
        ):
            self.flush()

    def flush(self) -> None:
        """Work off what `apply` has queued."""
        batches, self._pending, self._pending_rows = self._pending, [], 0
        group: list[tuple[DecodedBatch, Resolved]] = []
        for batch in batches:
            self._now_ns = max(self._now_ns, batch.received_ns)
            resolved = self.registry.resolve(batch)
            if self.registry.gone or self.registry.restarted:
                # Sequence numbers start anew from this batch on: finish with the old ones first.
                self._work(group)
                group = []
                self._renew()
            self._welcome()
            if resolved is not None:
                group.append((batch, resolved))
                self.counts["rows"] += len(batch.instances)
        self._work(group)
        if self._window_end == 0:
            self._window_end = self._now_ns + int(self.config.window_seconds * NS)

    def snapshot(
        self,
        now: float,
        *,
        now_ns: int = 0,
        ingest: Mapping[str, int] | None = None,
        refused: Mapping[str, int] | None = None,
        connected: Collection[str] | None = None,
    ) -> Snapshot:
        """What is known. `now`: UNIX seconds. `now_ns`: CLOCK_MONOTONIC, the clock of received_ns;
        without it time only moves with what is received. The rest is passed through from ingest.
        """
        self.flush()
        self._now_ns = max(self._now_ns, now_ns)
        deadline = int(self.config.deadline_seconds * NS)
        passed = self.progress.passed(self.tables, self.registry, self._now_ns, deadline)
        self._score(passed)
        self._score(self.tables.expire(self._now_ns - deadline))
        if self._window_end and self._now_ns >= self._window_end:
            self._close_window()
            self.experts.close(now, self._now_ns)
            self._advise()
        live = [(n, s.base, s.ranks) for n, s in enumerate(self.registry.slots) if s is not None]
        self.hangs.judge(self.registry, self.joining.comparable(live), self._now_ns)
        c = self.config
        for number in self.registry.prune(
            self._now_ns, int(c.idle_seconds * NS), int(c.ended_seconds * NS)
        ):
            self.registry.remove(number)
        self._renew()
        self.origins.update(self.stride, self._now_ns)
        return view.build(self, now, ingest or {}, refused or {}, connected)

    def _advise(self) -> None:
        serving = self.accounts.serving
        self.advisor.add_steps(
            (slot.workload, steps)
            for number, slot in enumerate(self.registry.slots)
            if slot is not None and (steps := serving.of(number)) is not None
        )
        idle_ns = int(self.config.idle_seconds * NS)
        views = self.experts.views(self._now_ns, idle_ns)
        if views:
            engines = self.experts.engines(self._now_ns, idle_ns)
            groups = expert_groups(self.registry.slots, self.registry.node)
            self.advisor.add(views, groups, engines)

    def engine_counts(self) -> dict[str, int]:
        """Totals of what was worked off and what was dropped, by cause."""
        t = self.tables.counts
        found = dict(self.counts)
        found.update(
            rows_late=t.late,
            rows_duplicate=t.duplicate,
            rows_overrun=t.overrun,
            rows_no_room=t.no_room,
            own_samples_skipped=self.window.own_skipped,
            series_dropped=self.summaries.dropped + self.waits.dropped,
            dropped_step_rows=self.accounts.serving.dropped,
            rank_steps_left_out=self.accounts.rank_steps.left_out,
            rows_joining=self.joining.rows_used,
            cells_used=self.tables.cells.used,
            dropped_stages=self.stages.unknown,
            dropped_origins=self.origins.dropped,
        )
        found.update({f"met_running_{k}": v for k, v in self.origins.states().items()})
        found.update({f"dropped_{k}": v for k, v in self.registry.dropped.items()})
        found.update({f"dropped_{k}": v for k, v in self.experts.dropped.items()})
        return found

    def _welcome(self) -> None:
        r = self.registry
        for number in r.fresh:
            slot = r.slots[number]
            if slot is not None:
                self.window.forget(number, slot.base, slot.ranks)
                self.verdicts.forget(slot.base, slot.ranks)
                self.traffic.forget(number, slot.base, slot.ranks)
                self.loads.forget(slot.base, slot.ranks)
                self.hangs.forget(number, slot.base, slot.ranks)
                self.progress.forget(number, slot.base, slot.ranks)
                self.roles.forget(slot.base, slot.ranks)
                self.accounts.serving.forget(number)
                self.accounts.rank_steps.forget(number)
                self.paths.forget(number, slot.base, slot.ranks)
                self.transfers.forget(number, slot.base, slot.ranks)
                self.causes.forget(number, slot.base, slot.ranks)
                late = slot.late_attached
                self.joining.forget(number, slot.base, slot.ranks, late=late, fresh=True)
                self.origins.turns.forget(number)
        if r.fresh_processes:
            self.carry.forget(r.fresh_processes)
            self.stages.forget(r.fresh_processes)
        r.fresh, r.fresh_processes = [], []

    def _renew(self) -> None:
        for number in set(self.registry.restarted):
            slot = self.registry.slots[number]
            if slot is not None:
                self.joining.forget(number, slot.base, slot.ranks, late=True)
                self.origins.turns.forget(number)
                self.hangs.forget(number, slot.base, slot.ranks)
                self.progress.forget(number, slot.base, slot.ranks)
            self.tables.clear(2 * number)
            self.tables.clear(2 * number + 1)
        self.registry.restarted = []
        for number, _ in self.registry.release():
            self.tables.close(2 * number)
            self.tables.close(2 * number + 1)
            self.summaries.forget(number)
            self.waits.forget(number)
            self.accounts.longest.forget(number)

    def _work(self, group: list[tuple[DecodedBatch, Resolved]]) -> None:
        if not group:
            return
        gather.summaries(group, self.summaries)
        gather.loads(group, self.loads)
        for batch, _ in group:
            self.experts.add(batch)
            self.stages.add(batch, self.registry)
        self._add_traffic(group)
        self._add_pending(group)
        self.roles.add(group)
        flow = gather.collect(group)
        if flow is not None:
            flow = self._join(flow)
        if flow is None:
            return
        self.hangs.add(flow, self._now_ns)
        self._make_room(flow)
        closed = self.tables.ranks[flow.table] == 0
        if closed.any():
            self.tables.counts.no_room += int(closed.sum())
            flow = gather.take(flow, ~closed)
        cell, row = self.tables.cell_index(flow.table, flow.rank, flow.seq)
        self._score(self.tables.displaced(row, flow.seq))
        events = self.carry.link(flow, cell, self.progress.add(flow, self._now_ns))
        self._score(self.tables.scatter(events, cell, row, self._now_ns))

    def _add_pending(self, group: list[tuple[DecodedBatch, Resolved]]) -> None:
        for batch, r in group:
            p = batch.pending
            if not len(p):
                continue
            index = p.words[0]
            good = r.slot[index] >= 0
            index, (lane, op, _, state) = index[good], p.small[:, good]
            member = r.member[index]
            seq = self.joining.shifted(lane, member, p.words[1][good].astype(np.int64))
            entered = batch.received_ns - (batch.head.end_ns - p.entered_ns[good])
            slot = r.slot[index].astype(np.int64)
            self.hangs.add_pending(member, slot, lane, seq, op, state, entered, self._now_ns)

    def _join(self, flow: gather.Flow) -> gather.Flow | None:
        """Bring communicators that were met running onto common sequence numbers."""
        r = self.registry
        if not self.joining.late[flow.slot].any():
            return flow
        offset, error = self._solve_clocks()
        node = r.node[flow.member]
        one_node = self._on_one_node(np.unique(flow.slot))[flow.slot]
        known = np.where(one_node, 0.0, np.where(np.isfinite(error[node]), offset[node], np.nan))
        seen = {
            int(n): int((r.process[s.base : s.base + s.ranks] >= 0).sum())
            for n in np.unique(flow.slot)
            if (s := r.slots[n]) is not None
        }
        return self.joining.align(flow, r.complete, known, seen, self._now_ns)

    def _on_one_node(self, slots: I64) -> npt.NDArray[np.bool_]:
        """[slot] whether all ranks seen are on one node; their clock needs no offset then."""
        one = np.zeros(self.config.communicators, bool)
        for number in slots.tolist():
            slot = self.registry.slots[number]
            if slot is not None:
                nodes = self.registry.node[slot.base : slot.base + slot.ranks]
                one[number] = len(np.unique(nodes[nodes >= 0])) == 1
        return one

    def _make_room(self, flow: gather.Flow) -> None:
        tables = self.tables
        for table in np.unique(flow.table[tables.ranks[flow.table] == 0]).tolist():
            slot = self.registry.slots[table // 2]
            if slot is not None:
                tables.open(table, slot.ranks)
        for table, spread in tables.crowded(flow.table, flow.seq):
            if tables.ranks[table] == 0 or spread > WILD_SPREAD:
                continue
            if not tables.grow(table, max(2 * spread, 2 * int(tables.width[table]))):
                self.counts["tables_not_grown"] += 1
                self._stride.crowded()
        self.carry.forget(tables.rename(self.carry.cell))

    def _score(self, rows: I64) -> None:
        """Score rows of any tables, in blocks of communicators of one size."""
        if not len(rows):
            return
        table = self.tables.table_of[rows]
        ranks = self.tables.ranks[table]
        order = np.lexsort((self.tables.tag[rows], table, ranks))
        rows, table, ranks = rows[order], table[order], ranks[order]
        slot = (table // 2).astype(np.int64)
        base_of = np.array([s.base if s else -1 for s in self.registry.slots], dtype=np.int64)
        base = base_of[slot]
        clocks = scoring.Clocks(self.registry.node, self._solve_clocks)
        judged = []
        for size in np.unique(ranks).tolist():
            these = np.flatnonzero((ranks == size) & (base >= 0))
            step = max(1, scoring.CHUNK_CELLS // size)
            for at in range(0, len(these), step):
                part = these[at : at + step]
                judged.append(
                    scoring.judge(self.tables, rows[part], slot[part], base[part], size, clocks)
                )
        for j in judged:
            self.accounts.add(j, base_of)
            self.transfers.add(j, self.tables, base_of, clocks)
            wrong = j.outcome == w.MISALIGNED
            told = j.ranks * wrong if j.present is None else j.present[:, wrong]
            self.counts["rows_misaligned"] += int(told.sum())
            with_evidence = j.evidence > 0
            self.joining.judged(j.slot[with_evidence], wrong[with_evidence])
        self.tables.done(rows)

    def _solve_clocks(self) -> tuple[F64, F64]:
        nodes = self.registry.nodes
        offset, error = np.zeros(len(nodes) + 1), np.full(len(nodes) + 1, np.inf)
        for number, node in enumerate(nodes):
            estimate = self.clock_of(node.head)
            if estimate is not None:
                offset[number], error[number] = estimate.offset_ns, estimate.error_ns
        return offset, error

    def clock_of(self, head: Head) -> Estimate | None:
        """The clock of a batch's node at the batch's end; None while not known."""
        if self.boot_id and head.boot_id == self.boot_id:
            return SAME_CLOCK
        clock = self.clocks.get(head.node)
        return None if clock is None else clock.estimate(head.end_ns)

    def _add_traffic(self, group: list[tuple[DecodedBatch, Resolved]]) -> None:
        rows = gather.traffic(group)
        if not rows and not self.traffic.holds:
            return
        ranks = {i: s.ranks for i, s in enumerate(self.registry.slots) if s is not None}
        r = self.registry
        self.paths.add(group, ranks)
        self.traffic.add(rows, ranks, r.node, r.gpu, self._now_ns)

    def _close_window(self) -> None:
        blocks = self.window.close(len(self.registry.slots), self.registry.members_used)
        self.traffic.close()
        self.stages.close(self.window, self.registry)
        self.loads.close(self.registry.members_used)
        self.accounts.serving.close()
        self.accounts.rank_steps.close(self.registry, self.accounts.serving.slots)
        self._window_end = self._now_ns + int(self.config.window_seconds * NS)
        self._stride.close()
        stats = kinds.kind_stats(blocks)
        spans, outcome = self.window.closed.span_ns, self.window.closed.outcome
        timed = outcome[:, w.SCORED] + outcome[:, w.CLOCK]
        self.registry.restarted += self.joining.doubtful(self._now_ns)
        observed = []
        for number, slot in enumerate(self.registry.slots):
            if slot is None:
                continue
            if number in stats and self.window.closed.evidence[number].any():
                observed.append(
                    verdicts.Observed(
                        slot=number,
                        base=slot.base,
                        ranks=slot.ranks,
                        rows=int(timed[number]),
                        span_ns=float(spans[number]),
                        kinds={v: k for k, v in slot.kinds.items()},
                    )
                )
            else:
                self.verdicts.silence(slot.base, slot.ranks)
        self.verdicts.regroup(self.roles.close(self.registry))
        groups = self._groups(observed)
        self.verdicts.update(stats, observed, *groups)
        self._attribute(stats, observed, groups[0])

    def _groups(self, observed: list[verdicts.Observed]) -> tuple[I64, I64, I64]:
        """Whom each observed rank is compared with: in its communicator, and elsewhere."""
        ranks = np.array([o.ranks for o in observed], dtype=np.int64)
        of = np.repeat(np.arange(len(observed)), ranks)
        base = np.array([o.base for o in observed], dtype=np.int64)
        members = base[of] + np.arange(len(of)) - np.repeat(np.cumsum(ranks) - ranks, ranks)
        slots = [s for o in observed if (s := self.registry.slots[o.slot]) is not None]
        return self.roles.groups(of, members, slots)

    def _attribute(
        self, stats: dict[int, kinds.KindStats], observed: list[verdicts.Observed], group: I64
    ) -> None:
        """Why the named are slow, and whom transfers are slow with."""
        members, slots = self.registry.members_used, len(self.registry.slots)
        timed = self.window.closed.evidence[:, [ops.DEVICE, ops.BLOCKING]].sum(axis=1)
        spans = [
            Span(o.slot, o.base, o.ranks, o.rows, o.span_ns, bool(2 * timed[o.slot] > o.rows))
            for o in observed
        ]
        self.paths.close(self.transfers, spans, self.registry.node)
        self.transfers.close(slots, members)
        named = self.paths.named()
        self.causes.close(stats, observed, self.verdicts, named, self.loads, members, group)
