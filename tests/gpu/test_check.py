"""The GPU check on the CPU stand-ins, from a bundle that brings Lanterne: all but the GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import bundle, runtime
from tests.gpu.check_nccl import EXPECTED, printed_hashes
from tests.gpu.host import bus_id
from tests.gpu.result import Report, failed, passed, skipped
from tests.rig.build import build

REAL = bundle.ROOT / "build" / "gpu-bundle"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with Lanterne and the plugin, and no Python."""
    out = tmp_path_factory.mktemp("bundle") / "bundle"
    bundle.make(out, rig=True)
    return out


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(dest=tmp_path_factory.mktemp("rig")).root


def check(folder: Path, rig: Path, out: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    """The check as the host would run it, from the bundle's own copy."""
    command = [str(folder / "tests" / "gpu" / "check"), str(out), "--rig", str(rig), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert out.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(out.read_text()), done.stdout


@pytest.mark.kernel
@pytest.mark.timeout(300)
def test_everything_on_the_rig(small: Path, rig: Path, tmp_path: Path) -> None:
    before = leftovers()
    code, report, text = check(small, rig, tmp_path / "out.json", "--python", sys.executable)
    checks = {one["name"]: one for one in report["checks"]}
    states = {name: one["status"] for name, one in checks.items()}
    assert states == {
        "doctor": "passed", "addresses": "passed", "cuda_counts": "passed",
        "torch_counts": "skipped", "nccl_early": "passed", "nccl_late": "passed",
        "nccl_plugin": "passed", "device_times": states["device_times"], "nvml": "passed",
        "launch_cost": "passed",
    }, json.dumps(checks, indent=1)  # fmt: skip
    assert states["device_times"] in ("passed", "skipped")
    assert code == 0
    assert report["passed"] is True
    assert all(name in text for name in states)
    counts = checks["cuda_counts"]["numbers"]
    assert len(counts["phases"]) == 10
    assert counts["absent"] == []
    for name in ("nccl_early", "nccl_late", "nccl_plugin"):
        assert checks[name]["numbers"]["first"] == EXPECTED
    assert checks["nccl_plugin"]["numbers"]["plugin_mapped"] is True
    assert checks["launch_cost"]["numbers"]["ns_added"] > 0
    assert leftovers() == before


def leftovers() -> set[str]:
    """Command lines of processes that run something of the check."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "lanterne-gpu-" in line:
            found.add(line)
    return found


@pytest.mark.kernel
@pytest.mark.timeout(300)
def test_what_fails_is_told(small: Path, rig: Path, tmp_path: Path) -> None:
    """A Python that has not what the agent needs: failed by name, and the exit status says so."""
    other = tmp_path / "python"
    other.write_text(
        "#!/bin/sh\n# The receiver runs, the agent does not.\n"
        f'case "$2" in lanterne.agent.main) echo no agent >&2; exit 3;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    other.chmod(0o755)
    code, report, _ = check(small, rig, tmp_path / "out.json", "--python", str(other),
                            "--only", "nvml")  # fmt: skip
    assert code == 1
    assert report["passed"] is False
    (one,) = report["checks"]
    assert one["status"] == "failed"
    assert "no agent" in one["detail"]


@pytest.mark.kernel
def test_a_python_that_lacks_everything_is_told(small: Path, rig: Path, tmp_path: Path) -> None:
    code, report, _ = check(small, rig, tmp_path / "out.json", "--python", "/bin/false")
    assert code == 1
    assert [(one["name"], one["status"]) for one in report["checks"]] == [("setup", "failed")]


def test_report(tmp_path: Path) -> None:
    lines: list[str] = []
    report = Report(lines.append)
    report.run("good", lambda: passed("fine", n=1))
    report.run("absent", lambda: skipped("no GPU"))
    assert report.passed
    report.run("bad", lambda: failed("seven instead of eight"))
    report.run("broken", lambda: passed(str(1 / 0)))
    report.write(tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert not written["passed"]
    assert [one["status"] for one in written["checks"]] == ["passed", "skipped", "failed", "failed"]
    assert "ZeroDivisionError" in written["checks"][3]["detail"]
    assert [line.split()[0] for line in lines] == ["passed", "skipped", "failed", "failed"]


def test_nothing_run_is_not_passed() -> None:
    report = Report(lambda _: None)
    report.run("absent", lambda: skipped("no GPU"))
    assert not report.passed


def test_hashes_from_the_log_of_nccl() -> None:
    text = (
        "h:9:9 [0] NCCL INFO ncclCommInitRank comm 0x55d0f00 rank 0 nranks 1 cudaDev 0 nvmlDev 0 "
        "busId 1b000 commId 0x8a1c2d - Init START\n"
        "h:9:9 [0] NCCL INFO ncclCommSplit comm 0x55d1f00 rank 0 nranks 1 cudaDev 0 nvmlDev 0 "
        "busId 1b000 parent 0x55d0f00 splitCount 1 color 0 key 0 commId 0x77 - Init COMPLETE\n"
        "h:9:9 [0] NCCL INFO Channel 00/32 : 0\n"
    )
    assert printed_hashes(text) == {0x55D0F00: 0x8A1C2D, 0x55D1F00: 0x77}


def test_bus_id() -> None:
    assert bus_id("00000000:1B:00.0") == bus_id("0000:1b:00.0") == "0000:1b:00.0"
    assert bus_id("") == ""


def test_bundle_unpacks_into_its_prefix(small: Path, tmp_path: Path) -> None:
    made = runtime.unpack(small, tmp_path / "prefix", python=sys.executable)
    code = "import lanterne.agent, lanterne.probes as p; print(p.__file__)"
    done = subprocess.run([made.python, "-c", code], env=dict(made.env), capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert done.stdout.startswith(str(tmp_path / "prefix" / runtime.SITE))
    assert made.plugin is not None
    with pytest.raises(ValueError, match="no Python of its own"):
        runtime.unpack(small, tmp_path / "other")


def test_other_folders_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(SystemExit, match="not a bundle"):
        bundle.make(tmp_path, rig=True)


def test_size_and_python_of_the_real_bundle(tmp_path: Path) -> None:
    """Needs `make gpu-bundle` first: some 90 MB of downloads."""
    if not (REAL / runtime.MANIFEST).exists():
        pytest.skip("no build/gpu-bundle: make gpu-bundle")
    size = sum(path.stat().st_size for path in REAL.rglob("*") if path.is_file())
    assert size < bundle.MAX_BYTES
    made = runtime.unpack(REAL, tmp_path / "prefix")
    assert bundle.check_imports(Path(made.python)).strip() == str(tmp_path / "prefix" / "usr")
