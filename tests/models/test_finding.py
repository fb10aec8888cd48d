"""find_kernels.py: which module's operator launched a kernel, what the step could gain, and the advice.

fixtures/model_step/cpu_decoder.json.gz is a real capture on a CPU. GPU events and times in this file are made up.
"""

import json
from dataclasses import replace

import pytest
from conftest import BUNDLE, FIXTURES, call_tool, tool_json
from kernelopt.errors import UsageError
from kernelopt.hardware import roofline, wiki
from kernelopt.hardware.work import ModuleWork
from kernelopt.models import cutting, finding, floors, step_report, step_trace
from kernelopt.models.advice import advice
from kernelopt.models.groups import Floor, Group, OperatorShare, groups, pattern_of
from kernelopt.models.step_report import StepReport, WayTime
from kernelopt.models.step_trace import Place, StepTrace, Unit

CPU = FIXTURES / "model_step" / "cpu_decoder.json.gz"


@pytest.fixture(scope="module")
def recorded() -> StepReport:
    return finding.report(finding.Recording.load(CPU), "recorded")


def test_operators_of_a_recorded_cpu_step_are_grouped_by_module_and_labelled(recorded):
    by_name = {group.name: group for group in recorded.groups}
    mlp, own = by_name["layers.*.mlp (Mlp)"], by_name["layers.*.mlp, own operators (Mlp)"]
    assert mlp.paths == ("layers.0.mlp", "layers.1.mlp") and mlp.whole and mlp.kernels == 10
    assert {one.operator: one.calls for one in own.operators} == {"silu": 2, "mul": 2}
    (up,) = by_name["layers.*.mlp.up (Linear)"].operators
    assert (up.operator, up.shapes, up.dtype, up.calls) == ("linear", "2x7x32 64x32", "fp32", 2)
    assert mlp.floor is None and recorded.idle_pct is None
    text = list(finding.lines(recorded, everything=True))
    assert "on cpu-interpreter (recorded, torch 2.13.0+cpu)" in text[0] and "CPU %" in text[2]
    assert "calls" in text[2] and "kernels" not in text[2]
    assert text[-1].startswith(
        "1. there is no GPU here: these are times of the CPU's operators, and say nothing of a GPU"
    )
    assert text[-1].endswith("; cut_problem.py --group N cuts a part out all the same")


