"""Wiring of the sources and the loop: scan, drain, close a window, hand it to the stream.

Every source may fail alone: it is then absent and `source_success` says so, and the rest goes on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from lanterne.agent import kubernetes, memory, privileges
from lanterne.agent.comms import Registry
from lanterne.agent.config import AgentConfig
from lanterne.agent.credentials import Credentials, Files
from lanterne.agent.encode import Context, Head, Health
from lanterne.agent.engines import Endpoint
from lanterne.agent.errors import AgentError
from lanterne.agent.events import Rules
from lanterne.agent.expert_files import Watched
from lanterne.agent.expert_sources import ExpertSources, Settings
from lanterne.agent.export import AgentState, Exporter
from lanterne.agent.inflight import NOTHING, InFlight, in_flight
from lanterne.agent.keeper import Keeper
from lanterne.agent.outbox import Outbox
from lanterne.agent.pipeline import Pipeline
from lanterne.agent.places import Places
from lanterne.agent.pods import Account
from lanterne.agent.process import Processes, printable
from lanterne.agent.ras import Ras
from lanterne.agent.reload import Reloader
from lanterne.agent.sources import Sources
from lanterne.agent.spool import Spool
from lanterne.agent.stream import Stream
from lanterne.agent.systemd import Notifier

if TYPE_CHECKING:
    from lanterne.agent.uprobes import Uprobes

log = logging.getLogger(__name__)

MAX_CUDA_PROCESSES = 256  # that hold no communicator
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
        self._uprobes = self._load() if config.probes.enabled else None
        if config.probes.drop_privileges:
            self._drop_privileges()
        self._processes = Processes(proc)
        self._ras = Ras(proc) if config.sources.ras else None
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
            ras=self._ras,
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
            grace_ns=int(config.window.group_grace_seconds * 1e9),
            kernels=self._uprobes,
        )
        self._sources = Sources(
            proc, self._success, nvml=config.sources.nvml, host=config.sources.host
        )
        self._kubernetes = _kubernetes(config, self._success)
        self._places = Places(proc, config.identity.workload_variables, self._kubernetes)
        outbox = Outbox(
            max_batches=config.collector.queue_batches,
            max_bytes=config.collector.queue_bytes,
            epoch=epoch,
        )
        self._keeper = _keeper(config, outbox)
        self._stream = Stream(
            config.collector.addresses,
            config.node.name,
            outbox=outbox,
            credentials=_credentials(config),
            heartbeat=config.collector.heartbeat_seconds,
            longest_pause=config.collector.backoff_max_seconds,
        )
        self._experts = ExpertSources(_expert_settings(config), self._success)
        self._state = AgentState(node=config.node.name, version=version())
        self._exporter: Exporter | None = None
        self._untold = 0  # processes that use CUDA, beyond the bound
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
                )
                log.info("metrics served", extra={"port": self._exporter.port})
            except OSError as error:
                log.error(
                    "metrics.listen cannot be used, going on without",
                    extra={"address": config.metrics.listen, "reason": str(error)},
                )
        if self._keeper is not None:
            self._keeper.start()
        self._stream.start()
        log.info("agent started", extra={"node": config.node.name, "version": version()})
        self._notifier.ready(_status(self._state, self._uprobes is not None))
        try:
            self._loop()
        finally:
            self._finish()

    def _loop(self) -> None:
        window = self._config.window
        now = time.monotonic()
        next_scan, next_window, next_drain = now, now + window.seconds, now
        look = LOOK_SECONDS
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
        self._pipeline.windows.kernels.forget_processes(pids)

    def _drain(self) -> int:
        """Everything in the rings now, within reason; -> records read."""
        uprobes = self._uprobes
        if uprobes is None:
            return 0
        read = 0
        while True:
            # Before the calls: the call of whatever the GPU has run is in the other ring by now.
            told = uprobes.device.drain(DRAIN_ROWS)
            kernels = uprobes.kernels.drain(DRAIN_ROWS)
            records = uprobes.records.drain(DRAIN_ROWS)
            comm_events = uprobes.comm_events.drain()
            self._pipeline.feed(records, comm_events, time.monotonic_ns())
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
            time.monotonic_ns(), self._stream.stride, self._context, final=final
        )
        for sequence, batch in batches:
            self._stream.offer(sequence, batch)
        self._state = self._new_state()
        self._notifier.status(_status(self._state, self._uprobes is not None))

    def _context(self) -> Context:
        self._read_kernel()
        told = self._told_processes()
        self._sources.read(told)
        host = self._sources.host
        started = {pid: reading.start_ticks for pid, reading in host.items()}
        places = self._places.read(told, self._sources.gpus, started)
        if self._kubernetes is not None and self._kubernetes.success is not None:
            self._success["kubernetes"] = self._kubernetes.success
        if self._ras is not None and self._ras.success is not None:
            self._success["ras"] = self._ras.success
        self._registry.verify_processes(time.monotonic_ns())
        loads, readings = self._experts.take()
        return Context(
            realtime_offset_ns=time.time_ns() - time.monotonic_ns(),
            gpus=self._sources.gpus,
            processes=self._sources.host,
            cuda=self._uprobes.cuda if self._uprobes else {},
            steps=self._uprobes.steps_of() if self._uprobes else {},
            health=self._health(),
            in_flight=self._in_flight(),
            expert_loads=loads,
            engine_readings=readings,
            places=places,
        )

    def _in_flight(self) -> InFlight:
        """Calls that have lasted for longer than a window."""
        if self._uprobes is None:
            return NOTHING
        try:
            records = self._uprobes.programs.open_calls()
        except OSError as error:
            log.warning("calls in flight not readable", extra={"reason": str(error)})
            return NOTHING
        before = time.monotonic_ns() - int(self._config.window.seconds * 1e9)
        return in_flight(records, self._registry.find(records), before)

    def _told_processes(self) -> set[int]:
        """Those with a communicator, and the busiest of the others that use CUDA."""
        holders = self._registry.pids()
        uses = self._uprobes.cuda if self._uprobes else {}
        others = [pid for pid in uses if pid not in holders]
        others.sort(key=lambda pid: (-uses[pid].launches - uses[pid].graph_launches, pid))
        self._untold = max(0, len(others) - MAX_CUDA_PROCESSES)
        return holders | set(others[:MAX_CUDA_PROCESSES])

    def _read_kernel(self) -> None:
        if self._uprobes is None:
            return
        try:
            self._uprobes.read_kernel()
            self._uprobes.count_steps(self._registry.holders(), self._pipeline.take_replaying())
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
            blind_graph_launches=uprobes.steps.blind_launches if uprobes else 0,
            steps=uprobes.steps.steps if uprobes else 0,
            blind_steps=uprobes.steps.blind_steps if uprobes else 0,
            processes_untold=self._untold,
            source_success=dict(self._success),
            batches_dropped=sum(totals.lost().values()),
            libraries_failed=[
                printable(f"{library.path}: {reason}", 256)
                for library in libraries
                for reason in ([library.error] if library.state == "failed" else library.dropped)
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
            kernels=self._pipeline.windows.kernels.read,
            kernel_operations=self._pipeline.windows.kernels.operations,
            kernels_left_out=dict(self._pipeline.windows.kernels.left_out),
            groups_forced=self._pipeline.groups.forced,
            blind_graph_launches=health.blind_graph_launches,
            steps=health.steps,
            blind_steps=health.blind_steps,
            processes_untold=health.processes_untold,
            probe_runs=stats[0] if stats else None,
            probe_run_seconds=stats[1] / 1e9 if stats else None,
            processes=len(uprobes.attacher.processes) if uprobes else 0,
            source_success=health.source_success,
            libraries=libraries,
            batches_sent=totals.sent,
            batches_resent=totals.resent,
            batches_acked=totals.acknowledged,
            batches_dropped=totals.lost(),
            spool=self._keeper.state() if self._keeper else None,
            connects=totals.connects,
            connected=self._stream.connected,
            queue_batches=batches,
            queue_bytes=size,
            stride=self._stream.stride,
            expert_loads=dict(self._experts.counts.taken),
            expert_loads_refused=self._experts.refused(),
            last_window_seconds=time.time(),
            reload=self.reloader.state if self.reloader else None,
            gpus=self._sources.gpus,
            host=self._sources.host,
            kubernetes_requests=dict(self._kubernetes.requests) if self._kubernetes else {},
        )

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


def _keeper(config: AgentConfig, outbox: Outbox) -> Keeper | None:
    if not config.spool.path:
        return None
    spool = Spool(Path(config.spool.path), config.spool.max_bytes)
    return Keeper(spool, outbox, config.spool.sync_seconds)


def _kubernetes(config: AgentConfig, success: dict[str, bool]) -> kubernetes.Kubernetes | None:
    c = config.kubernetes
    account = Account(Path(c.token_file), Path(c.ca_file))
    try:
        return kubernetes.connect(
            c.enabled, config.node.name, c.node_address, c.pod_resources_socket, account, os.environ
        )
    except AgentError as error:
        success["kubernetes"] = False
        log.warning("no names from Kubernetes", extra={"reason": str(error)})
        return None


def _credentials(config: AgentConfig) -> Credentials:
    tls = config.tls
    token = config.collector.token_file
    if token and not tls.ca:
        log.warning("the token goes over the network in plain text: set tls.ca")
    return Credentials(Files(tls.ca, tls.cert, tls.key, token, tls.server_name))


def _expert_settings(config: AgentConfig) -> Settings:
    c = config.experts
    return Settings(
        socket=c.socket,
        listen=c.listen,
        max_body_bytes=c.max_body_bytes,
        max_per_second=c.max_per_second,
        poll_seconds=c.poll_seconds,
        engines=[Endpoint(e.address, e.kind, e.workload) for e in c.engines],
        files=[Watched(Path(f.path), f.kind, f.workload, f.model, f.ranks) for f in c.files],
    )


def _status(state: AgentState, probes: bool) -> str:
    """One line for `systemctl status`."""
    return (
        f"probes {'loaded' if probes else 'NOT loaded, see lanterne-agent doctor'}, "
        f"{state.processes} processes, {state.comms} communicators, "
        f"{'reporting' if state.connected else 'no collector answers'}"
    )


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
