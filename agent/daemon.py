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

from lanterne.agent import memory, parts, privileges
from lanterne.agent.comms import QUARANTINE_ROUNDS, Registry
from lanterne.agent.config import AgentConfig, Window
from lanterne.agent.encode import Head
from lanterne.agent.errors import AgentError
from lanterne.agent.events import Rules
from lanterne.agent.expert_sources import ExpertSources
from lanterne.agent.export import AgentState, Exporter
from lanterne.agent.outbox import Outbox
from lanterne.agent.page_state import page_state, status
from lanterne.agent.parts import Parts
from lanterne.agent.pipeline import Pipeline, drained_until
from lanterne.agent.places import Places
from lanterne.agent.plugin_memory import PluginMemory
from lanterne.agent.process import Processes
from lanterne.agent.ras import Ras
from lanterne.agent.sources import Sources
from lanterne.agent.stream import Stream
from lanterne.agent.window_context import WindowContext
from lanterne.service.guard import Guard
from lanterne.service.reload import Reloader
from lanterne.service.systemd import Notifier

if TYPE_CHECKING:
    from lanterne.agent.uprobes import Uprobes

log = logging.getLogger(__name__)

DRAIN_ROWS = 1 << 14  # larger pieces are no faster, and cost memory
LOOK_SECONDS = 0.05  # between two looks at how full the ring is
SHORTEST_LOOK = 0.002
DETACH_SECONDS = 2.0  # what comes later than that is lost
DRAIN_FILLED = 0.25  # of the ring: do not wait for the time of the next drain
SCAN_SHARE = 0.01  # of one core, at most, for searching /proc
LONGEST_SCAN_PAUSE = 5.0
SPOOL_SECONDS = 5.0  # at the end, for what is not acknowledged to reach the disk
TIDY_AFTER = 3.0  # seconds after start, or after a library was examined


def version() -> str:
    try:
        return metadata.version("lanterne")
    except metadata.PackageNotFoundError:
        return "0+unknown"


