"""Processes of the check: in sessions of their own, asked by lines of JSON, always ended."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
START = Path(__file__).resolve().parent / "start.py"


Command = Callable[..., Mapping[str, Any]]


def wait_for(condition: Callable[[], Any], timeout: float, what: str, every: float = 0.05) -> Any:
    """The first true value of `condition`; TimeoutError names `what`."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {timeout:.0f} s: {what}")
        time.sleep(every)
    return value


def _end_with_parent() -> None:
    """In the child: the kernel ends it when this process is gone, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """One process; a context manager that ends it. Its stderr goes to `log`."""

    def __init__(self, command: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None,
                 asked: bool = False) -> None:  # fmt: skip
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE if asked else subprocess.DEVNULL,
                stdout=subprocess.PIPE if asked else out,
                stderr=out,
                env=env,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self.pid = self.process.pid

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, timeout: float = 15.0) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(self.pid, signal.SIGKILL)  # its own session: nobody else is in it
                self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def last_words(self, most: int = 600) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return text.strip()[-most:]

    def check_alive(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"a process ended ({self.process.returncode}): {self.last_words()}")


class Asked(Child):
    """A module of this folder that answers each line of JSON with one: `ask(do=..., ...)`."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, *,
                 python: str = sys.executable, env: Mapping[str, str] | None = None,
                 timeout: float = 60.0) -> None:  # fmt: skip
        super().__init__([python, str(START), name, *arguments], log, env=env, asked=True)
        self._rest = b""
        try:
            self.hello = self._answer(timeout)
        except BaseException:
            self.stop()
            raise

    def ask(self, do: str, *, within: float = 60.0, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer(within)

    def _answer(self, timeout: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        end = time.monotonic() + timeout
        while b"\n" not in self._rest:
            ready, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no answer within {timeout:.0f} s: {self.last_words()}")
            data = os.read(fd, 1 << 16)
            if not data:
                self.process.wait()
                self.check_alive()
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


def serve(hello: Mapping[str, Any], commands: Mapping[str, Command]) -> int:
    """The other end of `Asked`: until standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not fall between the answers
    out.write(json.dumps(dict(hello) | {"pid": os.getpid()}) + "\n")
    out.flush()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = dict(commands[request.pop("do")](**request))
            answer["end_ns"] = time.monotonic_ns()
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()
    return 0
