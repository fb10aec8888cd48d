"""Correctness in isolation: every way to be wrong lands in its status. torch on the CPU stands in for kernels here;
test_gpu.py runs real ones."""

from pathlib import Path

import pytest
from conftest import BUNDLE, REFERENCE, kernel_text, run_tool, tool_json
from kernelopt import verify

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
def test_a_wrong_kernel_lands_in_its_status(problem, status):
    body = WRONG[status]
    problem["kernel"].write_text(kernel_text(body) if body else "import no_such_module")
    found = tool_json("verify_kernel.py", *subject(problem), *ON_CPU, "--seeds", 1, code=1)
    assert found["status"] == status, found["summary"]
    assert status in found["summary"]


def subject(problem) -> list:
    return ["--kernel", problem["kernel"], "--reference", problem["reference"]]


def test_a_right_kernel_passes_on_all_workloads_and_seeds(problem):
    found = tool_json("verify_kernel.py", *subject(problem), *ON_CPU)
    assert (found["status"], found["device"]) == ("OK", "cpu-interpreter")
    assert {(case["workload"], case["seed"]) for case in found["cases"]} == {
        (workload, seed) for workload in ("default", "tall") for seed in (0, 1, "secret")
    }
    assert all(case["oracle"] == "fp64" for case in found["cases"])


@pytest.mark.parametrize(
    ("body", "signal"),
    [("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"), ("import os\nos._exit(0)", "exit code 0")],
)
def test_a_kernel_that_ends_the_process_is_survived_and_named(problem, body, signal):
    problem["kernel"].write_text(kernel_text(body))
    found = tool_json("verify_kernel.py", *subject(problem), *ON_CPU, "--seeds", 1, code=1)
    assert found["status"] == "RUNTIME_ERROR" and signal in found["summary"]


def test_a_hanging_kernel_is_ended_with_its_children(problem, tmp_path):
    mark = tmp_path / "child"
    body = f"import os, time\nif os.fork() == 0: open({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    problem["kernel"].write_text(kernel_text(body))
    found = tool_json("verify_kernel.py", *subject(problem), *ON_CPU, "--seeds", 1, "--timeout", 8, code=4)
    assert found["status"] == "TIMEOUT"
    assert not runs(int(mark.read_text()))


