"""Correctness in isolation: every way to be wrong lands in its status. torch on the CPU stands in for kernels here;
test_gpu.py runs real ones."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import BUNDLE, REFERENCE, kernel_text, run_tool, tool_json
from kernelopt import bundle
from kernelopt.device import pipes
from kernelopt.device.beside import Beside
from kernelopt.device.outcomes import Fault, Outcome
from kernelopt.errors import EnvironmentLacks
from kernelopt.hardware.card import Card
from kernelopt.measure import cases, correctness, failures, memcheck, verify
from kernelopt.measure.correctness import CaseReport
from kernelopt.measure.runs import reports_of
from kernelopt.measure.verdict import ProcessEnd, Verdict
from kernelopt.session.subject import KernelUnderTest
from kernelopt.statuses import Status
from written_tasks import judge

ON_CPU = ("--device", "cpu-interpreter")

WRONG = {
    "WRONG_VALUES": "return torch.clamp(x * self.weight, min=0) * self.scale * 1.01",
    "NONFINITE": "y = torch.clamp(x * self.weight, min=0) * self.scale\ny[0, 0] = float('nan')\nreturn y",
    "WRONG_SHAPE": "return (torch.clamp(x * self.weight, min=0) * self.scale)[:-1]",
    "WRONG_DTYPE": "return (torch.clamp(x * self.weight, min=0) * self.scale).double()",
    "WRONG_STRIDE": "return (torch.clamp(x * self.weight, min=0) * self.scale).t().contiguous().t()",
    "INPUT_MUTATED": "y = torch.clamp(x * self.weight, min=0) * self.scale\nx.zero_()\nreturn y",
    "ALIASED_OUTPUT": "y = torch.clamp(x * self.weight, min=0) * self.scale\n"
    "if not hasattr(self, 'y') or self.y.shape != y.shape: self.y = y\nreturn self.y.copy_(y)",
    "RUNTIME_ERROR": "raise ValueError('no')",
    "ILLEGAL_ACCESS": "import ctypes\nctypes.string_at(0)",
    "IMPORT_ERROR": None,
}


@pytest.mark.parametrize("status", WRONG)
def test_a_wrong_kernel_lands_in_its_status(interpreter, problem, status):
    body = WRONG[status]
    problem["kernel"].write_text(kernel_text(body) if body else "import no_such_module")
    found = judged_at_own_sizes(interpreter, problem)
    assert found["status"] == status, found["summary"]
    assert status in found["summary"]


def judged(interpreter, files: dict[str, Path], workloads: list[str] | None = None, **options) -> dict:
    """The verification of a kernel, in a sandbox that many tests share; two seeds. As verify_kernel.py --json prints
    it."""
    return verify.verify(interpreter, KernelUnderTest(**files, **options), workloads, seeds=2).to_json()


def judged_at_own_sizes(*arguments, **options) -> dict:
    """That of a kernel or reference that fails there already."""
    return judged(*arguments, only_these_shapes=True, **options)


@pytest.mark.parametrize(
    ("body", "workloads", "hint"),
    [
        ("x = x.as_strided(x.shape, (16, 1))\n{right}", None, "it is right on contiguous inputs"),
        ("y = {value}\ny[8:] += 1\nreturn y", ["default"], "it is right at the task's own sizes"),
        (
            "{right} + (x.shape[0] == 33)",
            None,
            "it is right on default: look for what tall alone has, inputs of [33, 16]",
        ),
        ("return x.abs() * 0 + {value} + (x.max() <= 0)", None, "it is right on the task's own values"),
        ("{right} * 1.01", None, "compare masks, reduction order"),
    ],
)
def test_a_hint_says_where_a_wrong_kernel_is_right(interpreter, problem, body, workloads, hint):
    value = "torch.clamp(x * self.weight, min=0) * self.scale"
    problem["kernel"].write_text(kernel_text(body.format(right=f"return {value}", value=value)))
    summary = judged(interpreter, problem, workloads)["summary"]
    assert hint in summary and ("compare masks" in summary) == hint.startswith("compare"), summary


def test_half_a_character_in_a_message_is_escaped(interpreter, problem):
    problem["kernel"].write_text(kernel_text("raise ValueError('half \\ud800 of one')"))
    found = judged_at_own_sizes(interpreter, problem)
    assert "ValueError: half \\ud800 of one" in found["summary"]
    assert bundle.dumps(found).encode("utf-8")


def subject(problem) -> list:
    return ["--kernel", problem["kernel"], "--reference", problem["reference"]]


def test_a_right_kernel_passes_on_all_workloads_and_seeds_leaves_no_file_and_sees_no_secret(problem, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    own = {
        "MINE_API_KEY": "x",
        "MINE_TOKEN": "x",
        "AWS_MINE": "x",
        "HF_MINE": "x",
        "MINE_PLAIN": "x",
        "HOME": str(home),
    }
    body = "import os\nassert [name for name in os.environ if 'MINE' in name] == ['MINE_PLAIN'], os.environ\n"
    problem["kernel"].write_text(kernel_text(f"{body}return torch.clamp(x * self.weight, min=0) * self.scale"))
    found = tool_json("verify_kernel.py", *subject(problem), *ON_CPU, cwd=home, env=own, run=run_tool)
    assert not list(home.iterdir())
    assert (found["status"], found["device"]) == ("OK", "cpu-interpreter")
    assert {(case["workload"], case["seed"]) for case in found["cases"]} == {
        (workload, seed) for workload in ("default", "tall") for seed in (0, 1, "secret")
    }
    assert all(case["oracle"] == "fp64" for case in found["cases"])
    races = "programs run one after the other here, so races do not show"
    assert found["summary"].endswith(f"; {races}; only a GPU shows whether its own kernels do the work")


@pytest.mark.parametrize(
    ("body", "signal"),
    [
        ("import ctypes, os\nctypes.CDLL(None).kill(os.getpid(), 9)", "SIGKILL"),
        ("import os\nos._exit(0)", "exit code 0"),
    ],
)
def test_a_kernel_that_ends_the_process_is_survived_and_named(interpreter, problem, body, signal):
    problem["kernel"].write_text(kernel_text(body))
    found = judged_at_own_sizes(interpreter, problem)
    assert found["status"] == "RUNTIME_ERROR" and signal in found["summary"]


def test_what_takes_its_time_is_said_beforehand(interpreter, problem):
    said = []
    result = verify.verify(interpreter, KernelUnderTest(**problem), seeds=2, say=said.append)
    assert said == [f"on {len(result.cases)} cases: seeds, other sizes, layouts and values"]
    declines = "if x.shape[-1] != 16 or x.shape[0] not in (8, 33): raise ValueError('not these')\n"
    problem["kernel"].write_text(kernel_text(declines + "return torch.relu(x * self.weight) * self.scale"))
    said.clear()
    result = verify.verify(interpreter, KernelUnderTest(**problem), seeds=2, say=said.append)
    assert result.status == "OK" and said[1].endswith(" more, at the task's own sizes, since it declines others")


def test_a_verdict_says_why_a_kernel_declines(interpreter, problem):
    """An agent that read names alone spent a run on the GPU to see why."""
    declines = "if not x.is_contiguous(): raise ValueError('x must be contiguous')\n"
    declines += "if x.shape[0] % 2 and x.shape[0] != 33: raise ValueError(f'{x.shape[0]} rows are odd\\nsecond line')\n"
    problem["kernel"].write_text(kernel_text(declines + "return torch.relu(x * self.weight) * self.scale"))
    summary = judged(interpreter, problem)["summary"]
    reasons = re.search(r"; declines (.*?)(;|$)", summary)[1]
    assert re.search(r"\(ValueError: \d+ rows are odd\)", reasons) and "second" not in reasons, summary
    assert "transposed inputs" in reasons and reasons.count("(ValueError: x must be contiguous)") == 1, summary
    assert len(re.findall("rows are odd", reasons)) == 1, summary


def test_a_hanging_kernel_is_ended_with_its_children(problem, tmp_path, interpreter, run_here, monkeypatch):
    monkeypatch.setattr(interpreter, "isolation", "none")
    mark = tmp_path / "child"
    body = "import subprocess, sys, time\n"
    for session in (False, True):  # in the child's session, and out of it
        body += f"subprocess.Popen(['sh', '-c', 'echo $$ >> {mark}; sleep 600'], start_new_session={session})\n"
    problem["kernel"].write_text(kernel_text(body + "time.sleep(600)"))
    found = tool_json("verify_kernel.py", *subject(problem), *ON_CPU, "--timeout", 4, code=4, run=run_here)
    assert found["status"] == "TIMEOUT" and "give it small inputs" in found["summary"]
    pids = [int(line) for line in mark.read_text().split()]
    assert len(pids) == 2 and not any(map(runs, pids))


def runs(pid: int) -> bool:
    """Is the process there, and no zombie that only waits to be reaped?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_kernel_prints_does_not_forge_a_verdict(interpreter, problem):
    body = "print('{\"status\": \"OK\"}')\nopen('result.json', 'w').write('{\"cases\": []}')\nimport os\nos._exit(0)"
    problem["kernel"].write_text(kernel_text(body))
    found = judged_at_own_sizes(interpreter, problem)
    assert found["status"] != "OK"


