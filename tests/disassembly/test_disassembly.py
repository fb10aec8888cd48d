"""Listings of real kernels, read by kernelopt.disassembly and shown by extract_asm.py."""

import json
import os
import re
import subprocess
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import FIXTURES, call_tool, tool_json
from kernelopt.device import programs
from kernelopt.disassembly import analysis, flow, listing_files, listings
from kernelopt.disassembly.listings import Instruction, Kernel, Resources
from kernelopt.errors import EnvironmentLacks, UsageError

RECORDED = FIXTURES / "disassembly"


def kernels(name: str) -> dict[str, Kernel]:
    (listing,) = listing_files.read(RECORDED / name)
    return {kernel.name: kernel for kernel in listing.kernels}


def summary(name: str, kernel: str | None = None) -> analysis.Summary:
    found = kernels(name)
    return analysis.summary(found[kernel] if kernel else next(iter(found.values())))


def notes(found: analysis.Summary) -> set[str]:
    return {remark.id for remark in found.remarks()}


def counts(found: analysis.Summary, *classes: str) -> dict:
    """{(class, bits): (count, in loops)}, or {(class, opcode): ...} where there is no width."""
    table: dict = {}
    for row in analysis.of_classes(found, *classes):
        key = (row.meaning, row.bits or row.opcode)
        count, looped = table.get(key, (0, 0))
        table[key] = (count + row.count, looped + row.in_loops)
    return table


def by_hand(*lines: str) -> Kernel:
    """A kernel of these instructions for sm_90a, made by hand; the first has address 0, the next 0x10."""
    code = "".join(f"        /*{16 * index:04x}*/   {line} ;\n" for index, line in enumerate(lines))
    (kernel,) = listings.parse_sass(f"\tcode for sm_90a\n\t\tFunction : by_hand\n{code}")
    return kernel


# ---- SASS ----


def test_both_dialects_of_sass_read_the_same():
    one, two = (kernels(f"streaming_add.{tool}.sass")["streaming_add"] for tool in ("nvdisasm", "cuobjdump"))
    assert (one.arch, two.arch) == ("sm_90", "sm_90a")  # nvdisasm does not say the a
    assert analysis.normalised(one) == analysis.normalised(two)
    assert analysis.changes(analysis.summary(one), analysis.summary(two)) == []
    found = analysis.summary(one)
    assert found.resources == Resources(
        registers=26,
        stack_bytes=0,
        static_shared_bytes=0,
        spilled_registers=None,  # only AMD's compiler says
        dynamic_shared_bytes=None,
        code_bytes=896,
    )
    assert counts(found, "global load", "global store") == {("global load", 128): (4, 0), ("global store", 128): (2, 0)}
    assert found.instructions == 42 and found.remarks() == []


@pytest.mark.parametrize(
    ("name", "kernel", "resources", "local", "ids"),
    [
        ("one_block.sass", "one_block", (36, 0, 1024), "none", set()),
        ("strided_gather.sass", "strided_gather", (40, 0, 0), "none", {"narrow_global_loads"}),
        ("matmul_hmma.sass", "tiled_matmul", (92, 0, 1024), "none", {"no_wgmma"}),
        ("matmul_hgmma.sass", "tiled_matmul", (108, 0, 1024), "none", set()),
        ("matmul_spill.sass", "tiled_matmul", (96, 328, 1024), "spill", {"spill", "no_wgmma"}),
        ("tile.sass", "indexed", (37, 256, 0), "array", {"array", "narrow_global_loads", "narrow_global_stores"}),
        (
            "tile.sass",
            "tile_product",
            (32, 0, 9216),
            "none",
            {"narrow_global_loads", "narrow_shared_loads", "narrow_shared_stores", "copies_through_registers"},
        ),
        ("matmul_tma_sm_100a.sass", "tma_matmul", (23, 0, 1024), "none", set()),
    ],
)
def test_what_stands_out_in_each_recorded_kernel(name, kernel, resources, local, ids):
    found = summary(name, kernel)
    assert astuple(found.resources)[:3] == resources
    assert found.local_memory == local and notes(found) == ids


def test_launch_bounds_are_read_of_the_elf_listing():
    assert listings.most_threads((RECORDED / "setmaxnreg.elf.txt").read_text()) == {"fits": 384, "waits": 384}


@pytest.mark.parametrize(("kernel", "lowered", "waits"), [("fits", 56, False), ("waits", 64, True)])
def test_recorded_kernels_that_set_their_limits_of_registers(kernel, lowered, waits):
    found = summary("setmaxnreg.sass", kernel)
    assert (found.resources.registers, found.raised, found.lowered) == (168, (224,), (lowered,))
    assert "waits_for_registers" not in notes(found)  # a listing by -sass has no launch bounds
    (said,) = [one.message for one in replace(found, most_threads=384).remarks() if "waits" in one.id] or [""]
    assert ("2 that raise it to 224 by setmaxnreg and 1 with 64 need 512" in said) == waits


