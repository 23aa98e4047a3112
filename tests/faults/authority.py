"""Certificates for tests, made by openssl: an authority, and whom it speaks for."""

from __future__ import annotations

import subprocess
from pathlib import Path

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir()
        self._folder = folder
        self.cert = folder / "ca.pem"
        self._run(
            "req",
            "-x509",
            *_CURVE,
            "-keyout",
            "ca.key",
            "-out",
            "ca.pem",
            "-days",
            "30",
            "-subj",
            f"/CN={name}",
        )

    def issue(self, name: str, to: Path, *, address: str = "") -> None:
        """`to`.pem and `to`.key for a DNS name (and an IP address), replaced whole."""
        made = self._folder / "made"
        self._run("req", *_CURVE, "-keyout", "made.key", "-out", "made.csr", "-subj", f"/CN={name}")
        names = f"subjectAltName=DNS:{name}" + (f",IP:{address}" if address else "")
        (self._folder / "ext").write_text(names + "\n")
        self._run(
            "x509",
            "-req",
            "-in",
            "made.csr",
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-days",
            "30",
            "-extfile",
            "ext",
            "-out",
            "made.pem",
        )
        made.with_suffix(".key").chmod(0o600)
        for kind in (".key", ".pem"):
            made.with_suffix(kind).replace(to.with_suffix(kind))

    def _run(self, *arguments: str) -> None:
        subprocess.run(
            ["openssl", *arguments], cwd=self._folder, check=True, capture_output=True, timeout=60
        )
