"""Small libraries with the probed symbols, and a process that calls them on command.

The stubs are compiled per test run. Every function of the catalog exists and begins with a push;
what it does is only what a test must see: creations write the communicator, group end writes
delayed ones, gloo calls may nest or leave by longjmp.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lanterne.probes import catalog

NAMES = {"nccl": "libnccl.so.2", "gloo": "libtorch_cpu.so", "cuda": "libcuda.so.1"}
CALLER = Path(__file__).with_name("caller.py")

_PREAMBLE = """
#include <setjmp.h>
#include <stddef.h>
#define EXPORT __attribute__((visibility("default"), noinline))
EXPORT void *stub_comm = (void *)0x7000000010;
EXPORT long stub_rc = 0;
EXPORT void **stub_later = NULL;
EXPORT void (*stub_nested)(void *) = NULL;
EXPORT long stub_leave = 0;
static jmp_buf place;
"""

_SLOT_ARGUMENT = {50: 0, 51: 0, 52: 0, 54: 3, 55: 3, 56: 4}


def _body(row: catalog.Row) -> str:
    name = f"f{row.id}"
    label = f'__asm__("{row.symbol}")'
    if row.id in (50, 51):
        # The 128 bytes by value: only a true prototype puts the rank where the ABI puts it.
        return (
            f"struct id{row.id} {{ char bytes[128]; }};\n"
            f"EXPORT long {name}(void **slot, int n, struct id{row.id} id, int rank, void *c) "
            f"{label};\nlong {name}(void **slot, int n, struct id{row.id} id, int rank, void *c) "
            "{ if (slot) *slot = stub_comm; return stub_rc; }\n"
        )
    if row.id in _SLOT_ARGUMENT:
        slot = "abcdef"[_SLOT_ARGUMENT[row.id]]
        return (
            f"EXPORT long {name}(long a, long b, long c, long d, long e, long f) {label};\n"
            f"long {name}(long a, long b, long c, long d, long e, long f) "
            f"{{ if ({slot}) *(void **){slot} = stub_comm; return stub_rc; }}\n"
        )
    if row.id == 53:
        return (
            f"EXPORT long {name}(void **slots, int n, int *devices) {label};\n"
            f"long {name}(void **slots, int n, int *devices) {{ for (int i = 0; i < n; i++) "
            "slots[i] = (char *)stub_comm + 4096 * i; return stub_rc; }\n"
        )
    if row.program is catalog.Program.GROUP_END:
        return (
            f"EXPORT long {name}(void) {label};\nlong {name}(void) "
            "{ if (stub_later) *stub_later = stub_comm; return 0; }\n"
        )
    if row.program is catalog.Program.PAIR:
        return (
            f"EXPORT long {name}(void *options) {label};\nlong {name}(void *options) {{ "
            "if (stub_leave) { stub_leave = 0; longjmp(place, 1); } "
            "void (*nested)(void *) = stub_nested; stub_nested = NULL; "
            "if (nested) nested(options); return stub_rc; }\n"
        )
    return f"EXPORT long {name}(void) {label};\nlong {name}(void) {{ return stub_rc; }}\n"


def source(library: catalog.Library, *, enqueue: bool) -> str:
    """C text of the stub of one library; ``enqueue``: with the local ncclEnqueueCheck."""
    parts = [_PREAMBLE]
    done: set[str] = set()
    for row in catalog.ROWS:
        if row.library is not library or row.symbol in done or row.local:
            continue
        done.add(row.symbol)
        parts.append(_body(row))
    if library is catalog.Library.NCCL and enqueue:
        parts.append(
            "static __attribute__((noinline, used)) long check(void *info) "
            '__asm__("_Z16ncclEnqueueCheckP8ncclInfo");\n'
            'static long check(void *info) { __asm__ volatile(""); return stub_rc; }\n'
            "EXPORT long call_enqueue(void *info, long n) "
            "{ long sum = 0; while (n--) sum += check(info); return sum; }\n"
        )
    if library is catalog.Library.NCCL:
        parts.append(
            "EXPORT long call_all_gather(long n, void *comm) { typedef long (*fn)(void *, void *, "
            "size_t, int, void *, void *); while (n--) ((fn)f8)(0, 0, 64, 7, comm, 0); "
            "return 0; }\n"
        )
    if library is catalog.Library.GLOO:
        parts.append("EXPORT void stub_nested_target(void *options) { f76(options); }\n")
        parts.append(
            "EXPORT long call_and_leave(long (*f)(void *), void *options) "
            "{ if (setjmp(place)) return 77; stub_leave = 1; return f(options); }\n"
        )
    return "\n".join(parts)


def compile_stub(folder: Path, kind: str, *, enqueue: bool = True, strip: bool = False) -> Path:
    """Builds ``folder/NAME``; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / f"{kind}.c"
    text.write_text(source(catalog.Library(kind), enqueue=enqueue))
    target = folder / NAMES[kind]
    command = [
        # Without optimisation every function begins with "push rbp", like the real libraries'.
        "gcc", "-shared", "-fPIC", "-O0", "-fcf-protection=none", "-w", "-Wl,--build-id",
        "-o", str(target), str(text),
    ]  # fmt: skip
    subprocess.run([*command, *(["-s"] if strip else [])], check=True, timeout=60)
    return target


class Caller:
    """A process that opens libraries and calls their functions when told. A context manager."""

    def __init__(self, *libraries: Path, prefix: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-S", "-E", str(CALLER), *map(str, libraries)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = int(self.ask(pid=1))

    def ask(self, **command: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the caller has ended"
        return json.loads(line)

    def open(self, path: Path) -> None:
        self.ask(open=str(path))

    def map_file(self, path: Path) -> None:
        """Maps a file as data, without loading it."""
        self.ask(map=str(path))

    def call(self, symbol: str, *arguments: int | str, thread: int = 0, times: int = 1) -> int:
        """Integers are passed as 64-bit arguments, hex strings as 128-byte structs by value."""
        return int(self.ask(call=symbol, arguments=arguments, thread=thread, times=times))

    def memory(self, content: bytes) -> int:
        """Address of a block with this content that stays."""
        return int(self.ask(memory=content.hex()))

    def peek(self, address: int, size: int) -> bytes:
        return bytes.fromhex(self.ask(peek=[address, size]))

    def address(self, symbol: str) -> int:
        return int(self.ask(address=symbol))

    def set(self, variable: str, value: int) -> None:
        self.ask(set=[variable, value])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=30)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
