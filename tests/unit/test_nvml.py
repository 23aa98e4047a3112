"""agent/nvml.py: the pure parts, and the seam on libraries that are there, broken or late."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lanterne.agent.nvml import normal_bus_id, throttle_names

# Prints one JSON line per step; the clock is stepped by hand. The library search path of a process
# is fixed at its start, so each test has a process of its own.
PRELUDE = """
import dataclasses, json, os, pathlib
from lanterne.agent.nvml import Nvml
now = 0.0
nvml = Nvml(clock=lambda: now)
def show():
    gpus = [dataclasses.asdict(gpu) for gpu in nvml.read()]
    print(json.dumps([nvml.available, nvml.reason, gpus]))
"""


def steps(libraries: Path, script: str, **env: str) -> list[tuple[bool, str, list[Any]]]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + script],
        env=dict(os.environ, LD_LIBRARY_PATH=str(libraries), **env),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("nvml", "nccl"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("0000:1b:00.0", "0000:1b:00.0"),
        ("00010000:FF:1F.7", "10000:ff:1f.7"),
        ("", ""),
        ("1b:00.0", ""),
        ("0000:zz:00.0", ""),
    ],
)
def test_bus_id_as_nccl_prints_it(nvml: str, nccl: str) -> None:
    assert normal_bus_id(nvml) == nccl


def test_throttle_bits_have_names_and_unknown_ones_are_kept() -> None:
    assert throttle_names(0) == ()
    assert throttle_names(0x1) == ("idle",)
    assert throttle_names(0x4 | 0x40) == ("sw_power_cap", "hw_thermal")
    assert throttle_names(1 << 20) == ("bit_20",)


def test_the_bit_table_is_nvmls() -> None:
    import pynvml

    bits = {
        "idle": pynvml.nvmlClocksEventReasonGpuIdle,
        "applications_clocks": pynvml.nvmlClocksEventReasonApplicationsClocksSetting,
        "sw_power_cap": pynvml.nvmlClocksEventReasonSwPowerCap,
        "hw_slowdown": pynvml.nvmlClocksEventReasonHwSlowdown,
        "sync_boost": pynvml.nvmlClocksEventReasonSyncBoost,
        "sw_thermal": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
        "hw_thermal": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
        "hw_power_brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
        "display_clock": pynvml.nvmlClocksEventReasonDisplayClockSetting,
        "board_limit": pynvml.nvmlClocksThrottleReasonBoardLimit,
        "reliability": pynvml.nvmlClocksThrottleReasonReliability,
    }
    for name, bit in bits.items():
        assert throttle_names(bit) == (name,)


def test_a_broken_library_is_a_state_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")  # found first, on a GPU host too
    ((available, reason, gpus),) = steps(tmp_path, "show()")
    assert not available
    assert "libnvidia-ml.so.1" in reason
    assert gpus == []


def test_without_nvidia_ml_py_the_remedy_is_named(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("raise ImportError\n")
    ((available, reason, _),) = steps(tmp_path, "show()", PYTHONPATH=str(tmp_path))
    assert not available
    assert "pip install" in reason


def test_a_retry_waits_longer_each_time(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")
    script = """
