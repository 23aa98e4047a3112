"""Readers that are known to be bad, each in one way: the fuzzer must find every one of them."""

from __future__ import annotations

import ctypes
import re

from tests.fuzz.targets import Target

_CORPUS = [b"12,34,56;abcabcabc", b"7,8,9;xyz"]


def _error(data: bytes) -> object:
    return data.index(b";")  # ValueError where it is gone: not declared


def _memory(data: bytes) -> object:
    first = data.split(b",")[0]
    return bytearray(int(first) if first.isdigit() and len(first) < 15 else 0)


def _hang(data: bytes) -> object:
    return re.match(rb"^(\w+\s?)*$", b"a" * 60 + b"!") if len(data) < 10 else None


def _crash(data: bytes) -> object:
    return ctypes.string_at(0) if b";" not in data else None


PLANTED = {
    "planted_error": Target(lambda: _error, lambda: _CORPUS),
    "planted_memory": Target(lambda: _memory, lambda: _CORPUS),
    "planted_hang": Target(lambda: _hang, lambda: _CORPUS[:1]),
    "planted_crash": Target(lambda: _crash, lambda: _CORPUS),
}
