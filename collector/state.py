"""What outlives a restart of the collector, in one small file: the load history of the hour.

The file is replaced whole, so a reader or a crash never meets half of it; its checksum tells what
was damaged since. Version 1: MAGIC, version (u32), length of the payload (u64), its SHA-256, the
payload; little-endian. The payload is the length of a JSON text (u32), that text, and the arrays
that it describes, one after the other.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lanterne.collector.slow_disk import SlowDisk

log = logging.getLogger(__name__)

Saved = tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]

MAGIC = b"lanterne state\n"
VERSION = 1
MAX_BYTES = 1 << 30
CLOSE_SECONDS = 5.0
EXPERTS = "experts.state"  # its name in the state folder
_HEAD = struct.Struct("<IQ32s")
_DTYPES = ("<f4", "<f8", "<i8")


class StateError(ValueError):
    """The bytes are no state; the message says why."""


def pack(items: Sequence[Saved]) -> bytes:
    """Facts (plain JSON values) and arrays -> the file."""
    described, parts = [], []
    for facts, arrays in items:
        columns = []
        for name, array in arrays.items():
            little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            columns.append([name, little.dtype.str, list(little.shape)])
            parts.append(little.tobytes())
        described.append({"facts": facts, "arrays": columns})
    text = json.dumps(described).encode()
    payload = b"".join([struct.pack("<I", len(text)), text, *parts])
    return MAGIC + _HEAD.pack(VERSION, len(payload), hashlib.sha256(payload).digest()) + payload


def unpack(data: bytes) -> list[Saved]:
    """The inverse of `pack`. Raises StateError."""
    start = len(MAGIC) + _HEAD.size
    if len(data) < start or not data.startswith(MAGIC):
        raise StateError("is no state file of lanterne-collector")
    version, size, digest = _HEAD.unpack_from(data, len(MAGIC))
    if version != VERSION:
        raise StateError(f"has version {version}, this collector reads {VERSION}")
    payload = data[start:]
    if len(payload) != size:
        raise StateError(f"holds {len(payload)} bytes of {size}")
    if hashlib.sha256(payload).digest() != digest:
        raise StateError("is damaged: its checksum does not match")
    try:
        return _items(payload)
    except (KeyError, TypeError, ValueError, RecursionError, struct.error) as error:
        raise StateError(f"is not as it was written: {error}") from error


def _items(payload: bytes) -> list[Saved]:
    (length,) = struct.unpack_from("<I", payload)
    described = json.loads(payload[4 : 4 + length])
    at, items = 4 + length, []
    for one in described:
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, dtype, shape in one["arrays"]:
            if dtype not in _DTYPES:
                raise ValueError(f"type {dtype!r}")
            count = math.prod(shape)
            arrays[name] = np.frombuffer(payload, dtype, count, at).reshape(shape)
            at += count * np.dtype(dtype).itemsize
        items.append((one["facts"], arrays))
    return items


class StateFile:
    """One path, or none. Errors are logged and counted in `errors`, never raised.

    `load`, `due`, `save`, `close` in one thread; `save` leaves the disk to a thread of its own.
    """

    def __init__(self, path: Path | None) -> None:
        """path: its folder must exist and be writable, or nothing is kept."""
        self.path = path
        self.errors = {"unreadable": 0, "corrupt": 0, "unwritable": 0}
        self.saved_at = 0.0  # UNIX seconds; 0: not yet
        self._tried_at = 0.0
        self._slow = SlowDisk(path or Path(), "the load history is kept once it does")
        self._wake = threading.Condition()
        self._newest: tuple[bytes, float] | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="state", daemon=True)

    def counts(self) -> Mapping[str, int]:
        """`errors`, and how often the disk took long. Any thread; to be asked now and then."""
        self._slow.look()
        return {**self.errors, "stalled": self._slow.times}

    def load(self, restore: Callable[[list[Saved]], None]) -> None:
        """Hand the kept items to `restore`, which raises ValueError where it refuses them."""
        if self.path is None:
            return
        try:
            if self.path.stat().st_size > MAX_BYTES:
                raise StateError(f"is larger than {MAX_BYTES} bytes")
            restore(unpack(self.path.read_bytes()))
        except FileNotFoundError:
            return
        except OSError as error:
            self._failed("unreadable", f"cannot be read ({error.strerror})")
        except ValueError as error:
            self._failed("corrupt", str(error))
        else:
            log.info("state taken up from %s", self.path)

    def due(self, now: float, seconds: float) -> bool:
        """Whether it is time to `save` again; a clock that stepped back counts as time."""
        return self.path is not None and abs(now - self._tried_at) >= seconds

    def save(self, items: Sequence[Saved], now: float) -> None:
        """Never waits for the disk; what still waits for it is replaced."""
        if self.path is None:
            return
        self._tried_at = now
        data = pack(items)
        with self._wake:
            self._newest = data, now
            self._wake.notify()
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Write what was saved last, and end."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                log.error("state %s not written within %.0f s", self.path, CLOSE_SECONDS)

    def _run(self) -> None:
        closing = False
        while not closing:
            with self._wake:
                while self._newest is None and not self._closing:
                    self._wake.wait()
                newest, self._newest = self._newest, None
                closing = self._closing
            if newest is not None and self.path is not None:
                with self._slow:
                    self._write(self.path, *newest)

    def _write(self, path: Path, data: bytes, now: float) -> None:
        part = path.with_name(path.name + ".part")
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            if not self.errors["unwritable"]:
                log.error("state %s cannot be written (%s)", path, error.strerror)
            self.errors["unwritable"] += 1
        else:
            self.saved_at = now

    def _failed(self, reason: str, why: str) -> None:
        self.errors[reason] += 1
        log.error("state %s %s: starting without; it will be replaced", self.path, why)


def usable(path: str) -> Path | None:
    """The configured folder, made if need be; None where it is empty or cannot be used (logged)."""
    if not path:
        return None
    folder = Path(path)
    try:
        folder.mkdir(exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        log.error(
            "state.path %s cannot be used (%s): nothing is kept over a restart; name a folder that "
            "this user may write to",
            folder,
            error.strerror,
        )
        return None
    return folder
