"""Both programs read their settings by the same rules, though each has its own reader."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lanterne.agent import config as agent
from lanterne.agent.errors import ConfigError as AgentRefusal
from lanterne.collector import config as collector
from lanterne.collector.errors import ConfigError as CollectorRefusal


@dataclass(frozen=True)
class Side:
    name: str
    load: Callable[[Path | None, Mapping[str, str], Mapping[str, object]], Any]
    refusal: type[Exception]
    prefix: str
    tree: type[msgspec.Struct]
    # section, key: a number from `low` to `high`
    number: tuple[str, str, float, float]
    whole: tuple[str, str]
    text_list: tuple[str, str]


SIDES = (
    Side("agent", agent.load, AgentRefusal, agent.ENV_PREFIX, agent.AgentConfig,
         ("window", "seconds", 0.1, 60), ("collector", "queue_batches"),
         ("collector", "addresses")),
    Side("collector", collector.load, CollectorRefusal, collector.ENV_PREFIX,
         collector.CollectorConfig, ("analysis", "window_seconds", 1, 3600),
         ("ingest", "queue_batches"), ("tls", "shared_names")),
)  # fmt: skip
EACH = pytest.mark.parametrize("side", SIDES, ids=lambda side: side.name)


def value(config: Any, section: str, key: str) -> Any:
    return getattr(getattr(config, section), key)


def file(folder: Path, text: str) -> Path:
    path = folder / "c.toml"
    path.write_text(text)
    return path


def variable(side: Side, section: str, key: str) -> str:
    return f"{side.prefix}{section}_{key}".upper()


@EACH
def test_flags_then_environment_then_file_then_defaults(side: Side, tmp_path: Path) -> None:
    section, key, *_ = side.number
    path = file(tmp_path, f"[{section}]\n{key} = 5\n")
    env = {variable(side, section, key): "6"}
    flags: dict[str, object] = {f"{section}.{key}": "7"}
    assert value(side.load(path, env, flags), section, key) == 7.0
    assert value(side.load(path, env, {}), section, key) == 6.0
    assert value(side.load(path, {}, {}), section, key) == 5.0
    assert value(side.load(None, {}, {}), section, key) == value(side.tree(), section, key)


@EACH
@pytest.mark.parametrize(
    "text",
    ["nan", "inf", "-inf", '"5"', "true", "[5]", "{}", "1e400", "2026-01-01"],
)
def test_what_is_no_number_is_refused(side: Side, text: str, tmp_path: Path) -> None:
    section, key, *_ = side.number
    with pytest.raises(side.refusal, match=rf"c\.toml.*{section}\.{key}"):
        side.load(file(tmp_path, f"[{section}]\n{key} = {text}\n"), {}, {})


@EACH
def test_bounds_hold_from_every_origin(side: Side, tmp_path: Path) -> None:
    section, key, low, high = side.number
    for number in (low, high):
        config = side.load(file(tmp_path, f"[{section}]\n{key} = {number}\n"), {}, {})
        assert value(config, section, key) == number
    for number in (low / 2, high * 2):
        with pytest.raises(side.refusal, match=str(tmp_path)):
            side.load(file(tmp_path, f"[{section}]\n{key} = {number}\n"), {}, {})
        with pytest.raises(side.refusal, match=variable(side, section, key)):
            side.load(None, {variable(side, section, key): str(number)}, {})
        with pytest.raises(side.refusal):
            side.load(None, {}, {f"{section}.{key}": number})


@EACH
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[nowhere]\nkey = 1\n", ["nowhere"]),
        ("[log]\nnokey = 1\n", ["log.nokey", "level", "format"]),
        ("log = 1\n", ["log", "[log]"]),
        ('[log]\nlevel = "LOUD"\n', ["log.level", "LOUD", "debug", "warning"]),
        ('[log]\nformat = "xml"\n', ["log.format", "xml", "text", "json"]),
        ("[log\n", ["not valid TOML", "c.toml"]),
        ('[log]\nlevel = "info"\n[log]\nlevel = "debug"\n', ["not valid TOML"]),
    ],
)
def test_refusals_name_the_same_things(
    side: Side, text: str, words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(side.refusal) as refusal:
        side.load(file(tmp_path, text), {}, {})
    for word in words:
        assert word in str(refusal.value).replace("is not valid", "not valid")


@EACH
def test_files_that_cannot_be_read(side: Side, tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(side.refusal, match=re.escape(str(path))):
            side.load(path, {}, {})
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(side.refusal, match="not valid TOML"):
        side.load(tmp_path / "bytes.toml", {}, {})


@EACH
def test_a_misspelt_variable_is_refused_and_strangers_are_let_be(side: Side) -> None:
    with pytest.raises(side.refusal, match=f"{side.prefix}LOG_LEVLE"):
        side.load(None, {f"{side.prefix}LOG_LEVLE": "info"}, {})
    side.load(None, {"LANTERNE_OTHER": "1", "HOME": "/"}, {})


@EACH
def test_lists_are_comma_separated_in_the_environment(side: Side) -> None:
    section, key = side.text_list
    env = {variable(side, section, key): " a:1 , b:2,"}
    more = {"LANTERNE_COLLECTOR_TLS_" + k: "/x" for k in ("CERT", "KEY", "CLIENT_CA")}
    config = side.load(None, env | (more if side.name == "collector" else {}), {})
    assert value(config, section, key) == ("a:1", "b:2")


@EACH
def test_whole_numbers_stay_whole(side: Side, tmp_path: Path) -> None:
    section, key = side.whole
    for text in ("1.5", "true", '"7"'):
        with pytest.raises(side.refusal):
            side.load(file(tmp_path, f"[{section}]\n{key} = {text}\n"), {}, {})
    for text in ("1.5", "seven", ""):
        with pytest.raises(side.refusal):
            side.load(None, {variable(side, section, key): text}, {})
    assert value(side.load(None, {variable(side, section, key): "7"}, {}), section, key) == 7


def test_what_both_have_has_the_same_names() -> None:
    """An operator writes the same in both files."""
    for section in ("log",):
        ours = [getattr(tree(), section) for tree in (agent.AgentConfig, collector.CollectorConfig)]
        assert ours[0].__struct_fields__ == ours[1].__struct_fields__
        assert msgspec.to_builtins(ours[0]) == msgspec.to_builtins(ours[1])
