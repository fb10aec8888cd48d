"""tools/compile_kernel.py: several targets at a time, none of which is here, against cuobjdump and AMD's metadata."""

import importlib.metadata
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import BUNDLE, tool_json
from kernelopt.compiling import choosing, compiler
from kernelopt.device import gpu, programs, standing
from kernelopt.errors import EnvironmentLacks, UsageError

TRITON = tuple(map(int, importlib.metadata.version("triton").split(".")[:2]))
needs_linker = pytest.mark.skipif(TRITON < (3, 6), reason="an older Triton takes ROCm's linker for AMD")
REFERENCE = """
import torch
class Model(torch.nn.Module):
    def forward(self, a, b): return a @ b
def get_inputs(): return [torch.randn(64, 64, dtype=torch.float16), torch.randn(64, 64, dtype=torch.float16)]
"""
PRODUCT = """
import torch
import triton
import triton.language as tl


@triton.autotune([triton.Config({"BM": rows}, num_warps=warps) for rows, warps in ((16, 1), (32, 2))], key=[])
@triton.jit
def product(a, b, c, n, BM: tl.constexpr):
    m, k = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, 64)
    left, right = tl.load(a + m[:, None] * 64 + k[None, :]), tl.load(b + k[:, None] * 64 + k[None, :])
    tl.store(c + m[:, None] * 64 + k[None, :], tl.dot(left, right))


@triton.jit
def double(c, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(c + at, 2.0 * tl.load(c + at))


def kernel_function(a, b):
    c = torch.empty(64, 64, dtype=torch.float32, device=a.device)
    product[lambda meta: (64 // meta["BM"],)](a, b, c, 64)
    double[(torch.cuda.get_device_properties(0).multi_processor_count,)](c, 4096, 1024)
    return c
"""
NOT_EVERYWHERE = """
import torch
import triton
import triton.language as tl


@triton.jit
def narrow(x, y, n):
    at = tl.arange(0, 128)
    v = tl.load(x + at).to(tl.float8e4nv).to(tl.float32)
    w = tl.inline_asm_elementwise("ex2.approx.f32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(y + at, w)


@triton.jit
def after(x):
    tl.store(x + tl.arange(0, 128), 1.0)


def kernel_function(a, b):
    c = torch.empty(128, dtype=torch.float32, device=a.device)
    narrow[(1,)](a.float(), c, 128)
    after[(1,)](c)
    return c
"""
CUDA = """
from torch.utils.cpp_extension import load
extension = load("k", [__file__.replace(".py", ".cu")])


def kernel_function(a, b):
    return extension.double_it(a)
"""

