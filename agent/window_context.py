"""What goes with a window beside its columns: processes, GPUs, places, loads of experts, calls that
do not end, and the agent's own health."""

from __future__ import annotations

import logging
import time

from lanterne.agent.encode import Context, Health
from lanterne.agent.errors import AgentError
from lanterne.agent.inflight import NOTHING, InFlight, in_flight, joined, on_device
from lanterne.agent.parts import Parts
from lanterne.agent.process import printable

log = logging.getLogger(__name__)

MAX_CUDA_PROCESSES = 256  # that hold no communicator


class WindowContext:
    """`read` once a window; a source that fails is absent, and `success` of the parts says so."""

    def __init__(self, parts: Parts, window_seconds: float) -> None:
        self._parts = parts
        self.window_seconds = window_seconds  # may be set at any time
        self._untold = 0  # processes that use CUDA, beyond the bound

    def read(self) -> Context:
        p = self._parts
        self._read_kernel()
        told = self._told_processes()
        p.sources.read(told)
        host = p.sources.host
        started = {pid: reading.start_ticks for pid, reading in host.items()}
        places = p.places.read(told, p.sources.gpus, started)
        if p.kubernetes is not None and p.kubernetes.success is not None:
            p.success["kubernetes"] = p.kubernetes.success
        if p.ras is not None and p.ras.success is not None:
            p.success["ras"] = p.ras.success
        p.registry.verify_processes(time.monotonic_ns())
        loads, readings = p.experts.take()
        return Context(
            realtime_offset_ns=time.time_ns() - time.monotonic_ns(),
            gpus=p.sources.gpus,
            processes=p.sources.host,
            cuda=p.uprobes.cuda if p.uprobes else {},
            steps=p.uprobes.steps_of() if p.uprobes else {},
            health=self.health(),
            in_flight=self._in_flight(),
            synchronising=self._synchronising(),
            expert_loads=loads,
            engine_readings=readings,
            places=places,
        )

    def _in_flight(self) -> InFlight:
        """Calls that have lasted for longer than a window."""
        if self._parts.uprobes is None:
            return NOTHING
        try:
            records = self._parts.uprobes.programs.open_calls()
        except OSError as error:
            log.warning("calls in flight not readable", extra={"reason": str(error)})
            return NOTHING
        before = self._window_ago()
        calls = in_flight(records, self._parts.registry.find(records), before)
        device = self._parts.pipeline.windows.device
        quiet = device.quiet()
        alive = [c for c in self._parts.registry.describe(quiet.tolist()) if c.ended_round < 0]
        rows = self._parts.plugin_memory.read(sorted({c.tgid for c in alive}))
        if not len(rows):
            return calls
        slots, _ = self._parts.registry.assign_device(rows)
        return joined(calls, on_device(rows, slots, quiet, device.last_told, before))

    def _window_ago(self) -> int:
        return time.monotonic_ns() - int(self.window_seconds * 1e9)

    def _synchronising(self) -> dict[int, float]:
        """Seconds, of processes in a synchronise call that has lasted for longer than a window."""
        if self._parts.uprobes is None:
            return {}
        now, before = time.monotonic_ns(), self._window_ago()
        since = self._parts.uprobes.programs.synchronising()
        return {tgid: (now - at) / 1e9 for tgid, at in since.items() if at < before}

    def _told_processes(self) -> set[int]:
        """Those with a communicator, and the busiest of the others that use CUDA."""
        holders = self._parts.registry.pids()
        uses = self._parts.uprobes.cuda if self._parts.uprobes else {}
        others = [pid for pid in uses if pid not in holders]
        others.sort(key=lambda pid: (-uses[pid].launches - uses[pid].graph_launches, pid))
        self._untold = max(0, len(others) - MAX_CUDA_PROCESSES)
        return holders | set(others[:MAX_CUDA_PROCESSES])

    def _read_kernel(self) -> None:
        if self._parts.uprobes is None:
            return
        try:
            self._parts.uprobes.read_kernel()
            self._parts.uprobes.count_steps(
                self._parts.registry.holders(), self._parts.pipeline.take_replaying()
            )
        except (AgentError, OSError) as error:
            self._parts.success["uprobes"] = False
            log.warning("kernel counters not readable", extra={"reason": str(error)})

    def health(self) -> Health:
        """The agent's own totals."""
        uprobes = self._parts.uprobes
        libraries = list(uprobes.attacher.libraries.values()) if uprobes else []
        counters = uprobes.counters if uprobes else {}
        totals = self._parts.stream.totals()
        return Health(
            events_read=uprobes.records.read if uprobes else 0,
            events_submitted=counters.get("submitted", 0),
            events_lost=uprobes.lost() if uprobes else {},
            communicators_unresolved=self._parts.registry.unresolved,
            operations_unresolved=self._parts.pipeline.operations_unresolved,
            blind_graph_launches=uprobes.steps.blind_launches if uprobes else 0,
            steps=uprobes.steps.steps if uprobes else 0,
            blind_steps=uprobes.steps.blind_steps if uprobes else 0,
            processes_untold=self._untold,
            source_success=dict(self._parts.success),
            batches_dropped=sum(totals.lost().values()),
            libraries_failed=[
                printable(f"{library.path}: {reason}", 256)
                for library in libraries
                for reason in ([library.error] if library.state == "failed" else library.dropped)
            ],
        )
