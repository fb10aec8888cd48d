"""One workspace on disk: its Task block, records, plans, targets and the page of its GPU.

May import: hardware, bundle, errors, model_types, statuses. It starts no program except git.

Next: a field of a record goes to reference/v_iteration.schema.json; a file of the workspace goes to workspace.py, one
that a new session begins with also to creation.py.
"""