def test_the_candidate_is_judged_in_the_dtype_of_the_task(interpreter, problem):
    body = "return torch.clamp(x.float() * self.weight.float(), min=0).to(x.dtype) * self.scale"
    problem["kernel"].write_text(kernel_text(body))
    found = judged_at_own_sizes(interpreter, problem, dtype="bf16")
    assert found["cases"][0]["outputs"][0]["dtype"] == "torch.bfloat16"


@pytest.mark.parametrize("extra", ["torch.ones(3)", "{'amax': 2.0}", "b'layout 2'"])
def test_extra_state_of_a_module_is_no_parameter(interpreter, tmp_path, extra):
    """get_extra_state may return anything, which each constructor makes anew."""
    reference = f"""
class Layer(nn.Linear):
    def get_extra_state(self): return {extra}
    def set_extra_state(self, state): pass
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer(16, 16, bias=False)
        self.register_buffer("more_extra_state", torch.ones(16))
    def forward(self, x): return self.layer(x) * self.more_extra_state
def get_inputs(): return [torch.randn(24, 16)]
def get_init_inputs(): return []
"""
    kernel = """
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16, bias=False)
        self.register_buffer("more_extra_state", torch.empty(16))
    def forward(self, x): return x @ self.layer.weight.t() * self.more_extra_state
"""
    for dtype in (None, "bf16"):
        found = judge(interpreter, tmp_path, reference, kernel, dtype=dtype)
        assert found["status"] == "OK", found["summary"]


def test_lower_precision_than_asked_fails_in_fp32(interpreter, problem):
    problem["kernel"].write_text(
        kernel_text("return (torch.clamp(x * self.weight, min=0) * self.scale).half().float()")
    )
    assert judged_at_own_sizes(interpreter, problem)["status"] == "WRONG_VALUES"


@pytest.mark.parametrize(
    ("forward", "answer", "what"),
    [
        ("torch.relu(-(x * self.weight).abs()) * self.scale", "torch.zeros_like(x)", "zeros"),
        ("torch.ones_like(x) + 0 * self.weight", "torch.ones_like(x)", "ones"),
        ("x + 0 * self.weight", "x.clone()", "an input"),
        ("torch.full_like(x, 3.0) + 0 * self.weight", "torch.full_like(x, 3.0)", "another call"),
    ],
)
def test_a_task_that_an_answer_without_work_would_pass_is_refused(interpreter, problem, forward, answer, what):
    problem["reference"].write_text(REFERENCE.replace("torch.relu(x * self.weight) * self.scale", forward))
    problem["kernel"].write_text(kernel_text(f"return {answer}"))
    found = judged_at_own_sizes(interpreter, problem)
    assert found["status"] == "INVALID_TASK" and what in found["summary"]


