"""Readings as the agent's GPU and host sources give them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Gpu:
    index: int = 2
    uuid: str = "GPU-1"
    bus_id: str = "0000:3b:00.0"
    name: str = "H"
    utilization_ratio: float | None = 0.5
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = 80
    temperature_celsius: float | None = 60.0
    power_watts: float | None = None
    energy_joules: float | None = 5.0
    sm_clock_hertz: float | None = 1e9
    sm_clock_max_hertz: float | None = 2e9
    throttle_reasons: tuple[str, ...] = ("sw_thermal",)
    process_memory: dict[int, int] = field(default_factory=lambda: {10: 7})


@dataclass(frozen=True)
class Reading:
    pid: int = 10
    start_ticks: int = 5
    command: str = "python" * 40
    cpu_seconds: float | None = 1.5
    run_queue_seconds: float | None = None
    rss_bytes: int | None = 99
    memory_pressure_ratio: float | None = 0.0
    cpu_pressure_ratio: float | None = None
    stopped: bool | None = None
