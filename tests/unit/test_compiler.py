"""Who compiles the programs is another process, and may be no help."""

from __future__ import annotations

from pathlib import Path

import pytest

from lanterne.agent import compiler
from lanterne.agent.errors import LoaderError


def interpreter(folder: Path, does: str) -> str:
    path = folder / "interpreter"
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    return str(path)


def test_one_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_LOAD_TIMEOUT_S", 0.2)
    slow = interpreter(tmp_path, f"echo $$ >{tmp_path}/pid; exec sleep 1000")
    with pytest.raises(LoaderError, match=r"more than 0\.2 s: this host's processors have no time"):
        compiler.run_loader(Path("loader.py"), slow, {})
    pid = int((tmp_path / "pid").read_text() or 0) if (tmp_path / "pid").exists() else 0
    assert not pid or not Path(f"/proc/{pid}").exists()


def test_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoaderError, match=r"absent: No such file.*python3-bpfcc"):
        compiler.run_loader(Path("loader.py"), str(tmp_path / "absent"), {})


def test_what_one_says_as_it_dies_is_told(tmp_path: Path) -> None:
    broken = interpreter(tmp_path, "echo cannot load libbcc >&2; exit 1")
    with pytest.raises(LoaderError, match="cannot load libbcc"):
        compiler.run_loader(Path("loader.py"), broken, {})