@pytest.mark.parametrize(
    ("threads", "registers", "raised", "lowered", "waits"),
    [
        (384, 168, (240,), (24,), False),
        (384, 168, (240,), (32,), True),
        (384, 168, (192, 240), (120,), False),  # the least that is asked for
        (384, 168, (208,), (), True),  # the third one keeps its 168
        (512, 128, (160,), (32,), False),
        (512, 128, (208,), (40,), False),  # two of each
        (512, 128, (232,), (40,), True),
        (256, 255, (240,), (), False),
        (256, 128, (208,), (40,), False),  # two blocks on a multiprocessor
        (384, 80, (96,), (40,), False),
        (384, 168, (), (40,), False),
        (384, None, (240,), (64,), False),
        (None, 168, (240,), (64,), False),
        (128, 168, (240,), (), False),
    ],
)
def test_warpgroups_that_ask_for_more_registers_than_a_launch_gives(threads, registers, raised, lowered, waits):
    one = replace(summary("setmaxnreg.sass", "fits"), raised=raised, lowered=lowered, most_threads=threads)
    found = notes(replace(one, resources=replace(one.resources, registers=registers)))
    assert ("waits_for_registers" in found) == waits


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("matmul_hmma.sass", {("tensor", "HMMA.16816.F32.BF16"): (16, 16)}),
        ("matmul_hgmma.sass", {("tensor", "HGMMA.64x128x16.F32.BF16"): (4, 4)}),
        ("matmul_tma_sm_100a.sass", {("tensor", "UTCHMMA"): (4, 2)}),
        ("matmul_gfx942.amdgcn", {("tensor", "v_mfma_f32_32x32x8_bf16"): (6, 2)}),
        ("matmul_gfx1250.amdgcn", {("tensor", "v_wmma_f32_16x16x32_bf16"): (8, 4)}),
        ("one_block.sass", {}),
    ],
)
def test_tensor_instructions_by_kind(name, expected):
    assert counts(summary(name), "tensor") == expected


def test_copies_and_barriers():
    assert counts(summary("matmul_hgmma.sass"), "global to shared copy", "shared load", "barrier") == {
        ("global to shared copy", 128): (24, 8),
        ("shared load", 128): (8, 0),  # LDSM; nine "LDS RZ, [RZ]" load nothing
        ("barrier", "BAR.SYNC.DEFER_BLOCKING"): (5, 2),
    }
    blackwell = summary("matmul_tma_sm_100a.sass")
    tma = counts(blackwell, "TMA load", "TMA store", "mbarrier", "atomic")
    assert tma["TMA load", "UTMALDG.2D"] == (6, 2) and tma["TMA store", "UTMASTG.2D"] == (1, 0)
    assert ("mbarrier", "SYNCS.PHASECHK.TRANS64.TRYWAIT") in tma and ("atomic", "ATOMS.OR") in tma
    assert ("tensor memory load", "LDTM.16dp32bit_t0_t15.x16") in counts(blackwell, "tensor memory load")


def test_a_spill_names_its_traffic_and_how_much_of_it_is_in_loops():
    (message,) = [remark.message for remark in summary("matmul_spill.sass").remarks() if remark.id == "spill"]
    assert "local loads 110 (42 in loops), local stores 120 (36 in loops), stack 328 bytes" in message


def test_many_registers_alone_are_no_spill():
    full = listings.parse_sass((RECORDED / "matmul_hgmma.sass").read_text().replace("REG:108", "REG:255"))
    found = analysis.summary(full[0])
    assert found.resources.registers == 255 and notes(found) == set()


def test_a_stack_that_nothing_touches_is_no_spill():
    text = (RECORDED / "matmul_hgmma.sass").read_text().replace("STACK:0", "STACK:16")
    assert notes(analysis.summary(listings.parse_sass(text)[0])) == {"unused_stack"}


