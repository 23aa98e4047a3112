"""What engines send or leave in files -> checked loads. Pure; errors are ValueErrors in words."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from lanterne.agent.expert_counts import MAX_EXPERTS, Load, load
from lanterne.agent.numpy_file import npy

Told = tuple[Load, bool]  # and whether the counts are totals since the engine's start

SOURCE = "intake"

T = TypeVar("T")


class _Told(msgspec.Struct, forbid_unknown_fields=True):
    counts: list[list[float]]
    workload: str = ""
    engine: str = ""
    model: str = ""
    unit: str = "logical"
    layers: list[int] | None = None
    tokens: list[float] | None = None
    rank_of_expert: Any = None
    logical_of_physical: Any = None
    source_rank: int | None = None
    cumulative: bool = False


class _Choice(msgspec.Struct):
    routed_experts: str | None = None


class _Response(msgspec.Struct):
    """The part of a completion, or of what a client makes of it, that matters here."""

    choices: list[_Choice] = []
    routed_experts: str | list[str] | None = None
    model: str = ""


def from_json(body: bytes) -> Told:
    """The body of POST /v1/experts: an object with `counts`, [layers][experts]."""
    told = _json(body, _Told)
    fields = {n: getattr(told, n) for n in _Told.__struct_fields__ if n != "cumulative"}
    for name in ("rank_of_expert", "logical_of_physical"):
        if fields[name] is not None:
            fields[name] = _whole(name, fields[name])
    return load(source=SOURCE, **fields), told.cumulative


def _whole(name: str, value: object) -> npt.NDArray[Any]:
    try:
        return np.array(value)
    except ValueError:
        raise ValueError(f"{name} has rows of different lengths") from None


def from_npy(body: bytes, query: Mapping[str, str]) -> Told:
    """The body is a .npy array [layers, experts]; the other fields are in the query."""
    return from_array(npy(body), query, source=SOURCE)


def from_array(counts: npt.NDArray[Any], fields: Mapping[str, str], *, source: str) -> Told:
    """counts: [layers, experts]; `fields` as in the query of POST /v1/experts."""
    known = {"workload", "engine", "model", "unit", "layers", "source_rank", "cumulative", "ranks"}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(f"unknown {unknown[0]!r}; there are {', '.join(sorted(known))}")
    ranks = _number("ranks", fields["ranks"]) if "ranks" in fields else 0
    made = load(
        counts,
        source=source,
        workload=fields.get("workload", ""),
        engine=fields.get("engine", ""),
        model=fields.get("model", ""),
        unit=fields.get("unit", "logical"),
        layers=[_number("layers", n) for n in fields["layers"].split(",")]
        if "layers" in fields
        else None,
        source_rank=_number("source_rank", fields["source_rank"])
        if "source_rank" in fields
        else None,
        rank_of_expert=even(counts.shape[-1], ranks) if ranks else None,
    )
    return made, fields.get("cumulative", "0") in ("1", "true")


def even(experts: int, ranks: int) -> npt.NDArray[np.int64]:
    """rank_of_expert where every rank has the same number of experts, in order."""
    if ranks < 1 or experts % ranks:
        raise ValueError(f"{experts} experts do not divide evenly over {ranks} ranks")
    return np.arange(experts) // (experts // ranks)


def from_routed(body: bytes, query: Mapping[str, str]) -> Told:
    """A completion of vLLM with --enable-return-routed-experts, or {"routed_experts": TEXT}.

    The query must say how many `experts` there are; it may have workload, model, layers and ranks.
    """
    if "experts" not in query:
        raise ValueError("the query must say how many experts there are, as in ?experts=256")
    experts = _number("experts", query["experts"])
    told = _json(body, _Response)
    alone = told.routed_experts
    texts = [c.routed_experts for c in told.choices if c.routed_experts is not None]
    texts += [alone] if isinstance(alone, str) else alone or []
    if not texts:
        raise ValueError("no routed_experts in the body")
    counted = [routed_counts(text, experts) for text in texts]
    if len({counts.shape for counts, _ in counted}) != 1:
        raise ValueError("routed_experts of one body have different numbers of layers")
    fields = {"engine": "vllm", "model": told.model} | dict(query)
    del fields["experts"]
    total = np.sum([counts for counts, _ in counted], axis=0)
    made, cumulative = from_array(total, fields, source="routed_experts")
    tokens = np.full(len(made.layer), float(sum(n for _, n in counted)))
    return replace(made, tokens=tokens), cumulative


def routed_counts(text: str, experts: int) -> tuple[npt.NDArray[np.float64], int]:
    """vLLM's `routed_experts`, the base64 of a .npy [tokens, layers, k].

    -> ([layers, experts] counts, tokens). -1 (or the largest value of the type, where it is
    unsigned and no expert) is padding.
    """
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"experts is {experts}, not 1 to {MAX_EXPERTS}")
    try:
        chosen = npy(base64.b64decode(text, validate=True))
    except binascii.Error as error:
        raise ValueError(f"routed_experts is no base64: {error}") from None
    if chosen.ndim != 3 or chosen.dtype.kind not in "iu":
        raise ValueError(
            f"routed_experts has shape {chosen.shape} of {chosen.dtype}; it must be whole numbers, "
            "[tokens, layers, k]"
        )
    return chosen_counts(chosen.transpose(1, 0, 2), experts), len(chosen)


def chosen_counts(chosen: npt.NDArray[Any], experts: int) -> npt.NDArray[np.float64]:
    """Assignments [layers, tokens, k], with padding as above -> [layers, experts]."""
    layers = chosen.shape[0]
    flat = chosen.reshape(layers, -1).astype(np.int64)
    largest = np.iinfo(chosen.dtype).max
    if chosen.dtype.kind == "u" and experts <= largest:
        flat[flat == largest] = -1
    if flat.size and not (flat.min() >= -1 and flat.max() < experts):
        raise ValueError(
            f"experts {flat.min()} to {flat.max()} were chosen; there are {experts}, from 0"
        )
    place = flat + np.arange(layers)[:, None] * experts
    load = np.bincount(place[flat >= 0], minlength=layers * experts)
    return load.reshape(layers, experts).astype(np.float64)


def _json(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the body: {error}") from None


def _number(name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is no whole number") from None
    if not 0 <= number <= 65_535:
        raise ValueError(f"{name}={number} is not 0 to 65535")
    return number
