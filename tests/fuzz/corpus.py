"""Valid inputs to begin with, made by the real encoders, compilers and writers wherever there are
any. Each function gives a list of bytes; the first is the plainest."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lanterne.agent import expert_wire, segments
from lanterne.agent.encode import MAX_STAGES
from lanterne.agent.expert_counts import load
from lanterne.agent.expert_wire import Reading
from lanterne.collector import recording, state
from lanterne.proto import pod_resources_pb2, telemetry_pb2
from tests.fixtures import feeder
from tests.plugin.build import build as build_plugin
from tests.rig.ras import report
from tests.rig.rig import build as build_rig

ROOT = Path(__file__).resolve().parents[2]
DUMPS = ROOT / "tests" / "fixtures" / "sglang"
POD = "8e3b2c1a-0f6d-4b7e-9c55-1a2b3c4d5e6f"
CONTAINER = "a1" * 32


@cache
def batches() -> list[bytes]:
    plain = telemetry_pb2.Batch.FromString(feeder.batch("n1", 5, 1, 10**9, 0, 4))
    full = telemetry_pb2.Batch.FromString(feeder.batch("n1", 5, 2, 2 * 10**9, 4, 4))
    _add_columns(full)
    _add_context(full)
    loads = [
        load(np.arange(12.0).reshape(3, 4), source="intake", workload="fed"),
        load(
            np.ones((2, 6)),
            source="sglang_dump",
            unit="physical",
            logical_of_physical=np.arange(6) % 4,
            rank_of_expert=np.arange(6) // 2,
        ),
    ]
    reading = Reading("fed", "vllm", "h:1", {"ttft_p50": 0.5})
    for part in expert_wire.parts(loads, [reading]):
        full.expert_loads.extend(part.loads)
        full.engine_readings.extend(part.readings)
    bare = telemetry_pb2.Batch(schema=1, node="n1", epoch=5, sequence=3, end_ns=1, stride=1)
    return [one.SerializeToString() for one in (plain, full, bare)]


def _column(kind: str) -> Callable[..., bytes]:
    return lambda *values: np.array(values, kind).tobytes()


u8, u32, u64 = (_column(kind) for kind in ("u1", "<u4", "<u8"))


def _add_columns(batch: telemetry_pb2.Batch) -> None:
    batch.traffic.MergeFrom(
        telemetry_pb2.Traffic(
            rows=2,
            communicator=u32(0, 1),
            peer=u32(1, 0),
            sent_bytes=u64(5, 6),
            received_bytes=u64(6, 5),
            receives=u64(1, 1),
            wait_ns=u64(10, 20),
        )
    )
    batch.pending.MergeFrom(
        telemetry_pb2.Pending(
            rows=1,
            communicator=u32(3),
            seq=u32(9),
            lane=u8(0),
            op=u8(8),
            evidence=u8(2),
            entered_ns=u64(10**9),
            state=u8(2),
        )
    )
    batch.stages.MergeFrom(
        telemetry_pb2.Stages(
            rows=2,
            pid=u32(4000, 4000),
            start_ticks=u64(1, 1),
            device=u32(0, 0),
            stage=u8(4, 9),
            whole=u8(1, 1),
            count=u64(5, 9),
            sum_ns=u64(100, 300),
            union_ns=u64(90, 250),
            span_ns=u64(0, 10**9),
        )
    )
    assert batch.stages.rows < MAX_STAGES


def _add_context(batch: telemetry_pb2.Batch) -> None:
    gpu = batch.gpus.add(index=0, uuid="GPU-1", bus_id="0000:3b:00.0", name="H")
    gpu.utilization_ratio, gpu.sm_clock_hertz = 0.5, 1e9
    gpu.throttle_reasons.append("sw_thermal")
    gpu.process_memory_bytes[4000] = 7
    process = batch.processes.add(
        pid=4000,
        pid_start_ticks=1,
        command="python",
        launches=11,
        graph_launches=2,
        syncs=3,
        sync_ns=99,
        steps=7,
        blind_steps=5,
        pod="p",
        namespace="n",
        container="c",
        owner="o",
        owner_kind="Job",
        slurm_job="1",
        slurm_step="0",
        unit="x.service",
        mig="MIG-1",
    )
    process.cpu_seconds, process.rss_bytes = 1.5, 99
    process.cuda.add(device=-1, stream=telemetry_pb2.STREAM_KIND_NAMED, launches=11)
    batch.health.events_lost["ring"] = 2
    batch.health.source_success["nvml"] = True
    batch.health.libraries_failed.append("/x/libnccl.so.2: not an ELF file")


@cache
def frames() -> list[bytes]:
    clock = telemetry_pb2.ClockSample(
        agent_sent_ns=1, collector_received_ns=2, collector_sent_ns=3, agent_received_ns=4
    )
    made = [telemetry_pb2.Frame(node="n1", sent_ns=1)]
    made += [telemetry_pb2.Frame(node="n1", sent_ns=9, clock=clock, batch=b) for b in batches()]
    return [one.SerializeToString() for one in made]


# -- Libraries -----------------------------------------------------------------------------------

_NCCL = """
const char banner[] = "NCCL version 2.28.9+cuda12.9";
struct comm { char before[0x1044d0]; int rank, ranks, device; };
int pncclCommUserRank(struct comm *c, int *out) { *out = c->rank; return 0; }
int pncclCommCount(struct comm *c, int *out) { *out = c->ranks; return 0; }
int pncclCommCuDevice(struct comm *c, int *out) { *out = c->device; return 0; }
int pncclAllReduce(void) { return 0; }
int ncclAllReduce(void) __attribute__((weak, alias("pncclAllReduce")));
"""
# The debugging information of a structure, and nothing else that tells where its members are.
_DWARF = """
struct ncclComm { unsigned long startMagic; char before[100]; unsigned long commHash; int rank,
  nRanks, cudaDev; long busId; unsigned long endMagic; };
