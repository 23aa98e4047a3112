"""Who is who: communicators, their ranks, the processes and nodes behind them.

Everything gets a small number: a communicator a *slot*, each of its ranks a *member* (slot's base +
rank), each process a number, each node a number. The flat arrays of the other files are indexed by
these. All bounded; what does not fit is counted.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from lanterne.collector.align import Extents
from lanterne.collector.analyse.who import Node, Resolved, Slot
from lanterne.collector.batch import Communicators, DecodedBatch

LIBRARIES = ("", "nccl", "gloo", "deepep")
REPLACED_AFTER_NS = 10**9  # a rank that another process claims sooner is a conflict


class Registry:
    def __init__(self, *, slots: int, members: int, processes: int, nodes: int) -> None:
        self.slots: list[Slot | None] = []
        self._slot_limit = slots
        self._by_hash: dict[int, int] = {}
        self._free: list[int] = []
        self._extents = Extents(members)
        # Set when a communicator gets its members: until then their memory is not touched.
        self.node = np.zeros(members, np.int32)
        self.process = np.zeros(members, np.int32)
        self.gpu = np.zeros(members, np.int64)
        self.gpu_index = np.zeros(members, np.int32)
        self.slot_of = np.zeros(members, np.int32)
        self.seen_ns = np.zeros(members, np.int64)
        self.epoch = np.zeros(members, np.int64)
        self.complete = np.zeros(members, bool)
        self._gpus: dict[tuple[int, str], int] = {}
        self.nodes: list[Node] = []
        self.node_number: dict[str, int] = {}
        self._node_limit = nodes
        self._process_number: dict[tuple[int, int, int], int] = {}
        self._process_limit = processes
        self._process_free: list[int] = []
        self.process_pid = np.zeros(processes, np.int64)
        self.process_seen = np.zeros(processes, np.int64)
        self.process_node = np.zeros(processes, np.int32)
        self._names: set[tuple[str, str]] = set()
        self._cache: dict[int, tuple[object, int, Resolved]] = {}
        self.dropped: Counter[str] = Counter()
        self.fresh: list[int] = []  # members whose sequence numbers start anew
        self.fresh_processes: list[int] = []
        self.gone: list[tuple[int, Slot]] = []
        self.restarted: list[int] = []  # late-attached slots of an agent that began anew
        self.generation = 0

    @property
    def members_used(self) -> int:
        """Every member number given so far is below this."""
        return self._extents.high

    def resolve(self, batch: DecodedBatch) -> Resolved | None:
        """Numbers of a batch's communicators; None when its node does not fit."""
        number = self._node(batch)
        if number < 0:
            self.dropped["nodes"] += 1
            return None
        cached = self._cache.get(number)
        key_now = (batch.epoch, batch.communicators)
        if cached and cached[1] == self.generation and cached[0] == key_now:
            resolved = cached[2]
        else:
            resolved = self._resolve(batch, number)
            resolved.settle()
            self._cache[number] = (key_now, self.generation, resolved)
        self._touch(self.nodes[number], number, resolved, batch)
        return resolved

    def process_number(self, node: str, pid: int, ticks: int) -> int:
        """-1: it holds no communicator that is known."""
        return self._process_number.get((self.node_number.get(node, -1), pid, ticks), -1)

    def _touch(self, node: Node, number: int, r: Resolved, batch: DecodedBatch) -> None:
        now_ns, keys = batch.received_ns, batch.head.process_keys
        if keys != node.listed_keys or node.listed_generation != self.generation:
            known = [self._process_number.get((number, *key), -1) for key in keys]
            node.listed = np.array([p for p in known if p >= 0], dtype=np.int32)
            # One that is not known yet may be by the next batch.
            node.listed_keys = keys if len(node.listed) == len(keys) else ()
            node.listed_generation = self.generation
        self.process_seen[node.listed] = now_ns
        self.process_seen[r.good_processes] = now_ns
        self.seen_ns[r.good_members] = now_ns
        for at in r.slots:
            slot = self.slots[at]
            if slot is not None and slot.last_ns < now_ns:
                slot.last_ns = now_ns

    def _node(self, batch: DecodedBatch) -> int:
        head = batch.head
        number = self.node_number.get(head.node, -1)
        if number < 0:
            if len(self.nodes) >= self._node_limit:
                return -1
            number = self.node_number[head.node] = len(self.nodes)
            self.nodes.append(Node(head.node, head))
        node = self.nodes[number]
        # Another epoch is a later run, whatever its number: the clock may have been set back.
        if head.epoch != node.head.epoch or head.sequence >= node.head.sequence:
            node.head = head
        node.lists_processes |= bool(head.process_keys)
        return number

    def _resolve(self, batch: DecodedBatch, node: int) -> Resolved:
        c = batch.communicators
        count = len(c.rank)
        out = Resolved(
            slot=np.full(count, -1, np.int32),
            rank=np.array(c.rank, dtype=np.int64),
            member=np.full(count, -1, np.int64),
            process=np.full(count, -1, np.int32),
        )
        for i in range(count):
            process = self._process(node, c.pid[i], c.pid_start_ticks[i], batch.received_ns)
            number = self._slot(c, i)
            if process < 0 or number < 0:
                self.dropped["processes" if process < 0 else "communicators"] += 1
                continue
            slot = self.slots[number]
            if slot is None or slot.ranks != c.n_ranks[i]:
                self.dropped["n_ranks_conflict"] += 1
                continue
            member = slot.base + c.rank[i]
            owner = int(self.process[member])
            if owner >= 0 and owner != process:
                if batch.received_ns - int(self.seen_ns[member]) < REPLACED_AFTER_NS:
                    self.dropped["rank_conflict"] += 1
                    continue
                # The same hash from a new process: the job was started again under its old name.
                self.remove(number)
                number = self._slot(c, i)
                slot = self.slots[number] if number >= 0 else None
                if number < 0 or slot is None:
                    self.dropped["communicators"] += 1
                    continue
                member = slot.base + c.rank[i]
            if int(self.process[member]) != process:
                self._introduce(c, i, node, process, number, member)
            elif not c.complete[i] and int(self.epoch[member]) != batch.epoch:
                # The new agent counts from 0 again where it met the communicator running.
                self.restarted.append(number)
                self.complete[member] = False
                slot.late_attached = True
            elif self.gpu_index[member] < 0 and c.gpu_bus_id[i]:
                self._set_gpu(c, i, node, member)  # the agent learns it after the first calls
            if slot.workload != c.workload[i]:
                self._rename(slot, c.workload[i], member)
            self.epoch[member] = batch.epoch
            out.slot[i], out.member[i], out.process[i] = number, member, process
        # A slot replaced halfway through this batch leaves rows that name the old one.
        for i in range(count):
            if out.slot[i] >= 0 and self.slot_of[out.member[i]] != out.slot[i]:
                out.slot[i] = -1
        return out

    def _set_gpu(self, c: Communicators, i: int, node: int, member: int) -> None:
        self.gpu_index[member] = c.gpu_index[i]
        bus = c.gpu_bus_id[i]
        if bus and len(self._gpus) < len(self.gpu):
            self.gpu[member] = self._gpus.setdefault((node, bus), len(self._gpus))

    def _introduce(
        self, c: Communicators, i: int, node: int, process: int, number: int, member: int
    ) -> None:
        self.node[member], self.process[member] = node, process
        self.slot_of[member] = number
        self._set_gpu(c, i, node, member)
        self.complete[member] = c.complete[i]
        slot = self.slots[number]
        if slot is not None and (slot.late_attached or not c.complete[i]):
            # With every rank that joins, the shifts between all of them are found anew.
            slot.late_attached = True
            self.restarted.append(number)

    def _process(self, node: int, pid: int, ticks: int, now_ns: int) -> int:
        key = (node, pid, ticks)
        number = self._process_number.get(key)
        if number is None:
            # Numbers given so far: those in use and those that are free again.
            given = len(self._process_number) + len(self._process_free)
            if not self._process_free and given >= self._process_limit:
                return -1
            number = self._process_free.pop() if self._process_free else given
            self._process_number[key] = number
            self.process_pid[number] = pid
            self.process_node[number] = node
            self.fresh_processes.append(number)
        self.process_seen[number] = now_ns
        return number

    def _slot(self, c: Communicators, i: int) -> int:
        number = self._by_hash.get(c.comm_hash[i])
        if number is not None:
            return number
        base = self._extents.take(c.n_ranks[i]) if len(self._by_hash) < self._slot_limit else -1
        if base < 0:
            return -1
        members = slice(base, base + c.n_ranks[i])
        for array in (self.node, self.process, self.gpu, self.gpu_index):
            array[members] = -1
        self.slot_of[members] = -1
        self.seen_ns[members] = 0
        library = LIBRARIES[c.library[i]]
        slot = Slot(
            comm_hash=c.comm_hash[i],
            ranks=c.n_ranks[i],
            base=base,
            library=library,
            workload=c.workload[i],
            name=c.name[i],
            role=c.role[i],
            label=self._label(c.workload[i], c.name[i], library, c.n_ranks[i]),
            named_by=base + c.rank[i],
        )
        number = self._free.pop() if self._free else len(self.slots)
        if number == len(self.slots):
            self.slots.append(slot)
        else:
            self.slots[number] = slot
        self._by_hash[slot.comm_hash] = number
        self.fresh.append(number)
        return number

    def _rename(self, slot: Slot, workload: str, member: int) -> None:
        """An agent may learn late whose pod a rank lives in. One member's word counts, so that
        agents that know more and less do not rename it in turn; and a name is never taken away."""
        if not workload or (slot.workload and member != slot.named_by):
            return
        self._names.discard((slot.workload, slot.label))
        slot.workload, slot.named_by = workload, member
        slot.label = self._label(workload, slot.name, slot.library, slot.ranks)

    def _label(self, workload: str, name: str, library: str, ranks: int) -> str:
        """Never a pointer or hash: the name, or library, size and an ordinal in the workload."""
        stem = name or f"{library}-{ranks}ranks"
        label, ordinal = (name, 1) if name else (f"{stem}-0", 0)
        while (workload, label) in self._names:
            ordinal += 1
            label = f"{stem}-{ordinal}"
        self._names.add((workload, label))
        return label

    def remove(self, number: int) -> None:
        """Forget a communicator; its numbers stay taken until `release`."""
        slot = self.slots[number]
        if slot is None:
            return
        self.generation += 1
        self._names.discard((slot.workload, slot.label))
        self._by_hash.pop(slot.comm_hash, None)
        self.slot_of[slot.base : slot.base + slot.ranks] = -1
        self.slots[number] = None
        # Events on their way may still name the numbers: `release` frees them.
        self.gone.append((number, slot))

    def release(self) -> list[tuple[int, Slot]]:
        """Make the numbers of removed communicators free again -> what was removed."""
        gone, self.gone = self.gone, []
        for number, slot in gone:
            self._extents.give(slot.base, slot.ranks)
            self._free.append(number)
        return gone

    def prune(self, now_ns: int, idle_ns: int, ended_ns: int) -> list[int]:
        """Communicators to remove: idle too long, or every process of theirs has ended.

        A process has ended when its node still reports and no longer lists it. A silent node says
        nothing, so its communicators stay until the idle limit.
        """
        old = []
        for number, slot in enumerate(self.slots):
            if slot is not None and (
                now_ns - slot.last_ns > idle_ns or self._ended(slot, now_ns, ended_ns)
            ):
                old.append(number)
        dead = [
            key
            for key, number in self._process_number.items()
            if now_ns - int(self.process_seen[number]) > idle_ns
        ]
        for key in dead:
            self._process_free.append(self._process_number.pop(key))
        if dead:
            self.generation += 1
        return old

    def _ended(self, slot: Slot, now_ns: int, ended_ns: int) -> bool:
        if now_ns - slot.last_ns <= ended_ns:
            return False
        processes = self.process[slot.base : slot.base + slot.ranks]
        processes = processes[processes >= 0]
        for process in processes.tolist():
            node = self.nodes[int(self.process_node[process])]
            if not node.lists_processes:
                return False
            if node.head.received_ns - int(self.process_seen[process]) <= ended_ns:
                return False
        return len(processes) > 0
