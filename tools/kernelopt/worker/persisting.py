"""Persisting lines of the L2: a kernel could keep its inputs there through every flush, and its time would not be that
of a cold cache."""

import ctypes

PERSISTING_L2_SIZE = 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE of cuda.h


class L2:
    """What CUDA's driver does about the current context's persisting lines."""

    def __init__(self, driver):
        self._driver = driver
        self.was_set_aside = False

    @classmethod
    def of_device(cls) -> "L2":
        return cls(ctypes.CDLL("libcuda.so.1"))

    def reset(self) -> None:
        """Make all lines normal ones, and set no L2 aside, as a new context has none. Whatever the driver cannot do, it
        could not do for a kernel either, so errors do not matter."""
        size = ctypes.c_size_t(0)
        self._driver.cuCtxGetLimit(ctypes.byref(size), PERSISTING_L2_SIZE)
        if size.value:
            self.was_set_aside = True
            self._driver.cuCtxSetLimit(PERSISTING_L2_SIZE, ctypes.c_size_t(0))
            self._driver.cuCtxResetPersistingL2Cache()
