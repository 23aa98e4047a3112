"""A real collector and a real agent as processes, for end-to-end tests, the demo and the bench.

Both are started from the console scripts of this interpreter, with configuration files in a
folder of their own. Only processes started here are ended.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

SCRIPTS = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def wait_for(condition: Callable[[], Any], timeout: float, what: str, every: float = 0.1) -> Any:
    """The first true value of `condition`; TimeoutError names `what`."""
    end = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise TimeoutError(f"not within {timeout:.0f} s: {what}")
        time.sleep(every)


def fetch(url: str, timeout: float = 5.0) -> str:
    # Besides this host's own: the range for tests of networks (RFC 2544), in namespaces of tests.
    if not url.startswith(("http://127.0.0.1:", "http://198.18.")):
        raise ValueError(f"only local addresses are fetched: {url}")
    with urllib.request.urlopen(url, timeout=timeout) as reply:
        text: str = reply.read().decode()
        return text


def try_fetch(url: str) -> str | None:
    try:
        return fetch(url)
    except (OSError, urllib.error.URLError):
        return None


class Samples:
    """A scraped page: values by name and labels."""

    def __init__(self, text: str) -> None:
        self._rows = [
            (sample.name, dict(sample.labels), float(sample.value))
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def get(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        return [
            (have, value)
            for n, have, value in self._rows
            if n == name and all(have.get(k) == v for k, v in labels.items())
        ]

    def total(self, name: str, **labels: str) -> float:
        return sum(value for _, value in self.get(name, **labels))


def toml(sections: Mapping[str, Mapping[str, object]]) -> str:
    lines: list[str] = []
    for section, keys in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    return "\n".join(lines) + "\n"


def _merged(base: dict[str, dict[str, object]], more: Mapping[str, Mapping[str, object]] | None
            ) -> dict[str, dict[str, object]]:  # fmt: skip
    for section, keys in (more or {}).items():
        base.setdefault(section, {}).update(keys)
    return base


class Stack:
    """`lanterne-collector` and `lanterne-agent`, watching the libraries that `include` names.

    A test's own copy of a library is a file (inode) of its own: nobody else's job is seen.
    """

    def __init__(self, folder: Path, include: list[str], *, node: str = "demo",
                 agent: Mapping[str, Mapping[str, object]] | None = None,
                 collector: Mapping[str, Mapping[str, object]] | None = None,
                 env: Mapping[str, str] | None = None) -> None:  # fmt: skip
        self.folder = folder
        self.grpc_port, self.http_port, self.agent_port = free_port(), free_port(), free_port()
        self.collector_url = f"http://127.0.0.1:{self.http_port}"
        self.agent_url = f"http://127.0.0.1:{self.agent_port}"
        self._env = dict(os.environ) | dict(env or {})
        self.agent: subprocess.Popen[bytes] | None = None
        self.collector: subprocess.Popen[bytes] | None = None
        self.agent_config = folder / "agent.toml"
        self.collector_config = folder / "collector.toml"
        agent_base: dict[str, dict[str, object]] = {
            "node": {"name": node},
            "collector": {"addresses": [f"127.0.0.1:{self.grpc_port}"]},
            "probes": {"include": include},
            "metrics": {"listen": f"127.0.0.1:{self.agent_port}"},
        }
        collector_base: dict[str, dict[str, object]] = {
            "ingest": {"address": f"127.0.0.1:{self.grpc_port}"},
            "http": {"address": f"127.0.0.1:{self.http_port}"},
            "state": {"path": ""},  # not this machine's own
        }
        self.agent_config.write_text(toml(_merged(agent_base, agent)))
        self.collector_config.write_text(toml(_merged(collector_base, collector)))

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, script: str, config: Path) -> subprocess.Popen[bytes]:
        command = [str(SCRIPTS / script), "--config", str(config)]
        with (self.folder / f"{script}.log").open("ab") as log:
            # A session of its own: Ctrl-C at the terminal reaches only the launcher, which
            # then ends its processes in the right order.
            return subprocess.Popen(
                command, stdout=log, stderr=log, env=self._env, start_new_session=True
            )

    def start_collector(self, timeout: float = 30.0) -> None:
        self.collector = self._start("lanterne-collector", self.collector_config)
        self._wait_page(self.collector, f"{self.collector_url}/healthz", timeout)

    def start_agent(self, timeout: float = 60.0) -> None:
        """Returns when the probes are loaded and the agent's own page answers."""
        self.agent = self._start("lanterne-agent", self.agent_config)
        self._wait_page(self.agent, f"{self.agent_url}/metrics", timeout)

    def start(self) -> Stack:
        self.start_collector()
        self.start_agent()
        return self

    def _wait_page(self, process: subprocess.Popen[bytes], url: str, timeout: float) -> None:
        def answers() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"{process.args!r} ended:\n{self.logs()}")
            return try_fetch(url) is not None

        wait_for(answers, timeout, f"{url} answers; logs:\n{self.logs()}")

    def logs(self, last: int = 3000) -> str:
        parts = []
        for script in ("lanterne-collector", "lanterne-agent"):
            path = self.folder / f"{script}.log"
            if path.exists():
                parts.append(f"--- {script}\n{path.read_text(errors='replace')[-last:]}")
        return "\n".join(parts)

    def kill(self, which: str) -> None:
        """kill -9 of "agent" or "collector"."""
        process: subprocess.Popen[bytes] | None = getattr(self, which)
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def stop_one(self, which: str, timeout: float = 15.0) -> int:
        process: subprocess.Popen[bytes] | None = getattr(self, which)
        if process is None:
            return 0
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return int(process.returncode)

    def stop(self) -> None:
        self.stop_one("agent")
        self.stop_one("collector")

    def agent_metrics(self) -> Samples:
        return Samples(fetch(f"{self.agent_url}/metrics"))

    def collector_metrics(self) -> Samples:
        return Samples(fetch(f"{self.collector_url}/metrics"))

    def snapshot(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(fetch(f"{self.collector_url}/api/v1/snapshot"))
        return value

    def stragglers(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(fetch(f"{self.collector_url}/api/v1/stragglers"))
        return value

    def named(self) -> Iterator[dict[str, Any]]:
        """The rows of ranks that are named stragglers now."""
        yield from (row for row in self.stragglers()["rows"] if row["straggler"])
