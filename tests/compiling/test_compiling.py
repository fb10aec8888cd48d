"""Compiling for a card that is not here: Triton and CUDA C++, in an exploration and by verify_kernel --compile-only."""

import contextlib
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import forks_with_torch
import pytest
from conftest import FIXTURES, tool_json
from kernelopt.compiling import compiled, compiler, findings, reading, table
from kernelopt.compiling.compiled import Compiled, CompiledKernel
from kernelopt.device import programs
from kernelopt.disassembly import listing_files, listings
from kernelopt.errors import Refused
from kernelopt.explore import resources
from kernelopt.explore import table as exploration_table
from kernelopt.hardware import targets, wiki
from kernelopt.hardware.targets import Target
from kernelopt.statuses import Status
from kernelopt.worker import compiling as worker
from kernelopt.worker import elsewhere, extensions, faults

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
    assert torch.version.cuda and torch.version.hip is None
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
WRITTEN = """
import tempfile
from pathlib import Path
from torch.utils.cpp_extension import load
source = Path(tempfile.mkdtemp(), "k.cu")
source.write_text('''{cuda}''')
extension = load("k", [str(source)])


def kernel_function(x):
    return extension.double_it(x)
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
def h100() -> Target:
    return targets.of_page(wiki.product("h100-sxm"))


def answered(folder: Path, **own) -> compiler.Answer:
    """What a process of the worker answered, without kernels where none are given."""
    empty = {"status": "OK", "message": "", "failed": None, "kernels": [], "configurations": {}, "asked": []}
    empty |= {
        "passed_over": None,
        "has_cuda": bool(own.get("cuda") or own.get("lacking")),
        "cuda": [],
        "log": "",
        "lacking": None,
    }
    return compiler.Answer({**empty, **own}, folder)


def compile_only(folder, run_here, *options, code=0) -> dict:
    subject = ("--compile-only", "--kernel", folder / "c/k.py", "--reference", folder / "reference.py")
    return tool_json("verify_kernel.py", *subject, *options, run=run_here, code=code)


def test_cuda_that_was_compiled_after_a_failure_tells_of_it(h100, tmp_path):
    """It was called compiled, and no word was said of the source that the compiler refuses."""
    own = {"cuda": [], "has_cuda": True, "status": "RUNTIME_ERROR", "message": "AttributeError: no a"}
    plain = compiler.of_answers(h100, [answered(tmp_path, **own)])
    refused = f"{faults.PASSED_OVER}\nk.cu(5): error: no foo"
    told = compiler.of_answers(h100, [answered(tmp_path, **own, passed_over=refused)])
    assert (plain.status, plain.error) == ("OK", None) and (told.status, told.error) == ("OK", refused)
    assert "  k.cu(5): error: no foo" in table.of_target(told)


# --- cards -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arch", "capability"),
    [
        ("h100-sxm", "sm_90a", (9, 0)),
        ("rtx-4090", "sm_89", (8, 9)),
        ("b200", "sm_100a", (10, 0)),
        ("mi300x", "gfx942", (9, 4)),
        ("MI250X", "gfx90a", (9, 0)),
    ],
)
def test_code_is_for_the_card_alone_where_it_has_instructions_of_its_own(name, arch, capability):
    target = targets.of_page(wiki.product(name))
    assert (target.arch, target.capability) == (arch, capability)
    assert target.to_json()["label"] == f"compiled for {arch} here, not run"


@pytest.mark.parametrize(
    ("name", "arch", "has_card"),
    [
        ("sm_90", "sm_90a", True),
        ("9.0", "sm_90a", True),
        ("SM90a", "sm_90a", True),
        ("sm_121", "sm_121a", True),
        ("7.5", "sm_75", True),
        ("gfx942", "gfx942", True),
        ("gfx1250", "gfx1250", False),
        ("h100-sxm", None, False),
    ],
)
def test_an_architecture_needs_no_card(name, arch, has_card):
    root = wiki.root()
    target = targets.of_architecture(name, wiki.pages(root), wiki.limit_pages(root))
    assert (target and target.arch) == arch
    if target:
        told = target.for_worker()
        assert target.page is None and (told.units is not None) == (told.units_of is not None) == has_card


def test_a_capability_that_triton_has_left_behind_is_refused():
    with pytest.raises(Refused, match=r"Triton compiles for compute capability 7\.0 and newer, not for sm_61"):
        targets.of_architecture("6.1", [], {})


def test_the_types_of_a_product_are_read_in_tritons_representation():
    """Triton 3.9; what tt.dot_scaled multiplies has its types elsewhere."""
    line = (
        "%a = tt.dot %x, %y, %z, inputPrecision = tf32 : tensor<64x32xf8E4M3FN> * tensor<32x64xf8E4M3FN> -> t loc(#l)"
    )
    scaled = (
        "%b = tt.dot_scaled %x scale %s, %y, %z lhs = e4m3 : tensor<64x64xi8>, tensor<64x2xi8> -> tensor<64x64xf32>"
    )
    assert worker.DOT_TYPE.findall(f"{line}\n{scaled}") == ["f8E4M3FN"]


def test_what_the_driver_reserves_is_no_shared_memory_of_a_kernel(h100):
    """cuobjdump of CUDA 13.0 gives 1536 on sm_90a and 512 on sm_80 for a tile of 512 bytes, and 0 without one."""
    ada = targets.of_page(wiki.product("rtx-4090"))
    assert [h100.static_shared(size) for size in (0, 1536)] == [0, 512] and ada.static_shared(512) == 512


def test_where_the_code_cannot_be_read_its_ptx_says_what_it_has(tmp_path, monkeypatch):
    """cuobjdump refuses this cubin from 13.1 on; the log is a stand-in for that of ptxas."""
    unread = listing_files.Unreadable((FIXTURES / "disassembly/scale_sm_70.refused.txt").read_text())
    monkeypatch.setattr(listing_files, "dump", Mock(side_effect=unread))
    for suffix in ("cubin", "ptx"):
        (tmp_path / f"k.{suffix}").write_bytes((FIXTURES / f"disassembly/scale_sm_70.{suffix}").read_bytes())
    log = "Compiling entry function 'scale' for 'sm_70'\nFunction properties for scale\n0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nUsed 18 registers"
    volta = targets.of_architecture("sm_70", [], wiki.limit_pages(wiki.root()))
    entry = {"name": "scale", "configuration": None, "constants": {}, "files": {"cubin": "k.cubin", "ptx": "k.ptx"}}
    entry |= {
        "shared_bytes": 0,
        "tensor_memory": None,
        "warps": 4,
        "threads": 128,
        "stages": 3,
        "has_dot": True,
        "dot_types": [],
    }
    kernel = reading.triton_kernel(volta, {**entry, "log": log}, tmp_path)
    assert (kernel.registers, kernel.spill_bytes, kernel.code_bytes, kernel.arch) == (18, 0, None, "sm_70")
    assert reading.triton_kernel(volta, {**entry, "log": ""}, tmp_path).spill_bytes is None
    assert kernel.access_bits == {"global load": {128: 1}, "global store": {128: 1}}
    (told,) = findings.of(Compiled(volta, Status.OK, None, (kernel,)))
    assert told.id == "compiled_without_tensor_instructions"


def test_a_row_shows_the_kernel_with_the_most_registers_and_the_most_spills(h100):
    kernels = (
        CompiledKernel(name="small", registers=20, spill_bytes=64, shared_bytes=0, occupancy_pct=100.0),
        CompiledKernel(name="large", registers=168, spill_bytes=8, shared_bytes=4096, occupancy_pct=25.0, warps=4),
    )
    shown = resources.of_compiled(Compiled(h100, Status.OK, None, kernels))
    assert shown == resources.Resources("large", 168, 64, 4096, 25.0)
    of_cuda = tuple(replace(kernel, warps=None, occupancy_pct=None) for kernel in kernels)
    shown = resources.of_compiled(Compiled(h100, Status.OK, None, of_cuda))
    assert shown.shared_bytes is None  # a launch adds to the 4096
    assert resources.of_compiled(Compiled(h100, Status.OK, None)) == resources.Resources()


def test_serialized_wgmma_is_told_once_of_compiled_code(h100):
    remarks = {"wgmma_serialized": "ptxas runs the wgmma instructions one after the other: insufficient registers"}
    kernel = CompiledKernel(name="plain", remarks=remarks, registers=168)
    shown = resources.of_compiled(Compiled(h100, Status.OK, None, (kernel,)))
    assert shown.wgmma_serialized == "insufficient registers"
    row = {"compiled": {"findings": [{"id": "compiled_serialized_wgmma", "inference": "…"}]}}
    assert exploration_table.proved(row) == []


def test_configurations_are_ranked_by_what_fits():
    def one(name: str, configuration: str | None, **own) -> CompiledKernel:
        known = {"registers": 100, "spill_bytes": 0, "occupancy_pct": 25.0, **own}
        return CompiledKernel(name=name, configuration=configuration, **known)

    kernels = [
        one("a", "spills", spill_bytes=8),
        one("a", "does not fit", status=Status.LAUNCH_ERROR, occupancy_pct=None),
        one("a", "has no tensor instruction", has_dot=True),
        one("b", None),
        one("a", "few warps", has_dot=True, tensor_instructions={"HMMA.16816.F32": 4}, occupancy_pct=12.5),
        one("a", "fits", has_dot=True, tensor_instructions={"HMMA.16816.F32": 4}),
    ]
    order = [kernel.configuration for kernel in compiled.ranked(kernels)]
    assert order == ["fits", "few warps", "has no tensor instruction", "spills", "does not fit", None]
    result = Compiled(None, Status.OK, None, compiled.ranked(kernels))
    assert [kernel.configuration for kernel in result.chosen] == ["fits", None]


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("_ZN2my9double_itEPf", "double_it"),
        ("_Z5scalePKfPfi", "scale"),
        ("plain", "plain"),
        ("_Z4sortIfEvPT_", "sort"),
        ("_Z13newton_schulz4Maps5Shape", "newton_schulz"),
    ],
)
def test_a_mangled_name_is_shown_as_the_function_is_called(mangled, name):
    assert listings.plain_name(mangled) == name


@pytest.mark.parametrize(
    ("answer", "status", "error"),
    [
        ({"status": "OK", "cuda": ["k.cubin"]}, "NO_GPU", "CUDA C++ runs on a GPU alone: it was not checked; compiled for sm_90a here, not run"),
        ({"status": "OK", "lacking": extensions.NO_NVCC}, "NO_GPU", f"CUDA C++ runs on a GPU alone: it was not checked; {extensions.NO_NVCC}"),
        ({"status": "OK", "lacking": worker.NO_ROCM_LINKER, "has_cuda": False}, "OK", None),
        ({"status": "RUNTIME_ERROR", "message": "stopped"}, "OK", None),
        ({"status": "COMPILE_ERROR", "message": "k.cu(3): error: no foo"}, "COMPILE_ERROR", "k.cu(3): error: no foo"),
    ],
)  # fmt: skip
def test_the_status_of_a_candidate_that_was_checked_and_compiled(h100, tmp_path, answer, status, error):
    result = compiler.of_answers(h100, [answered(tmp_path, **answer)])
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
    assert result["label"] == "compiled for sm_90a here, not run" and result["status"] == "OK"
    (kernel,) = result["kernels"]
    assert kernel["name"] == "double" and 0 < kernel["registers"] < 64
    assert kernel["spill_bytes"] == 0 and kernel["occupancy_pct"] == 100.0


def test_tritons_message_is_told_from_the_function_that_is_wrong(folder, compile_here):
    (folder / "c/k.py").write_text(source(factor="undefined"))
    result = compile_only(folder, compile_here, "--card", "h100-sxm", code=1)
    assert result["status"] == "COMPILE_ERROR" and result["kernels"] == []
    assert "return undefined * x" in result["error"] and "undefined is not defined" in result["error"]


def test_an_exploration_without_a_gpu_checks_and_compiles(folder, compile_here):
    texts = {"right": source(), "wrong": source(factor="3.0"), "broken": source(factor="undefined")}
    for name, text in texts.items():
        (folder / "c" / f"{name}.py").write_text(text)
    options = ("--reference", folder / "reference.py", "--device", "cpu-interpreter", "--card", "h100-sxm")
    result = tool_json("explore_kernels.py", folder / "c", *options, "--budget-seconds", 60, run=compile_here)
    assert result["compiled"]["label"] == "compiled for sm_90a here, not run"
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


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"shared": 524288}, "Required: 524288, Hardware limit: 232448"),
        ({"shared": 64, "tmem_size": 1024}, "Required: 1024, Hardware limit: 512"),
    ],
)
def test_a_block_with_more_memory_than_the_gpu_has_is_a_launch_error(tmp_path, h100, about, said):
    """A stand-in for Triton's compiled kernel; one of this size takes its compiler minutes."""
    fields = {"name": "large", "num_warps": 4, "num_stages": 3, "tmem_size": None, **about}
    source = SimpleNamespace(fn=SimpleNamespace(arg_names=["x", "BM"]), constants={(1,): 64})
    kernel = SimpleNamespace(hash="a", metadata=SimpleNamespace(**fields), asm={"cubin": b"code"}, src=source)
    target = replace(h100.for_worker(), tensor_memory_columns=512)
    triton = worker.TritonKernels(elsewhere.Elsewhere(target), tmp_path)
    with pytest.raises(Exception) as caught:
        triton.in_place_of(lambda *_, **__: kernel, worker.Configurations(0))(
            SimpleNamespace(__name__="large"), grid=(1,)
        )
    told = faults.describe(caught.value)
    assert told["status"] == "LAUNCH_ERROR" and said in told["message"]
    (made,) = triton.kernels
    assert made["constants"] == {"BM": "64"} and (tmp_path / made["files"]["cubin"]).read_bytes() == b"code"


