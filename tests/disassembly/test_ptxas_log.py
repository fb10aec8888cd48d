"""What ptxas prints of a kernel's build."""

import json

import pytest
from conftest import FIXTURES
from kernelopt.disassembly import ptxas_log

# nvcc 13.0 for sm_90a, of two versions of a persistent product (2026-11-26)
REGISTERS = (
    "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "insufficient register resources for the function '_Z13newton_schulz4Maps5Shape'"
)
ACCUMULATORS = (
    "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma "
    "instructions defining accumulator registers of a wgmma between start and end of the pipeline stage in the function "
    "'_Z13newton_schulz4Maps5Shape'"
)


@pytest.mark.parametrize(
    "log, reason",
    [
        (REGISTERS, "insufficient register resources"),
        (
            ACCUMULATORS,
            "non wgmma instructions defining accumulator registers of a wgmma between start and end of the pipeline stage",
        ),
        ("ptxas info    : 0 bytes gmem", None),
    ],
)
def test_why_wgmma_instructions_run_one_after_the_other(log, reason):
    assert ptxas_log.serialized(f"ninja: building\n{log}\n") == reason


def test_a_reason_is_of_the_function_that_the_message_names():
    """A norm kernel without a wgmma got the reason of the product beside it."""
    log = f"{REGISTERS}\nptxas info    : Compiling entry function '_Z4normPf' for 'sm_90a'\n"
    assert ptxas_log.serialized(log, "_Z13newton_schulz4Maps5Shape") == "insufficient register resources"
    assert ptxas_log.serialized(log, "_Z4normPf") is None


CAPTURED = ["\n".join(row["messages"]) for row in json.loads((FIXTURES / "error_messages/nvcc.json").read_text())]


def test_each_reason_that_ptxas_gave_is_read_and_no_other_message_is_taken_for_one():
    reasons = {log: ptxas_log.serialized(log) for log in CAPTURED}
    assert {bool(reason) == ("are serialized" in log) for log, reason in reasons.items()} == {True}
    assert len({reason for reason in reasons.values() if reason}) == 6
    assert all(f"due to {reason}" in " ".join(log.split()) for log, reason in reasons.items() if reason)
