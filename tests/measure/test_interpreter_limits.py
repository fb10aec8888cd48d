"""What Triton's CPU interpreter cannot run is its limit, and not the kernel's fault."""

import importlib.metadata
from types import SimpleNamespace

import numpy
import pytest
from kernelopt.worker.interpreter import whole_number
from written_tasks import judge, written

TRITON = tuple(map(int, importlib.metadata.version("triton").split(".")[:2]))
TASK = """
class Model(nn.Module):
    def forward(self, x): return torch.tanh(x)
def get_inputs(): return [torch.randn(64)]
"""
KERNEL = """
import triton
import triton.language as tl
from triton.language.extra import libdevice
exp = tl.exp
@triton.jit
def kernel(x, y, s):
    at = tl.arange(0, 64)
    v = tl.load(x + at)
    tl.store(y + at, BODY)
def kernel_function(x):
    y = torch.empty_like(x)
    kernel[GRID](x, y, 2.0)
    return y
"""
BY_EXP = "1 - 2 / (1 + tl.exp(2 * v))"
ASM = 'tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1)'
LIMITS = {  # body, grid -> what the message says
    "inline PTX": (ASM, "(1,)", "runs no inline PTX"),
    "libdevice": ("libdevice.tanh(v)", "(1,)", "has no libdevice"),
    "arithmetic on libdevice's result": ("libdevice.tanh(v) * 1", "(1,)", "has no libdevice"),
    "another name of a function": ("1 - 2 / (1 + exp(2 * v))", "(1,)", "by that name alone"),
    "a scalar's method": ("1 - 2 / (1 + tl.exp(s.to(tl.float32) * v))", "(1,)", "plain Python numbers"),
    "a mask of whole numbers": (
        f"{BY_EXP} + tl.load(x + at, mask=at // 64, other=0.0)",
        "(1,)",
        "takes masks of bool alone",
    ),
    "atomics in bf16": (
        f"{BY_EXP} + tl.atomic_add(x.to(tl.pointer_type(tl.bfloat16)) + at, v.to(tl.bfloat16))",
        "(1,)",
        "no atomic",
    ),
    "a grid as a list": (BY_EXP, "[1]", "takes a grid as a tuple"),
    "a stream of a GPU": (BY_EXP, "(torch.cuda.Stream().priority + 1,)", "has no GPU"),
    "the current stream": (BY_EXP, "(torch.cuda.current_stream().priority + 1,)", "has no GPU"),
    "the GPU's properties": (BY_EXP, "(triton.runtime.driver.active.utils.count,)", "has no GPU to ask"),
}
SINCE = {  # a limit -> the first Triton that has it, what an older one does
    "a mask of whole numbers": ((3, 9), "its interpreter takes such masks"),
    "atomics in bf16": ((3, 4), "it has no such atomics on a GPU either"),
}


def made(body: str, grid: str = "(1,)") -> str:
    return KERNEL.replace("BODY", body).replace("GRID", grid)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_of_the_interpreter_is_named(interpreter, tmp_path, limit):
    first, older = SINCE.get(limit, ((), ""))
    if first > TRITON:
        pytest.skip(f"Triton {importlib.metadata.version('triton')}: {older}")
    body, grid, said = LIMITS[limit]
    found = judge(interpreter, tmp_path, TASK, made(body, grid), only_these_shapes=True)
    assert found["status"] == "NOT_INTERPRETABLE" and said in found["summary"], found["summary"]
    assert "no fault of the kernel" in found["summary"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("1 - 2 / (1 + tl.exp(2 * v))", "OK"),
        ("1 - 2 / (1 + tl.exp(2 * u))", "RUNTIME_ERROR"),
        ("v + tl.arange(0, 32)", "RUNTIME_ERROR"),
        ("tl.expp(v)", "RUNTIME_ERROR"),
        ("None", "RUNTIME_ERROR"),
    ],
)
def test_a_fault_of_the_kernel_stays_one(interpreter, tmp_path, body, status):
    found = judge(interpreter, tmp_path, TASK, made(body), only_these_shapes=True)
    assert found["status"] == status, found["summary"]


