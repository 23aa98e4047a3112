"""The rig is what it claims to be: real data, the real ABI, exact counts, faults with their effect.

Nothing here needs root or BPF. Effects of faults are told by counts and orders, not wall times.
"""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rig.known import seen_by_probes
from tests.rig.rig import (
    Job,
    JobConfig,
    RigPaths,
    build,
    dispatch_rows,
    expected_bytes,
    expected_calls,
    known_calls,
)

MASK = (1 << 64) - 1
HASH_OF_VECTOR = {22809: 0x3002DCD1BBE6653D, 22105: 0x65BB3B0CBA527185}
# commHash, rank, nRanks, cudaDev, nvmlDev, busId, node, nNodes, localRank, localRanks, size
OFFSETS = {
    "normal": (1066184, 1066192, 1066224, 1066372, 1082968),
    "old": (13528, 13536, 13568, 13708, 16288),
}
SHORT = {"RIG_NCCL_TIMEOUT_MS": "20000"}


@pytest.fixture(scope="session")
def normal() -> RigPaths:
    return build()


def run_module(name: str, *arguments: str, **env: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.rig.{name}", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
        cwd=Path(__file__).parents[2], env=dict(os.environ) | env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# -- data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective_moves_the_right_data(
    normal: RigPaths, tmp_path: Path, ranks: int
) -> None:
    env = dict(os.environ) | SHORT | {"RIG_SHM_PREFIX": f"rig-data-{os.getpid()}-{ranks}"}
    command = [sys.executable, "-m", "tests.rig.peer", str(normal.root), str(ranks)]
    peers = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], env=env, stdout=subprocess.PIPE,
                         text=True, cwd=Path(__file__).parents[2])
        for rank in range(ranks)
    ]  # fmt: skip
    for peer in peers:
        text, _ = peer.communicate(timeout=60)
        results = json.loads(text)
        assert len(results) == 16
        assert set(results.values()) == {True}, results
    assert not list(Path("/dev/shm").glob(f"rig-data-{os.getpid()}-{ranks}*"))


# -- ABI -----------------------------------------------------------------------------------------


def dynamic_symbols(path: Path) -> dict[str, tuple[int, str]]:
    rows = (line.split() for line in tool("nm", "-D", "--defined-only", str(path)).splitlines())
    return {name: (int(address, 16), kind) for address, kind, name in rows}


@pytest.mark.parametrize(("variant", "public"), [("normal", 42), ("stripped", 42), ("old", 31)])
def test_exports_are_alias_pairs(variant: str, public: int) -> None:
    symbols = dynamic_symbols(build(variant).nccl)
    weak = {name for name, (_, kind) in symbols.items() if kind == "W"}
    assert len(weak) == public
    for name in weak:
        assert symbols[f"p{name}"] == (symbols[name][0], "T")
    assert ("ncclAlltoAll" in weak) == (variant != "old")


def test_internal_function_is_local_and_gone_when_stripped() -> None:
    def symtab(variant: str) -> str:
        return tool("readelf", "-sW", str(build(variant).nccl))

    line = next(x for x in symtab("normal").splitlines() if "_Z16ncclEnqueueCheck" in x)
    assert "LOCAL" in line
    assert "FUNC" in line
    assert "_Z20ncclGroupEndInternalP18ncclSimInfo_v22200" in symtab("normal")
    assert "_Z16ncclEnqueueCheck" not in symtab("stripped")


def test_entries_begin_with_a_push(normal: RigPaths) -> None:
    code = tool("objdump", "-d", "--no-show-raw-insn", str(normal.nccl)).splitlines()
    entries = {
        line.split("<")[1].rstrip(">:"): code[number + 1]
        for number, line in enumerate(code)
        if line.endswith(">:") and ("<pnccl" in line or "<_Z16ncclEnqueueCheck" in line)
    }
    assert len(entries) == 43
    assert all("push" in first for first in entries.values()), entries


