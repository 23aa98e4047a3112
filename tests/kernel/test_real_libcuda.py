"""NVIDIA's own libcuda, without a GPU: probes stand at its exports, fire, and count exactly.

The library is not free and not part of this project. It is read from build/libcuda, where
LANTERNE_REAL_LIBCUDA=1 puts it: the distribution's package from its section non-free, downloaded
with apt and unpacked, never installed. Without it these tests skip, also where kernel tests must
run; with it they fail where it cannot be had.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lanterne.agent.elf import open_regular
from lanterne.agent.library import examine
from lanterne.probes import catalog
from lanterne.probes.catalog import Library, Program
from lanterne.probes.layout import Stream
from tests.kernel.conftest import Loaded, Scene
from tests.kernel.stub import Caller

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300)]

FOLDER = Path(__file__).resolve().parents[2] / "build" / "libcuda"
ASKED = os.environ.get("LANTERNE_REAL_LIBCUDA", "") not in ("", "0")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
NO_DEVICE = 100
NAMED = 0x7F00_0000_1000
# Not in every driver: 535 has no cuCtxCreate_v4 (12.5), and none before it BeginCaptureToGraph.
NEWER = {
    "cuCtxCreate_v4", "cuStreamBeginCaptureToGraph", "cuStreamBeginCaptureToGraph_ptsz",
}  # fmt: skip


def _download() -> None:
    """Into FOLDER, by apt with lists and archives of its own. Raises CalledProcessError."""
    suite = subprocess.run(
        ["sh", "-c", '. /etc/os-release; echo "$VERSION_CODENAME"'],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    apt = FOLDER / "apt"
    for part in ("lists/partial", "archives/partial"):
        (apt / part).mkdir(parents=True, exist_ok=True)
    (apt / "sources.list").write_text(
        f"deb [signed-by={KEYRING}] http://deb.debian.org/debian {suite} non-free\n"
    )
    settings = {
        "Dir::Etc::sourcelist": apt / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::Lists": apt / "lists",
        "Dir::Cache": apt,
        "Dir::Cache::archives": apt / "archives",
        "APT::Sandbox::User": "root",
    }
    options = [f"-o{name}={value}" for name, value in settings.items()]
    for command in (["update", "-q"], ["download", "-q", "libcuda1"]):
        subprocess.run(["apt-get", *options, *command], cwd=apt, check=True, timeout=120)
    (package,) = apt.glob("libcuda1_*.deb")
    subprocess.run(["dpkg-deb", "-x", package, FOLDER], check=True, timeout=60)
    shutil.rmtree(apt)


@pytest.fixture(scope="module")
def real() -> Path:
    found = sorted(FOLDER.glob("usr/lib/*/**/libcuda.so.[0-9]*.*"))
    if not found and not ASKED:
        pytest.skip("no real libcuda in build/libcuda: LANTERNE_REAL_LIBCUDA=1 fetches NVIDIA's")
    if not found:
        FOLDER.mkdir(parents=True, exist_ok=True)
        _download()
        found = sorted(FOLDER.glob("usr/lib/*/**/libcuda.so.[0-9]*.*"))
    return found[0]


@pytest.fixture
def scene(real: Path, loaded: Loaded, tmp_path: Path) -> Iterator[Scene]:
    """A copy, so that nobody else's process is seen."""
    library = Path(shutil.copy(real, tmp_path / "libcuda.so.1"))
    with Caller(library) as caller, loaded.attacher(tmp_path) as attacher:
        scan = attacher.scan()
        assert not scan.failed
        assert [(one.kind, one.state) for one in scan.new_libraries] == [("cuda", "attached")]
        yield Scene(loaded, attacher, caller, [library])


def rows(*programs: Program) -> list[catalog.Row]:
    found = [row for row in catalog.ROWS if row.library is Library.CUDA]
    return [row for row in found if not programs or row.program in programs]


def test_every_function_is_exported(real: Path) -> None:
    fd = open_regular(real)
    try:
        library = examine(fd, "cuda", str(real), str(real))
    finally:
        os.close(fd)
    names = {row.symbol for row in rows()}
    assert names - NEWER <= {site.symbol for site in library.sites} <= names
    assert not library.dropped


