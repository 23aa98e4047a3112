"""Every error that the agent raises on purpose.

AgentError
├── ConfigError        a value in the configuration is not allowed
├── KernelError        this kernel or these privileges cannot run the probes
│   └── LoaderError    the loader child failed (no bcc, no compile, verifier)
├── ElfError           a library file cannot be read as what it claims to be
└── AttachError        a probe could not be attached to a library
"""

from __future__ import annotations


class AgentError(Exception):
    """Base of all; the message names the thing and the remedy."""


class ConfigError(AgentError):
    pass


class KernelError(AgentError):
    pass


class LoaderError(KernelError):
    pass


class ElfError(AgentError):
    pass


class AttachError(AgentError):
    pass
