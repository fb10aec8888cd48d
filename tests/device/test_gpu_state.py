"""Which device is meant, and its state: the real functions over a stand-in for the driver (stand_ins/pynvml.py)."""

import json
import sys
import time
from dataclasses import replace

import pytest
from conftest import TIMING, stand_in_pynvml
from kernelopt import bundle
from kernelopt.device import gpu, gpu_watch
from kernelopt.errors import EnvironmentLacks
from kernelopt.hardware.card import GpuState, MaxClocks, Spread, merged

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
        monkeypatch.setitem(sys.modules, "pynvml", stand_in_pynvml())

    return put


def test_a_gpu_that_a_sandbox_hides_is_told_from_none(cards, monkeypatch, tmp_path):
    cards()
    monkeypatch.setattr(gpu, "DRIVER", tmp_path / "driver")
    monkeypatch.setattr(gpu, "DEVICE", tmp_path / "nvidiactl")
    with pytest.raises(EnvironmentLacks, match="no NVIDIA GPU here"):
        gpu.identify()
    gpu.DRIVER.mkdir()
    with pytest.raises(EnvironmentLacks, match=r"a sandbox hides the GPU of this machine \(.+\); docs/install\.md"):
        gpu.identify()
    gpu.DEVICE.touch()
    with pytest.raises(EnvironmentLacks, match="no NVIDIA GPU here"):
        gpu.identify()


def test_memory_is_shared_where_more_than_one_process_may_use_the_gpu(cards):
    for mode, free in (({}, 1 << 30), ({"mode": 0}, 1 << 30), ({"mode": 3}, 0)):  # 3: exclusive process
        cards({"name": "NVIDIA A", "uuid": "GPU-1", "mib": 1024, **mode})
        assert gpu.shared_bytes() == free
    cards({"name": "NVIDIA A", "uuid": "GPU-1"})
    assert gpu.shared_bytes() == 0


def test_on_a_node_nobody_is_sent_to_a_node(cards, monkeypatch):
    """Whose command line has an --on already."""
    cards()
    with pytest.raises(EnvironmentLacks, match="on a machine with one, or on a GPU node by --on"):
        gpu.identify()
    monkeypatch.setenv(bundle.MIRROR, "/mirror")
    with pytest.raises(EnvironmentLacks, match=r"on a machine with one; without one, compile_kernel\.py compiles"):
        gpu.identify()


def watched() -> GpuState:
    with gpu_watch.Watch() as watch:
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
    assert gpu.identify().uuid == expected[0]


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
    assert gpu.identify().name == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    assert gpu.visible() == ["MIG-0bbb-0"]
    values = gpu.query()
    assert values["sm_count"] == 16 and values["memory_capacity"] == 9.5
    assert "tdp" not in values and "l2_capacity" not in values and "memory_bus_width" not in values


def test_a_slice_by_its_uuid(cards):
    cards(card(0, mig=[part(0), part(1)]), visible="MIG-1bbb")
    assert gpu.identify().uuid == "MIG-1bbb-1"


def test_mig_mode_without_a_slice_is_no_gpu(cards):
    cards(card(0, mig=[]))
    with pytest.raises(EnvironmentLacks, match="no slice is made"):
        gpu.identify()


def test_the_highest_clocks_are_told_with_the_device(cards):
    cards(card(0))
    assert gpu.identify().max_clocks == MaxClocks(sm_clock_mhz=1980, memory_clock_mhz=2619)
    assert gpu.identify().to_json()["max_clocks"] == {"sm_clock_mhz": 1980, "memory_clock_mhz": 2619}
    cards(card(0, mig=[part(0)]))  # a slice has the clocks of its card
    assert gpu.identify().max_clocks == MaxClocks(sm_clock_mhz=1980, memory_clock_mhz=2619)


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
        assert getattr(state, figure) == (None if figure == name else Spread(value, value, value))
        shown = state.to_json()[figure]
        assert shown == (None if figure == name else {"min": value, "median": value, "max": value})
    assert state.to_json()["throttle_reasons"] == (None if lacking == "reasons" else ["sw_power_cap"])
    assert ("not reported" in state.describe()) == (lacking != "processes" and lacking != "memory_clock")
    assert replace(merged([state, None, state]), samples=0) == replace(state, samples=0)
    assert GpuState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_reasons_under_the_name_that_they_had_before_driver_535(cards):
    cards(card(0), lacks="nvmlDeviceGetCurrentClocksEventReasons nvmlClocksEventReasonSwPowerCap")
    assert watched().throttle_reasons == ("sw_power_cap",)


def test_several_states_become_one():
    """The JSON object stands in records; its keys and their order stay."""
    one = GpuState(3, Spread(1000, 1500, 1700), None, Spread(90.0, 100.0, 110.0), Spread(30, 31, 32), None, (7,))
    two = GpuState(2, Spread(900, 1600, 1800), None, None, Spread(40, 41, 42), ("hw_slowdown",), (5, 7))
    assert list(merged([one, two]).to_json().items()) == [
        ("samples", 5),
        ("sm_clock_mhz", {"min": 900, "median": 1600, "max": 1800}),
        ("memory_clock_mhz", None),
        ("power_w", {"min": 90.0, "median": 100.0, "max": 110.0}),
        ("temperature_c", {"min": 30, "median": 41, "max": 42}),
        ("throttle_reasons", ["hw_slowdown"]),
        ("foreign_processes", [5, 7]),
    ]
    assert merged([None]) is None and merged([]) is None


def test_times_are_told_without_a_state_of_throttling():
    state = GpuState(1, None, None, None, None, throttle_reasons=None, foreign_processes=())
    assert replace(TIMING, gpu_state=state).warnings() == []