def test_a_broken_reference_is_the_references_fault(interpreter, problem):
    problem["reference"].write_text(REFERENCE.replace("torch.relu(x", "torch.relu(no_such_name"))
    found = judged(interpreter, problem)
    assert found["status"] == "INVALID_REFERENCE"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return [torch.randn(8, 16)]", "return torch.randn(8, 16)", "must return a list, not a Tensor"),
        ("return [2.0]", "return 2.0", "get_init_inputs must return a list"),
        ('return {"tall": lambda: [torch.randn(33, 16)]}', "return [1]", "get_workloads must return a dict"),
        ('"tall"', '"default"', "names a workload 'default'"),
    ],
)
def test_a_reference_outside_the_contract_is_told_so(interpreter, problem, old, new, message):
    problem["reference"].write_text(REFERENCE.replace(old, new))
    found = judged(interpreter, problem)
    assert found["status"] == "INVALID_REFERENCE" and message in found["summary"]


def test_a_file_that_is_no_python_is_no_reference(problem, run_here):
    arguments = ["--kernel", problem["kernel"], "--reference", "/bin/ls", *ON_CPU]
    found = tool_json("verify_kernel.py", *arguments, code=1, run=run_here)
    assert found["status"] == "INVALID_REFERENCE" and "ls is no Python file" in found["summary"]


def test_a_reference_of_nothing_but_nan_makes_no_task(interpreter, problem):
    problem["reference"].write_text(REFERENCE.replace("torch.relu(x", "float('nan') * torch.relu(x"))
    problem["kernel"].write_text(kernel_text("return torch.full_like(x, float('nan'))"))
    found = judged_at_own_sizes(interpreter, problem)
    assert found["status"] == "INVALID_TASK" and "no finite value" in found["summary"]


def test_bf16_tiles_in_the_interpreter_are_named_as_its_fault(interpreter, tmp_path):
    (tmp_path / "r.py").write_text(
        "import torch, torch.nn as nn\nclass Model(nn.Module):\n    def forward(self, a, b): return a @ b\n"
        "def get_inputs(): return [torch.randn(16, 16), torch.randn(16, 16)]\n"
    )
    (tmp_path / "k.py").write_text("""
import torch, triton, triton.language as tl
@triton.jit
def product(a, b, c):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)).to(c.dtype.element_ty))
def kernel_function(a, b):
    if a.shape != (16, 16) or b.shape != (16, 16) or not (a.is_contiguous() and b.is_contiguous()):
        raise ValueError("16 x 16 only")
    c = torch.empty_like(a)
    product[(1,)](a, b, c)
    return c
""")
    files = {"kernel": tmp_path / "k.py", "reference": tmp_path / "r.py"}
    found = judged(interpreter, files, dtype="bf16")
    assert found["status"] in failures.VALUE_FAULTS and "interpreter computes wrongly with bf16" in found["summary"]
    assert judged(interpreter, files, dtype="fp16")["status"] == "OK"


def test_calls_that_differ_may_have_a_race(interpreter, problem):
    noise = "return torch.clamp(x * self.weight, min=0) * self.scale * (1 + 1e-6 * torch.rand(x.shape))"
    problem["kernel"].write_text(kernel_text(noise))
    found = judged_at_own_sizes(interpreter, problem)
    assert found["status"] == "OK", found["summary"]
    shares = re.search(
        r"; (\d+) of (\d+) calls on the same contents differ from the first \(workload default\): atomic",
        found["summary"],
    )
    assert shares and shares[1] == shares[2] and int(shares[1]) > 1


FAULT_AT_TIMES = """
import torch
calls = 0
def kernel_function(x):
    global calls
    calls += 1
    y = x * 2
    if calls % 7 == 0:
        y[3] *= {off}
    return y
"""


@pytest.mark.parametrize(("off", "status"), [(1.01, "WRONG_VALUES"), (1.000001, "OK")])
def test_a_result_that_is_wrong_at_times_is_found_by_repeating_the_call(interpreter, tmp_path, off, status):
    """A race shows in one call of many. One that the tolerance passes is told."""
    (tmp_path / "r.py").write_text(
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x): return x * 2\n"
        "def get_inputs(): return [torch.randn(64)]\n"
    )
    (tmp_path / "k.py").write_text(FAULT_AT_TIMES.format(off=off))
    found = judged_at_own_sizes(interpreter, {"kernel": tmp_path / "k.py", "reference": tmp_path / "r.py"})
    assert found["status"] == status, found["summary"]
    assert re.search(r"[1-9]\d* of \d+ calls on the same contents", found["summary"])


OF_ROWS = """
import torch, triton, triton.language as tl
@triton.jit
def rows(x, y, best, BEYOND: tl.constexpr):
    at = tl.program_id(0) * 16 + tl.arange(0, 16)
    v = tl.load(x + at).to(tl.float32)
    tl.store(y + at, (v * FACTOR).to(y.dtype.element_ty), mask=tl.arange(0, 16) < BEYOND)
    tl.store(best + tl.program_id(0), INDEX)
def kernel_function(x):
    if x.shape != (4, 16) or not x.is_contiguous():
        raise ValueError("4 x 16 only")
    y, best = torch.empty_like(x), torch.empty(4, dtype=torch.int32)
    rows[(4,)](x, y, best, BEYOND=WRITTEN)
    return y, best
"""
BY_TORCH = "def kernel_function(x): return x * FACTOR, x.argmax(-1).int()\n"


