"""The systemd units: valid, as closed as can be, and true to what the programs need."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from lanterne.agent import privileges
from lanterne.agent.config import AgentConfig
from lanterne.collector.config import CollectorConfig
from lanterne.service import systemd

ROOT = Path(__file__).resolve().parents[2]
UNITS = {side: ROOT / side / f"lanterne-{side}.service" for side in ("agent", "collector")}
# systemd-analyze's scale: 0 is closed, 10 is open. The agent cannot do without BPF and ptrace.
EXPOSURE = {"agent": 3.3, "collector": 1.3}

analyse = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(analyse is None, reason="systemd-analyze is not installed")


@cache
def unit(side: str) -> dict[str, list[str]]:
    """Key -> values of [Service], in order."""
    found: dict[str, list[str]] = {}
    for line in UNITS[side].read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    assert analyse is not None
    return subprocess.run(
        [analyse, *command], capture_output=True, text=True, timeout=60, check=False, cwd=cwd
    )


@needs_systemd
@pytest.mark.parametrize("side", UNITS)
def test_systemd_understands_it(side: str, tmp_path: Path) -> None:
    """Every key and value; without the program and the manual, which are not installed here."""
    text = re.sub(r"/usr/bin/lanterne-\w+", "/bin/true", UNITS[side].read_text())
    text = re.sub(r"(?m)^Documentation=.*\n", "", text)
    made = tmp_path / UNITS[side].name
    made.write_text(text)
    done = run("verify", made)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    made.write_text(text.replace("ProtectClock=yes", "ProtectClocks=yes"))
    assert "ProtectClocks" in run("verify", made).stderr  # it would have told


@needs_systemd
@pytest.mark.parametrize("side", UNITS)
def test_it_is_as_closed_as_can_be(side: str) -> None:
    done = run("security", "--offline=yes", "--no-pager", UNITS[side])
    level = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert level is not None, done.stderr
    assert float(level[1]) <= EXPOSURE[side], done.stdout


def test_the_agent_gets_the_capabilities_that_it_knows_how_to_drop() -> None:
    names = {
        f"CAP_{name.removeprefix('CAP_')}": value
        for name, value in vars(privileges).items()
        if name.startswith("CAP_")
    }
    (bounding,), (ambient,) = (
        unit("agent")["CapabilityBoundingSet"],
        unit("agent")["AmbientCapabilities"],
    )
    assert bounding == ambient
    assert {names[name] for name in bounding.split()} == set(privileges.KEPT_FOR_PERF)
    assert unit("collector")["CapabilityBoundingSet"] == [""]


def test_folders_are_those_of_the_settings() -> None:
    assert unit("collector")["StateDirectory"] == ["lanterne"]
    state = Path(CollectorConfig().state.path)
    assert Path("/var/lib/lanterne") in (state, state.parent)
    assert unit("agent")["RuntimeDirectory"] == ["lanterne"]
    assert Path(AgentConfig().experts.socket).parent == Path("/run/lanterne")


@pytest.mark.parametrize("side", UNITS)
def test_it_waits_longer_than_the_program_takes_to_end(side: str) -> None:
    (stop,) = unit(side)["TimeoutStopSec"]
    assert int(stop) > 4 * AgentConfig().collector.shutdown_seconds
    assert unit(side)["Type"] == ["notify"]
    assert unit(side)["WatchdogSec"] == [f"{systemd.STALLED_SECONDS:.0f}"]
    assert unit(side)["KillMode"] == ["mixed"]


def test_units_have_no_key_twice_by_mistake() -> None:
    for side in UNITS:
        twice = {key for key, values in unit(side).items() if len(values) > 1}
        assert twice <= {"SystemCallFilter"}
        parser = configparser.RawConfigParser(strict=False)
        parser.optionxform = str  # type: ignore[assignment, method-assign]
        parser.read(UNITS[side])
        assert parser.sections() == ["Unit", "Service", "Install"]