def test_a_configuration_that_does_not_fit_leaves_the_others(tmp_path, h100, monkeypatch):
    monkeypatch.setattr(reading, "kernels_in", lambda file: [])
    log = "Compiling entry function 'tile' for 'sm_90a'\nFunction properties for tile\n 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nUsed 40 registers"
    entry = {"name": "tile", "hash": "a", "configuration": "BM=512", "constants": {}, "files": {"cubin": "k.cubin"}}
    entry |= {
        "shared_bytes": 1 << 20,
        "tensor_memory": None,
        "warps": 4,
        "threads": 128,
        "stages": 3,
        "has_dot": True,
        "dot_types": [],
    }
    large = answered(
        tmp_path,
        status="LAUNCH_ERROR",
        message="out of resource: shared memory",
        failed={"name": "tile", "configuration": "BM=512"},
        kernels=[{**entry, "log": log}],
        configurations={"tile": 3},
    )
    refused = answered(
        tmp_path, status="COMPILE_ERROR", message="at 4:21", failed={"name": "tile", "configuration": "BM=24"}
    )
    fits = answered(
        tmp_path, kernels=[{**entry, "hash": "b", "configuration": "BM=64", "shared_bytes": 64, "log": log}]
    )
    result = compiler.of_answers(h100, [large, refused, fits])
    assert (result.status, result.error) == (Status.OK, None)
    assert [(kernel.configuration, kernel.status) for kernel in result.kernels] == [
        ("BM=64", "OK"),
        ("BM=512", "LAUNCH_ERROR"),
        ("BM=24", "COMPILE_ERROR"),
    ]
    assert result.kernels[0].occupancy_pct == 75.0 and result.kernels[0].spill_bytes == 0
    none = compiler.of_answers(h100, [large, refused])
    assert none.status == "LAUNCH_ERROR" and none.error.startswith("none of 2 configurations fits; the first: a block")


