"""Hardware values: the pages of the local wiki, and the roofline and occupancy that follow from them.

May import: bundle, errors.

Next: a value is a row of a page in gpu-wiki/, never a constant here; a calculation from values is a module here.
"""
