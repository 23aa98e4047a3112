"""SGLang's expert distribution recorder: its .pt dumps -> checked loads.

Layouts as of SGLang 0.5, each a dictionary in a file of torch.save:
- modes stat, stat_approx: `logical_count` [steps, layers, experts], added up over ranks;
- modes per_pass, per_token: `records`, one a forward pass and rank, with `global_physical_count`
  [layers, physical] or, without it, `topk_ids_of_layer` [layers, tokens, k], -1 padded; and
  `last_physical_to_logical_map` [layers, physical].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lanterne.agent.expert_counts import Load, load
from lanterne.agent.expert_formats import chosen_counts, even
from lanterne.agent.torch_file import read

PATTERN = "expert_distribution_recorder_*.pt"
SOURCE = "sglang_dump"


def read_dump(path: Path, *, workload: str = "", model: str = "", ranks: int = 0) -> Load:
    """The sum over all steps of one file. Raises ValueError or OSError.

    ranks: EP ranks, where known: physical experts lie on them in equal runs.
    """
    return load_of(read(path), workload=workload, model=model, ranks=ranks)


def load_of(dump: Any, *, workload: str = "", model: str = "", ranks: int = 0) -> Load:
    """The same of a dump that has been read. Raises ValueError."""
    if not isinstance(dump, dict):
        raise ValueError(f"is a {type(dump).__name__}, no dump of the recorder")
    facts = {"source": SOURCE, "engine": "sglang", "workload": workload, "model": model}
    if "logical_count" in dump:
        counts = _array("logical_count", dump["logical_count"], 3)
        return load(counts.sum(axis=0, dtype=np.float64), unit="logical", **facts)  # type: ignore[arg-type]
    if "records" in dump:
        counts, tokens = _records(dump)
        experts = counts.shape[1]
        replicas = dump.get("last_physical_to_logical_map")
        return load(
            counts,
            unit="physical",
            tokens=tokens,
            rank_of_expert=even(experts, ranks) if ranks else None,
            logical_of_physical=None
            if replicas is None
            else _array("last_physical_to_logical_map", replicas, 2),
            **facts,  # type: ignore[arg-type]
        )
    raise ValueError("has neither logical_count nor records: is it a dump of the recorder?")


def _records(
    dump: dict[Any, Any],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64] | None]:
    """-> [layers, physical] counts, [layers] tokens where they are known."""
    records = dump["records"]
    if not isinstance(records, list) or not records:
        raise ValueError("has no records: nothing was recorded")
    counts: npt.NDArray[np.float64] | None = None
    tokens: npt.NDArray[np.float64] | None = None
    for record in records:
        if not isinstance(record, dict):
            raise ValueError(f"has a {type(record).__name__} among its records")
        added = _counts(record, dump)
        if counts is not None and added.shape != counts.shape:
            raise ValueError(f"has records of shapes {counts.shape} and {added.shape}")
        counts = added if counts is None else counts + added
        chosen = record.get("topk_ids_of_layer")
        if chosen is not None:
            ids = _array("topk_ids_of_layer", chosen, 3)
            seen = (ids >= 0).any(axis=2).sum(axis=1).astype(np.float64)
            tokens = seen if tokens is None else tokens + seen
    assert counts is not None  # noqa: S101  (there is one record at least)
    return counts, tokens


def _counts(record: dict[Any, Any], dump: dict[Any, Any]) -> npt.NDArray[np.float64]:
    if record.get("global_physical_count") is not None:
        counts = _array("global_physical_count", record["global_physical_count"], 2)
        return counts.astype(np.float64)
    if record.get("topk_ids_of_layer") is None:
        raise ValueError("has a record without global_physical_count and topk_ids_of_layer")
    replicas = _array("last_physical_to_logical_map", dump.get("last_physical_to_logical_map"), 2)
    ids = _array("topk_ids_of_layer", record["topk_ids_of_layer"], 3)
    return chosen_counts(ids, replicas.shape[1])


def _array(name: str, value: Any, axes: int) -> npt.NDArray[Any]:
    if not isinstance(value, np.ndarray) or value.ndim != axes or value.dtype.kind not in "iu":
        raise ValueError(f"{name} is no tensor of whole numbers with {axes} axes")
    return value
