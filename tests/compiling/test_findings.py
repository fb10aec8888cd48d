"""What compiled code proves before anything ran, and how results are shown. The kernels are made by hand."""

import pytest
from kernelopt.compiling import findings, table
from kernelopt.compiling.compiled import Compiled, CompiledKernel, reason
from kernelopt.hardware import targets, wiki
from kernelopt.session import compilations
from kernelopt.statuses import Status

PRODUCT = CompiledKernel(
    name="product",
    arch="sm_90a",
    registers=168,
    spill_bytes=0,
    stack_bytes=0,
    shared_bytes=65536,
    warps=4,
    stages=3,
    has_dot=True,
    tensor_instructions={"HGMMA.64x128x16.F32.BF16": 16, "HGMMA.64x64x16.F32.BF16": 4},
    access_bits={"global load": {128: 8}, "global store": {16: 2, 128: 8}},
    code_bytes=5120,
    occupancy_pct=12.5,
    limiters=("registers", "shared_memory"),
)
AMD = {"accumulation_registers": 64, "scalar_registers": 30, "spilled_scalar_registers": 7}


def compiled(name: str, *kernels: CompiledKernel, **own) -> Compiled:
    root = wiki.root()
    target = targets.of_architecture(name, wiki.pages(root), wiki.limit_pages(root))
    return Compiled(target, own.pop("status", Status.OK), own.pop("error", None), kernels, **own)


def kernel(**changes) -> CompiledKernel:
    return CompiledKernel(**{**vars(PRODUCT), **changes})


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("sm_90", {}, []),
        ("sm_90", {"spill_bytes": 8}, [("compiled_spills", "memory-access.md", "local memory")]),
        ("gfx942", {"spill_bytes": 8}, [("compiled_spills", "cdna.md", "vector registers to scratch")]),
        (
            "sm_86",
            {"tensor_instructions": {}},
            [("compiled_without_tensor_instructions", "tensor-cores.md", "has no tensor instruction")],
        ),
        (
            "gfx1100",
            {"tensor_instructions": {}},
            [("compiled_without_tensor_instructions", "cdna.md", "neither MFMA nor WMMA")],
        ),
        ("sm_90", {"tensor_instructions": {}, "has_dot": False}, []),
        (
            "sm_80",
            {"dot_types": ("f8E5M2",), "tensor_instructions": {"HMMA.16816.F32": 8}},
            [("compiled_converted_operands", "tensor-cores.md", "operands of 8 bits (f8E5M2)")],
        ),
        (
            "gfx942",
            {"dot_types": ("f16", "f8E4M3FN"), "tensor_instructions": {"v_mfma_f32_32x32x8_f16": 8}},
            [("compiled_converted_operands", "cdna.md", "code for gfx942 converts them")],
        ),
        *(
            (name, {"dot_types": (type_,), "tensor_instructions": {opcode: 8}}, [])
            for name, type_, opcode in (
                ("sm_80", "f16", "HMMA.16816.F32"),
                ("sm_80", "i8", "IMMA.16832.S8.S8.SAT"),
                ("sm_89", "f8E4M3FN", "QMMA.16832.F32.E4M3.E4M3"),
                ("sm_90", "f8E4M3FN", "QGMMA.64x128x32.F32.E4M3.E4M3"),
                ("sm_100", "f8E4M3FN", "UTCQMMA"),
                ("gfx90a", "i8", "v_mfma_i32_32x32x8i8"),
                ("gfx942", "f8E4M3FNUZ", "v_mfma_f32_32x32x16_fp8_fp8"),
                ("gfx950", "f8E5M2", "v_mfma_f32_32x32x64_f8f6f4"),
                ("gfx1201", "i8", "v_wmma_i32_16x16x16_iu8"),
            )
        ),
        (
            "sm_90",
            {"remarks": {"no_wgmma": "mma.sync (HMMA) on Hopper"}},
            [("compiled_old_tensor_instruction", "tensor-cores.md", "mma.sync of one warp")],
        ),
        (
            "sm_90",
            {"remarks": {"wgmma_serialized": "ptxas runs them one after the other: insufficient registers"}},
            [("compiled_serialized_wgmma", "tensor-cores.md", "insufficient registers")],
        ),
        (
            "sm_90",
            {"remarks": {"waits_for_registers": "they need 512, so that one of them waits for ever"}},
            [("compiled_waits_for_registers", "hopper.md", "may never end: they need 512")],
        ),
        (
            "gfx942",
            {"status": Status.LAUNCH_ERROR, "error": "98304 bytes of LDS, gfx942 has 65536"},
            [
                (
                    "compiled_too_large",
                    "cdna.md",
                    "a workgroup of `product` cannot be launched on gfx942: 98304 bytes of LDS",
                )
            ],
        ),
        (
            "sm_86",
            {"status": Status.LAUNCH_ERROR, "error": "131072 bytes of shared memory"},
            [("compiled_too_large", "occupancy.md", "a block of `product` cannot be launched on sm_86")],
        ),
    ],
)
def test_each_finding(name, changes, expected):
    told = findings.of(compiled(name, kernel(**changes)))
    assert [(one.id, one.wiki.rpartition("/")[2]) for one in told] == [row[:2] for row in expected]
    for one, (_, _, said) in zip(told, expected, strict=True):
        assert said in one.inference and one.estimated_gain_pct is None and one.actions