@pytest.mark.parametrize(
    ("lines", "ids"),
    [
        (["LDG.E R2, [R4]", "LDG.E.128 R4, [R4]", "LDG.E.128 R8, [R4]"], set()),  # one narrow load of three
        (["LDG.E R2, [R4]", "LDG.E R3, [R4]", "LDG.E.128 R4, [R4]", "@P0 BRA 0x20"], set()),  # narrow before the loop
        (["LDG.E R2, [R4]", "LDG.E.128 R4, [R4]", "@P0 BRA 0x0", "STG.E [R4], R2"], set()),
        (["LDG.E R2, [R4]", "LDG.E R4, [R4]", "LDG.E.128 R4, [R4]"], {"narrow_global_loads"}),
        (["LDG.E.128 R4, [R2]", "STS.128 [R2], R4", "@P0 BRA 0x0"], {"copies_through_registers"}),
        (["LDGSTS.E.128 [R2], [R4]", "LDG.E.128 R4, [R2]", "STS.128 [R2], R4", "@P0 BRA 0x0"], set()),
        (["HMMA.16816.F32 R4, R8, R10, R4"], {"no_wgmma"}),
        (["HMMA.16816.F32 R4, R8, R10, R4", "HGMMA.64x128x16.F32 R24, gdesc[UR4], R24"], set()),
        (["DMMA.8x8x4 R4, R8, R10, R4"], set()),  # fp64 has nothing newer
        (["REDG.E.ADD.F32.FTZ.RN.STRONG.GPU [R2], R4", "@P0 BRA 0x0"], {"atomics_in_loops"}),
        (["REDG.E.ADD.F32.FTZ.RN.STRONG.GPU [R2], R4", "EXIT"], set()),
    ],
)
def test_each_rule_fires_and_keeps_quiet(lines, ids):
    assert notes(analysis.summary(by_hand(*lines))) == ids


def test_mma_sync_is_old_on_hopper_and_blackwell_only():
    kernel = by_hand("HMMA.16816.F32 R4, R8, R10, R4")
    found = {}
    for arch in ("sm_80", "sm_90", "sm_100a", "sm_120", None):
        kernel.arch = arch
        found[arch] = notes(analysis.summary(kernel))
    assert found == {"sm_80": set(), "sm_90": {"no_wgmma"}, "sm_100a": {"no_tcgen05"}, "sm_120": set(), None: set()}


@pytest.mark.parametrize(("arch", "ids"), [("sm_100a", {"no_tcgen05"}), ("sm_103a", set())])
def test_mma_sync_of_integers_is_the_newest_on_10_3(arch, ids):
    """ptxas of CUDA 13.1: Feature '.kind::i8' not supported on .target 'sm_103a'."""
    kernel = by_hand("IMMA.16832.S8.S8.SAT R4, R8, R10, R4")
    kernel.arch = arch
    assert notes(analysis.summary(kernel)) == ids


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        (("STL [R1+0x8], R2", "LDL R2, [R1+0x8]"), "spill"),
        (("STL [R1+-0x8], R2", "LDL R2, [R1+-0x8]"), "spill"),
        (("LDL.LU R2, [R1]",), "spill"),
        (("LDL R2, [R1+0x8]",), "spill or array"),
        (("STL.64 [R1], R2",), "array"),  # the arguments of printf
        (("STL [R1+0x8], R2", "LDL R2, [R7]"), "array"),
        (("STL [R1+0x8], R2", "LDL R2, [R1+UR4]"), "array"),
        (("STL [R1+0x8], R2", "LDL R2, [R1+0x8]", "LDL R2, [R7]"), "spill or array"),
        (("STL [R1+0x8], R2", "LDL.LU R2, [R1+0x8]", "LDL R2, [R7]"), "spill and array"),
        (("LDG.E R2, [R1]",), "none"),
    ],
)
def test_a_spill_is_told_from_an_array_where_the_evidence_allows(lines, verdict):
    assert analysis.local_memory(by_hand(*lines)) == verdict


