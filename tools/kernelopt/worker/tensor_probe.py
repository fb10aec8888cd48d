"""The bare tensor operations of a problem (tensor_probe.cu): what they take on this GPU.

A library's product is no floor: it also loads, stores and waits. A launch of this probe does the problem's tensor
operations on random operands that stay in shared memory, on request with the problem's other arithmetic in four more
warps of each block.

A floor may be too low, never too high. So what a launch takes besides its operations is taken off: a launch of one
panel is timed too, and each further panel takes the difference over their number.
"""

import ctypes
import math
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..device import programs
from . import rates
from .context import Context

SOURCE = Path(__file__).with_name("tensor_probe.cu")
NAME = "tensor_ceiling"
ROW_BYTES, TILE = 128, 32  # as in the source: bytes of k in a panel, panels of a sum
MULTIPLIERS, OTHERS, CHAINS = 256, 128, 16  # threads, threads, sums of a thread
PRODUCT = 128 * 256  # rows of A x rows of B of a panel
WIDTHS = {"bf16": 2, "fp16": 2, "tf32": 4, "fp8": 1, "int8": 1}  # bytes of an operand
WGMMA = {
    "bf16": "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
    "fp16": "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16",
    "tf32": "wgmma.mma_async.sync.aligned.m64n256k8.f32.tf32.tf32",
    "fp8": "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3",
    "int8": "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8",
}
MMA_SYNC = {
    "bf16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "fp16": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "tf32": "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
    "fp8": "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
    "int8": "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
}
LEAST = {"fp8": (8, 9)}  # compute capability of mma.sync in a dtype; (8, 0) for the others
LEAST_PANELS = 17  # of a timed launch: 16 after the first, some 9 us on an H200, where medians scatter by less than 0.1
# |error| / |sum| on random operands that rounding explains: fp8 products are added with few bits. A wrong operand gives
# 1. The number of panels is checked on whole numbers (check_count).
TOLERANCE = {"fp8": 0.05, "int8": 0.0}
BURST_S = 0.05  # back to back, from a card at rest
# Of calls in a row: 100 us are some twenty launches of a host. Runs on H100s took 0.89 to 1.11 of what their clocks
# explain; one beside compilers took 2.5 times.
LONG_US, AT_MOST, ATTEMPTS = 100.0, 1.4, 3


class NotCovered(RuntimeError):
    """This card has no such tensor operations, or the probe does not know them."""


@dataclass(frozen=True)
class Variant:
    """How the source is compiled: for a target such as "sm_90a", with an instruction."""

    target: str
    instruction: str
    dtype: str
    other: bool

    def definitions(self) -> list[str]:
        flags = {
            "INSTRUCTION": f'"{self.instruction}"',
            "WGMMA": int(self.instruction.startswith("wgmma")),
            "INTEGER": int(self.dtype == "int8"),
            "TRANSPOSABLE": int(WIDTHS[self.dtype] == 2),
            "OTHER": int(self.other),
        }
        return [f"-D{name}={value}" for name, value in flags.items()]


@dataclass(frozen=True)
class Amount:
    """What a launch does. panels: of each block. flops: of all blocks. fmas, exps: of a thread with other
    arithmetic."""

    panels: int
    flops: int
    fmas: int = 0
    exps: int = 0


def variant(capability: tuple[int, int], dtype: str, other: bool) -> Variant:
    """The variant for a compute capability; NotCovered says why there is none."""
    if dtype not in WIDTHS:
        raise NotCovered(f"not supported: the probe of bare tensor operations has none in {dtype}")
    if capability == (9, 0):
        return Variant("sm_90a", WGMMA[dtype], dtype, other)
    if capability < LEAST.get(dtype, (8, 0)):
        raise NotCovered(f"not supported: compute capability {capability[0]}.{capability[1]} multiplies no {dtype}")
    if capability[0] in (10, 11):
        raise NotCovered("not supported: the probe has no tcgen05, and mma.sync is not the limit of this card")
    return Variant(f"sm_{capability[0]}{capability[1]}", MMA_SYNC[dtype], dtype, other)


