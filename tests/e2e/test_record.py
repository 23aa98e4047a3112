"""Recordings of real agents and collectors, replayed; the page of a replay in a real browser."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.feeder import SLOW, Feeder
from tests.rig.rig import Job, JobConfig, RigPaths, build
from tests.stack import SCRIPTS, Stack, free_port, try_fetch, wait_for

pytestmark = [pytest.mark.timeout(300)]

RANKS = 8
SLOW_RANK = 5
BASE = {
    "ranks": RANKS, "ranks_per_node": RANKS, "tokens": 128, "hidden": 256, "zipf": 0.4, "layers": 2,
    "attn_us": 4000, "expert_us": 1000, "mode": "eager",
}  # fmt: skip


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPTS / "lanterne-collector"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def figures(*arguments: str) -> Any:
    done = command(*arguments, "--json=-")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---- the rig


def recorded(folder: Path, paths: RigPaths, name: str, faults: tuple[str, ...]) -> tuple[Path, Any]:
    """A rig job's recording, and what the live collector said at the end of it."""
    here = folder / name
    here.mkdir()
    path = here / f"{name}.ltr"
    with Stack(
        here,
        [f"{paths.root}/*"],
        env={"LD_LIBRARY_PATH": str(paths.root)},
        collector={"record": {"path": str(path)}, "analysis": {"window_seconds": 3.0}},
    ) as stack:
        stack.start()
        config = JobConfig(**(BASE | {"seconds": 120, "faults": faults}))  # type: ignore[arg-type]
        with Job(config, paths=paths, env={"LANTERNE_WORKLOAD": "moe"}, hold="start") as job:
            wait_for(
                lambda: (
                    stack.agent_metrics().total("lanterne_agent_libraries", state="attached") >= 2
                ),
                30,
                f"libraries attached\n{stack.logs()}",
            )
            job.release()
            job.wait_ready()
            begun = time.monotonic()
            if faults:
                wait_for(lambda: list(stack.named()), 60, f"a named rank\n{stack.logs()}")
            wait_for(lambda: time.monotonic() - begun > 25, 40, "enough windows to compare")
            live = {
                "named": list(stack.named()),
                "diagnosis": command("diagnose", f"127.0.0.1:{stack.http_port}", "--json=-"),
            }
        assert stack.stop_one("agent") == 0
        assert stack.stop_one("collector") == 0, stack.logs()
    return path, live


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Path]:
    """(recording with a slow rank, what was said live, recording without)."""
    folder = tmp_path_factory.mktemp("rig")
    paths = build(dest=folder / "lib")
    slow, live = recorded(folder, paths, "slow", (f"slow-rank:{SLOW_RANK}:4",))
    even, _ = recorded(folder, paths, "even", ())
    return slow, live, even


@pytest.mark.kernel
def test_a_replay_says_what_the_collector_said(rig: tuple[Path, Any, Path]) -> None:
    slow, live, _ = rig
    found = figures("replay", str(slow))
    assert {(v["rank"], v["workload"]) for v in found["verdicts"]} == {(SLOW_RANK, "moe")}
    assert {(r["rank"], r["klass"]) for r in live["named"]} <= {
        (v["rank"], v["class"]) for v in found["verdicts"]
    }
    assert found["recoverable_share"] > 0.1
    assert found["recording"]["damaged_blocks"] == found["recording"]["batches_refused"] == 0
    (comm,) = (c for c in found["communicators"] if c["n_ranks"] == RANKS and c["evidence"])
    waits = comm["wait_seconds"]
    assert min(range(RANKS), key=waits.__getitem__) == SLOW_RANK
    assert sum(comm["bytes_by_domain"].values()) > 0


@pytest.mark.kernel
def test_compare_finds_the_fault_and_its_side_only(rig: tuple[Path, Any, Path]) -> None:
    slow, _, even = rig
    (job,) = figures("compare", str(slow), str(even))["workloads"]
    found = job["figures"]
    assert found["wait_seconds"]["changed"]
    assert found["wait_seconds"]["high"] < 0
    assert found["operations_per_second"]["changed"]
    assert found["operations_per_second"]["low"] > 0
    # The same requests: the same tokens go the same ways.
    assert found["bytes_same_node"]["change"] == pytest.approx(0, abs=0.05)


@pytest.mark.kernel
def test_diagnose_live_and_recorded_agree(rig: tuple[Path, Any, Path]) -> None:
    slow, live, _ = rig
    now = live["diagnosis"]
    assert now.returncode == 3, now.stderr
    for done in (now, command("diagnose", str(slow), "--json=-")):
        found = json.loads(done.stdout)
        titles = [f["title"] for f in found["findings"] if f["severity"] != "notice"]
        assert any(f"wait for rank {SLOW_RANK} on demo" in t for t in titles), titles
        states = {s["step"]: s["state"] for s in found["steps"]}
        # The stand-in NVML reports memory, the rig's traffic is known.
        assert states["memory"] != "unknown"
        assert states["bytes"] != "unknown"


