"""What the engine, recorder and replays are told, from the configuration. Pure, but `boot_id`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from lanterne.collector.analyse.settings import EngineConfig
from lanterne.collector.cli import this_version
from lanterne.collector.config import CollectorConfig


def engine_config(config: CollectorConfig) -> EngineConfig:
    analysis = config.analysis
    return EngineConfig(
        window_seconds=analysis.window_seconds,
        deadline_seconds=analysis.deadline_seconds,
        idle_seconds=analysis.idle_seconds,
        ended_seconds=analysis.ended_seconds,
        nodes=config.ingest.max_nodes,
        min_gain_share=analysis.min_gain_share,
        hang_seconds=analysis.hang_seconds,
        advice_seconds=config.advice.seconds,
        advice_min_gain=config.advice.min_gain,
        advice_spare_slots=config.advice.spare_slots,
        expert_bytes=float(config.advice.expert_bytes),
        expert_groups=config.advice.expert_groups,
    )


def shared_expert_ranks(config: CollectorConfig) -> dict[str, int]:
    pairs = (p.rpartition("=") for p in config.advice.shared_expert_ranks.split(",") if p)
    return {workload: int(rank) for workload, _, rank in pairs}


def record_options(config: CollectorConfig) -> dict[str, object] | None:
    """For the ingest process: where to, how much, and what a replay needs to know."""
    record = config.record
    if not record.path:
        return None
    return {
        "path": record.path,
        "max_bytes": record.max_bytes,
        "files": record.files,
        "sync_seconds": record.sync_seconds,
        "boot_id": boot_id(),
        "version": this_version(),
        "engine": asdict(engine_config(config)),
    }


def boot_id() -> str:
    """This boot of this machine: an agent that reports the same shares our CLOCK_MONOTONIC."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
