"""What runs in the child processes: inputs, calls of the kernel, the oracle, guards against cheats. Torch is imported
here alone.

May import: device.landlock, device.processes, device.programs, session.benchmark_reports, session.interface,
hardware.card, hardware.work, case_types, intervals, model_types, source_lines, statuses. Nothing imports it: the
sandbox starts it as a program. Next: a job is a function in jobs.py; an error with a status of its own is a class in
faults.py; a kind of input goes to variants.py.

A candidate shares its process with the job that runs it, so no verdict rests on what that process says alone: `run` and
`measure` store raw outputs and times; `check`, which never loads the candidate, judges the outputs; the parent keeps a
clock of its own.
"""
