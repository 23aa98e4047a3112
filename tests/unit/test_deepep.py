"""Where DeepEP's launchers have their arguments, counted from the names of three builds.

The expected places are those of a table made by hand from the builds' sources, as the calling
convention of x86-64 has them: six registers, then slots of eight bytes above the return address.
"""

from __future__ import annotations

import re

import pytest

from lanterne.agent.discover import kind_of
from lanterne.probes import deepep
from lanterne.probes.catalog import PROGRAMS, Arch, Program, Row, pack_row
from lanterne.probes.layout import Flag, Func
from lanterne.probes.rows import Field, SourceKind, Trait

LL_V121 = (
    "_ZN7deep_ep12internode_ll8dispatchEPvS1_PiPlS2_S2_S3_S1_S2_S1_PKvPKlS2_iiiiiiiibbbS1_i"
    "P11CUstream_sti"
)
LL_HEAD = (
    "_ZN7deep_ep6legacy12internode_ll8dispatchEPvS2_PiPlS3_S3_S3_S4_S2_S3_S2_PKvPKlS3_iiiiiiii"
    "bbbS2_iP11CUstream_sti"
)
LL_SGL = (
    "_ZN7deep_ep6legacy12internode_ll8dispatchEPvS2_PiPlS3_S3_S3_S4_PKfS2_S3_S2_PKvPKlS3_iiiiiiii"
    "bbbbS2_iP11CUstream_sti"
)
LL_COMBINE_V121 = (
    "_ZN7deep_ep12internode_ll7combineEPvS1_PiS1_PKvPKlPKfPKiS6_PlS2_iiiiiiiibS1_iP11CUstream_stib"
)
LL_COMBINE_HEAD = (
    "_ZN7deep_ep6legacy12internode_ll7combineEPvS2_PiS2_PKvPKlPKfPKiS7_S3_PlS3_iiiiiiiibS2_i"
    "P11CUstream_stib"
)
LL_COMBINE_SGL = LL_COMBINE_HEAD + "bPjj"
INTRA_V121 = (
    "_ZN7deep_ep9intranode8dispatchEPvPfPiPlS2_S3_S3_PKvPKfPKlS8_PKbPKiiiiiiiiiPS1_ii"
    "P11CUstream_stiii"
)
INTRA_SGL = (
    "_ZN7deep_ep6legacy9intranode8dispatchEPvPfPiPlS3_S4_S4_PKvPKfPKlS9_PKbPKiiiiiiiiiPS2_ii"
    "P11CUstream_stiii"
)
INTRA_COMBINE_V121 = (
    "_ZN7deep_ep9intranode7combineE14cudaDataType_tPvPfPKvPKfS5_S5_PKiS9_S9_PiiiiiPS2_ii"
    "P11CUstream_stiii"
)
INTRA_COMBINE_SGL = (
    "_ZN7deep_ep6legacy9intranode7combineE14cudaDataType_tPvPfPKvPKfS6_S6_PKiSA_SA_PiiiiiPS3_ii"
    "P11CUstream_stiii"
)
INTER_V121 = (
    "_ZN7deep_ep9internode8dispatchEPvPfPlS2_S1_PKvPKfPKlS7_PiSA_SA_SA_PKiSC_SC_SC_PKbiiiiiiiS1_ii"
    "PS1_iiiibP11CUstream_stib"
)
INTER_SGL = (
    "_ZN7deep_ep6legacy9internode8dispatchEPvPfPlS3_S2_PKvPKfPKlS8_PiSB_SB_SB_PKiSD_SD_SD_PKb"
    "iiiiiiiiS2_iiPS2_iiiibP11CUstream_stib"
)
INTER_COMBINE_SGL = (
    "_ZN7deep_ep6legacy9internode7combineE14cudaDataType_tPvPfPKbPKvPKfS8_S8_PKiSC_S8_SC_SC_SC_"
    "iiiiS3_iiPS3_iiiiP11CUstream_stib"
)
NOTIFY = (
    "_ZN7deep_ep9intranode15notify_dispatchEPKiPiiS2_S3_iiPKbS3_S3_iiPPvPS3_iP11CUstream_sti",
    "_ZN7deep_ep6legacy9internode15notify_dispatchEPKiPiiS3_S4_S3_S4_iPKbiiiiiiiS4_S4_S4_S4_PviPS7_"
    "iPS4_iP11CUstream_stllb",
)

