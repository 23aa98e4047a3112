"""bpf(2) and perf_event_open(2) through ctypes: the few commands that the agent needs.

Struct layouts are those of ``union bpf_attr`` and ``struct perf_event_attr`` in the kernel's uapi
headers. Every function raises OSError with the kernel's errno.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterator, Sequence

_NUMBERS = {"x86_64": (321, 298), "aarch64": (280, 241)}  # bpf, perf_event_open

_MAP_LOOKUP_ELEM = 1
_MAP_UPDATE_ELEM = 2
_MAP_DELETE_ELEM = 3
_MAP_GET_NEXT_KEY = 4
_PROG_LOAD = 5
_OBJ_GET_INFO_BY_FD = 15
_MAP_LOOKUP_BATCH = 24
_LINK_CREATE = 28

PROG_TYPE_KPROBE = 2
ATTACH_PERF_EVENT = 41
ATTACH_UPROBE_MULTI = 48
_UPROBE_MULTI_RETURN = 1
_PERF_FLAG_FD_CLOEXEC = 8
_PERF_ATTR_SIZE = 112  # PERF_ATTR_SIZE_VER5

_libc = ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def _numbers() -> tuple[int, int]:
    machine = platform.machine()
    if machine not in _NUMBERS:
        raise OSError(38, f"no system call numbers are known for {machine}")
    return _NUMBERS[machine]


def bpf(command: int, attr: bytes) -> tuple[int, bytes]:
    """One bpf(2) call; returns (result, attr as the kernel left it)."""
    buffer = ctypes.create_string_buffer(attr, len(attr))
    result = _call(_numbers()[0], command, buffer, len(attr))
    return result, buffer.raw


def link_uprobes(
    prog_fd: int,
    path: str,
    offsets: Sequence[int],
    cookies: Sequence[int],
    *,
    at_return: bool,
    semaphores: Sequence[int] = (),
) -> int:
    """One multi-uprobe link (6.6+) for any number of file offsets; returns its descriptor.

    ``semaphores``: per offset the file offset of a USDT semaphore, 0 for none. The kernel raises it
    in every process that maps the file, now and later, and lowers it when the link goes.
    """
    name = ctypes.create_string_buffer(os.fsencode(path))
    count = len(offsets)
    where = (ctypes.c_uint64 * count)(*offsets)
    what = (ctypes.c_uint64 * count)(*cookies)
    counted = (ctypes.c_uint64 * count)(*semaphores) if any(semaphores) else None
    attr = struct.pack(
        "<IIIIQQQQIIII",
        prog_fd,
        0,
        ATTACH_UPROBE_MULTI,
        0,
        ctypes.addressof(name),
        ctypes.addressof(where),
        ctypes.addressof(counted) if counted is not None else 0,
        ctypes.addressof(what),
        count,
        _UPROBE_MULTI_RETURN if at_return else 0,
        0,
        0,
    )
    return bpf(_LINK_CREATE, attr)[0]


def open_uprobe(pmu_type: int, config: int, path: str, offset: int) -> int:
    """A perf event that fires at one file offset in every process; returns its descriptor."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    attr = struct.pack(
        "<IIQQQQQIIQQ",
        pmu_type,
        _PERF_ATTR_SIZE,
        config,
        0,
        0,
        0,
        0,
        0,
        0,
        ctypes.addressof(name),
        offset,
    ).ljust(_PERF_ATTR_SIZE, b"\0")
    buffer = ctypes.create_string_buffer(attr, len(attr))
    # pid -1 with a CPU: all processes, and the program runs on whichever CPU hits the probe.
    return _call(
        _numbers()[1],
        buffer,
        ctypes.c_int(-1),
        ctypes.c_int(0),
        ctypes.c_int(-1),
        ctypes.c_ulong(_PERF_FLAG_FD_CLOEXEC),
    )


def link_perf_event(prog_fd: int, perf_fd: int, cookie: int) -> int:
    """Attaches a program to a perf event with a cookie (5.15+); returns the link's descriptor."""
    attr = struct.pack("<IIIIQ", prog_fd, perf_fd, ATTACH_PERF_EVENT, 0, cookie)
    return bpf(_LINK_CREATE, attr.ljust(64, b"\0"))[0]


