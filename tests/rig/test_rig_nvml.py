"""The stand-in NVML, asked through the real pynvml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig.rig import build

NVML_SCRIPT = """
import json, sys, time
from pathlib import Path
import pynvml as n
state = Path(sys.argv[1])
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(3)
def code(call, *args):
    try:
        call(*args)
    except n.NVMLError as error:
        return error.value
    return 0
out = {
    "count": n.nvmlDeviceGetCount(), "driver": n.nvmlSystemGetDriverVersion(),
    "name": n.nvmlDeviceGetName(h), "uuid": n.nvmlDeviceGetUUID(h),
    "bus": n.nvmlDeviceGetPciInfo(h).busId, "util": n.nvmlDeviceGetUtilizationRates(h).gpu,
    "temperature": n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
    "clocks": [n.nvmlDeviceGetClockInfo(h, 1), n.nvmlDeviceGetMaxClockInfo(h, 1)],
    "throttle": [n.nvmlDeviceGetCurrentClocksThrottleReasons(h),
                 n.nvmlDeviceGetCurrentClocksEventReasons(h)],
    "processes": [[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(h)],
    "samples": [[p.pid, p.smUtil] for p in n.nvmlDeviceGetProcessUtilization(h, 0)],
    "none": n.nvmlDeviceGetComputeRunningProcesses(n.nvmlDeviceGetHandleByIndex(0)),
    "mig": n.nvmlDeviceGetMigMode(h), "persistence": n.nvmlDeviceGetPersistenceMode(h),
    "memory": [n.nvmlDeviceGetMemoryInfo(h).used,
               n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2).used],
    "power": code(n.nvmlDeviceGetPowerUsage, h), "lost": code(n.nvmlDeviceGetHandleByIndex, 1),
    "absent": code(n.nvmlDeviceGetHandleByIndex, 9),
    "unknown bus": code(n.nvmlDeviceGetHandleByPciBusId, "0000:ff:00.0"),
    "same": n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId("0000:13:00.0")),
    "grows": n.nvmlDeviceGetTotalEnergyConsumption(h) > 0,
}
state.write_text("count=2\\ngpu0.temperature=20\\n")
out["changed"] = [n.nvmlDeviceGetCount(),
                  n.nvmlDeviceGetTemperature(n.nvmlDeviceGetHandleByIndex(0), 0)]
n.nvmlShutdown()
out["closed"] = code(n.nvmlDeviceGetCount)
print(json.dumps(out))
"""


def test_nvml_through_pynvml(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    state = tmp_path / "nvml"
    state.write_text(
        "# a hot GPU\ncount=4\ngpu3.temperature=91\ngpu3.sm_clock_mhz=900\ngpu3.throttle=0x40\n"
        "gpu3.pid=1234:2147483648,77:5\ngpu*.utilization=88\ngpu3.memory_used=7\n"
        "fail.nvmlDeviceGetPowerUsage=3\ngpu1.lost=1\n"
    )
    env = dict(os.environ) | build().env() | {"RIG_NVML_STATE": str(state)}
    done = subprocess.run([sys.executable, "-c", NVML_SCRIPT, str(state)], env=env, check=False,
                          capture_output=True, text=True, timeout=30)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "count": 4, "driver": "570.00.rig", "name": "Rig GPU",
        "uuid": "GPU-11a70000-0000-4000-8000-000000000004", "bus": "00000000:13:00.0", "util": 88,
        "temperature": 91, "clocks": [900, 1980], "throttle": [64, 64],
        "processes": [[1234, 2147483648], [77, 5]], "samples": [[1234, 88], [77, 88]], "none": [],
        "mig": [0, 0], "persistence": 1, "memory": [7, 7], "power": 3, "lost": 15, "absent": 2,
        "unknown bus": 6, "same": 3, "grows": True, "changed": [2, 20], "closed": 1,
    }  # fmt: skip
