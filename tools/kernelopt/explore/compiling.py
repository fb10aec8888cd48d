"""Compiles kernels for a named card, which need not be here.

Nothing runs on a GPU. Each kernel's file is loaded in a process of its own (worker/compiling.py), which compiles what
it launches.
"""

import contextlib
import time
from pathlib import Path

from ..device import gpu, outcomes, programs, standing
from ..device.outcomes import Fault
from ..device.sandbox import Sandbox, Server
from ..errors import EnvironmentLacks, UsageError
from ..profilers import collect
from ..session import platforms
from ..session.target import KernelUnderTest
from ..session.workspace import Workspace
from ..statuses import Status
from . import resources
from .compiled import Card, Compiled, CompiledKernel

NOTHING = "it launched no Triton kernel and built no CUDA C++, so nothing was compiled"


def card_of(name: str | None, gpu_is_wanted: bool, workspace: Workspace | None) -> Card:
    """The card to compile for: the named one, or the GPU that is here, or the workspace's platform. Refused when
    neither the wiki nor the workspace's calibration has it; EnvironmentLacks or UsageError when there is none."""
    platform = workspace.task().platform if workspace else None
    if name is None and gpu_is_wanted:
        try:
            name = gpu.identify().name
        except EnvironmentLacks as lacks:
            if platform is None:
                raise EnvironmentLacks(f"{lacks}; --card NAME compiles for a card that is not here") from None
    name = name or platform
    if name is None:
        raise UsageError("pass --card NAME: the card to compile for, as h100-sxm; gpu_specs.py list prints the names")
    return Card.of(platforms.existing_page_of(name, workspace))


def compile_target(sandbox: Sandbox, target: KernelUnderTest, workload: str, card: Card, timeout_s: float) -> Compiled:
    """The kernel, compiled for the card with inputs of a workload's shapes. UsageError when there is no such
    workload, or no such cast of its inputs."""
    case = {"reference": str(target.reference.resolve()), "workload": workload, "dtype": target.dtype}
    server = start_server(sandbox)
    try:
        compiled = compile_file(sandbox, server, target.kernel, case, card, timeout_s)
    finally:
        server.end()
    if compiled.status == Status.USAGE:
        raise UsageError(compiled.error)
    return compiled


def start_server(sandbox: Sandbox) -> Server:
    """The server of processes that compile: Triton's compiler works there in place of its interpreter."""
    return sandbox.fork_server(TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")


def compile_file(sandbox: Sandbox, server: Server, kernel: Path, case: dict, card: Card, timeout_s: float) -> Compiled:
    """The kernel's file, compiled for the card. case: of the worker's `compile_only`. server: of `start_server`."""
    folder = sandbox.new_folder("compiled")
    arguments = {
        "kernel": str(kernel.resolve()),
        "case": case,
        "card": card.for_worker().to_json(),
        "nvcc": programs.find("nvcc"),
        "folder": folder,
    }
    process = standing.Standing(sandbox, server, "compile_only", arguments, 3600, [], environment_of(card, folder))
    began = time.monotonic()
    try:
        answer = process.answer(timeout_s)
    except standing.Ended as ended:
        fault = outcomes.failure(ended.outcome) or Fault(Status.RUNTIME_ERROR, "the process ended early")
        message = fault.message
        if fault.status == Status.TIMEOUT:
            message = f"it was not compiled in {time.monotonic() - began:.0f} s"
        return Compiled(card, fault.status, message)
    finally:
        process.end()
    return of_answer(card, answer, Path(folder))


def environment_of(card: Card, folder: str) -> dict[str, str]:
    """Compiler caches that no other process uses, and the card that torch builds for."""
    major, minor = card.capability
    return {
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "TORCH_EXTENSIONS_DIR": f"{folder}/extensions",
        "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}{'a' if major >= 9 else ''}",
    }


def of_answer(card: Card, answer: dict, folder: Path) -> Compiled:
    """What the worker's job `compile_only` answered, as a Compiled. folder: of its files; no other file is read."""
    kernels = [triton_kernel(card, entry, folder / entry["file"]) for entry in answer["kernels"]]
    kernels += [kernel for file in answer["cuda"] for kernel in cuda_kernels(card, folder / file)]
    status, error = Status(answer["status"]), answer["message"] or None
    cuda = bool(answer["cuda"] or answer["lacking"])
    if answer["lacking"] and status == Status.OK:
        status, error = Status.INTERNAL, answer["lacking"]
    elif cuda and status not in (Status.COMPILE_ERROR, Status.LAUNCH_ERROR):
        status, error = Status.OK, None  # without a GPU the call cannot go on after the CUDA C++
    elif status == Status.OK and not kernels:
        status, error = Status.INTERNAL, NOTHING
    return Compiled(card, status, error, tuple(kernels), cuda, answer["lacking"])


def triton_kernel(card: Card, entry: dict, file: Path) -> CompiledKernel:
    usage = next(iter(resources.usage(file)), None)
    registers, shared = usage and usage.registers, entry["shared_bytes"]
    occupancy = None
    with contextlib.suppress(UsageError):  # a block that cannot be launched
        occupancy = collect.theoretical_occupancy(card.page, entry["threads"], registers, shared)
    return CompiledKernel(entry["name"], registers, usage and usage.local_bytes, shared, occupancy)


def cuda_kernels(card: Card, file: Path) -> list[CompiledKernel]:
    """The kernels in a cubin or a shared library. The size of a block is chosen at the launch."""
    return [
        CompiledKernel(resources.plain_name(one.function), one.registers, one.local_bytes, shared, None)
        for one in resources.usage(file)
        for shared in [card.static_shared(one.shared_bytes)]
    ]
