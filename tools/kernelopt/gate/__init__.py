"""The gate: checks that a round may be judged, measures it, decides on it, and keeps it in git and the record.

May import: audit, diagnosis, measure, device, session, hardware and below.
Next: a reason to refuse a round goes to readiness.py; a reason to refuse a kernel goes to acceptance.py, which is pure.
"""
