"""Advice on its way out: JSON, the live table, and plans in the forms that engines read."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lanterne.collector import plans
from lanterne.collector.advice_json import advice_json
from lanterne.collector.errors import PlanError
from lanterne.collector.http import App
from lanterne.collector.http_server import HttpServer
from lanterne.collector.screen import screen
from lanterne.collector.snapshot import AdviceOption, AdviceView, Snapshot
from lanterne.collector.view import view
from tests.fixtures.snapshots import snapshot

SLOTS = np.array([[0, 1, 2, 0], [2, 1, 0, 2]])  # two GPUs of two slots
PLAN = AdviceView(
    workload="chat",
    kind="replication",
    text="Replicate and place the experts anew: the busiest GPU would have 12.0% less to do.",
    gain=0.12,
    evidence={"trials": 8.0, "at_least": float("-inf")},
    cost={"moved_experts": 3.0},
    reason="steady over 8 trials",
    options=(AdviceOption("nothing", 0.0, 0.0, 0, 0),),
    layers=(3, 4),
    plan=SLOTS,
    gpus=2,
)
BIAS = AdviceView("train", "bias", "Move the bias.", float("nan"), warning="Only in training.")
NOTHING = AdviceView("quiet", "nothing", "Leave the experts.", 0.0, reason="gained 0.1%")


def test_json_has_everything_and_no_nan() -> None:
    found = json.loads(advice_json(snapshot(advice=(PLAN, BIAS, NOTHING))))
    first, bias, nothing = found["advice"]
    assert first["plan"] == {
        "layers": [3, 4],
        "gpus": 2,
        "physical_to_logical_map": SLOTS.tolist(),
    }
    assert first["evidence"] == {"trials": 8.0, "at_least": None}
    assert first["options"][0]["kind"] == "nothing"
    assert bias["gain"] is None
    assert bias["warning"] == "Only in training."
    assert (nothing["plan"], nothing["reason"]) == (None, "gained 0.1%")


def test_top_shows_what_to_do_but_not_nothing() -> None:
    from rich.console import Console

    shown = view(snapshot(advice=(PLAN, BIAS, NOTHING)))
    assert shown.advice == (f"chat: {PLAN.text}", "train: Move the bias. Only in training.")
    console = Console(width=160, file=io.StringIO())
    console.print(screen(shown, width=160, height=40, address="http://x"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "advice for chat: Replicate" in text
    assert "quiet" not in text


def _exported(form: str) -> bytes:
    plan = json.loads(advice_json(snapshot(advice=(PLAN,))))["advice"][0]["plan"]
    return plans.export(plan, form)


def test_sglang_rows_are_layers_of_the_model() -> None:
    table = json.loads(_exported("sglang"))["physical_to_logical_map"]
    assert table == [[0, 1, 2, 0]] * 3 + SLOTS.tolist()  # layers 0 to 2 have no experts


def test_vllm_ascend_lists_devices() -> None:
    found = json.loads(_exported("vllm-ascend"))
    assert found["moe_layer_count"] == 2
    assert found["layer_list"][1] == {
        "layer_id": 1,
        "device_count": 2,
        "device_list": [
            {"device_id": 0, "device_expert": [2, 1]},
            {"device_id": 1, "device_expert": [0, 2]},
        ],
    }


def test_npy_is_the_map() -> None:
    table = np.load(io.BytesIO(_exported("npy")), allow_pickle=False)
    assert table.dtype == np.int64
    assert (table == SLOTS).all()
    assert json.loads(_exported("json"))["layers"] == [3, 4]


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"physical_to_logical_map": [[0, 1, 2]], "layers": [0], "gpus": 2},
        {"physical_to_logical_map": [[0, 1], [1]], "layers": [0, 1], "gpus": 1},
        {"physical_to_logical_map": [[0, 1]], "layers": [0, 1], "gpus": 1},
    ],
)
def test_a_plan_that_is_none_is_refused(plan: dict[str, object]) -> None:
    with pytest.raises(PlanError, match="not as expected"):
        plans.export(plan, "json")


@pytest.fixture
def serving() -> Iterator[tuple[str, list[Snapshot]]]:
    latest = [snapshot(advice=(PLAN, NOTHING))]
    app = App(latest=lambda: latest[0], metrics=lambda _: ("", b""), ready=lambda: {})
    server = HttpServer(app, "127.0.0.1", 0)
    thread = threading.Thread(target=server.start)
    thread.start()
    yield f"127.0.0.1:{server.port}", latest
    server.stop()
    thread.join()


def _plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("lanterne-collector"), "plan", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_command(serving: tuple[str, list[Snapshot]], tmp_path: Path) -> None:
    address, latest = serving
    out = tmp_path / "plan.json"
    done = _plan(address, "--format", "sglang", "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(out.read_text())["physical_to_logical_map"][3] == [0, 1, 2, 0]

    done = _plan(address, "--workload", "quiet")
    assert done.returncode == 1
    assert "quiet: Leave the experts. gained 0.1%" in done.stderr

    latest[0] = snapshot(advice=(PLAN, AdviceView("b", "placement", "", 0.1, plan=SLOTS, gpus=2)))
    done = _plan(address)
    assert done.returncode == 1
    assert "--workload (b, chat)" in done.stderr
