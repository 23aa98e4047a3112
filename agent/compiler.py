"""The child that compiles the programs with bcc: starting it, and what it answers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from .errors import LoaderError

_LOAD_TIMEOUT_S = 120


def run_loader(script: Path, interpreter: str, spec: dict[str, Any]) -> dict[str, int]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, tempfile.TemporaryFile() as noise:
        with theirs:
            try:
                child = subprocess.Popen(
                    [interpreter, "-I", str(script), str(theirs.fileno())],
                    stdin=subprocess.PIPE,
                    stdout=noise,
                    stderr=noise,
                    pass_fds=[theirs.fileno()],
                    env={"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")},
                )
            except OSError as error:
                raise LoaderError(
                    f"cannot run the interpreter {interpreter}: {error.strerror}; set it to one "
                    "that has bcc (Debian: apt install python3-bpfcc, then /usr/bin/python3)"
                ) from error
        with child:
            try:
                answer, received = _talk(child, ours, spec)
            except TimeoutError as error:
                child.kill()
                raise LoaderError(
                    f"compiling and loading took more than {_LOAD_TIMEOUT_S} s: this host's "
                    "processors have no time for it; start the agent again when they have"
                ) from error
            except OSError as error:
                child.kill()
                raise LoaderError(f"the loader did not answer: {error}") from error
            child.wait(_LOAD_TIMEOUT_S)
        noise.seek(0, os.SEEK_END)
        noise.seek(max(0, noise.tell() - 4000))
        output = noise.read().decode(errors="replace").strip()
    if "error" not in answer and len(received) == len(answer["programs"]) + len(answer["maps"]):
        return dict(zip([*answer["programs"], *answer["maps"]], received, strict=True))
    for fd in received:
        os.close(fd)
    raise LoaderError(_explain(answer, interpreter, output))


def _talk(
    child: subprocess.Popen[bytes], ours: socket.socket, spec: dict[str, Any]
) -> tuple[dict[str, Any], list[int]]:
    ours.settimeout(_LOAD_TIMEOUT_S)
    assert child.stdin is not None  # noqa: S101
    try:
        child.stdin.write(json.dumps(spec).encode())
        child.stdin.close()
    except BrokenPipeError:
        pass  # it has ended already: its answer or its output says why
    body = b""
    received: list[int] = []
    while not body.endswith(b"\n"):
        part, fds, _, _ = socket.recv_fds(ours, 65536, 128)
        received += fds
        if not part:
            break
        body += part
    return (json.loads(body) if body else {"error": "no answer", "kind": "died"}), received


def _explain(answer: dict[str, Any], interpreter: str, output: str) -> str:
    error = answer.get("error", "descriptors are missing")
    if answer.get("kind") == "no_bcc":
        return (
            f"{interpreter} has no bcc ({error}): install it (Debian and Ubuntu: python3-bpfcc; "
            "Fedora: python3-bcc) or set the interpreter to one that has it"
        )
    what = {
        "compile": "bcc could not compile the programs",
        "load": "the kernel refused the programs",
    }.get(str(answer.get("kind")), "the loader child ended early")
    return f"{what}: {error}\n{output}".strip()
