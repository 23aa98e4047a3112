"""Log lines on stderr: text for people and journals, or JSON; nothing that is logged can forge one.

A record is one line: time, level, message, then key=value fields. Only a traceback has more; each
of its lines begins with CONTINUED, and no other line does. Values come from other programs: what is
not printable is escaped. A line that repeats is written once and then counted; one that comes again
after others of its logger, a change of state perhaps, a few times before. Of each kind of line (its
message before any values) so many are written a minute, and the rest is counted, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal, TextIO

Format = Literal["text", "json"]

CONTINUED = "    | "
MAX_TEXT = 4096  # characters of one value
MAX_TRACEBACK_LINES = 200
FOLD_SECONDS = 60.0  # what repeats within is counted
MOST_OF_A_LINE = 3  # times in FOLD_SECONDS, with other lines of its logger in between
MOST_OF_A_KIND = 100  # lines in FOLD_SECONDS
MAX_REMEMBERED = 512  # lines, and kinds: beyond it the oldest is told at once and forgotten

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_PLAIN = "._-+:/@%,*[]()"


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {
        key: value
        for key, value in vars(record).items()
        if key not in _STANDARD and not key.startswith("_")
    }


def _stamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def printable(text: str) -> str:
    """The same on one line: what is not printable (line ends of any kind, terminal escapes, marks
    that turn the direction of writing) becomes an escape."""
    text = text[:MAX_TEXT] + "…" if len(text) > MAX_TEXT else text
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _value(value: object) -> str:
    text = str(value)
    if text and len(text) <= MAX_TEXT and all(c.isalnum() or c in _PLAIN for c in text):
        return text
    return '"' + printable(text.replace("\\", "\\\\")).replace('"', '\\"') + '"'


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        parts = [_stamp(record), record.levelname.lower(), printable(record.getMessage())]
        parts += [f"{printable(key)}={_value(value)}" for key, value in _fields(record).items()]
        lines = [" ".join(parts)]
        if record.exc_info:
            traceback = self.formatException(record.exc_info).splitlines()
            lines += [CONTINUED + printable(line) for line in traceback[-MAX_TRACEBACK_LINES:]]
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, the fields, and `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(record.getMessage()),
        }
        for key, value in _fields(record).items():
            plain = value is None or isinstance(value, (bool, int, float))
            # A field must not stand for what the line itself says.
            line[key + "_" if key in line else key] = value if plain else _cut(str(value))
        if record.exc_info:
            traceback = self.formatException(record.exc_info).splitlines()
            line["exception"] = "\n".join(map(_cut, traceback[-MAX_TRACEBACK_LINES:]))
        return json.dumps(line)  # in ASCII: what is special in a terminal or a journal is escaped


def _cut(text: str) -> str:
    return text[:MAX_TEXT] + "…" if len(text) > MAX_TEXT else text


@dataclass
class _Counted:
    """A line, or a kind of line."""

    record: logging.LogRecord
    until: float
    written: int = 0
    kept_back: int = 0


class Output(logging.StreamHandler[TextIO]):
    """Writes to `stream`; `clock` is monotonic. Counts are told when FOLD_SECONDS are over, by a
    timer that runs only while there are some, and when the program ends."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self.written_as: Format = "text"
        self._clock = clock
        self._lines: OrderedDict[Hashable, _Counted] = OrderedDict()
        self._kinds: OrderedDict[Hashable, _Counted] = OrderedDict()
        self._last: dict[str, Hashable] = {}  # logger -> its last line
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._may_pass(record):
                super().emit(record)
        except Exception:
            self.handleError(record)

    def _may_pass(self, record: logging.LogRecord) -> bool:
        """Called with the handler's lock held, like all that changes the counts."""
        now = self._clock()
        self._tell(now)
        kind_key = (record.name, record.levelno, str(record.msg))
        error = record.exc_info[1] if record.exc_info else None
        line_key = (*kind_key, record.getMessage(), str(_fields(record)), repr(error)[:MAX_TEXT])
        line = self._lines.get(line_key)
        again = self._last.get(record.name) == line_key
        if line is not None and (again or line.written >= MOST_OF_A_LINE):
            line.kept_back += 1
            self._wake()
            return False
        kind = self._kinds.get(kind_key)
        if kind is None:
            kind = _Counted(_without_traceback(record), now + FOLD_SECONDS)
            self._kinds[kind_key] = kind
        if kind.written >= MOST_OF_A_KIND:
            kind.kept_back += 1
            self._wake()
            return False
        kind.written += 1
        if line is None:
            line = _Counted(_without_traceback(record), now + FOLD_SECONDS)
            self._lines[line_key] = line
        line.written += 1
        self._last[record.name] = line_key
        for remembered in (self._lines, self._kinds):
            if len(remembered) > MAX_REMEMBERED:
                self._summary(remembered.popitem(last=False)[1], remembered is self._kinds)
        return True

    def _tell(self, now: float) -> None:
        for remembered in (self._lines, self._kinds):
            for key, counted in list(remembered.items()):
                if counted.until > now:
                    break  # in the order of their ends
                del remembered[key]
                if not counted.kept_back:
                    continue
                self._summary(counted, remembered is self._kinds)
                if remembered is self._lines:  # it goes on: once a period, with its count
                    again = _Counted(counted.record, now + FOLD_SECONDS, MOST_OF_A_LINE)
                    remembered[key] = again

    def _summary(self, counted: _Counted, of_a_kind: bool) -> None:
        if not counted.kept_back:
            return
        first = counted.record
        if of_a_kind:
            text = {"msg": "more lines like it were left out", "line": str(first.msg)}
            told = logging.makeLogRecord({**text, "left_out": counted.kept_back})
        else:
            told = logging.makeLogRecord({**vars(first), "repeated": counted.kept_back})
        told.name, told.levelno, told.levelname = first.name, first.levelno, first.levelname
        told.created = time.time()
        told.msecs = told.created % 1 * 1000
        super().emit(told)

    def _wake(self) -> None:
        if self._timer is None:
            timer = threading.Timer(FOLD_SECONDS, self._timed)
            timer.daemon = True
            with contextlib.suppress(RuntimeError):  # the program ends: `close` tells
                timer.start()
                self._timer = timer

    def _timed(self) -> None:
        with self.lock or threading.RLock():
            self._timer = None
            self._tell(self._clock())
            kept_back = [*self._lines.values(), *self._kinds.values()]
            if any(counted.kept_back for counted in kept_back):
                self._wake()

    def close(self) -> None:
        with self.lock or threading.RLock():
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._tell(float("inf"))
            self._lines.clear()
            self._kinds.clear()
        super().close()


def _without_traceback(record: logging.LogRecord) -> logging.LogRecord:
    """To be kept: a traceback would keep what its frames hold."""
    return logging.makeLogRecord({**vars(record), "exc_info": None})


def level() -> str:
    return logging.getLevelName(logging.getLogger().level).lower()


def format_in_force() -> Format:
    outputs = (h for h in logging.getLogger().handlers if isinstance(h, Output))
    return next((output.written_as for output in outputs), "text")


def configure(level: str, format: Format = "text") -> None:
    """May be called again: level and format change, the counts go on."""
    root = logging.getLogger()
    output = next((h for h in root.handlers if isinstance(h, Output)), None)
    if output is None:
        output = Output(sys.stderr)
        root.handlers[:] = [output]
    output.written_as = format
    output.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root.setLevel(level.upper())
