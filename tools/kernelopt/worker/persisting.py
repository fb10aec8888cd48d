"""Persisting lines of the L2: a kernel could keep its inputs there through every flush, and its time would not be that
of a cold cache."""

import ctypes
import functools

PERSISTING_L2_SIZE = 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE of cuda.h


class L2:
    """What CUDA's driver does about the current context's persisting lines. Made before a candidate runs, so that the
    size that the driver sets aside by itself is known: on an H200 with driver 580 it is not 0."""

    def __init__(self, driver):
        self._driver = driver
        self._usual_bytes = self.set_aside_bytes()
        self.was_set_aside = False

    @classmethod
    @functools.cache
    def of_device(cls) -> "L2":
        """The one of this process; the first call must come before the candidate's code."""
        return cls(ctypes.CDLL("libcuda.so.1"))

    def set_aside_bytes(self) -> int:
        """How much of the L2 is set aside for persisting lines; 0 where the driver does not know such a limit."""
        size = ctypes.c_size_t(0)
        self._driver.cuCtxGetLimit(ctypes.byref(size), PERSISTING_L2_SIZE)
        return size.value

    def reset(self) -> None:
        """Make all lines normal ones, and set aside what is usual. Whatever the driver cannot do, it could not do for a
        kernel either, so errors do not matter."""
        if self.set_aside_bytes() != self._usual_bytes:
            self.was_set_aside = True
            self._driver.cuCtxSetLimit(PERSISTING_L2_SIZE, ctypes.c_size_t(self._usual_bytes))
        self._driver.cuCtxResetPersistingL2Cache()
