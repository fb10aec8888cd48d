"""The evaluations with the clients as their agents: the plumbing, because a scripted model answers them."""

import json
import sys

import pytest
from conftest import BUNDLE, run_script

from .bench import ROUTER, title
from .scripted_model import step

EVALS = BUNDLE / "evals"
GOOD = json.loads((EVALS / "cases" / "noise" / "samples.json").read_text())["good"]


def test_a_case_runs_with_the_clients_own_command(bench, tmp_path):
    """In both arms the model writes what a good agent would, in the folder that its shell is in."""
    answer = GOOD["answer"]
    files = [f"cat > {name} <<'END'\n{json.dumps(content)}\nEND" for name, content in GOOD.items() if name != "answer"]
    bench.model.follow(step("shell", "\n".join(files)), step("say", answer))
    result = evaluated(bench, tmp_path / "out", "--arm", "with", "without")
    assert [run["outcome"] for run in result["runs"]] == ["passed", "passed"], result
    assert result["plumbing"] and result["client_version"] and result["agent"].startswith(bench.name)


def test_the_arm_with_the_bundle_opens_its_skill(bench, tmp_path):
    bench.model.follow(step("skill", ROUTER), step("say", "I have read it"))
    result = evaluated(bench, tmp_path / "out", "--arm", "with")
    assert [run["outcome"] for run in result["runs"]] == ["failed"] and title(ROUTER) in bench.model.said


def evaluated(bench, out, *options: str) -> dict:
    """results.json of the case `noise`, once an arm."""
    with pytest.MonkeyPatch.context() as patch:
        bench.adopt(patch)
        patch.setattr(sys, "path", [str(EVALS), *sys.path])
        command = ["run", "--client", bench.name, "--plumbing", "--case", "noise", "--repeats", "1", "--out", str(out)]
        done = run_script(EVALS / "run.py", *command, *options)
    assert "plumbing: a scripted model" in done.stdout, done.stderr
    return json.loads((out / "results.json").read_text())
