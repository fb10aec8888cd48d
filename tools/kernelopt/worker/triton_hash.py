"""Triton's hash of its own installation, a part of each key in its cache.

Triton reads its whole library for it, 500 MB in 3.9. With 3.6 that took 0.77 s on the machine of an H100, in each
process that compiles a kernel or looks for one in the cache. A server of processes computes it once, beside its import
of torch, and the forks inherit it.
"""

import contextlib
import importlib
import os
import threading

ENOUGH_CORES = 4  # with fewer, none is free beside torch's import
PLACES = ("triton.runtime.cache", "triton.compiler.compiler")  # of triton_key: from 3.5, and before


def computed_beside() -> threading.Thread | None:
    """The thread that computes it; None with fewer than ENOUGH_CORES cores. Join it before any fork."""
    if len(os.sched_getaffinity(0)) < ENOUGH_CORES:
        return None
    import triton.compiler  # noqa: F401  (here, since torch's import beside it may look for Triton)

    thread = threading.Thread(target=compute)
    thread.start()
    return thread


def compute() -> None:
    """Have Triton compute it, which it then remembers. Errors are dropped: if Triton's files cannot be read, the
    process that compiles a kernel raises it."""
    for place in PLACES:
        with contextlib.suppress(ImportError, AttributeError, OSError):
            importlib.import_module(place).triton_key()
            return