@pytest.mark.parametrize("loaded", ["multi", "perf"], indirect=True)
def test_launches_are_counted_exactly(scene: Scene) -> None:
    call, caller = scene.caller.call, scene.caller
    assert call("cuInit", 0) & 0xFFFFFFFF == NO_DEVICE
    config = caller.memory(bytes(32) + NAMED.to_bytes(8, "little") + bytes(16))
    wanted: dict[tuple[Stream, str], int] = {}
    for number, row in enumerate(rows(Program.LAUNCH, Program.GRAPH_LAUNCH), 1):
        per_thread = row.symbol.endswith("_ptsz")
        arguments: tuple[int, ...]
        if row.program is Program.GRAPH_LAUNCH:
            arguments, kind = (0, 0), Stream.PER_THREAD if per_thread else Stream.LEGACY
        elif "Ex" in row.symbol:
            arguments, kind = (config, 0, 0, 0), Stream.NAMED
        else:
            arguments, kind = (0, 1, 1, 1, 32, 1, 1, 0, 2, 0, 0), Stream.PER_THREAD
        assert call(row.symbol, *arguments, times=number) & 0xFFFFFFFF, row.symbol
        what = "graph_launches" if row.program is Program.GRAPH_LAUNCH else "launches"
        wanted[kind, what] = wanted.get((kind, what), 0) + number
    use = scene.loaded.programs.cuda()[caller.pid]
    found = {
        (Stream(one.stream), what): getattr(one, what)
        for one in use.bins
        for what in ("launches", "graph_launches")
        if getattr(one, what)
    }
    assert found == wanted
    assert {one.device for one in use.bins} == {-1}


@pytest.mark.parametrize("loaded", ["multi", "perf"], indirect=True)
def test_calls_that_fail_wait_for_nothing_and_change_nothing(scene: Scene) -> None:
    """No GPU: each returns an error through its return probe, which takes it for none."""
    before = scene.loaded.programs.counters()
    failing = rows(Program.SYNC, Program.CAPTURE_BEGIN, Program.CAPTURE_END, Program.CONTEXT)
    for row in failing:
        if row.symbol not in NEWER:
            slot = scene.caller.memory(bytes(16))
            assert scene.caller.call(row.symbol, slot, slot, 0, times=3) & 0xFFFFFFFF, row.symbol
    scene.caller.call("cuLaunchKernel", *[0] * 11)
    use = scene.loaded.programs.cuda()[scene.caller.pid]
    assert (use.launches, use.syncs, use.steps) == (1, 0, 0)
    assert [one.device for one in use.bins] == [-1]
    after = scene.loaded.programs.counters()
    changed = {name for name, value in after.items() if value != before[name]}
    assert changed <= {"nested"}


ASK = """
import ctypes, json, sys
lib = ctypes.CDLL(sys.argv[1])
found = {}
for name in json.loads(sys.argv[2]):
    for flags, end in ((1, ""), (2, "_ptsz")):
        pointer, status = ctypes.c_void_p(), ctypes.c_int()
        code = lib.cuGetProcAddress_v2(name.encode(), ctypes.byref(pointer), 12020,
                                       ctypes.c_uint64(flags), ctypes.byref(status))
        export = ctypes.cast(getattr(lib, name + end), ctypes.c_void_p).value
        found[name + end] = [code, pointer.value == export]
print(json.dumps(found))
"""


def test_the_runtime_gets_the_probed_addresses(real: Path) -> None:
    """What cuGetProcAddress gives, by which every CUDA runtime gets at the driver."""
    assert ctypes.sizeof(ctypes.c_void_p) == 8
    names = ["cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel", "cuGraphLaunch",
             "cuStreamSynchronize"]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", ASK, str(real), json.dumps(names)],
                          capture_output=True, text=True, check=True, timeout=60)  # fmt: skip
    found = json.loads(done.stdout)
    assert found == {name + end: [0, True] for name in names for end in ("", "_ptsz")}