@pytest.mark.parametrize(
    ("kernel", "factor", "index", "written", "status", "excused"),
    [
        (OF_ROWS, "2", "tl.argmax(v, 0)", "16", "OK", False),
        (OF_ROWS, "3", "tl.argmax(v, 0)", "16", "WRONG_VALUES", True),
        (OF_ROWS, "2", "0", "16", "WRONG_VALUES", False),
        (OF_ROWS, "2", "tl.argmax(v, 0)", "15", "NONFINITE", False),
        (BY_TORCH, "3", "", "", "WRONG_VALUES", False),
    ],
)
def test_bf16_in_the_interpreter_excuses_wrong_floating_numbers_of_triton_alone(
    interpreter, tmp_path, kernel, factor, index, written, status, excused
):
    (tmp_path / "r.py").write_text(
        "import torch, torch.nn as nn\nclass Model(nn.Module):\n"
        "    def forward(self, x): return x * 2, x.argmax(-1).int()\ndef get_inputs(): return [torch.randn(4, 16)]\n"
    )
    text = kernel.replace("FACTOR", factor).replace("INDEX", index).replace("WRITTEN", written)
    (tmp_path / "k.py").write_text(text)
    found = judged_at_own_sizes(
        interpreter, {"kernel": tmp_path / "k.py", "reference": tmp_path / "r.py"}, dtype="bf16"
    )
    assert found["status"] == status, found["summary"]
    assert ("interpreter computes wrongly with bf16" in found["summary"]) == excused, found["summary"]


def test_usage(problem, tmp_path, run_here):
    for arguments in (
        [],
        ["--kernel", problem["kernel"]],
        ["--kernel", tmp_path / "none.py", "--reference", problem["reference"]],
        [*subject(problem), "--workspace", tmp_path],
        ["--workspace", tmp_path],
        [*subject(problem), "--seeds", "0"],
        [*subject(problem), "--tolerance", "1"],
        [*subject(problem), *ON_CPU, "--workload", "absent"],
    ):
        done = run_here("verify_kernel.py", *arguments)
        assert done.returncode == 2 and done.stderr.count("\n") <= 2, (arguments, done.stderr)


EXAMPLE = BUNDLE / "examples" / "row_softmax"


@pytest.fixture
def five_rows(tmp_path) -> Path:
    """The example's reference with a workload that the interpreter is soon through with."""
    path = tmp_path / "reference.py"
    text = (EXAMPLE / "reference.py").read_text()
    path.write_text(text.replace("torch.randn(16, 1000)", "torch.randn(5, 1000)"))
    return path


def test_a_triton_kernel_runs_in_the_interpreter(interpreter, five_rows):
    for name in ("three_passes.py", "one_pass.py"):
        files = {"kernel": EXAMPLE / name, "reference": five_rows}
        found = judged(interpreter, files, dtype="bf16", workloads=["small"])
        assert found["status"] == "OK" and found["device"] == "cpu-interpreter"


def test_packages_reached_through_a_link_are_libraries_all_the_same(tmp_path, five_rows):
    """Triton's interpreter walks frames; its files are then named by the link."""
    import triton

    (tmp_path / "packages").symlink_to(Path(triton.__file__).parents[1])
    files = ["--kernel", EXAMPLE / "one_pass.py", "--reference", five_rows, "--workload", "small"]
    options = ["--dtype", "fp16", "--device", "cpu-interpreter"]
    done = run_tool("verify_kernel.py", *files, *options, env={"PYTHONPATH": str(tmp_path / "packages")})
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_last_seed_is_secret_and_new_each_time():
    first, second = cases.draw_seeds(3), cases.draw_seeds(3)
    assert first[:2] == [0, 1] and first[2] != second[2]
    assert cases.draw_seeds(10)[:7] == list(range(7)) and len(set(cases.draw_seeds(10))) == 10


def test_seeds_of_samples_show_every_bit_that_is_left_out():
    seeds = cases.draw_sample_seeds(100)
    assert len(set(seeds)) == 100 and min(seeds) >= cases.KNOWN_SEEDS and max(seeds) < 2**31 - 1
    kept = [len({seed & ~(1 << bit) for seed in seeds}) for bit in range(16)]
    assert max(kept) < 100  # the lower ones: a seed without one of its higher bits may be below the secret ones
    assert cases.draw_sample_seeds(1) != cases.draw_sample_seeds(1)


def test_a_kernel_that_prints_without_end_fills_no_disk_and_no_memory(problem, run_here):
    problem["kernel"].write_text(
        kernel_text("import sys\nfor _ in range(40): sys.stdout.write('x' * (1 << 20))\nraise ValueError('the end')")
    )
    found = tool_json("verify_kernel.py", *subject(problem), *ON_CPU, "--seeds", 1, code=1, run=run_here)
    assert "the end" in found["summary"] and len(found["process"]["log_tail"]) <= 8000


def test_a_random_reference_makes_no_task(interpreter, problem):
    problem["reference"].write_text(REFERENCE.replace("torch.relu(x", "torch.rand_like(x) * torch.relu(x"))
    found = judged_at_own_sizes(interpreter, problem)
    assert found["status"] == "INVALID_TASK" and "different results" in found["summary"]


def test_a_tensor_subclass_is_no_result(interpreter, problem):
    body = "return (torch.clamp(x * self.weight, min=0) * self.scale).as_subclass(Lazy)"
    problem["kernel"].write_text("import torch\nclass Lazy(torch.Tensor): pass\n" + kernel_text(body))
    assert judged_at_own_sizes(interpreter, problem)["status"] == "CHEAT_SUSPECT"


def test_pytorch_itself_is_right_where_its_own_dtype_is_inexact(interpreter, problem):
    problem["reference"].write_text(REFERENCE.replace("torch.relu(x * self.weight)", "torch.exp(5 * x * self.weight)"))
    problem["kernel"].write_text(kernel_text("return torch.exp(5 * x * self.weight) * self.scale"))
    found = judged(interpreter, problem, dtype="bf16")
    assert found["status"] == "OK" and found["cases"][0]["baseline_max_rel"] > 0.024


