"""The advice of a Snapshot as JSON. Unknown numbers are null."""

from __future__ import annotations

import math

import msgspec

from lanterne.collector.snapshot import AdviceView, Snapshot


def advice_json(snapshot: Snapshot) -> bytes:
    """Every piece with its evidence, cost, what else was weighed, and the plan."""
    return msgspec.json.encode(
        {"taken_at": snapshot.taken_at, "advice": [_piece(a) for a in snapshot.advice]}
    )


def _piece(advice: AdviceView) -> dict[str, object]:
    return {
        "workload": advice.workload,
        "kind": advice.kind,
        "text": advice.text,
        "gain": _known(advice.gain),
        "evidence": {name: _known(value) for name, value in advice.evidence.items()},
        "cost": {name: _known(value) for name, value in advice.cost.items()},
        "reason": advice.reason,
        "warning": advice.warning,
        "options": [
            {
                "kind": option.kind,
                "gain": _known(option.gain),
                "at_least": _known(option.at_least),
                "added_slots": option.added_slots,
                "moved_experts": option.moved_experts,
            }
            for option in advice.options
        ],
        "plan": None
        if advice.plan is None
        else {
            "layers": advice.layers,
            "gpus": advice.gpus,
            "physical_to_logical_map": advice.plan.tolist(),
        },
    }


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
