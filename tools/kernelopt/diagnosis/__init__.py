"""What limits a kernel: from the metrics of a profile to findings and a bottleneck class, by pure functions.
profile_run.py takes a profile, and profile_folder.py reads one.

May import: measure, profilers, device, session, hardware and below.
Next: a rule is a function in RULES of findings.py; its text goes to reference/findings.json, its thresholds to
reference/thresholds.json.
"""
