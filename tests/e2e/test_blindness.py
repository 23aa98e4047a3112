"""The blindness gauge: which steps ran collectives that nobody saw, exactly; and plain CUDA
processes on the wire."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.build import build as build_plugin
from tests.rig.rig import Job, JobConfig, RigPaths, build
from tests.stack import Samples, Stack, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]

RANKS, STEPS, LAYERS = 3, 40, 2
BASE = {
    "ranks": RANKS, "ranks_per_node": RANKS, "tokens": 64, "hidden": 128, "layers": LAYERS,
    "attn_us": 2000, "expert_us": 500, "steps": STEPS,
}  # fmt: skip


@pytest.fixture
def paths(tmp_path: Path) -> RigPaths:
    return build(dest=tmp_path / "lib")


@pytest.fixture
def stack(tmp_path: Path, paths: RigPaths) -> Iterator[Stack]:
    env = {"LD_LIBRARY_PATH": str(paths.root)}
    with Stack(tmp_path, [f"{paths.root}/*"], env=env) as stack:
        yield stack.start()


def attached(stack: Stack, *kinds: str) -> bool:
    page = stack.agent_metrics()
    return all(
        page.total("lanterne_agent_libraries", kind=kind, state="attached") for kind in kinds
    )


def run(stack: Stack, paths: RigPaths, mode: str, env: dict[str, str] | None = None) -> None:
    """The whole job, every call of it with the probes in place."""
    config = JobConfig(**(BASE | {"mode": mode}))  # type: ignore[arg-type]
    with Job(
        config, paths=paths, env={"LANTERNE_WORKLOAD": mode} | (env or {}), hold="start"
    ) as job:
        wait_for(lambda: attached(stack, "nccl", "cuda"), 30, f"attached\n{stack.logs()}")
        job.release()
        job.wait_ready()
        assert job.wait(90) == [0] * RANKS


def counts(page: Samples, of: str) -> tuple[float, float, float]:
    names = ("steps_total", "blind_steps_total", "blind_graph_launches_total")
    steps, blind, launches = (page.total(f"lanterne_{of}_{name}") for name in names)
    return steps, blind, launches


def expect(stack: Stack, wanted: tuple[float, float, float]) -> None:
    def found() -> bool:
        agent, node = (
            counts(stack.agent_metrics(), "agent"),
            counts(stack.collector_metrics(), "node"),
        )
        seen.append((agent, node))
        return agent == node == wanted

    seen: list[Any] = []
    try:
        wait_for(found, 20, "the counts")
    except TimeoutError:
        pytest.fail(f"{seen[-1]} instead of {wanted}\n{stack.logs()}")


def test_every_replayed_step_is_blind(stack: Stack, paths: RigPaths) -> None:
    run(stack, paths, "graph")
    expect(stack, (RANKS * STEPS, RANKS * STEPS, RANKS * STEPS))
    messages = [m for m in stack.stragglers()["messages"] if m["kind"] == "graphs"]
    assert [m["text"].split(" ran ")[0] for m in messages] == [
        f"{RANKS * STEPS} of {RANKS * STEPS} steps"
    ]


def test_no_eager_step_is(stack: Stack, paths: RigPaths) -> None:
    """Every layer waits for its token counts, and every step for its end."""
    run(stack, paths, "eager")
    expect(stack, (RANKS * STEPS * (LAYERS + 1), 0, 0))
    assert not [m for m in stack.stragglers()["messages"] if m["kind"] == "graphs"]


def test_what_the_plugin_tells_is_not_blind(stack: Stack, paths: RigPaths) -> None:
    plugin = Path(shutil.copy(build_plugin().library, paths.root / "libnccl-profiler.so"))
    env = {"NCCL_PROFILER_PLUGIN": str(plugin), "LANTERNE_WORKLOAD": "told"}
    # The plugin's file is known to the agent from an earlier process.
    hold = f"import ctypes, sys; ctypes.CDLL({str(plugin)!r}); sys.stdin.read()"
    earlier = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE)
    try:
        wait_for(lambda: attached(stack, "profiler"), 30, f"plugin attached\n{stack.logs()}")
        run(stack, paths, "graph", env)
        expect(stack, (RANKS * STEPS, 0, 0))
    finally:
        earlier.communicate()
    assert stack.agent_metrics().total("lanterne_agent_device_operations_total") > 0


def test_a_process_that_only_uses_cuda_is_on_the_wire(stack: Stack, paths: RigPaths) -> None:
    with plain(paths) as driver:
        wait_for(lambda: attached(stack, "cuda"), 30, f"attached\n{stack.logs()}")
        driver.ask("launch", api="cuLaunchKernel", times=70)
        driver.ask("launch", api="cuLaunchKernel_ptsz", times=8)
        driver.ask("capture", nodes=3)
        driver.ask("replay", api="cuGraphLaunch", times=5)
        driver.ask("sync", api="cuCtxSynchronize", times=2)

        def told() -> dict[str, Any]:
            processes = {one["pid"]: one for one in stack.snapshot()["processes"]}
            found: dict[str, Any] = processes.get(driver.pid, {})
            return found if found.get("syncs") == 2 else {}

        process = wait_for(told, 20, f"the process is told\n{stack.logs()}")
        assert (process["launches"], process["graph_launches"]) == (70 + 8 + 3, 5)
        assert (process["steps"], process["blind_steps"]) == (0, 0)  # it holds no communicator
        named = [one for one in process["cuda"] if one["stream"] == "named"]
        assert [(one["launches"], one["graph_launches"]) for one in named] == [(81, 5)]
        assert counts(stack.agent_metrics(), "agent") == (0, 0, 0)


def plain(paths: RigPaths) -> Any:
    """A process with a context and a stream, and no communicator."""
    from tests.gpu.process import Asked

    return Asked("driver", [str(paths.root / "libcuda.so.1")], paths.root / "driver.log",
                 env={"LD_LIBRARY_PATH": str(paths.root)})  # fmt: skip
