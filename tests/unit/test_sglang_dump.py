"""The restricted reader of torch.save files, and SGLang's dumps in them.

The files in tests/fixtures/sglang were written by the real torch.save (see write_dumps.py there).
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanterne.agent import torch_file
from lanterne.agent.expert_files import ExpertFiles, Watched
from lanterne.agent.sglang_dump import load_of, read_dump
from lanterne.agent.torch_file import Machine, TorchFileError, read

DUMPS = Path(__file__).resolve().parents[1] / "fixtures" / "sglang"


def check_dumps(folder: Path) -> None:
    stat = read_dump(folder / "stat.pt", workload="w", model="m")
    assert (stat.unit, stat.workload, stat.model, stat.engine) == ("logical", "w", "m", "sglang")
    assert stat.counts.tolist() == (np.arange(12) * 2 + 12).reshape(3, 4).tolist()
    passes = read_dump(folder / "per_pass.pt", ranks=2)
    assert passes.unit == "physical"
    assert passes.counts.tolist() == [[2, 4, 6, 15], [8, 10, 12, 15]]
    assert passes.logical_of_physical is not None
    assert passes.logical_of_physical.tolist() == [[0, 1, 2, 0], [0, 1, 2, 2]]
    assert passes.rank_of_expert is not None
    assert passes.rank_of_expert.tolist() == [0, 0, 1, 1]
    tokens = read_dump(folder / "per_token.pt")
    assert tokens.counts.tolist() == [[1, 1, 0, 1], [1, 0, 2, 1]]
    assert tokens.tokens is not None
    assert tokens.tokens.tolist() == [2, 2]
    assert tokens.rank_of_expert is None
    (record,) = read(folder / "per_token.pt")["records"]
    assert record["misc_objects"] == [
        {"layer": 0, "sizes": [1, 2.5, None, True, "x", (1, 2, 3, 4)]}
    ]
    assert record["input_ids"] == list(range(300))
    assert record["sliced"].tolist() == [[1, 5, 9], [2, 6, 10], [3, 7, 11]]


def test_dumps_of_every_mode() -> None:
    check_dumps(DUMPS)


@pytest.mark.torch
def test_dumps_of_the_torch_that_is_installed(tmp_path: Path) -> None:
    python = os.environ.get("LANTERNE_TORCH_PYTHON")
    if not python:
        pytest.skip("LANTERNE_TORCH_PYTHON is not set: run make test-torch")
    subprocess.run([python, DUMPS / "write_dumps.py", tmp_path], check=True, timeout=100)
    check_dumps(tmp_path)


# -- Hostile files -------------------------------------------------------------------------------


def archive(
    pickled: bytes, storages: dict[str, bytes] | None = None, *, compress: bool = False
) -> io.BytesIO:
    file = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", method) as out:
        out.writestr("archive/data.pkl", pickled)
        out.writestr("archive/byteorder", b"little")
        for key, data in (storages or {}).items():
            out.writestr(f"archive/data/{key}", data)
    file.seek(0)
    return file


def saved(tmp_path: Path, *args: Any, **options: Any) -> Path:
    path = tmp_path / "hostile.pt"
    path.write_bytes(archive(*args, **options).getvalue())
    return path


class Call:
    """Pickles as a call of any function."""

    def __init__(self, what: Callable[..., Any], *given: Any) -> None:
        self.what, self.given = what, given

    def __reduce__(self) -> Any:
        return self.what, self.given


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "hostile",
    [
        lambda mark: Call(os.system, f"touch {mark}"),
        lambda mark: Call(eval, f"open('{mark}', 'w')"),
        lambda mark: Call(exec, f"open('{mark}', 'w')"),
        lambda mark: Call(getattr, "x", "upper"),
        lambda mark: {"records": [Call(subprocess.Popen, ["touch", str(mark)])]},
    ],
)
def test_calls_are_refused_and_nothing_runs(
    tmp_path: Path, hostile: Callable[[Path], Any], protocol: int
) -> None:
    mark = tmp_path / "mark"
    path = saved(tmp_path, pickle.dumps(hostile(mark), protocol))
    with pytest.raises(TorchFileError, match="which is not read"):
        read(path)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (b"\x80\x02ctorch\nload\n.", "torch.load, which is not read"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n.", "does not end in a value"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.", "in an unknown way"),
        (b"\x80\x02ccollections\nOrderedDict\n(K\x01tR.", "in an unknown way"),
        (b"\x80\x02ctorch\nIntStorage\n)R.", "in an unknown way"),
        (b"\x80\x02]}b.", "instruction BUILD"),
        (b"\x80\x02U\x01xP.", "damaged|not read"),
        (b"\x80\x02K\x01Q.", "no tensor storage"),
        (b"\x80\x02K\x01", "damaged|no end"),
        (b"\x80\x02.", "damaged"),
        (b"\x80\x02t.", "damaged|mark"),
        (b"\x80\x02h\x07.", "damaged"),
        (b"\x80\x02}K\x01a.", "no list"),
        (b"\x80\x02]K\x01K\x02s.", "no dictionary"),
        (b"\x80\x02}]K\x02s.", "list as a key"),
        (b"\x80\x02}]\x85K\x02s.", "damaged"),
        (b"\x80\x02K\x01K\x02.", "does not end"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "os.system"),
        (b"\x80\x02\x82\x01.", "instruction EXT1"),
        (b"(S'x'\nios\nsystem\n.", "not read"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f.", "damaged|not read"),
    ],
)
def test_hand_made_pickles_are_refused(tmp_path: Path, code: bytes, words: str) -> None:
    with pytest.raises(TorchFileError, match=words):
        read(saved(tmp_path, code))


def tensor(key: str = "0", count: int = 4, offset: int = 0, size: object = (4,),
           stride: object = (1,)) -> bytes:  # fmt: skip
    """A pickle of one float tensor whose parts may lie."""

    def small(value: object) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    storage = b"(" + small("storage") + b"ctorch\nFloatStorage\n" + small(key) + small("cpu")
    storage += small(count) + b"tQ"
    arguments = small(offset) + small(size) + small(stride)
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + arguments
    return b"\x80\x02" + call + b"\x89ccollections\nOrderedDict\n)RtR."


def test_an_honest_tensor_is_read(tmp_path: Path) -> None:
    data = {"0": struct.pack("<4f", 1, 2, 3, 4)}
    assert read(saved(tmp_path, tensor(), data)).tolist() == [1, 2, 3, 4]
    assert read(saved(tmp_path, tensor(size=(0, 3), stride=(3, 1)), data)).shape == (0, 3)
    assert read(saved(tmp_path, tensor(size=(2, 2), stride=(0, 1)), data)).tolist() == [[1, 2]] * 2


@pytest.mark.parametrize(
    "lies",
    [
        {"offset": 1}, {"offset": -1}, {"size": (5,)}, {"stride": (2,)}, {"stride": (-1,)},
        {"size": (-4,)}, {"size": (1 << 60,), "stride": (0,)}, {"size": (1 << 26,), "stride": (0,)},
        {"size": (2, 2)}, {"size": [4]}, {"key": "../data.pkl"}, {"key": "7"}, {"count": 2},
        {"size": (True,)}, {"size": (1,) * 20, "stride": (1,) * 20},
    ],
)  # fmt: skip
def test_tensors_that_lie_are_refused(tmp_path: Path, lies: dict[str, Any]) -> None:
    data = {"0": struct.pack("<4f", 1, 2, 3, 4)}
    with pytest.raises(TorchFileError):
        read(saved(tmp_path, tensor(**lies), data))


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = {"0": bytes(1 << 22)}
    with pytest.raises(TorchFileError, match="compressed"):
        read(saved(tmp_path, tensor(), zeros, compress=True))
    monkeypatch.setattr(torch_file, "MAX_STEPS", 100)
    with pytest.raises(TorchFileError, match="more than 100 instructions"):
        read(saved(tmp_path, b"\x80\x02]" + b"K\x01a" * 200 + b"."))
    monkeypatch.setattr(torch_file, "MAX_PICKLE_BYTES", 1000)
    with pytest.raises(TorchFileError, match="larger than 1000"):
        read(saved(tmp_path, b"\x80\x02" + pickle.dumps("x" * 2000, 2)))
    monkeypatch.setattr(torch_file, "MAX_FILE_BYTES", 10)
    with pytest.raises(TorchFileError, match="larger than 10"):
        read(DUMPS / "stat.pt")


def test_the_same_storage_again_and_again_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many tensors may share one storage; together they may not be read for ever."""
    one = tensor(count=1024, size=(1024,))[2:-1]
    code = b"\x80\x02](" + one * 50 + b"e."
    data = {"0": bytes(4096)}
    assert len(read(saved(tmp_path, code, data))) == 50
    monkeypatch.setattr(torch_file, "MAX_FILE_BYTES", 100_000)
    with pytest.raises(TorchFileError, match="larger than"):
        read(saved(tmp_path, code, data))


