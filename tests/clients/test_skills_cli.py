"""`npx skills add`: the usual way in, from a folder that holds what git tracks and what set-up and tests leave there."""

from pathlib import Path

import pytest

from .bench import ALL_SKILLS, BANDWIDTH, PYTHON, ROUTER, bundle_root, listed, repository, title
from .scripted_model import step

LISTED = {"codex": ALL_SKILLS, "opencode": ALL_SKILLS, "claude": [ROUTER], "gemini": [ROUTER]}
AGENTS = "claude-code codex gemini-cli opencode cursor"
MOST_BYTES = 9 << 20  # of which the records and reports of the examples are 6 MiB


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = repository(tmp_path_factory.mktemp("source") / "repository")
    for name in (".venv/bin/python", ".clients/node_modules/x.js", "tools/__pycache__/x.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    return folder


@pytest.fixture
def added(bench, source):
    bench.run(f"DISABLE_TELEMETRY=1 skills add {source} --yes --agent {AGENTS}", prompt="")
    return bench


def test_one_skill_lands_with_all_that_is_needed_and_no_more(added, source):
    skills = added.project / ".agents" / "skills"
    assert [path.name for path in skills.iterdir()] == [ROUTER]
    here = {path.name for path in (skills / ROUTER).iterdir()}
    assert here == {path.name for path in (source / ".package").iterdir()}
    size = sum(path.stat().st_size for path in skills.rglob("*") if path.is_file())
    assert 1 << 20 < size < MOST_BYTES and not [path for path in skills.rglob("*") if path.is_symlink()]
    assert (added.project / ".claude" / "skills" / ROUTER / "SKILL.md").is_file()


def test_the_router_opens_sub_skills_and_tools_run(added):
    added.model.follow(
        step("skill", ROUTER),
        step("shell", lambda said: f"cat {bundle_root(said)}/skills/gpu-kernel-baseline/SKILL.md"),
        step("shell", lambda said: f"{PYTHON} {bundle_root(said)}/tools/gpu_specs.py lookup H200 memory_bandwidth"),
        step("say", "all done"),
    )
    added.run(added.client.command)
    assert listed(added.model.requests[0].text) == LISTED[added.name]
    for name in (ROUTER, "gpu-kernel-baseline"):
        assert title(name) in added.model.said
    assert BANDWIDTH in added.model.said
    assert Path(bundle_root(added.model.requests[1])).is_relative_to(added.project)
