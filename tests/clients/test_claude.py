"""What Claude Code alone has: the Stop hook, and this bundle as a plugin of its marketplace."""

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import BUNDLE, run_tool
from kernelopt.session import stop_hook

from .bench import ALL_SKILLS, BANDWIDTH, PYTHON, ROUTER, bench_of, bundle_root, listed, repository
from .scripted_model import step


@pytest.fixture
def claude(tmp_path):
    yield from bench_of("claude", tmp_path / "home", tmp_path / "project")


@pytest.fixture
def workspace(tmp_path, claude) -> Path:
    """A workspace whose goal is met and armed; the project has the hook as check_goal.py --help shows it."""
    root = shutil.copytree(BUNDLE / "examples" / "row_softmax" / "h200", tmp_path / "kernel_opt_example")
    lines = (line.strip() for line in run_tool("check_goal.py", "--help").stdout.splitlines())
    settings = json.loads(next(line for line in lines if line.startswith('{"hooks"')).replace(" W ", f" {root} "))
    (claude.project / ".claude").mkdir()
    (claude.project / ".claude" / "settings.json").write_text(json.dumps(settings))
    assert run_tool("check_goal.py", root, "--arm").returncode == 0
    return root


def test_the_stop_hook_blocks_six_times_each_time_with_its_reason(claude, workspace):
    readme = workspace / "README.md"
    readme.write_text(readme.read_text().replace('"target": 3866.4', '"target": 9999.0'))
    claude.model.follow(step("say", "I am done"))
    claude.run(claude.client.command)
    reasons = [re.findall(r"refusal (\d) of 6", request.text) for request in claude.model.requests]
    assert [len(set(seen)) for seen in reasons] == [0, 1, 2, 3, 4, 5, 6]
    assert "target 9999.0 GB/s" in claude.model.said


def test_the_stop_hook_lets_go_when_the_goal_is_met(claude, workspace):
    claude.model.follow(step("say", "I am done"))
    claude.run(claude.client.command)
    assert len(claude.model.requests) == 1 and not (workspace / stop_hook.ARMED).exists()


def test_the_plugin_brings_all_skills_and_goes(claude, tmp_path):
    source = repository(tmp_path / "repository")
    claude.run(f"claude plugin validate {source}")
    claude.run(f"claude plugin marketplace add {source} && claude plugin install {ROUTER}@{ROUTER}")
    (landed,) = (claude.home / ".claude" / "plugins" / "cache" / ROUTER / ROUTER).iterdir()
    assert {path.name for path in landed.iterdir()} == {path.name for path in (source / ".package").iterdir()}
    claude.model.follow(
        step("skill", f"{ROUTER}:{ROUTER}"),
        step("skill", f"{ROUTER}:gpu-kernel-baseline"),
        step("shell", lambda said: f"{PYTHON} {bundle_root(said)}/tools/gpu_specs.py lookup H200 memory_bandwidth"),
        step("say", "all done"),
    )
    claude.run(claude.client.command)
    assert listed(claude.model.requests[0].text) == ALL_SKILLS
    assert BANDWIDTH in claude.model.said
    claude.run(f"claude plugin uninstall {ROUTER}@{ROUTER}")
    claude.model.follow(step("say", "all done"))
    claude.run(claude.client.command)
    assert listed(claude.model.said) == []
