"""What running programs are allowed to do, read from /proc, and what they leave on disk."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from lanterne.agent import privileges
from tests.proc import each
from tests.rig.rig import RigPaths, build
from tests.stack import Stack, wait_for

ROOT = Path(__file__).resolve().parents[2]
NONE = "0" * 16
kernel = pytest.mark.kernel


def mask(capabilities: tuple[int, ...]) -> str:
    return f"{sum(1 << capability for capability in capabilities):016x}"


def statuses(pid: int) -> Iterator[dict[str, str]]:
    """Of every thread of a process."""
    for _, text in each(Path(f"/proc/{pid}/task"), "status"):
        lines = (line.partition(":") for line in text.splitlines())
        yield {key: value.strip() for key, _, value in lines}


def children(pid: int) -> list[int]:
    listed = each(Path(f"/proc/{pid}/task"), "children")
    return [int(child) for _, text in listed for child in text.split()]


def assert_holds(pid: int, capabilities: tuple[int, ...]) -> None:
    """These, in every set that could give them back, in every thread, and none by exec."""
    found = list(statuses(pid))
    assert found
    for status in found:
        name = status["Name"]
        for kind in ("CapEff", "CapPrm", "CapBnd"):
            assert (name, kind, status[kind]) == (name, kind, mask(capabilities))
        for kind in ("CapInh", "CapAmb"):
            assert (name, kind, status[kind]) == (name, kind, NONE)
        assert status["NoNewPrivs"] == "1"


def assert_private(folder: Path) -> None:
    """Nothing below it may be read or written by others."""
    for path in folder.rglob("*"):
        mode = path.lstat().st_mode
        assert not stat.S_IMODE(mode) & 0o007, f"{path} {stat.filemode(mode)}"


@pytest.fixture
def paths(tmp_path: Path) -> RigPaths:
    return build(dest=tmp_path / "lib")


@kernel
@pytest.mark.parametrize("method", ["multi", "perf"])
def test_what_the_agent_holds(tmp_path: Path, paths: RigPaths, method: str) -> None:
    """After the probes are loaded, exactly the list that SECURITY.md gives."""
    kept = privileges.KEPT_FOR_PERF if method == "perf" else privileges.KEPT
    folder = tmp_path / "site"
    written = folder / "written"
    written.mkdir(parents=True)
    sections = {
        "probes": {"method": method},
        "experts": {"socket": str(written / "intake.sock")},
        "spool": {"path": str(written / "spool")},
    }
    with Stack(folder, [f"{paths.root}/*"], agent=sections) as stack:
        stack.start()
        assert stack.agent is not None
        wait_for(
            lambda: stack.agent_metrics().total("lanterne_agent_batches_acked_total") >= 2,
            30,
            "it reports",
        )
        assert_holds(stack.agent.pid, kept)
        assert children(stack.agent.pid) == []  # the loader has gone
        assert (written / "intake.sock").is_socket()
        assert any((written / "spool").iterdir())
        assert_private(written)


def test_an_agent_without_probes_holds_next_to_nothing(tmp_path: Path) -> None:
    with Stack(tmp_path, [], agent={"probes": {"enabled": False}, "experts": {"socket": ""}}) as s:
        s.start()
        assert s.agent is not None
        held = privileges.KEPT_WITHOUT_PROBES if os.geteuid() == 0 else ()
        assert_holds(s.agent.pid, held)


def test_the_collector_holds_nothing(tmp_path: Path) -> None:
    written = tmp_path / "written"
    written.mkdir()
    sections = {"record": {"path": str(written / "all.rec")}, "state": {"path": str(written)}}
    with Stack(tmp_path, [], collector=sections, agent={"probes": {"enabled": False}}) as stack:
        stack.start()
        wait_for(
            lambda: stack.collector_metrics().total("lanterne_collector_recorded_frames_total"),
            30,
            "it records",
        )
        assert stack.collector is not None
        own = [stack.collector.pid, *children(stack.collector.pid)]
        assert len(own) == 2  # the analysis and its ingest process
        for pid in own:
            assert_holds(pid, ())
        stack.stop()
    assert (written / "all.rec").exists()
    assert_private(written)


def calls(tree: ast.AST) -> Iterator[tuple[int, str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func), node


@pytest.mark.parametrize("package", ["agent", "collector", "probes"])
def test_no_shell_and_nothing_that_runs_what_it_reads(package: str) -> None:
    forbidden = {
        "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "eval",
        "exec", "pickle.load", "pickle.loads", "yaml.load", "yaml.unsafe_load", "os.chmod",
    }  # fmt: skip
    found: list[str] = []
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        for line, name, call in calls(ast.parse(path.read_text())):
            shell = any(
                k.arg == "shell" and not (isinstance(k.value, ast.Constant) and not k.value.value)
                for k in call.keywords
            )
            if name in forbidden or shell:
                found.append(f"{path}:{line}: {name}")
            starts = name in ("subprocess.Popen", "subprocess.run")
            if starts and not isinstance(call.args[0], (ast.List, ast.Name)):
                found.append(f"{path}:{line}: {name} of no list")
    assert found == []
