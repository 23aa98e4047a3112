"""Duplicate suppression against a plain set, and its bounds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lanterne.collector.seen import EPOCHS, RANGES, Epoch, Seen


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=80))
def test_ranges_are_a_set(sequences: list[int]) -> None:
    epoch, plain = Epoch(), set()
    for sequence in sequences:
        assert epoch.has(sequence) == (sequence in plain)
        if sequence not in plain:
            epoch.add(sequence)
            plain.add(sequence)
    assert {s for s in range(1, 62) if epoch.has(s)} == plain
    flat = [bound for pair in epoch.ranges for bound in pair]
    assert flat == sorted(flat)


def test_in_order_delivery_keeps_one_range() -> None:
    epoch = Epoch()
    for sequence in range(57, 10_000):
        epoch.add(sequence)
    assert epoch.ranges == [[57, 9_999]]


def test_gaps_are_bounded_from_the_oldest() -> None:
    epoch = Epoch()
    for sequence in range(2, 4 * RANGES, 2):
        epoch.add(sequence)
    assert len(epoch.ranges) == RANGES
    assert epoch.has(3)  # a closed gap counts as applied
    assert not epoch.has(4 * RANGES - 3)
    assert epoch.closed_gaps > 0


def test_older_epoch_is_data_until_it_is_forgotten() -> None:
    seen = Seen()
    seen.add("n", 100, 1)
    assert seen.verdict("n", 50, 1) == "new"  # an older run's last batch, never seen
    seen.add("n", 50, 1)
    assert seen.verdict("n", 50, 1) == "duplicate"
    assert seen.verdict("n", 100, 1) == "duplicate"
    for epoch in range(101, 101 + EPOCHS):
        seen.add("n", epoch, 1)
    assert seen.verdict("n", 50, 2) == "stale"
    assert seen.verdict("n", 100, 1) == "stale"
    assert seen.verdict("n", 103, 2) == "new"
    assert seen.verdict("other", 50, 1) == "new"


def test_nodes_are_bounded() -> None:
    seen = Seen(nodes=2)
    for node in ("a", "b", "a", "c"):
        seen.add(node, 1, len(node))
    assert seen.verdict("a", 1, 1) == "duplicate"
    assert seen.verdict("b", 1, 1) == "new"  # the idlest was forgotten
