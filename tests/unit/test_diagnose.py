"""Each step of `diagnose` on views made by hand: what is found, what is sound, what is unknown."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from lanterne.collector import diagnose_report
from lanterne.collector.diagnose import diagnose
from lanterne.collector.diagnose_findings import STEPS, Looked, ranked

GIB = 1 << 30


def histogram(count: int, seconds: float) -> dict[str, object]:
    return {"bins": [], "count": count, "sum_seconds": seconds}


def view() -> dict[str, Any]:
    """A sound job of four ranks on two nodes, with everything known."""
    return {
        "nodes": [
            {"name": f"n{i}", "connected": True, "events_lost": {"ring": 0},
             "libraries_failed": [], "sources": {"uprobes": True}}
            for i in range(2)
        ],
        "gpus": [
            {"node": i // 2, "index": i % 2, "throttle_reasons": [],
             "values": {"memory_used_bytes": 70 * GIB, "memory_total_bytes": 80 * GIB,
                        "sm_clock_hertz": 1.9e9, "sm_clock_max_hertz": 1.98e9}}
            for i in range(4)
        ],
        "communicators": [
            {"name": "ep", "n_ranks": 4, "evidence": "device", "absent_reason": "",
             "absent_code": "", "wait_share": 0.01,
             "dispatch": {"device": histogram(100, 0.1)},
             "combine": {"device": histogram(100, 0.11)},
             "load": {"skew": 1.05, "gini": 0.02, "balancedness": 0.95},
             "bytes_by_domain": {"same_gpu": [0] * 4, "same_node": [9] * 4, "cross_node": [1] * 4,
                                 "unknown": [0] * 4}}
        ],
        "ranks": {
            "comm": [0] * 4, "rank": [0, 1, 2, 3], "node": [0, 0, 1, 1], "gpu": ["0", "1"] * 2,
            "evidence": ["device"] * 4, "straggler": [0] * 4, "class": ["none"] * 4,
            "blame_share": [0.0] * 4, "straggler_ratio": [1.0] * 4, "confidence": [0.0] * 4,
            "samples": [100] * 4, "comm_seconds": [10.0] * 4, "compute_seconds": [40.0] * 4,
            "recoverable_share": [], "why": [],
        },
    }  # fmt: skip


def step(found: list[Looked], name: str) -> Looked:
    return found[STEPS.index(name)]


def test_a_sound_job_has_no_findings_and_says_what_was_seen() -> None:
    found = diagnose(view())
    assert [s.step for s in found] == list(STEPS)
    assert ranked(found) == []
    assert [s.step for s in found if s.unknown] == ["advice"]
    assert all(s.seen or s.unknown for s in found)
    assert diagnose_report.status(found) == 0


def test_nothing_known_is_not_sound() -> None:
    nothing = {"nodes": [], "gpus": [], "communicators": [], "ranks": {"comm": []}}
    found = diagnose(nothing)
    assert all(s.unknown for s in found)
    assert {s["state"] for s in diagnose_report.as_json(found, "x")["steps"]} == {"unknown"}  # type: ignore[attr-defined]
    assert "Nothing could be looked at" in diagnose_report.document(found, "x").lead


@pytest.mark.parametrize(("used", "severity"), [(76.5, "warning"), (79.5, "critical")])
def test_memory_that_is_nearly_full(used: float, severity: str) -> None:
    job = view()
    job["gpus"][3]["values"]["memory_used_bytes"] = used * GIB
    (finding,) = step(diagnose(job), "memory").findings
    assert finding.severity == severity
    assert "GPU 1 of n1" in finding.title
    assert f"{used:.1f} GiB of 80.0 GiB" in finding.evidence[0]


def test_memory_that_is_uneven_or_mostly_free_is_a_notice() -> None:
    job = view()
    job["gpus"][0]["values"]["memory_used_bytes"] = 40 * GIB
    (finding,) = step(diagnose(job), "memory").findings
    assert (finding.severity, finding.title) == ("notice", "GPU memory is used unevenly")
    for gpu in job["gpus"]:
        gpu["values"]["memory_used_bytes"] = 30 * GIB
    (finding,) = step(diagnose(job), "memory").findings
    assert "of its memory free" in finding.title
    assert diagnose_report.status(diagnose(job)) == 0


def test_a_clock_held_down_and_an_idle_one() -> None:
    job = view()
    job["gpus"][2]["throttle_reasons"] = ["hw_thermal"]
    job["gpus"][1]["throttle_reasons"] = ["idle", "applications_clocks"]
    (finding,) = step(diagnose(job), "clocks").findings
    assert "GPU 0 of n1 holds its clock down" in finding.title
    assert "hw_thermal" in finding.evidence[0]


def named(job: dict[str, Any], rank: int, blame: float, klass: str = "slow_sender") -> None:
    for column, value in (
        ("straggler", 1), ("class", klass), ("blame_share", blame), ("straggler_ratio", 1.4),
        ("confidence", 0.9),
    ):  # fmt: skip
        job["ranks"][column][rank] = value


def test_named_ranks_come_first_by_what_they_cost() -> None:
    job = view()
    named(job, 1, 0.05)
    named(job, 2, 0.08)
    job["communicators"][0]["load"]["skew"] = 2.5
    found = ranked(diagnose(job))
    assert [f.severity for f in found] == ["critical", "warning", "warning"]
    assert "fullest rank gets 2.50 times the mean" in found[0].title
    assert "rank 2 on n1, GPU 0 (slow sender)" in found[1].title
    assert "rank 1 on n0" in found[2].title
    assert "link" in found[1].try_[0]
    named(job, 3, 0.3)
    assert "rank 3" in ranked(diagnose(job))[1].title


def test_waiting_for_no_one_in_particular() -> None:
    job = view()
    job["communicators"][0]["wait_share"] = 0.15
    (finding,) = ranked(diagnose(job))
    assert finding.severity == "warning"
    assert "for no one in particular" in finding.title


def test_halves_that_differ_and_transfers_above_computing() -> None:
    job = view()
    job["communicators"][0]["combine"] = {"device": histogram(100, 0.3)}
    (finding,) = step(diagnose(job), "stages").findings
    assert "combine takes 3.0 times as long" in finding.title
    assert "expert side" in finding.try_[0]
    job["ranks"]["comm_seconds"] = [60.0] * 4
    titles = [f.title for f in step(diagnose(job), "stages").findings]
    assert any("transfers take 1.5 times as long as computing" in t for t in titles)


def test_bytes_that_cross_nodes() -> None:
    job = view()
    job["communicators"][0]["bytes_by_domain"]["cross_node"] = [36] * 4
    (finding,) = step(diagnose(job), "bytes").findings
    assert "80.0 % of its bytes cross nodes" in finding.title


def test_expert_counts_of_the_engine() -> None:
    experts = {
        "experts": [
            {"workload": "w", "model": "m", "source": "sglang", "top": [[7, 3, 1]],
             "summary": {"balancedness_min": 0.4, "excess_gini_max": 0.5}},
            {"workload": "w", "model": "even", "source": "sglang", "top": [],
             "summary": {"balancedness_min": 0.97, "excess_gini_max": 0.01}},
        ]
    }  # fmt: skip
    (finding,) = step(diagnose(view(), experts), "skew").findings
    assert finding.severity == "critical"
    assert "m: in its worst layer the ranks are 40.0 % balanced" in finding.title
    assert any("7, 3, 1" in e for e in finding.evidence)


def test_what_is_not_seen_is_told() -> None:
    job = view()
    job["nodes"][1] |= {"connected": False, "events_lost": {"ring": 5}, "sources": {"nvml": False}}
    blind = copy.deepcopy(job["communicators"][0])
    blind |= {"name": "tp", "evidence": "none", "absent_code": "host_ahead",
              "absent_reason": "collectives are enqueued ahead of the GPU", "wait_share": None,
              "load": {}, "bytes_by_domain": None, "dispatch": {}, "combine": {}}  # fmt: skip
    job["communicators"].append(blind)
    found = step(diagnose(job), "visibility").findings
    assert [f.severity for f in found] == ["warning", "notice"]
    assert set(found[0].evidence) == {
        "5 events lost (ring)", "source nvml fails", "its agent is not connected",
    }  # fmt: skip
    assert found[1].evidence == ("collectives are enqueued ahead of the GPU",)


def test_gpu_time_by_stage_and_idle_gpus() -> None:
    job = view()
    job["stages"] = [
        {"workload": "w", "span_seconds": 10.0, "bubble": bubble,
         "busy_seconds": {"expert_gemm": 4.0, "dispatch": 1.0}}
        for bubble in (0.4, 0.5, None)
    ]  # fmt: skip
    looked = step(diagnose(job), "stages")
    assert "expert gemm 40.0 %, dispatch 10.0 %" in looked.seen
    (finding,) = looked.findings
    assert "do nothing for 45.0 % of the time" in finding.title
    job["stages"][0]["bubble"] = job["stages"][1]["bubble"] = 0.05
    assert not step(diagnose(job), "stages").findings


def test_advice_is_passed_on_and_so_is_doing_nothing() -> None:
    def piece(kind: str, gain: float | None) -> dict[str, object]:
        return {"workload": "w", "kind": kind, "text": "Move them.", "gain": gain,
                "evidence": {"skew": 1.8}, "cost": {"gib": 2.0}, "reason": "the last 60 windows",
                "warning": "", "options": [], "plan": None}  # fmt: skip

    looked = step(diagnose(view(), {}, {"advice": [piece("placement", 0.07)]}), "advice")
    (finding,) = looked.findings
    assert finding.title == "w: placement may give back 7.0 % of the time"
    assert finding.evidence == ("the last 60 windows", "skew 1.8", "cost: gib 2")
    assert finding.try_ == ("Move them.",)
    looked = step(diagnose(view(), {}, {"advice": [piece("nothing", None)]}), "advice")
    assert looked.findings == []
    assert looked.seen == "w: leave it as it is"
