"""NIXL EP and Mooncake EP, launched as DeepEP is: stand-ins with the mangled names of their wheels
(nixl-cu12 1.5.1, mooncake-transfer-engine 0.3.13.post1).

The positions of the arguments are counted by hand in the libraries' headers.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lanterne.probes.layout import CommFlag, CommKind, Flag, Func
from tests.kernel.conftest import Loaded, Scene
from tests.kernel.stub import Caller

pytestmark = pytest.mark.kernel

SEND, RECEIVE, BOTH = 1, 2, 3
STREAM = 0x7F00_1234_5670


@dataclass(frozen=True)
class Launcher:
    """Position of each argument, and how many there are."""

    library: str
    symbol: str
    func: Func
    count: int
    hidden: int
    top_k: int
    rank: int
    n_ranks: int
    eight_bit: int  # -1: it has none
    stream: int
    phases: int
    total: int


LAUNCHERS = (
    Launcher(
        "libmooncake_ep_device.so",
        "_ZN8mooncake8dispatchEPvPfPiPlS2_S2_S0_S2_S2_S0_S0_S0_S0_S0_S0_S0_PKiPKS0_PKvPKlS2_"
        "iiiiiiibS0_P11CUstream_stlii",
        Func.DISPATCH, 21, 22, 24, 26, 27, 28, 30, 32, 34,
    ),
    Launcher(
        "libmooncake_ep_device.so",
        "_ZN8mooncake7combineEPvPiS0_S1_S1_S0_S0_S0_S0_S0_S0_S0_PKiPKS0_PKvPKlPKfS3_S9_S1_"
        "iiiiiiiS0_P11CUstream_stlibi",
        Func.COMBINE, 20, 21, 23, 25, 26, -1, 28, 30, 33,
    ),
    Launcher(
        "nixl_ep_cpp_torch213.cpython-311-x86_64-linux-gnu.so",
        "_ZN7nixl_ep10ep_kernels8dispatchEPvS1_PiPlS2_S2_S2_S3_S1_PmS1_PKvPKiS4_iiiiiiiibbbmS1_i"
        "P11CUstream_stiPNS_12gpu_nixl_ctxE",
        Func.DISPATCH, 15, 16, 18, 20, 21, 22, 28, 29, 31,
    ),
    Launcher(
        "nixl_ep_cpp_torch213.cpython-311-x86_64-linux-gnu.so",
        "_ZN7nixl_ep10ep_kernels7combineEPvS1_PmS1_PKvPKiPKfS6_PKlPiPlS2_iiiiiiiibmS1_i"
        "P11CUstream_stibPNS_12gpu_nixl_ctxE",
        Func.COMBINE, 13, 14, 16, 18, 19, -1, 24, 25, 28,
    ),
)  # fmt: skip
IDS = [f"{one.library[:4]}-{one.func.name.lower()}" for one in LAUNCHERS]


def build(folder: Path) -> list[Path]:
    """One library a name; a function begins with a push, as compilers make it."""
    made = []
    for name in dict.fromkeys(one.library for one in LAUNCHERS):
        text = "".join(
            f'long f{i}(void) __asm__("{one.symbol}");\nlong f{i}(void) {{ return 0; }}\n'
            for i, one in enumerate(LAUNCHERS)
            if one.library == name
        )
        source = folder / "launchers.c"
        source.write_text(text)
        made.append(folder / name)
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-O0", "-fcf-protection=none", "-o", made[-1], source],
            check=True, timeout=60,
        )  # fmt: skip
    return made


@pytest.fixture
def scene(loaded: Loaded, tmp_path: Path) -> Iterator[Scene]:
    libraries = build(tmp_path)
    with Caller(*libraries) as caller, loaded.attacher(tmp_path) as attacher:
        scan = attacher.scan()
        assert not scan.failed
        found = [(one.kind, one.state, len(one.sites)) for one in scan.new_libraries]
        assert found == [("deepep", "attached", 2)] * 2
        made = Scene(loaded, attacher, caller, libraries)
        made.records()
        made.events()
        yield made


def call(scene: Scene, one: Launcher, *, phases: int = BOTH, eight_bit: int = 0, rank: int = 3
         ) -> None:  # fmt: skip
    values = [0xBAD_0000 + i for i in range(one.total)]
    values[one.count], values[one.hidden], values[one.top_k] = 96, 7168, 8
    values[one.rank], values[one.n_ranks] = rank, 16
    values[one.stream], values[one.phases] = STREAM, phases
    if one.eight_bit >= 0:
        values[one.eight_bit] = eight_bit
    scene.caller.call(one.symbol, *values)


@pytest.mark.parametrize("one", LAUNCHERS, ids=IDS)
def test_arguments(scene: Scene, one: Launcher) -> None:
    call(scene, one)
    (record,) = scene.records()
    assert (record["func"], record["count"], record["peer"]) == (one.func, 96 * 7168 * 2, 7168 * 2)
    assert (record["top_k"], record["stream"], record["dtype"]) == (8, STREAM, 255)
    assert record["flags"] == Flag.BYTES | Flag.FIRST
    (event,) = scene.events()
    assert (event["kind"], event["flags"]) == (CommKind.FIRST_USE, CommFlag.RANK)
    assert (event["rank"], event["n_ranks"]) == (3, 16)


@pytest.mark.parametrize("one", LAUNCHERS, ids=IDS)
def test_the_receiving_call_is_no_operation_of_its_own(scene: Scene, one: Launcher) -> None:
    call(scene, one, phases=SEND)
    call(scene, one, phases=RECEIVE)
    assert scene.records()["func"].tolist() == [one.func]


@pytest.mark.parametrize("one", [one for one in LAUNCHERS if one.eight_bit >= 0])
def test_eight_bit_tokens_are_half_as_many_bytes(scene: Scene, one: Launcher) -> None:
    call(scene, one, eight_bit=1)
    (record,) = scene.records()
    assert (record["count"], record["peer"]) == (96 * 7168, 7168)


@pytest.mark.parametrize("one", LAUNCHERS, ids=IDS)
def test_a_rank_that_makes_no_sense_is_counted_and_not_told(scene: Scene, one: Launcher) -> None:
    before = scene.loaded.programs.counters()["lost_read"]
    call(scene, one, rank=16)
    assert not len(scene.records())
    assert scene.loaded.programs.counters()["lost_read"] == before + 1
