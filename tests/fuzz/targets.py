"""What is fuzzed: every reader of bytes that somebody else has written.

A target gives its valid inputs, how they are damaged, and what its reader may raise: its own
declared errors. Any other exception is a finding, and so is what takes too long or too much memory.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lanterne.agent import (
    cgroup,
    discover,
    elf,
    engine_log,
    engine_metrics,
    engines,
    kernel_names,
    kubelet,
    library,
    numpy_file,
    pod_list,
    ras_answer,
    segments,
    sglang_dump,
    usdt,
)
from lanterne.agent import config as agent_config
from lanterne.agent.errors import ConfigError, ElfError, KubernetesError, RasError
from lanterne.agent.expert_counts import ExpertCounts, load
from lanterne.agent.expert_formats import from_json, from_npy, from_routed
from lanterne.collector import config as collector_config
from lanterne.collector import errors as collector_errors
from lanterne.collector import recording, state
from lanterne.collector.admission import Peer
from lanterne.collector.analyse.engine import Engine
from lanterne.collector.analyse.settings import EngineConfig
from lanterne.collector.decode import decode
from lanterne.collector.errors import BatchRefused, RecordingError
from lanterne.collector.frames import Frames
from lanterne.collector.ingest_config import IngestConfig
from lanterne.probes import deepep
from lanterne.proto import pod_resources_pb2, telemetry_pb2
from tests.fuzz import corpus, mutate
from tests.fuzz.mutate import Mutator

Read = Callable[[bytes], object]
Make = Callable[[], Read]

SMALL = EngineConfig(
    cells=1 << 16, rows=1 << 12, communicators=16, members=1 << 10, processes=64, own_cells=1 << 12
)


@dataclass(frozen=True)
class Target:
    """`make` prepares a reader once, in the process that fuzzes."""

    make: Make
    corpus: Callable[[], list[bytes]]
    declared: tuple[type[Exception], ...] = ()
    mutator: Mutator = mutate.blind
    covered: tuple[str, ...] = ()  # modules worth following with coverage


def _plain(read: Read) -> Make:
    return lambda: read


def _from_file(read: Callable[[Path], object]) -> Make:
    def make() -> Read:
        fd = os.memfd_create("fuzz", os.MFD_CLOEXEC)
        path = Path(f"/proc/{os.getpid()}/fd/{fd}")

        def one(data: bytes) -> object:
            os.ftruncate(fd, 0)
            os.pwrite(fd, data, 0)
            return read(path)

        return one

    return make


# -- Collector ------------------------------------------------------------------------------------


def _frames() -> Read:
    """Through the service's own checks into the analysis, with a snapshot now and then. What the
    analysis has made of earlier inputs is part of the input; it begins anew every so often."""
    engine = Engine(SMALL)
    count = 0
    now_ns = 10**9

    def take(item: object) -> bool:
        engine.apply(item)  # type: ignore[arg-type]
        return True

    frames = Frames(on_batch=take, config=IngestConfig(nodes=64))
    peer = Peer("fuzz")

    def one(data: bytes) -> object:
        nonlocal engine, count, now_ns
        count += 1
        now_ns += 20_000_000
        if count % 4096 == 0:
            engine = Engine(SMALL)
        ack = frames.answer(data, now_ns, peer).ack
        if count % 64 == 0:
            engine.snapshot(now_ns / 1e9, now_ns=now_ns)
        if ack.status == telemetry_pb2.STATUS_REFUSED:
            raise BatchRefused("answered", ack.reason)
        return ack

    return one


def _recording(path: Path) -> object:
    recording.read_header(path)
    damage = recording.Damage()
    return sum(len(one.frame) for one in recording.read(path, damage))


def _unframe_recording(data: bytes) -> bytes:
    blocks = list(recording._blocks(io.BytesIO(data), recording.Damage()))
    return blocks[-1][1]


def _frame_recording(body: bytes) -> bytes:
    header = corpus.recordings()[1]
    return header + recording.block(recording.FRAMES, body)


def _unframe_header(data: bytes) -> bytes:
    return next(body for _, body in recording._blocks(io.BytesIO(data), recording.Damage()))


def _unframe_state(data: bytes) -> bytes:
    return data[len(state.MAGIC) + state._HEAD.size :]


def _frame_state(payload: bytes) -> bytes:
    import hashlib

    head = state._HEAD.pack(state.VERSION, len(payload), hashlib.sha256(payload).digest())
    return state.MAGIC + head + payload


def _state(data: bytes) -> object:
    """As at a start: what does not fit is refused by either half."""
    items = state.unpack(data)
    try:
        Engine(SMALL).experts.restore(items, 10**9)
    except (KeyError, TypeError, ValueError):
        return None  # collector.state counts them as corrupt
    return items


# -- Libraries ------------------------------------------------------------------------------------


def _examine(kind: str) -> Make:
    def read(path: Path) -> object:
        fd = elf.open_regular(path)
        try:
            return library.examine(fd, kind, str(path), str(path))
        finally:
            os.close(fd)

    return _from_file(read)


def _usdt(path: Path) -> object:
    fd = elf.open_regular(path)
    try:
        file = elf.ElfFile(fd, str(path))
        return [usdt.operands(file, probe) for probe in usdt.probes(file, "lanterne")]
    finally:
        os.close(fd)


def _notes_of(data: bytes) -> tuple[int, int]:
    at = data.find(b"stapsdt\0")
    return max(0, at - 12), data.rfind(b"stapsdt\0") + 200


def _headers_of(data: bytes) -> tuple[int, int]:
    """Of the sections; else of the file and its segments."""
    at = int.from_bytes(data[40:48], "little")
    return (at, min(len(data), at + 64 * 64)) if 0 < at < len(data) else (0, 1024)


def _elf_damage() -> Mutator:
    headers = mutate.either(mutate.part(_headers_of), mutate.part(lambda _: (16, 1024)))
    return mutate.either(headers, mutate.blind)


# -- Agent ----------------------------------------------------------------------------------------


def _maps(data: bytes) -> object:
    return discover.parse_maps(data), discover.other_files(data)


def _talk(data: bytes) -> object:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(0)
        with contextlib.suppress(BlockingIOError):  # the socket holds less: the end is missing
            theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        return ras_answer.ask(ours, seconds=5.0)


def _engine_page() -> Read:
    latencies = {kind: engine_metrics.Latency(kind) for kind in engine_metrics.KINDS}
    now = 0.0

    def one(data: bytes) -> object:
        nonlocal now
        now += 5.0
        page = engines.parse(data)
        heat = engine_metrics.heat_map(page)
        if heat is not None:
            load(heat[1], layers=heat[0], source="sglang_heat_map", unit="rank")
        return [latency.add(now, page) for latency in latencies.values()]

    return one


def _bodies() -> Read:
    counts = ExpertCounts()

    def one(data: bytes) -> object:
        told, cumulative = from_json(data)
        counts.add(told, cumulative=cumulative)
        return counts.take()

    return one


def _query_of(data: bytes) -> dict[str, str]:
    """The text before the array, as the query would be."""
    words = data[:64].decode("latin-1").split()
    return {"layers": ",".join(words[:3])} if len(words) > 8 else {}


def _agent_env(data: bytes) -> object:
    """NAME=VALUE lines as the environment."""
    env = dict(
        line.split("=", 1) for line in data.decode("utf-8", "replace").split("\n") if "=" in line
    )
    return agent_config.load(None, env), collector_config.load(None, env, {})


def _environments() -> list[bytes]:
    return [
        b"LANTERNE_AGENT_WINDOW_SECONDS=0.5\nLANTERNE_AGENT_COLLECTOR_ADDRESSES=a:1,[::1]:2\n",
        b'LANTERNE_AGENT_EXPERTS_ENGINES=[{"address": "h:1", "kind": "vllm"}]\nHOME=/\n',
        b"LANTERNE_COLLECTOR_INGEST_MAX_NODES=7\nLANTERNE_COLLECTOR_HTTP_ADDRESS=[::]:80\n",
    ]


def _name(data: bytes) -> object:
    text = data[:4096].decode("latin-1")
    return kernel_names.kind_of(text), deepep.derive(text)


def _segment(data: bytes) -> object:
    scan = segments.scan(data)
    for record in scan.records:
        content = data[record.at + segments.HEAD_BYTES : record.end]
        segments.ranges_of(content)
        segments.payload_of(data[record.at : record.end], (record.epoch, record.sequence))
    return scan


def _unframe_segment(data: bytes) -> bytes:
    first = segments.scan(data).records[0]
    return data[first.at + segments.HEAD_BYTES : first.end]


def _frame_segment(payload: bytes) -> bytes:
    kind = segments.DONE if len(payload) % 24 == 0 else segments.BATCH
    return segments.frame(kind, 5, 1, payload) * 2


CONFIG = (ConfigError, collector_errors.ConfigError)
_AGENT, _COLLECTOR = "lanterne.agent.", "lanterne.collector."

TARGETS: dict[str, Target] = {
    "batch": Target(_plain(decode), corpus.batches, (BatchRefused,),
        mutate.either(mutate.message(telemetry_pb2.Batch), mutate.blind),
        (_COLLECTOR + "decode", _COLLECTOR + "columns", _COLLECTOR + "reports")),
    "frame": Target(_frames, corpus.frames, (BatchRefused,),
        mutate.framed(lambda data: telemetry_pb2.Frame.FromString(data).batch,
                      lambda batch: telemetry_pb2.Frame(node="n1", batch=batch).SerializeToString(),
                      mutate.message(telemetry_pb2.Batch))),
    "recording": Target(_from_file(_recording), corpus.recordings, (RecordingError,),
        mutate.either(mutate.framed(_unframe_recording, _frame_recording),
                      mutate.either(mutate.framed(_unframe_header,
                          lambda body: recording.block(recording.HEADER, body), mutate.as_json),
                          mutate.blind, 0.5)),
        (_COLLECTOR + "recording",)),
    "state": Target(_plain(_state), corpus.states, (state.StateError,),
        mutate.framed(_unframe_state, _frame_state), (_COLLECTOR + "state",)),
    "elf": Target(_examine("nccl"), corpus.libraries, (ElfError,), _elf_damage(),
        (_AGENT + "elf", _AGENT + "library", _AGENT + "libnccl", _AGENT + "symbols",
         _AGENT + "dwarf")),
    "cuda": Target(_examine("cuda"), corpus.libraries, (ElfError,), _elf_damage()),
    "usdt": Target(_from_file(_usdt), corpus.plugins, (ElfError,),
        mutate.either(mutate.part(_notes_of), _elf_damage()), (_AGENT + "elf", _AGENT + "usdt")),
    "plugin": Target(_examine("profiler"), corpus.plugins, (ElfError,),
        mutate.either(mutate.part(_notes_of), _elf_damage())),
    "kernel_name": Target(_plain(_name), corpus.kernel_names, (), mutate.blind,
        (_AGENT + "kernel_names", "lanterne.probes.deepep")),
    "cgroup": Target(_plain(cgroup.parse), corpus.cgroups, (), mutate.blind, (_AGENT + "cgroup",)),
    "maps": Target(_plain(_maps), corpus.maps, (), mutate.blind, (_AGENT + "discover",)),
    # What is no line of stat is the kernel's word for a process that has gone.
    "stat": Target(_plain(discover.parse_stat), corpus.stats, (ValueError, IndexError)),
    "pod_list": Target(_plain(lambda data: pod_list.parse(data, "n1")), corpus.pod_lists,
        (KubernetesError,), mutate.either(mutate.as_json, mutate.blind), (_AGENT + "pod_list",)),
    "pod_resources": Target(_plain(kubelet.parse), corpus.pod_resources, (KubernetesError,),
        mutate.either(mutate.message(pod_resources_pb2.ListResponse), mutate.blind)),
    "ras_report": Target(_plain(ras_answer.parse), corpus.ras_reports, (RasError,),
        mutate.either(mutate.as_json, mutate.blind), (_AGENT + "ras_answer",)),
    "ras_talk": Target(_plain(_talk), corpus.ras_talks, (RasError, OSError)),
    "engine_page": Target(_engine_page, corpus.engine_pages, (ValueError,), mutate.blind,
        (_AGENT + "engine_metrics",)),
    "engine_log": Target(_plain(engine_log.parse), corpus.engine_logs),
    "expert_json": Target(_bodies, corpus.expert_bodies, (ValueError,),
        mutate.either(mutate.as_json, mutate.blind),
        (_AGENT + "expert_formats", _AGENT + "expert_counts")),
    "expert_npy": Target(_plain(lambda data: from_npy(data, _query_of(data))), corpus.arrays,
        (ValueError,), mutate.blind, (_AGENT + "expert_formats", _AGENT + "numpy_file")),
    "expert_routed": Target(
        _plain(lambda data: from_routed(data, {"experts": "4", "ranks": "2"})),
        corpus.routed_bodies, (ValueError,), mutate.either(mutate.as_json, mutate.blind)),
    "npz": Target(_plain(lambda data: numpy_file.npz(data, limit=1 << 22)), corpus.archives,
        (ValueError,), mutate.either(mutate.archive, mutate.blind)),
    "dump": Target(_from_file(lambda path: sglang_dump.read_dump(path, ranks=2)), corpus.dumps,
        (ValueError, OSError), mutate.either(mutate.archive, mutate.blind, 0.8),
        (_AGENT + "torch_file", _AGENT + "sglang_dump")),
    "agent_config": Target(_from_file(lambda path: agent_config.load(path, {})),
        corpus.agent_configs, CONFIG, mutate.blind, (_AGENT + "config",)),
    "collector_config": Target(_from_file(lambda path: collector_config.load(path, {}, {})),
        corpus.collector_configs, CONFIG, mutate.blind, (_COLLECTOR + "config",)),
    "environment": Target(_plain(_agent_env), _environments, CONFIG),
    "spool": Target(_plain(_segment), corpus.spools, (),
        mutate.either(mutate.framed(_unframe_segment, _frame_segment), mutate.blind, 0.3),
        (_AGENT + "segments",)),
}  # fmt: skip
