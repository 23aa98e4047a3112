"""A hang in the log of the collector: when it begins, when who is missing changes, when it is over.

How long it lasts is in the metrics; a line a second would tell nothing more.
"""

from __future__ import annotations

import logging

from lanterne.collector.snapshot import CommunicatorView, HangView, Snapshot
from lanterne.collector.view import hang_text

log = logging.getLogger(__name__)

MOST = 256  # communicators that are remembered: beyond it a hang has no line


class HangLog:
    """Fed every snapshot, in one thread."""

    def __init__(self) -> None:
        self._said: dict[int, object] = {}  # by hash: what of the hang was told

    def tell(self, snapshot: Snapshot) -> None:
        comms = {comm.comm_hash: comm for comm in snapshot.communicators}
        for comm_hash in list(self._said):
            comm = comms.get(comm_hash)
            if comm is None or comm.hang is None:
                del self._said[comm_hash]
                if comm is not None:
                    log.info("hang over", extra=_whose(comm))
                else:
                    log.info("hang over: the communicator is gone")
        for comm_hash, comm in comms.items():
            if comm.hang is not None:
                self._hang(comm_hash, comm, comm.hang)

    def _hang(self, comm_hash: int, comm: CommunicatorView, hang: HangView) -> None:
        what, said = _what(hang), self._said.get(comm_hash)
        if said == what or (said is None and len(self._said) >= MOST):
            return
        self._said[comm_hash] = what
        log.warning("hang", extra={**_whose(comm), "state": hang_text(hang)})


def _what(hang: HangView) -> object:
    """What is worth another line; how long it lasts is not."""
    states = tuple((s.state, s.ranks) for s in hang.states)
    return hang.op, hang.seq, hang.missing, hang.gone, states


def _whose(comm: CommunicatorView) -> dict[str, object]:
    return {"workload": comm.workload, "communicator": comm.name, "library": comm.library}
