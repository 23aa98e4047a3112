"""Whether files on disk have changed: certificates, tokens and passwords are renewed in place.

A Kubernetes secret is renewed by exchanging a symbolic link, cert-manager and certbot rename; the
signature follows links, so that each of these shows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

LOOK_SECONDS = 1.0  # between two looks

Signature = tuple[tuple[int, ...] | None, ...]


def signature(paths: Sequence[str]) -> Signature:
    """Of each file device, inode, size and time of change; None where there is none."""
    return tuple(_one(path) for path in paths)


def _one(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)  # noqa: PTH116  (called often)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class Watch:
    """`changed` is cheap: it looks once in LOOK_SECONDS at most. Not thread-safe."""

    def __init__(self, paths: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = tuple(paths)
        self._clock = clock
        self._known = signature(self._paths)
        self._due = clock() + LOOK_SECONDS

    def changed(self) -> bool:
        """Whether anything is different from the last time that this was true, or the start."""
        now = self._clock()
        if now < self._due:
            return False
        self._due = now + LOOK_SECONDS
        found = signature(self._paths)
        if found == self._known:
            return False
        self._known = found
        return True

    def again(self) -> None:
        """What was found cannot be used: `changed` is true at the next look, too."""
        self._known = ()
