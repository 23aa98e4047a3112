"""The stand-in NVML, as `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` would tell."""

from __future__ import annotations

import ctypes as c

MIB = 1 << 20


class Memory(c.Structure):
    _fields_ = (("total", c.c_ulonglong), ("free", c.c_ulonglong), ("used", c.c_ulonglong))


class Utilization(c.Structure):
    _fields_ = (("gpu", c.c_uint), ("memory", c.c_uint))


class Pci(c.Structure):
    _fields_ = (("legacy", c.c_char * 16), ("numbers", c.c_uint * 5), ("bus_id", c.c_char * 32))


def main(_: list[str]) -> int:
    lib = c.CDLL("libnvidia-ml.so.1")
    lib.nvmlInit_v2()
    count = c.c_uint()
    lib.nvmlDeviceGetCount_v2(c.byref(count))
    for index in range(count.value):
        print(", ".join(map(str, _row(lib, index))))
    return 0


def _row(lib: c.CDLL, index: int) -> list[object]:
    handle, uuid, name = c.c_void_p(), c.create_string_buffer(96), c.create_string_buffer(96)
    memory, utilization, pci = Memory(), Utilization(), Pci()
    temperature, power, clock = c.c_uint(), c.c_uint(), c.c_uint()
    lib.nvmlDeviceGetHandleByIndex_v2(index, c.byref(handle))
    lib.nvmlDeviceGetUUID(handle, uuid, 96)
    lib.nvmlDeviceGetName(handle, name, 96)
    lib.nvmlDeviceGetPciInfo_v3(handle, c.byref(pci))
    lib.nvmlDeviceGetUtilizationRates(handle, c.byref(utilization))
    lib.nvmlDeviceGetMemoryInfo(handle, c.byref(memory))
    lib.nvmlDeviceGetTemperature(handle, 0, c.byref(temperature))
    lib.nvmlDeviceGetPowerUsage(handle, c.byref(power))
    lib.nvmlDeviceGetClockInfo(handle, 1, c.byref(clock))
    return [
        index, uuid.value.decode(), pci.bus_id.decode(), name.value.decode(), "0.0",
        utilization.gpu, memory.used // MIB, temperature.value, power.value / 1000, clock.value,
    ]  # fmt: skip
