"""The advice of a Snapshot as JSON. Unknown numbers are null: msgspec writes NaN so."""

from __future__ import annotations

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
        "gain": advice.gain,
        "evidence": dict(advice.evidence),
        "cost": dict(advice.cost),
        "reason": advice.reason,
        "warning": advice.warning,
        "options": advice.options,
        "plan": None
        if advice.plan is None
        else {
            "layers": advice.layers,
            "gpus": advice.gpus,
            "physical_to_logical_map": advice.plan.tolist(),
        },
    }