def test_a_compilation_that_takes_long_holds_up_no_other():
    """Before, two slow targets on two cores took all of the time, and no other target was compiled."""
    turns = compiler.Turns(1, patience_s=0.02)
    ended = threading.Event()

    def other() -> None:
        with turns.one():
            ended.set()

    with turns.one():
        thread = threading.Thread(target=other)
        thread.start()
        assert ended.wait(30)
    thread.join()


def test_who_is_done_in_time_hands_its_turn_on_once():
    turns = compiler.Turns(1, patience_s=30)
    with turns.one():
        assert not turns._free.acquire(blocking=False)
    assert turns._free.acquire(blocking=False) and not turns._free.acquire(blocking=False)


def test_the_configurations_of_all_autotuners_are_compiled(tmp_path):
    answers = {0: answered(tmp_path, configurations={"a": 3}), 1: answered(tmp_path, configurations={"a": 3, "b": 5})}
    assert compiler.most(answers, compiler.Limits.of(1)) == 5
    assert compiler.most(answers, compiler.Limits.of(1, 2)) == 2
    assert compiler.most({0: compiler.Answer(None, tmp_path)}, compiler.Limits.of(1)) == 1


# --- CUDA C++ --------------------------------------------------------------------------------------------------


@needs_nvcc
def test_cuda_is_compiled_for_the_card_whatever_its_flags_say(folder, compile_here):
    (folder / "c/k.py").write_text(CUDA_KERNEL)
    (folder / "c/k.cu").write_text(CUDA.format(factor=2))
    result = compile_only(folder, compile_here, "--card", "h100-sxm")
    (kernel,) = result["kernels"]
    assert (kernel["name"], kernel["spill_bytes"], kernel["shared_bytes"]) == ("double_it", 0, 512)
    assert 0 < kernel["registers"] < 64 and kernel["occupancy_error"].startswith("CUDA C++ chooses the size")