TABLE = {
    LL_V121: {"count": 72, "scale": 80, "top_k": 96, "rank": 112, "n_ranks": 120, "stream": 168,
              "phases": 176},
    LL_HEAD: {"count": 80, "scale": 88, "top_k": 104, "rank": 120, "n_ranks": 128, "stream": 176,
              "phases": 184},
    LL_SGL: {"count": 88, "scale": 96, "top_k": 112, "rank": 128, "n_ranks": 136, "stream": 192,
             "phases": 200},
    LL_COMBINE_V121: {"count": 56, "scale": 64, "top_k": 80, "rank": 96, "n_ranks": 104,
                      "stream": 136, "phases": 144},
    LL_COMBINE_HEAD: {"count": 64, "scale": 72, "top_k": 88, "rank": 104, "n_ranks": 112,
                      "stream": 144, "phases": 152},
    LL_COMBINE_SGL: {"count": 64, "scale": 72, "top_k": 88, "rank": 104, "n_ranks": 112,
                     "stream": 144, "phases": 152},
    INTRA_V121: {"count": 64, "worst": 72, "scale": 80, "top_k": 88, "rank": 136, "n_ranks": 144,
                 "stream": 152},
    INTRA_COMBINE_V121: {"count": 48, "scale": 64, "top_k": 72, "rank": 88, "n_ranks": 96,
                         "stream": 104},
    INTER_V121: {"count": 104, "scale": 112, "top_k": 128, "rank": 208, "n_ranks": 216,
                 "stream": 232},
    INTER_SGL: {"count": 104, "worst": 112, "scale": 120, "top_k": 136, "rank": 216,
                "n_ranks": 224, "stream": 240},
    INTER_COMBINE_SGL: {"count": 72, "scale": 88, "top_k": 96, "rank": 152, "n_ranks": 160,
                        "stream": 168},
}  # fmt: skip
TABLE[INTRA_SGL] = TABLE[INTRA_V121]
TABLE[INTRA_COMBINE_SGL] = TABLE[INTRA_COMBINE_V121]


def row_of(symbol: str) -> Row:
    row = deepep.derive(symbol)
    assert row is not None
    return row


@pytest.mark.parametrize("symbol", TABLE)
def test_places_on_x86_64(symbol: str) -> None:
    assert re.fullmatch(deepep.PATTERN, symbol.encode())
    packed = pack_row(row_of(symbol), Arch.X86_64)
    found = {}
    for field in Field:
        source = packed["source"][field]
        if source["kind"] == SourceKind.STACK and field is not Field.HALVED:
            found[field.name.lower()] = int(source["first"])
            assert source["width"] == (8 if field is Field.STREAM else 4)
    assert found == TABLE[symbol]


@pytest.mark.parametrize("symbol", TABLE)
def test_places_on_aarch64(symbol: str) -> None:
    """Two arguments more in registers, and no return address on the stack: 24 bytes less."""
    packed = pack_row(row_of(symbol), Arch.AARCH64)
    for name, offset in TABLE[symbol].items():
        source = packed["source"][Field[name.upper()]]
        assert (source["kind"], source["first"]) == (SourceKind.STACK, offset - 24), name


@pytest.mark.parametrize(("symbol", "offset"), [(LL_V121, 128), (LL_HEAD, 136), (LL_SGL, 144)])
def test_where_a_low_latency_dispatch_says_that_it_sends_8_bits(symbol: str, offset: int) -> None:
    packed = pack_row(row_of(symbol), Arch.X86_64)
    assert packed["source"][Field.HALVED]["first"] == offset


def test_what_a_row_is() -> None:
    for symbol in TABLE:
        row = row_of(symbol)
        assert row.func == (Func.DISPATCH if "8dispatch" in symbol else Func.COMBINE)
        assert row.flags == Flag.BYTES
        waits = bool(row.traits & Trait.NOTIFIED)
        assert waits == ("8dispatch" in symbol and "internode_ll" not in symbol)
        unit = 16 if waits else 2
        assert row.fields[Field.UNIT].x86_64.first == unit


@pytest.mark.parametrize("symbol", NOTIFY)
def test_notify(symbol: str) -> None:
    assert re.fullmatch(deepep.PATTERN, symbol.encode())
    row = row_of(symbol)
    assert row.program is Program.MOE_NOTIFY
    assert PROGRAMS[row.program] == (None, "moe_notified")


@pytest.mark.parametrize(
    "symbol",
    [
        "_ZN7deep_ep9intranode8dispatchILi8EEEvPii",
        "_ZN7deep_ep6legacy9intranode15notify_dispatchILi4EEEvPKiPiS4_S5_iiiPKbS5_S5_iiPPvPS5_i",
        "_ZN7deep_ep9intranode22cached_notify_dispatchEPKiiPPvPPiiiP11CUstream_st",
        "_ZN7deep_ep6layout19get_dispatch_layoutEPKlPiS3_S3_PbiiiiP11CUstream_st",
        LL_SGL + ".cold",
        "_ZN8deep_epx9intranode8dispatchEi",
    ],
)
def test_what_is_no_launcher(symbol: str) -> None:
    assert not re.fullmatch(deepep.PATTERN, symbol.encode())


