"""The archive for the virtual machines holds whatever the tests that run there import."""

from __future__ import annotations

import ast
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vm import payload, run

ROOT = Path(__file__).resolve().parents[2]


def modules_of(path: Path) -> Iterator[str]:
    """Names below `tests` that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "tests":
            yield from (f"tests.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from [node.module] if node.module.startswith("tests.") else []
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("tests."))


def needed(paths: list[Path]) -> set[Path]:
    """The files, and all that they import of the tests, in turn."""
    found: set[Path] = set()
    while paths:
        path = paths.pop()
        if path in found:
            continue
        found.add(path)
        for name in modules_of(path):
            at = ROOT.joinpath(*name.split("."))
            paths += [one for one in (at.with_suffix(".py"), at / "__init__.py") if one.exists()]
    return found


def test_nothing_is_missing_in_the_guest() -> None:
    ignored = {ROOT / word.partition("=")[2] for word in run.SELECTION if "--ignore=" in word}
    chosen = [ROOT / word for word in run.SELECTION if (ROOT / word).exists()]
    begin = [ROOT / "tests" / "conftest.py", *(path for path in chosen if path.is_file())]
    for folder in (path for path in chosen if path.is_dir()):
        begin += [path for path in folder.rglob("*.py") if path not in ignored]
    assert len(begin) > 10
    packed = {ROOT / "tests" / name for name in payload.TESTS}
    missing = {
        str(path.relative_to(ROOT)) for path in needed(begin) if not packed & {path, *path.parents}
    }
    assert missing == set(), "add them to TESTS in tests/vm/payload.py"


@pytest.mark.parametrize("name", [*payload.TESTS])
def test_what_is_packed_is_there(name: str) -> None:
    assert (ROOT / "tests" / name).exists()


def test_what_is_asked_for_travels_with_its_variables(tmp_path: Path) -> None:
    payload.BUILD.mkdir(parents=True, exist_ok=True)
    archive, asked = tmp_path / "payload", {"LANTERNE_PARCAGPU": "/lanterne/library"}
    taken = "docs/index.md"
    payload.pack(archive, ["-q", "tests/kernel"], conditions=None, take=[taken], environment=asked)
    with tarfile.open(archive) as packed:
        names = set(packed.getnames())

        def text(name: str) -> str:
            file = packed.extractfile(name)
            assert file is not None
            return file.read().decode()

        assert text("tests/vm/selection") == "-q\ntests/kernel\n"
        assert json.loads(text("tests/vm/environment")) == asked
        assert text(taken) == (ROOT / taken).read_text()
    assert "site/lanterne/agent/main.py" in names
    assert "tests/vm/with-doctor" not in names
