"""The rig's NCCL as others ship it: linked into a program, into a framework library, renamed.

`rigcall` in every one of these forms, each in a folder of its own beside the rig's libcuda.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.rig.build import BUILD, COMMON, SOURCES, RigPaths, Variant, build, source_digest

HALF_HIDDEN = "{ global: nccl*; local: *; };\n"


@dataclass(frozen=True)
class Form:
    """`library`: name of the file that the NCCL is in; empty: it is in the program itself."""

    library: str = ""
    exports: str = ""  # a linker's version script
    stripped: bool = False


FORMS: dict[str, Form] = {
    # No .dynsym entries of NCCL's at all, only .symtab.
    "program": Form(),
    "framework": Form("libframework.so"),
    # As a framework with a version script has it: pncclX stand in .symtab only.
    "half-hidden": Form("libframework.so", exports=HALF_HIDDEN),
    # AMD's name for it; same functions, as far as they are probed.
    "rccl": Form("librccl.so.1"),
    # Nothing is left but its texts: it cannot be probed.
    "program-stripped": Form(stripped=True),
    "renamed": Form("libvendor_collectives.so.7"),
    "renamed-stripped": Form("libvendor_collectives.so.7", stripped=True),
}


def build_linked(form: str) -> RigPaths:
    """`call` of the result is the program; its NCCL is where the form says."""
    made = FORMS[form]
    base = build()
    root = BUILD / f"linked-{form}"
    root.mkdir(parents=True, exist_ok=True)
    with (BUILD / "linked.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        digest = source_digest(Variant()) + Path(__file__).read_text() + repr(made)
        stamp = root / "stamp"
        if not stamp.exists() or stamp.read_text() != digest:
            archive = _archive(source_digest(Variant()))
            shutil.copy2(base.cuda, root / base.cuda.name)
            _link(root, made, archive)
            stamp.write_text(digest)
    return RigPaths(root)


def _archive(digest: str) -> Path:
    folder = BUILD / "objects"
    archive = folder / "libnccl_static.a"
    stamp = folder / "stamp"
    if stamp.exists() and stamp.read_text() == digest:
        return archive
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sources = sorted((SOURCES / "nccl").glob("*.c"))
    _run(
        [_gcc(), *COMMON, "-fvisibility=hidden", f"-I{SOURCES}/include", f"-I{SOURCES}/nccl",
         "-c", *map(str, sources)], folder,
    )  # fmt: skip
    _run(["ar", "rcs", str(archive), *(f"{path.stem}.o" for path in sources)], folder)
    stamp.write_text(digest)
    return archive


def _link(root: Path, form: Form, archive: Path) -> None:
    whole = ["-Wl,--whole-archive", str(archive), "-Wl,--no-whole-archive"]
    sources = [str(path) for path in sorted((SOURCES / "call").glob("*.c"))]
    nccl = whole
    if form.library:
        script = root / "exports.map"
        script.write_text(form.exports)
        _run(
            [_gcc(), *COMMON, "-shared", f"-Wl,-soname,{form.library}", "-o", form.library, *whole,
             *([f"-Wl,--version-script={script}"] if form.exports else []), "-ldl"], root,
        )  # fmt: skip
        if form.stripped:
            _run(["strip", "-s", form.library], root)
        nccl = [f"-l:{form.library}"]
    _run(
        [_gcc(), *COMMON, "-DnowNs=callNowNs",  # both have one of their own
         f"-I{SOURCES}/include", f"-I{SOURCES}/call", "-Wl,-rpath,$ORIGIN",
         "-o", "rigcall", *sources, f"-L{root}", *nccl, "-l:libcuda.so.1", "-lm", "-ldl"], root,
    )  # fmt: skip
    if form.stripped and not form.library:
        (root / "kernels").write_bytes(bytes(64))  # as of a program with CUDA kernels
        _run(["objcopy", "--strip-all", "--add-section", ".nv_fatbin=kernels", "rigcall"], root)


def _gcc() -> str:
    return os.environ.get("CC", "gcc")


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed in {folder}:\n{done.stderr}")