@pytest.mark.parametrize(
    "symbol",
    [
        "_ZN7deep_ep12internode_ll8dispatchEPviiiiiiiP11CUstream_sti",  # seven ints
        "_ZN7deep_ep12internode_ll8dispatchEPviiiiiiiiiP11CUstream_sti",  # nine
        "_ZN7deep_ep12internode_ll8dispatchEPviiiiiiiibP11CUstream_st",  # no phases
        "_ZN7deep_ep12internode_ll8dispatchEPviiiiiiiibi",  # no stream
        "_ZN7deep_ep9intranode8dispatchEPviiiiiiiiiP11CUstream_st",
        "_ZN7deep_ep9intranode8dispatchEPviiiiiiiPvibiP11CUstream_st",  # rank and size apart
        "_ZN7deep_ep9intranode7combineE7unknownPviiiiPviiP11CUstream_st",  # a class by value
        "_ZN7deep_ep9intranode7combineEnonsense",
        "_ZN7deep_ep9intranode8dispatchE" + 90 * "P" + "v",
        "_ZN7deep_ep9intranode8dispatchE" + 400 * "Pv",
        # Some 2^20 letters when written out.
        "_ZN7deep_ep9intranode8dispatchE1aI" + "1bIiE" + 20 * "IS_S_E" + "E",
        "_ZN7deep_ep9intranode8dispatchEPFviE",
        "_ZN7deep_ep9intranode8dispatchE99a",
    ],
)
def test_what_does_not_fit_is_not_guessed(symbol: str) -> None:
    assert deepep.derive(symbol) is None


NIXL_HT = (
    "_ZN7nixl_ep9internode8dispatchEPvPfPlS2_S1_PKvPKfPKlS7_PiSA_SA_SA_PKiSC_SC_SC_PKbiiiiiii"
    "S1_iiPS1_iiiibP11CUstream_stibNS_12gpu_nixl_ctxE"
)


def test_a_context_behind_all_others_moves_none_of_them() -> None:
    """By value it lies on the stack behind the other arguments, or (aarch64) its address does."""
    expected, row = row_of(INTER_V121), row_of(NIXL_HT)
    assert row.fields == expected.fields
    assert row.traits & Trait.NOTIFIED
    assert deepep.derive(NIXL_HT.replace("ibNS_12gpu_nixl_ctxE", "NS_12gpu_nixl_ctxEib")) is None


@pytest.mark.parametrize(
    "symbol",
    [
        "_ZN8mooncake8dispatchEPviiiiiibPvP11CUstream_stli",  # six ints
        "_ZN8mooncake8dispatchEPviiiiiiiibPvP11CUstream_stli",  # eight
        "_ZN8mooncake8dispatchEPviiiiiiiPvP11CUstream_stli",  # no bool
        "_ZN8mooncake7combineEPviiiiiiiPvP11CUstream_stl",  # no phases
        "_ZN7nixl_ep10ep_kernels8dispatchEPviiiiiiibPvP11CUstream_sti",  # seven ints
    ],
)
def test_what_does_not_fit_of_others(symbol: str) -> None:
    assert re.fullmatch(deepep.PATTERN, symbol.encode())
    assert deepep.derive(symbol) is None


def test_a_parameter_more_moves_what_is_behind_it() -> None:
    """A build that nobody has seen: one pointer more before the ints."""
    packed = pack_row(row_of(LL_V121.replace("PKlS2_iiii", "PKlS2_S2_iiii")), Arch.X86_64)
    for name, offset in TABLE[LL_V121].items():
        assert packed["source"][Field[name.upper()]]["first"] == offset + 8


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/x/deep_ep_cpp.cpython-311-x86_64-linux-gnu.so", "deepep"),
        ("/x/deep_ep/_C.cpython-312-aarch64-linux-gnu.so", "deepep"),
        ("/x/other/_C.cpython-312-x86_64-linux-gnu.so", None),
        ("/x/nccl/ep/lib/cu12/libnccl_ep.so", "nccl_ep"),
        ("/x/libnccl_ep.so.0", "nccl_ep"),
        ("/x/libnccl-ep.so", None),
        ("/x/libnccl.so.2", "nccl"),
    ],
)
def test_files(path: str, kind: str | None) -> None:
    assert kind_of(path) == kind