@pytest.mark.parametrize("variant", ["normal", "stripped", "old"])
def test_getters_show_their_offsets(variant: str) -> None:
    """Exactly one far 32-bit load in each, as tools that have no DWARF expect."""
    rank = OFFSETS["old" if variant == "old" else "normal"][1]
    for name, offset in {"UserRank": rank, "Count": rank + 4, "CuDevice": rank + 8}.items():
        code = tool("objdump", "-d", "--no-show-raw-insn",
                    f"--disassemble=pncclComm{name}", str(build(variant).nccl))  # fmt: skip
        far = [
            line.split()[-1]
            for line in code.splitlines()
            if (load := re.search(r"mov +0x([0-9a-f]+)\(", line)) and int(load[1], 16) > 0xFFF
        ]
        assert len(far) == 1
        assert far[0].startswith(f"{offset:#x}(")
        assert ",%e" in far[0]


def test_no_link_to_the_driver_and_the_usual_sonames(normal: RigPaths) -> None:
    for path in (normal.nccl, normal.cuda, normal.cudart, normal.nvml):
        dynamic = tool("readelf", "-d", str(path))
        assert f"soname: [{path.name}]" in dynamic
        assert "libcuda" not in "".join(x for x in dynamic.splitlines() if "NEEDED" in x)
    assert "cudaLaunchKernel@@libcudart.so.12" in tool("nm", "-D", str(normal.cudart))


def test_variants_and_copies(tmp_path: Path) -> None:
    def build_id(paths: RigPaths) -> str:
        notes = tool("readelf", "-n", str(paths.nccl))
        return next(x.split()[-1] for x in notes.splitlines() if "Build ID" in x)

    made = {variant: build(variant) for variant in ("normal", "stripped", "old")}
    assert len({build_id(paths) for paths in made.values()}) == 3
    copy = build("normal", tmp_path / "own")
    assert build_id(copy) == build_id(made["normal"])
    assert copy.nccl.stat().st_ino != made["normal"].nccl.stat().st_ino


def hash_new(*parts: bytes) -> int:
    a, b = 1, 1
    for part in parts:
        a ^= len(part)
        for at in range(0, len(part), 8):
            a = (a + b) & MASK
            b ^= a
            a = ((a ^ (a >> 31)) * 0x9DE62BBC8CEF3CE3) & MASK
            b = ((b ^ (b >> 32)) * 0x485CD6311B599E79) & MASK
            a = (a + int.from_bytes(part[at : at + 8], "little")) & MASK
    h = ((a ^ (a >> 31)) * 0xBAC3BD562846DE6B) & MASK
    h = (h + b) & MASK
    return ((h ^ (h >> 32)) * 0x995A187A14E7B445) & MASK


@pytest.mark.parametrize("variant", ["normal", "old"])
def test_alone(variant: str) -> None:
    """Hash vector, error codes, non-blocking init, driver lookup and the runtime's forwarding."""
    found = run_module("solo", str(build(variant).root))
    assert found["hash"] == HASH_OF_VECTOR[found["version"]]
    assert found["non_blocking"] == [7, 0, 0]
    assert all(found["addresses"].values())
    assert found["cudart"] == {"codes": [0, 0, 0], "returned first": True}
    assert found["copy"] is True
    codes = found["errors"]
    assert codes.pop("group end") == 5
    assert codes.pop("group start") == 0
    assert codes.pop("after") == 0
    assert set(codes.values()) == {4}, codes