def test_files_that_are_none(tmp_path: Path) -> None:
    for data in (b"", b"PK", b"\x80\x02}.", b"PK\x03\x04" + bytes(100)):
        path = tmp_path / "x.pt"
        path.write_bytes(data)
        with pytest.raises(TorchFileError, match=r"no file of torch\.save"):
            read(path)


def test_an_escape_that_python_only_warns_of_is_damage() -> None:
    with pytest.raises(TorchFileError, match="invalid escape"):
        Machine(lambda *_: np.zeros(1)).run(b"S'\\K'\n.")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_dumps_are_read_or_refused(data: st.DataObject) -> None:
    with zipfile.ZipFile(DUMPS / "per_token.pt") as whole:
        name = next(n for n in whole.namelist() if n.endswith("data.pkl"))
        code = bytearray(whole.read(name))
    for _ in range(data.draw(st.integers(1, 5))):
        code[data.draw(st.integers(0, len(code) - 1))] = data.draw(st.integers(0, 255))
    machine = Machine(lambda *_: np.zeros(1))
    try:
        value = machine.run(bytes(code))
    except TorchFileError:
        return
    try:
        load_of(value)
    except ValueError:
        return


@pytest.mark.parametrize(
    ("dump", "words"),
    [
        ([], "list, no dump"),
        ({}, "neither logical_count nor records"),
        ({"logical_count": 5}, "no tensor"),
        ({"logical_count": np.zeros((2, 3))}, "3 axes"),
        ({"logical_count": np.full((1, 1, 1), -1)}, "0 to 2"),
        ({"records": []}, "nothing was recorded"),
        ({"records": [5]}, "int among its records"),
        ({"records": [{}]}, "without global_physical_count"),
        ({"records": [{"topk_ids_of_layer": np.zeros((1, 1, 1), int)}]}, "no tensor"),
        (
            {"records": [{"global_physical_count": np.ones((1, n), int)} for n in (2, 3)]},
            "records of shapes",
        ),
    ],
)
def test_dumps_that_are_none_are_refused_in_words(dump: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_of(dump)


# -- Watching a folder ---------------------------------------------------------------------------


def put(folder: Path, name: str, *, after: float, source: str = "stat.pt") -> Path:
    path = folder / f"expert_distribution_recorder_{name}.pt"
    shutil.copyfile(DUMPS / source, path)
    os.utime(path, (after, after))
    return path


def test_a_dump_counts_once_when_it_no_longer_grows(tmp_path: Path) -> None:
    put(tmp_path, "old", after=900.0)
    files = ExpertFiles((Watched(tmp_path, "sglang_dump", "w"),), clock=lambda: 1000.0)
    assert files.poll() == []
    new = put(tmp_path, "new", after=1001.0)
    assert files.poll() == []  # it may still grow
    (told,) = files.poll()
    assert told.workload == "w"
    assert files.poll() == []
    os.utime(new, (1005.0, 1005.0))  # written again
    assert files.poll() == []
    assert len(files.poll()) == 1


def test_a_broken_dump_is_counted_once_and_the_others_are_read(tmp_path: Path) -> None:
    files = ExpertFiles((Watched(tmp_path, "sglang_dump"),), clock=lambda: 1000.0)
    put(tmp_path, "a", after=1001.0).write_bytes(b"PK broken")
    put(tmp_path, "b", after=1001.0)
    files.poll()
    assert len(files.poll()) == 1
    assert files.failed == 1
    assert not files.working
    assert files.poll() == []
    assert files.working
    assert files.failed == 1


def test_numpy_files(tmp_path: Path) -> None:
    one, two = tmp_path / "one.npy", tmp_path / "two.npz"
    files = ExpertFiles(
        (Watched(one, "numpy", "w"), Watched(two, "numpy", ranks=2)), clock=lambda: 0.0
    )
    assert files.poll() == []
    assert not files.working  # they are not there yet
    np.save(one, np.ones((2, 4)))
    np.savez(two, counts=np.full((1, 4), 3), other=np.zeros(1))
    files.poll()
    first, second = files.poll()
    assert (first.workload, first.source, first.counts.shape) == ("w", "numpy", (2, 4))
    assert second.rank_of_expert is not None
    assert second.rank_of_expert.tolist() == [0, 0, 1, 1]
