"""Launchers of DeepEP, NIXL EP and Mooncake EP as probe points, derived from their mangled names.

DeepEP has no stable ABI: parameters come and go between builds. What stays is how they stand to
each other, and a mangled name lists every parameter's type. So values are found by counting:

- low latency (internode_ll): the one run of eight ints is cleaning, tokens, hidden, most tokens per
  rank, top k, experts, rank, ranks; the bool behind it says whether a dispatch sends 8-bit floats;
  the first int behind the stream is the phases (1 send, 2 receive, 3 both).
- normal (intranode, internode) dispatch: the first run of ints is tokens, [worst tokens,] then
  within a node hidden, top k, experts, scales and two strides, between nodes hidden, scales, top k,
  experts and two strides; worst tokens is there when the run has eight. hidden counts 16 bytes.
- normal combine: the first run of ints is sent tokens, combined tokens, hidden, top k.
- normal: the last two ints before the stream are rank and ranks.

NIXL EP (nixl_ep) has DeepEP's order of parameters, with ep_kernels in the place of internode_ll,
and its own context behind all others, by pointer or by value. Mooncake EP (mooncake) has the low
latency kernels alone, without the int about cleaning: a run of seven, or of eleven where four about
RDMA follow.

A name whose parameters do not fit is no probe point: nothing is guessed. Kernel stubs have the same
prefix and template arguments behind it: they do not match.
"""

from __future__ import annotations

import re

import itanium_demangler

from .catalog import Library, Place, Program, Row, argument, constant
from .layout import Flag, Func
from .rows import Field, Trait

PATTERN = re.compile(
    rb"_ZN(?:7deep_ep(?:6legacy)?(?:"
    rb"12internode_ll(?:8dispatch|7combine|20combine_overlappable)"
    rb"|9intranode(?:8dispatch|7combine|15notify_dispatch)"
    rb"|9internode(?:8dispatch|7combine|15notify_dispatch))"
    rb"|7nixl_ep(?:10ep_kernels(?:8dispatch|7combine)"
    rb"|9internode(?:8dispatch|7combine|15notify_dispatch))"
    rb"|8mooncake(?:8dispatch|7combine))E[A-Za-z0-9_]+"
)
_SCOPE = re.compile(r"(?:(?:deep_ep::(?:legacy::)?|nixl_ep::)(\w+)|mooncake)::(\w+)")
_LOW_LATENCY = ("internode_ll", "ep_kernels")
_MOONCAKE_RUNS = (7, 11)
_ENUMS = frozenset({"cudaDataType_t", "cudaDataType"})
_INTEGERS = frozenset({"long", "unsigned int", "unsigned long", "long long", "unsigned long long"})
_FLOATS = frozenset({"float", "double"})

_HIDDEN_UNIT = 16  # hidden of the normal dispatches counts int4
_ELEMENT = 2  # tokens are bfloat16 wherever a launcher does not say otherwise


# One parameter without template arguments and function types, the length of a class's name last:
# what a demangler makes of those can be exponentially larger than the name.
_PARAMETER = re.compile(
    r"[PRK]{0,6}(?:[a-z]|S[0-9A-Z]{0,2}_|(?P<length>\d{1,2})|NS_(?P<inner>\d{1,2}))"
)
_LONGEST = 512


class _UnknownError(Exception):
    """A signature that the rules above do not cover."""


def _kinds(symbol: str) -> tuple[str, str, str]:
    """-> (name space, function, one letter a parameter in an integer register or on the stack).

    Letters: i int, b bool, l other integers and enumerations, p pointer, s stream. Floats travel
    in registers of their own and take no place here; classes by value are not covered.
    """
    if not _is_simple(symbol):
        raise _UnknownError
    tree = itanium_demangler.parse(symbol)
    if tree is None or tree.kind != "func":
        raise _UnknownError
    scope = _SCOPE.fullmatch(str(tree.name))
    if scope is None:
        raise _UnknownError
    parameters = list(tree.arg_tys)
    if parameters and parameters[-1].kind in ("name", "qual_name"):
        parameters.pop()  # a class by value behind all others moves none of them
    return scope[1] or "mooncake", scope[2], "".join(map(_kind, parameters))


def _is_simple(symbol: str) -> bool:
    """Whether the name is one that a launcher could have; anybody can put any name into a file."""
    start = re.match(r"_ZN[a-z0-9_]+E", symbol)
    if start is None or len(symbol) > _LONGEST:
        return False
    at = start.end()
    while at < len(symbol):
        parameter = _PARAMETER.match(symbol, at)
        if parameter is None:
            return False
        at = parameter.end() + int(parameter["length"] or parameter["inner"] or 0)
        if parameter["inner"]:
            if symbol[at : at + 1] != "E":
                return False
            at += 1
    return at == len(symbol)


