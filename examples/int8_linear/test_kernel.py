"""The candidate against the reference: the bundle's verifier, plus what you add below.

Run: python -m pytest -q test_kernel.py        (TEST_TIMEOUT_SEC limits each check, 300 by default; TRITON_INTERPRET=1:
a Triton kernel's logic, without a GPU)
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TOOLS = HERE / "../.." / "tools"


def test_candidate_matches_reference():
    limit = os.environ.get("TEST_TIMEOUT_SEC", "300")
    command = [sys.executable, TOOLS / "verify_kernel.py", "--workspace", HERE, "--timeout", limit, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 3:  # the machine lacks something: no verdict
        pytest.skip(done.stderr.strip())
    assert done.stdout, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["status"] == "OK", verdict["summary"]
