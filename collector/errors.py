"""Every error that the collector raises on purpose.

CollectorError
├── ConfigError      a value in the configuration is not allowed
├── StreamRefused    an agent may not report here, or not for this node; .cause is a metric label
├── BatchRefused     a batch can never be applied; .code is a metric label
├── ListenError      an address cannot be listened on
├── RecordingError   a recording or trace cannot be written, read or analysed
└── PlanError        there is no plan, or the form asked for cannot hold it

A certificate, key, token or web configuration that cannot be used: service.errors.CertificateError.
"""

from __future__ import annotations

from lanterne.service.errors import LanterneError


class CollectorError(LanterneError):
    pass


class ConfigError(CollectorError):
    pass


class BatchRefused(CollectorError):  # noqa: N818  (a verdict on the batch, not a fault of ours)
    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class StreamRefused(CollectorError):  # noqa: N818  (a verdict on the agent, not a fault of ours)
    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


class ListenError(CollectorError):
    pass


class RecordingError(CollectorError):
    pass


class PlanError(CollectorError):
    pass
