"""Log lines on stderr: time, level, message, then key=value fields, one line each."""

from __future__ import annotations

import logging
import sys
import time

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class Formatter(logging.Formatter):
    """Values that came from other programs are quoted and escaped: no line can be forged."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        parts = [f"{stamp}.{int(record.msecs):03d}Z", record.levelname.lower(), record.getMessage()]
        parts += [
            f"{key}={_value(value)}"
            for key, value in vars(record).items()
            if key not in _STANDARD and not key.startswith("_")
        ]
        text = " ".join(parts)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def _value(value: object) -> str:
    text = str(value)
    if text and all(c.isalnum() or c in "._-+:/@%,*[]()" for c in text):
        return text
    return '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'


def configure(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
