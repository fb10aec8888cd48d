"""The judge against a battery of kernels: honest ones pass, and each cheat lands in its status.

tests/kernels/honest and tests/kernels/cheats hold one kernel a file, beside its reference. A cheat says which statuses
are right (STATUS) and who must catch it (CAUGHT_BY): the verification, the verification at other sizes, layouts and
values than the task's own ("variants"), the sanitizer, or the timing. A cheat that is an honest kernel but for a few
places names that kernel (HONEST) and what stands there (CHANGES). Files that need a GPU are run by `pytest -m gpu`; the
others run here, in Triton's interpreter.
"""

import ast
import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import BUNDLE
from kernelopt.device import gpu_lock
from kernelopt.device.sandbox import Sandbox
from kernelopt.errors import TimedOut
from kernelopt.measure import timing, verify
from kernelopt.measure.oracle import Oracle
from kernelopt.session.subject import KernelUnderTest

KERNELS = BUNDLE / "tests" / "kernels"
WITHOUT_KERNEL = "\nfor name in ('kernel_function', 'ModelNew'):\n    globals().pop(name, None)\n"


def constant(path: Path, name: str):
    """The value of a module-level constant, without running the file."""
    return ast.literal_eval(constants(path)[name]) if name in constants(path) else None


@functools.cache
def constants(path: Path) -> dict[str, ast.expr]:
    assigned = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign))
    return {getattr(node.targets[0], "id", ""): node.value for node in assigned}


def texts(path: Path) -> tuple[str, str]:
    """(kernel, reference) of a file; of an honest kernel that a cheat changes in places."""
    if (honest := constant(path, "HONEST")) is None:
        return path.read_text(), path.read_text()
    reference = kernel = (KERNELS / "honest" / f"{honest}.py").read_text()
    for old, new in constant(path, "CHANGES").items():
        assert old in kernel, f"{honest} does not hold {old!r}"
        kernel = kernel.replace(old, new)
    return kernel, reference


def files(folder: str, wanted: Callable[[Path], bool] = lambda _: True, gpu: bool = False) -> list:
    """pytest parameters: those that run without a GPU, or (gpu) all of them; there the former are marked as slow, for
    every run of the tests judges them in the interpreter."""
    free_of_gpu = {path: constant(path, "NEEDS") is None for path in sorted((KERNELS / folder).glob("*.py"))}
    slow = [pytest.mark.slow] if gpu else []
    return [
        pytest.param(path, id=path.stem, marks=slow if free else [])
        for path, free in free_of_gpu.items()
        if (gpu or free) and wanted(path)
    ]


def needs_the_gpu_alone(path: Path) -> bool:
    """It is timed, or takes the memory that others would need."""
    return constant(path, "CAUGHT_BY") == "timing" or path.stem == "eats_gpu_memory"


@pytest.fixture(scope="module")
def gpu_sandbox(tmp_path_factory):
    """Under pytest -n, each worker has a lock of its own, so that several kernels are judged at once; no process waits
    there, for those of 16 workers filled an H100."""
    with pytest.MonkeyPatch.context() as patch:
        if "PYTEST_XDIST_WORKER" in os.environ:
            patch.setattr(gpu_lock, "LOCKS", tmp_path_factory.mktemp("locks"))
            patch.setattr("kernelopt.device.forked_ahead.WAITING_SHARE", 0)
        with Sandbox("cuda") as sandbox:
            yield sandbox


def laid(path: Path, folder: Path) -> tuple[Path, Path]:
    """Kernel and reference of a file as two copies of it."""
    kernel, reference = (folder / f"{name}_{path.name}" for name in ("kernel", "reference"))
    of_kernel, of_reference = texts(path)
    kernel.write_text(of_kernel)
    of_reference = of_reference.replace("honest::", "reference::")  # one process has an operator once
    reference.write_text(of_reference + WITHOUT_KERNEL)
    return kernel, reference


