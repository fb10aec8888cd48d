"""Exploration: many candidates compiled, checked and timed in one go, so that one can be chosen for the gate.

May import: compiling, measure, profilers, disassembly, device, session, hardware and below. It accepts nothing and
commits nothing.
Next: a way to state candidates goes to candidates.py; a rule that drops slower ones goes to halving.py, which is pure.
"""
