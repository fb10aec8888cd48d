"""Kernels compiled for GPUs that need not be here: registers, spills, tensor instructions, occupancy. Nothing runs.

May import: diagnosis, disassembly, device, session, hardware and below.
Next: a resource of a kernel is a field of CompiledKernel in compiled.py, read in reading.py; a finding is a function in
findings.py; another compiler goes to worker/extensions.py.
"""
