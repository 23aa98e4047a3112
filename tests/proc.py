"""Reading /proc of a process that runs on meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def each(folder: Path, file: str = "") -> Iterator[tuple[str, str]]:
    """(name, text) of every entry of /proc/PID/task or /proc/PID/fdinfo that is still there.

    Threads end and descriptors are closed between the listing and the read: the open then fails
    with ENOENT, or the read of what was opened with ESRCH. `file` is the file below a thread.
    """
    for entry in folder.iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            yield entry.name, (entry / file).read_text()