def test_a_workload_may_have_any_name(interpreter, problem):
    problem["reference"].write_text(REFERENCE.replace('"tall"', '"fp32/33 x 16"'))
    found = judged_at_own_sizes(interpreter, problem)
    assert {case["workload"] for case in found["cases"]} == {"default", "fp32/33 x 16"}


SOUND = dict.fromkeys(correctness.REPORT_KEYS)
FORGED = [
    {},
    {"cases": 3},
    {"cases": [3, 3]},
    {"cases": [{}, {}]},
    {"cases": [SOUND]},
    {"cases": [SOUND, SOUND, SOUND]},
    {"cases": [SOUND, {"error": {"status": "OK", "message": ""}}]},
    {"cases": [SOUND, {"error": {"status": "BANANA", "message": ""}}]},
    {"cases": [SOUND, {**SOUND, "more": 1}]},
]


def test_no_report_of_another_form_than_an_honest_one_is_a_success():
    for report in FORGED:
        assert isinstance(reports_of(report, 2), Fault), report
    assert reports_of({"cases": [SOUND, SOUND]}, 2) == [CaseReport(**SOUND)] * 2


@pytest.mark.parametrize(
    ("pieces", "result", "forged"),
    [
        ([b'abc {"result": {"x": 1}}\n'], {"x": 1}, False),
        ([b'abc {"mark": "a", "calls": 3}\nabc {"res', b'ult": {}}\n'], {}, False),
        ([b'{"result": {"x": 1}}\n'], None, True),
        ([b'abd {"result": {"x": 1}}\n'], None, True),
        ([b'abc {"result": {}}\nabc {"result": {"x": 2}}\n'], {}, True),
        ([b"abc nonsense\n"], None, True),
        ([b"no end of line"], None, True),
        ([b'abc {"result": {"x"'], None, False),  # a job that was killed in mid-sentence
    ],
)
def test_what_does_not_carry_the_seal_is_a_forgery(pieces, result, forged):
    report = pipes.Report("abc")
    for piece in pieces:
        report.take(piece)
    assert (report.result, report.forged or report.unfinished()) == (result, forged)


@pytest.mark.parametrize(
    "body",
    [
        "self.calls = getattr(self, 'calls', 0) + 1\ny = torch.clamp(x * self.weight, min=0) * self.scale\n"
        "return y if self.calls == 1 else y + 1",
        "self.y = getattr(self, 'y', torch.clamp(x, min=0) * self.scale)\nreturn self.y.clone()",
    ],
)
def test_a_kernel_that_is_right_only_once_or_ignores_its_parameters_is_wrong(interpreter, problem, body):
    problem["kernel"].write_text(kernel_text(body))
    problem["reference"].write_text(REFERENCE.replace("torch.randn(16)", "torch.ones(16)"))
    assert judged_at_own_sizes(interpreter, problem)["status"] == "WRONG_VALUES"


def test_a_kernel_cannot_change_its_oracle(interpreter, problem):
    before = problem["reference"].read_text()
    body = f"open({str(problem['reference'])!r}, 'a').write('easier = 1')\nreturn torch.zeros_like(x)"
    problem["kernel"].write_text(kernel_text(body))
    assert judged_at_own_sizes(interpreter, problem)["status"] == "CHEAT_SUSPECT"
    assert problem["reference"].read_text() == before


BUILDS = "import os, tempfile\nos.makedirs({folder}, exist_ok=True)\nopen({folder} + '/k.cu', 'w').close()\n"
RIGHT = "return torch.clamp(x * self.weight, min=0) * self.scale"


def test_a_kernel_that_builds_beside_its_file_is_told_where_to_build(interpreter, problem):
    """That is common and honest; the message named the folder alone."""
    problem["kernel"].write_text(kernel_text(BUILDS.format(folder="os.path.dirname(__file__) + '/build'") + RIGHT))
    found = judged_at_own_sizes(interpreter, problem)
    built = problem["kernel"].parent / "build"
    assert found["status"] == "CHEAT_SUSPECT" and f"tried to change {built}, " in found["summary"]
    assert "write in a folder of tempfile.mkdtemp(), and let load_inline choose its own" in found["summary"]
    assert not built.exists()


@pytest.mark.parametrize("folder", ["tempfile.mkdtemp()", "os.environ['TORCH_EXTENSIONS_DIR']"])
def test_a_kernel_may_write_where_that_message_says(interpreter, problem, folder):
    problem["kernel"].write_text(kernel_text(BUILDS.format(folder=folder) + RIGHT))
    assert judged_at_own_sizes(interpreter, problem)["status"] == "OK"


def test_a_module_that_needs_to_be_importable_is(interpreter, problem):
    text = "from __future__ import annotations\nimport dataclasses\n"
    text += "@dataclasses.dataclass\nclass Config:\n    block: int = 4\n"
    problem["kernel"].write_text(text + kernel_text())
    assert judged(interpreter, problem)["status"] == "OK"


def test_mixed_dtypes_slices_and_complex_numbers_equal_themselves(interpreter, tmp_path):
    text = """
import torch, torch.nn as nn
class CLASS(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8).half()
        self.norm = nn.LayerNorm(8)
        self.register_buffer("f", torch.randn(8, dtype=torch.complex64))
    def forward(self, x):
        y = self.norm(self.linear(x.half()).float())
        return y[:, :5] * 1, y * self.f, x.argmax(-1), (x * 2)[:, :3]
def get_inputs(): return [torch.randn(6, 8)]
"""
    for name, cls in (("k.py", "ModelNew"), ("r.py", "Model")):
        (tmp_path / name).write_text(text.replace("CLASS", cls))
    files = {"kernel": tmp_path / "k.py", "reference": tmp_path / "r.py"}
    assert judged(interpreter, files)["status"] == "OK"


