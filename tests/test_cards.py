"""The tools on cards that are not there.

A stand-in for the driver (stand_ins/pynvml.py) names the card; torch is the one of this machine, without CUDA."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from conftest import STAND_INS, call_tool, run_tool, stand_in_pynvml, tool_json
from kernelopt.device import gpu_lock
from kernelopt.device.sandbox import Sandbox
from kernelopt.hardware.work import ABSENT
from kernelopt.session.readme import parse_task
from kernelopt.session.task import Task

REFERENCE = """
import torch, torch.nn as nn
class Model(nn.Module):
    def forward(self, x): return torch.relu(x)
def get_inputs(): return [torch.randn(64, 64)]
"""
KERNEL = "def kernel_function(x):\n    return x.clamp(min=0)\n"
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "capability": [9, 0],
    "mib": 81559,
    "max_sm": 1980,
    "max_memory": 2619,
    "bus": 5120,
    "tdp": 700,
    "slot": "00000000:0F:00.0",
}


@pytest.fixture
def machine(tmp_path):
    """A function that gives the environment of a machine with that card."""
    uuids = []

    def with_card(**card) -> dict[str, str]:
        uuid = f"GPU-stand-in-{os.getpid()}-{tmp_path.name}"
        uuids.append(uuid)
        cards = [{"uuid": uuid, **card}]
        return {"STAND_IN_CARDS": json.dumps(cards), "PYTHONPATH": str(STAND_INS), "CUDA_VISIBLE_DEVICES": "0"}

    yield with_card
    for uuid in uuids:
        (gpu_lock.LOCKS / f"kernelopt-{uuid}.lock").unlink(missing_ok=True)


@pytest.fixture
def files(tmp_path) -> dict:
    made = {"kernel": tmp_path / "mine.py", "reference": tmp_path / "theirs.py"}
    made["kernel"].write_text(KERNEL)
    made["reference"].write_text(REFERENCE)
    return made


def start(tmp_path, files, *options) -> str:
    arguments = ["cards", files["kernel"], "--reference", files["reference"], "--root", tmp_path]
    done = run_tool("workspace_init.sh", *arguments, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def task_of(workspace: str) -> Task:
    with open(f"{workspace}/README.md", "rb") as file:
        return parse_task(file.read(), "README.md")


@pytest.fixture
def one_server(interpreter, monkeypatch):
    """The sandboxes of this process fork their children from a server that has imported torch already."""
    server = interpreter.server()
    monkeypatch.setattr(Sandbox, "server", lambda _: server)


def test_a_torch_that_cannot_use_the_gpu_is_the_machines_fault_and_leaves_no_record(
    machine, tmp_path, files, one_server, monkeypatch
):
    """It was called INVALID_REFERENCE, and v0 was recorded as rejected."""
    for name, value in machine(**H100).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "pynvml", stand_in_pynvml())
    workspace = start(tmp_path, files, "--platform", "H100 SXM")
    for command in (
        ("verify_kernel.py", "--workspace", workspace),
        ("measure_kernel_time.py", "--workspace", workspace),
        ("run_gate.py", "--workspace", workspace, "--version", "v0"),
        ("calibrate_gpu.py", "--workspace", workspace),
    ):
        done = call_tool(*command)
        assert done.returncode == 3, done.stdout + done.stderr
        assert "cannot use it" in done.stderr
        assert re.search("Install a torch|install one for this GPU", done.stderr)  # without CUDA, and with it
        assert "reference.py" not in done.stderr
    assert not list(Path(workspace, "memory").iterdir())
    assert task_of(workspace).calibration in (None, ABSENT)


def test_a_page_that_cannot_be_written_is_said_before_anything_is_measured(machine, tmp_path, monkeypatch):
    for name, value in machine(**H100).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "pynvml", stand_in_pynvml())
    done = call_tool("calibrate_gpu.py", "--out", tmp_path / "nowhere" / "page.md")
    assert done.returncode == 2 and "is not a writable folder; name a page in another: --out FILE" in done.stderr


def test_a_slice_of_a_card_is_not_the_card(machine, tmp_path, files):
    part = {"name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "uuid": "MIG-stand-in", "mib": 9728, "sms": 16}
    environment = machine(**H100, mig=[part])
    done = run_tool("gpu_specs.py", "detect", env=environment)
    assert done.returncode == 1 and "MIG 1g.10gb" in done.stderr and "no other product stands in" in done.stderr
    workspace = start(tmp_path, files, "--platform", "H100 SXM")
    done = run_tool("calibrate_gpu.py", "--workspace", workspace, env=environment)
    assert done.returncode == 2 and "start a session without --platform, then calibrate_gpu.py" in done.stderr


def test_an_unknown_platform_is_told_how_to_go_on(tmp_path, files):
    arguments = ["cards", files["kernel"], "--reference", files["reference"], "--root", tmp_path]
    done = run_tool("workspace_init.sh", *arguments, "--platform", "Voodoo 2")
    assert done.returncode == 2 and "without --platform, then calibrate_gpu.py --workspace W" in done.stderr


def test_the_target_of_a_card_that_nobody_measured_says_so(tmp_path, files, run_here):
    workspace = start(tmp_path, files, "--platform", "A100 SXM 80GB")
    run_here("estimate_work.py", "--workspace", workspace)
    done = call_tool("compute_utilization.py", "--workspace", workspace, "--set-targets")
    assert "(documented, may be out of reach)" in done.stdout and "calibrate_gpu.py --workspace" in done.stderr
    goal = call_tool("check_goal.py", workspace)
    assert "(documented, may be out of reach): NOT met" in goal.stdout
    assert tool_json("check_goal.py", workspace, code=1)["targets"][0]["documented"] is True
    report = call_tool("render_report.py", workspace)
    assert report.returncode == 0
    with open(f"{workspace}/report.html", encoding="utf-8") as file:
        assert "documented, may be out of reach" in file.read()
