"""The base of what is raised on purpose, and what the rooms here raise."""

from __future__ import annotations


class LanterneError(Exception):
    """Base of the errors of agent and collector; the message names the thing and the remedy."""


class CertificateError(LanterneError):
    """A certificate, key, token or web configuration cannot be used."""
