"""Persisting lines of the L2 are given up before each timed call (worker.persisting)."""

import ctypes

import pytest
from kernelopt.worker.persisting import L2, PERSISTING_L2_SIZE


class Driver:
    """Stands in for libcuda: it keeps the limit and notes what was called."""

    def __init__(self, size: int):
        self.size, self.called = size, []

    def cuCtxGetLimit(self, size, limit):  # noqa: N802
        assert limit == PERSISTING_L2_SIZE
        size._obj.value = self.size

    def cuCtxSetLimit(self, limit, size):  # noqa: N802
        assert limit == PERSISTING_L2_SIZE
        self.size = size.value
        self.called.append("set")

    def cuCtxResetPersistingL2Cache(self):  # noqa: N802
        self.called.append("reset")


def test_what_a_call_sets_aside_is_given_back():
    driver = Driver(1 << 20)
    l2 = L2(driver)
    driver.size = 8 << 20
    l2.reset()
    assert driver.size == 1 << 20 and driver.called == ["set", "reset"] and l2.was_set_aside


def test_lines_are_made_normal_where_the_size_is_the_usual_one():
    driver = Driver(1 << 20)
    l2 = L2(driver)
    l2.reset()
    assert driver.called == ["reset"] and not l2.was_set_aside


@pytest.mark.gpu
def test_the_timer_gives_back_what_a_call_sets_aside():
    import torch
    from kernelopt.worker.timers import GatedTimer

    torch.zeros(1, device="cuda")
    driver, timer = ctypes.CDLL("libcuda.so.1"), GatedTimer()
    usual = L2(driver).set_aside_bytes()
    other = 4 << 20 if usual > 6 << 20 else 8 << 20  # a part of any L2; an H100 refuses to set 32 MiB aside

    def call():
        assert driver.cuCtxSetLimit(PERSISTING_L2_SIZE, ctypes.c_size_t(other)) == 0

    assert not timer.persists
    timer(call)
    assert L2(driver).set_aside_bytes() != usual
    timer.flush()
    assert timer.persists
    assert L2(driver).set_aside_bytes() == usual
