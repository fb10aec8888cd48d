"""Profilers: each module runs one or reads its report, into the keys of reference/ncu_metrics.json.

May import: device, session, hardware and below.
Next: a profiler is a module here; a metric is a row of reference/ncu_metrics.json.
"""
