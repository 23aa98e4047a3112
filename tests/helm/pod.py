"""One container of a rendered pod as a local process.

    pod.py SPEC.json    (root, in the pod's network namespace)

The container's root is an overlay over this machine's, in a mount namespace of its own, with the
pod's volumes in it; the process has the user, the capabilities and the environment that the pod
gives it, and nothing else. The specification: ``folder`` (for the overlay), ``mounts`` (list of
path, source or null for an empty one, read_only), ``hosts`` (of /etc/hosts), ``traversable``
(folders that other users must get through: the interpreter may be in somebody's home),
``read_only``, ``user``, ``capabilities``, ``env``, ``command``.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CLONE_NEWNS = 0x00020000
SYSTEM = ("proc", "sys", "dev")


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def build_root(spec: dict[str, Any]) -> Path:
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    mount("--make-rprivate", "/")
    folder = Path(spec["folder"])
    folder.mkdir(parents=True)
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", folder)
    for name in ("upper", "work", "root"):
        (folder / name).mkdir()
    root = folder / "root"
    layers = f"lowerdir=/,upperdir={folder}/upper,workdir={folder}/work"
    mount("-t", "overlay", "-o", layers, "overlay", root)
    for path in spec["traversable"]:
        at = root / path.lstrip("/")
        at.chmod(at.stat().st_mode | 0o111)
    (root / "etc/hosts").write_text(spec["hosts"])
    targets = [root / path.lstrip("/") for path, _, _ in spec["mounts"]]
    for target, (_, source, _) in zip(targets, spec["mounts"], strict=True):
        if source is not None and Path(source).is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        else:
            target.mkdir(parents=True, exist_ok=True)
    if spec["read_only"]:
        mount("-o", "remount,ro", root)
    for name in SYSTEM:
        mount("--rbind", f"/{name}", root / name)
    for target, (_, source, read_only) in zip(targets, spec["mounts"], strict=True):
        if source is None:
            mount("-t", "tmpfs", "-o", "mode=777", "tmpfs", target)
        else:
            mount("--bind", source, target)
        if read_only:
            mount("-o", "remount,bind,ro", target)
    return root


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    os.chroot(build_root(spec))
    os.chdir("/")
    allowed = ",".join(["-all", *(f"+{name.lower()}" for name in spec["capabilities"])])
    user = str(spec["user"])
    os.execvpe(
        "setpriv",
        ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs",
         "--inh-caps=-all", f"--bounding-set={allowed}", *spec["command"]],
        spec["env"],
    )  # fmt: skip


if __name__ == "__main__":
    main()
