"""The gate: may this round be judged, what was measured, is the candidate accepted, and what git and the record keep.

May import: measure, diagnosis, audit and below.
Next: a reason to refuse a round goes to readiness.py; a reason to refuse a kernel goes to acceptance.py, which is pure.
"""