@pytest.mark.parametrize(
    ("kind", "opcode", "operands", "meaning", "bits"),
    [
        ("sass", "LDG.E", "R2, desc[UR4][R2.64]", "global load", 32),
        ("sass", "LDG.E.LTC128B.64.CONSTANT", "", "global load", 64),
        ("sass", "LDG.E.ENL2.256", "", "global load", 256),
        ("sass", "STG.E.U8", "", "global store", 8),
        ("sass", "STL.S16", "", "local store", 16),
        ("sass", "LDSM.16.MT88.4", "", "shared load", 128),
        ("sass", "LDSM.16.M88", "", "shared load", 32),
        ("sass", "LDGSTS.E.BYPASS.LTC128B.128", "", "global to shared copy", 128),
        ("sass", "LD.E.64", "", "generic load", 64),
        ("sass", "LDC.64", "R2, c[0x0][0x210]", None, None),
        ("sass", "LDGDEPBAR", "", None, None),
        ("sass", "HFMA2.MMA", "", None, None),
        ("sass", "QGMMA.64x128x32.F32.E4M3.E4M3", "", "tensor", None),
        ("sass", "IMMA.16832.S8.S8.SAT", "", "tensor", None),
        ("sass", "DMMA.8x8x4", "", "tensor", None),
        ("sass", "REDUX", "", None, None),
        ("sass", "REDG.E.ADD.F32.FTZ.RN.STRONG.GPU", "", "atomic", None),
        ("sass", "UBLKCP.S.G", "", "bulk copy", None),
        ("sass", "UCGABAR_ARV", "", "cluster barrier", None),
        ("sass", "MEMBAR.ALL.GPU", "", "memory barrier", None),
        ("ptx", "ld.global.L1::no_allocate.v4.b32", "", "global load", 128),
        ("ptx", "ld.global.v8.f32", "", "global load", 256),
        ("ptx", "st.shared::cta.b32", "", "shared store", 32),
        ("ptx", "ld.volatile.shared.u8", "", "shared load", 8),
        ("ptx", "ld.param.u64", "", None, None),
        ("ptx", "ld.u32", "", "generic load", 32),
        ("ptx", "cp.async.cg.shared.global", "[ %r35 + 0 ], [ %rd12 + 0 ], 0x10, %r36", "global to shared copy", 128),
        ("ptx", "cp.async.ca.shared.global", "[%r1], [%rd1], 4", "global to shared copy", 32),
        ("ptx", "cp.async.commit_group", "", None, None),
        ("ptx", "cp.async.bulk.commit_group", "", None, None),
        ("ptx", "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes", "", "TMA load", None),
        ("ptx", "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group", "", "TMA store", None),
        ("ptx", "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "", "shared load", 128),
        ("ptx", "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", "", "tensor", None),
        ("ptx", "wgmma.commit_group.sync.aligned", "", None, None),
        ("ptx", "redux.sync.add.s32", "", None, None),
        ("ptx", "bar.warp.sync", "", None, None),
        ("ptx", "barrier.cluster.arrive.aligned", "", "cluster barrier", None),
        ("ptx", "fence.acq_rel.gpu", "", "memory barrier", None),
        ("ptx", "membar.gl", "", "memory barrier", None),
        ("ptx", "fence.proxy.async", "", None, None),
        ("amdgcn", "global_load_dwordx4", "v[0:3], v[0:1], off", "global load", 128),
        ("amdgcn", "global_load_dword", "", "global load", 32),
        ("amdgcn", "buffer_load_ushort", "", "global load", 16),
        ("amdgcn", "buffer_load_dwordx4", "v1, s[4:7], 0 offen lds", "global to shared copy", 128),
        ("amdgcn", "global_load_async_to_lds_b128", "v1, v[2:3], off", "global to shared copy", 128),
        ("amdgcn", "cluster_load_async_to_lds_b32", "", "global to shared copy", 32),
        ("amdgcn", "global_load_lds_dwordx4", "", "global to shared copy", 128),
        ("amdgcn", "global_store_async_from_lds_b64", "", "shared to global copy", 64),
        ("amdgcn", "tensor_load_to_lds", "s[0:3], s[4:11]", "TDM load", None),
        ("amdgcn", "tensor_store_from_lds", "s[0:3], s[4:11]", "TDM store", None),
        ("amdgcn", "buffer_store_dword", "v1, off, s[0:3], 0 ; 4-byte Folded Spill", "local store", 32),
        ("amdgcn", "ds_read2st64_b64", "", "shared load", 128),
        ("amdgcn", "ds_bpermute_b32", "", None, None),
        ("amdgcn", "global_atomic_add_f32", "", "atomic", None),
    ],
)
def test_classes_and_widths(kind, opcode, operands, meaning, bits):
    """Opcodes as ptxas (CUDA 13.0, triton 3.9) and LLVM wrote them for sm_80 to sm_120, gfx90a and gfx942."""
    instruction = Instruction("", opcode, operands)
    assert analysis.meaning_of(kind, instruction) == meaning
    if bits:
        assert analysis.bits_of(kind, instruction) == bits


# ---- Loops ----


def test_the_loop_of_the_tile_product_is_what_its_source_loops_over():
    kernel = kernels("tile.sass")["tile_product"]
    hot = flow.in_loops(kernel)
    inside = [kernel.instructions[index].opcode.partition(".")[0] for index in sorted(hot)]
    assert inside.count("FFMA") == 32 and inside.count("LDS") == 64 and inside.count("BAR") == 2
    assert kernel.arch == "sm_90a"  # also after the header flags of another kernel, which lack the a
    assert "STG" not in inside and "EXIT" not in inside
    assert hot == set(range(min(hot), max(hot) + 1)) and len(hot) == 109


def test_each_target_of_a_fat_binary_has_its_own_resources():
    text = (RECORDED / "scale.so.sass.txt").read_text().replace("REG:10", "REG:8", 1)
    found = [(kernel.arch, kernel.resources.registers) for kernel in listings.parse_sass(text)]
    assert found == [("sm_80", 8), ("sm_90", 10)]


def test_the_stack_counts_with_the_local_memory_beside_it():
    text = (
        (RECORDED / "scale.so.sass.txt").read_text().replace("STACK:0 SHARED:0 LOCAL:0", "STACK:24 SHARED:0 LOCAL:8", 1)
    )
    assert [taken.stack_bytes for _, taken in listings.usages(text)] == [32, 0]
    assert [kernel.resources.stack_bytes for kernel in listings.parse_sass(text)] == [32, 0]


def test_code_without_a_loop_has_none_although_it_ends_in_a_jump_to_itself():
    kernel = kernels("strided_gather.sass")["strided_gather"]
    assert kernel.instructions[-1].opcode == "NOP" and any(i.opcode == "CALL.REL.NOINC" for i in kernel.instructions)
    assert flow.in_loops(kernel) == set()


def test_a_jump_back_from_a_block_out_of_line_is_no_loop():
    """A slow path behind the end jumps back; by addresses it would be a loop over all in between."""
    lines = ["@P0 BRA 0x40", "FADD R0, R0, R1", "BRA.U !UP0, 0x10", "EXIT", "FMUL R0, R0, R0", "BRA 0x10", "BRA 0x60"]
    kernel = by_hand(*lines)
    assert flow.in_loops(kernel) == {1, 2}
    assert analysis.normalised(kernel)[:3] == ["    @P0 BRA L1", "L0:", "    FADD R0, R0, R1"]


def test_a_branch_with_its_condition_among_the_operands_can_go_on():
    assert flow.in_loops(by_hand("FADD R0, R0, R1", "BRA.U !UP0, 0x10", "@P0 BRA 0x0", "EXIT")) == {0, 1, 2}


# ---- PTX and AMDGCN ----


def test_ptx_of_cuda_and_of_cutedsl():
    product, indexed = (analysis.summary(kernel) for kernel in kernels("tile.ptx").values())
    assert product.arch == "sm_90a" and product.resources.registers is None
    assert counts(product, "shared load", "global load", "barrier") == {
        ("shared load", 32): (64, 64),
        ("global load", 32): (2, 2),
        ("barrier", "bar.sync"): (2, 2),
    }
    assert indexed.local_memory == "array" and counts(indexed, "local store") == {("local store", 128): (16, 0)}
    cute = summary("cute_vector_add.ptx")
    assert cute.kernel.startswith("kernel_cutlass_add_tensorptrf32") and cute.instructions == 18
    assert counts(cute, "global load") == {("global load", 32): (2, 0)}


def test_ptx_with_inline_assembly_is_split_at_its_statements():
    """By hand, in the form that nvcc and Triton give to inline assembly."""
    text = """
    .target sm_90a
    .visible .entry by_hand( .param .u64 p ) .maxntid 128, 1, 1 {
        .loc 1 29 16 // kernels.py:29:16
        // begin inline asm
        {
.reg .pred P1;
LAB_WAIT:
mbarrier.try_wait.parity.shared::cta.b64 P1, [%r1], 0;
@!P1 bra LAB_WAIT;
        }
        // end inline asm
        @%p2 cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            { %f0, %f1, %f2, %f3 }, { %r1, %r2 }, { %r3 }, { %f0, %f1, %f2, %f3 };
        ret;
    }
    """
    (kernel,) = listings.parse_ptx(text)
    opcodes = [instruction.opcode.partition(".")[0] for instruction in kernel.instructions]
    assert opcodes == ["mbarrier", "bra", "cp", "mma", "ret"] and flow.in_loops(kernel) == {0, 1}
    found = analysis.summary(kernel)
    assert notes(found) == {"no_wgmma"} and counts(found, "global to shared copy") == {
        ("global to shared copy", 128): (1, 0)
    }


def test_amdgcn_of_triton():
    found = summary("matmul_gfx942.amdgcn", "tiled_matmul")
    assert found.arch == "gfx942" and found.local_memory == "none"
    assert found.resources == Resources(
        registers=52,
        stack_bytes=0,
        static_shared_bytes=0,
        spilled_registers=0,
        dynamic_shared_bytes=None,
        code_bytes=1980,
        accumulation_registers=0,
        scalar_registers=22,
        spilled_scalar_registers=0,
        waves_per_simd=8,
    )
    assert counts(found, "global load", "global store") == {("global load", 128): (6, 2), ("global store", 64): (4, 0)}
    assert found.in_loops == 36
    waits = counts(found, "wait for loads", "wait for LDS")
    assert waits == {("wait for loads", "s_waitcnt"): (5, 2), ("wait for LDS", "s_waitcnt"): (15, 3)}
    text = (RECORDED / "matmul_gfx942.amdgcn").read_text().replace(".vgpr_spill_count: 0", ".vgpr_spill_count: 7")
    assert notes(analysis.summary(listings.parse_amdgcn(text)[0])) >= {"spill"}


def test_amdgcn_of_gfx1250_copies_past_its_registers():
    found = summary("matmul_gfx1250.amdgcn")
    assert found.arch == "gfx1250" and found.local_memory == "none"
    assert counts(found, "global load", "global to shared copy") == {("global to shared copy", 128): (16, 8)}


@pytest.mark.parametrize("name", ["matmul_spill.sass", "tile.sass", "tile.ptx", "matmul_gfx942.amdgcn"])
def test_a_listing_that_was_cut_off_is_read_as_far_as_it_goes(name):
    text, kind = (RECORDED / name).read_text(), Path(name).suffix[1:]
    for share in range(1, 10):
        for kernel in listings.PARSERS[kind](text[: len(text) * share // 10]):
            analysis.summary(kernel)


# ---- The tool ----


def folder_of(tmp_path: Path, *names: str) -> Path:
    """A folder like a cache: each file in a folder of its own, each a minute older than the one before."""
    for age, name in enumerate(names):
        target = tmp_path / "cache" / f"hash{age}" / name
        target.parent.mkdir(parents=True)
        target.write_bytes((RECORDED / name).read_bytes())
        os.utime(target, (1e9 - 60 * age, 1e9 - 60 * age))
    return tmp_path / "cache"


def test_a_folder_gives_the_newest_of_each_kernel_first(tmp_path, run_here):
    cache = folder_of(tmp_path, "matmul_hmma.sass", "matmul_spill.sass", "one_block.sass")
    found = tool_json("extract_asm.py", cache, run=run_here)["kernels"]
    assert [kernel["kernel"] for kernel in found] == ["tiled_matmul", "one_block", "tiled_matmul"]
    assert [Path(kernel["file"]).name for kernel in found][::2] == ["matmul_hmma.sass", "matmul_spill.sass"]
    assert len(tool_json("extract_asm.py", cache, "--kernel", "matmul", run=run_here)["kernels"]) == 2


def test_the_text_shows_what_stands_out(run_here):
    done = run_here("extract_asm.py", RECORDED / "matmul_spill.sass")
    assert done.returncode == 0 and "96 registers, 328 bytes of stack" in done.stdout
    assert "1024 bytes of static shared memory, dynamic shared memory is set at launch" in done.stdout
    assert re.search(r"^  tensor +64 +64  HMMA.16816.F32.BF16$", done.stdout, re.MULTILINE)
    assert "  ! registers are spilled: " in done.stdout


def test_a_listing_without_resource_usage_says_so(tmp_path, run_here):
    bare = tmp_path / "bare.sass"
    bare.write_text((RECORDED / "one_block.sass").read_text().replace("  REG:", "  "))
    done = run_here("extract_asm.py", bare)
    assert "unknown: add the output of cuobjdump -res-usage" in done.stdout and " 0 registers" not in done.stdout


def test_an_exact_name_is_preferred_to_a_part():
    listings = listing_files.read(RECORDED / "tile.sass")
    listings[0].kernels[1].name = "indexed_twice"
    assert [kernel.name for _, kernel in listing_files.choose(listings, "indexed")] == ["indexed"]
    assert [kernel.name for _, kernel in listing_files.choose(listings, "index")] == ["indexed", "indexed_twice"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent.cubin"], "does not exist"),
        ([RECORDED / "tile.cu"], "one of these kinds: .cubin"),
        ([FIXTURES / "h200_matmul"], "one of these kinds: .cubin"),
        ([RECORDED / "tile.ptx", "--kind", "sass"], "no kernel as sass"),
        ([RECORDED / "tile.ptx", "--kernel", "softmax"], "the kernels are: indexed, tile_product"),
        ([RECORDED / "tile.sass", "--diff", RECORDED / "one_block.sass"], "no kernel is on both sides"),
    ],
)
def test_a_wrong_call_gets_one_sentence(arguments, said, run_here):
    done = run_here("extract_asm.py", *arguments)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


def test_a_diff_lists_what_changed(tmp_path, run_here):
    before, after = RECORDED / "matmul_hmma.sass", RECORDED / "matmul_spill.sass"
    found = tool_json("extract_asm.py", before, "--diff", after, "--out", tmp_path, run=run_here)
    (diff,) = found["diffs"]
    changes = {row["what"]: (row["before"], row["after"]) for row in diff["changes"]}
    assert changes["registers"] == (92, 96) and changes["stack_bytes"] == (0, 328)
    assert changes["local_memory"] == ("none", "spill")
    assert changes["tensor HMMA.16816.F32.BF16"] == (16, 64) and changes["local load LDL.LU"] == (0, 68)
    assert "static_shared_bytes" not in changes and not diff["same_code"]
    text = (tmp_path / "diff.sass").read_text()
    assert found["written"] == [str(tmp_path / "diff.sass")]
    assert "+    STL.64 [R1+0x120], R22" in text and not re.search(r"/\*|0x[0-9a-f]{16}", text)


def test_a_diff_of_the_same_code_in_two_dialects_is_empty(tmp_path, run_here):
    one, two = (RECORDED / f"streaming_add.{tool}.sass" for tool in ("nvdisasm", "cuobjdump"))
    done = run_here("extract_asm.py", one, "--diff", two, "--out", tmp_path)
    assert "same counts, same code" in done.stdout
    assert (tmp_path / "diff.sass").read_text() == ""


def test_two_lone_kernels_of_different_names_are_compared(run_here):
    (diff,) = tool_json(
        "extract_asm.py", RECORDED / "one_block.sass", "--diff", RECORDED / "strided_gather.sass", run=run_here
    )["diffs"]
    assert diff["kernel"] == "one_block" and {"what": "registers", "before": 36, "after": 40} in diff["changes"]


def test_each_target_is_compared_with_its_own(tmp_path, run_here):
    listing = (RECORDED / "scale.so.sass.txt").read_text()
    (tmp_path / "before.sass").write_text(listing)
    (tmp_path / "after.sass").write_text(listing.replace("REG:10", "REG:8", 1))
    diffs = tool_json("extract_asm.py", tmp_path / "before.sass", "--diff", tmp_path / "after.sass", run=run_here)[
        "diffs"
    ]
    assert {diff["arch"]: diff["changes"] for diff in diffs} == {
        "sm_80": [{"what": "registers", "before": 10, "after": 8}],
        "sm_90": [],
    }


# ---- cuobjdump ----


@pytest.fixture
def stand_in(tmp_path):
    """A stand-in for cuobjdump that prints recorded text, of a .so or of the CuteDSL cubin: the environment for it."""
    program = tmp_path / "bin" / "cuobjdump"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *broken*) echo "cuobjdump fatal   : Invalid fatbin header" >&2; exit 255;;\n'
        f"  *sm_70.cubin) cat {RECORDED}/scale_sm_70.refused.txt >&2; exit 1;;\n"
        f"  -ptx*.so) cat {RECORDED}/scale.so.ptx.txt;;\n"
        f"  '-sass -res-usage'*.so) cat {RECORDED}/scale.so.sass.txt;;\n"
        f"  '-sass -res-usage'*.cubin) cat {RECORDED}/cute_vector_add.listing.txt;;\n"
        "  *) exit 9;; esac\n"
    )
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}


