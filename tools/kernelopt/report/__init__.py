"""Pages for people and agents: the report of a session, its plots, the brief of a round, the pages of a profile.

May import: gate and below. It measures nothing.
Next: a part of the report is a module *_section.py that yields blocks of document.py.
"""