struct ncclComm kept;
int pncclAllReduce(struct ncclComm *c) { return c->rank; }
"""


@cache
def libraries() -> list[bytes]:
    """Small ones: what a mutation hits should matter."""
    made = []
    for source, flags in ((_NCCL, ["-s"]), (_NCCL, []), (_DWARF, ["-g"])):
        made.append(_compiled(source, flags))
    rig = build_rig("stripped")
    return [*made, rig.cuda.read_bytes()]


def _compiled(source: str, flags: list[str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        text, target = Path(folder, "lib.c"), Path(folder, "lib.so")
        text.write_text(source)
        command = ["gcc", "-shared", "-fPIC", "-O1", "-nostdlib", "-Wl,--build-id", *flags]
        subprocess.run([*command, "-o", target, text], check=True, timeout=60)
        return target.read_bytes()


@cache
def plugins() -> list[bytes]:
    """The profiler plugin, with its USDT notes; stripped it is a quarter of the size."""
    library = build_plugin().library
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder, "plugin.so")
        subprocess.run(["strip", "-g", "-o", small, library], check=True, timeout=60)
        return [small.read_bytes()]


# -- What the kernel tells -------------------------------------------------------------------------


def cgroups() -> list[bytes]:
    systemd = f"kubepods-burstable-pod{POD.replace('-', '_')}.slice/cri-containerd-{CONTAINER}"
    lines = (
        f"0::/kubepods.slice/kubepods-burstable.slice/{systemd}.scope\n",
        f"12:memory:/kubepods/besteffort/pod{POD}/{CONTAINER}\n1:name=systemd:/x\n0::/\n",
        f"0::/../kubepods-pod{POD}.slice:cri-containerd:{CONTAINER}\n",
        "9:devices:/slurm/uid_1000/job_42/step_batch/task_0\n4:cpu,cpuacct:/\n",
        "0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_1\n",
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-1.scope\n",
        f"0::/system.slice/docker-{CONTAINER}.scope (deleted)\n",
    )
    return [line.encode() for line in lines]


def maps() -> list[bytes]:
    here = Path("/proc/self/maps").read_bytes()
    text = (
        "7f0000000000-7f0000100000 r-xp 00001000 fd:01 {} {}\n"
        "7f0000100000-7f0000200000 r--p 00101000 fd:01 {} {}\n"
    )
    named = (
        (11, "/usr/lib/libnccl.so.2"),
        (12, "/opt/venv/lib/python3.11/site-packages/torch/lib/libtorch_cuda.so"),
        (13, "/usr/lib/x86_64-linux-gnu/libcuda.so.560.35.03 (deleted)"),
        (14, "/opt/a b/libnccl-net.so"),
        (15, "/x/deep_ep/_C.cpython-311-x86_64-linux-gnu.so"),
        (16, "/x/libparcagpu.so"),
    )
    made = "".join(text.format(n, path, n, path) for n, path in named)
    return [made.encode(), made.encode() + here[:4096], here[:4096]]


def stats() -> list[bytes]:
    return [Path("/proc/self/stat").read_bytes(), Path("/proc/2/stat").read_bytes()]


# -- Answers of other programs -----------------------------------------------------------------


def pod_lists() -> list[bytes]:
    owner = [{"kind": "ReplicaSet", "name": "web-5d4f", "controller": True, "apiVersion": "a/v1"}]
    labels = {
        "pod-template-hash": "5d4f",
        "training.kubeflow.org/job-name": "j",
        "ray.io/originated-from-crd": "RayJob",
        "ray.io/originated-from-cr-name": "r",
    }
    pod = {
        "metadata": {
            "name": "web-5d4f-x",
            "namespace": "default",
            "uid": POD,
            "labels": labels,
            "annotations": {"kubernetes.io/config.hash": "ab" * 16},
            "ownerReferences": owner,
        },
        "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "i"}]},
        "status": {
            "containerStatuses": [{"name": "c", "containerID": f"containerd://{CONTAINER}"}],
            "initContainerStatuses": None,
        },
    }
    alone = {"metadata": {"name": "p", "uid": "u"}, "spec": {"nodeName": "n1"}}
    lists = [
        {"kind": "PodList", "apiVersion": "v1", "items": items}
        for items in ([pod, alone], [alone], None)
    ]
    return [json.dumps(one).encode() for one in lists]


def pod_resources() -> list[bytes]:
    answer = pod_resources_pb2.ListResponse()
    pod = answer.pods.add(name="web-1", namespace="default")
    container = pod.containers.add(name="c")
    container.devices.add(resource_name="nvidia.com/gpu", device_ids=["GPU-1::2", "MIG-3"])
    answer.pods.add(name="other", namespace="default").containers.add(name="d")
    return [answer.SerializeToString(), b""]


def ras_reports() -> list[bytes]:
    ranks = [
        {"rank": 0, "host": "10.0.0.1", "pid": 7},
        {"rank": 1, "host": "fe80::1%eth0", "pid": -1},
    ]
    one = {"hash": 0x1234_5678_9ABC_DEF0, "size": 2, "ranks": ranks}
    return [report([one]).encode(), report([one, one]).encode(), report([]).encode()]


def ras_talks() -> list[bytes]:
    start = b"SERVER PROTOCOL 2\nOK\nOK\n"
    return [start + ras_reports()[0], b"SERVER PROTOCOL 2\nOK\nERROR: Unknown command x\n"]


def engine_pages() -> list[bytes]:
    lines = []
    for name in ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"):
        lines.append(f"# TYPE {name} histogram")
        for le, count in (("0.1", 1), ("0.5", 5), ("+Inf", 9)):
            lines.append(f'{name}_bucket{{le="{le}",model_name="m"}} {count}.0')
        lines += [f'{name}_count{{model_name="m"}} 9.0', f'{name}_sum{{model_name="m"}} 2.5']
    for layer in (0, 1):
        for le, count in (("0", 4), ("1", 9), ("+Inf", 9)):
            lines.append(
                f'sglang:eplb_gpu_physical_count_bucket{{layer="{layer}",le="{le}"}} {count}.0'
            )
    lines += ["sglang:eplb_balancedness_sum 3.0", "sglang:eplb_balancedness_count 4.0"]
    return ["\n".join(lines).encode() + b"\n"]


def engine_logs() -> list[bytes]:
    return [
        b"INFO EPLB step: 7 for model m: avg_tokens=12.50, max_tokens=40, balancedness=0.3125, x\n",
        b"[Expert Balancedness] forward_pass_id=7 current_pass_balancedness=0.31 last=0.2\n",
    ]


# -- Expert load ---------------------------------------------------------------------------------


def _npy(values: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, np.asarray(values))
    return out.getvalue()


def arrays() -> list[bytes]:
    return [
        _npy(np.arange(12.0).reshape(3, 4)),
        _npy(np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3))),
        _npy(np.zeros((0, 4), np.float32)),
    ]


def archives() -> list[bytes]:
    out = io.BytesIO()
    np.savez(out, counts=np.arange(12.0).reshape(3, 4), tokens=np.ones(3))
    return [out.getvalue()]


def expert_bodies() -> list[bytes]:
    told = {
        "workload": "w",
        "engine": "vllm",
        "unit": "physical",
        "layers": [0, 3],
        "counts": [[1, 2, 3, 4], [4, 3, 2, 1.5]],
        "tokens": [5, 5],
        "rank_of_expert": [0, 0, 1, 1],
        "logical_of_physical": [[0, 1, 2, 0], [0, 1, 2, 2]],
        "source_rank": 1,
        "cumulative": True,
    }
    return [json.dumps(told).encode(), json.dumps({"counts": [[1, 2]]}).encode()]


def routed_bodies() -> list[bytes]:
    ids = np.array([[[0, 3], [1, -1]], [[2, 3], [2, 0]]], np.int32)
    text = base64.b64encode(_npy(ids)).decode()
    bodies = [
        {"routed_experts": text},
        {"model": "m", "choices": [{"routed_experts": text}, {"text": "x"}]},
    ]
    return [json.dumps(body).encode() for body in bodies]


def dumps() -> list[bytes]:
    return [path.read_bytes() for path in sorted(DUMPS.glob("*.pt"))]


# -- Files of our own --------------------------------------------------------------------------


def agent_configs() -> list[bytes]:
    more = (
        '[collector]\naddresses = ["a:1", "[::1]:2"]\n[spool]\npath = "/var/x"\n[experts]\n'
        'engines = [{address = "h:8000", kind = "vllm"}]\n[identity]\n'
        'roles = {"ep*" = "dispatch"}\n'
    )
    return [(ROOT / "agent/lanterne-agent.toml").read_bytes(), more.encode(), b"[node]\nname='a'\n"]


def collector_configs() -> list[bytes]:
    more = '[ingest]\naddress = "[::]:80"\n[advice]\nshared_expert_ranks = "w=1,v=2"\n'
    sample = ROOT / "collector/lanterne-collector.toml"
    return [sample.read_bytes(), more.encode(), b"[log]\nlevel='info'\n"]


def spools() -> list[bytes]:
    records = [segments.frame(segments.BATCH, 5, n, one) for n, one in enumerate(batches(), 1)]
    gone = segments.done([(5, 1), (5, 2), (6, 9)])
    return [b"".join([*records, gone]), gone, records[2]]


def recordings() -> list[bytes]:
    header = recording.Header("b", 10**18, 5, "0.1.0", {"window_seconds": 5.0})
    received = [recording.Received(n, recording.BATCH, one) for n, one in enumerate(frames())]
    block = recording.frames_block([recording.record(one) for one in received])
    return [recording.header_block(header) + block + block, recording.header_block(header)]


def states() -> list[bytes]:
    arrays_of = {"counts": np.arange(6.0).reshape(2, 3), "at": np.arange(2)}
    item = ({"workload": "w", "saved": time.time()}, arrays_of)
    return [state.pack([item, item]), state.pack([])]


def kernel_names() -> list[bytes]:
    return [
        b"_Z23ncclDevKernel_AllReduceP11ncclDevCommmP8ncclWork",
        b"_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalIN4cute5tupleIJiiiEEEEEEvNT_6ParamsE",
        b"_ZN7deep_ep8internode8dispatchEPvPfS1_PKvPK11topk_idx_tiiiP11CUstream_sti",
        b"_ZN7deep_ep9intranode7combineE14cudaDataType_tPvPfPKvPKfS6_S6_PKiS8_S8_PiiiiiPS1_iiP11CUstream_stii",
        b"void flash_fwd_kernel<Flash_fwd_traits<128, 64>, true>(Params)",
    ]
