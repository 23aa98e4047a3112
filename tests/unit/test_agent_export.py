"""The agent's page: Prometheus itself checks it."""

from __future__ import annotations

import shutil
import subprocess
import urllib.request
from dataclasses import replace

import pytest
from agent_readings import Gpu, Reading
from prometheus_client import CollectorRegistry, generate_latest

from lanterne.agent.export import AgentCollector, AgentState, Exporter


def page(state: AgentState) -> str:
    registry = CollectorRegistry()
    registry.register(AgentCollector(lambda: state))
    return generate_latest(registry).decode()


FULL = AgentState(
    node="n1",
    version="1",
    events_read=5,
    events_lost={"ring": 2},
    probe_runs=3,
    probe_run_seconds=0.5,
    source_success={"uprobes": True, "nvml": False},
    libraries={("nccl", "attached"): 1},
    comm_events=9,
    comm_creations_lost={"failed": 2, "no_pointer": 1},
    batches_dropped={"queue_full": 4},
    batches_duplicate=6,
    batches_postponed=7,
    connection_failures=8,
    gpus=[Gpu()],
    host={10: Reading()},
)


@pytest.mark.parametrize("state", [AgentState(), FULL])
def test_promtool_accepts_the_page(state: AgentState) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package: prometheus)")
    result = subprocess.run(
        [promtool, "check", "metrics"],
        input=page(state),
        text=True,
        capture_output=True,
        check=False,
    )
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_known_series_start_at_zero() -> None:
    text = page(AgentState())
    for series in (
        'lanterne_agent_events_lost_total{reason="ring"} 0.0',
        'lanterne_agent_batches_dropped_total{reason="queue_full"} 0.0',
        'lanterne_agent_comm_creations_lost_total{reason="failed"} 0.0',
        'lanterne_agent_comm_creations_lost_total{reason="no_pointer"} 0.0',
        'lanterne_agent_comm_creations_lost_total{reason="too_many"} 0.0',
        'lanterne_agent_comm_creations_lost_total{reason="no_room"} 0.0',
        'lanterne_agent_comm_creations_lost_total{reason="process_ended"} 0.0',
        "lanterne_agent_collector_failures_total 0.0",
        'lanterne_agent_source_success{source="uprobes"} 0.0',
        'lanterne_agent_libraries{kind="nccl",state="attached"} 0.0',
        "lanterne_agent_comms_unresolved 0.0",
        "lanterne_agent_blind_graph_launches_total 0.0",
        "lanterne_agent_steps_total 0.0",
        "lanterne_agent_blind_steps_total 0.0",
    ):
        assert series in text, series


def test_values_reach_their_series() -> None:
    text = page(FULL)
    for series in (
        "lanterne_agent_events_read_total 5.0",
        'lanterne_agent_events_lost_total{reason="ring"} 2.0',
        "lanterne_agent_comm_events_total 9.0",
        'lanterne_agent_comm_creations_lost_total{reason="failed"} 2.0',
        'lanterne_agent_comm_creations_lost_total{reason="no_pointer"} 1.0',
        "lanterne_agent_batches_duplicate_total 6.0",
        "lanterne_agent_batches_postponed_total 7.0",
        "lanterne_agent_collector_failures_total 8.0",
        'lanterne_agent_source_success{source="nvml"} 0.0',
        'lanterne_agent_source_success{source="uprobes"} 1.0',
        "lanterne_agent_probe_run_seconds_total 0.5",
        'lanterne_gpu_utilization_ratio{gpu="2",node="n1"} 0.5',
        'lanterne_gpu_energy_joules_total{gpu="2",node="n1"} 5.0',
        'lanterne_gpu_throttle_info{gpu="2",node="n1",reason="sw_thermal"} 1.0',
        'lanterne_process_cpu_seconds_total{node="n1",pid="10"} 1.5',
    ):
        assert series in text, series


def test_what_cannot_be_known_is_absent() -> None:
    text = page(AgentState())
    assert "lanterne_agent_probe_runs_total" not in text
    assert "lanterne_gpu_power_watts{" not in page(FULL)
    assert "lanterne_process_run_queue_seconds_total{" not in page(FULL)


def test_a_gpu_that_is_gone_is_gone_from_the_page() -> None:
    states = [FULL, replace(FULL, gpus=[])]
    registry = CollectorRegistry()
    registry.register(AgentCollector(lambda: states[0]))
    assert 'lanterne_gpu_utilization_ratio{gpu="2"' in generate_latest(registry).decode()
    states.pop(0)
    assert 'lanterne_gpu_utilization_ratio{gpu="2"' not in generate_latest(registry).decode()


def test_it_is_served_and_stops() -> None:
    exporter = Exporter("127.0.0.1:0", lambda: FULL)
    url = f"http://127.0.0.1:{exporter.port}/metrics"
    with urllib.request.urlopen(url) as answer:
        assert b"lanterne_agent_info" in answer.read()
    exporter.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(url)


def test_a_port_in_use_is_an_error_to_the_caller() -> None:
    exporter = Exporter("127.0.0.1:0", AgentState)
    try:
        with pytest.raises(OSError):
            Exporter(f"127.0.0.1:{exporter.port}", AgentState)
    finally:
        exporter.close()