def judged(
    sandbox: Sandbox, path: Path, folder: Path, by: str, timeout_s: float = 60, honest: bool = False
) -> tuple[str, str]:
    """(status, message) of a kernel: by "verify" or "variants", by the "sanitizer" as well, or by "timing" too."""
    kernel, reference = laid(path, folder)
    options = {"seeds": 2, "sanitize": by == "sanitizer", "timeout_s": timeout_s}
    own_sizes = not honest and by != "variants"
    verdict = verify.verify(sandbox, KernelUnderTest(kernel, reference, only_these_shapes=own_sizes), **options)
    if own_sizes and by != "timing" and verdict.status == "OK":  # most are caught on the task's own sizes
        verdict = verify.verify(sandbox, KernelUnderTest(kernel, reference), **options)
    if verdict.status == "OK" and by == "timing":
        return judged_by_time(sandbox, kernel, reference)
    return str(verdict.status), verdict.summary


def judged_by_time(sandbox: Sandbox, kernel: Path, reference: Path) -> tuple[str, str]:
    """(status, message) of a kernel that is timed against its reference."""
    try:
        cases = timing.inputs(sandbox, reference, None, ["default"])
        timed = timing.measure(sandbox, kernel, reference, cases, warmup_ms=1, rep_ms=5, timeout_s=60)["default"]
        fault = Oracle(sandbox, reference).fault_of_timed([timed.outputs])
        return (str(fault.status), fault.message) if fault else ("OK", "")
    except (timing.KernelFailed, TimedOut) as error:
        return str(getattr(error, "status", "TIMEOUT")), str(error)


@pytest.mark.parametrize("path", files("honest"))
def test_an_honest_kernel_passes(path, interpreter, tmp_path):
    status, message = judged(interpreter, path, tmp_path, "verify", honest=True)
    assert status == "OK", message


@pytest.mark.parametrize("path", files("cheats"))
def test_a_cheat_lands_in_its_status(path, interpreter, tmp_path):
    timeout_s = 2 if constant(path, "STATUS") == {"TIMEOUT"} else 60
    for _ in range(3):  # on a busy processor the clocks may disagree about any kernel
        status, message = judged(interpreter, path, tmp_path, constant(path, "CAUGHT_BY"), timeout_s)
        if status in constant(path, "STATUS") or status != "CHEAT_SUSPECT":
            break
    assert status in constant(path, "STATUS"), message


def skip_without_cutlass(path: Path) -> None:
    if "import cutlass" in path.read_text():
        pytest.importorskip("cutlass", reason="a kernel in CuTe DSL needs nvidia-cutlass-dsl")


@pytest.mark.gpu
@pytest.mark.at_once
@pytest.mark.parametrize("path", files("honest", gpu=True))
def test_an_honest_kernel_passes_on_a_gpu(path, gpu_sandbox, tmp_path):
    skip_without_cutlass(path)
    status, message = judged(gpu_sandbox, path, tmp_path, "verify", honest=True)
    assert status == "OK", message


@pytest.mark.gpu
@pytest.mark.parametrize("path", files("honest", gpu=True))
def test_an_honest_kernel_is_timed_on_a_gpu(path, gpu_sandbox, tmp_path):
    skip_without_cutlass(path)
    status, message = judged_by_time(gpu_sandbox, *laid(path, tmp_path))
    assert status == "OK", message


def check_cheat_on_gpu(path: Path, sandbox: Sandbox, folder: Path) -> None:
    timeout_s = 20 if constant(path, "STATUS") == {"TIMEOUT"} else 60
    status, message = judged(sandbox, path, folder, constant(path, "CAUGHT_BY"), timeout_s)
    assert status in constant(path, "STATUS"), message


@pytest.mark.gpu
@pytest.mark.at_once
@pytest.mark.parametrize("path", files("cheats", lambda path: not needs_the_gpu_alone(path), gpu=True))
def test_a_cheat_lands_in_its_status_on_a_gpu(path, gpu_sandbox, tmp_path):
    check_cheat_on_gpu(path, gpu_sandbox, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("path", files("cheats", needs_the_gpu_alone, gpu=True))
def test_a_cheat_that_has_the_gpu_alone_lands_in_its_status(path, gpu_sandbox, tmp_path):
    check_cheat_on_gpu(path, gpu_sandbox, tmp_path)