def test_an_extension_is_read_with_all_its_targets(tmp_path, stand_in):
    (tmp_path / "scale.so").write_bytes(b"stands for a shared object")
    found = tool_json("extract_asm.py", tmp_path / "scale.so", "--out", tmp_path / "asm", env=stand_in)
    targets = {(kernel["kind"], kernel["arch"]): kernel["resources"]["registers"] for kernel in found["kernels"]}
    assert targets == {("sass", "sm_80"): 10, ("sass", "sm_90"): 10, ("ptx", "sm_90"): None}
    assert sorted(Path(path).name for path in found["written"]) == ["scale.ptx", "scale.sass"]
    again = tool_json("extract_asm.py", tmp_path / "asm")  # needs no cuobjdump
    without_file = [{**kernel, "file": None} for kernel in found["kernels"]]
    assert sorted(map(str, without_file)) == sorted(str({**kernel, "file": None}) for kernel in again["kernels"])


def test_a_dump_folder_keeps_its_order_below_out(tmp_path, stand_in):
    cache = folder_of(tmp_path, "cute_vector_add.cubin", "cute_vector_add.ptx")
    found = tool_json("extract_asm.py", cache, "--out", tmp_path / "asm", env=stand_in)
    assert [kernel["kind"] for kernel in found["kernels"]] == ["sass", "ptx"]
    written = {str(path.relative_to(tmp_path / "asm")) for path in (tmp_path / "asm").rglob("*.*")}
    assert written == {"hash0/cute_vector_add.sass", "hash1/cute_vector_add.ptx"}