def test_the_backward_pass_belongs_to_the_modules_of_the_forward_pass(recorded):
    backward = {group.pattern: group for group in recorded.groups if group.backward and not group.whole}
    assert {one.operator for one in backward["layers.*.mlp"].operators} == {"silu_backward", "mul"}
    assert "mm" in {one.operator for one in backward["head"].operators}
    assert backward["layers.*.mlp"].floor is None


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def gpu_step() -> list[dict]:
    """One layer with a product and two element-wise operators, its backward pass on another thread, and a kernel that
    no operator of torch's launched."""
    mark = "kernelopt module layers.3.mlp (Mlp)"
    shapes = {"Input Dims": [[8, 16], [16, 16]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    return [
        event("user_annotation", "kernelopt step", 0, 1000),
        event("user_annotation", mark, 10, 100),
        event("cpu_op", "aten::linear", 20, 20, **shapes),
        event("cpu_op", "aten::mm", 22, 10, **{"Sequence number": 7}, **shapes),
        event("cuda_runtime", "cudaLaunchKernel", 25, 2, correlation=1),
        event("cpu_op", "aten::silu", 50, 10, **{"Sequence number": 8}),
        event("cuda_runtime", "cudaLaunchKernel", 52, 2, correlation=2),
        event("cuda_driver", "cuLaunchKernel", 70, 2, correlation=3),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 200, 50, 2, **{"Sequence number": 7}),
        event("cpu_op", "aten::mm", 210, 10, 2),
        event("cuda_runtime", "cudaLaunchKernel", 212, 2, 2, correlation=4),
        event("kernel", "gemm", 30, 40, 7, correlation=1),
        event("kernel", "elementwise", 70, 5, 7, correlation=2),
        event("kernel", "own_triton", 80, 6, 7, correlation=3),
        event("kernel", "gemm", 300, 30, 7, correlation=4),
        event("gpu_memset", "Memset", 400, 1, 7, correlation=99),
    ]


def test_a_kernel_belongs_to_the_operator_and_the_module_that_launched_it():
    trace = step_trace.read(gpu_step())
    assert trace.on_gpu and [unit.name for unit in trace.units] == [
        "gemm",
        "elementwise",
        "own_triton",
        "gemm",
        "Memset",
    ]
    product, silu, own, back, memset = (unit.place for unit in trace.units)
    assert (product.module, product.operator, product.shapes, product.dtype) == (
        "layers.3.mlp",
        "linear",
        "8x16 16x16",
        "bf16",
    )
    assert (silu.operator, own.module, own.operator) == ("silu", "layers.3.mlp", "")
    assert (back.module, back.operator, back.backward) == ("layers.3.mlp", "mm", True)
    assert memset == Place()
    shares = {(one.pattern, one.backward): one.operators for one in groups(trace, [], lambda _: None)}
    assert [one.operator for one in shares["layers.*.mlp", False]] == ["linear", "own_triton", "silu"]


def test_the_backward_pass_of_a_function_of_ones_own_belongs_to_its_module():
    """torch.autograd.Function, and an operator of torch.library: no operator of torch's own stands in the graph."""
    mark, back = "kernelopt module layers.3.mlp (Mlp)", "autograd::engine::evaluate_function: OwnBackward"
    (multiplied,) = step_trace.read(
        [
            event("user_annotation", mark, 10, 100),
            event("cpu_op", "Own", 20, 5, **{"Sequence number": 7}),
            event("cpu_op", back, 200, 50, 2, **{"Sequence number": 7}),
            event("cpu_op", "OwnBackward", 202, 40, 2, **{"Sequence number": 7}),
            event("cpu_op", "aten::mul", 210, 10, 2),
        ]
    ).units
    assert (multiplied.place.module, multiplied.place.operator, multiplied.place.backward) == (
        "layers.3.mlp",
        "mul",
        True,
    )


def test_the_host_is_busy_with_an_operator_until_the_next_one_of_its_thread_begins():
    trace = step_trace.read(gpu_step())
    assert [(one.name, one.us) for one in trace.host] == [("aten::linear", 30), ("aten::silu", 10), ("aten::mm", 10)]
    forward, backward = groups(trace, [], lambda _: None)[:2]
    assert (forward.host_pct, backward.host_pct) == (80.0, 20.0)


def test_numbers_in_a_path_stand_for_repeated_layers():
    assert pattern_of("layers.12.mlp.up") == "layers.*.mlp.up" and pattern_of("block3.conv2d") == "block3.conv2d"
    assert pattern_of("0") == "*" and pattern_of("") == ""


def unit(path: str, kind: str) -> Unit:
    return Unit("k", 0.0, 1.0, Place(path, kind))


def traced(units: list[Unit], called: frozenset[str] = frozenset()) -> StepTrace:
    return StepTrace(tuple(units), True, (), called)


def test_modules_of_another_class_or_size_at_a_repeated_place_are_groups_of_their_own():
    paths = {f"stages.{stage}.{number}": 10 * (stage + 1) for stage in (0, 1) for number in (1, 2, 3)}
    units = [unit(path, "Reduce" if path.endswith("1") else "Block") for path in paths]
    units += [unit(f"{path}.conv", "Conv") for path in paths if not path.endswith("1")]
    counted = [replace(work(path, 0, state, 0), whole=True) for path, state in paths.items()]
    counted += [replace(work(f"{path}.conv", 0, state, 0), whole=True) for path, state in paths.items()]
    names = {
        group.pattern: group.paths
        for group in groups(traced(units, frozenset(paths)), counted, lambda _: None)
        if not group.whole
    }
    assert names["stages.1.*.conv"] == ("stages.1.2.conv", "stages.1.3.conv")
    assert {"stages.0.1", "stages.1.1", "stages.0.*", "stages.1.*", "stages.0.*.conv"} <= names.keys()


def test_modules_that_take_turns_stay_one_group():
    units = [unit(f"layers.{number}", "Local" if number % 2 else "Global") for number in range(4)]
    assert [group.pattern for group in groups(traced(units), [], lambda _: None)] == ["layers.*"]


def test_a_list_of_modules_is_no_group_and_the_model_has_modules_inside():
    trace = step_trace.read(
        [event("user_annotation", f"kernelopt module {path} (Moe)", 0, 9) for path in ("a", "a.b.0")]
    )
    units = [unit("", ""), unit("a.b.0", "Expert"), unit("a.b.1", "Expert")]
    made = {group.pattern: group for group in groups(traced(units, trace.called), [], lambda _: None)}
    assert made.keys() == {"", "a", "a.b.*"} and made["a"].whole
    assert made[""].has_submodules and made[""].name == "the model itself"
    (alone,) = groups(traced([unit("", "")]), [], lambda _: None)
    assert not alone.has_submodules


def test_a_launch_bound_stretch_is_where_the_gpu_waits_longer_than_it_works():
    place = Place("layers.0.norm", "Norm")
    waiting = [Unit("k", 10.0 * at, 2.0, place) for at in range(12)]
    busy = [Unit("k", 113.0 + 10 * at, 9.0, Place()) for at in range(12)]
    (stretch,) = step_report.stretches([*waiting, *busy])
    assert (stretch.first, stretch.kernels, stretch.us) == ("layers.*.norm", 11, 102.0)
    assert stretch.idle_pct == pytest.approx(100 * 80 / 102)
    assert step_report.stretches(busy) == []


H200 = wiki.product("H200")


def work(path: str, flops: int, state: int, other: int, dtype: str = "bf16") -> ModuleWork:
    return ModuleWork(path, False, flops, state, other // 2, other // 2, dtype)


def test_the_floor_counts_what_the_l2_cannot_hold():
    roof = roofline.roof(H200, "bf16")
    gbps, l2 = roof.bandwidth.value, roof.l2_bytes
    many = 10 * int(l2)
    large = floors.floor_on(H200, many)([work("a", 0, many, many)])
    assert large.us == pytest.approx(2 * many / gbps / 1e3) and large.bound == "memory"
    small = floors.floor_on(H200, many)([work("a", 0, many, 1000)])
    assert small.us == pytest.approx(many / gbps / 1e3)  # the activations may still be in the L2
    assert floors.floor_on(H200, 1000)([work("a", 0, 1000, 1000)]).us == 0
    products = floors.floor_on(H200, 1000)([work("a", 10**12, 1000, 1000)] * 2)
    assert products.us == pytest.approx(2e12 / roof.compute.value / 1e6) and products.bound == "compute"
    assert floors.floor_on(H200, 1000)([work("a", 10**12, 1000, 1000, "int")]) is None


def made_group(number: int, pattern: str, saved_us: float, operator: str, **changes) -> Group:
    share = OperatorShare(operator, "", "bf16", 1, 1, 2 * saved_us)
    fields = {"kind": "M", "whole": False, "has_submodules": False, "backward": False, "kernels": 1, "host_pct": 0.0}
    floor = Floor(saved_us, "memory", changes.pop("library_rate", False))
    return Group(
        number=number,
        pattern=pattern,
        paths=(pattern.replace("*", "0"),),
        us=2 * saved_us,
        share_pct=10.0,
        operators=(share,),
        floor=floor,
        saved_us=saved_us,
        **{**fields, **changes},
    )


def made_report(groups: list[Group], ways: dict[str, float], busy_us: float = 950.0) -> StepReport:
    """A step of 1,000 us; speed-ups by way."""
    times = tuple(
        WayTime(name, 1000 / one, one, (one, one), "FASTER" if one > 1.01 else "EQUAL", None)
        for name, one in ways.items()
    )
    return StepReport(
        model="model.py",
        workload="default",
        training=False,
        device="NVIDIA H200",
        torch="2.13",
        source="measured",
        on_gpu=True,
        parameters=1,
        step_us=1000.0,
        busy_us=busy_us,
        kernels=10,
        card="H200",
        stretches=(),
        ways=times,
        groups=tuple(groups),
    )


ATTENTION = made_group(1, "layers.*.attention", 110.0, "scaled_dot_product_attention")
NORM = made_group(2, "layers.*.norm", 70.0, "mean")
TINY = made_group(3, "head", 10.0, "linear")


def test_the_gain_is_of_the_whole_step():
    """Amdahl: 110 us of a step of 1,000 us are 11 %."""
    report = made_report([ATTENTION], {})
    assert report.saved_pct(ATTENTION) == pytest.approx(11.0) and report.idle_pct == pytest.approx(5.0)
    assert report.to_json()["groups"][0]["share_of_step_pct"] == pytest.approx(22.0)
    assert advice(report) == ["this is worth a kernel: group 1, layers.*.attention (M), at most 11 % of the eager step"]


def test_no_group_can_save_more_of_a_step_than_what_its_floor_leaves():
    """A way that is faster than what an eager group takes has cut that group down already."""
    report = made_report([ATTENTION], {"compiled": 1000 / 120, "tuned": 2000 / ATTENTION.floor.us})
    compiled, tuned = report.ways
    assert ATTENTION.saved_us == pytest.approx(110.0)
    assert report.saved_pct(ATTENTION, compiled) == pytest.approx(100 * (120.0 - ATTENTION.floor.us) / 120.0)
    assert report.saved_pct(ATTENTION, tuned) == 0.0


def test_a_group_also_saves_what_the_gpu_waits_for_its_launches():
    """A step of 1,000 us, in which the GPU waits for 700: a scan that launches all but nothing of it saved more."""
    scan = replace(ATTENTION, host_pct=60.0, kernels=5)
    report = made_report([scan, TINY], {"graph": 2.5, "compiled": 2.0}, busy_us=300.0)
    assert report.saved_us(scan) == pytest.approx(110 + 600)
    assert report.saved_us(replace(scan, host_pct=90.0)) == pytest.approx(110 + 700)  # no more than it waits
    assert report.saved_us(TINY) == pytest.approx(10) and report.saved_us(replace(scan, saved_us=None)) is None
    graph, compiled = report.ways
    assert report.saved_pct(scan, graph) == pytest.approx(100 * (110 + 100 * 5 / 10) / 400)
    assert report.saved_pct(scan, compiled) == pytest.approx(100 * 110 / 500)
    assert report.to_json()["groups"][0]["saved_pct"] == pytest.approx(71.0)


def test_compile_comes_first_and_what_it_fuses_is_no_reason_for_a_kernel():
    said = advice(made_report([ATTENTION, NORM, TINY], {"compiled": 1.8, "tuned": 2.0}))
    assert said == [
        'first torch.compile(mode="max-autotune"): 2.00x (torch.compile by default gives 1.80x)',
        "torch.compile already fuses operators like those of group 2, layers.*.norm (M); compare with the compiled step "
        "before you write a kernel for them",
        "this is worth a kernel: group 1, layers.*.attention (M), at most 22 % of the step with "
        'torch.compile(mode="max-autotune") (11 % of the eager step)',
    ]


def test_a_loop_of_many_operators_is_worth_a_kernel_beside_compile():
    scan = made_group(1, "layers.*.scan", 110.0, "mul")
    many = replace(scan, operators=(replace(scan.operators[0], calls=4 * 256),))
    assert "already fuses" in advice(made_report([scan], {"compiled": 1.5}))[1]
    assert "worth a kernel: group 1, layers.*.scan" in advice(made_report([many], {"compiled": 1.5}))[1]


def test_where_compile_is_enough_no_kernel_is_written():
    said = advice(made_report([TINY], {"compiled": 1.5, "graph": 1.1}))
    assert said[0] == "first torch.compile: 1.50x"
    assert said[-1] == ("no kernel is worth writing: no group could save 3 % of the step; torch.compile is enough")
    assert "near what the card gives" in advice(made_report([TINY], {"compiled": 1.005}))[-1]


def test_what_has_no_floor_is_unknown_and_no_reason_to_stop():
    """The work of a model that asks for the contents of tensors is not counted, and no backward pass has a floor."""
    small = replace(TINY, us=10.0)
    bare = [replace(one, floor=None, saved_us=None) for one in (ATTENTION, NORM, small)]
    said = advice(made_report(bare, {"compiled": 1.8}))
    assert said == [
        "first torch.compile: 1.80x",
        "what a kernel could save is UNKNOWN, for want of a floor, of group 1, layers.*.attention (M); cut_problem.py "
        "--group N cuts one out, and Step 0 counts its floor",
    ]
    backward = replace(bare[0], backward=True)
    said = advice(made_report([small, backward], {"compiled": 1.8}))
    assert said[1] == (
        "what a kernel could save is UNKNOWN of group 1, layers.*.attention, backward (M): a backward pass has no "
        "floor; docs/models.md, 'Training', says what to do"
    )
    assert len(said) == 2 and "group 1" not in advice(made_report([replace(backward, us=20.0)], {}))[0]


def test_a_gpu_that_waits_calls_for_graphs():
    said = advice(made_report([NORM], {"compiled": 1.2, "graph": 2.5}, busy_us=300.0))
    assert said[0].startswith("first a CUDA graph of the eager step: 2.50x")
    assert said[1].startswith("launch-bound: in 70 % of the eager step the GPU waits for the host")
    assert said[1].endswith("a CUDA graph of the eager step gives 2.50x")
    assert said[2].startswith("torch.compile already fuses operators like those of group 2")
    said = advice(made_report([NORM], {"compiled": 0.9, "graph": 2.5}, busy_us=300.0))
    assert "worth a kernel: group 2" in said[-1]  # a graph fuses nothing
    assert said[-1].endswith("at most 20 % of the step with a CUDA graph of the eager step (7 % of the eager step)")


def test_what_is_small_beside_an_idle_host_counts_beside_the_graph():
    """10 us are 1 % of the eager step, and 4 % of a step that takes 250 us."""
    said = advice(made_report([TINY], {"graph": 4.0}, busy_us=240.0))
    assert "worth a kernel: group 3, head (M), at most 4 %" in said[-1]


def test_of_groups_that_share_operators_the_larger_saving_is_named():
    whole = made_group(4, "layers.*.mlp", 90.0, "linear", whole=True, has_submodules=True)
    part = made_group(5, "layers.*.mlp.up", 60.0, "linear", library_rate=True)
    said = advice(made_report([whole, part], {}))
    assert said == ["this is worth a kernel: group 4, layers.*.mlp (M), at most 9 % of the eager step"]
    said = advice(made_report([replace(whole, floor=replace(whole.floor, library_rate=True))], {}))
    assert said[-1] == "a floor that is a library's rate bounds no gain; measure_ceiling.py measures one for a problem"


def test_a_cut_takes_its_group_from_the_recorded_step_or_from_its_list(tmp_path):
    recorded = FIXTURES / "model_step" / "h200_decode.json.gz"
    groups = finding.listed(recorded)
    (tmp_path / "groups.json").write_text(json.dumps(groups))
    parts = [
        cutting.part_of_group(BUNDLE / "model.py", finding.listed(path), 1)
        for path in (recorded, tmp_path / "groups.json")
    ]
    assert parts[0] == parts[1] and parts[0].module == "layers.2.attention"
    (tmp_path / "step.json.gz").write_bytes(b"none")
    with pytest.raises(UsageError, match="is no recorded step"):
        finding.listed(tmp_path / "step.json.gz")


def test_of_repeated_modules_the_one_in_the_middle_is_cut():
    """The first layer gets embeddings, and zeros for what other layers add up."""
    listed = made_report([replace(ATTENTION, paths=("a.0", "a.1", "a.2"))], {}).to_json()
    assert cutting.part_of_group(BUNDLE / "model.py", listed, 1).module == "a.1"


def test_a_group_becomes_a_cut_with_its_promise():
    own = made_group(2, "layers.*.mlp", 30.0, "silu", has_submodules=True)
    rest = made_group(3, "head", 20.0, "mm", backward=True), made_group(4, "", 9.0, "add", has_submodules=True)
    listed = made_report([ATTENTION, own, *rest], {}).to_json()
    part = cutting.part_of_group(BUNDLE / "model.py", listed, 1)
    assert part.module == "layers.0.attention" and part.about == {
        "share_pct": 22.0,
        "at_most_pct": 11.0,
        "saved_us": 110.0,
        "floor_us": 110.0,
    }
    chain = cutting.part_of_group(BUNDLE / "model.py", listed, 2, ("silu", "mul"))
    assert (chain.module, chain.between) == ("layers.0.mlp", ("silu", "mul")) and chain.about["at_most_pct"] == 3.0
    for number, message in (
        (2, "own operators of a module with others inside"),
        (3, "--module head cuts that, and its kernel leaves the backward pass to autograd"),
        (4, "cut it whole \\(leave --group out\\), or a chain: add --between A B \\(--operators lists them\\)"),
        (9, "no group 9"),
    ):
        with pytest.raises(UsageError, match=message):
            cutting.part_of_group(BUNDLE / "model.py", listed, number)
    with pytest.raises(UsageError, match="no output of find_kernels"):
        cutting.part_of_group(BUNDLE / "model.py", {"groups": 3}, 1)


def test_a_cut_promises_nothing_from_a_profile_of_the_cpu():
    """A profile of the CPU's operators says nothing of a GPU. One noisy step made a share of 384 % of it."""
    listed = replace(made_report([ATTENTION], {}), on_gpu=False).to_json()
    assert cutting.part_of_group(BUNDLE / "model.py", listed, 1).about == {}


def test_a_group_takes_no_more_than_the_step():
    """The profiler's step may be slower than the one that is timed; kernels of several streams add up."""
    report = made_report([replace(ATTENTION, us=1100.0)], {})
    assert report.step_us == 1000.0 and report.to_json()["groups"][0]["share_of_step_pct"] == 100.0


def test_a_step_is_profiled_kept_and_read_again(tmp_path, run_here):
    kept, page = tmp_path / "step.json.gz", tmp_path / "step.html"
    command = [BUNDLE / "tests" / "models" / "decoder.py", "--device", "cpu-interpreter", "--save", kept]
    result = tool_json("find_kernels.py", *command, run=run_here)
    assert result["device"] == "cpu-interpreter" and result["source"] == "measured" and not result["on_gpu"]
    assert {"layers.*.mlp", "layers.*.attention.qkv", "head"} <= {group["pattern"] for group in result["groups"]}
    again = tool_json("find_kernels.py", "--recorded", kept, "--page", page, run=run_here)
    assert again["source"] == "recorded" and again["groups"] == result["groups"]
    assert "A step of decoder.py" in page.read_text() and "CPU operators" in page.read_text()
    (tmp_path / "other.json.gz").write_bytes(b"x")
    assert run_here("find_kernels.py", "--recorded", tmp_path / "other.json.gz").returncode == 2
    assert run_here("find_kernels.py").returncode == 2


def on_h200(name: str) -> StepReport:
    return finding.report(finding.Recording.load(FIXTURES / "model_step" / f"h200_{name}.json.gz"), "recorded")


def test_a_norm_that_did_not_pay_on_a_gpu_is_no_advice():
    """docs/model-results.md: in place of group 6 of this step a kernel made the compiled model slower."""
    report = on_h200("prefill")
    assert (report.kernels, round(report.idle_pct)) == (203, 61)
    assert report.group(6).name == "layers.*.before (Norm)" and round(report.saved_pct(report.group(6)), 1) == 14.9
    said = advice(report)
    assert "torch.compile already fuses" in said[2] and "group 6, layers.*.before (Norm)" in said[2]
    assert said[3].startswith("this is worth a kernel: group 1, layers.*.attention (Attention), at most 26 % of the")


def test_attention_over_a_cache_is_worth_a_kernel_beside_a_graph():
    said = advice(on_h200("decode"))
    assert said[0] == "first a CUDA graph of the eager step: 4.60x (torch.compile by default gives 2.51x)"
    assert "group 1, layers.*.attention (Attention)" in said[-1]
    assert "at most 60 and 7 % of the step with a CUDA graph" in said[-1]


@pytest.mark.parametrize("beside", [("model.py",), ("--write", "model.py")])
def test_a_recorded_step_goes_with_no_model(beside):
    done = call_tool("find_kernels.py", *beside, "--recorded", CPU)
    assert done.returncode == 2 and "--recorded takes the place of MODEL.py and --write" in done.stderr
