"""The CUDA driver by ctypes: only libcuda is needed to launch a kernel a known number of times.

The kernel takes one u64, the nanoseconds it is to run. On a real driver it is PTX that reads
%globaltimer; the CPU stand-in (tests/rig) makes one with rigKernelCreate and sleeps.
"""

from __future__ import annotations

import ctypes as c
from typing import Any

# PTX ISA 6.0 and sm_50: every driver since CUDA 9 compiles it for the GPU that is there.
PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry lanterne_check(.param .u64 run_ns)
{
  .reg .pred %p<3>;
  .reg .u64 %t<5>;
  ld.param.u64 %t0, [run_ns];
  setp.eq.u64 %p0, %t0, 0;
  @%p0 bra DONE;
  mov.u64 %t1, %globaltimer;
LOOP:
  mov.u64 %t2, %globaltimer;
  sub.u64 %t3, %t2, %t1;
  setp.lt.u64 %p1, %t3, %t0;
  @%p1 bra LOOP;
DONE:
  ret;
}
"""

LEGACY, PER_THREAD = 1, 2  # flags of cuGetProcAddress
# name as cuGetProcAddress takes it, and whether it has a twin for the per-thread default stream
ASKED = (
    ("cuLaunchKernel", True),
    ("cuLaunchKernelEx", True),
    ("cuGraphLaunch", True),
    ("cuStreamSynchronize", True),
    ("cuEventSynchronize", False),
    ("cuCtxSynchronize", False),
    ("cuMemcpyDtoH", True),
    ("cuStreamBeginCapture", True),
    ("cuStreamEndCapture", True),
)
ENDINGS = tuple(version + twin for version in ("", "_v2", "_v3") for twin in ("", "_ptsz", "_ptds"))


class LaunchConfig(c.Structure):
    _fields_ = (
        ("grid", c.c_uint * 3),
        ("block", c.c_uint * 3),
        ("shared", c.c_uint),
        ("stream", c.c_void_p),
        ("attributes", c.c_void_p),
        ("attribute_count", c.c_uint),
    )


class CudaError(Exception):
    pass


class Cuda:
    """The primary context of device 0, one stream, one kernel."""

    def __init__(self, path: str = "libcuda.so.1") -> None:
        self.lib = c.CDLL(path, mode=c.RTLD_GLOBAL)
        self.call("cuInit", 0)
        self._device, self._context, self.stream = c.c_int(), c.c_void_p(), c.c_void_p()
        self.call("cuDeviceGet", c.byref(self._device), 0)
        self.make_current()
        self.call("cuStreamCreate", c.byref(self.stream), 1)
        self.kernel = self._make_kernel()
        self._ns = c.c_uint64()
        self._params = (c.c_void_p * 1)(c.cast(c.pointer(self._ns), c.c_void_p))
        self._graph = c.c_void_p()
        self._event = c.c_void_p()
        self.call("cuEventCreate", c.byref(self._event), 0)

    def make_current(self) -> None:
        self.call("cuDevicePrimaryCtxRetain", c.byref(self._context), self._device)
        self.call("cuCtxSetCurrent", self._context)

    def has(self, name: str) -> bool:
        return hasattr(self.lib, name)

    def call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self.lib, name)(*arguments))
        if code:
            raise CudaError(f"{name} returned {code}")

    def _make_kernel(self) -> c.c_void_p:
        if self.has("rigKernelCreate"):
            self.lib.rigKernelCreate.restype = c.c_void_p
            return c.c_void_p(self.lib.rigKernelCreate(b"lanterne_check"))
        module, kernel = c.c_void_p(), c.c_void_p()
        self.call("cuModuleLoadData", c.byref(module), c.c_char_p(PTX))
        self.call("cuModuleGetFunction", c.byref(kernel), module, b"lanterne_check")
        return kernel

    def version(self) -> int:
        found = c.c_int()
        self.call("cuDriverGetVersion", c.byref(found))
        return found.value

    def name(self) -> str:
        text = c.create_string_buffer(128)
        self.call("cuDeviceGetName", text, 128, self._device)
        return text.value.decode(errors="replace")

    def bus_id(self) -> str:
        text = c.create_string_buffer(32)
        self.call("cuDeviceGetPCIBusId", text, 32, self._device)
        return text.value.decode()

    def launcher(self, api: str, ns: int = 0) -> Any:
        """A function of no arguments that is one launch through `api`."""
        self._ns.value = ns
        function = getattr(self.lib, api)
        one = (c.c_uint * 3)(1, 1, 1)
        if "Ex" in api:
            config = LaunchConfig(one, one, 0, self.stream, None, 0)
            arguments: tuple[Any, ...] = (c.byref(config), self.kernel, self._params, None)
        else:
            sizes = (c.c_uint(1),) * 6
            arguments = (self.kernel, *sizes, c.c_uint(0), self.stream, self._params, None)

        def launch() -> None:
            if function(*arguments):
                raise CudaError(f"{api} failed")

        return launch

    def launch(self, api: str, times: int, ns: int = 0) -> None:
        one = self.launcher(api, ns)
        for _ in range(times):
            one()

    def capture(self, nodes: int) -> None:
        """A graph of `nodes` kernels. The launches made while capturing are calls like any."""
        graph = c.c_void_p()
        self.call("cuStreamBeginCapture_v2", self.stream, 0)
        self.launch("cuLaunchKernel", nodes)
        self.call("cuStreamEndCapture", self.stream, c.byref(graph))
        self.call("cuGraphInstantiateWithFlags", c.byref(self._graph), graph, c.c_ulonglong(0))

    def replay(self, api: str, times: int) -> None:
        for _ in range(times):
            self.call(api, self._graph, self.stream)

    def synchronise(self, api: str, times: int) -> None:
        for _ in range(times):
            if api.startswith("cuCtx"):
                self.call(api)
            elif api.startswith("cuEvent"):
                self.call("cuEventRecord", self._event, self.stream)
                self.call(api, self._event)
            else:
                self.call(api, self.stream)

    def memory(self, size: int) -> c.c_void_p:
        found = c.c_uint64()
        self.call("cuMemAlloc_v2", c.byref(found), c.c_size_t(size))
        return c.c_void_p(found.value)

    def addresses(self) -> dict[str, str]:
        """Name, flags and version -> the export at the address cuGetProcAddress gives, or ""."""
        found: dict[str, str] = {}
        for version in sorted({11040, 12000, self.version()}):
            for name, has_twin in ASKED:
                for flags in (LEGACY, PER_THREAD) if has_twin else (LEGACY,):
                    pointer, status = c.c_void_p(), c.c_int()
                    code = self.lib.cuGetProcAddress_v2(
                        name.encode(), c.byref(pointer), version, c.c_uint64(flags),
                        c.byref(status),
                    )  # fmt: skip
                    if code == 0 and pointer.value:
                        kind = "legacy" if flags == LEGACY else "per-thread"
                        found[f"{name}/{kind}/{version}"] = self._export_at(name, pointer.value)
        return found

    def _export_at(self, name: str, address: int) -> str:
        for ending in ENDINGS:
            if self.has(name + ending):
                export = c.cast(getattr(self.lib, name + ending), c.c_void_p).value
                if export == address:
                    return name + ending
        return ""
