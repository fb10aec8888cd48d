"""Codex's sandbox, mostly by its `sandbox` command, which asks no model: the cheapest test with a client.

bench.run puts the client's programs on the PATH, and the network namespace stays around it.
"""

import ast
import os
import sys

import pytest
from conftest import BUNDLE, STAND_INS, kernel_text

from .bench import PYTHON, bench_of
from .scripted_model import step

SANDBOX = "codex sandbox --config 'sandbox_mode=\"workspace-write\"' --"
TRIES = """
import ctypes, sys
sys.path.insert(0, {stand_ins!r})
from socket_filter import REFUSED
import os
machine = os.uname().machine
library = ctypes.CDLL(None, use_errno=True)
def is_refused(number):
    library.syscall(number, -1, 0, 0, 0, 0, 0)
    return ctypes.get_errno() == 1
print(sorted(name for name, number in REFUSED[machine].items() if is_refused(number)))
"""


@pytest.fixture
def codex(tmp_path):
    yield from bench_of("codex", tmp_path / "home", tmp_path / "project")


@pytest.fixture
def problem_there(problem, codex):
    for name, path in problem.items():
        (codex.project / f"{name}.py").write_bytes(path.read_bytes())
    return codex


def test_a_kernel_is_verified_inside(problem_there):
    tool = f"{PYTHON} {BUNDLE}/tools/verify_kernel.py --kernel kernel.py --reference reference.py"
    said = problem_there.run(f"{SANDBOX} {tool} --device cpu-interpreter")
    assert "\nOK on cpu-interpreter: 19 cases" in said, said


def test_variants_are_explored_inside(problem_there):
    (problem_there.project / "other.py").write_text(kernel_text("return torch.relu(x * self.weight) * self.scale"))
    tool = f"{PYTHON} {BUNDLE}/tools/explore_kernels.py kernel.py other.py --reference reference.py"
    said = problem_there.run(f"{SANDBOX} {tool} --device cpu-interpreter")
    assert [line.split()[:2] for line in said.splitlines() if line.startswith(("kernel ", "other "))] == [
        ["kernel", "OK"],
        ["other", "OK"],
    ], said


def test_the_loop_says_that_its_agents_cannot_be_confined_inside(codex):
    """A sandbox of Codex in one of Codex does not work."""
    loop = f"{PYTHON} {BUNDLE}/tools/optimize_kernel.py --workspace . --client codex"
    done = codex.try_to(f"{SANDBOX} {loop}")
    assert done.returncode == 3 and "codex's own sandbox does not work here (error building" in done.stdout, done.stdout


def test_the_stand_in_refuses_what_codex_refuses(codex):
    """tests/stand_ins/socket_filter.py, which the usual tests use, holds its list by heart."""
    sys.path.insert(0, str(STAND_INS))
    import socket_filter

    (codex.project / "tries.py").write_text(TRIES.format(stand_ins=str(STAND_INS)))
    said = codex.run(f"{SANDBOX} {PYTHON} tries.py").splitlines()[-1]
    assert ast.literal_eval(said) == sorted(socket_filter.REFUSED[os.uname().machine])


SETTING = 'sandbox_mode = "workspace-write"'


@pytest.mark.parametrize("option", ["", "--sandbox workspace-write", f"--config '{SETTING}'"])
def test_exec_alone_may_only_read(codex, option):
    """The row of `exec` in docs/install.md, and the sentence below the table on the setting."""
    codex.model.follow(step("shell", "touch written.txt; echo tried it"), step("say", "done"))
    codex.run(f"codex exec {option}")
    assert "tried it" in codex.model.said
    assert (codex.project / "written.txt").is_file() is bool(option), codex.model.said[-2000:]
    assert f"`{SETTING}`" in (BUNDLE / "docs" / "install.md").read_text()