def amount(flops: int, dtype: str, blocks: int, k_block: int = 0, fp32_fma: int = 0, exp2: int = 0) -> Amount:
    """`flops`, rounded up to whole panels of all blocks, so that all end together. Per element of the result and
    `k_block` values of k: so many fp32 multiply-adds and powers of two, rounded up to CHAINS a thread."""
    of_panel = 2 * PRODUCT * ROW_BYTES // WIDTHS[dtype]
    panels = max(1, math.ceil(flops / (of_panel * blocks)))
    done = panels * of_panel * blocks
    groups = done / 2 / k_block / (blocks * OTHERS) if k_block else 0
    fmas, exps = (math.ceil(each * groups / CHAINS) * CHAINS for each in (fp32_fma, exp2))
    return Amount(panels, done, fmas, exps)


def compiled(which: Variant) -> bytes:
    """The cubin of a variant, by nvcc, or else by the NVRTC that torch brings."""
    nvcc = programs.find("nvcc")
    return by_nvcc(nvcc, which) if nvcc else by_nvrtc(which)


def by_nvcc(nvcc: str, which: Variant) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "probe.cubin")
        code = f"-gencode=arch=compute_{which.target[3:]},code={which.target}"
        command = [nvcc, "-cubin", "-O3", "-std=c++17", code, *which.definitions(), "-o", str(made), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"nvcc failed on the probe: {(done.stderr or done.stdout)[:2000]}")
        return made.read_bytes()


def by_nvrtc(which: Variant) -> bytes:
    nvrtc = nvrtc_library()
    program = ctypes.c_void_p()
    options = [f"--gpu-architecture={which.target}", "-std=c++17", *which.definitions()]
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    name = SOURCE.name.encode()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCE.read_bytes(), name, 0, None, None):
        raise RuntimeError("NVRTC took no program")
    failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
    if failed:
        raise RuntimeError(f"NVRTC failed on the probe: {text_of(nvrtc, program, 'ProgramLog')[:2000].decode()}")
    return text_of(nvrtc, program, "CUBIN")


def text_of(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, part: str) -> bytes:
    """A result of NVRTC: "ProgramLog" or "CUBIN"."""
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{part}Size")(program, ctypes.byref(size))
    held = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{part}")(program, held)
    return held.raw


def nvrtc_library() -> ctypes.CDLL:
    """NVRTC of torch's own CUDA; NotCovered where neither it nor nvcc is there."""
    major = (torch.version.cuda or "13").split(".")[0]
    brought = Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/libnvrtc.so.{major}*")
    for name in (f"libnvrtc.so.{major}", *map(str, sorted(brought))):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise NotCovered("no compiler for the probe: neither nvcc nor torch's NVRTC is there")


class Kernel:
    """A loaded probe with its operands and results; calling it launches it on torch's current stream."""

    def __init__(self, cubin: bytes, work: Amount, dtype: str, device: str):
        self.blocks = torch.cuda.get_device_properties(0).multi_processor_count
        self.threads = MULTIPLIERS + (OTHERS if work.fmas or work.exps else 0)
        self.operands = operands(dtype, device)
        kind = torch.int32 if dtype == "int8" else torch.float32
        self.out = torch.full((self.blocks, MULTIPLIERS, 2), -1, dtype=kind, device=device)
        self._rest = torch.zeros(self.blocks, OTHERS, device=device)
        self._clocks = torch.zeros(2, dtype=torch.int64, device=device)
        tensors = (self.operands, self.out, self._rest, self._clocks)
        values = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        values += [ctypes.c_int(number) for number in (work.panels, work.fmas, work.exps)]
        self._values = values
        self._arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._driver = ctypes.CDLL("libcuda.so.1")  # after the tensors: torch has made its context current by then
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._done("cuModuleLoadData", ctypes.byref(self._module), cubin)
        self._done("cuModuleGetFunction", ctypes.byref(self._function), self._module, NAME.encode())

    def __call__(self) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        shape = [ctypes.c_uint(size) for size in (self.blocks, 1, 1, self.threads, 1, 1, self.operands.nbytes)]
        self._done("cuLaunchKernel", self._function, *shape, stream, self._arguments, None)

    def clock_mhz(self) -> float:
        """The SM clock of block 0 during the last launch."""
        cycles, nanoseconds = self._clocks.tolist()
        return 1000 * cycles / max(1, nanoseconds)

    def _done(self, name: str, *arguments) -> None:
        if code := getattr(self._driver, name)(*arguments):
            raise RuntimeError(f"CUDA error: {name} failed with {code}")


