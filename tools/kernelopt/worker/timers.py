"""The clocks that time one call: the host's, and CUDA events behind a gate.

Imported by worker processes only.
"""

from time import perf_counter

import torch

from . import persisting

EMPTY_CALLS = 31
GATE_CYCLES = 20_000  # about 10 us
EMPTY_ENQUEUE_US = 50.0  # two events on a busy host: with GATE_CYCLES alone a pair was 12 us too long on an H200


class HostTimer:
    """The host's clock, for kernels in Triton's CPU interpreter."""

    name = "host, cpu-interpreter"
    enqueue_us = 1.0
    empty_us = 0.0
    persists = False

    def prepare(self, call) -> float:
        return self.enqueue_us

    def hold(self, calls: int):
        return lambda: True

    def __call__(self, call) -> tuple[float, object]:
        start = perf_counter()
        outputs = call()
        return (perf_counter() - start) * 1e6, outputs

    def bench(self, call, warmup_ms: int, rep_ms: int) -> list[float]:
        return [self(call)[0] for _ in range(5)]


class GatedTimer:
    """Times a call on the GPU: flush the L2, hold the stream with a sleep, start event, call, end event."""

    name = "triton.testing.do_bench"

    def __init__(self):
        cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        self._others = torch.zeros(2 * cache_bytes // 4, device="cuda")
        self._l2 = persisting.L2.of_device()
        self._start, self._end, self._awake = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        self._cycles_per_us = self._measured_cycles_per_us()
        self.enqueue_us = EMPTY_ENQUEUE_US
        self.empty_us = sorted(self(lambda: None)[0] for _ in range(EMPTY_CALLS))[EMPTY_CALLS // 2]
        self.enqueue_us = 0.0

    def _measured_cycles_per_us(self) -> float:
        cycles = 1_000_000
        for _ in range(2):
            self._start.record()
            torch.cuda._sleep(cycles)
            self._end.record()
            torch.cuda.synchronize()
        return cycles / (self._start.elapsed_time(self._end) * 1000)

    def prepare(self, call) -> float:
        """Learn how long the host takes to launch the call, which the sleep must cover: microseconds."""
        torch.cuda.synchronize()
        start = perf_counter()
        call()
        launch_us = (perf_counter() - start) * 1e6
        self.enqueue_us = max(self.enqueue_us, launch_us)
        torch.cuda.synchronize()
        return launch_us

    def hold(self, calls: int = 1):
        """Hold the stream while this number of calls is launched. Returns a function that says whether it still
        does."""
        torch.cuda._sleep(int(2 * calls * self.enqueue_us * self._cycles_per_us) + GATE_CYCLES)
        self._awake.record()
        return lambda: not self._awake.query()

    def flush(self) -> None:
        """Fill the L2 by reading: after writing, as do_bench does, the kernel would have to write the lines back. Lines
        that a call made persist are given up before."""
        self._l2.reset()
        self._others.sum()

    @property
    def persists(self) -> bool:
        """Has a call set L2 aside for persisting lines?"""
        return self._l2.was_set_aside

    def __call__(self, call) -> tuple[float, object]:
        self.flush()
        self.hold()
        self._start.record()
        outputs = call()
        self._end.record()
        torch.cuda.synchronize()
        return self._start.elapsed_time(self._end) * 1000, outputs

    def bench(self, call, warmup_ms: int, rep_ms: int) -> list[float]:
        """triton.testing.do_bench's single times in microseconds."""
        from triton.testing import do_bench

        return [1000 * t for t in do_bench(call, warmup=warmup_ms, rep=rep_ms, return_mode="all")]
