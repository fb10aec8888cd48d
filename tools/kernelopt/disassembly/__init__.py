"""SASS, PTX and AMDGCN: their files, their listings, and the analysis of a kernel.

May import: device.pipes, device.programs, errors.
Next: an instruction goes to the tables of listings.py; a remark on instructions is a function in RULES of analysis.py.
"""
