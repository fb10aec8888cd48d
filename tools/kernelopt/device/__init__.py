"""The machine: GPUs, clocks, vendors' programs, and the sandbox, the one place that starts GPU work.

May import: session and below.
Next: another vendor is a module beside gpu.py and amd.py; a way in which a child process ends goes to outcomes.py, what
a child is told to requests.py, a variable of its environment to child_environment.py.
"""
