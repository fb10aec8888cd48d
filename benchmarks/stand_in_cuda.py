"""A stand-in for the CUDA driver, for the host's side of Triton's launches where no GPU is.

`activate()` compiles a libcuda.so.1 whose functions do nothing, and sets Triton's own driver on top of it, with a
compute capability of 9.0. So binder, descriptors and the C code of the launcher are the real ones; no kernel runs. The
library writes down what each launch hands over. Needs gcc, and a machine where no real driver can be loaded."""

import ctypes
import os
import re
import subprocess
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

C = r"""
#include <stdint.h>
#include <string.h>
typedef uint64_t u64;
enum { KERNELS = 512, MOST = 64, KEPT = 64 };
struct { u64 function; int count, sizes[MOST]; } kernels[KERNELS];
struct { u64 function, stream; unsigned grid[3]; int count; u64 words[MOST]; } launches[KEPT];
int known, launched, maps_made;
u64 next_function;
#define DOES_NOTHING(name) int name() { return 0; }
DOES_NOTHING(cuInit) DOES_NOTHING(cuCtxSetCurrent) DOES_NOTHING(cuCtxGetLimit) DOES_NOTHING(cuCtxSetLimit)
DOES_NOTHING(cuDevicePrimaryCtxRetain) DOES_NOTHING(cuFuncSetAttribute) DOES_NOTHING(cuFuncSetCacheConfig)
DOES_NOTHING(cuModuleUnload) DOES_NOTHING(cuOccupancyMaxActiveClusters) DOES_NOTHING(cuStreamIsCapturing)
DOES_NOTHING(cuTensorMapEncodeIm2col)
int cuDriverGetVersion(int* v) { *v = 13000; return 0; }
int cuCtxGetCurrent(void** c) { *c = (void*)1; return 0; }
int cuCtxGetDevice(int* d) { *d = 0; return 0; }
int cuDeviceGet(int* d, int i) { *d = i; return 0; }
int cuDeviceGetCount(int* n) { *n = 2; return 0; }
int cuDeviceGetAttribute(int* v, int a, int d) { *v = 232448; return 0; }
int cuFuncGetAttribute(int* v, int a, void* f) { *v = a == 0 ? 1024 : 32; return 0; }
int cuGetErrorString(int e, const char** s) { *s = "of the stand-in"; return 0; }
int cuModuleLoadData(void** m, const void* image) { *m = (void*)3; return 0; }
int cuModuleGetFunction(u64* f, void* m, const char* name) { *f = next_function; return 0; }
int cuPointerGetAttribute(u64* to, int a, u64 p) { *to = p; return 0; }
int cuTensorMapEncodeTiled(u64* map, int type, unsigned rank, u64 address) {
    memset(map, 0, 128), *map = address, ++maps_made;
    return 0;
}
void expect(u64 function, int count, const int* sizes) {
    if (known == KERNELS || count > MOST) return;
    kernels[known].function = function, kernels[known].count = count;
    memcpy(kernels[known++].sizes, sizes, count * sizeof(int));
}
int cuLaunchKernelEx(const unsigned* config, u64 function, void** given, void** extra) {
    int at = launched++ % KEPT;
    launches[at].function = function, launches[at].count = 0;
    memcpy(launches[at].grid, config, 12), memcpy(&launches[at].stream, config + 8, 8);
    for (int k = 0; k < known; ++k) if (kernels[k].function == function) {
        launches[at].count = kernels[k].count;
        for (int i = 0; i < kernels[k].count; ++i)
            launches[at].words[i] = 0, memcpy(launches[at].words + i, given[i], kernels[k].sizes[i]);
    }
    return 0;
}
"""


class _Launch(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_uint64), ("stream", ctypes.c_uint64), ("grid", ctypes.c_uint * 3),
        ("count", ctypes.c_int), ("words", ctypes.c_uint64 * 64),
    ]  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """What a launch handed over. function: a number that names the binary and its device. words: one of each parameter
    of the kernel; of a tensor map the address."""

    function: int
    grid: tuple[int, ...]
    stream: int
    words: tuple[int, ...]


class StandIn:
    """device: the current one, to be set; its current stream is 1000 above it."""

    def __init__(self, library: ctypes.CDLL):
        self.library, self.device = library, 0
        self._launches = (_Launch * 64).in_dll(library, "launches")

    def counted(self, name: str) -> int:
        """launched, or maps_made."""
        return ctypes.c_int.in_dll(self.library, name).value

    def launches(self, call) -> list[Launch]:
        """Those of call(), at most 64."""
        before = self.counted("launched")
        call()
        kept = [self._launches[at % 64] for at in range(before, self.counted("launched"))]
        return [Launch(one.function, tuple(one.grid), one.stream, tuple(one.words[: one.count])) for one in kept]


def real_driver() -> bool:
    """Whether one can be loaded. torch then loads it, and launches go to it."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def activate() -> StandIn:
    folder = Path(tempfile.mkdtemp())
    (folder / "cuda.c").write_text(C)
    library = folder / "libcuda.so.1"
    command = ["gcc", "-w", "-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", folder / "cuda.c", "-o", library]
    subprocess.run(command, check=True)
    (folder / "libcuda.so").symlink_to(library)  # Triton 3.5 links with -lcuda
    stand_in = StandIn(ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL))
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    class Driver(CudaDriver):
        def __init__(self):
            super().__init__()
            self.get_current_device = lambda: stand_in.device
            self.get_current_stream = lambda device: 1000 + device
            self.get_device_capability = lambda device=0: (9, 0)

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    triton.runtime.driver.set_active(Driver())
    _write_down_parameters(stand_in.library)
    return stand_in


def _write_down_parameters(library: ctypes.CDLL) -> None:
    """Tell the library the parameters of each kernel when it is loaded; its PTX lists them."""
    import triton
    from triton.compiler.compiler import CompiledKernel

    load = CompiledKernel._init_handles

    def loading(self):
        if self.module is None:
            number = zlib.crc32(self.kernel) | (triton.runtime.driver.active.get_current_device() + 1) << 32
            ctypes.c_uint64.in_dll(library, "next_function").value = number
            sizes = parameter_sizes(self.asm["ptx"])
            library.expect(ctypes.c_uint64(number), len(sizes), (ctypes.c_int * len(sizes))(*sizes))
        return load(self)

    CompiledKernel._init_handles = loading


def parameter_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter; 8 of a tensor map, whose first ones are the address here."""
    head = re.search(r"\.entry[^(]*\(([^)]*)\)", ptx).group(1)
    types = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)\s+[^\n]*", head)
    return [int(bits) // 8 if int(bits) > 8 else 8 for bits in types]