# ---- a browser


def browse(page: Path, profile: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no chromium here: the page is not looked at in a browser")
    return subprocess.run(
        [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={profile}", "--window-size=1100,2400", *arguments, page.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def console(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.kernel
def test_a_browser_shows_the_page_without_a_word(
    rig: tuple[Path, Any, Path], tmp_path: Path
) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    assert command("replay", str(rig[0]), f"--html={page}").returncode == 0
    shown = browse(page, tmp_path / "profile", "--dump-dom")
    assert console(shown) == []
    for words in ("Waiting of each rank", "Blame:", "Load of each rank", "Traffic matrix"):
        assert words in shown.stdout, words
    assert shown.stdout.count("</svg>") >= 4
    drawn = browse(page, tmp_path / "profile", f"--screenshot={picture}")
    assert console(drawn) == []
    assert picture.read_bytes()[:4] == b"\x89PNG"
    # The same watch does see what a page with a fault says.
    faulty = tmp_path / "faulty.html"
    faulty.write_text(page.read_text().replace("</body>", "<script>1</script></body>"))
    assert console(browse(faulty, tmp_path / "profile", "--dump-dom"))


# ---- the command `record`


class Recording:
    """`lanterne-collector record` as a process."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.path = folder / "only.ltr"
        self.port = free_port()
        self.ports = folder / "ports.json"
        self.ports.unlink(missing_ok=True)
        self.log = folder / "record.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(SCRIPTS / "lanterne-collector"), "record",
                 f"--ingest-address=127.0.0.1:{self.port}", f"--ports-file={self.ports}",
                 *arguments, str(self.path)],
                stdout=log, stderr=log,
            )  # fmt: skip
        wait_for(self.ports.exists, 30, "the ports file")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(30)


def test_record_keeps_what_agents_send_and_nothing_else(tmp_path: Path) -> None:
    running = Recording(tmp_path)
    assert json.loads(running.ports.read_text()) == {"ingest": running.port}
    with Feeder(f"127.0.0.1:{running.port}", history=30) as feeder:
        wait_for(lambda: len(feeder.acks) >= 31, 60, "31 windows acknowledged")
    acked = len(feeder.acks)
    assert running.stop() == 0
    assert not running.ports.exists()
    found = figures("replay", str(running.path))
    assert found["recording"]["batches"] == acked
    assert found["recording"]["torn_bytes"] == 0
    assert f"{found['recording']['frames']} frames" in running.log.read_text()
    assert found["communicators"][0]["instances"] == acked * 50


def test_a_killed_recorder_leaves_a_file_that_reads(tmp_path: Path) -> None:
    running = Recording(tmp_path)
    with Feeder(f"127.0.0.1:{running.port}", history=20) as feeder:
        wait_for(lambda: len(feeder.acks) >= 20, 60, "windows acknowledged")
        wait_for(lambda: running.path.stat().st_size > 2_000, 30, "a block on disk")
        running.stop(signal.SIGKILL)
    found = figures("replay", str(running.path))
    assert found["recording"]["batches"] > 0
    again = Recording(tmp_path)  # the file of the one that was killed moves on
    assert again.stop(signal.SIGINT) == 0
    assert again.path.with_name("only.ltr.1").exists()


def test_a_file_that_is_being_written_is_not_taken(tmp_path: Path) -> None:
    running = Recording(tmp_path)
    try:
        done = command("record", "--ingest-address=127.0.0.1:0", str(running.path))
        assert done.returncode == 1
        assert "another collector is writing it" in done.stderr
        done = command("run", "--ingest-address=127.0.0.1:0", "--http-address=127.0.0.1:0",
                       f"--record={tmp_path}/no/r")  # fmt: skip
        assert done.returncode == 1
        assert "no recording can be begun there" in done.stderr
        assert "--ingest-address" not in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        running.stop()


def test_run_records_beside_the_analysis(tmp_path: Path) -> None:
    path = tmp_path / "beside.ltr"
    with Stack(
        tmp_path, [], collector={"record": {"path": str(path)}, "analysis": {"window_seconds": 2.0}}
    ) as stack:
        stack.start_collector()
        with Feeder(f"127.0.0.1:{stack.grpc_port}") as feeder:
            ready = f"{stack.collector_url}/api/v1/stragglers"
            wait_for(lambda: try_fetch(ready), 30, "the first snapshot")
            rows = wait_for(lambda: list(stack.named()), 60, f"a named rank\n{stack.logs()}")
            metrics = stack.collector_metrics()
        assert stack.stop_one("collector") == 0
    assert metrics.total("lanterne_collector_recorded_bytes_total") > 0
    assert metrics.total("lanterne_collector_recorded_frames_total") > 0
    assert {row["rank"] for row in rows} == {SLOW}
    found = figures("replay", str(path))
    assert found["recording"]["batches"] == len(feeder.acks)
    assert [v["rank"] for v in found["verdicts"]] == [SLOW]
    assert {v["class"] for v in found["verdicts"]} == {row["klass"] for row in rows}
