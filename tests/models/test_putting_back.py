"""put_back.py: an accepted kernel in the model again. The times here are made up; the checks are real, on the CPU."""

import json
from dataclasses import replace

import pytest
from conftest import BUNDLE, copy_of, run_script, task
from kernelopt.model_types import ModelCheck
from kernelopt.models import putting_back
from kernelopt.session import creation, put_backs, workspace
from kernelopt.session.put_backs import Promise, PutBack
from kernelopt.worker import model_cut
from kernelopt.worker.context import Context

DECODER = BUNDLE / "tests" / "models" / "decoder.py"
ON_CPU = ("--device", "cpu-interpreter")
KERNEL = """
import torch, torch.nn as nn, triton, triton.language as tl

@triton.jit
def norm(x, weight, out, width, SIZE: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, SIZE)
    values = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + EPSILON)
    scaled = values * scale * tl.load(weight + at, mask=at < width, other=0.0)
    tl.store(out + row * width + at, scaled.to(out.dtype.element_ty), mask=at < width)

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(32))
    def forward(self, x):
        x = x.contiguous()
        out = torch.empty_like(x)
        norm[(x.numel() // x.shape[-1],)](x, self.weight, out, x.shape[-1], triton.next_power_of_2(x.shape[-1]))
        return out
"""


@pytest.fixture(scope="module")
def cut_out(tmp_path_factory) -> workspace.Workspace:
    """A workspace of the decoder's norm, with a Triton kernel that nobody judged."""
    folder = tmp_path_factory.mktemp("norm")
    arguments = (str(DECODER), "layers.0.before", None, None, 1, str(folder), None, None)
    report = model_cut.cut(Context("cpu", {}, None), *arguments, {"share_pct": 20.0, "at_most_pct": 12.0})
    made = creation.create(folder, "norm", type(folder)(report.path), None, task())
    made.kernel.write_text(KERNEL.replace("EPSILON", "1e-6"))
    return made


@pytest.mark.parametrize(("step_us", "most"), [(1000.0, 12.0), (500.0, 24.0), (160.0, 50.0), (60.0, 0.0)])
def test_a_promise_for_another_way_leaves_the_floor(step_us, most):
    """An eager step of 1,000 us, 200 us of the part, floor 80 us."""
    assert Promise(20.0, 12.0, 120.0).most_pct(step_us) == pytest.approx(most)
    assert Promise(20.0, 12.0, 120.0, 80.0).most_pct(step_us) == pytest.approx(most)


def test_a_promise_counts_the_waiting_for_launches():
    """benchmarks/models: a scan took 17 % of the GPU's time in a launch-bound step, and its kernel saved 95 %."""
    assert Promise(17.2, 99.0, 30_600.0, 0.4).most_pct(21_444.0) > 94.9


@pytest.mark.timeout(300)  # torch.compile, in a process of its own
def test_a_triton_kernel_stands_in_for_the_modules_and_the_report_says_so(cut_out, tmp_path, run_here):
    made = copy_of(cut_out.root, tmp_path)
    command = [made.root, DECODER, "--at", "layers.*.before", "--candidate", "--generate", 3, *ON_CPU]
    done = run_here("put_back.py", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *lines = done.stdout.splitlines()
    assert first == (
        "kernel.py, which is not accepted, in place of 2 modules at layers.*.before, called 2 times a step of workload "
        "default, on cpu-interpreter"
    )
    checks = [line.removeprefix("ok: ").split(":")[0] for line in lines[:6]]
    others = ["torch.library.opcheck", "greedy tokens", "torch.compile, dynamic sizes"]
    assert checks == [*WORKLOADS, "each call by itself", *others], done.stdout
    assert lines[2].split(": ")[2].startswith("4 calls in 2 workloads, off by")
    assert lines[6] == "nothing was timed: there is no GPU here"
    names = {path.name for path in put_backs.folder_of(made).iterdir()}
    assert names == {"kernel.py", "reference.py", "model_swap.py", "result.json"}
    page = run_here("render_report.py", made.root, "--markdown").stdout
    assert "## In the model" in page and "| greedy tokens | passed | 3 of 3 equal |" in page


WORKLOADS = ["outputs, workload default", "outputs, workload long"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--where", "tokens > 1"], "names 'tokens', and the module's arguments are: x"),
        (["--where", "x.shape[1] == 7", "--workload", "long"], "workload 'long' makes no call that fits"),
        (["--at", "layer"], "the model has no module"),
    ],
)
def test_a_wrong_call_is_told_so(cut_out, options, said, run_here):
    done = run_here("put_back.py", cut_out.root, DECODER, "--candidate", "--at", "layers.*.before", *options, *ON_CPU)
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_a_kernel_that_makes_the_model_wrong_is_not_put_back(cut_out, tmp_path, run_here):
    made = copy_of(cut_out.root, tmp_path)
    made.kernel.write_text(KERNEL.replace("EPSILON", "0.5"))
    done = run_here("put_back.py", made.root, DECODER, "--candidate", *ON_CPU)
    assert done.returncode == 1
    wrong, last = done.stdout.splitlines()[1], done.stdout.splitlines()[-1]
    assert wrong.startswith("WRONG: outputs, workload default: ") and "is off by more than 0.0001" in wrong
    assert last == "the model is not right with this kernel, so nothing was timed"
    assert [path.name for path in put_backs.folder_of(made).iterdir()] == ["result.json"]


