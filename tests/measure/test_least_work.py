"""Where the least work of a problem is counted (measure.least_work)."""

import pytest
from kernelopt.device import gpu
from kernelopt.errors import EnvironmentLacks, Refused, UsageError
from kernelopt.measure import least_work

IN_PLACE = "MUTATES = ('x',)\n"


@pytest.fixture
def opened(monkeypatch):
    """The devices that were asked to count, in order; those in `fails` raise what it says. No process starts."""
    devices, fails = [], {}

    class Opened:
        def __init__(self, device, cache, wait_s=600):
            devices.append(device)
            assert wait_s == 0 or device != "cuda"
            self.device = device

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    def counted_in(sandbox, *_):
        if sandbox.device in fails:
            raise fails[sandbox.device]
        return sandbox.device

    monkeypatch.setattr(least_work, "Sandbox", Opened)
    monkeypatch.setattr(least_work, "counted_in", counted_in)
    monkeypatch.setattr(gpu, "device_here", lambda: "cuda")
    return devices, fails


def counted(tmp_path, text):
    reference = tmp_path / "reference.py"
    reference.write_bytes(text.encode() if isinstance(text, str) else text)
    return least_work.counted_work(reference, None, None, 60)


def test_a_task_that_changes_its_inputs_is_run_on_the_gpu(opened, tmp_path):
    assert counted(tmp_path, IN_PLACE) == "cuda" and opened[0] == ["cuda"]


@pytest.mark.parametrize("text", ["COMPARE = {}\n", "# MUTATES = ('x',)\n", "MUTATES = (\n", b"MUTATES = '\xff'\n"])
def test_other_tasks_leave_the_gpu_alone(opened, tmp_path, text):
    assert counted(tmp_path, text) == "cpu-interpreter" and opened[0] == ["cpu-interpreter"]


def test_without_a_gpu_nothing_is_said_of_one(opened, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "device_here", lambda: "cpu-interpreter")
    assert counted(tmp_path, IN_PLACE) == "cpu-interpreter" and not capsys.readouterr().err


@pytest.mark.parametrize("error", [EnvironmentLacks("GPU busy"), Refused("the reference failed"), OSError("read-only")])
def test_what_the_gpu_cannot_count_is_counted_without_it(opened, tmp_path, error, capsys):
    devices, fails = opened
    fails["cuda"] = error
    assert counted(tmp_path, IN_PLACE) == "cpu-interpreter" and devices == ["cuda", "cpu-interpreter"]
    assert f"on the CPU, not on the GPU: {error}" in capsys.readouterr().err


def test_a_wrong_call_is_told_at_once(opened, tmp_path):
    opened[1]["cuda"] = UsageError("the reference has no get_inputs")
    with pytest.raises(UsageError):
        counted(tmp_path, IN_PLACE)
