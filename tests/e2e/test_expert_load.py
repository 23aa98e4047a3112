"""Expert load end to end: every source of a real agent, the collector's pages, and its restart."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stack import Stack, try_fetch, wait_for

ROOT = Path(__file__).resolve().parents[2]
DOC = ROOT / "docs" / "experts.md"
LOG_LINE = (
    "EPLB step: 40 for model m: avg_tokens=12.50, max_tokens=40, balancedness=0.3125, steps "
    "until the next rearrangement: 9\n"
)


def example() -> Any:
    """The function of the documentation."""
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", DOC.read_text(), re.S) if "def" in c]
    assert len(code.strip().splitlines()) <= 10
    names: dict[str, Any] = {}
    exec(code, names)  # our own documentation, under test
    return names["tell_lanterne"]


class Engine(http.server.BaseHTTPRequestHandler):
    seen = 0

    def do_GET(self) -> None:
        type(self).seen += 10
        body = "".join(
            f'vllm:time_to_first_token_seconds_bucket{{le="{edge}"}} {self.seen}\n'
            for edge in ("0.5", "+Inf")
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def stack(tmp_path: Path, engine: str) -> Iterator[Stack]:
    (tmp_path / "dumps").mkdir()
    (tmp_path / "vllm.log").touch()
    made = Stack(
        tmp_path,
        [],
        agent={"probes": {"enabled": False}, "sources": {"nvml": False, "host": False}},
        collector={
            "analysis": {"window_seconds": 1.0, "snapshot_seconds": 0.2},
            "state": {"path": str(tmp_path / "kept"), "seconds": 1.0},
        },
    )
    experts = f"""
[experts]
socket = "{tmp_path}/i.sock"
poll_seconds = 0.2
engines = [{{ address = "{engine}", kind = "vllm", workload = "chat" }}]
files = [
  {{ path = "{tmp_path}/dumps", kind = "sglang_dump", workload = "dumped", ranks = 2 }},
  {{ path = "{tmp_path}/vllm.log", kind = "vllm_log", workload = "logged" }},
]
"""
    with made.agent_config.open("a") as file:
        file.write(experts)
    with made:
        yield made


def view(stack: Stack, workload: str) -> dict[str, Any] | None:
    page = try_fetch(f"{stack.collector_url}/api/v1/experts")
    if page is None:  # no snapshot yet
        return None
    found = [v for v in json.loads(page)["experts"] if v["workload"] == workload]
    return found[0] if found else None


def test_every_source_reaches_the_pages_and_the_hour_survives(stack: Stack, tmp_path: Path) -> None:
    stack.start()
    counts = [[120, 30, 10, 0], [40, 40, 40, 40]]
    assert example()(counts, "chat", str(tmp_path / "i.sock"), layers=[3, 4]) == 200
    dump = ROOT / "tests" / "fixtures" / "sglang" / "per_pass.pt"
    shutil.copyfile(dump, tmp_path / "dumps" / "expert_distribution_recorder_1.pt")
    with (tmp_path / "vllm.log").open("a") as file:
        file.write(LOG_LINE)

    chat = wait_for(lambda: view(stack, "chat"), 30, "load of the intake")
    assert chat["load"] == counts
    assert chat["measures"]["skew"] == [3.0, 1.0]
    assert chat["hour"] == counts
    assert chat["top"][0] == [0, 1, 2, 3]
    dumped = wait_for(lambda: view(stack, "dumped"), 30, "load of the dump")
    assert dumped["load"] == [[17, 4, 6], [8, 10, 27]]
    assert dumped["physical_load"] == [[2, 4, 6, 15], [8, 10, 12, 15]]
    assert dumped["measures"]["balancedness"] == [
        pytest.approx(13.5 / 21),
        pytest.approx(22.5 / 27),
    ]

    page = stack.collector_metrics()
    assert page.total("lanterne_expert_load_skew_ratio", workload="chat", layer="3") == 3
    assert page.total("lanterne_expert_zero_load_ratio", workload="chat", layer="3") == 0.25
    wait_for(
        lambda: stack.collector_metrics().get(
            "lanterne_engine_ttft_seconds", workload="chat", percentile="p99"
        ),
        30,
        "latency of the engine",
    )
    wait_for(
        lambda: stack.collector_metrics().total(
            "lanterne_engine_balancedness_ratio", workload="logged"
        ) == 0.3125,
        30,
        "balancedness of the log",
    )  # fmt: skip
    agent = stack.agent_metrics()
    for source in ("intake", "engines", "expert_files", "engine_logs"):
        assert agent.total("lanterne_agent_source_success", source=source) == 1, source
    assert agent.total("lanterne_agent_expert_loads_total", source="intake") == 1
    assert page.total("lanterne_collector_batches_refused_total") == 0

    assert stack.stop_one("collector") == 0
    stack.start_collector()
    assert example()(counts, "chat", str(tmp_path / "i.sock"), layers=[3, 4]) == 200
    again = wait_for(lambda: view(stack, "chat"), 60, "load after the restart")
    assert again["hour"] == [[2 * n for n in row] for row in counts]
    assert stack.collector_metrics().total("lanterne_collector_state_timestamp_seconds") > 0


def test_a_damaged_state_is_left_aside(stack: Stack, tmp_path: Path) -> None:
    kept = tmp_path / "kept" / "experts.state"
    kept.parent.mkdir()
    kept.write_bytes(b"lanterne state\n" + bytes(200))
    stack.start_collector()
    page = stack.collector_metrics()
    assert page.total("lanterne_collector_state_errors_total", reason="corrupt") == 1
    assert "starting without" in stack.logs()
    wait_for(lambda: kept.stat().st_size != 215, 30, "a new state")


def test_a_source_that_fails_does_so_alone(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "i.sock").write_text("in the way")
    shutil.rmtree(tmp_path / "dumps")
    stack.start()
    wait_for(
        lambda: [
            stack.agent_metrics().total("lanterne_agent_source_success", source=source)
            for source in ("intake", "expert_files", "engines", "engine_logs")
        ] == [0, 0, 1, 1],
        30,
        "the sources' state",
    )  # fmt: skip