@needs_nvcc
def test_candidates_that_are_all_cuda_are_compiled_and_no_inputs_are_made(folder, compile_here):
    """Nothing here can check them, and the inputs took longer than a compilation."""
    for name, factor in (("double", "2"), ("triple", "3"), ("broken", "undefined")):
        (folder / f"c/{name}.py").write_text(WRITTEN.format(cuda=CUDA.format(factor=factor)))
    (folder / "reference.py").write_text(REFERENCE.replace("8, 64", "1 << 36"))  # 256 GiB
    options = ("--reference", folder / "reference.py", "--device", "cpu-interpreter", "--card", "h100-sxm")
    result = tool_json("explore_kernels.py", folder / "c", *options, run=compile_here)
    rows = {row["name"]: row for row in result["rows"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "double": "NO_GPU",
        "triple": "NO_GPU",
        "broken": "COMPILE_ERROR",
    }
    assert rows["double"]["registers"] > 0 and 'identifier "undefined" is undefined' in rows["broken"]["error"]
    assert [*result["seconds"]] == ["compile"]
    lines = exploration_table.lines(result, None)
    assert "nothing was checked or timed" in lines
    assert (
        "double, triple: CUDA C++ runs on a GPU alone: it was not checked; compiled for sm_90a here, not run" in lines
    )


@needs_nvcc
def test_nvccs_errors_are_told_with_file_and_line(folder, compile_here):
    (folder / "c/k.py").write_text(CUDA_KERNEL)
    (folder / "c/k.cu").write_text(CUDA.format(factor="undefined"))
    result = compile_only(folder, compile_here, "--card", "h100-sxm", code=1)
    first = result["error"].splitlines()[0]
    assert result["status"] == "COMPILE_ERROR" and first.endswith('k.cu(7): error: identifier "undefined" is undefined')
    assert "nvcc -" not in result["error"]


@needs_nvcc
@pytest.mark.parametrize(
    ("host", "flags", "error"), [("int f() { return 1; }", ["-DF=1"], None), ("int f() {", [], "k.cpp")]
)
def test_the_part_for_the_host_is_compiled_too(folder, compile_here, host, flags, error):
    (folder / "c/k.cu").write_text(CUDA.format(factor=2))
    (folder / "c/k.cpp").write_text(f"#include <cuda_runtime.h>\n{host}\n")
    both = '[__file__.replace(".py", ".cpp"), __file__.replace(".py", ".cu")]'
    text = CUDA_KERNEL.replace('[__file__.replace(".py", ".cu")]', f"{both}, extra_cflags={flags}")
    (folder / "c/k.py").write_text(text)
    result = compile_only(folder, compile_here, "--card", "h100-sxm", code=1 if error else 0)
    assert result["status"] == ("COMPILE_ERROR" if error else "OK")
    assert len(result["kernels"]) == (0 if error else 1) and (error or "") in (result["error"] or "")


def test_without_a_compiler_it_says_which(tmp_path, h100):
    for target, said in ((h100, extensions.NO_NVCC), (targets.of_page(wiki.product("mi300x")), extensions.NO_HIPCC)):
        built = extensions.Extensions(target.for_worker(), None, tmp_path)
        with pytest.raises(extensions.Stop, match="is not here: "):
            built._compile(lambda **given: None, {"name": "k", "sources": ["k.cu"]})
        assert built.lacking == said and built.files == []


@pytest.mark.parametrize("place", ["extensions/k", "../extensions/k"])
def test_a_torch_with_cuda_builds_the_extension_itself(tmp_path, h100, monkeypatch, place):
    """A stand-in for torch's builder, which leaves a shared library, among the files or in the session's cache."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    folder = tmp_path / "compiled"
    built = folder / place
    built.mkdir(parents=True)
    builder = extensions.Extensions(h100.for_worker(), "nvcc", folder)
    given = {"name": "k", "sources": ["k.cu", "main.cpp"], "build_directory": str(built)}
    extension = builder._compile(lambda **_: (built / "k.so").touch(), given)
    assert builder.files == [f"{place}/k.so"]
    with pytest.raises(extensions.Stop, match=r"k\.run was called"):
        extension.run(1)


def test_a_library_that_is_missing_at_the_link_leaves_the_code_for_the_gpu(tmp_path, h100, monkeypatch):
    """Stand-ins for torch's builder, with the linker's message where the CUDA runtime is missing, and for nvcc."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\nfor last; do :; done\ntouch "$last"\n')
    nvcc.chmod(0o755)
    builder = extensions.Extensions(h100.for_worker(), str(nvcc), tmp_path)
    for message, files in (
        ("k.cu(7): error: no foo", []),
        ("/usr/bin/ld: cannot find -lcudart: No such file or directory", ["cuda-0.cubin"]),
    ):
        build = Mock(side_effect=RuntimeError(f"Error building extension 'k': {message}"))
        with contextlib.suppress(RuntimeError):
            builder._compile(build, {"name": "k", "sources": ["k.cu"]})
        assert builder.files == files


def test_for_amd_hipcc_compiles_what_torch_translates(tmp_path):
    """A stand-in for hipcc, which leaves a recorded listing; the translation to HIP is torch's own."""
    hipcc, source = tmp_path / "hipcc", tmp_path / "k.cu"
    listing = FIXTURES / "disassembly/matmul_gfx942.amdgcn"
    hipcc.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/command\nfor last; do :; done\ncp {listing} "$last"\n')
    hipcc.chmod(0o755)
    source.write_text("#include <cuda_runtime.h>\nvoid launch(cudaStream_t s);\n")
    (tmp_path / "made").mkdir()
    target = targets.of_page(wiki.product("mi300x"))
    built = extensions.Extensions(target.for_worker(), str(hipcc), tmp_path / "made")
    built._compile(lambda **_: None, {"name": "k", "sources": [str(source)], "extra_cuda_cflags": ["-arch=sm_90"]})
    command = (tmp_path / "command").read_text().split()
    assert {"--offload-arch=gfx942", "--cuda-device-only", "-S"} <= set(command) and "-arch=sm_90" not in command
    translated = next(Path(part) for part in command if part.endswith(".hip"))
    assert "hipStream_t" in translated.read_text() and source.read_text().count("cudaStream_t") == 1
    (kernel,) = reading.cuda_kernels(target, tmp_path / "made" / built.files[0], built.log)
    assert (kernel.name, kernel.registers, kernel.scalar_registers) == ("tiled_matmul", 52, 22)


def test_flags_that_choose_a_card_are_left_out():
    flags = [
        "-O3",
        "-gencode",
        "arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-arch=sm_75",
        "--offload-arch=gfx90a",
    ]
    assert extensions.without_card([*flags, "--use_fast_math"]) == ["-O3", "--use_fast_math"]


# --- wrong calls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--compile-only", "--device", "cpu-interpreter"), 2, "pass --card NAME"),
        (("--compile-only", "--card", "sm_60"), 1, "Triton compiles for compute capability 7.0"),
        (("--compile-only", "--card", "h100"), 1, "did you mean"),
        (("--card", "h100-sxm"), 2, "--card goes with --compile-only"),
    ],
)
def test_a_compilation_for_no_card_is_refused_with_a_sentence(folder, run_here, options, code, message):
    (folder / "c/k.py").write_text(source())
    done = run_here("verify_kernel.py", "--kernel", folder / "c/k.py", "--reference", folder / "reference.py", *options)
    assert done.returncode == code and message in done.stderr