IN_16_BITS = """
import torch
def forward(x, w, wide=False):
    x, w = x.bfloat16(), w.bfloat16()
    return torch.softmax(((x.float() @ w.float()) if wide else (x @ w)).float() EXTRA, -1)
class Model(torch.nn.Module):
    def forward(self, x, w): return forward(x, w)
def get_inputs(): return [X, W]
"""
DRAWN = ("torch.randn(64, 96)", "torch.randn(96, 48)")
# Of these products one column is by far the largest, so that no rounding decides which one.
DISTINCT = ("torch.eye(48, 96)[torch.randint(48, (64,))]", "torch.eye(96, 48) + torch.randn(96, 48) / 99")


@pytest.mark.parametrize(
    ("extra", "forward", "status"),
    [
        ("", "forward(x, w, wide=True)", "OK"),
        ("", "forward(x, w.roll(1, 1), wide=True).roll(-1, 1)", "OK"),
        ("", "forward(x, w.roll(1, 1), wide=True)", "WRONG_VALUES"),
        ("", "forward(x[:, 1:], w[1:])", "WRONG_VALUES"),
        (".argmax(-1).float()[None]", "forward(x, w, wide=True)", "OK"),
    ],
)
def test_a_reference_that_rounds_within_is_no_more_exact_than_that(interpreter, tmp_path, extra, forward, status):
    """Results in fp32 of a product in bf16: a kernel may round as it does or not at all."""
    x, w = DISTINCT if "argmax" in extra else DRAWN
    text = IN_16_BITS.replace("EXTRA", extra).replace("X, W", f"{x}, {w}")
    (tmp_path / "r.py").write_text(text)
    (tmp_path / "k.py").write_text(text + f"def kernel_function(x, w): return {forward}\n")
    found = judged_at_own_sizes(interpreter, {"kernel": tmp_path / "k.py", "reference": tmp_path / "r.py"})
    assert found["status"] == status, found["summary"]


def test_an_overflow_far_from_the_tasks_values_is_said_and_no_reason_to_refuse(interpreter, problem):
    problem["reference"].write_text(
        REFERENCE.replace("torch.relu(x * self.weight)", "torch.softmax(4 * x * self.weight, 1)")
    )
    body = "e = torch.exp(4 * x * self.weight)\nreturn e / e.sum(1, keepdim=True) * self.scale"
    problem["kernel"].write_text(kernel_text(body))
    found = judged(interpreter, problem)
    assert found["status"] == "OK" and "NOT RIGHT on 64 times the inputs (NONFINITE" in found["summary"]


def on_one_input(interpreter, tmp_path, forward: str, inputs: str, **options) -> dict:
    """The verification of a reference against itself: kernel_function is its forward."""
    head = f"import torch\ndef forward(*args):\n    {forward}\n"
    (tmp_path / "r.py").write_text(
        f"{head}class Model(torch.nn.Module):\n    def forward(self, *args): return forward(*args)\n"
        f"def get_inputs(): return [{inputs}]\n"
    )
    (tmp_path / "k.py").write_text(f"{head}kernel_function = forward\n")
    return judged(interpreter, {"kernel": tmp_path / "k.py", "reference": tmp_path / "r.py"}, **options)


def test_eight_bit_outputs_of_few_elements_are_compared(interpreter, tmp_path):
    found = on_one_input(
        interpreter, tmp_path, "return args[0].amax(-1).to(torch.float8_e4m3fn)", "torch.randn(40, 64)"
    )
    assert found["status"] == "OK", found["summary"]


def test_a_reference_may_refuse_contents_of_our_own_making(interpreter, tmp_path):
    """Of the inputs from their end it is asked the usual size of a small output."""
    forward = "x, = args\n    if x[0] != 1: raise ValueError('starts with 1')\n    return x.sum()"
    found = on_one_input(interpreter, tmp_path, forward, "torch.cat([torch.ones(1), torch.randn(39)])")
    assert found["status"] == "OK", found["summary"]
    assert any(case["resized"] for case in found["cases"])


def test_an_input_beyond_the_bundle_is_no_fault_of_the_reference(interpreter, tmp_path):
    found = on_one_input(interpreter, tmp_path, "return args[0].int() * 3", "torch.ones(40).to(torch.uint16)")
    assert found["status"] == "INVALID_TASK" and "a limit of this bundle" in found["summary"]
    assert "mend reference.py" not in found["summary"]


def test_only_what_is_declined_is_asked_again_at_the_tasks_own_sizes(interpreter, problem):
    body = (
        "if x.shape[0] not in (8, 33): raise ValueError('no')\nreturn torch.clamp(x * self.weight, min=0) * self.scale"
    )
    assert not any("own sizes" in str(case["variant"]) for case in judged(interpreter, problem)["cases"])
    problem["kernel"].write_text(kernel_text(body))
    found = judged(interpreter, problem)
    assert found["status"] == "OK" and any("own sizes" in str(case["variant"]) for case in found["cases"])


HIDING = "sys.modules['kernelopt.worker.candidate'].identical = lambda a, b: True"
READING = "open(REFERENCE).read()"


@pytest.mark.parametrize(
    ("disarm", "offence"),
    [
        ("import builtins\nbuiltins.all = builtins.any = lambda _: True", HIDING),
        ("import operator\noperator.is_ = lambda a, b: True", HIDING),
        ("getattr(sys.modules['kernelopt.worker.tripwire'], '_hooks', sys).looking = True", READING),
        ("import os\nos.path.realpath = lambda path: '/nothing'", READING),
    ],
)
def test_what_a_kernel_replaces_does_not_blind_the_tripwire(interpreter, problem, disarm, offence):
    text = f"import sys\n{disarm}\n{offence}\n".replace("REFERENCE", repr(str(problem["reference"])))
    problem["kernel"].write_text(text + kernel_text())
    assert judged_at_own_sizes(interpreter, problem)["status"] == "CHEAT_SUSPECT"


