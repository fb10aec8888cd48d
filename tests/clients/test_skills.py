"""The skills in each client: installed, listed, opened, and a tool run from there."""

import pytest

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
