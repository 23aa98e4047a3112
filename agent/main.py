"""`lanterne-agent`: the command line. Everything behind it is in `daemon` and `doctor`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

# OpenBLAS would start a thread per core and keep memory for each; nothing here multiplies matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from lanterne.agent import config as configuration
from lanterne.agent import memory
from lanterne.agent.errors import ConfigError
from lanterne.service import log as logs
from lanterne.service.errors import LanterneError
from lanterne.service.reload import Reloader
from lanterne.service.systemd import Notifier, mark_priorities

# What SIGHUP changes in flight (docs/operate.md); the rest takes a restart.
LIVE = frozenset(
    {
        "collector.addresses",
        "collector.backoff_max_seconds",
        "collector.heartbeat_seconds",
        "collector.shutdown_seconds",
        "log.format",
        "log.level",
        "window.drain_seconds",
        "window.scan_seconds",
        "window.seconds",
    }
)

DESCRIPTION = """\
Watches the collectives (NCCL, Gloo) of every job on this host through eBPF uprobes, without any
change to the job, and reports to lanterne-collector, which names the rank that the others wait for.

  lanterne-agent doctor        first: can it work on this host, and if not, what to do about it
  sudo lanterne-agent          then: watch, and report to the collector on this host
  sudo lanterne-agent --collector head-node:4319

It needs root or CAP_BPF, CAP_PERFMON, CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH (and CAP_SYS_ADMIN
before Linux 6.6), and Linux 5.15 or newer. It gives up every other privilege once the probes are
loaded."""

EPILOG = """\
Every setting is a key of the configuration file, an environment variable
(LANTERNE_AGENT_<SECTION>_<KEY>) or --set SECTION.KEY=VALUE; flags win over the environment, the
environment over the file. The sample file lanterne-agent.toml explains each key."""

# flag, key, metavar, help
FLAGS = (
    ("--node", "node.name", "NAME", "name of this host in metrics (default: its host name)"),
    (
        "--metrics",
        "metrics.listen",
        "HOST:PORT",
        "serve the agent's own metrics there ('' for not)",
    ),
    ("--window", "window.seconds", "SECONDS", "length of a window"),
    ("--method", "probes.method", "auto|multi|perf", "how to attach"),
    ("--interpreter", "probes.interpreter", "PATH", "the Python that has bcc"),
    ("--log-level", "log.level", "LEVEL", "debug, info, warning or error"),
)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="lanterne-agent",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="store_true", help="print the version and exit")
    _add_settings(top, top_level=True)
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser("run", help="watch and report until stopped (the default)")
    doctor = commands.add_parser("doctor", help="say what would work here, and the remedy if not")
    doctor.add_argument("--json", action="store_true", help="for programs instead of people")
    for command in (run, doctor):
        _add_settings(command, top_level=False)
    return top


def _add_settings(to: argparse.ArgumentParser, *, top_level: bool) -> None:
    """The same flags before and after the command; a default there would hide one given here."""
    absent = None if top_level else argparse.SUPPRESS
    to.add_argument("--config", metavar="FILE", type=Path, default=absent, help="TOML file")
    to.add_argument(
        "--check-config",
        action="store_true",
        default=False if top_level else argparse.SUPPRESS,
        help="check the configuration and exit",
    )
    to.add_argument(
        "--dry-run",
        action="store_true",
        default=False if top_level else argparse.SUPPRESS,
        help="check all that can be without loading a probe, say what would happen, and exit",
    )
    to.add_argument(
        "--collector",
        metavar="HOST:PORT",
        action="append",
        default=absent,
        help="where to report; several are tried in turn",
    )
    for flag, key, metavar, text in FLAGS:
        to.add_argument(
            flag, dest=key, metavar=metavar, default=absent, help=text.replace("%", "%%")
        )
    to.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=absent,
        help="any other setting",
    )


def load_config(arguments: argparse.Namespace) -> configuration.AgentConfig:
    flags: dict[str, object] = {key: getattr(arguments, key, None) for _, key, _, _ in FLAGS}
    if arguments.collector:
        flags["collector.addresses"] = ",".join(arguments.collector)
    for setting in arguments.set or ():
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting!r}: write SECTION.KEY=VALUE")
        flags[key] = value
    return configuration.load(arguments.config, os.environ, flags)


def main(argv: Sequence[str] | None = None) -> int:
    """-> exit status: 0, 1 where something cannot work, 2 for a wrong command line or setting."""
    arguments = parser().parse_args(argv)
    if arguments.version:
        from lanterne.agent.daemon import version

        print(f"lanterne-agent {version()}")
        return 0
    try:
        config = load_config(arguments)
    except ConfigError as error:
        print(f"lanterne-agent: {error}", file=sys.stderr)
        return 2
    if arguments.check_config:
        print("configuration is valid")
        return 0
    _configure_log(config)
    named = arguments.config or os.environ.get(configuration.CONFIG_VARIABLE)
    file = Path(named) if named else None
    if arguments.dry_run:
        from lanterne.agent import dry_run

        return dry_run.run(config, as_json=getattr(arguments, "json", False), file=file)
    if arguments.command == "doctor":
        from lanterne.agent import doctor

        return doctor.run(config, as_json=arguments.json, file=file)
    return _run(config, arguments)


def _configure_log(config: configuration.AgentConfig) -> None:
    logs.configure(config.log.level, config.log.format)
    mark_priorities(logging.getLogger())


def _run(config: configuration.AgentConfig, arguments: argparse.Namespace) -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to reload
    memory.frugal()
    os.umask(0o077)  # whatever is written, spool and sockets, is for this user only
    from lanterne.agent.daemon import Agent

    notifier = Notifier()
    try:
        agent = Agent(config, notifier=notifier)
    except LanterneError as error:
        print(f"lanterne-agent: {error}", file=sys.stderr)
        return 1

    def apply(settings: configuration.AgentConfig) -> None:
        _configure_log(settings)
        agent.use(settings)

    agent.reloader = Reloader(
        config,
        load=lambda: load_config(arguments),
        apply=apply,
        live=LIVE,
        refused=ConfigError,
    )
    signal.signal(signal.SIGTERM, lambda *_: agent.stop())
    signal.signal(signal.SIGINT, lambda *_: agent.stop())
    signal.signal(signal.SIGHUP, lambda *_: agent.reload())
    agent.run()
    return 0


def run() -> None:
    """The console script."""
    try:
        status = main()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lanterne"):
            raise
        status = 1  # somebody installed the collector's half
        print(
            f"lanterne-agent: the Python package {error.name} is missing; install the extra "
            "`agent`, as in: pip install 'lanterne[agent]'",
            file=sys.stderr,
        )
    sys.exit(status)


if __name__ == "__main__":
    run()
