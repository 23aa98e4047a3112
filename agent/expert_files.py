"""Files in which engines leave expert load: SGLang's dumps, numpy arrays. Looked at now and then.

A file counts once, when it no longer grows, and only if it was written after the agent began:
what is older did not happen now.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lanterne.agent.expert_counts import Load
from lanterne.agent.expert_formats import from_array
from lanterne.agent.numpy_file import npy, npz
from lanterne.agent.sglang_dump import PATTERN, read_dump

log = logging.getLogger(__name__)

MAX_FILES = 1024  # looked at in one folder
MAX_NUMPY_BYTES = 64 << 20

State = tuple[int, int, int]  # inode, size, mtime_ns


@dataclass(frozen=True)
class Watched:
    """kind: sglang_dump (a folder, or one file) or numpy (a .npy or .npz file)."""

    path: Path
    kind: str
    workload: str = ""
    model: str = ""
    ranks: int = 0


class ExpertFiles:
    """Call `poll` every few seconds, from one thread."""

    def __init__(
        self, watched: tuple[Watched, ...], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._watched = watched
        self._since_ns = int(clock() * 1e9)
        self._growing: dict[Path, State] = {}
        self._done: dict[Path, State] = {}
        self.failed = 0
        self.working = True  # the last `poll` met no trouble

    def poll(self) -> list[Load]:
        """Loads of the files that are new and finished. A file that cannot be read is logged,
        counted in `failed` and left alone until it changes."""
        found: list[Load] = []
        trouble = False
        present: set[Path] = set()
        for watched in self._watched:
            try:
                paths = list(_paths(watched))
            except OSError as error:
                trouble = True
                log.debug(
                    "folder not readable", extra={"path": str(watched.path), "reason": str(error)}
                )
                continue
            present.update(paths)
            for path in paths:
                if self._finished(path):
                    try:
                        found += _read(path, watched)
                    except (ValueError, OSError, MemoryError) as error:
                        self.failed += 1
                        trouble = True
                        log.warning(
                            "expert load not read", extra={"path": str(path), "reason": str(error)}
                        )
        for states in (self._growing, self._done):
            for path in set(states) - present:
                del states[path]
        self.working = not trouble
        return found

    def _finished(self, path: Path) -> bool:
        """Whether the file is new, and the same as at the last look."""
        try:
            stat = path.stat()
        except OSError:
            return False
        state = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if stat.st_mtime_ns < self._since_ns or self._done.get(path) == state:
            return False
        if self._growing.get(path) != state:
            self._growing[path] = state
            return False
        self._done[path] = self._growing.pop(path)
        return True


def _paths(watched: Watched) -> Iterator[Path]:
    if not watched.path.is_dir():
        if not watched.path.exists():
            raise FileNotFoundError(f"{watched.path} does not exist")
        yield watched.path
        return
    for number, path in enumerate(watched.path.glob(PATTERN)):
        if number >= MAX_FILES:
            log.warning("too many dumps", extra={"path": str(watched.path), "most": MAX_FILES})
            return
        if path.is_file():
            yield path


def _read(path: Path, watched: Watched) -> list[Load]:
    if watched.kind == "sglang_dump":
        return [
            read_dump(path, workload=watched.workload, model=watched.model, ranks=watched.ranks)
        ]
    if path.stat().st_size > MAX_NUMPY_BYTES:
        raise ValueError(f"is larger than {MAX_NUMPY_BYTES} bytes")
    data = path.read_bytes()
    arrays = npz(data, limit=MAX_NUMPY_BYTES) if path.suffix == ".npz" else {"counts": npy(data)}
    if "counts" not in arrays:
        raise ValueError(f"has no array `counts`, only {', '.join(sorted(arrays)[:8])}")
    fields = {"workload": watched.workload, "model": watched.model}
    if watched.ranks:
        fields["ranks"] = str(watched.ranks)
    return [from_array(arrays["counts"], fields, source="numpy")[0]]
