"""The citation audit finds the hardware values in a text and checks the citation of each one.

May import: profilers.metrics, session, hardware and below.

Of a figure: stated.py says which rows it may state, meant.py whether the hardware is meant, support.py what supports it,
advice.py what to write instead.
Next: a spelling goes to wording.py or units.py, with a line of tests/fixtures/audit/; a kind of file goes to pieces.py.
"""
