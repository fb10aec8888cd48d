"""Benches for real clients: each has a HOME of its own and a scripted model on loopback. `bash scripts/test.sh --clients`
installs the clients and runs these tests; the usual run leaves them out."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "loop"))  # scripted_agents
from kernelopt.loop import executors, gpu_steps
from kernelopt.session.workspace import Workspace
from scripted_agents import stand_in

from .bench import Bench, bench_of
from .isolated import interfaces
from .real_clients import REAL_CLIENTS


def pytest_report_header() -> str:
    alone = interfaces() == ["lo"]
    return "clients: " + ("in a namespace with loopback alone" if alone else "no network namespace; proxies refuse")


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if "tests/clients/" in item.path.as_posix():
            item.add_marker(pytest.mark.clients)
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="module", params=REAL_CLIENTS)
def home(request, tmp_path_factory) -> tuple[str, Path]:
    """A client's name and its HOME, which several tests share: a first start takes some clients seconds."""
    return request.param, tmp_path_factory.mktemp(request.param) / "home"


@pytest.fixture
def bench(home, tmp_path) -> Iterator[Bench]:
    yield from bench_of(*home, tmp_path / "project")


@pytest.fixture
def measured_here(monkeypatch):
    """optimize_kernel.py with a stand-in for the GPU, and real briefs."""
    real = gpu_steps.GpuSteps

    def steps(workspace: Workspace, executor, *more):
        return replace(executor, brief=real(workspace, executor, *more).brief)

    monkeypatch.setattr(executors, "at", lambda address, workspace, _: contextlib.nullcontext(stand_in(workspace)))
    monkeypatch.setattr(gpu_steps, "GpuSteps", steps)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for the verification that the brief names
