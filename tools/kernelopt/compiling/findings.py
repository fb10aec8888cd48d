"""What compiled code already proves, before anything ran. Pure functions.

A rule is a function of a kernel that yields findings, as those of a profile. The texts are in reference/findings.json.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict

from ..diagnosis.diagnosis import Finding
from ..diagnosis.findings import finding
from ..hardware.targets import Target
from ..statuses import Status
from .compiled import Compiled, CompiledKernel

EIGHT_BITS = re.compile(r"f8|i8$")  # types of Triton's representation
OF_EIGHT_BITS = re.compile(r"[IQO]G?MMA|fp8|bf8|f8f6f4|iu?8$")  # tensor instructions of SASS and of AMD
OLD = ("no_wgmma", "no_tcgen05")  # remarks of disassembly.analysis
WAITS = "waits_for_registers"
COVERED = {"spill", "spill_and_array", "spill_or_array", "wgmma_serialized", WAITS, *OLD}  # that a finding repeats


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
    if kernel.has_dot and not kernel.tensor_instructions and kernel.arch:
        evidence = ("tensor_instructions", 0, "in the code")
        variant = "before_ampere" if target.is_nvidia and target.capability < LEAST_OF_TRITON else None
        yield made("compiled_without_tensor_instructions", kernel, target, evidence, variant=variant)


def old_tensor_instructions(kernel: CompiledKernel, target: Target) -> Iterator[Finding]:
    if any(name in kernel.remarks for name in OLD):
        evidence = [(opcode, count, "in the code") for opcode, count in kernel.tensor_instructions.items()]
        yield made("compiled_old_tensor_instruction", kernel, target, *evidence)


def converted_operands(kernel: CompiledKernel, target: Target) -> Iterator[Finding]:
    """A product of 8-bit operands on tensor instructions none of which takes such operands."""
    narrow = [type_ for type_ in kernel.dot_types if EIGHT_BITS.match(type_)]
    if narrow and kernel.tensor_instructions and not any(map(OF_EIGHT_BITS.search, kernel.tensor_instructions)):
        evidence = [(opcode, count, "in the code") for opcode, count in kernel.tensor_instructions.items()]
        yield made("compiled_converted_operands", kernel, target, *evidence, types=", ".join(narrow))


def serialized_wgmma(kernel: CompiledKernel, target: Target) -> Iterator[Finding]:
    if reason := kernel.wgmma_serialized:
        evidence = ("registers", kernel.registers, "of a thread")
        yield made("compiled_serialized_wgmma", kernel, target, evidence, reason=reason)


def endless_wait(kernel: CompiledKernel, target: Target) -> Iterator[Finding]:
    if reason := kernel.remarks.get(WAITS):
        evidence = ("registers", kernel.registers, "of a thread")
        yield made("compiled_waits_for_registers", kernel, target, evidence, reason=reason)


def too_large(kernel: CompiledKernel, target: Target) -> Iterator[Finding]:
    if kernel.status == Status.LAUNCH_ERROR:
        evidence = ("shared_bytes", kernel.shared_bytes, "of a block")
        yield made("compiled_too_large", kernel, target, evidence, reason=kernel.error)


RULES = (
    spills,
    no_tensor_instructions,
    old_tensor_instructions,
    converted_operands,
    serialized_wgmma,
    endless_wait,
    too_large,
)
WITH_AMD = (  # texts in AMD's terms
    "compiled_spills",
    "compiled_without_tensor_instructions",
    "compiled_converted_operands",
    "compiled_too_large",
)
LEAST_OF_TRITON = (8, 0)  # from version 3.3 on, Triton multiplies without tensor cores below this capability


def made(
    id_: str, kernel: CompiledKernel, target: Target, *evidence: tuple, variant: str | None = None, **values
) -> Finding:
    if not target.is_nvidia and id_ in WITH_AMD:
        variant = "amd"
    return finding(id_, None, *evidence, variant=variant, kernel=kernel.name, arch=target.arch, **values)
