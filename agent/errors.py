"""Every error that the agent raises on purpose.

AgentError
├── ConfigError        a value in the configuration is not allowed
├── CredentialsError   a certificate, key or token for the collector cannot be used
├── KernelError        this kernel or these privileges cannot run the probes
│   └── LoaderError    the loader child failed (no bcc, no compile, verifier)
├── ElfError           a library file cannot be read as what it claims to be
├── AttachError        a probe could not be attached to a library
├── IntakeError        the intake for expert load cannot listen
├── SpoolError         the spool's folder cannot be used
├── RasError           NCCL's RAS service cannot be asked, or answers something else
└── KubernetesError    the kubelet or the API server cannot be asked, or answers something else

A certificate or a web configuration that cannot be used: service.errors.CertificateError.
"""

from __future__ import annotations

from lanterne.service.errors import LanterneError


class AgentError(LanterneError):
    pass


class ConfigError(AgentError):
    pass


class CredentialsError(AgentError):
    pass


class KernelError(AgentError):
    pass


class LoaderError(KernelError):
    pass


class ElfError(AgentError):
    pass


class AttachError(AgentError):
    pass


class IntakeError(AgentError):
    pass


class SpoolError(AgentError):
    pass


class RasError(AgentError):
    pass


class KubernetesError(AgentError):
    pass