def runs(pid: int) -> bool:
    """Is the process there, and no zombie that only waits to be reaped?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_kernel_prints_does_not_forge_a_verdict(problem):
    body = "print('{\"status\": \"OK\"}')\nopen('result.json', 'w').write('{\"cases\": []}')\nimport os\nos._exit(0)"
    problem["kernel"].write_text(kernel_text(body))
    found = tool_json("verify_kernel.py", *subject(problem), *ON_CPU, "--seeds", 1, code=1)
    assert found["status"] != "OK"


def test_the_candidate_is_judged_in_the_dtype_of_the_task(problem):
    body = "return torch.clamp(x.float() * self.weight.float(), min=0).to(x.dtype) * self.scale"
    problem["kernel"].write_text(kernel_text(body))
    found = tool_json("verify_kernel.py", *subject(problem), *ON_CPU, "--seeds", 1, "--dtype", "bf16")
    assert found["cases"][0]["outputs"][0]["dtype"] == "torch.bfloat16"


def test_lower_precision_than_asked_fails_in_fp32(problem):
    problem["kernel"].write_text(
        kernel_text("return (torch.clamp(x * self.weight, min=0) * self.scale).half().float()")
    )
    assert tool_json("verify_kernel.py", *subject(problem), *ON_CPU, "--seeds", 1, code=1)["status"] == "WRONG_VALUES"


def test_a_task_that_zeros_would_pass_is_refused(problem):
    problem["reference"].write_text(
        REFERENCE.replace("torch.relu(x * self.weight)", "torch.relu(-(x * self.weight).abs())")
    )
    problem["kernel"].write_text(kernel_text("return torch.zeros_like(x)"))
    assert tool_json("verify_kernel.py", *subject(problem), *ON_CPU, "--seeds", 1, code=1)["status"] == "INVALID_TASK"


def test_a_broken_reference_is_the_references_fault(problem):
    problem["reference"].write_text(REFERENCE.replace("torch.relu(x", "torch.relu(no_such_name"))
    found = tool_json("verify_kernel.py", *subject(problem), *ON_CPU, "--seeds", 1, code=1)
    assert found["status"] == "INVALID_REFERENCE"


def test_usage(problem, tmp_path):
    for arguments in (
        [],
        ["--kernel", problem["kernel"]],
        ["--kernel", tmp_path / "none.py", "--reference", problem["reference"]],
        [*subject(problem), "--workspace", tmp_path],
        ["--workspace", tmp_path],
        [*subject(problem), "--seeds", "0"],
        [*subject(problem), *ON_CPU, "--workload", "absent"],
    ):
        done = run_tool("verify_kernel.py", *arguments)
        assert done.returncode == 2, (arguments, done.stderr)


def test_nothing_is_left_in_the_callers_folder_or_cache(problem, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    run_tool("verify_kernel.py", *subject(problem), *ON_CPU, "--seeds", 1, cwd=home, env={"HOME": str(home)})
    assert not list(home.iterdir())


def test_a_triton_kernel_runs_in_the_interpreter():
    example = BUNDLE / "examples" / "row_softmax"
    for name in ("three_passes.py", "one_pass.py"):
        arguments = ["--kernel", example / name, "--reference", example / "reference.py", "--dtype", "bf16"]
        found = tool_json("verify_kernel.py", *arguments, *ON_CPU, "--workload", "small", "--seeds", 1)
        assert found["status"] == "OK" and found["device"] == "cpu-interpreter"


def test_the_last_seed_is_secret_and_new_each_time():
    first, second = verify.draw_seeds(3), verify.draw_seeds(3)
    assert first[:2] == [0, 1] and first[2] != second[2]


def test_a_random_reference_makes_no_task(problem):
    problem["reference"].write_text(REFERENCE.replace("torch.relu(x", "torch.rand_like(x) * torch.relu(x"))
    found = tool_json("verify_kernel.py", *subject(problem), *ON_CPU, "--seeds", 1, code=1)
    assert found["status"] == "INVALID_TASK" and "different results" in found["summary"]


def test_a_tensor_subclass_is_no_result(problem):
    body = "return (torch.clamp(x * self.weight, min=0) * self.scale).as_subclass(Lazy)"
    problem["kernel"].write_text("import torch\nclass Lazy(torch.Tensor): pass\n" + kernel_text(body))
    assert tool_json("verify_kernel.py", *subject(problem), *ON_CPU, "--seeds", 1, code=1)["status"] == "CHEAT_SUSPECT"


def test_a_report_on_fewer_cases_is_no_success(problem):
    body = "import json, os\nopen('result.json', 'w').write(json.dumps({'cases': []}))\nos._exit(0)"
    problem["kernel"].write_text(kernel_text(body))
    found = tool_json("verify_kernel.py", *subject(problem), *ON_CPU, code=1)
    assert found["status"] == "RUNTIME_ERROR" and "fewer cases" in found["summary"]


def test_pytorch_itself_is_right_where_its_own_dtype_is_inexact(problem):
    problem["reference"].write_text(REFERENCE.replace("torch.relu(x * self.weight)", "torch.exp(4 * x * self.weight)"))
    problem["kernel"].write_text(kernel_text("return torch.exp(4 * x * self.weight) * self.scale"))
    found = tool_json("verify_kernel.py", *subject(problem), *ON_CPU, "--dtype", "bf16")
    assert found["status"] == "OK" and found["worst_rel_err"] > 0.024


def test_a_workload_may_have_any_name(problem):
    problem["reference"].write_text(REFERENCE.replace('"tall"', '"fp32/33 x 16"'))
    found = tool_json("verify_kernel.py", *subject(problem), *ON_CPU, "--seeds", 1)
    assert {case["workload"] for case in found["cases"]} == {"default", "fp32/33 x 16"}
