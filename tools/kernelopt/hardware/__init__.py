"""Hardware values: the pages of the local wiki, the roofline and occupancy that follow from them,
and the types of what a driver reports of a card.

May import: bundle, errors.

Next: a value is a row of a page in gpu-wiki/, never a constant here; a calculation from values is a module here.
"""