def test_what_cuobjdump_cannot_read_is_said_in_its_words(tmp_path, stand_in):
    (tmp_path / "broken.cubin").write_text("no cubin")
    done = call_tool("extract_asm.py", tmp_path / "broken.cubin", env=stand_in)
    assert done.returncode == 2 and "Invalid fatbin header" in done.stderr and done.stderr.count("\n") == 1


def test_one_file_that_cuobjdump_refuses_does_not_hide_the_others(tmp_path, stand_in):
    cache = folder_of(tmp_path, "cute_vector_add.cubin", "scale_sm_70.cubin", "scale_sm_70.ptx")
    done = call_tool("extract_asm.py", cache, "--json", env=stand_in)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and 'architecture "SM70" is deprecated' in done.stderr and done.stderr.count("\n") == 1
    assert {(kernel["kind"], kernel["arch"]) for kernel in found["kernels"]} == {("sass", "sm_90a"), ("ptx", "sm_70")}
    (left_out,) = found["unread"]
    assert (
        left_out["file"].endswith("hash1/scale_sm_70.cubin")
        and left_out["kind"] == "sass"
        and "SM70" in left_out["why"]
    )
    cut = tool_json("extract_asm.py", cache, "--kind", "ptx", env=stand_in)
    assert cut["unread"] == [] and len(cut["kernels"]) == 1


