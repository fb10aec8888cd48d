"""Versions of what the bundle stands on: which are taken, what an old one gets told, what differs between them."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from types import SimpleNamespace

import forks_with_torch
import pytest
from conftest import BUNDLE, run_tool

sys.path.insert(0, str(BUNDLE / "scripts"))
import requirements
import tested_with
import torch_build
from kernelopt import bundle, environment, packages
from kernelopt.errors import EnvironmentLacks

BUILDS = json.loads((BUNDLE / "reference" / "torch_builds.json").read_text())["builds"]

KERNELS = """
import torch, triton, triton.language as tl

@triton.jit
def twice(x):
    return x * 2.0

@triton.jit
def plain(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, twice(tl.load(x + at, mask=at < n)), mask=at < n)

@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128}, num_warps=8)], key=["n"])
@triton.heuristics({"EVEN": lambda arguments: arguments["n"] % arguments["BLOCK"] == 0})
@triton.jit
def tuned(x, y, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)

def launch():
    x, y = torch.zeros(256), torch.zeros(256)
    plain[(1,)](x, y, 256, BLOCK=64)
    plain[(1,)](x, y, 256, BLOCK=128)
    tuned[(1,)](x, y, 256)
"""


def test_what_triton_compiled_and_chose_is_found_in_this_version_of_it(tmp_path):
    """With its real compiler; no GPU and no launch, so registers, which the driver tells, are not known."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    code = f"import runpy; runpy.run_path({str(BUNDLE / 'tests' / 'compile_elsewhere.py')!r}, run_name='__main__')"
    kernels = tmp_path / "kernels.py"
    done = forks_with_torch.run(code, kernels, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stdout
    found = {kernel["name"]: kernel for kernel in json.loads(done.stdout.splitlines()[-1])}
    assert {name: len(kernel["compiled"]) for name, kernel in found.items()} == {"twice": 0, "plain": 2, "tuned": 2}
    assert [one["num_warps"] for one in found["tuned"]["compiled"]] == [4, 8]
    assert found["plain"]["autotuned"] is None and "BLOCK: 128" in found["tuned"]["autotuned"]["best"]
    assert [trial["times_us"][0] for trial in found["tuned"]["autotuned"]["trials"]] == [9000, 8000]


# ---- What is too old ----


def package(folder: Path, name: str, **files: str) -> Path:
    """A stand-in for an installed package: its folder, with these files."""
    (folder / name).mkdir(parents=True)
    for file, text in {"__init__": "", **files}.items():
        (folder / name / f"{file}.py").write_text(text)
    return folder / name / "__init__.py"


@pytest.mark.parametrize(
    ("name", "files", "said"),
    [
        (
            "torch",
            {"version": "__version__ = '2.5.1+cu124'\n"},
            "torch 2.5.1.cu124 in .* is too old, .* need 2.6 or newer",
        ),
        ("torch", {"version": "from typing import Optional\n__version__ = '2.6.0a0+ecf3bae40a.nv25.01'\n"}, None),
        ("torch", {"version": "__version__: str = '2.13.0'\n"}, None),
        ("torch", {}, None),  # nothing is known
        ("triton", {"__init__": "__version__ = '3.1.0'\n"}, "triton 3.1.0 in .* is too old, .* need 3.2 or newer"),
        ("triton", {"__init__": '"""isort:skip_file"""\n__version__ = "3.2.0+git0d4682f0"\n'}, None),
        ("numpy", {"version": "__version__ = '1.21.0'\n"}, None),  # no least version
        ("pynvml", {"nvml": "def nvmlDeviceGetCurrentClocksThrottleReasons(handle): pass\n"}, "pip uninstall pynvml"),
        ("pynvml", {"nvml": f"def {packages.NVML_NEEDED}(handle): pass\n"}, None),
    ],
)
def test_an_old_package_is_named_with_its_mend(tmp_path, monkeypatch, name, files, said):
    package(tmp_path, name, **files)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    reason = packages.unfit(name)
    assert reason is None if said is None else re.search(said, reason), reason
    if said:
        with pytest.raises(EnvironmentLacks, match=said):
            bundle.require(name)


def test_what_is_installed_here_is_new_enough_and_its_version_is_read():
    for name, least in packages.LEAST.items():
        text, numbers = packages.version(Path(importlib.util.find_spec(name).origin))
        assert importlib.metadata.version(name) in (text, text.partition("+")[0]) and numbers >= least
        assert packages.unfit(name) is None
    assert packages.unfit("pynvml") is None and packages.unfit("no_such_package") is None


def test_an_old_torch_is_the_machines_fault_and_not_the_references(tmp_path, problem):
    package(tmp_path / "old", "torch", version="__version__ = '2.5.1'\n")
    files = ["--kernel", problem["kernel"], "--reference", problem["reference"], "--device", "cpu-interpreter"]
    done = run_tool("verify_kernel.py", *files, env={"PYTHONPATH": str(tmp_path / "old")})
    assert done.returncode == 3 and "torch 2.5.1" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_pynvml_that_hides_nvidias_is_named(tmp_path):
    package(tmp_path / "old", "pynvml", nvml="def nvmlInit(): pass\n")
    done = run_tool("gpu_specs.py", "detect", env={"PYTHONPATH": str(tmp_path / "old")})
    assert done.returncode == 3 and "pip uninstall pynvml" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_the_least_versions_are_the_same_everywhere():
    project = (BUNDLE / "pyproject.toml").read_text()
    needed, oldest = (requirements.requirements(project, group) for group in ("dependencies", "oldest"))
    pinned = dict(one.split("==") for one in oldest if "==" in one)
    for name, least in packages.LEAST.items():
        assert pinned[name] == ".".join(map(str, (*least, 0)))
    for one in needed:
        name, _, least = one.partition(">=")
        assert not least or pinned[name].startswith(f"{least}.")
    assert needed[0] == f"torch=={BUILDS[0]['torch']}"


# ---- What set-up installs ----


def gpu(capability: str | None = "9.0", driver: str = "580.159.04", name: str = "NVIDIA H200") -> dict:
    return torch_build.read(", ".join(filter(None, (name, driver, capability))))


@pytest.mark.parametrize(
    ("gpus", "torch"),
    [
        ([], "2.13.0"),
        ([gpu()], "2.13.0"),
        ([gpu("8.9"), gpu("8.6")], "2.13.0"),
        ([gpu("12.0", "581.42")], "2.13.0"),
        ([gpu("9.0", "570.86.15")], "2.10.0"),  # CUDA 13 wants 580
        ([gpu("9.0", "525.60.13")], "2.10.0"),
        ([gpu("7.0")], "2.10.0"),  # V100
        ([gpu("6.1")], "2.7.1"),
        ([gpu("6.1"), gpu("9.0")], "2.7.1"),  # all of them
        ([gpu("5.0"), gpu("12.0")], "2.13.0"),  # none has code for both
        ([gpu(None, "580.1")], "2.13.0"),
    ],
)
def test_set_up_takes_the_newest_torch_that_runs_on_the_gpus(gpus, torch):
    assert torch_build.choose(gpus, BUILDS)["torch"] == torch


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ([gpu("7.0", "470.256.02")], "install driver 525 or newer"),
        ([gpu("3.5", "580.1")], r"compute capability 3\.5.*put a torch built for it"),
        ([gpu("11.0", "550.1")], "put a torch built for it"),  # no driver helps
        ([gpu("3.7", "470.82.01")], "put a torch built for it"),
        ([gpu("10.3", "515.1")], "install driver 525 or newer"),
        ([gpu(None, "450.1")], "NVIDIA H200 under the NVIDIA driver 450"),
    ],
)
def test_set_up_refuses_where_no_torch_runs(gpus, said):
    with pytest.raises(torch_build.NoneFits, match=said):
        torch_build.choose(gpus, BUILDS)


