"""When a certificate is valid: the one field that the standard library reads of a peer's only.

DER (X.690): tag, length, content. TBSCertificate of RFC 5280, 4.1: an optional [0] version, serial
number, signature algorithm, issuer, then validity, a sequence of two times.
"""

from __future__ import annotations

import calendar
import re
import ssl
import time

from lanterne.agent.errors import CredentialsError

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _UTC_TIME, _GENERALIZED_TIME, _VERSION = 0x30, 0x17, 0x18, 0xA0


def validity(pem: bytes) -> list[tuple[float, float]]:
    """(not before, not after), UNIX seconds, of each certificate in the file, in its order.
    Raises CredentialsError."""
    spans = []
    for block in _PEM.findall(pem):
        try:
            spans.append(_span(ssl.PEM_cert_to_DER_cert(block.decode("ascii"))))
        except (ValueError, IndexError) as error:
            raise CredentialsError(f"holds what is no certificate: {error}") from None
    if not spans:
        raise CredentialsError("holds no certificate in PEM form")
    return spans


def _span(der: bytes) -> tuple[float, float]:
    certificate = _content(der, 0, _SEQUENCE)[0]
    signed = _content(certificate, 0, _SEQUENCE)[0]
    at = _skip(signed, 0) if signed[0] == _VERSION else 0
    for _ in range(3):  # serial number, algorithm, issuer
        at = _skip(signed, at)
    times, _ = _content(signed, at, _SEQUENCE)
    return _time(times, 0), _time(times, _skip(times, 0))


def _header(data: bytes, at: int) -> tuple[int, int]:
    """-> where the content begins and ends."""
    length, begin = data[at + 1], at + 2
    if length & 0x80:
        count = length & 0x7F
        if not 1 <= count <= 4:
            raise ValueError("a length is not in DER form")
        length = int.from_bytes(data[begin : begin + count], "big")
        begin += count
    if begin + length > len(data):
        raise ValueError("it is cut off")
    return begin, begin + length


def _content(data: bytes, at: int, tag: int) -> tuple[bytes, int]:
    if data[at] != tag:
        raise ValueError(f"tag {data[at]:#x} where {tag:#x} is due")
    begin, end = _header(data, at)
    return data[begin:end], end


def _skip(data: bytes, at: int) -> int:
    return _header(data, at)[1]


def _time(data: bytes, at: int) -> float:
    begin, end = _header(data, at)
    text = data[begin:end].decode("ascii")
    if data[at] == _UTC_TIME:  # two digits of the year: 50 to 99 are the last century's
        text = ("19" if text[:2] >= "50" else "20") + text
    elif data[at] != _GENERALIZED_TIME:
        raise ValueError(f"tag {data[at]:#x} where a time is due")
    return float(calendar.timegm(time.strptime(text, "%Y%m%d%H%M%SZ")))
