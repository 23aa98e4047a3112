"""Expert load and engines on every surface: metrics, JSON, `top`."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from lanterne.collector import series_experts
from lanterne.collector.experts_json import MAX_CELLS, experts_json
from lanterne.collector.export import families, write
from lanterne.collector.screen import screen
from lanterne.collector.series_experts import MAX_LAYERS
from lanterne.collector.view import view
from tests.fixtures.snapshots import communicator, engine, experts, snapshot
from tests.stack import Samples

NAN = float("nan")


def samples(**changes: object) -> Samples:
    return Samples(write(families(snapshot(**changes), None)).decode())


def test_only_the_primary_source_of_a_workload_is_exported() -> None:
    other = experts(source="heat map", primary=False, measures={"balancedness": np.array([0.1])},
                    layer=(3,))  # fmt: skip
    page = samples(experts=(other, experts()))
    assert page.get("lanterne_expert_balancedness_ratio", workload="chat") == [
        ({"workload": "chat", "layer": "3"}, 0.625)
    ]
    assert page.total("lanterne_expert_load_skew_ratio", layer="3") == 2
    assert page.get("lanterne_expert_load_skew_ratio", layer="4") == []  # no load: absent


def test_layers_on_the_page_are_bounded_and_what_is_left_out_is_counted() -> None:
    layers = 1500
    many = [
        experts(workload=f"w{n}", layer=tuple(range(layers)), measures={"skew": np.ones(layers)})
        for n in range(2)
    ]
    page = samples(experts=many)
    assert len(page.get("lanterne_expert_load_skew_ratio")) == MAX_LAYERS
    assert page.total("lanterne_expert_layers_left_out") == 2 * layers - MAX_LAYERS


def test_the_worst_engine_of_a_workload_is_exported() -> None:
    page = samples(
        engines=(
            engine("a:1", ttft_p95=0.2, balancedness=0.9),
            engine("a:2", ttft_p95=0.3, balancedness=0.4),
        )
    )
    assert page.total("lanterne_engine_ttft_seconds", percentile="p95") == 0.3
    assert page.total("lanterne_engine_balancedness_ratio", workload="chat") == 0.4
    assert page.get("lanterne_engine_tpot_seconds") == []


def test_without_experts_there_is_nothing_but_the_bound() -> None:
    names = [f.metric.name for f in series_experts.families(snapshot()) if f.points]
    assert names == ["lanterne_expert_layers_left_out"]


def test_json_has_everything_and_null_for_what_is_not_known() -> None:
    told = json.loads(experts_json(snapshot(experts=(experts(),), engines=(engine(a=1.0),))))
    (one,) = told["experts"]
    assert one["load"] == [[50, 30, 10, 10], [0, 0, 0, 0]]
    assert one["measures"]["skew"] == [2, None]
    assert one["tokens"] == [50, None]
    assert one["physical_load"] is None
    assert one["top"] == [[0, 1, 2, 3], [3, 2, 1, 0]]
    assert one["hot"] == [[0], [3]]
    assert (one["experts"], one["layers"], one["primary"]) == (4, [3, 4], True)
    assert told["engines"] == [
        {"workload": "chat", "engine": "sglang", "address": "127.0.0.1:30000", "values": {"a": 1}}
    ]


def test_json_leaves_out_matrices_that_are_too_large() -> None:
    rows = MAX_CELLS // 1024 + 1
    told = json.loads(experts_json(snapshot(experts=(experts(load=np.zeros((rows, 1024))),))))
    assert told["experts"][0]["load"] is None
    assert told["experts"][0]["measures"]["skew"] == [2, None]


def shown(**changes: object) -> str:
    out = io.StringIO()
    view_of = view(snapshot(**changes))
    Console(file=out, width=200).print(
        screen(view_of, width=200, height=60, address="http://127.0.0.1:9478")
    )
    return out.getvalue()


def test_top_shows_experts_and_engines_beside_the_waits() -> None:
    text = shown(
        experts=(experts(),),
        engines=(engine(ttft_p95=0.25, tpot_p95=1.5), engine("a:2", ttft_count=0.0)),
        communicators=(communicator(workload="chat", wait_share=0.123),),
    )
    assert "experts of chat moe: 2 layers, expert 0 of layer 3 has 2.0x the mean load" in text
    assert "ranks balanced 62% in the worst layer, few tokens, mostly chance" in text
    assert "chat sglang at 127.0.0.1:30000: TTFT p95 250 ms, TPOT p95 1.5 s" in text
    assert "its ranks wait 12% of their time" in text
    assert "a:2" not in text  # it told no figure


@pytest.mark.parametrize("name", ["chat\x1b[2J", "a\nb"])
def test_names_cannot_steer_the_terminal(name: str) -> None:
    assert "\x1b[2J" not in shown(experts=(experts(workload=name),))


def test_top_without_any_measure() -> None:
    bare = experts(measures={}, summary={})
    assert "experts of chat moe: 2 layers\n" in "\n".join(
        line.rstrip() for line in shown(experts=(bare,)).splitlines()
    ) + "\n"  # fmt: skip
