"""A real agent with its configuration file, and what it reports, read back window by window."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from tests.gpu.host import Host
from tests.gpu.process import Asked, Child, wait_for
from tests.gpu.runtime import Runtime

NODE = "gpu-check"
WINDOW_SECONDS = 0.25
HELD_NS = 10**9  # window.group_grace_seconds
STREAMS = ("none", "legacy", "per_thread", "named", "unread")  # StreamKind
COUNTERS = ("launches", "graph_launches", "syncs")

Window = dict[str, Any]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Watch:
    """The receiver runs all the time, the agent when told. A context manager."""

    def __init__(self, folder: Path, runtime: Runtime, host: Host) -> None:
        self._folder, self._runtime, self._host = folder, runtime, host
        self._output = folder / "windows.jsonl"
        self._output.touch()
        self._sink: Asked | None = None
        self._agent: Child | None = None
        self.config = folder / "agent.toml"

    def __enter__(self) -> Watch:
        self._sink = Asked("sink", [str(self._output)], self._folder / "sink.log",
                           python=self._runtime.python, env=self._runtime.env)  # fmt: skip
        self._port = _free_port()
        self.config.write_text(self._settings(int(self._sink.hello["port"])))
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_agent()
        if self._sink is not None:
            self._sink.stop()

    def _settings(self, sink_port: int) -> str:
        values: dict[str, dict[str, object]] = {
            "node": {"name": NODE},
            "collector": {"addresses": [f"127.0.0.1:{sink_port}"]},
            "window": {
                "seconds": WINDOW_SECONDS,
                "drain_seconds": 0.05,
                "scan_seconds": 0.25,
            },
            "probes": {"interpreter": self._runtime.bcc, "include": list(self._host.include)},
            "metrics": {"listen": f"127.0.0.1:{self._port}"},
        }
        return "".join(
            f"[{section}]\n" + "".join(f"{key} = {json.dumps(v)}\n" for key, v in keys.items())
            for section, keys in values.items()
        )

    def command(self, *arguments: str) -> list[str]:
        return [self._runtime.python, "-m", "lanterne.agent.main", *arguments]

    def doctor(self) -> tuple[int, dict[str, Any]]:
        """(exit status, its JSON)."""
        done = subprocess.run(
            self.command("doctor", "--json", "--config", str(self.config)),
            env=dict(self._runtime.env), capture_output=True, text=True, check=False, timeout=90,
        )  # fmt: skip
        if not done.stdout.strip():
            raise RuntimeError(f"doctor printed nothing: {done.stderr.strip()[-600:]}")
        report: dict[str, Any] = json.loads(done.stdout)
        return done.returncode, report

    def start_agent(self, timeout: float = 60.0) -> None:
        """Unless one runs. Returns when the probes are loaded and its own page answers."""
        if self._agent is not None:
            self._agent.check_alive()
            return
        agent = Child(self.command("--config", str(self.config)), self._folder / "agent.log",
                      env=self._runtime.env)  # fmt: skip
        self._agent = agent

        def answers() -> bool:
            agent.check_alive()
            return bool(self.page())

        wait_for(answers, timeout, "the agent's page answers")

    def stop_agent(self) -> None:
        if self._agent is not None:
            self._agent.stop()
            self._agent = None

    def page(self) -> str:
        """The agent's own metrics; "" where it does not answer."""
        try:
            url = f"http://127.0.0.1:{self._port}/metrics"
            with urllib.request.urlopen(url, timeout=5) as reply:
                text: str = reply.read().decode()
                return text
        except (OSError, urllib.error.URLError):
            return ""

    def wait_attached(self, *kinds: str, timeout: float = 15.0) -> None:
        """Until a library of each kind has its probes: a communicator made now is seen made."""
        found = [f'kind="{kind}",state="attached"' for kind in kinds]

        def attached() -> bool:
            lines = [line for line in self.page().splitlines() if not line.endswith(" 0.0")]
            return all(any(label in line for line in lines) for label in found)

        wait_for(attached, timeout, f"libraries of kind {kinds} are attached")

    def windows(self, since_ns: int = 0) -> list[Window]:
        """Every window received that ended after `since_ns` (CLOCK_MONOTONIC)."""
        lines = self._output.read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [window for window in found if window["end_ns"] > since_ns]

    def settled(self, at_ns: int, timeout: float = 20.0) -> Window:
        """The first window by which all is told that was done before `at_ns`: the newest group of
        sends and receives is held for a while."""

        def later() -> Window | None:
            if self._agent is not None:
                self._agent.check_alive()
            for window in self.windows(at_ns):
                if window["start_ns"] >= at_ns + HELD_NS:
                    return window
            return None

        found: Window = wait_for(later, timeout, "a window after the phase")
        return found

    def counters(self, pid: int, at_ns: int) -> dict[str, int] | None:
        """CUDA totals of a process at `at_ns` or a little later; None where it is not reported."""
        for process in self.settled(at_ns)["processes"]:
            if process.get("pid") == pid:
                return {name: int(process.get(name, 0)) for name in COUNTERS}
        return None

    def bins(self, pid: int, at_ns: int) -> Counter[tuple[str, str, str]]:
        """The same by device ("-1": unknown), kind of stream and counter; what is 0 is left out."""
        found: Counter[tuple[str, str, str]] = Counter()
        for process in self.settled(at_ns)["processes"]:
            for one in process.get("cuda", ()) if process.get("pid") == pid else ():
                key = str(one.get("device", 0)), STREAMS[one.get("stream", 0)]
                for name in COUNTERS:
                    found[(*key, name)] += int(one.get(name, 0))
        return +found

    def communicators(self, pid: int, at_ns: int) -> dict[int, dict[str, Any]]:
        """hash -> the newest description of each communicator of a process, up to `at_ns`."""
        self.settled(at_ns)
        return {
            int(comm["comm_hash"]): comm
            for window in self.windows()
            for comm in window["communicators"]
            if comm.get("pid") == pid
        }

    def operations(self, pid: int, comm_hash: int, since_ns: int, at_ns: int) -> Counter[str]:
        """Operations of one communicator, by name, that ended up in windows after `since_ns`."""
        self.settled(at_ns)
        found: Counter[str] = Counter()
        for window, row in self.rows(pid, since_ns):
            if int(window["communicators"][row["communicator"]]["comm_hash"]) == comm_hash:
                found[row["op"]] += row["count"]
        return found

    def rows(self, pid: int, since_ns: int) -> list[tuple[Window, dict[str, Any]]]:
        """Summary rows of a process's communicators."""
        return [
            (window, row)
            for window in self.windows(since_ns)
            for row in window["summaries"]
            if window["communicators"][row["communicator"]].get("pid") == pid
        ]

    def wait_seen(self, pid: int, timeout: float = 15.0) -> None:
        """Until the agent reports this process."""

        def seen() -> bool:
            if self._agent is not None:
                self._agent.check_alive()
            newest = self.windows(time.monotonic_ns() - int(3e9))
            return any(p.get("pid") == pid for window in newest for p in window["processes"])

        wait_for(seen, timeout, f"process {pid} is reported")
