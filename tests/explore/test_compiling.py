"""Compiling for a card that is not here: Triton and CUDA C++, in an exploration and by verify_kernel --compile-only."""

from types import SimpleNamespace

import pytest
from conftest import tool_json
from kernelopt.device import programs
from kernelopt.errors import Refused
from kernelopt.explore import compiled, compiling, resources
from kernelopt.explore.compiled import Card, Compiled, CompiledKernel
from kernelopt.hardware import wiki
from kernelopt.statuses import Status
from kernelopt.worker import compiling as worker
from kernelopt.worker import faults

REFERENCE = """
import torch
class Model(torch.nn.Module):
    def forward(self, x): return 2 * x
def get_inputs(): return [torch.randn(8, 64)]
"""
KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def helper(x):
    return {factor} * x


@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, helper(tl.load(x + at, at < n)), at < n)


def kernel_function(x):
    {first}
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    double[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), 128)
    return out
"""
ASKS = """
    assert x.is_cuda and x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) == (9, 0)
    assert torch.cuda.get_device_properties(0).multi_processor_count == 132
    assert torch.zeros(4, device="cuda").to(x.device).cuda().is_cuda
"""
CUDA_KERNEL = """
from torch.utils.cpp_extension import load
extension = load("k", [__file__.replace(".py", ".cu")], extra_cuda_cflags=["-O3", "-gencode", "arch=compute_80,code=sm_80"])


def kernel_function(x):
    return extension.double_it(x)
