"""Where candidates are examined: a process of its own, a Ray cluster."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from conftest import BUNDLE
from kernelopt.errors import EnvironmentLacks, Refused
from kernelopt.loop import trials
from kernelopt.measure.verdict import Verdict


def test_what_is_packed_is_enough_to_judge_elsewhere_and_says_what_this_machine_lacks(ready):
    for job in trials.PACKED:
        with pytest.raises(EnvironmentLacks, match="no NVIDIA GPU here"):
            trials.examine(job, trials.pack(job, ready, b"x = 1\n"), 60)
    with pytest.raises(Refused, match="died, exit 1"):
        trials.examine("verify", b"no archive", 60)


def test_a_verdict_comes_back_from_the_process_that_verifies(ready, interpreter, monkeypatch):
    monkeypatch.setattr(trials, "Sandbox", lambda *_: contextlib.nullcontext(interpreter))
    verdict = trials.verified(ready, 60)
    sent = json.loads(json.dumps(verdict.to_json(), allow_nan=False))
    assert verdict.status == "OK" and Verdict.from_json(sent) == verdict == trials.RESULTS["verify"].from_json(sent)


@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="this Python cannot filter what it unpacks")
def test_what_a_trial_unpacks_stays_in_its_folder(ready, tmp_path, monkeypatch):
    packed = io.BytesIO(trials.pack("verify", ready, b"x = 1\n"))
    with tarfile.open(fileobj=packed, mode="a") as archive:
        archive.addfile(tarfile.TarInfo("../escaped"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    with pytest.raises(Refused, match="died"):
        trials.examine("verify", packed.getvalue(), 60)
    assert not list((tmp_path / "scratch").iterdir())


def test_a_trial_finds_packages_where_the_caller_does(ready, tmp_path, monkeypatch):
    (tmp_path / "jsonschema_rs.py").write_text("raise SystemExit('the one on PYTHONPATH')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(Refused, match="the one on PYTHONPATH"):
        trials.examine("verify", trials.pack("verify", ready, b"x = 1\n"), 60)


@pytest.mark.parametrize("early", [True, False], ids=["while it starts", "while it reads"])
def test_a_trial_ends_with_the_loop_that_is_killed(early):
    """It would hold the GPU, for which the next run waits. Its input does not end with the loop here."""
    trial = "child.command([sys.executable, '-m', 'kernelopt.loop.trials', 'verify', '60', ''])"
    start = "import subprocess, sys; from kernelopt.remote import child"
    code = f"{start}; p = subprocess.Popen({trial}); print(p.pid, flush=True); p.wait()"
    options = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "env": {**os.environ, "PYTHONPATH": str(BUNDLE / "tools")},
    }
    with subprocess.Popen([sys.executable, "-c", code], text=True, **options) as loops:
        status = Path("/proc") / loops.stdout.readline().strip() / "status"
        while not early and not int(re.search(r"SigCgt:\s*(\w+)", status.read_text())[1], 16) >> signal.SIGTERM - 1 & 1:
            time.sleep(0.05)  # until it listens to the signal
        time.sleep(0 if early else 0.2)
        loops.kill()
        deadline = time.monotonic() + 10
        with contextlib.suppress(OSError):  # gone
            while "zombie" not in status.read_text() and time.monotonic() < deadline:
                time.sleep(0.05)
        assert time.monotonic() < deadline