def test_only_an_accepted_kernel_is_put_back_without_asking(cut_out, ready, run_here):
    done = run_here("put_back.py", cut_out.root, DECODER, *ON_CPU)
    assert done.returncode == 1 and "is accepted yet; --candidate tries kernel.py" in done.stderr
    assert putting_back.kernel_of(ready, candidate=False).version == "v0"
    done = run_here("put_back.py", ready.root, DECODER, *ON_CPU)
    assert done.returncode == 2 and "say where the kernel goes: --at PATH" in done.stderr


def timed(before: float, after: float) -> dict:
    """Rounds of a step, two calls each, that are off by a thousandth now and then."""
    rounds = [1 + 0.001 * (number % 3) for number in range(30)]
    return {
        "before_us": [[before * one, before * one] for one in rounds],
        "after_us": [[after * one, after * one] for one in rounds],
        "failed": None,
        "before_bytes": 3 << 20,
        "after_bytes": 2 << 20,
    }


def result(**changes) -> PutBack:
    made = PutBack(
        timestamp="2026-11-23T00:00:00Z",
        model="model.py",
        at="layers.*.mlp",
        where=None,
        paths=("layers.0.mlp", "layers.1.mlp"),
        workload="default",
        left_out=(),
        calls=2,
        version="v3",
        kernel_sha256="0" * 64,
        device="NVIDIA H200",
        training=False,
        checks=(ModelCheck("outputs, workload default", True, "fine"), ModelCheck("opcheck", None, "unknown")),
        ways=(
            putting_back.way_of("eager", timed(1000.0, 900.0)),
            putting_back.way_of("graph", {**timed(1, 1), "failed": "the original fails: no"}),
        ),
        alone=putting_back.way_of(put_backs.ALONE, timed(20.0, 10.0)),
        promise=Promise(20.0, 12.0, 120.12),
    )
    return replace(made, **changes)


def test_the_promise_is_held_against_what_came_of_it(cut_out):
    lines = list(putting_back.lines(result(), cut_out))
    assert (
        "eager: 1.001 ms before, 0.901 ms after, FASTER 1.111x (95 % interval 1.111 to 1.111); memory 3 MiB" in lines[3]
    )
    assert lines[4] == "graph: not timed: the original fails: no"
    assert lines[6:9] == [
        "promised: at most 12.0 % of the eager step, of 20.0 % that the part took",
        "expected of the kernel's own 2.000x: a step 1.111x as fast",
        "came of it, eager: 10.0 % of the step, where at most 12.0 % could come",
    ]
    assert lines[9].startswith("it pays: a step takes at best 1.001 ms without the kernel (eager), 0.901 ms with it")