"""
CUDA = """
namespace my {{
__global__ void double_it(float* x) {{
  __shared__ float tile[128];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = {factor} * tile[127 - threadIdx.x];
}}
}}
"""
needs_nvcc = pytest.mark.skipif(programs.find("nvcc") is None, reason="needs nvcc")


def source(factor: str = "2.0", first: str = "pass") -> str:
    return KERNEL.format(factor=factor, first=first.strip())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "reference.py").write_text(REFERENCE)
    (tmp_path / "c").mkdir()
    return tmp_path


@pytest.fixture(scope="module")
def h100() -> Card:
    return Card.of(wiki.product("h100-sxm"))


@pytest.fixture(scope="module")
def compiling_server(interpreter):
    server = compiling.start_server(interpreter)
    yield SimpleNamespace(split=server.split, end=lambda: None)
    server.end()


@pytest.fixture
def compile_here(run_here, compiling_server, monkeypatch):
    """`run_here`, where compilations share a server; the test of an exploration starts its own."""
    monkeypatch.setattr(compiling, "start_server", lambda _: compiling_server)
    return run_here


def compile_only(folder, run_here, *options, code=0) -> dict:
    subject = ("--compile-only", "--kernel", folder / "c/k.py", "--reference", folder / "reference.py")
    return tool_json("verify_kernel.py", *subject, *options, run=run_here, code=code)


# --- cards -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "target"), [("h100-sxm", "sm_90a"), ("rtx-4090", "sm_89"), ("b200", "sm_100a")])
def test_code_is_for_the_card_alone_where_it_has_instructions_of_its_own(name, target):
    card = Card.of(wiki.product(name))
    assert card.target == target and card.to_json()["label"] == f"compiled for {target}, not run"


def test_a_card_of_amd_is_refused():
    with pytest.raises(Refused, match="nothing can be compiled for MI300X here"):
        Card.of(wiki.product("mi300x"))


def test_what_the_driver_reserves_is_no_shared_memory_of_a_kernel(h100):
    """cuobjdump of CUDA 13.0 gives 1536 on sm_90a and 512 on sm_80 for a tile of 512 bytes, and 0 without one."""
    ada = Card.of(wiki.product("rtx-4090"))
    assert [h100.static_shared(size) for size in (0, 1536)] == [0, 512] and ada.static_shared(512) == 512


def test_a_row_shows_the_kernel_with_the_most_registers_and_the_most_spills(h100):
    kernels = (CompiledKernel("small", 20, 64, 0, 100.0), CompiledKernel("large", 168, 8, 4096, 25.0))
    shown = Compiled(h100, Status.OK, None, kernels).resources()
    assert shown == resources.Resources("large", 168, 64, 4096, 25.0)
    assert Compiled(h100, Status.OK, None).resources() == resources.Resources()


@pytest.mark.parametrize(
    ("mangled", "name"),
    [("_ZN2my9double_itEPf", "double_it"), ("_Z5scalePKfPfi", "scale"), ("plain", "plain"), ("_Z4sortIfEvPT_", "sort")],
)
def test_a_mangled_name_is_shown_as_the_function_is_called(mangled, name):
    assert resources.plain_name(mangled) == name


@pytest.mark.parametrize(
    ("answer", "status", "error"),
    [
        ({"status": "OK", "cuda": ["k.cubin"]}, "NO_GPU", "CUDA C++ runs on a GPU alone: it was not checked; compiled for sm_90a, not run"),
        ({"status": "OK", "lacking": worker.NO_NVCC}, "NO_GPU", f"CUDA C++ runs on a GPU alone: it was not checked; {worker.NO_NVCC}"),
        ({"status": "RUNTIME_ERROR", "message": "stopped"}, "OK", None),
        ({"status": "COMPILE_ERROR", "message": "k.cu(3): error: no foo"}, "COMPILE_ERROR", "k.cu(3): error: no foo"),
    ],
)  # fmt: skip
def test_the_status_of_a_candidate_that_was_checked_and_compiled(h100, tmp_path, answer, status, error):
    given = {"kernels": [], "cuda": [], "lacking": None, "message": "", **answer}
    result = compiling.of_answer(h100, given, tmp_path)
    assert compiled.status_after(Status.OK, None, result) == (status, error)


def test_an_error_of_the_check_stands_below_the_compilers(h100):
    refused = Compiled(h100, Status.COMPILE_ERROR, "k.cu(3): error: no foo")
    status, error = compiled.status_after(Status.WRONG_VALUES, "far off", refused)
    assert status == "COMPILE_ERROR"
    assert error == "k.cu(3): error: no foo\nchecked in the CPU interpreter: WRONG_VALUES: far off"


# --- Triton ----------------------------------------------------------------------------------------------------


def test_a_triton_kernel_is_compiled_for_a_card_that_is_not_here(folder, compile_here):
    (folder / "c/k.py").write_text(source(first=ASKS))
    result = compile_only(folder, compile_here, "--card", "h100-sxm")
    assert result["label"] == "compiled for sm_90a, not run" and result["status"] == "OK"
    (kernel,) = result["kernels"]
    assert kernel["name"] == "double" and 0 < kernel["registers"] < 64
    assert kernel["spill_bytes"] == 0 and kernel["occupancy_pct"] == 100.0


def test_tritons_message_is_told_from_the_function_that_is_wrong(folder, compile_here):
    (folder / "c/k.py").write_text(source(factor="undefined"))
    result = compile_only(folder, compile_here, "--card", "h100-sxm", code=1)
    assert result["status"] == "COMPILE_ERROR" and result["kernels"] == []
    assert "return undefined * x" in result["error"] and "undefined is not defined" in result["error"]


def test_an_exploration_without_a_gpu_checks_and_compiles(folder, run_here):
    texts = {"right": source(), "wrong": source(factor="3.0"), "broken": source(factor="undefined")}
    for name, text in texts.items():
        (folder / "c" / f"{name}.py").write_text(text)
    options = ("--reference", folder / "reference.py", "--device", "cpu-interpreter", "--card", "h100-sxm")
    result = tool_json("explore_kernels.py", folder / "c", *options, "--budget-seconds", 60, run=run_here)
    assert result["compiled"]["label"] == "compiled for sm_90a, not run"
    rows = {row["name"]: row for row in result["rows"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "eager": "OK",
        "right": "OK",
        "wrong": "WRONG_VALUES",
        "broken": "COMPILE_ERROR",
    }
    for name in ("right", "wrong"):
        row = rows[name]
        assert row["registers"] > 0 and row["spill_bytes"] == 0 and row["latency_us"] is None
        assert row["compiled"]["target"] == "sm_90a" and row["compiled"]["kernels"][0]["name"] == "double"
    assert "return undefined * x" in rows["broken"]["error"]
    assert rows["eager"]["compiled"] is None


def test_a_block_with_more_shared_memory_than_the_card_has_is_a_launch_error(tmp_path, h100, monkeypatch):
    """A stand-in for Triton's compiled kernel; one of this size takes its compiler minutes."""
    about = SimpleNamespace(name="large", shared=524288, num_warps=4)
    kernel = SimpleNamespace(hash="a", metadata=about, asm={"cubin": b"code"})
    triton = worker.TritonKernels(h100.for_worker(), tmp_path)
    with pytest.raises(Exception) as caught:
        triton.in_place_of(lambda *_, **__: kernel)(None, grid=(1,))
    told = faults.describe(caught.value)
    assert told["status"] == "LAUNCH_ERROR" and "524288" in told["message"] and "232448" in told["message"]
    answer = {
        "status": told["status"],
        "message": told["message"],
        "kernels": triton.kernels,
        "cuda": [],
        "lacking": None,
    }
    monkeypatch.setattr(resources, "usage", lambda file: [resources.Usage("large", 255, 16, 1024)])
    result = compiling.of_answer(h100, answer, tmp_path)
    assert result.refused and result.kernels == (CompiledKernel("large", 255, 16, 524288, None),)


