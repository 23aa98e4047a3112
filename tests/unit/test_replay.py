"""Replay: a recording through the same analysis, the same bytes each time; compare, diagnose."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from lanterne.collector import offline, recording, replay
from lanterne.collector.errors import RecordingError
from lanterne.collector.recording import BATCH, CLOCK, Header, Received
from lanterne.collector.replay_bins import Binned
from lanterne.collector.replay_series import Series
from lanterne.proto import telemetry_pb2 as pb
from tests.fixtures import feeder

NS = 10**9
T0 = 5_000 * NS
STEPS = NS // feeder.STEP_NS


def window(number: int, *, late_ns: int = feeder.LATE_NS, node: str = "fed0") -> bytes:
    """A second of the fed job, encoded, with the slow rank so late."""
    message = pb.Batch.FromString(
        feeder.batch(node, 7, number + 1, T0 + number * NS, number * STEPS, STEPS)
    )
    message.realtime_offset_ns = 10**18
    if late_ns != feeder.LATE_NS:
        rng = np.random.default_rng(number)
        rank = np.frombuffer(message.instances.communicator, "<u4")
        duration = np.frombuffer(message.instances.duration_ns, "<u8").astype(np.int64)
        arrival = np.frombuffer(message.instances.arrival_ns, "<u8").astype(np.int64)
        slow = rank == feeder.SLOW
        shift = late_ns - feeder.LATE_NS + rng.integers(-50_000, 50_000)
        arrival = arrival + np.where(slow, shift, 0)
        duration = duration + np.where(slow, 0, shift)
        message.instances.arrival_ns = arrival.astype("<u8").tobytes()
        message.instances.duration_ns = duration.astype("<u8").tobytes()
    data: bytes = message.SerializeToString()
    return data


def with_experts(data: bytes, number: int) -> bytes:
    """The batch, with what an engine tells of its 8 experts in 2 layers, and its latency."""
    message = pb.Batch.FromString(data)
    counts = np.full((2, 8), 100.0) + np.arange(8) + number
    counts[:, 3] = 400.0
    message.expert_loads.add(
        workload="fed", engine="own", source="intake", model="tiny", unit=pb.UNIT_LOGICAL, rows=2,
        experts=8, layer=np.arange(2, dtype="<u4").tobytes(), counts=counts.astype("<f8").tobytes(),
        rank_of_expert=np.arange(8, dtype="<u4").tobytes(),
    )  # fmt: skip
    reading = message.engine_readings.add(workload="fed", engine="own", address="intake")
    reading.values["ttft_p95"] = 0.2 + 0.001 * number
    encoded: bytes = message.SerializeToString()
    return encoded


def record(path: Path, batches: list[bytes], *, extra: list[Received] = []) -> Path:  # noqa: B006
    header = Header("boot", 2 * 10**18, T0, "0.1.0", {"window_seconds": 2.0, "cells": 1 << 18})
    items = [
        Received(
            T0 + (i + 1) * NS + 1_000_000,
            BATCH,
            pb.Frame(node="fed0", sent_ns=1, batch=data).SerializeToString(),
        )
        for i, data in enumerate(batches)
    ]
    items = sorted([*items, *extra])
    blocks = [recording.frames_block([recording.record(item)]) for item in items]
    path.write_bytes(recording.header_block(header) + b"".join(blocks))
    return path


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    return record(folder / "slow.ltr", [window(n) for n in range(24)])


@pytest.fixture(scope="module")
def better(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    return record(folder / "better.ltr", [window(n, late_ns=2_000_000) for n in range(24)])


def command(*arguments: str, seed: str = "0") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / "lanterne-collector"), *arguments],
        env=dict(os.environ) | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_slow_rank_is_named_with_its_share_of_the_whole(slow: Path) -> None:
    source, series = offline.series_of(slow)
    assert source.batches == source.frames == 24
    assert source.seconds == pytest.approx(24.0)
    assert source.start == pytest.approx((2 * 10**18 + 1_000_000) / NS)
    (named,) = series.named()
    assert (named.rank, named.workload, named.comm) == (feeder.SLOW, "fed", "ep")
    assert named.klass == "slow_compute"
    # It is 8 ms late in each 20 ms.
    assert named.blame_share == pytest.approx(0.4, rel=0.02)
    (track,) = series.tracks.values()
    share = track.wait.matrix() / track.wait.width
    others = np.arange(feeder.RANKS) != feeder.SLOW
    np.testing.assert_allclose(share[others, 1:-1], 0.4, rtol=0.05)
    np.testing.assert_allclose(share[feeder.SLOW], 0.0, atol=1e-9)
    assert share.shape == (feeder.RANKS, 24)


def test_the_same_recording_gives_the_same_bytes(slow: Path, tmp_path: Path) -> None:
    made = []
    for seed in ("0", "1", "4711"):
        out, page = tmp_path / f"{seed}.json", tmp_path / f"{seed}.html"
        done = command("replay", str(slow), f"--json={out}", f"--html={page}", "--text", seed=seed)
        assert done.returncode == 0, done.stderr
        made.append((out.read_bytes(), page.read_bytes(), done.stdout))
    assert made[0] == made[1] == made[2]
    figures = json.loads(made[0][0])
    assert figures["cause"] == "slow_compute"
    assert [v["rank"] for v in figures["verdicts"]] == [feeder.SLOW]
    assert figures["recoverable_share"] == pytest.approx(0.4, rel=0.02)
    assert "Rank 5 of ep on fed0" in made[0][2]


def test_time_is_the_recordings_own(slow: Path) -> None:
    """Verdicts are those of the settings recorded, and a silence takes no time to replay."""
    source, files = replay.open_recording(slow)
    assert replay.engine_config(source.header.engine).window_seconds == 2.0
    moments = list(replay.snapshots(source, files))
    assert len(moments) == 24 + 1
    assert [m.at for m in moments] == sorted(m.at for m in moments)
    assert moments[0].snapshot.taken_at >= source.start


def test_a_silence_of_days_is_passed_over(tmp_path: Path) -> None:
    late = Received(
        T0 + 10 * 86_400 * NS, BATCH,
        pb.Frame(node="fed0", batch=window(10 * 86_400 - 1)).SerializeToString(),
    )  # fmt: skip
    path = record(tmp_path / "r", [window(n) for n in range(8)], extra=[late])
    source, files = replay.open_recording(path)
    moments = list(replay.snapshots(source, files))
    assert len(moments) < 2 * replay.GAP_SNAPSHOTS
    assert source.seconds > 9 * 86_400
    # The job had been forgotten in between: nothing is made up for the silence.
    assert not any(m.snapshot.ranks.straggler.any() for m in moments[-3:])


def test_frames_are_used_as_they_were_used(tmp_path: Path) -> None:
    clock = pb.ClockSample(
        agent_sent_ns=1000, collector_received_ns=2000, collector_sent_ns=2100,
        agent_received_ns=1500,
    )  # fmt: skip
    unused = pb.Frame(node="other", batch=window(0, node="other"), clock=clock)
    extra = [
        Received(T0 + 5, CLOCK, unused.SerializeToString()),
        Received(T0 + 6, BATCH, pb.Frame(node="fed0", batch=b"rubbish").SerializeToString()),
        Received(T0 + 7, BATCH, b"\xff\xff\xff"),
    ]
    path = record(tmp_path / "r", [window(n) for n in range(3)], extra=extra)
    source, files = replay.open_recording(path)
    last = list(replay.snapshots(source, files))[-1].snapshot
    assert [n.name for n in last.nodes] == ["fed0"]
    assert (source.frames, source.batches, source.refused) == (6, 3, 2)


def test_an_empty_recording_says_so(tmp_path: Path) -> None:
    path = record(tmp_path / "r", [])
    with pytest.raises(RecordingError, match="holds no frames"):
        offline.series_of(path)
    done = command("replay", str(path))
    assert done.returncode == 1
    assert "no agent reported" in done.stderr
    assert "Traceback" not in done.stderr


def test_bins_keep_sums_when_they_double() -> None:
    binned = Binned(8)
    for second in range(100):
        binned.spread(second, second + 1, np.array([1.0, 2.0]))
    assert binned.width == 16
    matrix = binned.matrix()
    assert matrix.shape == (2, 7)
    np.testing.assert_allclose(matrix.sum(axis=1), [100.0, 200.0])
    np.testing.assert_allclose(matrix[0, :6], 16.0)
    binned.spread(3.0, 3.0, np.array([5.0]))
    np.testing.assert_allclose(binned.matrix().sum(), 305.0)


def test_totals_that_begin_anew_are_not_negative() -> None:
    series = Series()
    assert series._more(("a",), np.array([3.0])).tolist() == [3.0]
    assert series._more(("a",), np.array([5.0])).tolist() == [2.0]
    assert series._more(("a",), np.array([1.0])).tolist() == [1.0]
    assert series._more(("a",), np.array([np.nan])).tolist() == [0.0]


def test_what_engines_tell_is_drawn_and_compared(tmp_path: Path) -> None:
    path = record(tmp_path / "r.ltr", [with_experts(window(n), n) for n in range(24)])
    pages = []
    for seed in ("0", "99"):
        out, page = tmp_path / f"{seed}.json", tmp_path / f"{seed}.html"
        done = command("replay", str(path), f"--json={out}", f"--html={page}", seed=seed)
        assert done.returncode == 0, done.stderr
        pages.append(out.read_bytes() + page.read_bytes())
    assert pages[0] == pages[1]
    (experts,) = json.loads((tmp_path / "0.json").read_text())["experts"]
    load = np.array(experts["load"])
    assert (experts["model"], len(load), int(load.argmax())) == ("tiny", 8, 3)
    assert "Load of each expert by layer" in (tmp_path / "0.html").read_text()
    done = command("compare", str(path), str(path), "--json=-")
    latency = json.loads(done.stdout)["workloads"][0]["figures"]["engine_ttft_p95"]
    assert 0.2 < latency["a"] < 0.23
    assert not latency["changed"]


# ---- the page


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "action", "data")]
        self.ids += [v or "" for k, v in attrs if k == "id"]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_but_itself(slow: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert command("replay", str(slow), f"--html={out}").returncode == 0
    text = out.read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.links == []
    assert not {"script", "link", "iframe", "img", "object", "embed"} & set(page.tags)
    assert "url(" not in text
    assert re.findall(r"https?://[^\"' ]+", text.replace("http://www.w3.org/2000/svg", "")) == []
    assert len(page.ids) == len(set(page.ids))
    assert page.tags.count("svg") >= 2
    # Every plot has a title and a description, and every table its head.
    assert page.tags.count("svg") == page.tags.count("desc")
    assert page.tags.count("table") == page.tags.count("thead")
    assert "prefers-color-scheme:dark" in text


def test_names_from_outside_cannot_become_markup(tmp_path: Path) -> None:
    message = pb.Batch.FromString(window(0))
    for communicator in message.communicators:
        communicator.name = "<script>alert(1)</script>"
        communicator.workload = '"><img src=x>'
    path = record(tmp_path / "r", [message.SerializeToString()])
    out = tmp_path / "page.html"
    assert command("replay", str(path), f"--html={out}").returncode == 0
    page = Page()
    page.feed(out.read_text())
    assert not {"script", "img"} & set(page.tags)
    assert "&lt;script&gt;" in out.read_text()


def test_an_output_that_cannot_be_written_is_told(slow: Path, tmp_path: Path) -> None:
    done = command("replay", str(slow), f"--json={tmp_path}/no/out.json")
    assert done.returncode == 1
    assert "no/out.json: cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


# ---- compare


def test_compare_says_what_changed_and_what_did_not(slow: Path, better: Path) -> None:
    done = command("compare", str(slow), str(better), "--json=-")
    assert done.returncode == 0, done.stderr
    (job,) = json.loads(done.stdout)["workloads"]
    figures = job["figures"]
    wait = figures["wait_seconds"]
    assert wait["changed"]
    # 7 of 8 ranks wait 8 ms, then 2 ms.
    assert wait["a"] == pytest.approx(7e-3, rel=0.02)
    assert wait["b"] == pytest.approx(1.75e-3, rel=0.05)
    assert wait["low"] <= wait["change"] <= wait["high"] < -0.6
    assert not figures["transfer_seconds"]["changed"]
    assert not figures["operations_per_second"]["changed"]
    text = command("compare", str(slow), str(better)).stdout
    assert "waiting in an operation" in text.split("\n\n")[1]
    assert "better" in text


def test_a_recording_against_itself_has_not_changed(slow: Path) -> None:
    done = command("compare", str(slow), str(slow), "--json=-")
    for figure in json.loads(done.stdout)["workloads"][0]["figures"].values():
        assert figure["change"] == pytest.approx(0, abs=1e-12)
        assert not figure["changed"]
    assert "Nothing changed" in command("compare", str(slow), str(slow)).stdout


def test_compare_names_jobs_that_are_not_there(slow: Path) -> None:
    done = command("compare", str(slow), str(slow), "--workload=other")
    assert done.returncode == 1
    assert "--workload other: not in recording A, which has 'fed'" in done.stderr


# ---- diagnose


def test_diagnose_names_the_rank_and_what_to_try(slow: Path, tmp_path: Path) -> None:
    out = tmp_path / "d.json"
    done = command("diagnose", str(slow), f"--json={out}")
    assert done.returncode == 3, done.stderr
    found = json.loads(out.read_text())
    first = found["findings"][0]
    assert (first["step"], first["severity"]) == ("stages", "critical")
    assert "rank 5 on fed0" in first["title"]
    assert first["evidence"]
    assert first["try"]
    assert [s["step"] for s in found["steps"]] == [
        "memory", "clocks", "stages", "skew", "bytes", "advice", "visibility",
    ]  # fmt: skip
    states = {s["step"]: s["state"] for s in found["steps"]}
    assert states["memory"] == "unknown"  # not sound: nobody reports it
    assert "not known: no agent reports GPU memory" in done.stdout


def test_diagnose_looks_at_a_job_that_ended_before_the_recording(tmp_path: Path) -> None:
    """Silence at the end of a recording is not what somebody wants diagnosed."""
    silent = [
        pb.Batch(schema=1, node="fed0", epoch=7, sequence=25 + n, stride=1,
                 start_ns=T0 + (24 + n) * NS, end_ns=T0 + (25 + n) * NS).SerializeToString()
        for n in range(15)
    ]  # fmt: skip
    path = record(tmp_path / "ended.ltr", [*(window(n) for n in range(24)), *silent])
    done = command("diagnose", str(path))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "the others wait for rank 5" in done.stdout
    assert "no longer" not in done.stdout


def test_the_plan_of_a_recording_in_which_only_an_engine_speaks(tmp_path: Path) -> None:
    batches = []
    for n in range(300):
        message = pb.Batch(schema=1, node="fed0", epoch=7, sequence=n + 1, stride=1,
                           start_ns=T0 + n * NS, end_ns=T0 + (n + 1) * NS)  # fmt: skip
        batches.append(with_experts(message.SerializeToString(), 0))
    path = record(tmp_path / "experts.ltr", batches)
    done = command("plan", str(path), "--format", "sglang")
    assert done.returncode == 0, done.stderr
    (first, second) = json.loads(done.stdout)["physical_to_logical_map"]
    for slots in (first, second):
        assert set(slots) == set(range(8)), "every expert is somewhere"
        assert slots.count(3) > 1, "the hottest is there twice"


def test_diagnose_says_where_it_cannot_look(tmp_path: Path) -> None:
    done = command("diagnose", "127.0.0.1:1")
    assert done.returncode == 1
    assert "no collector answers at http://127.0.0.1:1" in done.stderr
    done = command("diagnose", str(tmp_path / "absent"))
    assert done.returncode == 1
    assert "neither a file nor an address" in done.stderr
    assert command("diagnose", "a", "b").returncode == 2
