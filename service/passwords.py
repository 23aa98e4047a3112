"""Basic authentication: passwords against bcrypt hashes, few at a time.

A hash costs tens of milliseconds by design, so a right answer is remembered (as a keyed digest, in
memory), and wrong ones are bounded: who guesses gets neither our processor nor an answer that tells
whether the user exists.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Literal

import bcrypt

REMEMBERED = 256
ATTEMPTS = 10.0  # wrong ones at once, of one address; and so many a minute
PER_SECOND = ATTEMPTS / 60
ADDRESSES = 1024
WAIT_SECONDS = 2.0  # for the one hash that may be computed at a time
MAX_HEADER = 1024
BCRYPT_BYTES = 72  # what bcrypt looks at

Verdict = Literal["right", "wrong", "busy"]


class Passwords:
    """Thread-safe. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._attempts: OrderedDict[str, tuple[float, float]] = OrderedDict()  # left, when
        self._lock = threading.Lock()
        self._computing = threading.Lock()

    def check(self, users: Mapping[str, bytes], header: str, address: str) -> Verdict:
        """header: Authorization, as it came; users: at least one.

        "busy": too many were wrong, ask again later.
        """
        user, password = _parse(header)
        stored = users.get(user)
        digest = hmac.new(
            self._secret, b"\0".join([user.encode(), stored or b"", password]), hashlib.sha256
        ).digest()
        with self._lock:
            if stored is not None and digest in self._right:
                self._right.move_to_end(digest)
                return "right"
            if header and not self._may_try(address):
                return "busy"
        if not header:
            return "wrong"
        if not self._computing.acquire(timeout=WAIT_SECONDS):
            return "busy"
        try:
            # Where there is no such user somebody's is compared: that takes as long.
            compared = stored or next(iter(users.values()))
            fits = bcrypt.checkpw(password[:BCRYPT_BYTES], compared)
        except ValueError:  # a hash that only looks like one
            fits = False
        finally:
            self._computing.release()
        if stored is None or not fits:
            return "wrong"
        with self._lock:
            self._right[digest] = None
            if len(self._right) > REMEMBERED:
                self._right.popitem(last=False)
            self._attempts.pop(address, None)
        return "right"

    def _may_try(self, address: str) -> bool:
        now = self._clock()
        left, when = self._attempts.pop(address, (ATTEMPTS, now))
        left = min(ATTEMPTS, left + (now - when) * PER_SECOND)
        self._attempts[address] = (max(left - 1, 0.0) if left >= 1 else left, now)
        if len(self._attempts) > ADDRESSES:
            self._attempts.popitem(last=False)
        return left >= 1


def _parse(header: str) -> tuple[str, bytes]:
    """-> user, password; empty where the header is none of ours."""
    scheme, _, coded = header.partition(" ")
    if scheme.lower() != "basic" or len(header) > MAX_HEADER:
        return "", b""
    try:
        text = base64.b64decode(coded.strip(), validate=True)
    except (binascii.Error, ValueError):
        return "", b""
    user, _, password = text.partition(b":")
    return user.decode("utf-8", "replace"), password
