"""Log lines of both programs: one a record whatever is logged, text or JSON, repeats counted."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanterne.service import log as logs

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = 'x"\n2026-01-01T00:00:00.000Z error forged=1\r\x1b[2J\u2028\u2029\u202e\x85\x0b\udc80\\n'
BREAKS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def log(out: io.StringIO, clock: Clock) -> Iterator[logging.Logger]:
    logger = logging.getLogger("tests.log")
    handler = logs.Output(out, clock)
    handler.setFormatter(logs.TextFormatter())
    logger.addHandler(handler)
    logger.setLevel("DEBUG")
    logger.propagate = False
    yield logger
    logger.removeHandler(handler)
    handler.close()


def as_json(log: logging.Logger) -> None:
    log.handlers[0].setFormatter(logs.JsonFormatter())


def lines(out: io.StringIO) -> list[str]:
    return out.getvalue().split("\n")[:-1]


# ---- one line a record


def test_text_is_time_level_message_and_fields(log: logging.Logger, out: io.StringIO) -> None:
    log.warning("library %s", "one", extra={"path": "/usr/lib/x.so", "n": 3, "why": "a b"})
    (line,) = lines(out)
    stamp, rest = line.split(" ", 1)
    assert stamp.endswith("Z")
    assert rest == 'warning library one path=/usr/lib/x.so n=3 why="a b"'


def test_hostile_messages_and_fields_stay_on_their_line(
    log: logging.Logger, out: io.StringIO
) -> None:
    log.error("%s", HOSTILE, extra={"path": HOSTILE})
    (line,) = out.getvalue().splitlines()
    assert line.isprintable()
    assert line.count(" error ") == 3  # its own, and twice as text inside


def test_a_field_cannot_pretend_to_be_another(log: logging.Logger, out: io.StringIO) -> None:
    log.info("m", extra={"path": 'a" level="error'})
    assert lines(out)[0].endswith(r'm path="a\" level=\"error"')
    log.info("m", extra={"path": "a\\"})
    assert lines(out)[1].endswith('m path="a\\\\"')


def test_a_hostile_exception_cannot_begin_a_line(log: logging.Logger, out: io.StringIO) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("failed")
    first, *more = out.getvalue().splitlines()
    assert first.endswith("error failed")
    assert len(more) > 3
    assert all(line.startswith(logs.CONTINUED) and line.isprintable() for line in more)


@given(st.text(), st.text())
def test_any_text_is_one_line(message: str, value: str) -> None:
    record = logging.makeLogRecord({"msg": "%s", "args": (message,), "field": value})
    record.levelname = "INFO"
    assert logs.TextFormatter().format(record).isprintable()
    line = logs.JsonFormatter().format(record)
    assert line.isascii()
    assert line.isprintable()
    told = json.loads(line)
    assert told["message"] == message
    assert told["field"] == value


def test_json_keeps_numbers_and_its_own_keys(log: logging.Logger, out: io.StringIO) -> None:
    as_json(log)
    log.info("m", extra={"n": 3, "share": 0.5, "ok": True, "none": None, "time": "x", "path": [1]})
    try:
        raise KeyError("k")
    except KeyError:
        log.exception("failed")
    first, second = map(json.loads, lines(out))
    assert first["time"].endswith("Z")
    assert first["logger"] == "tests.log"
    assert (first["n"], first["share"], first["ok"], first["none"]) == (3, 0.5, True, None)
    assert (first["time_"], first["path"]) == ("x", "[1]")
    assert second["level"] == "error"
    assert second["exception"].splitlines()[-1] == "KeyError: 'k'"


def test_long_values_are_cut(log: logging.Logger, out: io.StringIO) -> None:
    log.info("x" * 10_000, extra={"v": "y" * 10_000})
    assert len(lines(out)[0]) < 3 * logs.MAX_TEXT


# ---- repeats


def test_a_repeated_line_is_written_once_and_then_counted(
    log: logging.Logger, out: io.StringIO, clock: Clock
) -> None:
    for _ in range(7):
        log.warning("no collector", extra={"address": "a:1"})
    assert len(lines(out)) == 1
    clock.now += logs.FOLD_SECONDS
    log.info("something else")
    _, counted, other = lines(out)
    assert counted.endswith("warning no collector address=a:1 repeated=6")
    assert other.endswith("info something else")
    # It goes on: once a period.
    log.warning("no collector", extra={"address": "a:1"})
    assert len(lines(out)) == 3
    clock.now += logs.FOLD_SECONDS
    log.info("another")
    assert lines(out)[3].endswith("repeated=1")
    # It has stopped, and comes again: a line of its own.
    clock.now += 2 * logs.FOLD_SECONDS
    log.info("quiet meanwhile")
    log.warning("no collector", extra={"address": "a:1"})
    assert lines(out)[-1].endswith("no collector address=a:1")


def test_other_values_are_another_line(log: logging.Logger, out: io.StringIO) -> None:
    for address in ("a:1", "b:1", "a:1"):
        log.warning("no collector", extra={"address": address})
    log.info("no collector", extra={"address": "a:1"})
    assert len(lines(out)) == 4


def test_changes_of_state_are_seen_a_few_times_and_then_counted(
    log: logging.Logger, out: io.StringIO
) -> None:
    for _ in range(10):
        log.warning("no collector")
        log.info("connected")
    assert [line.split(" ", 2)[2] for line in lines(out)] == ["no collector", "connected"] * 3
    log.handlers[0].close()
    assert [line.split(" ", 2)[2] for line in lines(out)[6:]] == [
        "no collector repeated=7",
        "connected repeated=7",
    ]


def test_a_flood_of_different_lines_of_a_kind_is_bounded(
    log: logging.Logger, out: io.StringIO, clock: Clock
) -> None:
    for number in range(logs.MOST_OF_A_KIND + 40):
        log.warning("library %d not probed", number)
    assert len(lines(out)) == logs.MOST_OF_A_KIND
    log.info("others are heard")
    assert lines(out)[-1].endswith("others are heard")
    clock.now += logs.FOLD_SECONDS
    log.info("later")
    assert lines(out)[-2].endswith('left out line="library %d not probed" left_out=40')
    log.warning("library %d not probed", 1)
    assert lines(out)[-1].endswith("library 1 not probed")


def test_every_record_is_written_or_counted(
    log: logging.Logger, out: io.StringIO, clock: Clock
) -> None:
    """Whatever the mixture."""
    as_json(log)
    logged = 0
    for number in range(3000):
        log.info("kind %d" % (number % 3), extra={"value": number % 400})  # noqa: UP031
        logged += 1
        clock.now += 0.02
    log.handlers[0].close()
    told = [json.loads(line) for line in lines(out)]
    plain = sum("repeated" not in one and "left_out" not in one for one in told)
    counted = sum(one.get("repeated", 0) + one.get("left_out", 0) for one in told)
    assert plain + counted == logged
    assert counted > 0


def test_what_is_remembered_is_bounded(log: logging.Logger, out: io.StringIO) -> None:
    handler = log.handlers[0]
    assert isinstance(handler, logs.Output)
    for number in range(3 * logs.MAX_REMEMBERED):
        log.info(f"kind {number}")
        log.info(f"kind {number}")
    assert len(handler._lines) == len(handler._kinds) == logs.MAX_REMEMBERED
    told = len(lines(out))
    handler.close()
    assert len(lines(out)) - told == logs.MAX_REMEMBERED  # the rest was told when it was forgotten


def test_no_frame_is_kept_alive(log: logging.Logger) -> None:
    handler = log.handlers[0]
    assert isinstance(handler, logs.Output)
    try:
        raise ValueError("x")
    except ValueError:
        log.exception("failed")
    kept = [*handler._lines.values(), *handler._kinds.values()]
    assert kept
    assert all(counted.record.exc_info is None for counted in kept)


def test_counts_are_told_without_another_line() -> None:
    code = (
        "import logging, os, time; from lanterne.service import log\n"
        "log.FOLD_SECONDS = 0.2; log.configure('info')\n"
        "for _ in range(3): logging.info('again')\n"
        "time.sleep(20)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert process.stderr.readline().endswith("info again\n")
        assert process.stderr.readline().endswith("info again repeated=2\n")
    finally:
        process.kill()
        process.communicate()


def test_counts_are_told_at_the_end_of_the_program() -> None:
    code = (
        "import logging; from lanterne.service import log; log.configure('info', 'json')\n"
        "for _ in range(5): logging.info('again')\n"
        "log.configure('warning', 'text'); logging.info('not heard'); logging.warning('again')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    first, second, third = done.stderr.splitlines()
    assert json.loads(first)["message"] == "again"
    assert second.endswith("warning again")
    assert third.endswith("info again repeated=4")