def test_what_nvidia_smi_says_is_read():
    assert torch_build.read("Tesla V100-SXM2-16GB, 535.183.01, 7.0") == {
        "name": "Tesla V100-SXM2-16GB",
        "driver": 535,
        "capability": [7, 0],
    }
    assert torch_build.read("NVIDIA GB10, 580.95.05, [N/A]")["capability"] is None
    assert torch_build.read("No devices were found") is None


@pytest.fixture
def bare(tmp_path):
    """A copy of what set-up reads, and the environment to run it in: no index to install from, a Python without torch.

    That Python is a stand-in. Like Debian's it makes no environment with pip, because that takes five seconds."""
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in "-m venv --without-pip"*) ;; "-m venv"*) exit 1;; esac\n'
        f'exec {tmp_path}/bare/bin/python "$@"\n'
    )
    python.chmod(0o755)
    bundle_copy = tmp_path / "bundle"
    for name in ("scripts", "tools"):
        shutil.copytree(BUNDLE / name, bundle_copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (bundle_copy / "reference").mkdir()
    for name in ("pyproject.toml", "reference/torch_builds.json"):
        shutil.copyfile(BUNDLE / name, bundle_copy / name)
    own = ("PIP_", "PYTHON", "KERNELOPT")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    environment |= {"PYTHON": str(python), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    return SimpleNamespace(path=bundle_copy, environment=environment)


def set_up(bare, *groups: str, **options) -> subprocess.CompletedProcess:
    command = ["bash", str(bare.path / "scripts" / "setup.sh"), *groups]
    return subprocess.run(command, env=bare.environment, capture_output=True, text=True, **options)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the builds were looked at for x86_64")
def test_set_up_asks_the_driver(bare, tmp_path):
    """nvidia-smi is a stand-in that does not know compute_cap when its driver is old."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    bare.environment["PATH"] = f"{program.parent}:{os.environ['PATH']}"
    old = 'case "$*" in *compute_cap*) echo \'Field "compute_cap" is not a valid field to query.\'; exit 2;; esac\n'
    for said, code, expected in (
        ("Tesla V100-SXM2-16GB, 470.57.02", 3, r"setup: no build of torch .* NVIDIA driver 470: install driver 525"),
        (
            "Tesla V100-SXM2-16GB, 535.183.01, 7.0",
            3,
            r"setup: could not install torch==2\.10\.0 ",
        ),  # and there is no index
    ):
        program.write_text(f"#!/bin/sh\n{old if said.count(',') == 1 else ''}echo '{said}'\n")
        program.chmod(0o755)
        done = set_up(bare)
        assert done.returncode == code and re.search(expected, done.stderr) and done.stdout == "", done.stderr


def test_set_up_refuses_a_host_whose_torch_is_too_old(bare):
    site = subprocess.run(
        [bare.environment["PYTHON"], "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True
    )
    package(Path(site.stdout.decode().strip()), "torch", version="__version__ = '2.5.1'\n")
    done = set_up(bare)
    assert done.returncode == 3 and "torch 2.5.1" in done.stderr and "could not install" not in done.stderr, done.stderr


def test_set_up_makes_its_environment_elsewhere_and_clears_no_folder_of_the_users(bare, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("x")
    bare.environment["KERNELOPT_VENV"] = str(mine)
    done = set_up(bare)
    assert done.returncode == 2 and "no environment of Python" in done.stderr and (mine / "thesis.tex").exists()
    bare.environment["KERNELOPT_VENV"] = str(tmp_path / "new" / "one")
    assert set_up(bare).returncode == 3  # there is no index
    assert (tmp_path / "new" / "one" / "bin" / "python").exists() and not (bare.path / ".venv").exists()
    assert python_of(bare) == str(tmp_path / "new" / "one" / "bin" / "python")


def test_set_up_makes_its_environment_in_the_users_cache(bare, tmp_path):
    """One for all copies of this version; in the bundle only where it was made there before."""
    name = f"gpu-kernel-optimizer/venv-{environment.version()}-{platform.machine()}"
    bare.environment |= {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": "relative/paths/do/not/count"}
    before = set(bare.path.rglob("*"))
    assert set_up(bare).returncode == 3  # there is no index
    assert (tmp_path / "home" / ".cache" / name / "bin" / "python").exists()
    assert set(bare.path.rglob("*")) == before
    bare.environment["XDG_CACHE_HOME"] = str(tmp_path / "xdg")
    assert python_of(bare) != str(tmp_path / "xdg" / name / "bin" / "python")  # not made yet
    set_up(bare)
    assert python_of(bare) == str(tmp_path / "xdg" / name / "bin" / "python")
    venv.create(bare.path / ".venv", with_pip=False)
    assert python_of(bare) == str(bare.path / ".venv" / "bin" / "python")


def python_of(bare) -> str:
    command = ["bash", bare.path / "scripts" / "python.sh"]
    return subprocess.run(command, env=bare.environment, capture_output=True, text=True, check=True).stdout.strip()


def test_set_up_without_a_home_is_one_sentence(bare):
    for variable in ("HOME", "XDG_CACHE_HOME"):
        bare.environment.pop(variable, None)
    done = set_up(bare)
    assert done.returncode == 3 and done.stderr.count("\n") == 1 and "set KERNELOPT_VENV" in done.stderr, done.stderr
    assert python_of(bare)  # the tools start, and say which package they lack


def test_a_tool_goes_on_in_the_environment_of_set_up(bare, tmp_path):
    """A stand-in for its Python, which says how it was called."""
    folder = tmp_path / "cache" / "gpu-kernel-optimizer" / f"venv-{environment.version()}-{platform.machine()}"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text('#!/bin/sh\necho went on with "$@"\n')
    (folder / "bin" / "python").chmod(0o755)
    bare.environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    tool = str(bare.path / "tools" / "gpu_specs.py")
    done = subprocess.run(
        [bare.environment["PYTHON"], tool, "list"], env=bare.environment, capture_output=True, text=True
    )
    assert done.stdout == f"went on with {tool} list\n", done.stderr


def test_set_up_where_nothing_can_be_written_says_what_to_do():
    """As another user, since nothing is read-only for root."""
    with tempfile.TemporaryDirectory() as folder:
        bundle_copy = Path(folder, "bundle")
        for name in ("scripts", "tools"):
            shutil.copytree(BUNDLE / name, bundle_copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copyfile(BUNDLE / "pyproject.toml", bundle_copy / "pyproject.toml")
        for path in (Path(folder), bundle_copy):
            path.chmod(0o555)
        other = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
        environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
        try:
            subprocess.run(["python3", "-c", ""], env=environment, check=True, **other)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no Python for another user: {error}")
        command = ["bash", bundle_copy / "scripts" / "setup.sh"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, **other)
        assert done.returncode == 3 and "absent or read-only" in done.stderr and "KERNELOPT_VENV" in done.stderr, (
            done.stderr
        )
        assert done.stderr.count("\n") == 1
        for path in (bundle_copy, Path(folder)):
            path.chmod(0o755)


# ---- The page of what the tests ran on ----

RESULT = """<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests"><testsuite name="pytest" errors="1"
failures="2" skipped="30" tests="133" time="90.0" timestamp="2026-11-22T15:00:00"
hostname="h"></testsuite></testsuites>"""


def test_a_run_of_the_tests_replaces_its_row_and_no_other():
    assert tested_with.counted([RESULT]) == {"passed": "100", "skipped": "30", "failed": "3", "minutes": "1.5"}
    assert tested_with.counted([RESULT, RESULT])["passed"] == "200"
    page = (BUNDLE / "docs" / "tested-with.md").read_text()
    row = dict.fromkeys(tested_with.COLUMNS, "x") | tested_with.counted([RESULT])
    once = tested_with.with_row(page, row)
    assert once != page and tested_with.with_row(once, row) == once
    again = tested_with.with_row(once, {**row, "date": "later", "failed": "0"})
    assert again.count("| x |") == once.count("| x |") - 1 and "| later |" in again
    other = tested_with.with_row(once, {**row, "torch": "2.0"})
    assert set(once.splitlines()) < set(other.splitlines())
