"""Expert load from the wire to the snapshot: windows, the hour, bounds, restarts, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanterne.collector.analyse.engine import Engine
from lanterne.collector.analyse.experts import MAX_STREAMS_OF_WORKLOAD
from lanterne.collector.analyse.load_history import HOUR, History, bucket_minutes
from lanterne.collector.analyse.settings import EngineConfig
from lanterne.collector.decode import decode
from lanterne.collector.errors import BatchRefused
from lanterne.collector.handover import Packer, Unpacker
from lanterne.collector.snapshot import ExpertView, Snapshot
from lanterne.proto import telemetry_pb2 as pb

NS = 10**9
T0 = 1_760_000_000.0
SMALL = EngineConfig(
    cells=1 << 12, rows=1 << 8, communicators=16, members=64, processes=16, nodes=4,
    own_cells=1 << 10,
)  # fmt: skip
F64 = npt.NDArray[np.float64]


def load(counts: object, **fields: Any) -> pb.ExpertLoad:
    values = np.atleast_2d(np.asarray(counts, "<f8"))
    for name, dtype in (
        ("tokens", "<f8"), ("rank_of_expert", "<u4"), ("logical_of_physical", "<u4")
    ):  # fmt: skip
        if name in fields:
            fields[name] = np.asarray(fields[name], dtype).tobytes()
    layer = fields.pop("layer", range(len(values)))
    return pb.ExpertLoad(
        **{"workload": "chat", "engine": "own", "source": "intake", "unit": pb.UNIT_LOGICAL}
        | fields,
        rows=len(values),
        experts=values.shape[1],
        layer=np.asarray(layer, "<u4").tobytes(),
        counts=values.tobytes(),
    )


def batch(*loads: pb.ExpertLoad, sequence: int = 1, **fields: Any) -> bytes:
    return pb.Batch(
        schema=1, node="n", epoch=1, sequence=sequence, end_ns=sequence * NS, stride=1,
        expert_loads=loads, **fields,
    ).SerializeToString()  # fmt: skip


class Feed:
    """An engine, and windows of 5 s fed into it."""

    def __init__(self) -> None:
        self.engine = Engine(SMALL)
        self.seconds = 0
        self.sequence = 0

    def window(self, *loads: pb.ExpertLoad, **fields: Any) -> Snapshot:
        self.sequence += 1
        self.seconds += 6
        data = batch(*loads, sequence=self.sequence, **fields)
        now_ns = self.seconds * NS
        self.engine.apply(decode(data, received_ns=now_ns))
        self.engine.snapshot(T0 + self.seconds, now_ns=now_ns)
        return self.later(5)

    def later(self, seconds: int) -> Snapshot:
        self.seconds += seconds
        return self.engine.snapshot(T0 + self.seconds, now_ns=self.seconds * NS)


def one(snapshot: Snapshot) -> ExpertView:
    (view,) = snapshot.experts
    return view


def test_a_window_gives_load_measures_and_the_hour() -> None:
    feed = Feed()
    view = one(feed.window(load([[30, 10], [0, 0]], tokens=[40, 0], rank_of_expert=[0, 1])))
    assert view.load.tolist() == [[30, 10], [0, 0]]
    assert view.measures["skew"][0] == 1.5
    assert math.isnan(view.measures["skew"][1])
    assert view.measures["balancedness"][0] == pytest.approx(20 / 30)
    assert view.tokens[0] == 40
    assert math.isnan(view.tokens[1])
    assert view.unit == "logical"
    assert view.primary
    view = one(feed.window(load([[1, 9], [2, 0]])))
    assert view.load.tolist() == [[1, 9], [2, 0]]
    assert view.hour.tolist() == [[31, 19], [2, 0]]
    assert view.top.tolist() == [[0, 1], [0, 1]]
    assert view.hot.tolist() == [[0], [0]]


def test_parts_of_a_window_add_up_and_layers_may_come_apart() -> None:
    feed = Feed()
    snapshot = feed.window(
        load([[1, 2]], layer=[3]), load([[10, 20]], layer=[3]), load([[5, 5]], layer=[1])
    )
    view = one(snapshot)
    assert view.layer == (1, 3)
    assert view.load.tolist() == [[5, 5], [11, 22]]
    view = one(feed.window(load([[7, 7]], layer=[2])))
    assert view.layer == (1, 2, 3)
    assert view.load.tolist() == [[0, 0], [7, 7], [0, 0]]
    assert view.hour.tolist() == [[5, 5], [7, 7], [11, 22]]


def test_replicas_are_added_up_for_the_load_and_kept_apart_for_the_ranks() -> None:
    told = load(
        [[40, 20, 40, 20, 20]],
        unit=pb.UNIT_PHYSICAL,
        rank_of_expert=[0, 0, 1, 1, 1],
        logical_of_physical=[0, 1, 0, 2, 3],
    )
    view = one(Feed().window(told))
    assert view.unit == "logical"
    assert view.load.tolist() == [[80, 20, 20, 20]]
    assert view.physical_load is not None
    assert view.physical_load.shape == (1, 5)
    assert view.measures["balancedness"][0] == pytest.approx(7 / 8)
    assert view.hour.tolist() == [[80, 20, 20, 20]]


def test_load_of_ranks_only_gives_balancedness_only() -> None:
    view = one(Feed().window(load([[30, 10]], unit=pb.UNIT_RANK)))
    assert set(view.measures) == {"assignments", "balancedness"}
    assert view.summary["balancedness_min"] == pytest.approx(20 / 30)


def test_local_hit_ratio_from_the_ranks_of_the_sources() -> None:
    loads = [
        load([[6, 2]], source_rank=0, rank_of_expert=[0, 1]),
        load([[1, 1]], source_rank=1, rank_of_expert=[0, 1]),
    ]
    assert one(Feed().window(*loads)).measures["local_hit"].tolist() == [7 / 10]


def test_sources_are_not_added_up_and_the_better_one_is_shown() -> None:
    feed = Feed()
    snapshot = feed.window(
        load([[9, 9]], source="heat map", unit=pb.UNIT_RANK),
        load([[1, 2]], source="intake"),
        load([[3, 4]], source="intake", workload="other"),
    )
    assert {(v.workload, v.source): v.primary for v in snapshot.experts} == {
        ("chat", "heat map"): False, ("chat", "intake"): True, ("other", "intake"): True
    }  # fmt: skip


def test_silence_takes_it_off_the_page_and_an_hour_out_of_memory() -> None:
    feed = Feed()
    feed.window(load([[1, 2]]))
    assert len(feed.later(200).experts) == 1
    assert len(feed.later(200).experts) == 0
    assert len(feed.engine.experts.export()) == 1
    feed.later(HOUR)
    assert feed.engine.experts.export() == []


def test_another_number_of_experts_begins_anew_and_is_counted() -> None:
    feed = Feed()
    feed.window(load([[1, 2]]))
    snapshot = feed.window(load([[1, 2, 3]]))
    assert one(snapshot).hour.tolist() == [[1, 2, 3]]
    assert snapshot.ingest["dropped_expert_reshapes"] == 1


def test_streams_are_bounded_for_each_workload() -> None:
    feed = Feed()
    for n in range(MAX_STREAMS_OF_WORKLOAD + 2):
        snapshot = feed.window(load([[1]], model=f"m{n}"))
    assert len(snapshot.experts) == MAX_STREAMS_OF_WORKLOAD
    assert snapshot.ingest["dropped_expert_loads"] == 2


def test_layers_are_bounded() -> None:
    feed = Feed()
    feed.window(load(np.ones((512, 1))))
    snapshot = feed.window(load([[1], [1]], layer=[5, 600]))
    assert one(snapshot).load[5, 0] == 1
    assert snapshot.ingest["dropped_expert_layers"] == 1


def test_what_crosses_to_the_analysis_process_is_what_came() -> None:
    data = batch(load([[1, 2]]), engine_readings=[pb.EngineReading(values={"ttft_p50": 0.5})])
    before = decode(data, received_ns=5)
    (after,) = Unpacker().unpack(Packer().pack([before]))
    assert after.reports == before.reports  # type: ignore[union-attr]
    assert before.reports.expert_loads


def test_engine_readings_are_kept_while_they_are_fresh() -> None:
    feed = Feed()
    reading = pb.EngineReading(workload="w", engine="vllm", address="a:1", values={"ttft_p95": 0.2})
    (shown,) = feed.window(engine_readings=[reading]).engines
    assert (shown.workload, shown.engine, dict(shown.values)) == ("w", "vllm", {"ttft_p95": 0.2})
    assert feed.later(400).engines == ()


# -- The hour ------------------------------------------------------------------------------------


def test_history_forgets_after_an_hour_and_bears_a_clock_that_steps_back() -> None:
    history = History(1, 2)
    for minute in range(90):
        history.add(np.array([[1.0, 2.0]]), T0 + 60 * minute)
    total, seconds = history.hour(T0 + 60 * 89)
    assert total.tolist() == [[61, 122]]  # the minute that is being filled, and sixty
    assert HOUR <= seconds <= HOUR + 60
    history.add(np.array([[5.0, 0.0]]), T0)
    assert history.hour(T0 + 60 * 89)[0].tolist() == [[66, 122]]
    assert history.hour(T0 + 10 * HOUR)[0].tolist() == [[0, 0]]


def test_memory_of_the_hour_is_bounded() -> None:
    assert bucket_minutes(61 * 256) == 1
    for layers, experts in ((61, 256), (512, 512), (512, 4096)):
        history = History(layers, experts)
        assert 60 % history.width == 0
        assert history.nbytes <= 32 << 20


# -- Over a restart ------------------------------------------------------------------------------


def test_the_hour_survives_a_restart() -> None:
    feed = Feed()
    feed.window(load([[1, 2], [3, 4]]))
    saved = feed.engine.experts.export()
    after = Feed()
    after.engine.experts.restore(saved, 0)
    view = one(after.window(load([[10, 0], [0, 0]])))
    assert view.load.tolist() == [[10, 0], [0, 0]]
    assert view.hour.tolist() == [[11, 2], [3, 4]]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda facts, arrays: facts.pop("key"),
        lambda facts, arrays: facts.update(width=7),
        lambda facts, arrays: facts.update(layer=[1, 0]),
        lambda facts, arrays: facts.update(shape=[2, 3]),
        lambda facts, arrays: facts.update(experts=10**9),
        lambda facts, arrays: arrays.update(ring=arrays["ring"] - 100),
        lambda facts, arrays: arrays.update(ring=arrays["ring"] * np.float32("nan")),
        lambda facts, arrays: arrays.update(stamp=np.array([-5])),
        lambda facts, arrays: arrays.pop("stamp"),
    ],
)
def test_a_state_that_was_never_written_so_is_refused_whole(spoil: Callable[..., Any]) -> None:
    feed = Feed()
    feed.window(load([[1, 2], [3, 4]]))
    ((facts, arrays),) = feed.engine.experts.export()
    spoil(facts, arrays)
    after = Feed()
    with pytest.raises(ValueError, match="state of expert load"):
        after.engine.experts.restore([(facts, arrays)], 0)
    assert after.engine.experts.export() == []


# -- What is refused -----------------------------------------------------------------------------


def changed(**fields: Any) -> pb.ExpertLoad:
    made = load([[1, 2], [3, 4]], rank_of_expert=[0, 1])
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("bad", "code", "words"),
    [
        (changed(rows=0), "rows", "rows is 0"),
        (changed(rows=513), "rows", "512"),
        (changed(experts=4097), "rows", "4096"),
        (changed(workload="a\nb"), "text", "workload"),
        (changed(counts=b"1234"), "column", "counts is 4 bytes"),
        (load([[1.0, math.nan]]), "number", "nan"),
        (load([[1.0, -1]]), "number", "-1.0"),
        (load([[1.0, math.inf]]), "number", "inf"),
        (load([[1.0], [1.0]], layer=[1, 1]), "number", "ascend"),
        (load([[1.0]], layer=[70_000]), "number", "65535"),
        (load([[1.0]], tokens=[-1.0]), "number", "tokens"),
        (load([[1.0]], rank_of_expert=[70_000]), "number", "rank_of_expert holds 70000"),
        (load([[1.0]], source_rank=70_000), "rank", "source_rank"),
        (load([[1.0]], logical_of_physical=[0]), "column", "no meaning"),
        (load([[1.0]], unit=pb.UNIT_RANK, rank_of_expert=[0]), "column", "no meaning"),
    ],
)
def test_refusals(bad: pb.ExpertLoad, code: str, words: str) -> None:
    with pytest.raises(BatchRefused, match=words) as refusal:
        decode(batch(bad))
    assert refusal.value.code == code


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"Bad-Name": 1.0}, "is not a name"),
        ({"a": math.nan}, "a is nan"),
        ({f"v{n}": 1.0 for n in range(65)}, "more than 64"),
    ],
)
def test_refused_readings(values: dict[str, float], words: str) -> None:
    with pytest.raises(BatchRefused, match=words):
        decode(batch(engine_readings=[pb.EngineReading(values=values)]))


def test_too_many_are_refused() -> None:
    with pytest.raises(BatchRefused, match="65 expert_loads"):
        decode(batch(*[load([[1]])] * 65))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_mutated_loads_are_applied_or_refused(data: st.DataObject) -> None:
    told = load([[1, 2, 3], [4, 5, 6]], unit=pb.UNIT_PHYSICAL, rank_of_expert=[0, 0, 1],
                logical_of_physical=[0, 1, 0], source_rank=1)  # fmt: skip
    raw = bytearray(
        batch(told, load([[1, 2, 3]], unit=pb.UNIT_PHYSICAL, layer=[7]),
              engine_readings=[pb.EngineReading(workload="w", values={"ttft_p50": 1.0})])
    )  # fmt: skip
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    engine = Engine(SMALL)
    try:
        engine.apply(decode(bytes(raw), received_ns=NS))
    except BatchRefused:
        return
    for second in (1, 7, 13):
        engine.snapshot(T0 + second, now_ns=second * NS)
