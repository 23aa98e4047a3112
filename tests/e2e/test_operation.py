"""Settings of running programs: reload, bad files, formats, dry runs, hostile names in logs."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.stack import SCRIPTS, Stack, free_port, toml, wait_for

pytestmark = [pytest.mark.timeout(240)]

GRPC = ("E0", "I0", "W0")  # what its C core writes to stderr by itself
NO_PROBES = {"probes": {"enabled": False}, "experts": {"socket": ""}}


def collector_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPTS / "lanterne-collector"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def log_of(stack: Stack, program: str) -> str:
    return (stack.folder / f"lanterne-{program}.log").read_text()


def ask(stack: Stack, program: str, config: dict[str, dict[str, object]] | str) -> None:
    """Write the program's configuration anew and send SIGHUP."""
    path: Path = getattr(stack, f"{program}_config")
    path.write_text(config if isinstance(config, str) else toml(config))
    process: subprocess.Popen[bytes] = getattr(stack, program)
    process.send_signal(signal.SIGHUP)


def reloaded(stack: Stack, program: str) -> tuple[float, float]:
    samples = stack.agent_metrics() if program == "agent" else stack.collector_metrics()
    name = f"lanterne_{program}_config_reload"
    ((_, success),) = samples.get(f"{name}_success")
    ((_, at),) = samples.get(f"{name}_timestamp_seconds")
    return success, at


def settings(stack: Stack) -> dict[str, dict[str, dict[str, object]]]:
    return {
        "agent": {
            "node": {"name": "demo"},
            "collector": {"addresses": [f"127.0.0.1:{stack.grpc_port}"]},
            "metrics": {"listen": f"127.0.0.1:{stack.agent_port}"},
            **NO_PROBES,
        },
        "collector": {
            "ingest": {"address": f"127.0.0.1:{stack.grpc_port}"},
            "http": {"address": f"127.0.0.1:{stack.http_port}"},
            "state": {"path": ""},
        },
    }


def test_reload_of_both_programs(tmp_path: Path) -> None:
    with Stack(tmp_path, [], agent=NO_PROBES, collector={"state": {"path": ""}}) as stack:
        stack.start()
        wait_for(lambda: reloaded(stack, "agent")[0] == 1.0, 30, "the agent's first window")
        base = settings(stack)
        for program in ("agent", "collector"):
            success, begun = reloaded(stack, program)
            assert success == 1.0
            # A bad file: nothing changes, and it is said.
            ask(stack, program, "[log]\nlevel = 'loud'\n")
            wait_for(
                lambda p=program: reloaded(stack, p)[0] == 0.0, 30, f"{program} refuses the file"
            )
            assert reloaded(stack, program)[1] == begun
            assert "settings in force stay" in log_of(stack, program)
            assert "loud" in log_of(stack, program)
            # A good one: level and format at once, the node's name or the threads not.
            later = {"agent": ("node", "name", "x"), "collector": ("http", "threads", 2)}[program]
            good = {**base[program], "log": {"level": "debug", "format": "json"}}
            good[later[0]] = {**good[later[0]], later[1]: later[2]}
            ask(stack, program, good)
            wait_for(lambda p=program: reloaded(stack, p)[0] == 1.0, 30, f"{program} reloads")
            assert reloaded(stack, program)[1] > begun
        for program, key in (("agent", "node.name"), ("collector", "http.threads")):
            lines = [json.loads(x) for x in log_of(stack, program).splitlines() if x[0] == "{"]
            told: dict[str, dict[str, Any]] = {line["message"]: line for line in lines}
            assert told["configuration reloaded"]["in_force"] == "log.level,log.format"
            assert told["these settings take effect after a restart"]["keys"] == key
        # The stream goes on, under the same name.
        connected = "lanterne_node_connected"
        wait_for(
            lambda: stack.collector_metrics().total(connected, node="demo") == 1.0,
            30,
            f"the node is connected\n{stack.logs()}",
        )
        assert len(stack.collector_metrics().get(connected)) == 1
        assert (stack.stop_one("agent"), stack.stop_one("collector")) == (0, 0), stack.logs()
        for program in ("agent", "collector"):
            assert "Traceback" not in log_of(stack, program)
            json.loads(log_of(stack, program).splitlines()[-1])


