"""The citation audit: which figures of a text are hardware values, and whether each cites a page that says so.

May import: session, hardware, profilers.metrics and below.
Next: a spelling goes to wording.py or units.py, with a line of tests/fixtures/audit/; a kind of file goes to pieces.py.
"""
