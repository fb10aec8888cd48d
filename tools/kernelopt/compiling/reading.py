"""Compiled files and the worker's answers, read as CompiledKernel."""

from collections import Counter
from pathlib import Path

from ..disassembly import analysis, listing_files, listings, ptxas_log
from ..errors import EnvironmentLacks, Refused, UsageError
from ..hardware import occupancy
from ..hardware.targets import Target
from ..statuses import Status
from .compiled import CompiledKernel

CODE = {"NVIDIA": "cubin", "AMD": "amdgcn"}  # the stage that says most
ACCESSES = ("global load", "global store", "global to shared copy", "shared load", "shared store")
BULK = ("TMA load", "TMA store", "bulk copy", "TDM load", "TDM store")  # no thread moves them


def triton_kernel(target: Target, entry: dict, folder: Path) -> CompiledKernel:
    """A kernel of Triton. entry: worker.compiling.TritonKernelJson. folder: of its files."""
    code = folder / Path(entry["files"][CODE[target.vendor]]).name
    summary = summary_of(code, entry["name"])
    usage = ptxas_log.usage(entry["log"]).get(entry["name"])
    resources = resources_of(summary, usage)
    most, shared = target.shared_bytes, entry["shared_bytes"]
    too_large = most is not None and shared > most
    return CompiledKernel(
        name=entry["name"],
        configuration=entry["configuration"],
        constants=entry["constants"],
        status=Status.LAUNCH_ERROR if too_large else Status.OK,
        error=f"{what_takes(target, shared)}, {target.arch} has {most}" if too_large else None,
        shared_bytes=shared,
        tensor_memory_columns=entry["tensor_memory"],
        warps=entry["warps"],
        stages=entry["stages"],
        has_dot=entry["has_dot"],
        dot_types=tuple(entry["dot_types"]),
        files=tuple(str(folder / Path(file).name) for file in entry["files"].values()),
        **resources,
        **contents_of(summary, entry["log"]),
        **occupancy_of(target, resources, entry["threads"], shared),
    )


def cuda_kernels(target: Target, file: Path, log: str) -> list[CompiledKernel]:
    """The kernels of CUDA C++ in a file. log: what its compiler printed."""
    usages = ptxas_log.usage(log)
    kernels = []
    for kernel in kernels_in(file):
        summary = analysis.summary(kernel)
        shared = summary.resources.static_shared_bytes
        kernels.append(
            CompiledKernel(
                name=listings.plain_name(kernel.name),
                shared_bytes=None if shared is None else target.static_shared(shared),
                files=(str(file),),
                occupancy_error="CUDA C++ chooses the size of a block at the launch",
                **resources_of(summary, usages.get(kernel.name)),
                **contents_of(summary, log, kernel.name),
            )
        )
    return kernels


def kernels_in(file: Path) -> list[listings.Kernel]:
    """The kernels of a file of machine code; where cuobjdump cannot read it (compute capability 7.0), those of the PTX
    in or beside it, which has no registers. Empty where there is neither, or no cuobjdump."""
    try:
        read = listing_files.read(file)
    except (EnvironmentLacks, UsageError, Refused):
        return []
    code = [kernel for one in read if one.kind != "ptx" for kernel in one.kernels]
    return code or [kernel for one in read for kernel in one.kernels]


def summary_of(file: Path, name: str) -> analysis.Summary | None:
    """The contents of a kernel in a file of code; None where it cannot be read."""
    kernel = next((kernel for kernel in kernels_in(file) if kernel.name == name), None)
    return kernel and analysis.summary(kernel)


def resources_of(summary: analysis.Summary | None, usage: ptxas_log.PtxasUsage | None) -> dict:
    """Registers, stack and spills, as fields of CompiledKernel. usage: by ptxas's log, None without one."""
    of_code = summary.resources if summary else listings.Resources()
    known = {
        "spilled_registers": of_code.spilled_registers,
        "registers": of_code.registers,
        "stack_bytes": of_code.stack_bytes,
        "code_bytes": of_code.code_bytes,
        "accumulation_registers": of_code.accumulation_registers,
        "scalar_registers": of_code.scalar_registers,
        "spilled_scalar_registers": of_code.spilled_scalar_registers,
        "waves_per_simd": of_code.waves_per_simd,
        "spill_bytes": None,
    }
    if usage:
        known |= {"registers": usage.registers, "stack_bytes": usage.stack_bytes}
    spills = spills_of(summary, usage)
    return {**known, "spill_bytes": None if spills is None else known["stack_bytes"] if spills else 0}


def spills_of(summary: analysis.Summary | None, usage: ptxas_log.PtxasUsage | None) -> bool | None:
    """Are registers spilled? None: not known."""
    if usage:
        return bool(usage.spill_store_bytes or usage.spill_load_bytes)
    if summary is None or summary.kind == "ptx" or summary.local_memory == "spill or array":
        return None
    return summary.local_memory not in ("none", "array")


def contents_of(summary: analysis.Summary | None, log: str, function: str | None = None) -> dict:
    """What the code consists of, as fields of CompiledKernel. function: the kernel's mangled name, where the log is of
    several."""
    if summary is None:
        return {}
    widths: dict[str, Counter[int]] = {}
    for row in analysis.of_classes(summary, *ACCESSES):
        if row.bits:
            widths.setdefault(row.meaning, Counter())[row.bits] += row.count
    bulk = Counter()
    for row in analysis.of_classes(summary, *BULK):
        bulk[row.meaning] += row.count
    remarks = {remark.id: remark.message for remark in summary.remarks()}
    if why := ptxas_log.serialized(log, function):
        remarks["wgmma_serialized"] = f"ptxas runs the wgmma instructions one after the other: {why}"
    return {
        "arch": summary.arch,
        "tensor_instructions": {row.opcode: row.count for row in analysis.of_classes(summary, "tensor")},
        "bulk_copies": dict(bulk),
        "access_bits": {name: dict(sorted(bits.items())) for name, bits in widths.items()},
        "remarks": remarks,
    }


def occupancy_of(target: Target, resources: dict, threads: int, shared_bytes: int) -> dict:
    """The theoretical occupancy of a launch, as fields of CompiledKernel."""
    if target.limits is None:
        return {"occupancy_error": f"UNKNOWN: the wiki has no limits of {target.arch}"}
    if resources["registers"] is None:
        return {"occupancy_error": "UNKNOWN: the registers are not known"}
    registers, scalar = resources["registers"], resources["scalar_registers"]
    try:
        result = occupancy.occupancy(target.limits, threads, registers, shared_bytes, scalar)
    except (Refused, UsageError) as error:
        return {"occupancy_error": str(error)}
    return {"occupancy_pct": result.occupancy_pct, "limiters": result.limiters}


def what_takes(target: Target, shared_bytes: int) -> str:
    block, memory = ("block", "shared memory") if target.is_nvidia else ("workgroup", "LDS")
    return f"a {block} takes {shared_bytes} bytes of {memory}"
