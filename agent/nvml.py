"""GPU readings through NVML: the only file that touches pynvml.

A host without driver, library or GPU is a normal state: ``available`` is False and ``reason`` says
why; a driver that appears later is found by a retry with back-off. Each query may fail alone
(MIG parents, virtual GPUs, old drivers): that field is then None. NVML is context, never evidence
of waiting, because a kernel that spins on its peers reads as busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

RETRY_FIRST_SECONDS = 5.0
RETRY_LAST_SECONDS = 300.0

# nvml.h: nvmlClocksEventReason* (nvmlClocksThrottleReason* before driver 535), by bit.
# Bit 0 (idle) and bits 1, 4 and 8 (settings of the operator) are reported too: a clock that was
# fixed low explains a slow GPU as well as heat does.
CLOCK_EVENTS = (
    "idle",
    "applications_clocks",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal",
    "hw_thermal",
    "hw_power_brake",
    "display_clock",
    "board_limit",
    "reliability",
)


@dataclass(frozen=True)
class GpuReading:
    """The fields of the wire's Gpu message; None: could not be read."""

    index: int
    uuid: str
    bus_id: str
    name: str
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    energy_joules: float | None = None
    sm_clock_hertz: float | None = None
    sm_clock_max_hertz: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    process_memory: dict[int, int] = field(default_factory=dict)
    mig: tuple[str, ...] = ()  # UUIDs of its MIG instances


def normal_bus_id(text: str) -> str:
    """A PCI bus id as NCCL prints it: "0000:1b:00.0". NVML writes "00000000:1B:00.0".

    Anything else than domain:bus:device.function in hex gives "".
    """
    try:
        domain, bus, rest = text.split(":")
        device, function = rest.split(".")
        parts = [int(part, 16) for part in (domain, bus, device, function)]
    except ValueError:
        return ""
    return "{:04x}:{:02x}:{:02x}.{:x}".format(*parts)


def throttle_names(bits: int) -> tuple[str, ...]:
    """The names of the set bits, lowest first; an unknown bit n is "bit_n", never dropped."""
    names = []
    for bit in range(bits.bit_length()):
        if bits >> bit & 1:
            names.append(CLOCK_EVENTS[bit] if bit < len(CLOCK_EVENTS) else f"bit_{bit}")
    return tuple(names)


class Nvml:
    """Reads every GPU of this host. Not thread-safe; pynvml's state is the process's."""

    available: bool
    reason: str  # why not available, with the remedy; "" where available

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._retry_after = RETRY_FIRST_SECONDS
        self._retry_at = 0.0
        self._nvml: Any = None
        self.available = False
        self.reason = ""
        self._open()

    def read(self) -> list[GpuReading]:
        """One reading per GPU; [] where NVML is not available. A lost GPU is left out."""
        if not self.available:
            if self._clock() < self._retry_at:
                return []
            self._open()
            if not self.available:
                return []
        nvml = self._nvml
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            # The driver was unloaded or every GPU fell off the bus: start again from nothing.
            self._shut()
            self._unavailable(f"NVML stopped answering: {error}")
            return []
        readings = (self._gpu(index) for index in range(count))
        return [reading for reading in readings if reading is not None]

    def close(self) -> None:
        self._shut()
        self.available, self.reason = False, "closed"
        self._retry_at = float("inf")

    def _open(self) -> None:
        try:
            import pynvml
        except ImportError:
            self._unavailable("nvidia-ml-py is not installed: pip install 'lanterne[agent]'")
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self._unavailable(_why(pynvml, error))
            return
        self.available, self.reason = True, ""
        self._retry_after = RETRY_FIRST_SECONDS

    def _shut(self) -> None:
        if self.available:
            self._try(self._nvml.nvmlShutdown)

    def _unavailable(self, reason: str) -> None:
        self.available, self.reason = False, reason
        self._retry_at = self._clock() + self._retry_after
        self._retry_after = min(2 * self._retry_after, RETRY_LAST_SECONDS)

    def _try(self, query: Callable[..., T], *args: object) -> T | None:
        """The query's value, or None where this driver, GPU or MIG mode does not answer it."""
        try:
            return query(*args)
        except self._nvml.NVMLError:
            return None

    def _gpu(self, index: int) -> GpuReading | None:
        nvml = self._nvml
        handle = self._try(nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            return None
        pci = self._try(nvml.nvmlDeviceGetPciInfo, handle)
        utilization = self._try(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._try(nvml.nvmlDeviceGetMemoryInfo, handle)
        return GpuReading(
            index=index,
            uuid=_text(self._try(nvml.nvmlDeviceGetUUID, handle)),
            bus_id=normal_bus_id(_text(pci.busId)) if pci is not None else "",
            name=_text(self._try(nvml.nvmlDeviceGetName, handle)),
            utilization_ratio=utilization.gpu / 100 if utilization is not None else None,
            memory_used_bytes=int(memory.used) if memory is not None else None,
            memory_total_bytes=int(memory.total) if memory is not None else None,
            temperature_celsius=_scaled(
                self._try(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU), 1.0
            ),
            power_watts=_scaled(self._try(nvml.nvmlDeviceGetPowerUsage, handle), 1e-3),
            energy_joules=_scaled(
                self._try(nvml.nvmlDeviceGetTotalEnergyConsumption, handle), 1e-3
            ),
            sm_clock_hertz=_scaled(
                self._try(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM), 1e6
            ),
            sm_clock_max_hertz=_scaled(
                self._try(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM), 1e6
            ),
            throttle_reasons=self._throttle(handle),
            process_memory=self._process_memory(handle),
            mig=self._mig(handle),
        )

    def _mig(self, handle: object) -> tuple[str, ...]:
        nvml = self._nvml
        mode = self._try(nvml.nvmlDeviceGetMigMode, handle)  # current, pending
        if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return ()
        uuids = []
        for place in range(self._try(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            instance = self._try(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)
            if instance is not None:  # most places are empty
                uuids.append(_text(self._try(nvml.nvmlDeviceGetUUID, instance)))
        return tuple(uuid for uuid in uuids if uuid)

    def _throttle(self, handle: object) -> tuple[str, ...]:
        bits = self._try(self._nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if bits is None:  # drivers before 535 have only the old name
            bits = self._try(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        return throttle_names(int(bits or 0))

    def _process_memory(self, handle: object) -> dict[int, int]:
        """Bytes by pid, over the GPU instances of a MIG parent (each lists its own part)."""
        nvml = self._nvml
        # The unversioned name raises another exception on drivers without _v3.
        rows = self._try(nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
        if rows is None:  # drivers before 510
            rows = self._try(nvml.nvmlDeviceGetComputeRunningProcesses_v2, handle)
        memory: dict[int, int] = {}
        for row in rows or ():
            # usedGpuMemory is None where the driver may not tell (containers, MIG).
            if row.usedGpuMemory is not None:
                memory[int(row.pid)] = memory.get(int(row.pid), 0) + int(row.usedGpuMemory)
        return memory


def _scaled(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _text(value: object) -> str:
    """pynvml gives str or bytes, by version and by field."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
    return "".join(char if char.isprintable() else "?" for char in text)


def _why(nvml: Any, error: Any) -> str:
    remedies = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no libnvidia-ml.so.1 on this host: normal without an"
        " NVIDIA driver; in a container, mount it or run with the NVIDIA runtime",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded: modprobe nvidia",
        nvml.NVML_ERROR_NO_PERMISSION: "/dev/nvidiactl is not readable: give the agent the device",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was updated under its library: reboot"
        " or reload the driver, then restart the agent",
    }
    return remedies.get(error.value, f"NVML does not start: {error}")
