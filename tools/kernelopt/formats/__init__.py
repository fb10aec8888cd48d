"""Task formats of other projects: a task read from one of them, an accepted kernel written in one of them.

May import: measure, device, session and below. A file of theirs is run by the worker, never here.
Next: a format to read is a module read_NAME.py, a format to write a module write_NAME.py.
"""
