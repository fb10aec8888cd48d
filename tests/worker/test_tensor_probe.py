"""The probe of bare tensor operations, as far as it goes without a GPU: its instructions assemble, its source compiles
without spills, and its count and its sums are what the host computes. test_gpu.py runs it."""

import re
import subprocess

import pytest
import torch
from kernelopt.device import programs
from kernelopt.session.ceiling_report import PARTS, TensorCeiling
from kernelopt.worker import rates
from kernelopt.worker import tensor_probe as probe

CARDS = {"sm_80": (8, 0), "sm_86": (8, 6), "sm_89": (8, 9), "sm_90a": (9, 0), "sm_120": (12, 0)}


def variants(other: bool) -> list[probe.Variant]:
    """All that the probe has on CARDS."""
    made = []
    for capability in CARDS.values():
        for dtype in probe.WIDTHS:
            if dtype != "fp8" or capability >= (8, 9):
                made.append(probe.variant(capability, dtype, other))
    return made


def ptx(which: probe.Variant) -> str:
    """A PTX module with the variant's instruction alone."""
    kind = "s32" if which.dtype == "int8" else "f32"
    wgmma = which.instruction.startswith("wgmma")
    count = 128 if wgmma else 4
    sums = ", ".join(f"%d{i}" for i in range(count))
    signs = "" if which.dtype == "int8" else ", 1, 1" + ", 0, 0" * (probe.WIDTHS[which.dtype] == 2)
    operands = (
        f"{{{sums}}}, %a, %b, %p{signs}" if wgmma else f"{{{sums}}}, {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}}, {{{sums}}}"
    )
    return f"""
.version 8.7
.target {which.target}
.address_size 64
.visible .entry one() {{
    .reg .{kind} %d<{count}>; .reg .b64 %a, %b; .reg .b32 %r<6>; .reg .pred %p;
    {which.instruction} {operands};
    ret;
}}
"""


