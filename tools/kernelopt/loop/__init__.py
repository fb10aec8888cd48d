"""The unattended loop: agents, rounds, restarts, and the places where candidates are measured.

May import: report and below.
Next: a search strategy is a class in strategies.py; another place to measure is a subclass of Executor in executors.py;
another client is a row of CLIENTS in clients.py.

loop.py runs the rounds: asking.py asks agents (agent_sandbox.py, agent_process.py), judging.py judges their candidates.
clients.py has the command lines of known clients, and how each tells its troubles.
run_state.py has the states and the steps between them; progress.py and run_files.py keep them on disk. stopping.py
decides when to stop. snapshot.py guards the workspace.
"""
