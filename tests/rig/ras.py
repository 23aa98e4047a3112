"""The rig's RAS service: what NCCL says of a job's communicators, over TCP, in its text.

One server stands for the services of a job's processes, since each of them tells of all. What it
reports is the ranks' own truth.
"""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tests.rig.job import Job

FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")


class RasServer:
    """Listens on a port of its own, `address` for NCCL_RAS_ADDR. A context manager. ``report``
    makes the text of a verbose status; ``json``: whether this NCCL has that format (2.29)."""

    def __init__(
        self,
        report: Callable[[], str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        json: bool = True,
    ) -> None:
        self.queries = 0
        outer = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.connection.settimeout(30)
                while line := self.rfile.readline(1024).decode("ascii", "replace").strip():
                    command = line.lower()
                    if command == "verbose status":
                        outer.queries += 1
                        self.wfile.write(report().encode())
                        return
                    if command.startswith("client protocol "):
                        answer = "SERVER PROTOCOL 2"
                    elif command.startswith("timeout ") or (command == "set format json" and json):
                        answer = "OK"
                    else:
                        answer = f"ERROR: Unknown command {line}"
                    self.wfile.write(f"{answer}\n".encode())

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True

        self._server = Server((host, port), Handler)
        self.port = int(self._server.server_address[1])
        self.address = f"{host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> RasServer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def report(communicators: list[dict[str, Any]]) -> str:
    """The whole text. A communicator: hash, size, ranks (dictionaries of rank, host, pid)."""
    document = {
        "nccl_version": "2.29.7+cuda12.9",
        "cuda_runtime_version": 12090,
        "cuda_driver_version": 13000,
        "timestamp": time.strftime("%F %T"),
        "communicators_count": len(communicators),
        "communicators": [
            {
                "hash": f"{one['hash']:#x}",
                "secondary_hash": "0x1:0x2",
                "size": one["size"],
                "ranks_count": len(one["ranks"]),
                "missing_ranks_count": one["size"] - len(one["ranks"]),
                "ranks": [rank_entry(**rank) for rank in one["ranks"]],
                "missing_ranks": [],
            }
            for one in communicators
        ],
        "ras": {"collection_time_sec": 0.001, "timeouts_count": 0},
    }
    return json.dumps(document, indent=2) + "\n"


def rank_entry(
    rank: int, host: str, pid: int, *, destroyed: bool = False, aborted: bool = False
) -> dict[str, Any]:
    return {
        "rank": rank,
        "host": host,
        "pid": pid,
        "cuda_dev": 0,
        "nvml_dev": 0,
        "status": {
            "init_state": 0,
            "async_error": 0,
            "finalize_called": False,
            "destroy_flag": destroyed,
            "abort_flag": aborted,
        },
        "collective_counts": dict.fromkeys(FUNCTIONS, 0),
    }


def job_report(job: Job, host: str = "127.0.0.1") -> str:
    """Of all communicators of a job whose ranks have them."""
    found: dict[int, dict[str, Any]] = {}
    for pid, truth in zip(job.pids, job.truths(), strict=True):
        for comm in truth["comms"]:
            number = int(comm["hash"], 16)
            one = found.setdefault(number, {"hash": number, "size": comm["nranks"], "ranks": []})
            one["ranks"].append({"rank": comm["rank"], "host": host, "pid": pid})
    return report(list(found.values()))
