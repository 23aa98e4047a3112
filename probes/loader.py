"""Compiles the BPF programs with bcc and hands the file descriptors over.

Runs as a script under the interpreter that has bcc, in a short-lived child, so that LLVM's memory
goes when it ends: the agent's own process never imports bcc. It imports nothing of ours.

    loader.py SOCKET    (an inherited Unix stream socket)

Standard input has one JSON object: ``sources`` (paths, joined in order), ``include`` (folder with
record.h and the stub headers), ``defines``, ``attach_type``, ``programs``, ``maps`` (names), and
``rows`` (hex, one string per array element). The answer is one JSON line on the socket, with the
descriptors of maps and programs, in the order of its ``maps`` and ``programs``, attached to its
first byte; or ``{"error": ..., "kind": "no_bcc" | "compile" | "load"}``.
"""

from __future__ import annotations

import array
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any


def compile_and_load(spec: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    # bcc looks for ./include/linux/kconfig.h and the rest below this folder, and for nothing else.
    os.environ["BCC_KERNEL_SOURCE"] = spec["include"]
    try:
        from bcc import BPF
    except ImportError as error:
        return {"error": str(error), "kind": "no_bcc"}, []
    text = ""
    for path in spec["sources"]:
        source = Path(path)
        text += f'#line 1 "{source.name}"\n{source.read_text()}\n'
    flags = ["-I" + spec["include"]] + [
        f"-D{key}={value}" for key, value in spec["defines"].items()
    ]
    try:
        module = BPF(text=text, cflags=flags)
    except Exception as error:
        return {"error": str(error), "kind": "compile"}, []
    fds = []
    try:
        for name in spec["programs"]:
            function = module.load_func(name, BPF.KPROBE, attach_type=spec["attach_type"])
            fds.append(function.fd)
        rows = module["rows"]
        for index, row in enumerate(spec["rows"]):
            rows[rows.Key(index)] = rows.Leaf.from_buffer_copy(bytes.fromhex(row))
        fds += [module[name].map_fd for name in spec["maps"]]
    except Exception as error:
        return {"error": str(error), "kind": "load"}, []
    spec["module"] = module  # bcc closes the descriptors when the module goes: not before we send
    return {"programs": spec["programs"], "maps": spec["maps"]}, fds


def main() -> int:
    spec = json.load(sys.stdin)
    answer, fds = compile_and_load(spec)
    body = json.dumps(answer).encode() + b"\n"
    peer = socket.socket(fileno=int(sys.argv[1]))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = peer.sendmsg([body], rights)
    peer.sendall(body[sent:])
    peer.close()
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Not through interpreter shutdown: bcc's clean-up takes longer than the compilation.
    os._exit(code)
