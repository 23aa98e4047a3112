"""`make test-deb`: the packages in a real Debian and a real Ubuntu, under their own systemd."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lanterne.agent.privileges import KEPT, KEPT_FOR_PERF
from tests.deb.system import ROOT, SOURCES, System, booted, bound
from tests.rig.rig import build
from tests.stack import Samples, wait_for

# Packing, checking and booting take as long as the machine is busy.
pytestmark = [pytest.mark.deb, pytest.mark.timeout(3600)]

AGENT, COLLECTOR = "lanterne-agent", "lanterne-collector"
AGENT_PAGE, COLLECTOR_PAGE = "http://127.0.0.1:9477/metrics", "http://127.0.0.1:9478/metrics"


@pytest.fixture(scope="session")
def packages() -> list[Path]:
    """Built now, or before: LANTERNE_DEB_DIR names their folder."""
    if before := os.environ.get("LANTERNE_DEB_DIR"):
        found = sorted(Path(before).glob("*.deb"))
    else:
        done = subprocess.run(
            [sys.executable, ROOT / "helm/deb/build.py"], capture_output=True, text=True, check=True
        )
        found = [Path(line) for line in done.stdout.split()]
    assert [path.name.split("_")[0] for path in found] == [AGENT, COLLECTOR]
    return found


@pytest.fixture(scope="session", params=sorted(SOURCES))
def system(
    request: pytest.FixtureRequest, packages: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    build()  # there is no compiler inside
    folder = tmp_path_factory.mktemp(request.param)
    with booted(request.param, folder, bound()) as found:
        for path in packages:
            shutil.copy(path, found.root / "root" / path.name)
        found.run("apt-get", "install", "-y", *inside(packages), timeout=300)
        yield found


def inside(packages: list[Path]) -> list[str]:
    return [f"/root/{path.name}" for path in packages]


def newer(package: Path, folder: Path) -> Path:
    """The same package as its next revision."""
    made = folder / package.name.replace("-1_", "-2_")
    shutil.copy(package, made)
    control = folder / package.stem
    subprocess.run(["dpkg-deb", "--control", package, control], check=True)
    text = (control / "control").read_text()
    (control / "control").write_text(re.sub(r"(?m)^(Version: .*)-1$", r"\1-2", text))
    subprocess.run(["tar", "-C", control, "-cJf", folder / "control.tar.xz", "."], check=True)
    subprocess.run(["ar", "r", made, folder / "control.tar.xz"], check=True, capture_output=True)
    return made


def mask(capabilities: tuple[int, ...]) -> str:
    return f"{sum(1 << number for number in capabilities):016x}"


def samples(system: System, url: str) -> Samples | None:
    text = system.page(url)
    return Samples(text) if text.startswith("# HELP") else None


def connected(system: System) -> bool:
    found = samples(system, AGENT_PAGE)
    return found is not None and found.total("lanterne_agent_collector_connected") == 1


def test_lintian_finds_no_error(packages: list[Path]) -> None:
    if shutil.which("lintian") is None:
        pytest.skip("lintian is not installed")
    done = subprocess.run(
        ["lintian", "--allow-root", "--fail-on", "error", *packages], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_installed_enabled_and_reporting(system: System) -> None:
    for name in (AGENT, COLLECTOR):
        assert system.run(name, "--version").split()[0] == name
        assert system.run("systemctl", "is-enabled", name).strip() == "enabled"
        assert system.run("systemctl", "is-active", name).strip() == "active"
    system.run(AGENT, "--config", "/etc/lanterne/agent.toml", "--check-config")
    system.run(COLLECTOR, "run", "--config", "/etc/lanterne/collector.toml", "--check-config")
    wait_for(lambda: connected(system), 60, "the agent reports to the collector")
    wait_for(lambda: "reporting" in system.show(AGENT, "StatusText"), 30, "and says so")
    assert "probes loaded" in system.show(AGENT, "StatusText")
    found = samples(system, AGENT_PAGE)
    assert found is not None
    assert found.total("lanterne_agent_spool_success") == 1
    assert system.run("dpkg", "--verify", AGENT, COLLECTOR) == ""


def test_privileges_are_the_least(system: System) -> None:
    agent, collector = system.status(AGENT), system.status(COLLECTOR)
    for status in (agent, collector):
        assert int(status["Uid"].split()[0]) > 61000  # a dynamic user
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert agent["CapEff"] == agent["CapPrm"] == mask(KEPT)
    assert agent["CapBnd"] == mask(KEPT_FOR_PERF)
    assert {collector[f"Cap{which}"] for which in ("Eff", "Prm", "Inh", "Amb", "Bnd")} == {"0" * 16}
    written = system.run("find", "/var/lib/lanterne/", "/run/lanterne", "-perm", "/022")
    assert written.strip() in ("", "/run/lanterne/intake.sock")


@pytest.mark.parametrize("method", ["auto", "perf"])
def test_probes_work_within_the_unit(system: System, method: str) -> None:
    """With either way to attach: loaded, placed, and the job's calls are read.

    Not whose they are: the kernel tells the host's process ids, and a container has its own.
    """
    dropin = system.root / f"etc/systemd/system/{AGENT}.service.d/method.conf"
    dropin.parent.mkdir(exist_ok=True)
    dropin.write_text(f"[Service]\nEnvironment=LANTERNE_AGENT_PROBES_METHOD={method}\n")
    system.run("systemctl", "daemon-reload")
    system.run("systemctl", "restart", AGENT)
    job = system.start(
        "env", "-C", str(ROOT), "PYTHONDONTWRITEBYTECODE=1", f"LANTERNE_WORKLOAD=deb-{method}",
        str(ROOT / ".venv/bin/python"), "-m", "tests.rig.held", feed=True,
    )  # fmt: skip
    try:

        def attached() -> bool:
            found = samples(system, AGENT_PAGE)
            return found is not None and bool(
                found.total("lanterne_agent_libraries", kind="nccl", state="attached")
            )

        wait_for(attached, 90, f"the library is probed\n{system.journal(AGENT)}", every=1)
        assert job.stdin is not None
        job.stdin.write("go\n")
        job.stdin.flush()

        def read() -> bool:
            found = samples(system, AGENT_PAGE)
            return found is not None and found.total("lanterne_agent_events_read_total") > 1000

        wait_for(read, 100, f"calls are read\n{system.journal(AGENT)}", every=1)
        assert system.show(AGENT, "NRestarts") == "0"
        if method == "perf":
            assert "method=perf" in system.journal(AGENT)
    finally:
        job.communicate()  # what it has started it ends, when its input ends
        dropin.unlink()


def test_a_reload_is_awaited(system: System) -> None:
    for name in (AGENT, COLLECTOR):
        before = system.show(name, "MainPID")
        system.run("systemctl", "reload", name)
        assert system.show(name, "MainPID") == before
        assert f"Reloaded {name}.service" in system.journal(name)


@pytest.mark.parametrize("signal", ["KILL", "STOP"])
@pytest.mark.parametrize("name", [AGENT, COLLECTOR])
def test_what_dies_or_hangs_is_started_again(system: System, name: str, signal: str) -> None:
    """A stopped process feeds no watchdog."""
    dropin = system.root / f"etc/systemd/system/{name}.service.d/hasty.conf"
    dropin.parent.mkdir(exist_ok=True)
    dropin.write_text("[Service]\nWatchdogSec=8\nTimeoutAbortSec=1\nRestartSec=0\n")
    system.run("systemctl", "daemon-reload")
    system.run("systemctl", "restart", name)
    before = system.show(name, "MainPID")
    system.run("kill", f"-{signal}", before)

    def again() -> bool:
        now = system.show(name, "MainPID")
        return now not in ("0", before) and system.show(name, "ActiveState") == "active"

    wait_for(again, 90, f"{name} runs again\n{system.journal(name)}", every=0.5)
    assert ("watchdog" in system.journal(name).lower()) or signal == "KILL"
    dropin.unlink()
    system.run("systemctl", "daemon-reload")
    system.run("systemctl", "restart", name)


def test_a_wrong_setting_is_not_tried_again(system: System) -> None:
    settings = system.root / "etc/lanterne/agent.toml"
    good = settings.read_text()
    settings.write_text(good + "\n[nonsense]\n")
    assert "failed" in system.run("systemctl", "restart", AGENT, check=False)
    assert system.show(AGENT, "ActiveState") == "failed"
    assert "nonsense" in system.journal(AGENT)
    settings.write_text(good)
    system.run("systemctl", "restart", AGENT)


def test_an_upgrade_keeps_settings_and_restarts(
    system: System, packages: list[Path], tmp_path: Path
) -> None:
    settings = system.root / "etc/lanterne/agent.toml"
    settings.write_text(settings.read_text() + "# mine\n")
    system.run("systemctl", "disable", COLLECTOR)
    before = {name: system.show(name, "MainPID") for name in (AGENT, COLLECTOR)}
    later = [newer(path, tmp_path) for path in packages]
    for path in later:
        shutil.copy(path, system.root / "root" / path.name)
    system.run("apt-get", "install", "-y", *inside(later), timeout=300)
    for name in (AGENT, COLLECTOR):
        version = system.run("dpkg-query", "-W", "-f", "${Version}", name)
        assert version.endswith("-2")
        assert system.show(name, "ActiveState") == "active"
        assert system.show(name, "MainPID") != before[name]
    assert settings.read_text().endswith("# mine\n")
    assert system.run("systemctl", "is-enabled", COLLECTOR, check=False).strip() == "disabled"
    wait_for(lambda: connected(system), 60, "the new agent reports to the new collector")


def test_purged_without_a_trace(system: System) -> None:
    """Last: what it leaves is nothing."""
    system.run("apt-get", "remove", "-y", AGENT, COLLECTOR)
    assert system.run("find", "/usr/lib/lanterne", check=False).startswith("find:")
    assert (system.root / "etc/lanterne/agent.toml").exists()
    assert (system.root / "var/lib/private/lanterne").exists()
    for name in (AGENT, COLLECTOR):
        for dropin in (system.root / f"etc/systemd/system/{name}.service.d").glob("*"):
            dropin.unlink()
    system.run("apt-get", "purge", "-y", AGENT, COLLECTOR)
    mine = (
        "/root/*",
        f"{ROOT}/*",
        "/proc/*",
        "/sys/*",
        "/tmp/*",
        "/run/credentials/*",
        "/var/log/*",
    )
    left = system.run(
        "find", "/", *(word for path in mine for word in ("-path", path, "-prune", "-o")),
        "-name", "*lanterne*", "-print",
    )  # fmt: skip
    folders = {f"/etc/systemd/system/{name}.service.d" for name in (AGENT, COLLECTOR)}
    assert set(left.split()) <= folders  # the test's own
    assert system.run("dpkg-query", "-W", "-f", "${Status}", AGENT, check=False).startswith(
        ("dpkg-query: no packages", "unknown")
    )