# A stand-in for tvm_ffi/error.py of apache-tvm-ffi, which makes a frame for each line of a C++ backtrace.
TVM_FFI = """
import sys, sysconfig
SOURCE = '''
import sys
given = []
def create_frame(filename):
    context = {"_getframe": sys._getframe}
    return eval(compile("_getframe()", filename, "eval"), context, context)
def append_traceback(filename):
    return create_frame(filename)
def with_append_backtrace(py_error):
    given.append(append_traceback("/of/a/library.cu"))
    return py_error
'''
tvm_ffi = {}
exec(compile(SOURCE, FOLDER + "/tvm_ffi/error.py", "exec"), tvm_ffi)
def library():
    raise tvm_ffi["with_append_backtrace"](ERROR)
class Walks(Exception):
    def __str__(self):
        try:
            return str(sys._getframe(1))
        except Exception:
            return ""
"""
FALLS_BACK = "try:\n    library()\nexcept RuntimeError:\n    assert not tvm_ffi['given']\n"
INSTALLED = "sysconfig.get_paths()['purelib']"
TOLD = "ValueError('rows lie apart')"


@pytest.mark.parametrize(
    ("folder", "error", "body", "status"),
    [
        (INSTALLED, TOLD, "library()", "RUNTIME_ERROR"),
        (INSTALLED, TOLD, FALLS_BACK, "OK"),
        (INSTALLED, "Walks()", FALLS_BACK, "CHEAT_SUSPECT"),
        (INSTALLED, "None", "library()", "CHEAT_SUSPECT"),
        ("'/tmp'", TOLD, "library()", "CHEAT_SUSPECT"),
    ],
    ids=["raised", "caught", "its text walks", "no error", "no library"],
)
def test_a_librarys_error_with_a_backtrace_of_cpp_is_told_and_no_frame_given(
    interpreter, problem, folder, error, body, status
):
    library = TVM_FFI.replace("FOLDER", folder).replace("ERROR", error)
    problem["kernel"].write_text(library + kernel_text(f"{body}\n{RIGHT}"))
    found = judged_at_own_sizes(interpreter, problem)
    assert found["status"] == status, found["summary"]
    assert ("ValueError: rows lie apart" in found["summary"]) == (status == "RUNTIME_ERROR")


@pytest.mark.parametrize(
    ("moved", "status"),
    [("0.5 * self.mean + 0.5 * x.mean(0)", "OK"), ("self.mean", "WRONG_VALUES"), ("x.mean(0)", "WRONG_VALUES")],
)
def test_each_call_starts_from_the_state_of_the_case_and_leaves_it_as_the_reference_does(
    interpreter, problem, moved, status
):
    text = kernel_text("y = x - 0.5 * self.mean - 0.5 * x.mean(0)\nself.mean = MOVED\nreturn y")
    text = text.replace("self.weight = nn.Parameter(torch.empty(16))", "self.register_buffer('mean', torch.zeros(16))")
    problem["reference"].write_text(
        text.replace("ModelNew", "Model").replace("MOVED", "0.5 * self.mean + 0.5 * x.mean(0)")
        + "def get_inputs(): return [torch.randn(8, 16) + 3]\ndef get_init_inputs(): return [2.0]\n"
    )
    problem["kernel"].write_text(text.replace("MOVED", moved))
    found = judged(interpreter, problem)
    assert found["status"] == status, found["summary"]


def sanitizer_run(
    tmp_path, log: str, exit_code: int = 0, timed_out: bool = False, report: dict | None = None
) -> tuple[dict, list]:
    """(the verdict on a right kernel after memcheck, the command) with a stand-in for the sandbox, in which
    compute-sanitizer ends like that."""
    (tmp_path / "input").write_bytes(b"x")
    commands = []

    def run_when_asked(command, job, timeout_s, asked, **_):
        commands.append(command)
        _, hidden = asked(None)
        assert hidden == [str(tmp_path / "input"), tmp_path / "reference.py"]  # as in the other runs
        return Outcome(report, exit_code, None, timed_out, 1.0, log)

    card = Card("stand-in", "GPU-0", "580.1")
    stand_in = SimpleNamespace(gpu=card, new_folder=lambda _: str(tmp_path), run_when_asked=run_when_asked, beside=[])
    case = cases.Case("default", 0, None, str(tmp_path / "input"), "fp32", [[4]], first=True)
    result = Verdict(Status.OK, "stand-in", "OK", process=ProcessEnd(0, None, 1.0, ""))
    for name in ("kernel.py", "reference.py"):
        (tmp_path / name).write_text("")
    with memcheck.Memcheck(stand_in, tmp_path / "kernel.py", tmp_path / "reference.py", 60) as run:
        run.begin([case])
        run.wait(others_s=1)
    return run.judged(result).to_json(), commands


def test_compute_sanitizer_is_found_in_the_cuda_toolkit_and_its_findings_count(tmp_path, monkeypatch):
    program = tmp_path / "cuda" / "compute-sanitizer" / "compute-sanitizer"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("PATH", str(tmp_path))
    none_found = "========= ERROR SUMMARY: 0 errors\n"
    clean, commands = sanitizer_run(tmp_path, none_found, report={"cases": []})
    assert commands[0][0] == str(program) and commands[0][1:3] == ["--tool", "memcheck"]
    assert clean["sanitizer"] == {"ran": True, "tool": "memcheck", "errors": 0} and clean["summary"] == "OK"
    failed = {"error": {"status": "OOM", "message": "no memory"}}
    for report in (None, failed, {"cases": [failed]}):
        blind, _ = sanitizer_run(tmp_path, f"no memory\n{none_found}", report=report)
        assert blind["sanitizer"] == {"ran": False, "why": "no memory"} and blind["status"] == "OK"
    log = "========= Invalid __global__ read of size 4 bytes\n========= ERROR SUMMARY: 1 error\n"
    found, _ = sanitizer_run(tmp_path, log, memcheck.ERRORS_FOUND)
    assert found["status"] == "OUT_OF_BOUNDS" and "Invalid __global__ read" in found["summary"]