def test_agents_are_sent_to_another_collector_in_flight(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    off = {"state": {"path": ""}}
    with (
        Stack(first, [], agent=NO_PROBES, collector=off) as stack,
        Stack(second, [], agent=NO_PROBES, collector=off) as other,
    ):
        stack.start()
        other.start_collector()
        wait_for(
            lambda: stack.collector_metrics().total("lanterne_node_connected"), 30, "the first"
        )
        moved = settings(stack)["agent"]
        moved["collector"] = {"addresses": [f"127.0.0.1:{other.grpc_port}"]}
        ask(stack, "agent", moved)
        wait_for(
            lambda: other.collector_metrics().total("lanterne_node_connected"), 30, "the second"
        )
        batches = "lanterne_collector_batches_total"
        wait_for(
            lambda: other.collector_metrics().total(batches, status="accepted") > 1, 30, "batches"
        )
        page = stack.agent_metrics()
        assert page.total("lanterne_agent_batches_dropped_total") == 0


@pytest.mark.parametrize("form", ["text", "json"])
def test_names_from_the_network_stay_on_their_line_of_the_log(form: str, tmp_path: Path) -> None:
    """Garbage on the ports of a collector that logs everything: every line is one of its own."""
    loud = {"state": {"path": ""}, "log": {"level": "debug", "format": form}}
    with Stack(tmp_path, [], collector=loud) as stack:
        stack.start_collector()
        for port in (stack.grpc_port, stack.http_port):
            for payload in (
                b"GET /\x1b[2Jx HTTP/1.1\r\nHost: a\r\nX: \x85\x0b\r\n\r\n",
                b"\x00\n2026-01-01T00:00:00.000Z error forged\n" * 20,
                b"GET /%0a2026-01-01T00:00:00.000Z%20error%20forged HTTP/1.1\r\n\r\n",
            ):
                with socket.create_connection(("127.0.0.1", port), 5) as client:
                    client.sendall(payload)
                    client.settimeout(1)
                    with contextlib.suppress(OSError):
                        client.recv(4096)
        assert stack.stop_one("collector") == 0, stack.logs()
        for line in log_of(stack, "collector").splitlines():
            assert line.isprintable(), line
            assert not line.startswith("2026-01-01"), line
            if form == "json" and not line.startswith(GRPC):
                assert {"time", "level", "logger", "message"} <= set(json.loads(line))
            else:
                assert line.startswith(("20", "    | ", *GRPC)), line


def test_recording_reloads_its_log(tmp_path: Path) -> None:
    config, ports = tmp_path / "c.toml", tmp_path / "ports"
    base: dict[str, dict[str, object]] = {"ingest": {"address": "127.0.0.1:0"}}
    config.write_text(toml(base))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(SCRIPTS / "lanterne-collector"), "record", str(tmp_path / "a.ltr"),
             "--config", str(config), "--ports-file", str(ports)],
            stderr=log,
        )  # fmt: skip
    try:
        wait_for(ports.exists, 30, "it listens")
        config.write_text(toml({**base, "log": {"format": "json"}}))
        process.send_signal(signal.SIGHUP)
        wait_for(lambda: "configuration reloaded" in (tmp_path / "log").read_text(), 30, "reload")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    first, *_, last = (tmp_path / "log").read_text().splitlines()
    assert not first.startswith("{")
    assert "frames in" in json.loads(last)["message"]


# ---- dry runs of the collector


def test_a_dry_run_says_what_would_happen(tmp_path: Path) -> None:
    http, ingest = free_port(), free_port()
    state, record = tmp_path / "state", tmp_path / "a.ltr"
    config = tmp_path / "c.toml"
    config.write_text(
        toml(
            {
                "http": {"address": f"127.0.0.1:{http}"},
                "ingest": {"address": f"127.0.0.1:{ingest}"},
                "state": {"path": str(state)},
                "record": {"path": str(record), "max_bytes": 1 << 20},
            }
        )
    )
    done = collector_command("run", "--config", str(config), "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"It would take the reports of agents at 127.0.0.1:{ingest} (plaintext)." in done.stdout
    assert f"health pages at 127.0.0.1:{http}" in done.stdout
    assert str(record) in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.toml"]


def test_a_dry_run_finds_what_would_stop_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = collector_command(
            "--http-address", address, "--ingest-address", "127.0.0.1:0", "--dry-run",
            "--record", str(tmp_path / "none" / "a.ltr"),
        )  # fmt: skip
    assert done.returncode == 1
    assert f"{address} cannot be listened on" in done.stdout
    assert "It would not start: http.address, record.path (above)." in done.stdout
    config = tmp_path / "c.toml"
    config.write_text(
        toml(
            {
                "tls": {"cert": str(tmp_path / "no.pem"), "key": str(tmp_path / "no.key")},
                "ingest": {"address": "127.0.0.1:0", "token_file": str(tmp_path / "token")},
                "http": {"address": "127.0.0.1:0", "web_config": str(tmp_path / "web.yml")},
            }
        )
    )
    done = collector_command("--config", str(config), "--dry-run")
    assert done.returncode == 1
    for key in ("tls.cert", "ingest.token_file", "http.web_config"):
        assert key in done.stdout.splitlines()[-1]
    # A settings error is one before anything is tried.
    assert collector_command("--log-level", "loud", "--dry-run").returncode == 2
