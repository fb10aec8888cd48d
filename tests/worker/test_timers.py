"""The clock of a single call on the GPU. The device is a stand-in: a stream that works behind the host's clock."""

from types import SimpleNamespace

import pytest
from kernelopt.worker import persisting, timers


class Stream:
    """Stands in for torch and its stream. record_us: what the host takes to record an event. Cycles are nanoseconds."""

    def __init__(self, record_us: float):
        self.host_us = self.busy_until_us = 0.0
        stream = self

        class Event:
            def __init__(self, enable_timing: bool):
                self.at_us = 0.0

            def record(self):
                stream.host_us += record_us
                self.at_us = stream.busy_until_us = max(stream.host_us, stream.busy_until_us)

            def query(self) -> bool:
                return stream.host_us >= self.at_us

            def elapsed_time(self, end) -> float:
                return (end.at_us - self.at_us) / 1000

        properties = SimpleNamespace(L2_cache_size=4)
        self.cuda = SimpleNamespace(
            Event=Event, _sleep=self.work, synchronize=self.wait, get_device_properties=lambda _: properties
        )

    def zeros(self, count: int, device: str):
        return SimpleNamespace(sum=lambda: None)

    def work(self, cycles: int) -> None:
        self.busy_until_us = max(self.host_us, self.busy_until_us) + cycles / 1000

    def wait(self) -> None:
        self.host_us = max(self.host_us, self.busy_until_us)


@pytest.mark.parametrize("record_us", [0.5, 3.0, 15.0, 40.0])
def test_a_busy_host_makes_no_call_shorter(monkeypatch, record_us):
    """The time of an empty pair of events is taken off each call: on an H200 a call of 5 us was recorded as -7.5 us."""
    stream = Stream(record_us)
    monkeypatch.setattr(timers, "torch", stream)
    monkeypatch.setattr(timers, "perf_counter", lambda: stream.host_us / 1e6)
    monkeypatch.setattr(persisting.L2, "of_device", staticmethod(lambda: SimpleNamespace(reset=lambda: None)))
    assert timers.GatedTimer().empty_us == pytest.approx(0.0, abs=1e-9)
