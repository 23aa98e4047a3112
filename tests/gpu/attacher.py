"""Puts the probes on libraries and takes them off again, as told; compiles them once.

start.py attacher INTERPRETER PATTERN...      (the Python that has bcc; no pattern: all)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.gpu.process import serve

Answer = Mapping[str, Any]
COUNTS = ("launches", "graph_launches", "syncs")


class Switch:
    def __init__(self, programs: Any, patterns: list[str]) -> None:
        self._programs = programs
        self._patterns = patterns
        self._attacher: Any = None

    def attach(self) -> Answer:
        from lanterne.agent.attach import Attacher

        self._attacher = Attacher(self._programs, include=self._patterns)
        scan = self._attacher.scan()
        probed = [one for one in self._attacher.libraries.values() if one.state == "attached"]
        return {"probes": sum(len(one.sites) for one in probed), "failed": list(scan.failed),
                "kinds": sorted(one.kind for one in probed)}  # fmt: skip

    def detach(self) -> Answer:
        if self._attacher is not None:
            self._attacher.close()
            self._attacher = None
        return {}

    def counts(self, pid: int) -> Answer:
        use = self._programs.cuda().get(pid)
        return {name: getattr(use, name) if use is not None else 0 for name in COUNTS}


def main(arguments: list[str]) -> int:
    from lanterne.agent.kernel import load

    with load(interpreter=arguments[0]) as programs:
        switch = Switch(programs, arguments[1:])
        try:
            return serve(
                {"method": programs.method},
                {"attach": switch.attach, "detach": switch.detach, "counts": switch.counts},
            )
        finally:
            switch.detach()
