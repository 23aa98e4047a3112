"""What changes with every edit, as one archive: Lanterne as it is installed, and its tests."""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.vm.image import BUILD, ROOT, command

FILES = ("pyproject.toml", "README.md", "LICENSE")
PACKAGES = ("agent", "probes", "proto", "service", "collector")
# Where the guest's pytest looks; the rig and the small libraries are compiled there.
TESTS = (
    "conftest.py", "stack.py", "kernel", "contract", "unit", "rig", "plugin", "parcagpu", "vm",
)  # fmt: skip
# What tests build in the guest beside those: the profiler plugin.
SOURCES = ("probes/nccl_profiler",)


def pack(
    target: Path,
    selection: Sequence[str],
    *,
    conditions: str | None = "",
    take: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> None:
    """An archive with site/ (the installed packages), tests/ and pyproject.toml.

    ``selection``: pytest's arguments. ``conditions``: doctor is tried under those whose names have
    this in them; None: under none. ``take``: more of the tree, by path. ``environment``: variables
    of the tests.

    The packages are built from a copy: other targets build in the tree itself.
    """
    with tempfile.TemporaryDirectory(dir=BUILD) as temporary:
        copy, site = Path(temporary) / "source", Path(temporary) / "site"
        copy.mkdir()
        for name in PACKAGES:
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in FILES:
            shutil.copy(ROOT / name, copy / name)
        command(
            [
                sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation",
                "--disable-pip-version-check", "--target", str(site), str(copy),
            ],
            target.with_suffix(".log"),
        )  # fmt: skip
        chosen = Path(temporary) / "selection"
        chosen.write_text("".join(f"{one}\n" for one in selection))
        with tarfile.open(target, "w") as archive:
            archive.add(site, "site")
            archive.add(ROOT / "pyproject.toml", "pyproject.toml")
            for name in TESTS:
                archive.add(ROOT / "tests" / name, f"tests/{name}", filter=_no_caches)
            for name in (*SOURCES, *take):
                archive.add(ROOT / name, name, filter=_no_caches)
            archive.add(chosen, "tests/vm/selection")
            chosen.write_text(json.dumps(dict(environment or {})))
            archive.add(chosen, "tests/vm/environment")
            if conditions is not None:
                chosen.write_text(conditions)
                archive.add(chosen, "tests/vm/with-doctor")


def _no_caches(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in member.name else member
