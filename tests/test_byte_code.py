"""Byte code that set-up keeps for machines whose torch has none (kernelopt/byte_code.py)."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BUNDLE
from kernelopt import byte_code


@pytest.fixture
def bare_package(tmp_path, monkeypatch) -> Path:
    """A package without byte code, as a stand-in for torch; set-up imports it and its module."""
    package = tmp_path / "site" / "bare_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("import json\n")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return package


def keep(package: Path, folder: Path) -> bool:
    return byte_code.keep(folder, package.name, ("no_such_module", f"{package.name}.part"))


def matches(package: Path, **variables) -> list[str]:
    """The package's byte code that Python reads with these variables."""
    command = [sys.executable, "-v", "-c", f"import {package.name}.part"]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    return re.findall(rf"^# (\S+) matches \S*{package.name}/part\.py$", done.stderr, re.MULTILINE)


def test_byte_code_is_kept_once_and_not_beside_the_package(bare_package, tmp_path):
    folder = tmp_path / "kept"
    assert keep(bare_package, folder)
    assert not list(bare_package.rglob("*.pyc"))
    assert matches(bare_package) == []
    assert matches(bare_package, PYTHONPYCACHEPREFIX=str(folder)) == [byte_code.below(folder, bare_package / "part.py")]
    assert not keep(bare_package, folder)


def test_it_is_written_anew_for_another_release(bare_package, tmp_path):
    folder = tmp_path / "kept"
    keep(bare_package, folder)
    os.utime(bare_package / "__init__.py", (1_000_000_000, 1_000_000_000))
    assert keep(bare_package, folder)
    assert not keep(bare_package, folder)


def test_nothing_is_kept_for_a_package_that_has_byte_code(bare_package, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    subprocess.run([sys.executable, "-c", f"import {bare_package.name}"], check=True)
    assert list(bare_package.rglob("*.pyc"))
    assert not keep(bare_package, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_without_the_package_nothing_is_kept(tmp_path):
    assert not byte_code.keep(tmp_path / "kept", "no_such_package", ())


def test_half_of_it_is_never_kept(bare_package, tmp_path, monkeypatch):
    monkeypatch.setattr(byte_code, "write", lambda *_: None)
    with pytest.raises(OSError, match="no byte code could be written below"):
        keep(bare_package, tmp_path / "kept")
    assert not list(tmp_path.glob("kept*"))


def test_a_file_of_another_size_is_another_file(bare_package, tmp_path):
    """In images whose files all have one time."""
    folder, file = tmp_path / "kept", bare_package / "__init__.py"
    keep(bare_package, folder)
    before = file.stat()
    file.write_text("new = 1\n")
    os.utime(file, (before.st_atime, before.st_mtime))
    assert keep(bare_package, folder)


@pytest.fixture
def bare_torch(bare_package, tmp_path, monkeypatch) -> Path:
    """The environment's folder, of a Python whose torch, a stand-in, has no byte code."""
    monkeypatch.setenv("KERNELOPT_VENV", str(tmp_path / "venv"))
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    found = importlib.util.find_spec(bare_package.name)
    monkeypatch.setattr(byte_code.importlib.util, "find_spec", lambda _: found)
    return tmp_path / "venv"


@pytest.mark.parametrize("own", ["/somewhere", ""])
def test_workers_read_it_unless_the_user_has_a_folder(interpreter, bare_torch, own, monkeypatch):
    assert "PYTHONPYCACHEPREFIX" not in interpreter._environment()
    byte_code.keep(bare_torch / byte_code.FOLDER, modules=())
    if own:
        monkeypatch.setenv("PYTHONPYCACHEPREFIX", own)
    assert interpreter._environment()["PYTHONPYCACHEPREFIX"] == (own or str(bare_torch / "byte-code"))


def test_workers_read_none_that_is_not_current(interpreter, bare_torch, bare_package):
    (bare_torch / byte_code.FOLDER).mkdir(parents=True)
    assert "PYTHONPYCACHEPREFIX" not in interpreter._environment()
    byte_code.keep(bare_torch / byte_code.FOLDER, modules=())
    os.utime(bare_package / "__init__.py", (1_000_000_000, 1_000_000_000))
    assert "PYTHONPYCACHEPREFIX" not in interpreter._environment()


def test_workers_read_torchs_own_where_it_has_some(interpreter, tmp_path, monkeypatch):
    import torch

    if not Path(torch.__cached__).exists():
        pytest.skip("this torch has no byte code")
    monkeypatch.setenv("KERNELOPT_VENV", str(tmp_path))
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    (tmp_path / byte_code.FOLDER).mkdir()
    assert "PYTHONPYCACHEPREFIX" not in interpreter._environment()


def test_each_module_that_is_imported_exists():
    for name in byte_code.MODULES:
        if name != "triton.experimental.gluon":  # Triton 3.2 lacks it
            assert importlib.util.find_spec(name), name


def test_set_up_runs_it():
    """Its tests here have no torch to install; byte_code says nothing where torch has its own."""
    assert "-m kernelopt.byte_code" in (BUNDLE / "scripts" / "setup.sh").read_text()
    environment = {**os.environ, "KERNELOPT_VENV": "/dev/null/venv", "PYTHONPATH": str(BUNDLE / "tools")}
    environment.pop("PYTHONPYCACHEPREFIX", None)
    done = subprocess.run(
        [sys.executable, "-m", "kernelopt.byte_code"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