@pytest.mark.parametrize("which", variants(False), ids=lambda which: f"{which.target}-{which.dtype}")
def test_each_instruction_assembles_for_its_card(which, tmp_path):
    ptxas = programs.find("ptxas")
    if ptxas is None:
        pytest.skip("no ptxas here, not even Triton's")
    source = tmp_path / "one.ptx"
    source.write_text(ptx(which))
    command = [ptxas, f"-arch={which.target}", "-o", str(tmp_path / "one.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    source.write_text(ptx(which).replace("k16", "k12").replace("k32", "k12").replace("k8.", "k12."))
    assert subprocess.run(command, capture_output=True).returncode  # the assembler does look at the shape


@pytest.mark.parametrize("target, dtype, instructions", [("sm_90a", "fp8", 4), ("sm_89", "bf16", 128)])
def test_the_source_compiles_without_spills_to_as_many_instructions_as_a_panel_has(
    target, dtype, instructions, tmp_path
):
    nvcc, cuobjdump = programs.find("nvcc"), programs.find("cuobjdump")
    if nvcc is None or cuobjdump is None:
        pytest.skip("no nvcc here")
    made = tmp_path / "probe.cubin"
    made.write_bytes(probe.compiled(probe.variant(CARDS[target], dtype, True)))
    used = subprocess.run([cuobjdump, "-res-usage", str(made)], capture_output=True, text=True).stdout
    assert "tensor_ceiling" in used and re.search(r"STACK:0 .*LOCAL:0 ", used), used
    sass = subprocess.run([cuobjdump, "-sass", str(made)], capture_output=True, text=True).stdout
    assert len(re.findall(r"\b[HQ]G?MMA\.", sass)) == instructions
    assert len(re.findall(r"\bFFMA\b", sass)) >= probe.CHAINS  # the other arithmetic is there


def test_a_launch_does_the_problems_operations_rounded_up_to_whole_panels():
    flops = 2 * 4096 * 7168 * 4096
    what = probe.amount(flops, "fp8", 132, k_block=128, fp32_fma=1)
    per_instruction = 2 * 64 * 256 * 32  # m64n256k32; two warpgroups, four of them a panel
    assert what.flops == what.panels * 132 * 2 * 4 * per_instruction
    assert flops <= what.flops < flops + 132 * 8 * per_instruction
    elements = what.flops / 2 / 128  # of the result, once a block of k
    assert elements <= what.fmas * 132 * probe.OTHERS < elements + 132 * probe.OTHERS * probe.CHAINS
    assert what.exps == 0 and probe.amount(flops, "fp8", 132).fmas == 0
    assert probe.amount(1, "bf16", 132).panels == 1


@pytest.mark.parametrize("dtype", probe.WIDTHS)
@pytest.mark.parametrize("wgmma", [True, False])
def test_the_hosts_sums_see_each_element_once_and_a_missing_panel(dtype, wgmma):
    torch.manual_seed(0)
    rows, panels = probe.operands(dtype, "cpu"), 3 * probe.TILE + 5
    of_a = 128 if wgmma else 256
    product = rows[:of_a].double() @ rows[of_a:].double().T
    want = probe.expected(rows, panels, wgmma)
    assert want[:, 0].sum().item() == pytest.approx(5 * product.sum().item())
    kind = torch.int32 if dtype == "int8" else torch.float32
    blocks = want.to(kind).repeat(4, 1, 1)
    assert probe.check(blocks, want, dtype) <= 1e-6
    less = probe.expected(rows, panels - 1, wgmma)
    for wrong in (less, want.flip(0)):
        blocks[2] = wrong.to(kind)  # one block alone
        with pytest.raises(RuntimeError, match="own sums are wrong"):
            probe.check(blocks, want, dtype)
    blocks[2] = torch.nan if kind == torch.float32 else 0
    with pytest.raises(RuntimeError, match="own sums are wrong"):
        probe.check(blocks, want, dtype)


@pytest.mark.parametrize("dtype", probe.WIDTHS)
@pytest.mark.parametrize("wgmma", [True, False])
@pytest.mark.parametrize("panels", [17, 249, 1986])
def test_one_panel_more_or_less_is_noticed_in_each_dtype_though_a_single_warp_lacks_it(dtype, wgmma, panels):
    torch.manual_seed(0)
    rows = probe.whole_numbers(probe.operands(dtype, "cpu"))
    assert rows.dtype == probe.operands(dtype, "cpu").dtype and set(rows.double().unique().tolist()) == {-1, 0, 1}
    want = probe.expected(rows, panels, wgmma)
    blocks = want.to(torch.float32).repeat(4, 1, 1)
    probe.check_count(blocks, want, panels)
    for other in (panels - 1, panels + 1):
        blocks[2] = want
        blocks[2, 32:64] = probe.expected(rows, other, wgmma)[32:64].to(torch.float32)
        with pytest.raises(RuntimeError, match=f"did not multiply {panels} panels"):
            probe.check_count(blocks, want, panels)
        blocks[2, :, 0] = want[:, 0]  # a panel of an earlier tile: the sum over all tiles alone shows it
        with pytest.raises(RuntimeError, match="whole numbers are wrong"):
            probe.check_count(blocks, want, panels)
    blocks[2] = torch.nan
    with pytest.raises(RuntimeError, match="whole numbers are wrong"):
        probe.check_count(blocks, want, panels)


@pytest.mark.parametrize("dtype", probe.WIDTHS)
def test_sums_of_whole_numbers_fit_in_the_short_accumulator_of_fp8(dtype):
    values_of_k = probe.ROW_BYTES // probe.WIDTHS[dtype]
    assert values_of_k * probe.TILE <= 2**12  # all products 1: 13 bits below the leading one hold it, and each smaller


class Launch:
    """Stands in for a probe's kernel. us: of its launch."""

    def __init__(self, us: float):
        self.us = us

    def clock_mhz(self) -> float:
        return 1700.0


def timed_as(monkeypatch, flops: int, start_up: float, panel: float) -> TensorCeiling:
    """The ceiling where each launch takes `start_up` and so long a panel, in us; back to back a third of the start-up
    is hidden, but the host needs 5 us for a launch."""
    first, what = (probe.amount(n, "bf16", 132) for n in (1, flops))
    what = probe.amount(max(flops, probe.LEAST_PANELS * first.flops), "bf16", 132)
    call, start = (Launch(start_up + each.panels * panel) for each in (what, first))
    monkeypatch.setattr(probe.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(probe.time, "sleep", lambda _: None)
    monkeypatch.setattr(
        probe, "microseconds", lambda one, _: {"median": one.us, "p20": one.us - 0.1, "p80": one.us + 0.1, "n": 9}
    )
    monkeypatch.setattr(rates, "back_to_back", lambda one, _: 1e6 / max(5.0, one.us - start_up / 3))
    parts = probe.timed(call, start, what.panels, 100, 0.5, 2.0)
    known = {"dtype": "bf16", "instruction": "wgmma", "flops": flops, "done_flops": what.flops}
    report = {**known, "relative_error": 0.0, "other": None, **parts}
    return TensorCeiling.from_json(report, dict.fromkeys(PARTS))


@pytest.mark.parametrize("size", [512, 1024, 4096])
def test_the_floor_is_the_operations_alone_and_never_the_launch(size, monkeypatch):
    flops, start_up, panel = 2 * size**3, 8.44, 0.58
    ceiling = timed_as(monkeypatch, flops, start_up, panel)
    of_panel = probe.amount(1, "bf16", 132).flops
    work_us = flops / of_panel * panel
    assert ceiling.time_us("cold") == pytest.approx(work_us)
    assert ceiling.time_us("cold") < start_up + work_us  # what a kernel of the problem takes
    assert ceiling.cold.start_up_us == pytest.approx(start_up)
    assert ceiling.cold.p20_us < ceiling.cold.median_us < ceiling.cold.p80_us
    # 5 us of the host for the short launch: too much is taken off, so the floor is too low and never too high
    assert ceiling.time_us("burst") <= work_us * (1 + 1e-9) and ceiling.burst.start_up_us <= start_up
    assert ceiling.sustained.start_up_us == 0 and ceiling.time_us("sustained") > work_us


def test_a_launch_that_takes_no_longer_for_more_panels_is_no_measurement():
    assert probe.start_up_us(17.0, 1.0, 17) == 0 and probe.start_up_us(17.0, 0.5, 17) == 0
    with pytest.raises(RuntimeError, match="timed no operations"):
        probe.start_up_us(9.0, 9.0, 17)


def part(us: float, clock_mhz: float) -> dict:
    return {"median": us, "kernel_clock_mhz": clock_mhz}


def test_calls_in_a_row_that_wait_for_the_processor_are_measured_again():
    """Times and clocks of runs on H100s. The third shared its machine with compilers: 355 TFLOPS in place of 830."""
    usual, late = [part(496.6, 1455), part(495.6, 1519)], part(1160.0, 1620)
    cold = part(466.8, 1735)
    assert not any(probe.has_gaps(cold, one) for one in usual) and probe.has_gaps(part(456.8, 1664), late)
    assert not probe.has_gaps(cold, part(900.0, 900)) and not probe.has_gaps(part(20.0, 1700), part(40.0, 1700))
    measured = [late, usual[0]]
    assert probe.without_gaps(cold, lambda: measured.pop(0)) is usual[0]
    with pytest.raises(RuntimeError, match="the GPU waited for the processor"):
        probe.without_gaps(cold, lambda: late)


def test_what_the_probe_lacks_is_said_and_nothing_else_is_measured_instead():
    for capability, dtype in (((8, 0), "fp8"), ((7, 5), "fp16"), ((9, 0), "fp32"), ((10, 0), "bf16")):
        with pytest.raises(probe.NotCovered, match="not supported"):
            probe.variant(capability, dtype, False)