def test_below_ampere_no_tile_gives_triton_tensor_instructions():
    said = [findings.of(compiled(name, kernel(tensor_instructions={})))[0].actions[0] for name in ("sm_75", "sm_80")]
    assert "write the product in CUDA C++" in said[0] and "use 16-bit operands" in said[1]


def test_without_occupancy_amds_compiler_is_asked():
    unknown = {"occupancy_pct": None, "limiters": ()}
    text = table.lines(
        [compiled("gfx1250", kernel(**unknown, occupancy_error="no occupancy for it", waves_per_simd=5))]
    )
    assert "  product: no occupancy for it; by AMD's compiler the registers allow 5 waves on a SIMD" in text
    text = table.lines(
        [compiled("sm_90", kernel(**unknown, occupancy_error="UNKNOWN", arch=None, tensor_instructions={}))]
    )
    assert "  product: no occupancy: UNKNOWN" in text and text[1].split()[8] == "?"


def test_only_the_configuration_that_fits_best_is_judged():
    spilling = kernel(configuration="BM=256", spill_bytes=64)
    assert findings.of(compiled("sm_90", kernel(configuration="BM=64"), spilling)) == ()


def test_the_table_compares_the_targets():
    cdna = kernel(**AMD, registers=160, tensor_instructions={"v_mfma_f32_32x32x8_bf16": 8}, limiters=("lds",))
    refused = compiled("sm_86", status=Status.COMPILE_ERROR, error="at 4:21:\ntype fp8e4nv not supported")
    text = table.lines([compiled("sm_90", PRODUCT, kernel(name="small")), compiled("gfx942", cdna), refused])
    assert [line.split() for line in text[1:4]] == [
        "product sm_90a 168 0 0 65536 4 3 HGMMA:20 128 16-128 5120 12.5 registers,shared_memory".split(),
        "product gfx942 96+64,30 0+7s 0 65536 4 3 mfma:8 128 16-128 5120 12.5 lds".split(),
        "small sm_90a 168 0 0 65536 4 3 HGMMA:20 128 16-128 5120 12.5 registers,shared_memory".split(),
    ]
    assert {"compiled for sm_90a here, not run", "COMPILE_ERROR for sm_86"} <= set(text)
    assert "  type fp8e4nv not supported" in text


def test_kernels_of_one_name_are_told_apart_and_long_errors_are_cut():
    pair = [kernel(constants={"BM": "64", "WS": value}) for value in ("True", "False")]
    text = table.lines([compiled("sm_90", *pair, assumed="the kernel asks for the number of SMs")])
    assert [line.split()[:2] for line in text[1:3]] == [["product", "WS=True"], ["product", "WS=False"]]
    assert "  the kernel asks for the number of SMs" in text
    long = "\n".join(f"line {number}" for number in range(20))
    text = table.lines([compiled("sm_90", status=Status.COMPILE_ERROR, error=long)])
    assert "  line 11" in text and "  line 12" not in text and "  and 8 lines more: --json has all" in text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("CompilationError: at 1:0:\ndef f(a):\n^\nValueError('no fp8')\n\nmore", "ValueError('no fp8')"),
        (
            "none of 2 configurations fits; the first: E: at 4:21:\n  x\n  ^\nno",
            "none of 2 configurations fits; the first: no",
        ),
        ("PTXASError: at last\n`ptxas` stderr:\nptxas /x.ptx, line 3; error   : no tanh", "error   : no tanh"),
        ("OutOfResources: Required: 2, Hardware limit: 1", "OutOfResources: Required: 2, Hardware limit: 1"),
        ("", ""),
        (None, ""),
    ],
)
def test_of_an_error_the_line_that_says_why_is_told(error, said):
    assert reason(error) == said


def test_configurations_are_counted_and_those_left_out_are_said():
    every = [kernel(configuration=f"BM={size}", spill_bytes=8 * (size > 64)) for size in range(50, 70)]
    text = table.lines([compiled("sm_90", *every, left_out=3)])
    assert "  product: 15 of 20 configurations fit without a spill; by what fits, not by speed:" in text
    assert "    and 10 more: --json has all" in text
    assert "  3 configurations were not compiled: --timeout and --configurations allow more" in text


def test_the_brief_is_of_this_very_kernel(session):
    results = [compiled("sm_90", kernel(spill_bytes=8)), compiled("sm_86", status=Status.COMPILE_ERROR, error="no fp8")]
    lines = table.brief_lines(results)
    assert lines[0].startswith("- compiled for sm_90a here, not run: `product`: 168 registers, 8 bytes spilled")
    assert (
        lines[1].startswith("  - compiled_spills: `product` compiled for sm_90a")
        and lines[2] == "- sm_86: COMPILE_ERROR: no fp8"
    )
    assert compilations.lines_of(session, "a" * 64) == []
    compilations.save(session, "a" * 64, "2026-11-23T00:00:00Z", {"targets": []}, lines)
    assert compilations.lines_of(session, "a" * 64) == lines and compilations.lines_of(session, "b" * 64) == []
    compilations.file_of(session).write_text("{")
    assert compilations.lines_of(session, "a" * 64) == []