def test_the_ptx_beside_a_cubin_that_cuobjdump_refuses_is_read(tmp_path, stand_in):
    cubin, ptx = (tmp_path / "cache" / f"scale_sm_70.{kind}" for kind in ("cubin", "ptx"))
    cubin.parent.mkdir()
    cubin.write_bytes((RECORDED / cubin.name).read_bytes())
    alone = call_tool("extract_asm.py", cubin, env=stand_in)
    assert alone.returncode == 2 and "SM70" in alone.stderr and "PTX" not in alone.stderr
    ptx.write_bytes((RECORDED / ptx.name).read_bytes())
    found = tool_json("extract_asm.py", cubin, env=stand_in)
    assert [kernel["file"] for kernel in found["kernels"]] == [str(ptx)] and len(found["unread"]) == 1
    for path, code in ((cubin, 2), (cubin.parent, 1)):  # a wrong file; a folder of which nothing can be read
        done = call_tool("extract_asm.py", path, "--kind", "sass", env=stand_in)
        assert done.returncode == code and "SM70" in done.stderr and "--kind all reads the PTX beside it" in done.stderr
        assert done.stderr.count("\n") == 1


def test_the_real_cuobjdump_refuses_that_cubin_as_it_was_recorded(tmp_path):
    program = programs.find("cuobjdump")
    version = program and subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    if not version or int(re.search(r"release (\d+)\.(\d+)", version)[1]) < 13 or "release 13.0" in version:
        pytest.skip("no cuobjdump from 13.1 on")
    listings = listing_files.read(RECORDED / "scale_sm_70.cubin")
    assert [(listing.kind, bool(listing.why)) for listing in listings] == [("sass", True), ("ptx", False)]
    assert (RECORDED / "scale_sm_70.refused.txt").read_text().strip() in listings[0].why


