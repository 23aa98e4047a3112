"""Makes build/gpu-bundle: the check, and all that a GPU host without network may lack.

    python -m tests.gpu.bundle [--out FOLDER] [--rig]

The archive holds a root folder of Debian 12: Python 3.11, bcc with LLVM, the C library, and below
dist-packages Lanterne with what it needs. Its own C library makes it independent of the host's, so
one archive serves every host. With --rig it holds Lanterne alone, for the check's own test.

Made on Debian 12, x86-64, with gcc. LLVM links two libraries for what a BPF compilation never
does (the Z3 solver, Windows manifests; 17 MB packed with what the second needs). Small stand-ins
with the same symbols take their places: their functions stop the process.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

from tests.gpu.runtime import ARCHIVE, LIBRARIES, MANIFEST, PLUGIN, SITE, wrapper

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 60_000_000
DEBIAN = "12"
PYTHON = "3.11"
PACKAGES = (
    "libc6", "libgcc-s1", "libstdc++6", "zlib1g",
    "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib",
    "libssl3", "libexpat1", "libbz2-1.0", "libuuid1", "liblzma5", "libffi8", "libtinfo6",
    "python3-bpfcc", "libbpfcc", "libclang-cpp14", "libllvm14", "libelf1", "libbpf1", "libedit2",
    "libbsd0", "libmd0",
)  # fmt: skip
STAND_INS = {"libz3-4": "libz3.so.4", "libxml2": "libxml2.so.2"}
IMPORTS = """
import sys, bcc, grpc, lanterne.agent.daemon, lanterne.agent.doctor, pynvml
import lanterne.proto.telemetry_pb2, google.protobuf.json_format
print(sys.prefix)
"""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
# Modules of Python whose libraries would have to come along.
UNUSED_MODULES = ("_sqlite3", "_crypt", "_curses", "_curses_panel", "_dbm",
                  "nis", "readline", "_test*")  # fmt: skip
DROPPED = (
    "usr/share", "usr/sbin", "etc", "var", "usr/lib/valgrind",
    "usr/lib/x86_64-linux-gnu/gconv", "lib/x86_64-linux-gnu/audit",
    *(f"usr/lib/python3.11/lib-dynload/{name}.*" for name in UNUSED_MODULES),
    f"{SITE}/numpy/**/tests", f"{SITE}/numpy/_core/include", f"{SITE}/numpy/f2py",
    f"{SITE}/**/*.pyi", f"{SITE}/**/*.a",
)  # fmt: skip


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True,
                          check=False)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: {done.stderr.strip()[-800:]}")
    return done.stdout


def fetch_packages(names: Iterable[str], folder: Path) -> dict[str, str]:
    """Downloads packages by apt -> versions."""
    folder.mkdir()
    run("apt-get", "download", "-o", "APT::Sandbox::User=root", *names, cwd=folder)
    found = {}
    for deb in folder.glob("*.deb"):
        name, version = run("dpkg-deb", "-W", "--showformat=${Package} ${Version}", deb).split()
        found[name] = version
    missing = set(names) - set(found)
    if missing:
        raise SystemExit(f"apt has not given: {', '.join(sorted(missing))}")
    return found


def extract(folder: Path, root: Path) -> None:
    for deb in sorted(folder.glob("*.deb")):
        run("dpkg-deb", "-x", deb, root)


def add_wheels(root: Path, work: Path) -> dict[str, str]:
    """What Lanterne's agent needs, unpacked where the bundled Python looks -> versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["agent"]]
    folder = work / "wheels"
    run(sys.executable, "-m", "pip", "download", "-q", "--only-binary", ":all:", "-d", folder,
        "--python-version", PYTHON, "--implementation", "cp",
        *(f"--platform={name}" for name in PLATFORMS), *wanted)  # fmt: skip
    found = {}
    for wheel in sorted(folder.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        found[name] = version
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(root / SITE)
    return found


def add_lanterne(root: Path) -> str:
    """The agent's side as an installation would have it -> version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in ("agent", "probes", "proto", "service"):
        shutil.copytree(ROOT / name, root / SITE / "lanterne" / name,
                        ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    version = str(project["version"])
    info = root / SITE / f"lanterne-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lanterne\nVersion: {version}\n")
    return version


def add_stand_in(real: Path, users: Iterable[Path], out: Path) -> int:
    """A library of the same name with the symbols that `users` take from `real` -> how many."""
    exported = {}
    for line in run("nm", "-D", "--defined-only", real).splitlines():
        *_, kind, symbol = line.split()
        name, _, version = symbol.partition("@@")
        exported[name] = (kind, version)
    used = {
        line.split()[-1].partition("@")[0]
        for user in users
        for line in run("nm", "-D", "--undefined-only", user).splitlines()
    }
    names = sorted(used & exported.keys())
    code, versions = [], dict[str, list[str]]()
    for name in names:
        kind, version = exported[name]
        data = kind in "BDR"
        code.append(f"void *{name};" if data else f"void {name}(void) {{ __builtin_trap(); }}")
        versions.setdefault(version, []).append(name)
    script = "".join(
        f"{version or 'NONE'} {{ global: {'; '.join(found)}; }};\n"
        for version, found in versions.items()
        if version
    )
    with tempfile.TemporaryDirectory() as tmp:
        source, table = Path(tmp, "stand_in.c"), Path(tmp, "versions")
        source.write_text("\n".join(code) + "\n")
        table.write_text(script)
        run("gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{out.name}", "-o", out, source,
            *([f"-Wl,--version-script={table}"] if script else []))  # fmt: skip
    return len(names)


def slim(root: Path) -> None:
    for pattern in DROPPED:
        for path in list(root.glob(pattern)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    for path in list(root.rglob("*")):
        # Absolute links would lead into the host.
        if path.is_symlink() and path.readlink().is_absolute():
            path.unlink()


def check_complete(root: Path) -> None:
    """Every library that one in the archive names is in it."""
    have = {path.name for path in root.rglob("*.so*")} | {"linux-vdso.so.1"}
    lacking = set()
    for path in root.rglob("*.so*"):
        if path.is_file() and not path.is_symlink():
            needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", path))
            lacking |= {f"{path.name} needs {name}" for name in needed if name not in have}
    if lacking:
        raise SystemExit("the bundle would lack: " + "; ".join(sorted(lacking)))


def check_imports(python: Path) -> str:
    """All that an agent and its compiler import, as they are started: isolated, no environment."""
    done = subprocess.run([str(python), "-I", "-B", "-c", IMPORTS], env={}, capture_output=True,
                          text=True, check=False)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the bundled Python fails: {done.stderr.strip()[-800:]}")
    return done.stdout


def pack(root: Path, archive: Path) -> None:
    """By xz with its filter for x86 code, which saves a tenth; any liblzma reads it.

    Blocks are three dictionaries long: larger ones save little and leave no work for other cores.
    """
    with tempfile.TemporaryDirectory() as tmp:
        plain = Path(tmp, "runtime.tar")
        with tarfile.open(plain, "w") as out:
            out.add(root, arcname=".", filter=_owned_by_nobody)
        with archive.open("wb") as to:
            subprocess.run(
                ["xz", "-T0", "--x86", "--lzma2=preset=6,dict=32MiB", "-c", str(plain)],
                stdout=to, check=True,
            )  # fmt: skip


def _owned_by_nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def add_check(out: Path) -> None:
    folder = out / "tests" / "gpu"
    folder.mkdir(parents=True)
    for path in Path(__file__).resolve().parent.iterdir():
        if path.name == "check" or (path.suffix == ".py" and not path.name.startswith("test_")):
            shutil.copy2(path, folder / path.name)
    run("make", "-s", "-C", ROOT / "probes" / "nccl_profiler", f"OUT={out.resolve()}")
    assert (out / PLUGIN).exists()


def add_root(root: Path, work: Path) -> dict[str, object]:
    """Python, bcc and what Lanterne needs -> versions."""
    packages = fetch_packages(PACKAGES, work / "debs")
    extract(work / "debs", root)
    wheels = add_wheels(root, work)
    fetch_packages(STAND_INS, work / "replaced")
    extract(work / "replaced", work / "real")
    users = [next(root.rglob(name)) for name in ("libLLVM-14.so.1", "libclang-cpp.so.14")]
    for soname in STAND_INS.values():
        (real,) = (work / "real").rglob(soname)
        add_stand_in(real, users, root / LIBRARIES[1] / soname)
    return {"packages": packages, "wheels": wheels}


def make(out: Path, *, rig: bool) -> int:
    """Makes or replaces the folder `out` -> its bytes."""
    if out.exists() and not (out / MANIFEST).exists():
        raise SystemExit(f"{out} is not a bundle: it will not be replaced")
    with tempfile.TemporaryDirectory(prefix="gpu-bundle-") as name:
        work = Path(name)
        root, made = work / "root", work / "made"
        (root / SITE).mkdir(parents=True)
        made.mkdir()
        versions = {} if rig else add_root(root, work)
        versions["lanterne"] = add_lanterne(root)
        slim(root)
        if not rig:
            check_complete(root)
            check_imports(wrapper(root, f"usr/bin/python{PYTHON}", ()))
            (root / "python").unlink()
        pack(root, made / ARCHIVE)
        add_check(made)
        manifest = {"python": None if rig else f"usr/bin/python{PYTHON}", "versions": versions}
        (made / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        size = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
        if size >= MAX_BYTES:
            raise SystemExit(f"the bundle would have {size:,} bytes; {MAX_BYTES:,} is the limit")
        shutil.rmtree(out, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, out)
    return size


def main(arguments: list[str]) -> int:
    top = argparse.ArgumentParser(prog="tests.gpu.bundle")
    top.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-bundle")
    top.add_argument("--rig", action="store_true", help="Lanterne alone")
    options = top.parse_args(arguments)
    release = platform.freedesktop_os_release().get("VERSION_ID", "")
    if not options.rig and (platform.machine() != "x86_64" or release != DEBIAN):
        raise SystemExit(f"gpu-bundle is made on Debian {DEBIAN}, x86-64: its packages are named")
    size = make(options.out, rig=options.rig)
    print(f"{options.out}: {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
