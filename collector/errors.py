"""Every error that the collector raises on purpose.

CollectorError
├── ConfigError      a value in the configuration is not allowed
├── BatchRefused     a batch can never be applied; .code is a metric label
└── ListenError      an address cannot be listened on
"""

from __future__ import annotations


class CollectorError(Exception):
    """Base of all; the message names the thing and the remedy."""


class ConfigError(CollectorError):
    pass


class BatchRefused(CollectorError):  # noqa: N818  (a verdict on the batch, not a fault of ours)
    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class ListenError(CollectorError):
    pass