@pytest.mark.parametrize("variant", ["normal", "old"])
def test_communicators_in_memory(variant: str) -> None:
    """Every rank's communicators, read from outside as an agent does."""
    hash_at, rank_at, bus_at, node_at, size = OFFSETS[variant]
    config = JobConfig(ranks=4, ranks_per_node=2, dp_groups=2, pipeline=True, steps=1)
    with Job(config, paths=build(variant), hold="init", env=SHORT) as job:
        job.wait_ready()
        for rank, truth in enumerate(job.truths()):
            assert [x["name"] for x in truth["comms"]] == ["world", "dp", "pipeline"]
            with Path(f"/proc/{truth['pid']}/mem").open("rb", buffering=0) as memory:
                for comm in truth["comms"]:
                    memory.seek(int(comm["pointer"], 16))
                    raw = memory.read(size)
                    assert struct.unpack_from("<Q", raw, 0) == (0x0280028002800280,)
                    assert struct.unpack_from("<Q", raw, size - 8) == (0x0280028002800280,)
                    got = struct.unpack_from("<Q4i", raw, hash_at)
                    local = rank % 2
                    assert got == (
                        int(comm["hash"], 16),
                        comm["rank"],
                        comm["nranks"],
                        local,
                        local,
                    )
                    assert struct.unpack_from("<q", raw, bus_at) == ((0x0A + 3 * local) << 12,)
            world = struct.unpack_from("<4i", _world(truth, size), node_at)
            assert world == (rank // 2, 2, rank % 2, 2)
            assert rank_at == hash_at + 8
        if variant == "normal":
            _check_child_hashes(job)
        job.release()
        assert job.wait() == [0] * 4


def _world(truth: dict[str, Any], size: int) -> bytes:
    with Path(f"/proc/{truth['pid']}/mem").open("rb", buffering=0) as memory:
        memory.seek(int(truth["comms"][0]["pointer"], 16))
        return memory.read(size)


def _check_child_hashes(job: Job) -> None:
    world = hash_new((job.folder / "uid").read_bytes())
    parent = world.to_bytes(8, "little")
    for rank, truth in enumerate(job.truths()):
        wanted = [world] + [
            hash_new(parent, count.to_bytes(4, "little"), color.to_bytes(4, "little"))
            for count, color in ((1, rank % 2), (2, rank // 2))
        ]
        assert [int(x["hash"], 16) for x in truth["comms"]] == wanted


# -- exact counts --------------------------------------------------------------------------------


def test_known_calls() -> None:
    one, two = known_calls(ranks=1), known_calls(ranks=2, repeat=2)
    assert one["ncclAllReduce"] == 8  # 6 a round and rank, split and the one in init-all included
    assert two["ncclAllReduce"] == 2 * 2 * 7 + 2
    assert two["ncclGroupStart"] - two["ncclGroupEnd"] == two["ncclGroupSimulateEnd"] == 4
    assert seen_by_probes(two)["ncclBroadcast"] == two["ncclBroadcast"] + two["ncclBcast"] == 8


CONFIGS = {
    "eager": JobConfig(ranks=4, steps=6, layers=2, zipf=1.2, topk=4, experts=16, seed=5),
    "hot": JobConfig(ranks=4, steps=6, experts=16, topk=4, faults=("hot-expert:5:30@3",)),
    "capped": JobConfig(ranks=2, steps=4, topk=2, experts=4, faults=("hot-expert:1:1000",)),
    "graph": JobConfig(ranks=4, steps=6, mode="graph", dp_groups=2, pipeline=True),
    "equal": JobConfig(ranks=3, steps=5, mode="run-ahead", equal_split=True, pipeline=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_job_does_exactly_what_was_computed(name: str) -> None:
    config = CONFIGS[name]
    with Job(config, env=SHORT) as job:
        assert job.wait() == [0] * config.ranks
        truths = job.truths()
    for phase in ("dispatch", "combine"):
        wanted = expected_bytes(config, config.steps, phase)
        assert np.array_equal([x[f"{phase}_bytes_sent"] for x in truths], wanted)
        assert np.array_equal([x[f"{phase}_bytes_received"] for x in truths], wanted.T)
    for rank, truth in enumerate(truths):
        assert truth["state"] == "done"
        assert truth["steps"] == config.steps
        assert truth["data_errors"] == 0
        calls = expected_calls(config, config.steps, rank)
        assert {key: truth["calls"][key] for key in calls} == calls
        world = truth["comms"][0]
        assert world["collectives"] == config.steps
        assert world["p2p_groups"] == 2 * config.layers * config.steps
        assert truth["waits"]["dispatch"]["count"] == config.layers * config.steps


def test_old_and_stripped_libraries_run_the_same_job() -> None:
    for variant in ("stripped", "old"):
        with Job(JobConfig(ranks=2, steps=3), paths=build(variant), env=SHORT) as job:
            assert job.wait() == [0, 0]


# -- faults --------------------------------------------------------------------------------------


def finished(config: JobConfig) -> list[dict[str, Any]]:
    with Job(config, env=SHORT) as job:
        assert job.wait() == [0] * config.ranks
        return job.truths()


def waits(truths: list[dict[str, Any]], phase: str = "dispatch") -> np.ndarray[Any, Any]:
    return np.array([x["waits"][phase]["sum_ns"] for x in truths])


def arrivals(truths: list[dict[str, Any]], phase: str) -> np.ndarray[Any, Any]:
    """Begin times [instance, rank], in order of step and layer."""
    rows = [
        [row[4] for row in sorted(x["arrivals"]) if row[2] == phase] for x in truths
    ]  # row: step, layer, phase, host, begin, end
    return np.array(rows).T


def test_slow_rank_comes_last_and_waits_least() -> None:
    truths = finished(JobConfig(ranks=4, steps=10, attn_us=1500, faults=("slow-rank:2:6@5",)))
    assert waits(truths).argmin() == 2
    late = arrivals(truths, "dispatch").argmax(axis=1)
    assert (late[10:] == 2).mean() >= 0.8
    assert (late[:10] == 2).mean() < (late[10:] == 2).mean()


def test_intermittent_rank_is_late_in_every_other_block() -> None:
    truths = finished(
        JobConfig(ranks=3, steps=16, layers=1, attn_us=1500, faults=("intermittent:1:6:4",))
    )
    late = arrivals(truths, "dispatch").argmax(axis=1)
    slow = np.arange(16) // 4 % 2 == 1
    assert (late[slow] == 1).mean() >= 0.75
    assert (late[~slow] == 1).mean() < (late[slow] == 1).mean()


def test_slow_host_enqueues_late() -> None:
    truths = finished(JobConfig(ranks=3, steps=8, layers=1, faults=("slow-host:0:8",)))
    assert (arrivals(truths, "dispatch").argmax(axis=1) == 0).mean() >= 0.75
    assert waits(truths).argmin() == 0


def test_slow_sender_makes_the_others_wait() -> None:
    truths = finished(JobConfig(ranks=4, steps=8, faults=("slow-sender:1:8",)))
    assert waits(truths).argmin() == 1
    assert (np.delete(waits(truths), 1) > 8 * 2 * 6_000_000).all()


def spans(truth: dict[str, Any], phase: str) -> np.ndarray[Any, Any]:
    """How long each operation lasted on this rank's device."""
    return np.array([row[5] - row[4] for row in truth["arrivals"] if row[2] == phase])


def test_slow_receiver_takes_long_each_time_and_comes_late_to_the_next() -> None:
    truths = finished(JobConfig(ranks=4, steps=8, faults=("slow-receiver:3:8",)))
    for phase in ("dispatch", "combine"):
        assert spans(truths[3], phase).min() >= 8_000_000
    assert (arrivals(truths, "combine").argmax(axis=1) == 3).mean() >= 0.8


def test_slow_path_delays_only_its_receiver() -> None:
    truths = finished(JobConfig(ranks=4, steps=8, faults=("slow-path:0:3:8@2",)))
    assert spans(truths[3], "dispatch")[4:].min() >= 8_000_000
    assert (arrivals(truths, "combine").argmax(axis=1)[4:] == 3).mean() >= 0.8
    assert spans(truths[0], "dispatch")[:4].min() < 8_000_000


def test_hot_expert_gives_its_rank_the_most_tokens() -> None:
    config = JobConfig(ranks=4, steps=4, zipf=0.1, faults=("hot-expert:5:8",))
    tokens = np.array([x["phases"]["tokens_received"] for x in finished(config)])
    assert tokens.argmax() == 5 // 2
    wanted = sum(
        dispatch_rows(config, s, layer).sum(axis=0) for s in range(4) for layer in range(2)
    )
    assert np.array_equal(tokens, wanted)


def leftovers(job: Job) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{job.shm_prefix}*"))


@pytest.fixture
def waiting() -> Iterator[Job]:
    """Three ranks of which two wait for the one that hangs at step 3."""
    with Job(JobConfig(ranks=3, faults=("hang:1:3",), grace=0.3), env=SHORT) as job:
        end = time.monotonic() + 20
        while not (job.truth_file(1).exists() and job.truth(1)["state"] == "hung"):
            assert time.monotonic() < end
            time.sleep(0.02)
        yield job


def test_hang_costs_no_cpu_and_ends_on_request(waiting: Job) -> None:
    time.sleep(0.2)
    before = np.array(waiting.cpu_seconds())
    time.sleep(1.0)
    used = np.array(waiting.cpu_seconds()) - before
    assert len(used) == 3
    assert (used <= 0.05).all(), used
    assert waiting.stop() == [4, 4, 4]
    assert {x["state"] for x in waiting.truths()} == {"stuck"}
    waiting.close()
    assert not leftovers(waiting)


def test_crash_is_noticed_by_the_others() -> None:
    with Job(JobConfig(ranks=3, faults=("crash:1:3",)), env=SHORT) as job:
        assert job.wait(20) == [6, -signal.SIGKILL, 6]
        assert job.truth(0)["error"] == 6
        assert job.truth(0)["steps"] == 3
    assert not leftovers(job)


def test_killed_before_meeting_leaves_nothing() -> None:
    with Job(JobConfig(ranks=2, grace=0.3), hold="start", env=SHORT) as job:
        time.sleep(0.1)
        job.kill(1)
        job.release()
        time.sleep(0.3)
    assert not leftovers(job)
    assert all(process.poll() is not None for process in job.processes)


def test_sigterm_ends_all_ranks_at_one_step() -> None:
    with Job(JobConfig(ranks=4, truth_every=0.1), env=SHORT) as job:
        job.wait_ready()
        time.sleep(0.4)
        assert job.truth(0)["steps"] > 0  # written while it runs
        assert job.stop() == [0] * 4
        assert len({x["steps"] for x in job.truths()}) == 1
        assert {x["state"] for x in job.truths()} == {"stopped"}


# -- profiler plugin -----------------------------------------------------------------------------

PLUGIN = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
struct event { char text[64]; uint64_t begin; };
static int rank_;
static FILE *out;
static int init(void **ctx, uint64_t id, int *mask, const char *name, int nodes, int n, int rank,
                void *log) {
  char path[512];
  (void)name, (void)log, (void)ctx;
  snprintf(path, sizeof(path), "%s-%d", getenv("PLUGIN_OUT"), rank);
  out = fopen(path, "w");
  rank_ = rank;
  *mask = 2 | 4 | 64;
  fprintf(out, "init %016llx %d %d\n", (unsigned long long)id, nodes, n);
  return out == NULL;
}
static int start(void *ctx, void **handle, const char *d) {
  struct event *e = calloc(1, sizeof(*e));
  (void)ctx;
  uint64_t type = *(const uint64_t *)d;
  if (type == 64) {
    struct event *parent = *(struct event *const *)(d + 8);
    e->begin = *(const uint64_t *)(d + 32);
    snprintf(e->text, sizeof(e->text), "kernel %s", parent->text);
  } else {
    const char *func = *(const char *const *)(d + (type == 2 ? 32 : 24));
    snprintf(e->text, sizeof(e->text), "%s", func);
    fprintf(out, "%s\n", func);
  }
  *handle = e;
  return 0;
}
static int stop(void *handle) { (void)handle; return 0; }
static int state(void *handle, int what, uint64_t *args) {
  struct event *e = handle;
  fprintf(out, "%s %d %d\n", e->text, what, args[0] > e->begin);
  return 0;
}
static int finalize(void *ctx) { (void)ctx; return fclose(out); }
__attribute__((visibility("default"))) struct {
  const char *name; void *calls[5];
} ncclProfiler_v5 = {"test", {init, start, stop, state, finalize}};
"""


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_profiler_plugin_sees_every_operation(tmp_path: Path, mode: str) -> None:
    (tmp_path / "plugin.c").write_text(PLUGIN)
    library = str(tmp_path / "libtest.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", library, str(tmp_path / "plugin.c")],
                   check=True)  # fmt: skip
    config = JobConfig(ranks=2, steps=3, layers=1, mode=mode)
    env = SHORT | {"NCCL_PROFILER_PLUGIN": library, "PLUGIN_OUT": f"{tmp_path}/out"}
    with Job(config, env=env) as job:
        assert job.wait() == [0, 0]
        world = job.truth(0)["comms"][0]["hash"][2:]
    for rank in range(2):
        lines = (tmp_path / f"out-{rank}").read_text().splitlines()
        assert lines[0] == f"init {world} 1 2"
        assert lines.count("AllReduce") == lines.count("kernel AllReduce 22 1") == 3
        sends = 2 * 2 * 3  # both peers, dispatch and combine, three steps
        assert lines.count("Send") == lines.count("kernel Send 22 1") == sends
        assert lines.count("Recv") == lines.count("kernel Recv 22 1") == sends


# -- NVML ----------------------------------------------------------------------------------------

NVML_SCRIPT = """
import json, sys, time
from pathlib import Path
import pynvml as n
state = Path(sys.argv[1])
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(3)
def code(call, *args):
    try:
        call(*args)
    except n.NVMLError as error:
        return error.value
    return 0
out = {
    "count": n.nvmlDeviceGetCount(), "driver": n.nvmlSystemGetDriverVersion(),
    "name": n.nvmlDeviceGetName(h), "uuid": n.nvmlDeviceGetUUID(h),
    "bus": n.nvmlDeviceGetPciInfo(h).busId, "util": n.nvmlDeviceGetUtilizationRates(h).gpu,
    "temperature": n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
    "clocks": [n.nvmlDeviceGetClockInfo(h, 1), n.nvmlDeviceGetMaxClockInfo(h, 1)],
    "throttle": [n.nvmlDeviceGetCurrentClocksThrottleReasons(h),
                 n.nvmlDeviceGetCurrentClocksEventReasons(h)],
    "processes": [[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(h)],
    "samples": [[p.pid, p.smUtil] for p in n.nvmlDeviceGetProcessUtilization(h, 0)],
    "none": n.nvmlDeviceGetComputeRunningProcesses(n.nvmlDeviceGetHandleByIndex(0)),
    "mig": n.nvmlDeviceGetMigMode(h), "persistence": n.nvmlDeviceGetPersistenceMode(h),
    "memory": [n.nvmlDeviceGetMemoryInfo(h).used,
               n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2).used],
    "power": code(n.nvmlDeviceGetPowerUsage, h), "lost": code(n.nvmlDeviceGetHandleByIndex, 1),
    "absent": code(n.nvmlDeviceGetHandleByIndex, 9),
    "unknown bus": code(n.nvmlDeviceGetHandleByPciBusId, "0000:ff:00.0"),
    "same": n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId("0000:13:00.0")),
    "grows": n.nvmlDeviceGetTotalEnergyConsumption(h) > 0,
}
state.write_text("count=2\\ngpu0.temperature=20\n")
out["changed"] = [n.nvmlDeviceGetCount(),
                  n.nvmlDeviceGetTemperature(n.nvmlDeviceGetHandleByIndex(0), 0)]
n.nvmlShutdown()
out["closed"] = code(n.nvmlDeviceGetCount)
print(json.dumps(out))
"""


def test_nvml_through_pynvml(normal: RigPaths, tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    state = tmp_path / "nvml"
    state.write_text(
        "# a hot GPU\ncount=4\ngpu3.temperature=91\ngpu3.sm_clock_mhz=900\ngpu3.throttle=0x40\n"
        "gpu3.pid=1234:2147483648,77:5\ngpu*.utilization=88\ngpu3.memory_used=7\n"
        "fail.nvmlDeviceGetPowerUsage=3\ngpu1.lost=1\n"
    )
    env = dict(os.environ) | normal.env() | {"RIG_NVML_STATE": str(state)}
    done = subprocess.run([sys.executable, "-c", NVML_SCRIPT, str(state)], env=env, check=False,
                          capture_output=True, text=True, timeout=30)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "count": 4, "driver": "570.00.rig", "name": "Rig GPU",
        "uuid": "GPU-11a70000-0000-4000-8000-000000000004", "bus": "00000000:13:00.0", "util": 88,
        "temperature": 91, "clocks": [900, 1980], "throttle": [64, 64],
        "processes": [[1234, 2147483648], [77, 5]], "samples": [[1234, 88], [77, 88]], "none": [],
        "mig": [0, 0], "persistence": 1, "memory": [7, 7], "power": 3, "lost": 15, "absent": 2,
        "unknown bus": 6, "same": 3, "grows": True, "changed": [2, 20], "closed": 1,
    }  # fmt: skip