@pytest.mark.parametrize(("rows", "place"), [(8, "cpu"), (1 << 20, "meta")])
def test_large_inputs_take_no_memory(tmp_path, rows, place):
    (tmp_path / "reference.py").write_text(REFERENCE.replace("torch.randn(8, 64)", f"torch.randn({rows}, 1024)"))
    case, where = worker.case_without_values(str(tmp_path / "reference.py"), "default", "bf16")
    (x,) = case.inputs
    assert (where, x.device.type, x.shape[0], str(x.dtype)) == (place, place, rows, "torch.bfloat16")
    assert place == "meta" or not x.any()


@pytest.mark.parametrize(
    ("made", "module", "is_imported"),
    [
        ("0.5 * torch.randn(1 << 20, 1024)", "torch._dynamo", False),  # 2 s of each process that compiles
        ("torch.randn(__import__('sympy').Integer(1 << 20), 1024)", "sympy", True),  # its stand-in has no Integer
    ],
)
def test_large_inputs_are_made_on_meta_and_torchs_compilers_are_imported_only_for_need(
    tmp_path, made, module, is_imported
):
    path = tmp_path / "reference.py"
    path.write_text(REFERENCE.replace("torch.randn(8, 64)", made))
    code = f"""
import sys
from kernelopt.worker import compiling
case, where = compiling.case_without_values({str(path)!r}, "default", None)
assert where == case.inputs[0].device.type == "meta", where
assert ({module!r} in sys.modules) is {is_imported}
"""
    done = forks_with_torch.run(code)
    assert done.returncode == 0, done.stdout


def test_a_process_that_compiles_has_one_thread_of_torch(folder, compile_here):
    """Ten of them at once took 11 s in place of 14 on two cores."""
    said = "raise ValueError(f'threads: {torch.get_num_threads()}')"
    (folder / "c/k.py").write_text(f"import torch\ndef kernel_function(x):\n    {said}\n")
    result = compile_only(folder, compile_here, "--card", "h100-sxm", code=1)
    assert "threads: 1" in result["error"]


def test_a_kernel_that_launches_nothing_is_not_called_compiled(folder, compile_here):
    (folder / "c/k.py").write_text("def kernel_function(x):\n    return 2 * x\n")
    result = compile_only(folder, compile_here, "--card", "h100-sxm", code=1)
    assert "nothing was compiled" in result["error"]