def test_shared_memory_that_a_launch_asks_for_is_known_from_tritons_cache(tmp_path, stand_in):
    cubin = tmp_path / "cute_vector_add.cubin"
    cubin.write_bytes((RECORDED / cubin.name).read_bytes())
    for beside, said in (
        ('{"shared": 65536}', "65536 bytes of dynamic"),
        ("[1]", "set at launch"),
        ("{", "set at launch"),
    ):
        cubin.with_suffix(".json").write_text(beside)
        assert said in call_tool("extract_asm.py", cubin, env=stand_in).stdout


@pytest.mark.parametrize("place", ["PATH", "CUDA_HOME", "CUDA_PATH", "toolkit", "triton", "nvidia"])
def test_nvidias_programs_are_found_in_every_usual_place(tmp_path, monkeypatch, place):
    """Not on the PATH alone: compute-sanitizer was looked for nowhere else."""
    folder = tmp_path / {
        "PATH": "bin",
        "triton": "triton/backends/nvidia/bin",
        "nvidia": "nvidia/cu13/bin",
    }.get(place, "cuda/bin")
    folder.mkdir(parents=True)
    (folder / "some-program").write_text("#!/bin/sh\n")
    (folder / "some-program").chmod(0o755)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert programs.find("some-program") is None
    if place in ("triton", "nvidia"):
        monkeypatch.setattr(
            programs.importlib.util,
            "find_spec",
            lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path / name)]),
        )
    elif place == "toolkit":
        monkeypatch.setattr(programs, "CUDA", str(folder.parent))
    else:
        monkeypatch.setenv(place, str(folder if place == "PATH" else folder.parent))
    assert programs.find("some-program") == str(folder / "some-program")


def test_without_cuobjdump_a_cubin_needs_the_toolkit_and_a_listing_does_not(monkeypatch):
    monkeypatch.setattr(programs.shutil, "which", lambda name, path=None: None)
    with pytest.raises(EnvironmentLacks, match=r"install the CUDA toolkit .* or pass a \.sass file") as error:
        listing_files.read(RECORDED / "cute_vector_add.cubin")
    assert error.value.exit_code == 3
    assert listing_files.read(RECORDED / "one_block.sass")[0].kernels
    with pytest.raises(UsageError):
        listing_files.read(RECORDED / "cute_vector_add.cubin", "ptx")


def test_the_real_cuobjdump_reads_a_cubin_as_it_was_recorded():
    try:
        listing_files.program()
    except EnvironmentLacks as error:
        pytest.skip(str(error))
    found = summary("cute_vector_add.cubin")
    (recorded,) = listings.parse_sass((RECORDED / "cute_vector_add.listing.txt").read_text())
    assert found == analysis.summary(recorded)
    assert found.resources.registers == 12 and notes(found) == {"narrow_global_loads", "narrow_global_stores"}
