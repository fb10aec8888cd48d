"""What limits a kernel: pure functions from the metrics of a profile to findings and a bottleneck class.

May import: profilers, session, hardware and below.
Next: a rule is a function in RULES of findings.py; its text goes to reference/findings.json, its thresholds to
reference/thresholds.json.
"""