def _kind(parameter: itanium_demangler.Node) -> str:
    text = str(parameter)
    if parameter.kind in ("pointer", "lvalue"):
        return "s" if text == "CUstream_st*" else "p"
    if parameter.kind == "builtin" and text in ("int", "bool"):
        return text[0]
    if text in _INTEGERS | _ENUMS:
        return "l"
    if text in _FLOATS:
        return ""
    raise _UnknownError


def _first_run(kinds: str, shortest: int) -> tuple[int, int]:
    """-> (start, length) of the first run of ints that is long enough."""
    run = re.search(f"i{{{shortest},}}", kinds)
    if run is None:
        raise _UnknownError
    return run.start(), len(run[0])


def _stream(kinds: str) -> int:
    if kinds.count("s") != 1:
        raise _UnknownError
    return kinds.index("s")


def _ints(*named: tuple[Field, int]) -> dict[Field, Place]:
    return {which: argument(index, 4) for which, index in named}


def _low_latency(function: str, kinds: str) -> dict[Field, Place]:
    start, length = _first_run(kinds, 8)
    stream = _stream(kinds)
    phases = kinds.find("i", stream)
    if length != 8 or phases < 0:
        raise _UnknownError
    fields = _ints(
        (Field.COUNT, start + 1),
        (Field.SCALE, start + 2),
        (Field.TOP_K, start + 4),
        (Field.RANK, start + 6),
        (Field.N_RANKS, start + 7),
        (Field.PHASES, phases),
    )
    if function == "dispatch":
        if kinds[start + 8] != "b":
            raise _UnknownError
        fields[Field.HALVED] = argument(start + 8, 4)
    return fields | {Field.UNIT: constant(_ELEMENT), Field.STREAM: argument(stream)}


def _mooncake(function: str, kinds: str) -> dict[Field, Place]:
    start, length = _first_run(kinds, min(_MOONCAKE_RUNS))
    stream = _stream(kinds)
    phases = kinds.find("i", stream)
    if length not in _MOONCAKE_RUNS or phases < 0:
        raise _UnknownError
    fields = _ints(
        (Field.COUNT, start),
        (Field.SCALE, start + 1),
        (Field.TOP_K, start + 3),
        (Field.RANK, start + 5),
        (Field.N_RANKS, start + 6),
        (Field.PHASES, phases),
    )
    if function == "dispatch":
        if kinds[start + 7] != "b":
            raise _UnknownError
        fields[Field.HALVED] = argument(start + 7, 4)
    return fields | {Field.UNIT: constant(_ELEMENT), Field.STREAM: argument(stream)}


def _rank_before_stream(kinds: str, stream: int) -> dict[Field, Place]:
    ints = [index for index in range(stream) if kinds[index] == "i"]
    if len(ints) < 2 or ints[-1] != ints[-2] + 1:
        raise _UnknownError
    return _ints((Field.RANK, ints[-2]), (Field.N_RANKS, ints[-1]))


def _normal_dispatch(scope: str, kinds: str) -> dict[Field, Place]:
    start, length = _first_run(kinds, 7)
    stream = _stream(kinds)
    worst = length - 7
    if worst > 1:
        raise _UnknownError
    hidden = start + 1 + worst
    top_k = hidden + (1 if scope == "intranode" else 2)
    fields = _ints((Field.COUNT, start), (Field.SCALE, hidden), (Field.TOP_K, top_k))
    if worst:
        fields |= _ints((Field.WORST, start + 1))
    fields |= {Field.UNIT: constant(_HIDDEN_UNIT), Field.STREAM: argument(stream)}
    return fields | _rank_before_stream(kinds, stream)


def _normal_combine(kinds: str) -> dict[Field, Place]:
    start, length = _first_run(kinds, 4)
    stream = _stream(kinds)
    if length != 4:
        raise _UnknownError
    fields = _ints((Field.COUNT, start), (Field.SCALE, start + 2), (Field.TOP_K, start + 3))
    fields |= {Field.UNIT: constant(_ELEMENT), Field.STREAM: argument(stream)}
    return fields | _rank_before_stream(kinds, stream)


def derive(symbol: str) -> Row | None:
    """The row of a launcher, without an id: that is given when it is placed. None: not covered."""
    try:
        scope, function, kinds = _kinds(symbol)
        if function == "notify_dispatch":
            return Row(0, Library.DEEPEP, symbol, Program.MOE_NOTIFY)
        dispatch = function == "dispatch"
        traits = Trait.EXPERTS
        if scope in _LOW_LATENCY:
            fields = _low_latency(function, kinds)
        elif scope == "mooncake":
            fields = _mooncake(function, kinds)
        elif dispatch:
            fields = _normal_dispatch(scope, kinds)
            traits |= Trait.NOTIFIED
        else:
            fields = _normal_combine(kinds)
    except (_UnknownError, NotImplementedError, IndexError):
        return None
    return Row(
        0,
        Library.DEEPEP,
        symbol,
        Program.MOE,
        Func.DISPATCH if dispatch else Func.COMBINE,
        Flag.BYTES,
        traits,
        fields=fields,
    )
