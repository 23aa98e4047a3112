"""The state file: what is kept comes back, and damage of any kind is noticed."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanterne.collector.state import MAGIC, StateError, StateFile, pack, unpack, usable

ITEMS = [
    ({"key": ["a", 1], "width": 5}, {"ring": np.arange(6, dtype=np.float32).reshape(1, 2, 3)}),
    ({"none": None}, {"stamp": np.array([7, 8]), "empty": np.zeros((0, 3), np.float64)}),
]


def test_what_is_kept_comes_back() -> None:
    found = unpack(pack(ITEMS))
    assert [facts for facts, _ in found] == [facts for facts, _ in ITEMS]
    for (_, before), (_, after) in zip(ITEMS, found, strict=True):
        assert list(before) == list(after)
        for name, values in before.items():
            np.testing.assert_array_equal(after[name], values)
            assert after[name].dtype == values.dtype
    assert unpack(pack([])) == []


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_one_changed_byte_is_noticed(data: st.DataObject) -> None:
    whole = bytearray(pack(ITEMS))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(StateError):
        unpack(bytes(whole))


@pytest.mark.parametrize("cut", [0, 1, 14, 40, 100, -1])
def test_a_file_that_was_cut_is_noticed(cut: int) -> None:
    with pytest.raises(StateError):
        unpack(pack(ITEMS)[:cut])


def test_another_version_is_named() -> None:
    whole = bytearray(pack(ITEMS))
    whole[len(MAGIC)] = 9
    with pytest.raises(StateError, match="has version 9, this collector reads 1"):
        unpack(bytes(whole))


def test_saving_replaces_the_file_whole_and_keeps_to_its_pace(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "s")
    assert state.due(1000.0, 30)
    state.save(ITEMS, 1000.0)
    state.close()
    assert not state.due(1010.0, 30)
    assert state.due(1030.0, 30)
    assert state.due(900.0, 30)  # the clock was set back
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    found: list[int] = []
    StateFile(tmp_path / "s").load(lambda items: found.append(len(items)))
    assert found == [2]
    assert state.errors == {"unreadable": 0, "corrupt": 0, "unwritable": 0}


def test_what_cannot_be_written_or_read_is_counted(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "absent" / "s")
    state.save(ITEMS, 1.0)
    state.close()
    assert state.errors["unwritable"] == 1
    assert state.saved_at == 0
    state.load(lambda _: pytest.fail("there is nothing"))
    assert state.errors["unreadable"] == 0  # a first start is no error
    (tmp_path / "folder").mkdir()
    folder = StateFile(tmp_path / "folder")
    folder.load(lambda _: pytest.fail("it is a folder"))
    assert folder.errors["unreadable"] == 1


def test_what_the_analysis_refuses_counts_as_corrupt(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "s")
    state.save(ITEMS, 1.0)
    state.close()

    def refuse(_: object) -> None:
        raise ValueError("not mine")

    state.load(refuse)
    assert state.errors["corrupt"] == 1


def test_without_a_path_nothing_happens() -> None:
    state = StateFile(None)
    assert not state.due(math.inf, 1)
    state.save(ITEMS, 1.0)
    state.close()
    state.load(lambda _: pytest.fail("there is nothing"))
    assert usable("") is None
    assert usable("/nonexistent-folder/x") is None


def test_the_folder_is_made_and_one_that_cannot_be_used_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert usable(str(tmp_path / "made")) == tmp_path / "made"
    assert (tmp_path / "made").is_dir()
    assert usable(str(tmp_path / "made")) == tmp_path / "made"
    assert not caplog.records
    (tmp_path / "file").touch()
    assert usable(str(tmp_path / "file")) is None
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "name a folder that this user may write to" in caplog.text
