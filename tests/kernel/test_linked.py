"""NCCL linked into a program or a framework, and renamed copies: found, and every call counted."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lanterne.agent.doctor_view import library_rows, library_views
from lanterne.probes import catalog
from lanterne.probes.layout import Func
from tests.kernel.stub import Caller
from tests.rig.build import RigPaths, build
from tests.rig.known import result, seen_by_probes, start_calls
from tests.rig.linked import FORMS, build_linked

pytestmark = pytest.mark.kernel

WRAPPER = """
#include <stddef.h>
#define EXPORT __attribute__((visibility("default")))
int pncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int pncclGroupEnd(void);
EXPORT int ncclAllReduce(const void *a, void *b, size_t n, int t, int op, void *comm, void *s)
{ return pncclAllReduce(a, b, n, t, op, comm, s); }
EXPORT int ncclGroupEnd(void) { return pncclGroupEnd(); }
"""


@contextmanager
def held_calls(paths: RigPaths, folder: Path, **env: str) -> Iterator[subprocess.Popen[str]]:
    """`rigcall --known` with its libraries mapped, waiting for the file `start`."""
    command = [str(paths.call), "--known", "--ranks=3", "--repeat=4"]
    process = subprocess.Popen(
        [*command, f"--start-file={folder}/start"],
        env=dict(os.environ) | paths.env() | env, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def mapped_already(pid: int, name: str) -> None:
    end = time.monotonic() + 10
    while name not in Path(f"/proc/{pid}/maps").read_text():
        assert time.monotonic() < end
        time.sleep(0.01)


def functions_of(records: np.ndarray) -> dict[str, int]:
    return {
        f"nccl{name}": count
        for name, count in Counter(
            "".join(part.title() for part in Func(int(func)).name.split("_"))
            for func in records["func"]
        ).items()
    }


def scanned(attacher: Any, what: str) -> list[Any]:
    """What scans find until one finds nothing more: where many processes are young (other tests'),
    one scan does not read the maps of all."""
    found: list[Any] = []
    for _ in range(20):
        more = getattr(attacher.scan(), what)
        if found and not more:
            break
        found += more
    return found


@pytest.mark.parametrize("form", [form for form in FORMS if form != "program-stripped"])
def test_every_count(either: Any, tmp_path: Path, form: str) -> None:
    paths = build_linked(form)
    with held_calls(paths, tmp_path) as process, either.attacher(paths.root) as attacher:
        mapped_already(process.pid, FORMS[form].library or "libcuda.so.1")
        found = scanned(attacher, "new_libraries")
        (library,) = [one for one in found if one.kind == "nccl"]
        assert library.state == "attached", library.error
        assert Path(library.path).name == (FORMS[form].library or "rigcall")
        assert library.nccl_version == 22809
        # Without debugging information they are in the getters' machine code, read on x86-64 only.
        if not FORMS[form].stripped or platform.machine() == "x86_64":
            assert library.comm_offsets is not None
        by_check = catalog.ENQUEUE_CHECK_ID in {site.row for site in library.sites}
        assert by_check == (not FORMS[form].stripped)
        either.ring.drain(1 << 20)
        (tmp_path / "start").touch()
        calls = result(process)["calls"]
        records = either.records(process.pid)
    seen = seen_by_probes(calls)
    assert len(records) == seen["ncclEnqueueCheck"]
    told = functions_of(records)
    assert told["ncclAllReduce"] == seen["ncclAllReduce"] > 0
    assert told["ncclSend"] == seen["ncclSend"] > 0


def test_a_copy_without_symbols_is_told(either: Any, tmp_path: Path) -> None:
    """It cannot be probed: a failed library with the remedy, for the collector and for doctor."""
    paths = build_linked("program-stripped")
    with held_calls(paths, tmp_path) as process, either.attacher(paths.root) as attacher:
        mapped_already(process.pid, "libcuda.so.1")
        failed = scanned(attacher, "failed")
        (library,) = [one for one in attacher.libraries.values() if one.kind == "nccl"]
        assert library.state == "failed"
        assert "static NCCL without symbols (2.28.9)" in library.error
        assert Path(library.path).name == "rigcall"
        assert len(failed) == 1
        rows = library_rows(library_views(attacher.libraries, attacher.processes))
        assert [row.status for row in rows if "without symbols" in row.detail] == ["warn"]


def test_wrapper_and_caller_are_not_taken_for_the_library(either: Any, tmp_path: Path) -> None:
    """A preloaded wrapper defines ncclX, a caller uses them: either would count a call twice."""
    paths = build(dest=tmp_path)
    source = tmp_path / "wrapper.c"
    source.write_text(WRAPPER)
    wrapper = tmp_path / "libnccl_trace_wrapper.so.1"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(wrapper), str(source), str(paths.nccl)], check=True
    )
    renamed = wrapper.rename(tmp_path / "trace_nccl.so")
    with (
        held_calls(paths, tmp_path, LD_PRELOAD=str(renamed)) as process,
        either.attacher(tmp_path) as attacher,
    ):
        mapped_already(process.pid, "libcuda.so.1")
        found = scanned(attacher, "new_libraries")
        assert sorted(Path(one.path).name for one in found) == ["libcuda.so.1", "libnccl.so.2"]
        either.ring.drain(1 << 20)
        (tmp_path / "start").touch()
        calls = result(process)["calls"]
        assert len(either.records(process.pid)) == seen_by_probes(calls)["ncclEnqueueCheck"]


def test_two_versions_in_one_process(either: Any, tmp_path: Path) -> None:
    """Each file has offsets and probes of its own."""
    folders = [build("normal", tmp_path / "new"), build("old", tmp_path / "old")]
    with Caller(*(paths.nccl for paths in folders)) as caller:
        with either.attacher(tmp_path) as attacher:
            assert not attacher.scan().failed
            libraries = [x for x in attacher.libraries.values() if x.kind == "nccl"]
            assert sorted(x.nccl_version or 0 for x in libraries) == [22105, 22809]
            assert len({x.comm_offsets for x in libraries}) == 2
            keys = attacher.processes[caller.pid].libraries
            assert {attacher.libraries[key].path for key in keys} >= {x.path for x in libraries}


def test_replaced_file_is_another_library(either: Any, tmp_path: Path) -> None:
    """An upgrade under running processes: both inodes are attached while both are mapped."""
    paths = build(dest=tmp_path)
    with ExitStack() as held:
        attacher = held.enter_context(either.attacher(tmp_path))
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        before = held.enter_context(held_calls(paths, tmp_path / "a"))
        mapped_already(before.pid, "libcuda.so.1")
        attacher.scan()
        shutil.copy2(paths.nccl, tmp_path / "new")
        (tmp_path / "new").replace(paths.nccl)
        after = held.enter_context(held_calls(paths, tmp_path / "b"))
        mapped_already(after.pid, "libcuda.so.1")
        assert not attacher.scan().failed
        assert [x.kind for x in attacher.libraries.values()].count("nccl") == 2
        either.ring.drain(1 << 20)
        for process, folder in ((before, "a"), (after, "b")):
            (tmp_path / folder / "start").touch()
            calls = result(process)["calls"]
            expected = seen_by_probes(calls)["ncclEnqueueCheck"]
            assert len(either.records(process.pid)) == expected


def test_deleted_before_the_agent_came(either: Any, tmp_path: Path) -> None:
    """Only map_files leads to it."""
    paths = build(dest=tmp_path)
    with start_calls("--known", paths=paths, start_file=tmp_path / "start") as process:
        mapped_already(process.pid, "libcuda.so.1")
        paths.nccl.unlink()
        with either.attacher(tmp_path) as attacher:
            attacher.scan()
            (library,) = [x for x in attacher.libraries.values() if x.kind == "nccl"]
            assert library.state == "attached", library.error
            either.ring.drain(1 << 20)
            (tmp_path / "start").touch()
            calls = result(process)["calls"]
            assert len(either.records(process.pid)) == seen_by_probes(calls)["ncclEnqueueCheck"]
