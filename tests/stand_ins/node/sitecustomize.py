"""A stand-in for the GPU of a node, whose Python imports this file at its start when its folder is in PYTHONPATH.

The loop's examinations verify on the CPU, and a kernel's time is what it says of itself; all else is real.
"""

import sys
from pathlib import Path

if "kernelopt.loop.trials" in sys.orig_argv:
    TESTS = Path(__file__).resolve().parents[2]
    sys.path += [str(TESTS), str(TESTS / "loop")]
    from kernelopt.device import sandbox
    from kernelopt.gate import rounds
    from scripted_agents import stand_in

    class OnTheCpu(sandbox.Sandbox):
        def __init__(self, device: str, *more):
            super().__init__("cpu-interpreter", *more)

    def measure(start: rounds.RoundStart, *_) -> rounds.Measurement:
        return stand_in(start.workspace).measure([start.workspace.kernel.read_bytes()])[0]

    sandbox.Sandbox, rounds.measure = OnTheCpu, measure