# --- CUDA C++ --------------------------------------------------------------------------------------------------


@needs_nvcc
def test_cuda_is_compiled_for_the_card_whatever_its_flags_say(folder, compile_here):
    (folder / "c/k.py").write_text(CUDA_KERNEL)
    (folder / "c/k.cu").write_text(CUDA.format(factor=2))
    result = compile_only(folder, compile_here, "--card", "h100-sxm")
    assert result["kernels"][0] | {"registers": 0} == {
        "name": "double_it",
        "registers": 0,
        "spill_bytes": 0,
        "shared_bytes": 512,
        "occupancy_pct": None,
    }


@needs_nvcc
def test_nvccs_errors_are_told_with_file_and_line(folder, compile_here):
    (folder / "c/k.py").write_text(CUDA_KERNEL)
    (folder / "c/k.cu").write_text(CUDA.format(factor="undefined"))
    result = compile_only(folder, compile_here, "--card", "h100-sxm", code=1)
    first = result["error"].splitlines()[0]
    assert result["status"] == "COMPILE_ERROR" and first.endswith('k.cu(7): error: identifier "undefined" is undefined')
    assert "nvcc -" not in result["error"]


def test_without_nvcc_it_says_so(tmp_path, h100):
    extensions = worker.Extensions(h100.for_worker(), None, tmp_path)
    with pytest.raises(worker.Stop, match="nvcc is not here"):
        extensions._compile(lambda **given: None, {"name": "k", "sources": ["k.cu"]})
    assert extensions.lacking == worker.NO_NVCC and extensions.files == []


def test_a_torch_with_cuda_builds_the_extension_itself(tmp_path, h100, monkeypatch):
    """A stand-in for torch's builder, which leaves a shared library."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    built = tmp_path / "extensions/k"
    built.mkdir(parents=True)
    extensions = worker.Extensions(h100.for_worker(), "nvcc", tmp_path)
    given = {"name": "k", "sources": ["k.cu", "main.cpp"], "build_directory": str(built)}
    extension = extensions._compile(lambda **_: (built / "k.so").touch(), given)
    assert extensions.files == ["extensions/k/k.so"]
    with pytest.raises(worker.Stop, match=r"k\.run was called"):
        extension.run(1)


def test_flags_that_choose_a_card_are_left_out():
    flags = ["-O3", "-gencode", "arch=compute_80,code=sm_80", "-gencode=arch=compute_90a,code=sm_90a", "-arch=sm_75"]
    assert worker.without_card([*flags, "--use_fast_math"]) == ["-O3", "--use_fast_math"]


# --- wrong calls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--compile-only", "--device", "cpu-interpreter"), 2, "pass --card NAME"),
        (("--compile-only", "--card", "mi300x"), 1, "nothing can be compiled for MI300X"),
        (("--compile-only", "--card", "h100"), 1, "did you mean"),
        (("--card", "h100-sxm"), 2, "--card goes with --compile-only"),
    ],
)
def test_a_compilation_for_no_card_is_refused_with_a_sentence(folder, run_here, options, code, message):
    (folder / "c/k.py").write_text(source())
    done = run_here("verify_kernel.py", "--kernel", folder / "c/k.py", "--reference", folder / "reference.py", *options)
    assert done.returncode == code and message in done.stderr


def test_a_kernel_that_launches_nothing_is_not_called_compiled(folder, compile_here):
    (folder / "c/k.py").write_text("def kernel_function(x):\n    return 2 * x\n")
    result = compile_only(folder, compile_here, "--card", "h100-sxm", code=1)
    assert "nothing was compiled" in result["error"]
