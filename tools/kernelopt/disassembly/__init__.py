"""SASS, PTX and AMDGCN: their listings, what these say of a kernel, and the files they are read from.

May import: device.programs, errors.
Next: an instruction goes to the tables of listings.py; a remark on instructions is a function in RULES of analysis.py.
"""
