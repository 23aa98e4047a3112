"""`make deb`: lanterne-agent and lanterne-collector as Debian packages, with dpkg-deb alone.

Each package is a virtual environment below /usr/lib/lanterne that has a `site-packages` for every
Python in PYTHONS and the distribution's /usr/bin/python3 as its interpreter, which picks its own.
So nothing is fetched or built on the host, dpkg knows every file, and an upgrade of the host from
one of these Pythons to the next needs no new package. Files that are equal are stored once.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PYTHONS = ("3.11", "3.12", "3.13")  # Debian 12, Ubuntu 24.04, Debian 13
TOO_NEW = "3.14"
MAINTAINER = (
    f"{os.environ.get('DEBFULLNAME', 'Lanterne')} "
    f"<{os.environ.get('DEBEMAIL', 'packages@lanterne.example.org')}>"
)
# Nothing of ours uses them, and they are half of what the wheels hold.
UNUSED = ("**/tests", "numpy/f2py", "numpy/**/*.a", "**/*.pyi", "**/*.pyx", "bin", "include")
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
FOLDERS = ("agent", "collector", "probes", "proto", "service")
COPIED = (*FOLDERS, "pyproject.toml", "README.md", "LICENSE")


@dataclass(frozen=True)
class Package:
    name: str
    side: str  # extra of pyproject.toml, folder below /usr/lib/lanterne
    foreign: tuple[str, ...]  # what of lanterne the other side alone needs
    state: str  # folder below /var/lib
    depends: str
    summary: str
    description: str

    @property
    def venv(self) -> Path:
        return Path("usr/lib/lanterne") / self.side


PACKAGES = (
    Package(
        "lanterne-agent",
        "agent",
        ("collector",),
        "lanterne-agent",
        ", python3-bpfcc",
        "names the GPU everyone else is waiting for: agent of a GPU host",
        " Watches the collectives of every job on this host through eBPF uprobes,\n"
        " without any change to the job, and reports to lanterne-collector.",
    ),
    Package(
        "lanterne-collector",
        "collector",
        ("agent", "probes"),
        "lanterne",
        "",
        "names the GPU everyone else is waiting for: collector of a cluster",
        " Receives what lanterne-agent sees on every GPU host, works out which rank\n"
        " the others wait for and why, and exports it to Prometheus.",
    ),
)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, default=ROOT / "build" / "deb")
    options.add_argument("--revision", default="1", help="Debian revision, after the version")
    options.add_argument("--pythons", default=",".join(PYTHONS), help="which to carry")
    arguments = options.parse_args()
    pythons = tuple(arguments.pythons.split(","))
    arguments.out.mkdir(parents=True, exist_ok=True)
    wheels = arguments.out / "wheels"
    os.umask(0o022)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = f"{project['version']}-{arguments.revision}"
    with tempfile.TemporaryDirectory(dir=arguments.out) as scratch:
        own = build_wheel(Path(scratch))
        for package in PACKAGES:
            root = Path(scratch) / package.name
            fill(package, root, own, wheels, pythons)
            print(pack(package, root, version, pythons, arguments.out))
    return 0


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def architecture() -> str:
    return run("dpkg", "--print-architecture").strip()


def build_wheel(scratch: Path) -> Path:
    """Of a copy: setuptools leaves its traces in the folder that it builds."""
    copy = scratch / "source"
    copy.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.o", "*.so")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=ignore)
        else:
            shutil.copy2(source, copy / name)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
        "-w", scratch / "own", copy)  # fmt: skip
    (wheel,) = (scratch / "own").glob("lanterne-*.whl")
    return wheel


def fill(package: Package, root: Path, own: Path, wheels: Path, pythons: tuple[str, ...]) -> None:
    venv = root / package.venv
    for python in pythons:
        install(f"{own}[{package.side}]", wheels / python, python, site(venv, python))
        for folder in package.foreign:
            shutil.rmtree(site(venv, python) / "lanterne" / folder)
    link_equal_files(venv)
    for path in venv.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to("/usr/bin/python3")
    (venv / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    command = venv / "bin" / package.name
    # -I: neither the caller's folder nor $PYTHONPATH has a say in what a service runs.
    command.write_text(
        f"#!/{package.venv}/bin/python -I\nfrom lanterne.{package.side}.main import run\n\nrun()\n"
    )
    command.chmod(0o755)
    (root / "usr/bin").mkdir(parents=True)
    on_path = root / "usr/bin" / package.name
    on_path.symlink_to(f"../lib/lanterne/{package.side}/bin/{package.name}")
    place(root / "usr/lib/systemd/system", ROOT / package.side / f"{package.name}.service")
    settings = place(root / "etc/lanterne", ROOT / package.side / f"{package.name}.toml")
    if package.side == "agent":
        keep_batches(settings, f"/var/lib/{package.state}/spool")
    settings.rename(settings.with_name(f"{package.side}.toml"))


def keep_batches(settings: Path, folder: str) -> None:
    """On disk by default, in the folder that the unit makes: the sample file does not know one."""
    text, changes = re.subn(
        r"(?m)^(\[spool\].*\npath = )\"\" +#.*$", rf'\g<1>"{folder}"', settings.read_text()
    )
    if changes != 1:
        raise SystemExit(f"{settings.name}: no empty [spool] path to set")
    settings.write_text(text)


def site(venv: Path, python: str) -> Path:
    return venv / "lib" / f"python{python}" / "site-packages"


def install(what: str, cache: Path, python: str, target: Path) -> None:
    """Wheels for another interpreter than ours; those fetched before are not fetched again."""
    machine = MACHINES[architecture()]
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in range(17, 37)]
    foreign = (*platforms, f"--platform=manylinux2014_{machine}", f"--python-version={python}",
               "--implementation=cp", "--only-binary=:all:")  # fmt: skip
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    cache.mkdir(parents=True, exist_ok=True)
    run(*pip, "download", "-q", *foreign, "--find-links", cache, "-d", cache, what)
    run(*pip, "install", "-q", *foreign, "--no-index", "--find-links", cache, "--no-compile",
        "--no-warn-conflicts", "--ignore-requires-python", "--target", target, what)  # fmt: skip
    for own in cache.glob("lanterne-*"):
        own.unlink()
    for pattern in UNUSED:
        for path in sorted(target.glob(pattern), reverse=True):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def link_equal_files(folder: Path) -> None:
    seen: dict[tuple[str, int], Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        key = (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mode)
        first = seen.setdefault(key, path)
        if first is not path:
            path.unlink()
            path.hardlink_to(first)


def place(folder: Path, source: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / source.name
    shutil.copyfile(source, target)
    return target


def pack(package: Package, root: Path, version: str, pythons: tuple[str, ...], out: Path) -> Path:
    write_documents(package, root, version, pythons[0])
    control = root / "DEBIAN"
    files = sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink())
    size = sum({(s := p.stat()).st_ino: s.st_blocks for p in files}.values()) // 2
    sums = [f"{md5(p)}  {p.relative_to(root)}\n" for p in files if "etc" not in p.parts]
    control.mkdir()
    (control / "md5sums").write_text("".join(sums))
    (control / "conffiles").write_text(f"/etc/lanterne/{package.side}.toml\n")
    (control / "control").write_text(
        f"Package: {package.name}\nVersion: {version}\nArchitecture: {architecture()}\n"
        f"Maintainer: {MAINTAINER}\nInstalled-Size: {size}\nSection: net\nPriority: optional\n"
        f"Depends: python3 (>= {pythons[0]}), python3 (<< {TOO_NEW}), libc6 (>= 2.28)"
        f"{package.depends}\nDescription: {package.summary}\n{package.description}\n"
    )
    for script in ("postinst", "prerm", "postrm"):
        (control / script).write_text(filled(package, HERE / script))
        (control / script).chmod(0o755)
    made = out / f"{package.name}_{version}_{architecture()}.deb"
    run("dpkg-deb", "--root-owner-group", "-Zxz", "-z1", "--build", root, made)
    return made


def filled(package: Package, template: Path) -> str:
    text = template.read_text()
    for key, value in (
        ("@package@", package.name),
        ("@venv@", f"/{package.venv}"),
        ("@unit@", f"{package.name}.service"),
        ("@state@", package.state),
    ):
        text = text.replace(key, value)
    return text


def write_documents(package: Package, root: Path, version: str, python: str) -> None:
    documents = root / "usr/share/doc" / package.name
    documents.mkdir(parents=True)
    stamp = time.strftime("%a, %d %b %Y %H:%M:%S +0000", time.gmtime())
    changes = (
        f"{package.name} ({version}) stable; urgency=medium\n\n"
        f"  * What is new: CHANGELOG.md of this release.\n\n -- {MAINTAINER}  {stamp}\n"
    )
    compress(documents / "changelog.Debian.gz", changes)
    carried = [
        f"{found['Name']} {found['Version']}: "
        f"{found['License-Expression'] or (found['License'] or 'see its metadata').splitlines()[0]}"
        for path in sorted(site(root / package.venv, python).glob("*.dist-info/METADATA"))
        if (found := HeaderParser().parsestr(path.read_text(), headersonly=True))
    ]
    (documents / "copyright").write_text(
        "Lanterne. Apache-2.0 (/usr/share/common-licenses/Apache-2.0); its BPF programs\n"
        "GPL-2.0-only (/usr/share/common-licenses/GPL-2) or BSD-2-Clause.\n\n"
        "Copyright 2026 the Lanterne authors\n\n"
        "Carried along, each with its licence in its dist-info folder below\n"
        f"/{package.venv}:\n" + "".join(f"  {line}\n" for line in carried)
    )
    overrides = root / "usr/share/lintian/overrides"
    overrides.mkdir(parents=True)
    (overrides / package.name).write_text(filled(package, HERE / "overrides"))
    manuals = root / "usr/share/man/man8"
    manuals.mkdir(parents=True)
    shown = run(sys.executable, "-m", f"lanterne.{package.side}.main", "--help")
    shown = shown.replace("\\", "\\e").replace(str(ROOT / package.side), "/etc/lanterne")
    lines = ("\\&" + line if line[:1] in (".", "'") else line for line in shown.splitlines())
    text = "\n".join(lines).replace("-", "\\-")
    compress(
        manuals / f"{package.name}.8.gz",
        f'.TH {package.name.upper()} 8 "" "Lanterne {version}"\n.SH NAME\n'
        f"{package.name} \\- {package.summary}\n.SH DESCRIPTION\n.nf\n{text}\n.fi\n"
        f".SH FILES\n.I /etc/lanterne/{package.side}.toml\nexplains every setting.\n",
    )


def compress(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
