"""SIGHUP: what is taken over, what waits for a restart, and what a bad file does: nothing."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lanterne.agent import config as agent_config
from lanterne.agent import main as agent_main
from lanterne.agent.errors import ConfigError as AgentConfigError
from lanterne.collector import config as collector_config
from lanterne.collector import startup as collector_startup
from lanterne.collector.errors import ConfigError as CollectorConfigError
from lanterne.service.reload import Reloader

ROOT = Path(__file__).resolve().parents[2]
OPERATE = ROOT / "docs" / "operate.md"


class Log(msgspec.Struct, frozen=True):
    level: str = "info"


class Window(msgspec.Struct, frozen=True):
    seconds: float = 1.0
    other: int = 1


class Config(msgspec.Struct, frozen=True):
    log: Log = Log()
    window: Window = Window()


class Refused(Exception):  # noqa: N818
    pass


class Subject:
    def __init__(self) -> None:
        self.answer: Config | Exception = Config()
        self.applied: list[Config] = []
        self.reloader: Any = Reloader(
            Config(),
            load=self.load,
            apply=self.applied.append,
            live=frozenset({"log.level", "window.seconds"}),
            refused=Refused,
        )

    def load(self) -> Config:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_live_keys_take_effect_and_the_others_wait(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    subject = Subject()
    subject.answer = Config(Log("debug"), Window(2.0, other=5))
    subject.reloader.reload()
    assert subject.applied == [Config(Log("debug"), Window(2.0, other=1))]
    assert subject.reloader.config == subject.applied[0]
    told = {record.getMessage(): vars(record) for record in caplog.records}
    assert told["configuration reloaded"]["in_force"] == "log.level,window.seconds"
    assert told["these settings take effect after a restart"]["keys"] == "window.other"
    # Asked again, it is still said.
    caplog.clear()
    subject.reloader.reload()
    assert [r.getMessage() for r in caplog.records] == [
        "configuration reloaded",
        "these settings take effect after a restart",
    ]


def test_a_bad_file_changes_nothing_until_a_good_one_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    subject = Subject()
    begun = subject.reloader.state
    assert begun.success
    subject.answer = Refused("line 3: no")
    subject.reloader.reload()
    assert not subject.applied
    assert subject.reloader.config == Config()
    state = subject.reloader.state
    assert (state.success, state.succeeded_at) == (False, begun.succeeded_at)
    assert [(r.levelname, vars(r)["reason"]) for r in caplog.records] == [("ERROR", "line 3: no")]
    subject.answer = Config(Log("debug"))
    subject.reloader.reload()
    assert subject.reloader.state.success
    assert subject.reloader.state.succeeded_at >= begun.succeeded_at


def test_a_defect_is_not_taken_for_a_bad_file() -> None:
    subject = Subject()
    subject.answer = KeyError("defect")
    with pytest.raises(KeyError):
        subject.reloader.reload()


SIDES = {
    "lanterne-agent": (agent_main.LIVE, agent_config.AgentConfig, AgentConfigError),
    "lanterne-collector": (
        collector_startup.LIVE, collector_config.CollectorConfig, CollectorConfigError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("program", SIDES)
def test_live_keys_exist_and_are_documented(program: str) -> None:
    live, config, _ = SIDES[program]
    keys = {
        f"{section.name}.{key}"
        for section in msgspec.structs.fields(config)
        for key in section.type.__struct_fields__
    }
    assert live <= keys
    text = OPERATE.read_text()
    (row,) = re.findall(rf"^\| `{program}` \| (.*) \|", text, re.MULTILINE)
    assert set(re.findall(r"`([a-z_.]+)`", row)) == live
