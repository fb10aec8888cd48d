"""The unattended loop: agents, rounds, restarts, and the places where candidates are measured.

May import: report and below.
Next: a search strategy is a class in strategies.py; another place to measure is a class in executors.py.
"""