def operands(dtype: str, device: str) -> torch.Tensor:
    """The rows of A, then those of B, a row of ROW_BYTES each, drawn as rates.product draws the matrices of a library's
    product."""
    shape = (128 + 256, ROW_BYTES // WIDTHS[dtype])
    if dtype == "int8":
        return torch.randint(-128, 128, shape, device=device, dtype=torch.int8)
    drawn = torch.randn(shape, device=device)
    if dtype == "tf32":
        return (drawn.view(torch.int32) & ~0x1FFF).view(torch.float32)  # the bits that the tensor cores read
    return drawn.to({"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}[dtype])


def expected(rows: torch.Tensor, panels: int, wgmma: bool) -> torch.Tensor:
    """(MULTIPLIERS, 2) in float64: what `out` of each block has to be after so many panels."""
    of_a = 128 if wgmma else 256
    rows = rows.cpu().to(torch.float64)
    product = rows[:of_a] @ rows[of_a:].T
    last = (panels - 1) % TILE + 1  # panels of the last tile
    thread, i = torch.arange(MULTIPLIERS)[:, None], torch.arange(128)[None, :]
    lane, warp = thread % 32, thread // 32
    if wgmma:  # eight warps, 16 rows each
        row, column = 16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2
    else:  # 4 x 2 warps, 64 x 64 each, as products of 16 x 8
        tile = i // 4
        row = 64 * (warp // 2) + 16 * (tile // 8) + lane // 4 + 8 * (i % 4 // 2)
        column = 64 * (warp % 2) + 8 * (tile % 8) + 2 * (lane % 4) + i % 2
    own = product[row, column]
    return torch.stack([last * own.sum(1), panels * own[:, 0]], dim=1)


def whole_numbers(rows: torch.Tensor) -> torch.Tensor:
    """Operands drawn from -1, 0 and 1, of the shape and dtype of `rows`. No sum of a tile exceeds 4096 = TILE x 128
    values of k, which even the short accumulators of Hopper's fp8 products hold exactly."""
    return torch.randint(-1, 2, rows.shape, device=rows.device).to(rows.dtype)


def check_count(out: torch.Tensor, want: torch.Tensor, panels: int) -> None:
    """Compare sums of whole numbers, each thread's of each block. RuntimeError when one differs by more than a quarter
    of a panel: they are exact until a sum of many tiles outgrows fp32."""
    got = out.cpu().to(torch.float64)
    if not bool(((got - want).abs() <= want.abs() / (4 * panels)).all()):
        raise RuntimeError(f"the probe's own sums of whole numbers are wrong: it did not multiply {panels} panels")


def check(out: torch.Tensor, want: torch.Tensor, dtype: str) -> float:
    """|error| / |sum| of the worst block and value. RuntimeError when it is more than rounding explains: then the
    probe did other operations than it claims."""
    got = out.cpu().to(torch.float64)
    if dtype == "int8":  # sums wrap around
        want = (want + 2.0**31) % 2.0**32 - 2.0**31
    error = ((got - want).norm(dim=1) / want.norm(dim=0)).max().item()
    if not error <= TOLERANCE.get(dtype, 2e-3):
        raise RuntimeError(f"the probe's own sums are wrong: relative error {error:.3g} in {dtype}")
    return error


def tensor_ceiling(
    context: Context,
    dtype: str,
    flops: int,
    rep_ms: int,
    pause_s: float,
    sustained_s: float,
    other: dict | None = None,
) -> dict:
    """Time `flops` of bare tensor operations, LEAST_PANELS at least. other: {k_block, fp32_fma, exp2}, see `amount`.

    cold: {median, p20, p80, n} in us, as kernels are timed here. burst: back to back for BURST_S from rest. sustained:
    back to back for sustained_s, its second half. Each has its window, the SM clock inside the kernel, and start_up_us,
    the part of these times that is not the operations'.
    """
    which = variant(torch.cuda.get_device_capability(0), dtype, bool(other))
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    first = amount(1, dtype, blocks, **(other or {}))
    work = amount(max(flops, LEAST_PANELS * first.flops), dtype, blocks, **(other or {}))
    cubin = compiled(which)
    call, start = (Kernel(cubin, each, dtype, context.device) for each in (work, first))
    error = checked(call, work.panels, which)
    return {
        "dtype": dtype,
        "instruction": which.instruction,
        "flops": flops,
        "done_flops": work.flops,
        "blocks": blocks,
        "panels": work.panels,
        "other": other and {**other, "fmas_per_thread": work.fmas, "exp2_per_thread": work.exps},
        "relative_error": error,
        **timed(call, start, work.panels, rep_ms, pause_s, sustained_s),
    }


def checked(call: Kernel, panels: int, which: Variant) -> float:
    """Check the sums on whole numbers, then on the random operands, which stay; `check`'s error of these."""
    wgmma, drawn = which.instruction.startswith("wgmma"), call.operands.clone()
    call.operands.copy_(whole_numbers(drawn))
    call()
    check_count(call.out, expected(call.operands, panels, wgmma), panels)
    call.operands.copy_(drawn)
    call()
    return check(call.out, expected(call.operands, panels, wgmma), which.dtype)


def start_up_us(all_us: float, first_us: float, panels: int) -> float:
    """What a launch of `panels` panels takes besides them, by that of one panel: the launch, the loads, the results. 0
    where one panel takes no longer than each of them."""
    each_us = (all_us - first_us) / (panels - 1)
    if each_us <= 0:
        raise RuntimeError(
            f"{panels} panels took {all_us:.2f} us, one {first_us:.2f} us: the probe timed no operations"
        )
    return max(0.0, first_us - each_us)


def timed(call: Kernel, start: Kernel, panels: int, rep_ms: int, pause_s: float, sustained_s: float) -> dict:
    """{cold, burst, sustained} of tensor_ceiling. start: a launch of one panel.

    Back to back a short launch may wait for the host, so a burst's start-up is at most a cold call's. Nothing is taken
    off sustained times: without the pauses between launches the card would be hotter.
    """

    def part(measure) -> dict:
        start = time.time()
        times = measure()
        torch.cuda.synchronize()
        return {**times, "window": [start, time.time()], "kernel_clock_mhz": call.clock_mhz()}

    first_us = microseconds(start, rep_ms)["median"], 1e6 / rates.back_to_back(start, BURST_S)
    time.sleep(pause_s)
    cold = part(lambda: microseconds(call, rep_ms))
    time.sleep(pause_s)
    burst = without_gaps(cold, lambda: part(lambda: {"median": 1e6 / rates.back_to_back(call, BURST_S)}))
    rates.back_to_back(call, sustained_s / 2)
    sustained = without_gaps(cold, lambda: part(lambda: {"median": 1e6 / rates.back_to_back(call, sustained_s / 2)}))
    cold["start_up_us"] = start_up_us(cold["median"], first_us[0], panels)
    burst["start_up_us"] = start_up_us(burst["median"], min(first_us), panels)
    return {"cold": cold, "burst": burst, "sustained": {**sustained, "start_up_us": 0.0}}


def without_gaps(cold: dict, measure: Callable[[], dict]) -> dict:
    """A part of calls in a row, measured again where the GPU waited for the processor between them. RuntimeError where
    it waits each time."""
    for _ in range(ATTEMPTS):
        part = measure()
        if not has_gaps(cold, part):
            return part
    raise RuntimeError(
        f"calls in a row took {part['median']:.0f} us each at {part['kernel_clock_mhz']:.0f} MHz, cold ones "
        f"{cold['median']:.0f} us at {cold['kernel_clock_mhz']:.0f} MHz: the GPU waited for the processor between "
        "them; end what else runs on this machine, and measure again"
    )


def has_gaps(cold: dict, part: dict) -> bool:
    """Do calls in a row take much longer than the clock inside the kernel explains? Only of launches that a host is
    always ahead of."""
    at_that_clock_us = cold["median"] * cold["kernel_clock_mhz"] / part["kernel_clock_mhz"]
    return cold["median"] >= LONG_US and part["median"] > AT_MOST * at_that_clock_us


def microseconds(call: Kernel, rep_ms: int) -> dict:
    """{median, p20, p80, n} in us, with a cold L2."""
    per_s = rates.rates(call, 1.0, rep_ms)  # calls a second; the fifth of the slowest comes first
    return {"median": 1e6 / per_s.median, "p20": 1e6 / per_s.p80, "p80": 1e6 / per_s.p20, "n": per_s.n}
