"""What compiled code already proves, before anything ran. Pure functions.

A rule is a function of a kernel that yields findings, as those of a profile. The texts are in reference/findings.json.
"""

from collections.abc import Iterator
from dataclasses import asdict

from ..diagnosis.diagnosis import Finding
from ..diagnosis.findings import finding
from ..hardware.targets import Target
from ..statuses import Status
from .compiled import Compiled, CompiledKernel

OLD = ("no_wgmma", "no_tcgen05")  # remarks of disassembly.analysis
COVERED = {"spill", "spill_and_array", "spill_or_array", "wgmma_serialized", *OLD}  # remarks that a finding repeats


def of(compiled: Compiled) -> tuple[Finding, ...]:
    """The findings on each kernel, an autotuned one in the configuration that fits best."""
    return tuple(one for kernel in compiled.chosen for rule in RULES for one in rule(kernel, compiled.target))


def to_json(compiled: Compiled) -> dict:
    """A target in the output of compile_kernel.py."""
    return {**compiled.to_json(), "findings": [asdict(one) for one in of(compiled)]}


def spills(kernel: CompiledKernel, target: Target) -> Iterator[Finding]:
    if kernel.spill_bytes:
        evidence = [("registers", kernel.registers, "of a thread"), ("spill_bytes", kernel.spill_bytes, "of a thread")]
        remark = next((text for name, text in kernel.remarks.items() if name.startswith("spill")), "")
        local = remark.partition(": ")[2] or f"{kernel.spill_bytes} bytes a thread"
        yield made("compiled_spills", kernel, target, *evidence, local=local)


def no_tensor_instructions(kernel: CompiledKernel, target: Target) -> Iterator[Finding]:
    if kernel.has_dot and not kernel.tensor_instructions and kernel.code_bytes:
        evidence = ("tensor_instructions", 0, "in the code")
        yield made("compiled_without_tensor_instructions", kernel, target, evidence)


def old_tensor_instructions(kernel: CompiledKernel, target: Target) -> Iterator[Finding]:
    if any(name in kernel.remarks for name in OLD):
        evidence = [(opcode, count, "in the code") for opcode, count in kernel.tensor_instructions.items()]
        yield made("compiled_old_tensor_instruction", kernel, target, *evidence)


def serialized_wgmma(kernel: CompiledKernel, target: Target) -> Iterator[Finding]:
    if reason := kernel.remarks.get("wgmma_serialized"):
        evidence = ("registers", kernel.registers, "of a thread")
        yield made("compiled_serialized_wgmma", kernel, target, evidence, reason=reason.rpartition(": ")[2])


def too_large(kernel: CompiledKernel, target: Target) -> Iterator[Finding]:
    if kernel.status == Status.LAUNCH_ERROR:
        evidence = ("shared_bytes", kernel.shared_bytes, "of a block")
        yield made("compiled_too_large", kernel, target, evidence, reason=kernel.error)


RULES = (spills, no_tensor_instructions, old_tensor_instructions, serialized_wgmma, too_large)
WITH_AMD = ("compiled_spills", "compiled_without_tensor_instructions")  # texts in AMD's terms


def made(id_: str, kernel: CompiledKernel, target: Target, *evidence: tuple, **values) -> Finding:
    variant = "amd" if not target.is_nvidia and id_ in WITH_AMD else None
    return finding(id_, None, *evidence, variant=variant, kernel=kernel.name, arch=target.arch, **values)