FP8_REFERENCE = """
import torch
class Model(torch.nn.Module):
    def forward(self, x, weight, scale_x, scale_w): return (x.float() @ weight.float().t() * scale_x * scale_w).bfloat16()
def get_inputs(): return [torch.ones(16, 64).to(torch.float8_e4m3fn), torch.ones(16, 64).to(torch.float8_e4m3fn), torch.ones(()), torch.ones(())]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("compile")
    texts = {"reference": REFERENCE, "product": PRODUCT, "narrow": NOT_EVERYWHERE, "cuda": CUDA}
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "cuda.cu").write_text("__global__ void double_it(float* x) { x[threadIdx.x] *= 2; }\n")
    return folder


def compiled(folder: Path, run, kernel: str, *options, code: int = 0) -> dict:
    subject = ("--kernel", folder / f"{kernel}.py", "--reference", folder / "reference.py")
    return tool_json("compile_kernel.py", *subject, *options, run=run, code=code)


def of_target(answer: dict, arch: str) -> dict:
    return next(one for one in answer["targets"] if one["target"] == arch)


@needs_linker
def test_registers_spills_and_instructions_are_those_of_the_code(folder, compile_here):
    answer = compiled(folder, compile_here, "product", "--for", "sm_80,mi300x", "--emit", folder / "asm")
    ampere, cdna = of_target(answer, "sm_80"), of_target(answer, "gfx942")
    assert ampere["label"] == "compiled for sm_80 here, not run" and cdna["card"] == "MI300X"
    assert "the kernel asks for the number of SMs; it was told" in ampere["assumed"] and cdna["assumed"] is None
    for one in (ampere, cdna):
        names = [(kernel["name"], kernel["configuration"] is None) for kernel in one["kernels"]]
        assert names == [("product", False), ("product", False), ("double", True)] and one["status"] == "OK"
        assert {kernel["configuration"] for kernel in one["kernels"][:2]} == {
            "BM=16 num_warps=1 num_stages=3",
            "BM=32 num_warps=2 num_stages=3",
        }
    for kernel in ampere["kernels"]:
        assert kernel["spill_bytes"] == kernel["stack_bytes"] == 0 and kernel["occupancy_pct"] > 0
    assert ampere["kernels"][2]["access_bits"] == {"global load": {"128": 2}, "global store": {"128": 2}}
    assert {opcode.split(".")[0] for opcode in ampere["kernels"][0]["tensor_instructions"]} == {"HMMA"}
    assert [kernel["dot_types"] for kernel in ampere["kernels"]] == [["f16"], ["f16"], []]
    assert all(opcode.startswith("v_mfma_") for opcode in cdna["kernels"][0]["tensor_instructions"])
    written = {str(Path(path).relative_to(folder / "asm")) for path in answer["written"]}
    assert {"sm_80/product.cubin", "sm_80/product-1.ptx", "gfx942/double.amdgcn", "gfx942/double.hsaco"} <= written
    for number, stem in enumerate(("product", "product-1", "double")):
        assert ampere["kernels"][number]["registers"] == registers_by_cuobjdump(folder / f"asm/sm_80/{stem}.cubin")
        of_metadata = metadata(folder / f"asm/gfx942/{stem}.amdgcn")
        kernel = cdna["kernels"][number]
        assert kernel["registers"] == of_metadata["vgpr_count"] and kernel["spill_bytes"] == 0
        assert kernel["scalar_registers"] == of_metadata["sgpr_count"]
        assert kernel["stack_bytes"] == of_metadata["private_segment_fixed_size"]


def registers_by_cuobjdump(cubin: Path) -> int:
    done = subprocess.run([programs.find("cuobjdump"), "-res-usage", cubin], capture_output=True, text=True)
    return int(re.search(r"REG:(\d+)", done.stdout + done.stderr)[1])


def metadata(listing: Path) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"^ +\.(\w+): +(\d+)$", listing.read_text(), re.MULTILINE)}


@needs_linker
def test_a_product_in_bf16_is_told_from_one_in_fp8_by_its_instructions(tmp_path, compile_here):
    kernel = (BUNDLE / "benchmarks/hard_deck/fp8_product/v0.py").read_text()
    kernel = kernel.replace("BM=128, BN=128, BK=128, num_warps=8", "BM=64, BN=16, BK=32, num_warps=4")
    widened = kernel.replace("tl.dot(a, b, acc)", "tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)")
    for name, text in {"reference": FP8_REFERENCE, "fp8": kernel, "bf16": widened}.items():
        (tmp_path / f"{name}.py").write_text(text)
    used = {}
    for name in ("fp8", "bf16"):
        (one,) = compiled(tmp_path, compile_here, name, "--for", "sm_90")["targets"]
        used[name] = {opcode.split(".")[0] for opcode in one["kernels"][0]["tensor_instructions"]}
    assert used == {"fp8": {"QGMMA"}, "bf16": {"HGMMA"}}


def test_a_task_may_name_the_gpu_and_a_generator_of_its_own(tmp_path, compile_here):
    drawn = 'torch.randn(64, 64, dtype=torch.float16, device="cuda", generator=torch.Generator("cuda"))'
    reference = REFERENCE.replace("torch.randn(64, 64, dtype=torch.float16)", drawn)
    (tmp_path / "reference.py").write_text(reference)
    (tmp_path / "narrow.py").write_text(NOT_EVERYWHERE.replace("device=a.device", 'device="cuda"'))
    (one,) = compiled(tmp_path, compile_here, "narrow", "--for", "sm_89")["targets"]
    assert [kernel["name"] for kernel in one["kernels"]] == ["narrow", "after"]


@needs_linker
def test_what_a_target_refuses_is_said_of_it_alone(folder, compile_here):
    answer = compiled(folder, compile_here, "narrow", "--for", "sm_86,sm_89,gfx942", code=1)
    ampere, ada, cdna = (of_target(answer, arch) for arch in ("sm_86", "sm_89", "gfx942"))
    assert ampere["status"] == cdna["status"] == "COMPILE_ERROR"
    assert [[kernel["name"] for kernel in one["kernels"]] for one in (ampere, cdna)] == [["after"], ["after"]]
    assert "type fp8e4nv not supported in this architecture" in ampere["error"]
    assert "could not allocate output register for constraint 'f'" in cdna["error"]  # it only prints this
    assert "PTX is for NVIDIA's GPUs alone" in cdna["error"]
    assert ada["status"] == "OK" and [kernel["name"] for kernel in ada["kernels"]] == ["narrow", "after"]


@pytest.mark.skipif(programs.find("nvcc") is None, reason="needs nvcc")
def test_cuda_is_compiled_for_what_nvcc_knows_and_hipcc_is_named_where_it_is_missing(folder, compile_here, monkeypatch):
    find = programs.find
    monkeypatch.setattr(programs, "find", lambda name: None if name == "hipcc" else find(name))
    answer = compiled(folder, compile_here, "cuda", "--for", "sm_80,sm_70,gfx942", code=1)
    assert of_target(answer, "sm_80")["kernels"][0]["name"] == "double_it"
    refused = "Unsupported gpu architecture '(sm|compute)_70'"  # torch with CUDA names the latter
    assert re.search(refused, of_target(answer, "sm_70")["error"])
    assert of_target(answer, "gfx942")["lacking"].startswith("hipcc is not here: install ROCm")


@pytest.mark.parametrize(
    ("targets", "code", "said"),
    [("sm_90,nothing", 1, "'nothing' is not in the wiki"), (",", 2, "--for names no target")],
)
def test_a_wrong_target_is_refused_with_a_sentence(folder, compile_here, targets, code, said):
    subject = ("--kernel", folder / "product.py", "--reference", folder / "reference.py")
    done = compile_here("compile_kernel.py", *subject, "--for", targets)
    assert done.returncode == code and said in done.stderr


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_compiled(folder, compile_here):
    subject = ("--kernel", folder / "product.py", "--reference", folder / "reference.py", "--for", "sm_90")
    done = compile_here("compile_kernel.py", *subject, "--emit", folder / "product.py/asm")
    assert done.returncode == 3 and "product.py/asm" in done.stderr and "compiling" not in done.stderr


def test_the_default_target_is_the_workspaces_platform_or_the_gpu_that_is_here(session, monkeypatch):
    def no_gpu():
        raise EnvironmentLacks("no NVIDIA GPU here")

    monkeypatch.setattr(gpu, "identify", no_gpu)
    platform = session.task().platform
    assert choosing.default(session, False, "--for").name == platform
    with pytest.raises(EnvironmentLacks, match="no NVIDIA GPU here; --for NAME compiles for a GPU that is not here"):
        choosing.default(None, True, "--for")
    monkeypatch.setattr(gpu, "identify", lambda: SimpleNamespace(name="NVIDIA L4"))
    assert choosing.default(None, True, "--for").arch == "sm_89"
    with pytest.raises(UsageError, match="pass --card NAME"):
        choosing.default(None, False, "--card")


@pytest.mark.parametrize(
    ("log", "message"),
    [("", "died of SIGABRT, and said nothing; does it know this architecture?"), ("bad\n", "died of SIGABRT\nbad")],
)
def test_a_compiler_that_dies_is_named(log, message):
    died = standing.Ended(SimpleNamespace(timed_out=False, signal="SIGABRT", log_tail=log))
    assert compiler.fault_of(died, 1.0, "").message == f"the compiler {message}"


def test_targets_that_documents_name_are_known():
    """`--for h100` was refused: there are three H100s."""
    texts = "\n".join(
        path.read_text() for folder in ("docs", "gpu-wiki", "skills") for path in (BUNDLE / folder).rglob("*.md")
    )
    named = set(re.findall(r"compile_kernel\.py[^`\n]* --for ([^\s`]+)", texts))
    assert len(named) >= 5
    for names in named:
        assert choosing.of_names(names, None, "--for")
