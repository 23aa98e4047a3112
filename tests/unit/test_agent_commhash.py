"""The hash of both NCCL generations, against values taken from the real library."""

from __future__ import annotations

import struct

import pytest

from lanterne.agent import commhash

UNIQUE_ID = bytes((37 * i + 11) & 255 for i in range(128))


def test_published_vectors() -> None:
    assert commhash.djb2a(UNIQUE_ID) == 0x65BB3B0CBA527185
    assert commhash.chained(UNIQUE_ID) == 0x3002DCD1BBE6653D


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (21803, 0x65BB3B0CBA527185),
        (22512, 0x65BB3B0CBA527185),
        (22602, 0x3002DCD1BBE6653D),
        (23203, 0x3002DCD1BBE6653D),
        (None, 0x3002DCD1BBE6653D),
    ],
)
def test_the_version_chooses_the_generation(version: int | None, expected: int) -> None:
    assert commhash.unique_id_hash(UNIQUE_ID, version) == expected


def test_split_up_to_2_23_ignores_the_count() -> None:
    text = b"%016x-%d" % (0xABC, 3)
    expected = commhash.djb2a(text.ljust(128, b"\0"))
    assert commhash.split_hash(0xABC, 1, 3, 22304) == expected
    assert commhash.split_hash(0xABC, 2, 3, 22304) == expected


def test_split_of_2_24_and_2_25_counts() -> None:
    text = b"%016x-%d-%d" % (0xABC, 2, 3)
    assert commhash.split_hash(0xABC, 2, 3, 22501) == commhash.djb2a(text.ljust(128, b"\0"))
    assert commhash.split_hash(0xABC, 1, 3, 22501) != commhash.split_hash(0xABC, 2, 3, 22501)


def test_split_from_2_26_eats_three_values() -> None:
    parts = struct.pack("<Q", 0xABC), struct.pack("<i", 2), struct.pack("<i", 3)
    assert commhash.split_hash(0xABC, 2, 3, 22602) == commhash.chained(*parts)
    # Each value mixes in its own length: one run of the same bytes is something else.
    assert commhash.chained(*parts) != commhash.chained(b"".join(parts))


def test_stable_hash_is_fixed_for_good_and_separates_its_parts() -> None:
    # The value must never change: agents of two releases must agree.
    assert commhash.stable_hash("a", "b") != commhash.stable_hash("ab", "")
    assert commhash.stable_hash("gloo") == 0xD1F5A404FAE4075