ROUNDED = """
class Model(nn.Module):
    def forward(self, x): return x.to(DTYPE)
def get_inputs(): return [torch.cat([torch.randn(64) * scale for scale in (100, 1, 2**-6, 2**-9)])]
"""


@pytest.mark.parametrize("dtype", ["torch.float8_e4m3fn", "torch.float8_e5m2", "torch.bfloat16"])
def test_numbers_are_rounded_as_a_gpu_does(interpreter, tmp_path, dtype):
    kernel = KERNEL.replace("0, 64", "0, 256").replace("BODY", "v.to(y.dtype.element_ty)").replace("GRID", "(1,)")
    kernel = kernel.replace("torch.empty_like(x)", f"torch.empty(256, dtype={dtype})")
    reference = ROUNDED.replace("DTYPE", dtype)
    found = judge(interpreter, tmp_path, reference, kernel, only_these_shapes=True)
    assert found["status"] == "OK" and found["worst_rel_err"] == 0, found["summary"]


@pytest.mark.parametrize(
    "write",
    [
        "tl.store(y, 9.0, mask=tl.program_id(0) > 0)",
        "tl.store(y + tl.arange(0, 1), 9.0, mask=tl.arange(0, 1) > 0)",
        "tl.atomic_add(y + tl.arange(0, 1), 9.0, mask=tl.arange(0, 1) > 0)",
    ],
)
def test_a_mask_of_one_element_keeps_a_kernel_from_writing(interpreter, tmp_path, write):
    kernel = made(BY_EXP).replace("\ndef kernel_function", f"\n    {write}\ndef kernel_function")
    found = judge(interpreter, tmp_path, TASK, kernel, only_these_shapes=True)
    assert found["status"] == "OK", found["summary"]


def test_a_loop_ends_at_a_loaded_number(interpreter, tmp_path):
    """NumPy 2.4 makes no number of an array of one element, and Triton's interpreter asked for that until 3.7."""
    task = TASK.replace("torch.tanh(x)", "x * 3")
    loop = "    for i in range(0, tl.load(y).to(tl.int32) * 0 + 2):\n        v += tl.load(x + at)\n"
    kernel = made("v").replace("    tl.store", f"    tl.store(y, 1.0)\n{loop}    tl.store")
    found = judge(interpreter, tmp_path, task, kernel, only_these_shapes=True)
    assert found["status"] == "OK", found["summary"]
    assert whole_number(SimpleNamespace(handle=SimpleNamespace(data=numpy.array([3])))) == 3


def test_cuda_cpp_is_said_to_need_a_gpu_and_no_toolkit(interpreter, tmp_path):
    """The message is torch 2.11's, of load_inline without a toolkit."""
    message = "CUDA_HOME environment variable is not set. Please set it to your CUDA install root."
    kernel = f"def kernel_function(x): raise OSError({message!r})\n"
    found = judge(interpreter, tmp_path, TASK, kernel, only_these_shapes=True)
    assert found["status"] == "NOT_INTERPRETABLE" and "CUDA_HOME" not in found["summary"], found["summary"]
    assert "CUDA C++ cannot run on the CPU: compile_kernel.py compiles it" in found["summary"]


def test_a_reference_that_needs_a_gpu_fails_itself(interpreter, tmp_path):
    found = judge(
        interpreter, tmp_path, TASK.replace("tanh(x)", "tanh(x + torch.cuda.current_stream().priority)"), made(BY_EXP)
    )
    assert found["status"] == "INVALID_REFERENCE", found["summary"]


def test_the_exit_code_says_that_something_is_missing(run_here, tmp_path):
    kernel, reference = written(tmp_path, TASK, made("libdevice.tanh(v)"))
    asked = "--kernel", kernel, "--reference", reference, "--device", "cpu-interpreter", "--quick"
    assert run_here("verify_kernel.py", *asked).returncode == 3