class Agent:
    """Build it, `run` it; `stop` from a signal handler or another thread."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        proc: Path = Path("/proc"),
        notifier: Notifier | None = None,
    ):
        self._config = config
        self._notifier = notifier or Notifier({})
        self._problem = ""  # what keeps the agent from seeing collectives
        self._proc = proc
        self._stop = threading.Event()
        self._reload_asked = threading.Event()
        self.reloader: Reloader[AgentConfig] | None = None
        self._success: dict[str, bool] = {}
        # First: a certificate that cannot be used must not become plain text.
        self._guard = Guard(config.metrics.web_config)
        self._uprobes = self._load() if config.probes.enabled else None
        if config.probes.drop_privileges:
            self._drop_privileges()
        self._processes = Processes(proc)
        ras = Ras(proc) if config.sources.ras else None
        boot_id = parts.boot_id(proc)
        self._registry = Registry(
            libraries=self._uprobes.libraries_of if self._uprobes else lambda _: (),
            processes=self._processes,
            limit=config.identity.max_communicators,
            workload_variables=config.identity.workload_variables,
            roles=config.identity.roles,
            gloo_probes=parts.gloo_probes(),
            boot_id=boot_id,
            plugins_since=self._uprobes.plugins_since if self._uprobes else lambda: 0,
            ras=ras,
        )
        epoch = time.time_ns()
        self._pipeline = Pipeline(
            self._registry,
            Rules(
                max_launches=config.evidence.max_launches,
                max_sync_age_us=int(config.evidence.max_sync_age_seconds * 1e6),
            ),
            Head(config.node.name, epoch, version(), boot_id),
            time.monotonic_ns(),
            grace_ns=_grace_ns(config.window),
            kernels=self._uprobes,
        )
        self._sources = Sources(
            proc, self._success, nvml=config.sources.nvml, host=config.sources.host
        )
        self._kubernetes = parts.cluster(config, self._success)
        outbox = Outbox(
            max_batches=config.collector.queue_batches,
            max_bytes=config.collector.queue_bytes,
            epoch=epoch,
        )
        self._keeper = parts.keeper(config, outbox)
        self._stream = Stream(
            config.collector.addresses,
            config.node.name,
            outbox=outbox,
            credentials=parts.credentials(config),
            heartbeat=config.collector.heartbeat_seconds,
            longest_pause=config.collector.backoff_max_seconds,
        )
        self._experts = ExpertSources(parts.expert_settings(config), self._success)
        self._state = AgentState(node=config.node.name, version=version())
        self._exporter: Exporter | None = None
        self._parts = Parts(
            uprobes=self._uprobes,
            registry=self._registry,
            pipeline=self._pipeline,
            plugin_memory=PluginMemory(proc),
            sources=self._sources,
            kubernetes=self._kubernetes,
            places=Places(proc, config.identity.workload_variables, self._kubernetes),
            ras=ras,
            experts=self._experts,
            keeper=self._keeper,
            stream=self._stream,
            success=self._success,
        )
        self._context = WindowContext(self._parts, config.window.seconds)
        self._tidy_at = time.monotonic() + TIDY_AFTER

    # -- start ------------------------------------------------------------------------------

    def _load(self) -> Uprobes | None:
        # Here, not above: without probes the agent needs none of it.
        from lanterne.agent.uprobes import Uprobes

        try:
            uprobes = Uprobes(self._config.probes, self._proc)
        except (AgentError, OSError) as error:
            self._success["uprobes"] = False
            self._problem = f"not loaded: {error}"
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
            keep: tuple[int, ...] = privileges.KEPT_WITHOUT_PROBES
            if self._uprobes is not None:
                perf = self._uprobes.programs.method == "perf"
                keep = privileges.KEPT_FOR_PERF if perf else privileges.KEPT
            kept = privileges.drop(keep)
        except OSError as error:
            log.warning("privileges not dropped", extra={"reason": str(error)})
        else:
            log.debug("privileges dropped", extra={"capabilities": hex(kept)})

    # -- loop -------------------------------------------------------------------------------

    def stop(self) -> None:
        self._stop.set()

    def reload(self) -> None:
        """From a signal handler: the loop does it."""
        self._reload_asked.set()

    def use(self, config: AgentConfig) -> None:
        """Take over what can change in flight (main.LIVE)."""
        self._config = config
        self._context.window_seconds = config.window.seconds
        c = config.collector
        self._stream.use(c.addresses, c.heartbeat_seconds, c.backoff_max_seconds)

    def _reload(self) -> None:
        self._reload_asked.clear()
        if self.reloader is not None:
            with self._notifier.reloading():
                self.reloader.reload()
            self._state = replace(self._state, reload=self.reloader.state)

    def run(self) -> None:
        """Until `stop`; then drains, sends what is left for a bounded time, and detaches."""
        config = self._config
        self._state = replace(self._state, reload=self.reloader.state if self.reloader else None)
        if config.metrics.listen:
            try:
                self._exporter = Exporter(
                    config.metrics.listen,
                    lambda: self._state,
                    lambda: self._problem,
                    self._notifier.stalled,
                    self._guard,
                )
                scheme = "https" if self._guard.encrypted else "http"
                log.info("metrics served", extra={"port": self._exporter.port, "scheme": scheme})
            except OSError as error:
                log.error(
                    "metrics.listen cannot be used, going on without",
                    extra={"address": config.metrics.listen, "reason": str(error)},
                )
        if self._keeper is not None:
            self._keeper.start()
        self._stream.start()
        log.info("agent started", extra={"node": config.node.name, "version": version()})
        self._notifier.ready(status(self._state, self._uprobes is not None))
        try:
            self._loop()
        finally:
            self._finish()

    def _loop(self) -> None:
        window = self._config.window
        now = time.monotonic()
        next_scan, next_window, next_drain = now, now + window.seconds, now
        look, filled = LOOK_SECONDS, 0.0
        while not self._stop.is_set():
            self._notifier.alive()
            if self._reload_asked.is_set():
                self._reload()
            window = self._config.window
            longest = min(LOOK_SECONDS, window.drain_seconds)
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
            filled = self._rest(min(next_scan, next_window, next_drain), look, longest)

    def _rest(self, until: float, look: float, longest: float) -> float:
        """Until then, or until something is to be done sooner; -> share of the ring that is filled.

        Twenty times a second, when everything has left the CPU's caches: so as little as can be is
        touched here. A wait on an event would cost several times as much as the sleep.
        """
        while True:
            time.sleep(max(0.0, min(look, until - time.monotonic())))
            filled = self._filled()
            asked = self._stop.is_set() or self._reload_asked.is_set()
            if filled > DRAIN_FILLED or asked or time.monotonic() >= until:
                return filled
            look = min(look * 1.5, longest)

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
        self._pipeline.windows.kernels.forget_processes(pids)

    def _drain(self) -> int:
        """Everything in the rings now, within reason; -> records read."""
        uprobes = self._uprobes
        if uprobes is None:
            return 0
        read = 0
        while True:
            began_ns = time.monotonic_ns()
            # Before the calls: the call of whatever the GPU has run is in the other ring by now.
            told = uprobes.device.drain(DRAIN_ROWS)
            kernels = uprobes.kernels.drain(DRAIN_ROWS)
            records = uprobes.records.drain(DRAIN_ROWS)
            comm_events = uprobes.comm_events.drain()
            until_ns = drained_until(records, DRAIN_ROWS, began_ns)
            self._pipeline.feed(records, comm_events, until_ns)
            if len(told):
                self._pipeline.feed_device(told)
            if len(kernels):
                self._pipeline.feed_kernels(kernels, time.time_ns() - time.monotonic_ns())
            read += len(records) + len(told) + len(kernels)
            if (
                max(len(records), len(told), len(kernels)) < DRAIN_ROWS
                or read > 2 * uprobes.capacity
                or self._pipeline.full
            ):
                return read

    # -- window -----------------------------------------------------------------------------

    def _close_window(self, *, final: bool = False) -> None:
        batches = self._pipeline.close(
            time.monotonic_ns(),
            self._stream.stride,
            self._context.read,
            final=final,
            origins=self._stream.origins,
        )
        for sequence, batch in batches:
            self._stream.offer(sequence, batch)
        told = self.reloader.state if self.reloader else None
        self._state = page_state(self._state, self._parts, self._context.health(), told)
        self._notifier.status(status(self._state, self._uprobes is not None))

    # -- end --------------------------------------------------------------------------------

    def _finish(self) -> None:
        """In the order of the data: drain, last window; detach, and what came until then; then
        acknowledgements."""
        self._notifier.stopping()
        try:
            self._drain()
            self._close_window(final=self._uprobes is None)
        except Exception:
            log.exception("last window lost")
        if self._uprobes is not None:
            # The kernel takes its time, and until then calls still come in: they are counted there.
            self._uprobes.attacher.close(DETACH_SECONDS)
            try:
                self._drain()
                self._close_window(final=True)
            except Exception:
                log.exception("what came while the probes were detached is lost")
        sent = self._stream.close(self._config.collector.shutdown_seconds)
        kept = self._keeper.close(SPOOL_SECONDS) if self._keeper else False
        if not sent:
            log.warning(
                "not everything was acknowledged",
                extra={"batches": self._stream.queued[0], "kept": "yes" if kept else "no"},
            )
        if self._exporter is not None:
            self._exporter.close()
        self._sources.close()
        self._experts.close()
        if self._kubernetes is not None:
            self._kubernetes.close()
        if self._uprobes is not None:
            self._uprobes.close()
        log.info("agent stopped")


def _grace_ns(window: Window) -> int:
    """How long a group is held. In windows, too: the slot of a communicator that has ended is given
    away after QUARANTINE_ROUNDS of them."""
    seconds = min(window.group_grace_seconds, QUARANTINE_ROUNDS / 2 * window.seconds)
    return int(seconds * 1e9)
