"""Which first instructions of aarch64 functions are said to be simulated by the kernel."""

from __future__ import annotations

import pytest

from lanterne.agent import code

# Little-endian words as `as` writes them. tests/kernel/test_first_instruction.py asks the kernel.
WORDS = {
    "fd7bbfa9": ("stp x29, x30, [sp, #-0x10]!", False),
    "ff4300d1": ("sub sp, sp, #0x10", False),
    "3f2303d5": ("paciasp", False),
    "5f2403d5": ("bti c", False),
    "1f2003d5": ("nop", False),
    "e00300aa": ("mov x0, x0", False),
    "200040f9": ("ldr x0, [x1]", False),
    "02000014": ("b #0x1008", True),
    "02000094": ("bl #0x1008", True),
    "40000054": ("b.eq #0x1008", True),
    "5f0000b4": ("cbz xzr, #0x1008", True),
    "5f001836": ("tbz wzr, #3, #0x1008", True),
    "01000090": ("adrp x1, #0x1000", True),
    "40000018": ("ldr w0, #0x1008", None),
    "20021fd6": ("br x17", True),
    "c0035fd6": ("ret", True),
}


@pytest.mark.parametrize("word", WORDS)
def test_entry(word: str) -> None:
    place = code.choose_site(bytes.fromhex(word), 0x1000, machine="aarch64")
    assert (place.skip, place.instruction, place.cheap) == (0, *WORDS[word])


LITERAL_X0, LITERAL_X16 = "40000058", "50000058"  # ldr, from 8 bytes on
MOVE, RETURN = "e00300aa", "c0035fd6"


@pytest.mark.parametrize(("words", "skip", "refused"), [
    (LITERAL_X16 + MOVE + RETURN, 4, False),
    (LITERAL_X16 + LITERAL_X16 + MOVE + RETURN, 8, False),
    ("4000001c" + MOVE, 4, False),  # ldr s0: no argument that is read
    ("400000d8" + MOVE, 4, False),  # prfm
    (LITERAL_X0 + MOVE, 0, True),  # an argument is another one behind it
    ("5e000058" + MOVE, 0, True),  # so is the return address (x30)
    (LITERAL_X16 * 9 + MOVE, 0, True),
    (LITERAL_X16 + MOVE + "e0ffff54" + RETURN, 0, True),  # b.eq back to the move
    (MOVE + LITERAL_X0, 0, False),
])  # fmt: skip
def test_literals_cannot_be_probed(words: str, skip: int, refused: bool) -> None:
    place = code.choose_site(bytes.fromhex(words), 0x1000, machine="aarch64")
    assert (place.skip, place.refused) == (skip, refused)


def test_no_code() -> None:
    assert code.choose_site(b"", 0x1000, machine="aarch64") == code.Place(0, None, "")