def test_a_sanitizers_process_that_finds_no_gpu_leaves_the_verdict_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(memcheck.programs, "find", lambda _: "/some/compute-sanitizer")

    def lacks(*_, **__):
        raise EnvironmentLacks("no memory is left for another context")

    monkeypatch.setattr(Beside, "outcome", lacks)
    blind, _ = sanitizer_run(tmp_path, "")
    assert blind["status"] == "OK" and blind["sanitizer"]["why"] == "no memory is left for another context"


def test_a_compute_sanitizer_that_did_not_run_is_said_aloud(tmp_path, monkeypatch, interpreter, problem):
    monkeypatch.setattr(memcheck.programs, "find", lambda _: "/some/compute-sanitizer")
    broken, _ = sanitizer_run(tmp_path, "========= Error: Device not supported.\n", 1)
    assert broken["sanitizer"] == {"ran": False, "why": "Error: Device not supported."} and broken["status"] == "OK"
    assert broken["summary"] == "OK; compute-sanitizer did not run: Error: Device not supported."
    late, _ = sanitizer_run(tmp_path, "", None, timed_out=True)
    assert "did not run: time-out after 60 s" in late["summary"]
    monkeypatch.setattr(memcheck.programs, "find", lambda _: None)
    absent, commands = sanitizer_run(tmp_path, "")
    assert not commands and "did not run: it is neither on the PATH nor in the CUDA toolkit" in absent["summary"]
    result = verify.verify(interpreter, KernelUnderTest(**problem), ["default"], seeds=2, sanitize=True)
    assert result.status == "OK" and result.summary.endswith("compute-sanitizer did not run: there is no GPU")


class NeverEnding:
    """Stands in for a run under compute-sanitizer in which the kernel hangs."""

    def __init__(self, *_, **__):
        self.runs = False

    def begin(self, *_) -> None:
        self.runs = True

    def is_running(self) -> bool:
        return self.runs

    def outcome(self, within_s: float) -> None:
        assert within_s >= memcheck.LEAST_WAIT_S

    def end(self) -> None:
        self.runs = False


@pytest.mark.parametrize(
    ("beside", "said"), [("TIMEOUT", "a run beside it timed out"), ("OK", "60 s after the other runs")]
)
def test_a_kernel_that_hangs_under_compute_sanitizer_alone_is_right(
    beside, said, tmp_path, monkeypatch, interpreter, problem
):
    """On an H200 a gate of a kernel with a grid barrier stood still for 200 s, in all its processes; the cause is not
    established. The same kernel passes without compute-sanitizer, and on an H100 with it."""
    ended, real_run, calls = Outcome(None, 1, None, False, 20.0, ""), verify.runs.run, []

    def run(*arguments):
        calls.append(arguments)
        if beside == "TIMEOUT" and len(calls) == 1:
            for number in range(4):  # third calls that differed, or whose files were cut short
                Path(arguments[4], f"output-0-{number}-2.pt").write_bytes(b"cut")
            return ended, Fault(Status.TIMEOUT, "did not end")
        return real_run(*arguments)

    monkeypatch.setattr(memcheck, "Beside", NeverEnding)
    monkeypatch.setattr(verify.runs, "run", run)
    monkeypatch.setattr(verify, "Memcheck", lambda *of: without_obstacles(memcheck.Memcheck(*of)))
    result = verify.verify(interpreter, KernelUnderTest(**problem), ["default"], seeds=2, sanitize=True)
    assert result.status == "OK" and len(calls) == (2 if beside == "TIMEOUT" else 1)
    assert "compute-sanitizer did not run: given up: " in result.summary and said in result.summary


def without_obstacles(run: memcheck.Memcheck) -> memcheck.Memcheck:
    run.why_not = None
    return run


def test_a_quick_check_tries_the_own_inputs_alone_and_says_so(problem, run_here):
    result = tool_json("verify_kernel.py", *subject(problem), *ON_CPU, "--quick", run=run_here)
    assert {case["variant"] for case in result["cases"]} == {None} and len(
        result["cases"]
    ) == 4  # two workloads, two seeds
    assert result["status"] == "OK" and "a quick check" in result["summary"]


def test_a_reference_without_enough_memory_is_no_invalid_one(problem, run_here):
    """torch's error stands in for a GPU whose memory is full."""
    reference = Path(problem["reference"])
    exhausted = "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 14.00 GiB.')"
    reference.write_text(reference.read_text().replace("return torch.relu", f"{exhausted}\n        return torch.relu"))
    done = run_here(
        "verify_kernel.py", "--kernel", problem["kernel"], "--reference", reference, "--device", "cpu-interpreter"
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert "needs more memory than is free here" in done.stderr and "14.00 GiB" in done.stderr


def test_inputs_that_no_seed_decides_are_the_tasks_fault(interpreter, tmp_path):
    unseeded = "import numpy\ndef get_inputs(): return [torch.from_numpy(numpy.random.default_rng().normal(size=9))]\n"
    reference = f"class Model(nn.Module):\n    def forward(self, x): return 2 * x\n{unseeded}"
    found = judge(interpreter, tmp_path, reference, "def kernel_function(x): return 2 * x", only_these_shapes=True)
    assert found["status"] == "INVALID_TASK" and "'x' has other contents in each process" in found["summary"]


CALLBACK = "gc.callbacks.append(lambda *_: None)"


@pytest.mark.parametrize(
    ("load", "call", "status"), [(CALLBACK, "pass", "OK"), ("pass", CALLBACK, "CHEAT_SUSPECT")], ids=["load", "call"]
)
def test_a_kernel_may_register_a_callback_as_it_is_loaded_and_not_in_a_call(interpreter, tmp_path, load, call, status):
    """JAX does so as it is imported."""
    reference = """
class Model(nn.Module):
    def forward(self, x): return x * 2
def get_inputs(): return [torch.randn(300)]
"""
    kernel = f"""
import gc
{load}
def kernel_function(x):
    {call}
    return x * 2
"""
    found = judge(interpreter, tmp_path, reference, kernel)
    assert found["status"] == status, found["summary"]
