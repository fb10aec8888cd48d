"""What runs in child processes: the jobs, and the server that forks a process for each.

A candidate shares its process with the job that runs it, so nothing that decides a verdict is taken from that
process's word alone: `run` and `measure` store raw outputs and times, and `check`, a job that never loads the
candidate, judges the outputs; the parent keeps a clock of its own.
"""
