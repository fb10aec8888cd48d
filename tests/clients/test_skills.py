"""The skills in each client: installed, listed, opened, and a tool run from there."""

import re

import pytest
from kernelopt.loop.clients import CLIENTS

from .bench import PYTHON, ROUTER, SKILL_FILES, bundle_root, listed
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
    bench.run(CLIENTS[bench.name].command_line())
    assert listed(bench.model.requests[0].text) == set(SKILL_FILES)
    for name in (ROUTER, "gpu-kernel-baseline", "gpu-kernel-profile-optimizer"):
        title = re.search(r"^# .*$", SKILL_FILES[name].read_text(), re.MULTILINE)[0]
        assert title in bench.model.said
    assert "memory_bandwidth: 4800 GB/s <- <gpu-wiki>/docs/hardware/h200.md:L" in bench.model.said
    bench.install("--uninstall")
    bench.model.follow(step("say", "all done"))
    bench.run(CLIENTS[bench.name].command_line())
    assert listed(bench.model.said) == set()
