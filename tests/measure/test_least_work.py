"""Where the least work of a problem is counted (measure.least_work)."""

import pytest
from kernelopt.errors import EnvironmentLacks, Refused, UsageError
from kernelopt.measure import least_work

IN_PLACE = "MUTATES = ('x',)\n"


@pytest.fixture
def opened(monkeypatch):
    """The devices that were asked to count, in order; those in `fails` raise what it says. No process starts."""
    devices, fails = [], {}

    class Opened:
        def __init__(self, device, cache):
            devices.append(device)
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
    return devices, fails


def counted(tmp_path, text):
    reference = tmp_path / "reference.py"
    reference.write_text(text)
    return least_work.counted_work(reference, None, None, 60)


def test_a_task_that_changes_its_inputs_is_run_on_the_gpu(opened, tmp_path):
    assert counted(tmp_path, IN_PLACE) == "cuda" and opened[0] == ["cuda"]


def test_other_tasks_leave_the_gpu_alone(opened, tmp_path):
    assert counted(tmp_path, "COMPARE = {}\n") == "cpu-interpreter" and opened[0] == ["cpu-interpreter"]


@pytest.mark.parametrize("error", [EnvironmentLacks("no GPU"), Refused("the reference failed")])
def test_what_the_gpu_cannot_count_is_counted_without_it(opened, tmp_path, error):
    devices, fails = opened
    fails["cuda"] = error
    assert counted(tmp_path, IN_PLACE) == "cpu-interpreter" and devices == ["cuda", "cpu-interpreter"]


def test_a_wrong_call_is_told_at_once(opened, tmp_path):
    opened[1]["cuda"] = UsageError("the reference has no get_inputs")
    with pytest.raises(UsageError):
        counted(tmp_path, IN_PLACE)
