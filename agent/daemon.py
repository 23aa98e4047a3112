"""Wiring of the sources and the loop: scan, drain, close a window, hand it to the stream.

Every source may fail alone: it is then absent and `source_success` says so, and the rest goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from lanterne.agent import memory, privileges
from lanterne.agent.comms import Registry
from lanterne.agent.config import AgentConfig
from lanterne.agent.encode import Context, Head, Health
from lanterne.agent.errors import AgentError
from lanterne.agent.events import Rules
from lanterne.agent.export import AgentState, Exporter
from lanterne.agent.pipeline import Pipeline
from lanterne.agent.process import Processes, printable
from lanterne.agent.sources import Sources
from lanterne.agent.stream import Stream

if TYPE_CHECKING:
    from lanterne.agent.uprobes import Uprobes

log = logging.getLogger(__name__)

DRAIN_ROWS = 1 << 14  # larger pieces are no faster, and cost memory
LOOK_SECONDS = 0.05  # between two looks at how full the ring is
SHORTEST_LOOK = 0.002
DRAIN_FILLED = 0.25  # of the ring: do not wait for the time of the next drain
SCAN_SHARE = 0.01  # of one core, at most, for searching /proc
LONGEST_SCAN_PAUSE = 5.0
TIDY_AFTER = 3.0  # seconds after start, or after a library was examined


def version() -> str:
    try:
        return metadata.version("lanterne")
    except metadata.PackageNotFoundError:
        return "0+unknown"


class Agent:
    """Build it, `run` it; `stop` from a signal handler or another thread."""

    def __init__(self, config: AgentConfig, *, proc: Path = Path("/proc")):
        self._config = config
        self._proc = proc
        self._stop = threading.Event()
        self._success: dict[str, bool] = {}
        self._uprobes = self._load() if config.probes.enabled else None
        if config.probes.enabled and config.probes.drop_privileges:
            self._drop_privileges()
        self._processes = Processes(proc)
        boot_id = _boot_id(proc)
        self._registry = Registry(
            libraries=self._uprobes.libraries_of if self._uprobes else lambda _: (),
            processes=self._processes,
            limit=config.identity.max_communicators,
            workload_variables=config.identity.workload_variables,
            roles=config.identity.roles,
            gloo_probes=_gloo_probes(),
            boot_id=boot_id,
            plugins_since=self._uprobes.plugins_since if self._uprobes else lambda: 0,
        )
        self._pipeline = Pipeline(
            self._registry,
            Rules(
                max_launches=config.evidence.max_launches,
                max_sync_age_us=int(config.evidence.max_sync_age_seconds * 1e6),
            ),
            Head(config.node.name, time.time_ns(), version(), boot_id),
            time.monotonic_ns(),
            grace_ns=int(config.window.group_grace_seconds * 1e9),
        )
        self._sources = Sources(
            proc, self._success, nvml=config.sources.nvml, host=config.sources.host
        )
        self._stream = Stream(
            config.collector.addresses,
            config.node.name,
            max_batches=config.collector.queue_batches,
            max_bytes=config.collector.queue_bytes,
            heartbeat=config.collector.heartbeat_seconds,
            longest_pause=config.collector.backoff_max_seconds,
        )
        self._state = AgentState(node=config.node.name, version=version())
        self._exporter: Exporter | None = None
        self._tidy_at = time.monotonic() + TIDY_AFTER

    # -- start ------------------------------------------------------------------------------

    def _load(self) -> Uprobes | None:
        # Here, not above: without probes the agent needs none of it.
        from lanterne.agent.uprobes import Uprobes

        try:
            uprobes = Uprobes(self._config.probes, self._proc)
        except (AgentError, OSError) as error:
            self._success["uprobes"] = False
            log.error(
                "probes cannot be loaded: no collective will be seen, only GPU and host readings; "
                "`lanterne-agent doctor` tells what is missing",
                extra={"reason": str(error)},
            )
            return None
        self._success["uprobes"] = True
        log.info("probes loaded", extra={"method": uprobes.programs.method})
        return uprobes

    def _drop_privileges(self) -> None:
        try:
            perf = self._uprobes is not None and self._uprobes.programs.method == "perf"
            kept = privileges.drop(privileges.KEPT_FOR_PERF if perf else privileges.KEPT)
        except OSError as error:
            log.warning("privileges not dropped", extra={"reason": str(error)})
        else:
            log.debug("privileges dropped", extra={"capabilities": hex(kept)})

    # -- loop -------------------------------------------------------------------------------

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> None:
        """Until `stop`; then drains, sends what is left for a bounded time, and detaches."""
        config = self._config
        if config.metrics.listen:
            try:
                self._exporter = Exporter(config.metrics.listen, lambda: self._state)
                log.info("metrics served", extra={"port": self._exporter.port})
            except OSError as error:
                log.error(
                    "metrics.listen cannot be used, going on without",
                    extra={"address": config.metrics.listen, "reason": str(error)},
                )
        self._stream.start()
        log.info("agent started", extra={"node": config.node.name, "version": version()})
        try:
            self._loop()
        finally:
            self._finish()

    def _loop(self) -> None:
        window = self._config.window
        now = time.monotonic()
        next_scan, next_window, next_drain = now, now + window.seconds, now
        look = longest = min(LOOK_SECONDS, window.drain_seconds)
        while not self._stop.is_set():
            now = time.monotonic()
            if now >= next_scan:
                spent = self._scan()
                after = min(max(window.scan_seconds, spent / SCAN_SHARE), LONGEST_SCAN_PAUSE)
                next_scan = time.monotonic() + max(after, window.scan_seconds)
            filled = self._filled()
            if filled > DRAIN_FILLED or now >= min(next_drain, next_window):
                self._drain()
                next_drain = now + window.drain_seconds
            # Look sooner while the ring fills up fast, at leisure otherwise.
            fast = filled > 2 * DRAIN_FILLED
            look = max(look / 2, SHORTEST_LOOK) if fast else min(look * 1.5, longest)
            now = time.monotonic()
            if now >= next_window or self._pipeline.full:
                self._close_window()
                # Late windows are not made up for: the next one ends a full length from now.
                next_window = max(next_window + window.seconds, now + window.seconds / 2)
            if now >= self._tidy_at:
                memory.let_go()
                self._tidy_at = float("inf")
            due = min(next_scan, next_window, next_drain) - time.monotonic()
            # Twenty times a second: a wait on the event costs several times as much.
            time.sleep(max(0.0, min(look, due)))

    def _filled(self) -> float:
        """Share of the ring that waits to be read.

        News of communicators count as a full ring: what is read about a process is best read
        while it lives.
        """
        if self._uprobes is None:
            return 0.0
        return 1.01 * DRAIN_FILLED if self._uprobes.news else self._uprobes.filled

    def _scan(self) -> float:
        """-> seconds it took."""
        begin = time.monotonic()
        if self._uprobes is not None:
            try:
                scan = self._uprobes.attacher.scan()
            except (AgentError, OSError) as error:
                self._success["uprobes"] = False
                log.error("scan failed", extra={"reason": str(error)})
                return time.monotonic() - begin
            self._success["uprobes"] = True
            if scan.new_libraries:
                self._tidy_at = begin + TIDY_AFTER
            for library in scan.new_libraries:
                log.info(
                    "library",
                    extra={
                        "path": library.path,
                        "kind": library.kind,
                        "state": library.state,
                        "probes": len(library.sites),
                        "error": library.error,
                    },
                )
            for failed in scan.failed:
                log.warning("library not probed", extra={"reason": failed})
            if scan.gone_pids:
                self._gone(scan.gone_pids)
        return time.monotonic() - begin

    def _gone(self, pids: tuple[int, ...]) -> None:
        # Their last records may still be in the ring: read them before the pids are forgotten.
        self._drain()
        self._registry.forget_processes(pids, time.monotonic_ns())

    def _drain(self) -> int:
        """Everything in the rings now, within reason; -> records read."""
        uprobes = self._uprobes
        if uprobes is None:
            return 0
        read = 0
        while True:
            # Before the calls: the call of whatever the GPU has run is in the other ring by now.
            told = uprobes.device.drain(DRAIN_ROWS)
            records = uprobes.records.drain(DRAIN_ROWS)
            comm_events = uprobes.comm_events.drain()
            self._pipeline.feed(records, comm_events, time.monotonic_ns())
            if len(told):
                self._pipeline.feed_device(told)
            read += len(records) + len(told)
            if (
                max(len(records), len(told)) < DRAIN_ROWS
                or read > 2 * uprobes.capacity
                or self._pipeline.full
            ):
                return read

    # -- window -----------------------------------------------------------------------------

    def _close_window(self, *, final: bool = False) -> None:
        batches = self._pipeline.close(
            time.monotonic_ns(), self._stream.stride, self._context, final=final
        )
        for sequence, batch in batches:
            self._stream.offer(sequence, batch)
        self._state = self._new_state()

    def _context(self) -> Context:
        self._read_kernel()
        self._sources.read(self._registry.pids())
        self._registry.verify_processes(time.monotonic_ns())
        return Context(
            realtime_offset_ns=time.time_ns() - time.monotonic_ns(),
            gpus=self._sources.gpus,
            processes=self._sources.host,
            cuda=self._uprobes.cuda if self._uprobes else {},
            health=self._health(),
        )

    def _read_kernel(self) -> None:
        if self._uprobes is None:
            return
        try:
            self._uprobes.read_kernel()
        except (AgentError, OSError) as error:
            self._success["uprobes"] = False
            log.warning("kernel counters not readable", extra={"reason": str(error)})

    def _health(self) -> Health:
        uprobes = self._uprobes
        libraries = list(uprobes.attacher.libraries.values()) if uprobes else []
        counters = uprobes.counters if uprobes else {}
        totals = self._stream.totals()
        return Health(
            events_read=uprobes.records.read if uprobes else 0,
            events_submitted=counters.get("submitted", 0),
            events_lost=uprobes.lost() if uprobes else {},
            communicators_unresolved=self._registry.unresolved,
            operations_unresolved=self._pipeline.operations_unresolved,
            blind_graph_launches=uprobes.blind_launches if uprobes else 0,
            source_success=dict(self._success),
            batches_dropped=totals.dropped_queue + totals.refused,
            libraries_failed=[
                printable(f"{library.path}: {library.error}", 256)
                for library in libraries
                if library.state == "failed"
            ],
        )

    def _new_state(self) -> AgentState:
        uprobes, registry = self._uprobes, self._registry
        health, totals = self._health(), self._stream.totals()
        counters = uprobes.counters if uprobes else {}
        libraries: dict[tuple[str, str], int] = {}
        for library in uprobes.attacher.libraries.values() if uprobes else ():
            pair = (library.kind, library.state)
            libraries[pair] = libraries.get(pair, 0) + 1
        stats = uprobes.run_stats() if uprobes else None
        batches, size = self._stream.queued
        return replace(
            self._state,
            events_read=health.events_read,
            events_submitted=health.events_submitted,
            events_lost=health.events_lost,
            nested_calls=counters.get("nested", 0),
            orphan_returns=counters.get("orphan_return", 0),
            comms=len(registry.alive()),
            comms_unresolved=health.communicators_unresolved,
            comms_evicted=registry.evicted,
            operations_unresolved=health.operations_unresolved,
            device_operations=self._pipeline.windows.device.operations,
            device_unmatched=self._pipeline.windows.device.unmatched,
            device_unplaced=self._pipeline.windows.device.unplaced,
            groups_forced=self._pipeline.groups.forced,
            blind_graph_launches=health.blind_graph_launches,
            probe_runs=stats[0] if stats else None,
            probe_run_seconds=stats[1] / 1e9 if stats else None,
            processes=len(uprobes.attacher.processes) if uprobes else 0,
            source_success=health.source_success,
            libraries=libraries,
            batches_sent=totals.sent,
            batches_resent=totals.resent,
            batches_acked=totals.acknowledged,
            batches_dropped={"queue_full": totals.dropped_queue, "refused": totals.refused},
            connects=totals.connects,
            connected=self._stream.connected,
            queue_batches=batches,
            queue_bytes=size,
            stride=self._stream.stride,
            last_window_seconds=time.time(),
            gpus=self._sources.gpus,
            host=self._sources.host,
        )

    # -- end --------------------------------------------------------------------------------

    def _finish(self) -> None:
        """In the order of the data: drain, last window, acknowledgements; then detach."""
        try:
            self._drain()
            self._close_window(final=True)
        except Exception:
            log.exception("last window lost")
        if self._uprobes is not None:
            # The kernel takes its time: meanwhile the last batches go out.
            self._uprobes.attacher.release_all()
        sent = self._stream.close(self._config.collector.shutdown_seconds)
        if not sent:
            log.warning(
                "not everything was acknowledged", extra={"batches": self._stream.queued[0]}
            )
        if self._exporter is not None:
            self._exporter.close()
        self._sources.close()
        if self._uprobes is not None:
            self._uprobes.close()
        log.info("agent stopped")


def _gloo_probes() -> tuple[int, ...]:
    """Ids of the catalog rows of Gloo functions."""
    try:
        from lanterne.probes import catalog
    except ImportError:
        return ()
    return tuple(row.id for row in catalog.ROWS if "gloo" in str(row.library))


def _boot_id(proc: Path) -> str:
    try:
        return printable((proc / "sys/kernel/random/boot_id").read_text().strip(), 64)
    except OSError:
        return ""
