"""Pages for people and agents: the report of a session, its plots, the brief of a round, the page of a model's step.

May import: models, audit, diagnosis, measure, profilers, session, hardware and below. It measures nothing.
Next: a part of the report is a module *_section.py that yields blocks of document.py.
"""
