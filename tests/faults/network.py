"""A network namespace with a way to this one that can be cut: from then on packets vanish."""

from __future__ import annotations

import os
import subprocess
from types import TracebackType


class Namespace:
    """`prefix` runs a command in it. Two pairs of interfaces: over the first go the agents' reports
    (`here` is this side's address), over the second their metrics (`there` is that side's)."""

    def __init__(self) -> None:
        number = os.getpid() % 250
        self.name = f"lnfault{os.getpid()}"
        self._links = [(f"lnf{os.getpid()}{side}", f"lnf{os.getpid()}{side}p") for side in "ab"]
        self.here, self.there = f"198.18.{number}.1", f"198.18.{number}.130"
        self._addresses = (
            (f"{self.here}/25", f"198.18.{number}.2/25"),
            (f"198.18.{number}.129/25", f"{self.there}/25"),
        )
        self.prefix = ("nsenter", f"--net=/run/netns/{self.name}")

    def __enter__(self) -> Namespace:
        _ip("netns", "add", self.name)
        try:
            for (ours, theirs), addresses in zip(self._links, self._addresses, strict=True):
                _ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", self.name)
                _ip("address", "add", addresses[0], "dev", ours)
                _ip("link", "set", ours, "up")
                _ip("-n", self.name, "address", "add", addresses[1], "dev", theirs)
                _ip("-n", self.name, "link", "set", theirs, "up")
            _ip("-n", self.name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for ours, _ in self._links:
            subprocess.run(["ip", "link", "delete", ours], check=False, capture_output=True)
        _ip("netns", "delete", self.name)

    def cut(self) -> None:
        """From now on what either side sends is dropped; no connection is reset."""
        _ip("link", "set", self._links[0][0], "down")

    def heal(self) -> None:
        _ip("link", "set", self._links[0][0], "up")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
