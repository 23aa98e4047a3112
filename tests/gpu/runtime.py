"""What the bundle brings, unpacked into a folder of its own: a Python with Lanterne and with bcc.

The bundled Python is started through the bundled dynamic loader with the bundled C library, so the
host's own versions of either do not matter. Only driver libraries come from the host.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
ARCHIVE = "runtime.tar.xz"
PLUGIN = "libnccl-profiler-lanterne.so"
SITE = "usr/lib/python3/dist-packages"  # where Debian's Python looks, isolated (-I) or not
LIBRARIES = ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "usr/lib/llvm-14/lib")
LOADER = "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"

WRAPPER = """\
#!/bin/sh
# -I of the caller leaves no environment to rely on: all that is needed stands here.
exec '{loader}' --library-path '{paths}'"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" '{python}' "$@"
"""


@dataclass(frozen=True)
class Runtime:
    """`python` runs Lanterne, `bcc` compiles its programs; `env` is what both are started with."""

    python: str
    bcc: str
    env: Mapping[str, str]
    plugin: Path | None
    versions: Mapping[str, Any]


def clean_env() -> dict[str, str]:
    """This environment without what would change another Python."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def unpack(bundle: Path, prefix: Path, *, python: str = "", bcc: str = "/usr/bin/python3",
           driver_folders: tuple[str, ...] = ()) -> Runtime:  # fmt: skip
    """Fills `prefix` from `bundle`.

    A bundle without a Python of its own (the rig's) runs under `python` and compiles with `bcc`.
    `driver_folders`: where the host keeps libnvidia-ml, if the loader's cache does not tell.
    """
    manifest: dict[str, Any] = json.loads((bundle / MANIFEST).read_text())
    prefix.mkdir(parents=True, exist_ok=True)
    with tarfile.open(bundle / ARCHIVE) as archive:
        for member in archive.getmembers():
            if member.name.startswith("/") or ".." in Path(member.name).parts:
                raise ValueError(f"{ARCHIVE} has a path that leads out of it: {member.name}")
        archive.extractall(prefix)
    plugin = bundle / PLUGIN
    env = clean_env()
    if manifest["python"]:
        python = bcc = str(wrapper(prefix, str(manifest["python"]), driver_folders))
    elif not python:
        raise ValueError("the bundle has no Python of its own, and none was named")
    else:
        env["PYTHONPATH"] = str(prefix / SITE)
    return Runtime(python, bcc, env, plugin if plugin.exists() else None, manifest["versions"])


def wrapper(prefix: Path, python: str, driver_folders: tuple[str, ...]) -> Path:
    """A script that starts the Python in `prefix`; it stands in `prefix` itself."""
    paths = [*(str(prefix / folder) for folder in LIBRARIES), *driver_folders]
    script = prefix / "python"
    script.write_text(
        WRAPPER.format(loader=prefix / LOADER, paths=":".join(paths), python=prefix / python)
    )
    script.chmod(0o755)
    return script
