"""What a batch may hold at most, and how one is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from lanterne.collector.errors import BatchRefused

_NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:-]{0,251}[A-Za-z0-9])?\Z")


@dataclass(frozen=True)
class Limits:
    """Largest accepted sizes of one batch."""

    batch_bytes: int = 8 << 20
    communicators: int = 8_192
    instances: int = 1 << 18
    summaries: int = 1 << 16
    traffic: int = 1 << 18
    stages: int = 1 << 15
    gpus: int = 64
    processes: int = 4_096
    text: int = 256
    entries: int = 64  # of a map or list in Health or Gpu


def refuse(code: str, reason: str) -> NoReturn:
    raise BatchRefused(code, reason)


def text(field: str, value: str, longest: int) -> str:
    """The value, where it is short enough and printable: texts end in labels and terminals."""
    if len(value) > longest:
        refuse("text", f"{field} has {len(value)} characters, the limit is {longest}")
    if not value.isprintable():
        refuse("text", f"{field} {value[:64]!r} holds characters that cannot be printed")
    return value


def check_node(node: str) -> None:
    """Raise BatchRefused unless `node` may become a label value: 1 to 253 letters, digits, ._:-"""
    if not _NODE.match(node):
        refuse("node", f"node {node[:64]!r} is not 1 to 253 of letters, digits and ._:-")