def lookup(map_fd: int, key: bytes, value_bytes: int) -> bytes | None:
    """One map element; of a per-CPU map all CPUs' values. None: no such key."""
    key_buffer = ctypes.create_string_buffer(key, len(key))
    value = ctypes.create_string_buffer(value_bytes)
    attr = struct.pack(
        "<IIQQQ", map_fd, 0, ctypes.addressof(key_buffer), ctypes.addressof(value), 0
    )
    try:
        bpf(_MAP_LOOKUP_ELEM, attr)
    except FileNotFoundError:
        return None
    return value.raw


def lookup_all(map_fd: int, count: int, value_bytes: int) -> bytes:
    """The first values of an array in one call (per-CPU arrays: 5.13+), of all CPUs each."""
    keys = ctypes.create_string_buffer(4 * count)
    values = ctypes.create_string_buffer(value_bytes * count)
    after = ctypes.create_string_buffer(4)
    attr = struct.pack(
        "<QQQQIIQQ",
        0,
        ctypes.addressof(after),
        ctypes.addressof(keys),
        ctypes.addressof(values),
        count,
        map_fd,
        0,
        0,
    )
    bpf(_MAP_LOOKUP_BATCH, attr)
    return values.raw


def update(map_fd: int, key: bytes, value: bytes) -> None:
    key_buffer = ctypes.create_string_buffer(key, len(key))
    value_buffer = ctypes.create_string_buffer(value, len(value))
    attr = struct.pack(
        "<IIQQQ", map_fd, 0, ctypes.addressof(key_buffer), ctypes.addressof(value_buffer), 0
    )
    bpf(_MAP_UPDATE_ELEM, attr)


def delete(map_fd: int, key: bytes) -> bool:
    """False: there was no such key."""
    key_buffer = ctypes.create_string_buffer(key, len(key))
    attr = struct.pack("<IIQQQ", map_fd, 0, ctypes.addressof(key_buffer), 0, 0)
    try:
        bpf(_MAP_DELETE_ELEM, attr)
    except FileNotFoundError:
        return False
    return True


def keys(map_fd: int, key_bytes: int, limit: int) -> Iterator[bytes]:
    """Keys of a hash map, at most ``limit``: a key that is deleted meanwhile restarts the walk."""
    next_key = ctypes.create_string_buffer(key_bytes)
    key: ctypes.Array[ctypes.c_char] | None = None
    for _ in range(limit):
        attr = struct.pack(
            "<IIQQQ",
            map_fd,
            0,
            ctypes.addressof(key) if key is not None else 0,
            ctypes.addressof(next_key),
            0,
        )
        try:
            bpf(_MAP_GET_NEXT_KEY, attr)
        except FileNotFoundError:
            return
        yield next_key.raw
        key = ctypes.create_string_buffer(next_key.raw, key_bytes)


def run_stats(prog_fd: int) -> tuple[int, int]:
    """(runs, nanoseconds) of a program; both 0 while kernel.bpf_stats_enabled is 0."""
    info = ctypes.create_string_buffer(256)
    attr = struct.pack("<IIQ", prog_fd, len(info), ctypes.addressof(info))
    bpf(_OBJ_GET_INFO_BY_FD, attr)
    nanoseconds, runs = struct.unpack_from("<QQ", info.raw, 192)
    return runs, nanoseconds


def load_empty(attach_type: int = 0) -> int:
    """Loads ``return 0`` as a uprobe program: the probe for what the kernel and we may do."""
    code = struct.pack("<BBhiBBhi", 0xB7, 0, 0, 0, 0x95, 0, 0, 0)
    instructions = ctypes.create_string_buffer(code, len(code))
    licence = ctypes.create_string_buffer(b"GPL")
    attr = struct.pack(
        "<IIQQIIQIIQII",
        PROG_TYPE_KPROBE,
        len(code) // 8,
        ctypes.addressof(instructions),
        ctypes.addressof(licence),
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
    )
    # prog_name (16 bytes) @48, prog_ifindex @64, expected_attach_type @68.
    attr = attr[:48] + b"lanterne_probe\0\0" + struct.pack("<II", 0, attach_type)
    return bpf(_PROG_LOAD, attr)[0]
