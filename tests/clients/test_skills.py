"""The skills in each client: installed, listed, opened, and a tool run from there."""

import os
import shutil
from pathlib import Path

import pytest
from conftest import BUNDLE, REFERENCE

from .bench import ALL_SKILLS, BANDWIDTH, PYTHON, ROUTER, bundle_root, listed, title
from .scripted_model import step


@pytest.mark.parametrize("mode", ["", "--copy"])
def test_installed_skills_are_listed_and_opened_and_gone_when_taken_away(bench, mode):
    bench.install(mode)
    bench.model.follow(
        step("skill", ROUTER),
        step("read", lambda said: f"{bundle_root(said)}/skills/gpu-kernel-baseline/SKILL.md"),
        step("skill", "gpu-kernel-profile-optimizer"),
        step("shell", lambda said: f"{PYTHON} {bundle_root(said)}/tools/gpu_specs.py lookup H200 memory_bandwidth"),
        step("say", "all done"),
    )
    bench.run(bench.client.command)
    assert listed(bench.model.requests[0].text) == ALL_SKILLS
    for name in (ROUTER, "gpu-kernel-baseline", "gpu-kernel-profile-optimizer"):
        assert title(name) in bench.model.said
    assert BANDWIDTH in bench.model.said
    bench.install("--uninstall")
    bench.model.follow(step("say", "all done"))
    bench.run(bench.client.command)
    assert listed(bench.model.said) == []


# What docs/install.md tells to allow, {bundle} as BUNDLE there; workspaces are made in /tmp, in the middle of a session.
ALLOWED = {
    "claude": "claude -p --allowedTools Bash Read --permission-mode acceptEdits --add-dir /tmp",
    "codex": "codex exec --sandbox workspace-write --skip-git-repo-check",
    "gemini": "gemini --approval-mode=yolo --skip-trust --include-directories {bundle},/tmp",
    "opencode": "opencode run --auto",
}


def test_what_the_page_allows_is_enough_for_a_workspace_that_is_made_meanwhile(bench):
    options = ALLOWED[bench.name].partition(" --")[2].format(bundle="BUNDLE")
    assert f"`--{options}`" in (BUNDLE / "docs" / "install.md").read_text()
    workspace = Path(f"/tmp/kernel_opt_{bench.name}_{os.getpid()}")
    kernel = workspace / "kernel.py"
    init = f"bash {BUNDLE}/reference/workspace_init.sh {workspace.name.removeprefix('kernel_opt_')} op.py"
    (bench.project / "op.py").write_text(REFERENCE)
    bench.model.follow(
        step("shell", init), step("read", str(kernel)), step("write", str(kernel), "new = 1\n"), step("say", "done")
    )
    try:
        bench.run(ALLOWED[bench.name].format(bundle=BUNDLE))
        assert kernel.read_text().strip() == "new = 1", bench.model.said[-2000:]
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
