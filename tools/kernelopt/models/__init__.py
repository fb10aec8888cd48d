"""Whole models: which kernels of a model are worth it, a problem cut out of it, an accepted kernel put back into it.

May import: measure, device, session, hardware and below. A model is run by the worker, never here.
Next: advice on a profiled step goes to advice.py, which is pure; a check of a model with a kernel in it is a job of the
worker (model_put_back.py), and its line goes to putting_back.py.
"""
