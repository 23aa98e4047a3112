"""A placement of experts in the forms that serving engines read. Pure.

sglang: JSON for --init-expert-location, one row a layer of experts, in the order of the model.
vllm-ascend: JSON for expert_map_path. npy: int64[layers, slots], the physical-to-logical map as
vLLM's load balancer holds it. json: everything, numbers of layers included.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lanterne.collector.errors import PlanError

FORMATS = ("json", "sglang", "vllm-ascend", "npy")


def export(plan: Mapping[str, Any], form: str) -> bytes:
    """`plan`: as `/api/v1/advice` gives it. Raises PlanError where the form cannot hold it."""
    try:
        table = np.array(plan["physical_to_logical_map"], dtype=np.int64)
        layers, gpus = [int(n) for n in plan["layers"]], int(plan["gpus"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise PlanError(f"the collector's plan is not as expected: {error!r}") from error
    if table.ndim != 2 or len(layers) != len(table) or gpus < 1 or table.shape[1] % gpus:
        raise PlanError(f"the collector's plan is not as expected: {table.shape}, {gpus} GPUs")
    if form == "json":
        return _json(dict(plan))
    if form == "npy":
        buffer = io.BytesIO()
        np.save(buffer, table, allow_pickle=False)
        return buffer.getvalue()
    if form == "sglang":
        # Rows are every layer of the model, counted from 0: dense layers at its start hold none.
        full = np.tile(_trivial(table), (layers[-1] + 1, 1))
        full[layers] = table
        return _json({"physical_to_logical_map": full.tolist()})
    if form == "vllm-ascend":
        return _json(_expert_map(table.reshape(len(table), gpus, -1).tolist()))
    raise PlanError(f"no form {form!r}; there are {', '.join(FORMATS)}")


def _trivial(table: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What such an engine starts with: in order, over again in the added slots."""
    trivial: np.ndarray[Any, np.dtype[np.int64]] = np.arange(table.shape[1]) % (table.max() + 1)
    return trivial


def _expert_map(layers: Sequence[Sequence[Sequence[int]]]) -> dict[str, Any]:
    return {
        "moe_layer_count": len(layers),
        "layer_list": [
            {
                "layer_id": i,
                "device_count": len(devices),
                "device_list": [
                    {"device_id": d, "device_expert": experts} for d, experts in enumerate(devices)
                ],
            }
            for i, devices in enumerate(layers)
        ],
    }


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
