"""Which device is meant, and its state: the real functions over a stand-in for the driver (stand_ins/pynvml.py)."""

import importlib.util
import json
import sys
import time
from dataclasses import replace

import pytest
from conftest import STAND_INS, TIMING
from kernelopt.device import gpu
from kernelopt.errors import EnvironmentLacks

FULL = {
    "capability": [9, 0],
    "mib": 81559,
    "max_sm": 1980,
    "max_memory": 2619,
    "bus": 5120,
    "tdp": 700,
    "limit": 650,
    "sm_clock": 1755,
    "memory_clock": 2619,
    "power": 300,
    "temperature": 40,
    "reasons": 4,
    "processes": [],
    "slot": "00000000:0F:00.0",
}


def card(number: int, name: str = "NVIDIA H100 80GB HBM3", **changes) -> dict:
    return {"name": name, "uuid": f"GPU-{number}aaa-{number}", **FULL, **changes}


def part(number: int, **changes) -> dict:
    """A MIG slice. NVML answers few questions about one."""
    name = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    return {"name": name, "uuid": f"MIG-{number}bbb-{number}", "mib": 9728, "sms": 16, "processes": [], **changes}


@pytest.fixture
def cards(monkeypatch):
    """A function that puts these cards into the machine."""

    def put(*found: dict, visible: str | None = None, lacks: str = "") -> None:
        monkeypatch.setenv("STAND_IN_CARDS", json.dumps(found))
        monkeypatch.setenv("STAND_IN_LACKS", lacks)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        spec = importlib.util.spec_from_file_location("pynvml", STAND_INS / "pynvml.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        spec.loader.exec_module(module)

    return put


def watched() -> dict:
    with gpu.Watch() as watch:
        deadline = time.monotonic() + 5
        while not watch.samples and time.monotonic() < deadline:
            time.sleep(0.005)
    return watch.state()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-0aaa-0", "GPU-1aaa-1", "GPU-2aaa-2"]),
        ("1", ["GPU-1aaa-1"]),
        ("2,0", ["GPU-2aaa-2", "GPU-0aaa-0"]),
        ("0,1,", ["GPU-0aaa-0", "GPU-1aaa-1"]),
        ("0,-1,1", ["GPU-0aaa-0"]),
        ("1,9,0", ["GPU-1aaa-1"]),
        ("GPU-2aaa-2", ["GPU-2aaa-2"]),
        ("GPU-1", ["GPU-1aaa-1"]),
        (" GPU-2a , 0", ["GPU-2aaa-2", "GPU-0aaa-0"]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(cards, visible, expected):
    cards(card(0), card(1), card(2), visible=visible)
    assert gpu.visible() == expected
    assert gpu.identify()["uuid"] == expected[0]


@pytest.mark.parametrize("visible", ["", "-1", "7", "²", "GPU-", "GPU-none", "H100", "-1,0"])
def test_a_list_that_begins_with_no_device_shows_none(cards, visible):
    cards(card(0), card(1), visible=visible)
    with pytest.raises(EnvironmentLacks, match="names no device"):
        gpu.identify()


def test_a_gpu_that_fell_off_the_bus_hides_no_other(cards):
    cards(card(0, lost=True), card(1))
    assert gpu.visible() == ["GPU-1aaa-1"]


def test_of_a_gpu_in_mig_mode_the_first_slice_is_meant(cards):
    """CUDA shows a slice, never the whole card: the whole card's floor is not the slice's."""
    cards(card(0, mig=[part(0), part(1)]))
    assert gpu.identify()["name"] == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    assert gpu.visible() == ["MIG-0bbb-0"]
    said = gpu.query()
    assert said["sm_count"] == 16 and said["memory_capacity"] == 9.5
    assert "tdp" not in said and "l2_capacity" not in said and "memory_bus_width" not in said


def test_a_slice_by_its_uuid(cards):
    cards(card(0, mig=[part(0), part(1)]), visible="MIG-1bbb")
    assert gpu.identify()["uuid"] == "MIG-1bbb-1"


def test_mig_mode_without_a_slice_is_no_gpu(cards):
    cards(card(0, mig=[]))
    with pytest.raises(EnvironmentLacks, match="no slice is made"):
        gpu.identify()


def test_the_highest_clocks_are_told_with_the_device(cards):
    cards(card(0))
    assert gpu.identify()["max_clocks"] == {"sm_clock_mhz": 1980, "memory_clock_mhz": 2619}
    cards(card(0, mig=[part(0)]))  # a slice has the clocks of its card
    assert gpu.identify()["max_clocks"] == {"sm_clock_mhz": 1980, "memory_clock_mhz": 2619}


@pytest.mark.parametrize("lacking", ["power", "processes", "memory_clock", "reasons", "temperature", "sm_clock"])
def test_one_reading_that_is_not_supported_loses_no_other(cards, lacking):
    """As under WSL2, on laptops and in virtual machines."""
    found = card(0)
    del found[lacking]
    cards(found)
    state = watched()
    expected = {"sm_clock_mhz": 1755, "memory_clock_mhz": 2619, "power_w": 300, "temperature_c": 40}
    name = {"power": "power_w", "temperature": "temperature_c"}.get(lacking, f"{lacking}_mhz")
    for figure, value in expected.items():
        assert state[figure] == (None if figure == name else {"min": value, "median": value, "max": value})
    assert state["throttle_reasons"] == (None if lacking == "reasons" else ["sw_power_cap"])
    assert ("not told" in gpu.describe(state)) == (lacking != "processes" and lacking != "memory_clock")
    assert {**gpu.merged([state, state]), "samples": 0} == {**state, "samples": 0}


def test_reasons_under_the_name_that_they_had_before_driver_535(cards):
    cards(card(0), lacks="nvmlDeviceGetCurrentClocksEventReasons nvmlClocksEventReasonSwPowerCap")
    assert watched()["throttle_reasons"] == ["sw_power_cap"]


def test_times_are_told_without_a_state_of_throttling():
    state = {"throttle_reasons": None, "foreign_processes": []}
    assert replace(TIMING, gpu_state=state).warnings() == []