def test_what_is_left_to_the_original_is_said(cut_out):
    given = result(at="mlp", where="x.shape[1] == 1", workload="decode", left_out=("prefill",))
    lines = list(putting_back.lines(given, cut_out))
    assert "called 2 times a step of workload decode" in lines[0]
    assert lines[1:3] == [
        "the kernel takes the calls with x.shape[1] == 1; the original takes the others",
        "left out, with the original in all calls: workload prefill",
    ]
    assert lines[-1].endswith("model_swap.py, into(model, 'mlp', where='x.shape[1] == 1')")


@pytest.mark.parametrize(
    ("passed", "where", "why", "hint"),
    [
        ((True, False), None, "50 % of output 0 is off", True),
        ((False, True), None, "50 % of output 0 is off", False),  # in the workload that it was cut from
        ((True, False), "x.shape[1] == 1", "50 % of output 0 is off", False),
        ((True, False), None, "OtherCall: cut out of …; put_back.py --where 'x.shape[2] == 4' leaves others", False),
    ],
)
def test_some_calls_alone_are_proposed_where_the_kernel_is_right_in_the_step_that_it_is_for(
    cut_out, passed, where, why, hint
):
    names = ("decode", "prefill")
    checks = tuple(ModelCheck(f"outputs, workload {name}", one, why) for name, one in zip(names, passed, strict=True))
    lines = list(putting_back.lines(result(workload="decode", where=where, checks=checks, ways=()), cut_out))
    assert any("--where 'x.shape[1] == 1', say" in line for line in lines) is hint


def ways(**times: tuple[float, float]) -> tuple:
    return tuple(putting_back.way_of(name, timed(*both)) for name, both in times.items())


def test_a_kernel_that_is_faster_only_in_a_slower_way_of_running_does_not_pay(cut_out):
    """As measured on an H200: torch.compile without the kernel was faster than a graph with it."""
    beaten = result(ways=ways(eager=(4083.0, 4642.0), compiled=(1396.0, 1858.0), graph=(1555.0, 1427.0)))
    assert not putting_back.is_good(beaten)
    lines = list(putting_back.lines(beaten, cut_out))
    assert any(line.startswith("torch.compile fuses these operators with their neighbours") for line in lines)
    assert any(
        line.startswith(
            "it does not pay: a step takes at best 1.397 ms without the kernel (compiled), 1.428 ms with it"
        )
        for line in lines
    )
    assert putting_back.is_good(result(ways=ways(compiled=(1396.0, 1858.0), graph=(1555.0, 1327.0))))


def test_a_kernel_that_breaks_a_way_of_running_does_not_pay_yet(cut_out):
    broken = putting_back.way_of("compiled", {**timed(1, 1), "failed": "the model with the kernel fails: no"})
    beside = result(ways=(*ways(eager=(1000.0, 900.0)), broken))
    assert not putting_back.is_good(beside)
    assert "it does not pay as it is: compiled works without the kernel alone; mend that first" in list(
        putting_back.lines(beside, cut_out)
    )


def test_the_exit_code_is_1_unless_some_way_of_running_is_faster():
    assert putting_back.is_good(result())
    slower = (putting_back.way_of("eager", timed(900.0, 1000.0)),)
    assert not putting_back.is_good(result(ways=slower))
    assert not putting_back.is_good(result(checks=(ModelCheck("outputs", False, "off"),)))
    assert putting_back.is_good(result(ways=()))


def test_a_result_is_read_again_and_a_broken_one_is_a_gap_of_the_report(ready):
    written = result(where="x.shape[1] == 1", left_out=("prefill",))
    put_backs.write(ready, written)
    assert put_backs.recorded(ready) == written
    page = run_script(BUNDLE / "tools" / "render_report.py", ready.root, "--markdown").stdout
    row = "| eager | 1.001 ms | 0.901 ms | 1.111x (1.111 to 1.111) | FASTER | 3, then 2 |"
    assert row in page and "2.000x, so a step 1.111x as fast" in page
    assert "1.001 ms (eager) without the kernel, 0.901 ms (eager) with it: 1.111x, so it pays" in page
    assert "the original takes all of workload prefill." in page
    path = put_backs.folder_of(ready) / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "ways": 3}))
    page = run_script(BUNDLE / "tools" / "render_report.py", ready.root, "--markdown").stdout
    assert "put_back/result.json is no result of put_back.py" in page and "## In the model" not in page
