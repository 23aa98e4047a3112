"""Lines of /proc/PID/maps with whatever names a hostile process gives its files."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lanterne.agent.discover import parse_maps

_PIECES = st.sampled_from([
    b"7f00-7f01 r-xp 00000000 fd:01 7001 ", b"\n", b" ", b"/x/libnccl.so.2", b"/libcuda.so.1",
    b"/deep_ep", b" (deleted)", b"zz:01", b"r-xp", b"-", b":", b"0", b"7", b"/", b"\\012", b"\xff",
    b"\0", b"/libtorch_cpu.so", b"libparcagpu", b"18446744073709551616", b"\t", b"fd:01",
])  # fmt: skip


@given(st.one_of(st.binary(max_size=400), st.lists(_PIECES, max_size=60).map(b"".join)))
def test_anything_is_read_without_complaint(text: bytes) -> None:
    found = parse_maps(text)
    assert len({one.key for one in found}) == len(found)
    assert len(found) <= text.count(b"\n") + 1
    for one in found:
        assert "\n" not in one.path  # it goes into log lines