import lanterne.agent.nvml as module
tries = []
inner = nvml._open
nvml._open = lambda: (tries.append(now), inner())
for now in range(0, 1000): nvml.read()
print(json.dumps([False, "", tries]))
"""
    ((_, _, tries),) = steps(tmp_path, script)
    assert tries == [5, 15, 35, 75, 155, 315, 615, 915]  # doubling, at most 300 s apart


def test_close_is_final(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")
    ((available, reason, gpus),) = steps(tmp_path, "nvml.close(); now = 1e9; show()")
    assert (available, reason, gpus) == (False, "closed", [])


@pytest.fixture(scope="module")
def libraries() -> Path:
    from tests.rig import rig

    return rig.build().root


def state(folder: Path, *lines: str) -> dict[str, str]:
    file = folder / "nvml-state"
    file.write_text("\n".join(lines) + "\n")
    return {"RIG_NVML_STATE": str(file)}


def test_reads_every_field_in_base_units(libraries: Path, tmp_path: Path) -> None:
    env = state(
        tmp_path,
        "count=2",
        "gpu*.power_mw=650500",
        "gpu*.energy_mj=1234567",
        "gpu1.temperature=91",
        "gpu1.sm_clock_mhz=1200",
        "gpu1.sm_clock_max_mhz=1980",
        "gpu1.utilization=97",
        "gpu1.memory_total=85899345920",
        "gpu1.memory_used=1073741824",
        "gpu1.throttle=0x44",
        "gpu1.pid=1234:2147483648,1235:1048576,1234:1",
        "gpu1.name=Evil\x1b[31m GPU",
    )
    ((available, reason, gpus),) = steps(libraries, "show(); nvml.close()", **env)
    assert (available, reason) == (True, "")
    assert [gpu["index"] for gpu in gpus] == [0, 1]
    gpu = gpus[1]
    assert gpu["uuid"].startswith("GPU-")
    assert normal_bus_id(gpu["bus_id"]) == gpu["bus_id"] != ""
    assert gpu["name"] == "Evil?[31m GPU"
    assert gpu["utilization_ratio"] == 0.97
    assert (gpu["memory_used_bytes"], gpu["memory_total_bytes"]) == (1 << 30, 80 << 30)
    assert gpu["temperature_celsius"] == 91
    assert gpu["power_watts"] == pytest.approx(650.5)
    assert gpu["energy_joules"] == pytest.approx(1234.567)
    assert gpu["sm_clock_hertz"] == 1200e6
    assert gpu["sm_clock_max_hertz"] == 1980e6
    assert gpu["throttle_reasons"] == ["sw_power_cap", "hw_thermal"]
    assert gpu["process_memory"] == {"1234": (1 << 31) + 1, "1235": 1 << 20}


@pytest.mark.parametrize(
    ("function", "fields"),
    [
        ("nvmlDeviceGetUtilizationRates", ["utilization_ratio"]),
        ("nvmlDeviceGetMemoryInfo", ["memory_used_bytes", "memory_total_bytes"]),
        ("nvmlDeviceGetTemperature", ["temperature_celsius"]),
        ("nvmlDeviceGetPowerUsage", ["power_watts"]),
        ("nvmlDeviceGetTotalEnergyConsumption", ["energy_joules"]),
        ("nvmlDeviceGetClockInfo", ["sm_clock_hertz"]),
        ("nvmlDeviceGetMaxClockInfo", ["sm_clock_max_hertz"]),
    ],
)
def test_a_query_that_fails_leaves_only_its_own_fields_out(
    libraries: Path, tmp_path: Path, function: str, fields: list[str]
) -> None:
    # 3: NOT_SUPPORTED, what a MIG parent answers to most of these.
    ((available, _, gpus),) = steps(
        libraries, "show()", **state(tmp_path, "count=1", f"fail.{function}=3")
    )
    assert available
    assert [name for name, value in gpus[0].items() if value is None] == fields


def test_mig_instances_of_a_gpu_and_none_where_it_is_off(libraries: Path, tmp_path: Path) -> None:
    ((_, _, gpus),) = steps(libraries, "show()", **state(tmp_path, "count=2", "gpu1.mig=2"))
    assert gpus[0]["mig"] == []
    assert len(set(gpus[1]["mig"])) == 2
    assert all(uuid.startswith("MIG-") for uuid in gpus[1]["mig"])


def test_identity_and_lists_that_fail_are_empty(libraries: Path, tmp_path: Path) -> None:
    names = ["UUID", "Name", "PciInfo_v3", "CurrentClocksEventReasons"]
    names += ["ComputeRunningProcesses_v3", "ComputeRunningProcesses_v2"]
    fail = [f"fail.nvmlDeviceGet{name}=999" for name in names]
    lines = ("count=1", "gpu0.throttle=0x8", "gpu0.pid=1:2", *fail)
    ((available, _, gpus),) = steps(libraries, "show()", **state(tmp_path, *lines))
    assert available
    assert [gpus[0][k] for k in ("uuid", "bus_id", "name", "process_memory")] == ["", "", "", {}]
    assert gpus[0]["throttle_reasons"] == ["hw_slowdown"]  # by the name of older drivers


def test_a_lost_gpu_is_left_out_and_the_others_stay(libraries: Path, tmp_path: Path) -> None:
    ((_, _, gpus),) = steps(libraries, "show()", **state(tmp_path, "count=3", "gpu1.lost=1"))
    assert [gpu["index"] for gpu in gpus] == [0, 2]


def test_a_driver_that_appears_later_is_found_and_one_that_goes_is_noticed(
    libraries: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "libnvidia-ml.so.1").write_bytes(b"")
    env = state(tmp_path, "count=1")
    script = """
import shutil
state = pathlib.Path(os.environ["RIG_NVML_STATE"])
show()
library = pathlib.Path(os.environ["LD_LIBRARY_PATH"]) / "libnvidia-ml.so.1"
library.unlink(); shutil.copy(os.environ["RIG_LIBRARY"], library)
now = 4; show()       # too early to try again
now = 6; show()
state.write_text("count=1\\nfail.nvmlDeviceGetCount_v2=999\\n"); show()
state.write_text("count=2\\n")
now = 12; show()
"""
    seen = steps(folder, script, RIG_LIBRARY=str(libraries / "libnvidia-ml.so.1"), **env)
    assert [(available, len(gpus)) for available, _, gpus in seen] == [
        (False, 0),
        (False, 0),
        (True, 1),
        (False, 0),
        (True, 2),
    ]
    assert "stopped answering" in seen[3][1]
