"""The Stop hook: blocks while an armed goal is unmet, six times at most, and never for its own mistakes."""

import json
import os
import shutil
from dataclasses import replace

import pytest
from conftest import BUNDLE, processor_time, run_tool
from kernelopt.session import stop_hook
from kernelopt.session.workspace import Workspace

EXAMPLE = BUNDLE / "examples" / "row_softmax" / "h200"


@pytest.fixture
def finished(tmp_path):
    """A workspace whose goal is met by its record."""
    return shutil.copytree(EXAMPLE, tmp_path / "kernel_opt_example")


@pytest.fixture
def hook(run_here):
    """The hook's answer about a folder, as JSON or nothing."""

    def answer(root, run=run_here, **options) -> dict | None:
        done = run("check_goal.py", root, "--hook", **options)
        assert done.returncode == 0
        return json.loads(done.stdout) if done.stdout else None

    return answer


def miss(root) -> None:
    """Raise the target above what was reached."""
    readme = root / "README.md"
    text = readme.read_text()
    assert '"target": 3866.4' in text
    readme.write_text(text.replace('"target": 3866.4', '"target": 9999.0'))


def test_it_blocks_only_while_armed_and_unmet_and_six_times_at_most(finished, hook, run_here):
    miss(finished)
    assert hook(finished) is None
    assert run_here("check_goal.py", finished, "--arm").stdout == "armed\n"
    for refusal in range(1, 7):
        found = hook(finished)
        assert (
            found["decision"] == "block"
            and "target 9999.0 GB/s" in found["reason"]
            and f"refusal {refusal} of 6" in found["reason"]
        )
    assert hook(finished) is None
    run_here("check_goal.py", finished, "--arm")
    assert hook(finished) is not None
    assert run_here("check_goal.py", finished, "--disarm").stdout == "disarmed\n"
    assert hook(finished) is None


def test_a_goal_that_is_met_disarms_it(finished, hook, run_here):
    run_here("check_goal.py", finished, "--arm")
    assert hook(finished) is None and not (finished / stop_hook.ARMED).exists()


def test_the_record_must_be_of_this_kernel(finished, hook, run_here):
    run_here("check_goal.py", finished, "--arm")
    (finished / "kernel.py").write_text("def kernel_function(x): return x\n")
    assert "kernel.py is not the accepted" in hook(finished)["reason"]


def test_a_broken_record_is_passed_over_and_no_record_is_no_goal(finished, hook, run_here):
    run_here("check_goal.py", finished, "--arm")
    (finished / "memory" / "v9.json").write_text("{")
    assert hook(finished) is None  # v1 met it
    run_here("check_goal.py", finished, "--arm")
    for path in (finished / "memory").glob("v*.json"):
        path.unlink()
    assert "no version is accepted" in hook(finished)["reason"]


@pytest.mark.parametrize("spoil", ["README.md", ".loop/goal.json", None])
def test_its_own_errors_block_nobody(finished, spoil, hook, run_here):
    run_here("check_goal.py", finished, "--arm")
    if spoil:
        (finished / spoil).write_text("nonsense")
    root = finished if spoil else finished / "absent"
    assert hook(root) is None


def test_it_is_quick(finished):
    run_tool("check_goal.py", finished, "--arm")
    miss(finished)
    times = []
    for _ in range(3):
        before = processor_time()
        run_tool("check_goal.py", finished, "--hook")
        times.append(processor_time() - before)
    assert min(times) < 0.2  # 0.05 s on an idle machine; this bound holds on a busy one


def test_the_hook_ends_well_whatever_it_is_called_with(tmp_path):
    """Claude Code takes exit code 2 for a block."""
    for words in (["--hook"], ["--hook", "--json", tmp_path / "none"], [tmp_path, tmp_path, "--hook"]):
        done = run_tool("check_goal.py", *words)
        assert done.returncode == 0 and not done.stdout, words
    assert (
        "name one workspace: check_goal.py W --hook; nothing is blocked" in run_tool("check_goal.py", "--hook").stderr
    )


def test_it_finds_the_task_block_that_the_other_tools_find(finished, hook, run_here):
    """Notes may hold three backticks."""
    miss(finished)
    run_here("check_goal.py", finished, "--arm")
    readme = finished / "README.md"
    text = readme.read_text()
    assert '"additional_notes": "' in text
    readme.write_text(text.replace('"additional_notes": "', '"additional_notes": "a ``` b '))
    assert run_here("check_goal.py", finished).returncode == 1
    assert "target 9999.0 GB/s" in hook(finished)["reason"]


@pytest.mark.parametrize("blocks", ["NaN", "-5", "-1e308", "true", '"x"', "[]", "2.5"])
def test_it_blocks_six_times_at_most_whatever_counts_them(finished, blocks, hook, run_here):
    miss(finished)
    run_here("check_goal.py", finished, "--arm")
    (finished / stop_hook.ARMED).write_text(f'{{"blocks": {blocks}}}')
    assert sum(hook(finished) is not None for _ in range(8)) <= stop_hook.MOST_BLOCKS


@pytest.mark.parametrize("name", ["v².json", "v٣.json", "v007.json"])
def test_what_is_named_almost_like_a_record_is_none(finished, name, hook, run_here):
    miss(finished)
    run_here("check_goal.py", finished, "--arm")
    (finished / "memory" / name).write_text("{}")
    assert "target 9999.0 GB/s" in hook(finished)["reason"]


def test_a_pipe_is_not_waited_for(finished, hook):
    miss(finished)
    run_tool("check_goal.py", finished, "--arm")
    os.mkfifo(finished / "memory" / "v9.json")
    assert "target 9999.0 GB/s" in hook(finished, run_tool, timeout=20)["reason"]
    (finished / "kernel.py").unlink()
    os.mkfifo(finished / "kernel.py")
    assert hook(finished, run_tool, timeout=20) is None


@pytest.mark.parametrize(
    ("basis", "said"),
    [
        ("measured_bf16_matmul: 701 TFLOPS <- <gpu-wiki>/docs/hardware/h100-sxm.md:L38", "a library's rate"),
        ("measured_bf16_tensor_ceiling_sustained: 836 TFLOPS <- <gpu-wiki>/docs/h.md:L44", "other cards' rate"),
        ("measured_bf16_tensor_ceiling_sustained: 836 TFLOPS <- <workspace>/calibration.md:L13", None),
    ],
)
def test_a_target_that_is_met_and_is_no_floor_says_so(finished, run_here, basis, said):
    workspace = Workspace(finished)
    (target,) = workspace.task().targets
    given = replace(target, target=0.1, share_pct=None, basis=basis)
    workspace.update_readme(replace(workspace.task(), targets=(given,)), {})
    done = run_here("check_goal.py", finished)
    assert done.returncode == 0
    assert (f"{said} is no floor" in done.stderr and "measure_ceiling.py" in done.stderr) if said else not done.stderr
