"""Locking and giving back the SM clock, against a stand-in for pynvml: no test here touches a real GPU.

The stand-in's GPU is asked for by a UUID that no real one has.
"""

import importlib.util
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import BUNDLE
from kernelopt.device import clocks, gpu, gpu_lock
from kernelopt.errors import EnvironmentLacks, Refused, UsageError

CLOCKS = list(range(345, 1996, 15))
STAND_IN_PYNVML = '''"""A stand-in for NVIDIA's pynvml: one GPU, whose state is the JSON file named by $STAND_IN_GPU."""
import json, os, pathlib

NVML_CLOCK_GRAPHICS, NVML_CLOCK_SM, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION = 0, 1, 3, 4
FILE = pathlib.Path(os.environ["STAND_IN_GPU"])

class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"stand-in error {value}")
        self.value = value

def state(): return json.loads(FILE.read_text())
def change(**values): FILE.write_text(json.dumps({**state(), **values}))
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlSystemGetDriverVersion(): return "0"
def nvmlDeviceGetName(handle): return "stand-in GPU"
def nvmlDeviceGetUUID(handle): return state()["uuid"]
def nvmlDeviceGetSupportedMemoryClocks(handle): return [3200, 1600]
def nvmlDeviceGetClockInfo(handle, which): return state()["reads"] or state()["locked"] or 1980

def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return "handle"

def nvmlDeviceGetSupportedGraphicsClocks(handle, memory):
    return state()["clocks"] if memory == 3200 else [345]

def nvmlDeviceGetDefaultApplicationsClock(handle, which):
    if state()["default"] is None: raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return state()["default"]

def nvmlDeviceSetGpuLockedClocks(handle, low, high):
    if state()["refuses"]: raise NVMLError(state()["refuses"])
    assert low == high
    if state()["interrupts"]: os.kill(os.getpid(), 2)
    change(locked=high, sets=state()["sets"] + [high])

def nvmlDeviceResetGpuLockedClocks(handle):
    if state()["refuses"]: raise NVMLError(state()["refuses"])
    if state()["interrupts"]: os.kill(os.getpid(), 2)
    change(locked=None, resets=state()["resets"] + 1)
'''


class StandInGpu:
    """The stand-in's state, the environment that leads to it, and the scripts run in it."""

    def __init__(self, folder: Path):
        self.file = folder / "gpu.json"
        self.uuid = f"GPU-stand-in-{os.getpid()}-{abs(hash(folder))}"
        (folder / "pynvml.py").write_text(STAND_IN_PYNVML)
        (folder / "tmp").mkdir()
        self.environment = {"STAND_IN_GPU": str(self.file), "CUDA_VISIBLE_DEVICES": self.uuid}
        self.environment |= {"PYTHONPATH": str(folder), "TMPDIR": str(folder / "tmp")}
        self.notes = folder / "tmp" / f"gpu-clocks-{os.geteuid()}"
        state = {
            "uuid": self.uuid,
            "clocks": CLOCKS,
            "default": None,
            "refuses": None,
            "reads": None,
            "interrupts": False,
        }
        self.file.write_text(json.dumps({**state, "locked": None, "sets": [], "resets": 0}))

    def __getitem__(self, name: str):
        return json.loads(self.file.read_text())[name]

    def set(self, **values) -> None:
        self.file.write_text(json.dumps({**json.loads(self.file.read_text()), **values}))

    def start(self, script: str, *arguments, prefix: tuple[str, ...] = ()) -> subprocess.Popen:
        command = [*prefix, "bash", str(BUNDLE / "scripts" / script), *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env={**os.environ, **self.environment}, **pipes)

    def run(self, script: str, *arguments, code: int = 0) -> tuple[str, str]:
        """(stdout, stderr) of a script that must exit with `code`."""
        process = self.start(script, *arguments)
        out, err = process.communicate(timeout=60)
        assert process.returncode == code and "Traceback" not in err, out + err
        return out, err


@pytest.fixture
def card(tmp_path, interruptible):
    made = StandInGpu(tmp_path)
    yield made
    (gpu_lock.LOCKS / f"kernelopt-{made.uuid}.lock").unlink(missing_ok=True)


@pytest.fixture
def here(card, monkeypatch):
    """The stand-in in this process too."""
    for name, value in card.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", None)
    spec = importlib.util.spec_from_file_location("pynvml", card.file.with_name("pynvml.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert gpu.identify().name == "stand-in GPU"
    return card


@pytest.mark.parametrize(
    ("default", "expected"),
    [
        (None, 1575),  # 80 % of 1995 is 1596; 1590 is the clock below it
        (1995, 1590),  # a default that is the highest clock says nothing
        (1590, 1590),
        (590, 585),
        (100, 345),  # no clock is that low
    ],
)
def test_the_sustainable_clock(default, expected):
    highest = 1980 if default is None else 1995
    assert clocks.sustainable([clock for clock in CLOCKS if clock <= highest], default) == expected


def test_only_a_clock_of_the_gpu_is_taken():
    assert clocks.choose(CLOCKS, None, 1200) == 1200
    with pytest.raises(
        UsageError, match="no clock of 1201 MHz; the nearest are 1200 and 1215, all lie between 345 and"
    ):
        clocks.choose(CLOCKS, None, 1201)


def test_lock_and_reset(card):
    out, _ = card.run("lock-gpu-clock.sh")
    assert card["locked"] == 1590 and f"stand-in GPU ({card.uuid}): SM clock locked at 1590 MHz\n" in out
    (note,) = card.notes.iterdir()
    assert json.loads(note.read_text())["sm_clock_before_mhz"] == 1980
    assert stat.S_IMODE(card.notes.stat().st_mode) == 0o700
    card.run("reset-gpu-clock.sh")
    assert card["locked"] is None and card["resets"] == 1 and not list(card.notes.iterdir())


def test_a_second_lock_is_refused_and_takes_nothing_away(card):
    card.run("lock-gpu-clock.sh", "--clock", 1200)
    _, err = card.run("lock-gpu-clock.sh", "--", "true", code=1)
    assert "locked at 1200 MHz since 20" in err and "reset-gpu-clock.sh" in err
    assert card["locked"] == 1200 and card["resets"] == 0


def test_reset_leaves_another_ones_lock_alone(card):
    card.set(locked=900)
    out, _ = card.run("reset-gpu-clock.sh")
    assert "nothing was changed" in out and card["locked"] == 900 and card["resets"] == 0


def test_the_json(card):
    locked = json.loads(card.run("lock-gpu-clock.sh", "--clock", 1200, "--json")[0])
    assert {key: locked[key] for key in ("clock_mhz", "sm_clock_mhz", "sm_clock_before_mhz")} == {
        "clock_mhz": 1200,
        "sm_clock_mhz": 1200,
        "sm_clock_before_mhz": 1980,
    }
    given_back = json.loads(card.run("reset-gpu-clock.sh", "--json")[0])
    assert given_back["reset"] is True and given_back["uuid"] == card.uuid
    assert json.loads(card.run("reset-gpu-clock.sh", "--json")[0]) == {"reset": False}


def test_an_idle_gpu_is_said_to_be_idle(card):
    card.set(reads=345)
    assert "locked at 1590 MHz; it reads 345 MHz, idle" in card.run("lock-gpu-clock.sh")[0]


def test_a_gpu_that_does_not_keep_to_the_clock_is_given_back(here, monkeypatch):
    monkeypatch.setattr(clocks, "INTERVAL_S", 0)
    here.set(reads=1980)
    with pytest.raises(Refused, match="does not keep to 1590 MHz: it reads 1980; the lock was undone"):
        clocks.lock()
    assert here["sets"] == [1590] and here["locked"] is None and clocks.release() is None


def test_an_interrupt_while_locking_undoes_the_lock(here, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(clocks, "settled", interrupted)
    with pytest.raises(KeyboardInterrupt):
        clocks.lock()
    assert here["sets"] == [1590] and here["locked"] is None and clocks.release() is None


@pytest.mark.parametrize(("error", "says"), [(4, "no permission"), (3, "cannot lock the clock"), (15, "15")])
def test_what_nvml_refuses_is_one_sentence_and_exit_3(card, error, says):
    card.set(refuses=error)
    _, err = card.run("lock-gpu-clock.sh", "--", "touch", card.file.with_name("ran"), code=3)
    assert says in err and err.count("\n") == 1 and not card.file.with_name("ran").exists()
    assert not list(card.notes.iterdir())  # nothing was locked, so nothing is to give back


def test_a_reset_without_permission_keeps_the_note(card):
    card.run("lock-gpu-clock.sh")
    card.set(refuses=4)
    card.run("reset-gpu-clock.sh", code=3)
    card.set(refuses=None)
    assert "after a lock at 1590 MHz" in card.run("reset-gpu-clock.sh")[0] and card["locked"] is None


def test_a_measuring_gpu_is_left_alone(here):
    with gpu_lock.locked(here.uuid), pytest.raises(EnvironmentLacks, match="GPU busy"):
        clocks.lock()
    assert here["sets"] == []


def test_a_folder_that_others_can_open_is_refused(here):
    here.notes.mkdir(mode=0o755)
    with pytest.raises(EnvironmentLacks, match="not a folder of yours alone"):
        clocks.lock()
    here.notes.rmdir()
    here.notes.symlink_to(here.file.parent)
    with pytest.raises(EnvironmentLacks, match="not a folder of yours alone"):
        clocks.lock()
    assert here["sets"] == []


# --- with a command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 7])
def test_a_command_runs_locked_and_its_exit_code_is_passed_on(card, code):
    command = ("bash", "-c", f"cat {card.file}; exit {code}")
    out, err = card.run("lock-gpu-clock.sh", "--clock", 1200, "--", *command, code=code)
    assert json.loads(out)["locked"] == 1200  # stdout is the command's alone
    assert card["locked"] is None and card["resets"] == 1 and "the driver's again" in err


def started_under_lock(card, *signals: int, **options) -> subprocess.Popen:
    """A command that dies of these signals, at work under the lock; a shell might take one for its child's."""
    started = card.file.with_name("started")
    lines = [f"signal.signal({number:d}, signal.SIG_DFL)" for number in signals]
    lines += [f"pathlib.Path({str(started)!r}).touch()", "time.sleep(60)"]
    code = "; ".join(["import pathlib, signal, time", *lines])
    process = card.start("lock-gpu-clock.sh", "--", sys.executable, "-c", code, **options)
    deadline = time.monotonic() + 30
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert started.exists() and card["locked"] == 1590
    return process


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_and_the_clock_is_given_back(card, ending):
    process = started_under_lock(card, ending)
    process.send_signal(ending)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + ending and "Traceback" not in err
    assert card["locked"] is None and not list(card.notes.iterdir())


def test_under_nohup_a_hang_up_ends_nothing_and_sigterm_does(card):
    process = started_under_lock(card, signal.SIGHUP, signal.SIGTERM, prefix=("nohup",))
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None and card["locked"] == 1590
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM and card["locked"] is None


def test_a_signal_while_the_clock_is_locked_or_given_back_leaves_nothing_locked(card):
    card.set(interrupts=True)
    card.run("lock-gpu-clock.sh", "--", "touch", card.file.with_name("ran"), code=128 + signal.SIGINT)
    assert card["sets"] == [1590] and card["locked"] is None and not list(card.notes.iterdir())
    assert not card.file.with_name("ran").exists()


def test_a_command_that_dies_of_a_signal(card):
    card.run("lock-gpu-clock.sh", "--", "bash", "-c", "kill -SEGV $$", code=128 + signal.SIGSEGV)
    assert card["locked"] is None


def test_a_command_that_is_not_there_or_cannot_be_started(card):
    _, err = card.run("lock-gpu-clock.sh", "--", "no-such-program", code=2)
    assert "no program" in err and card["sets"] == []
    broken = card.file.with_name("broken")
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    card.run("lock-gpu-clock.sh", "--", broken, code=3)
    assert card["sets"] == [1590] and card["locked"] is None


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("lock-gpu-clock.sh", ["--"]),
        ("lock-gpu-clock.sh", ["--clock", "fast"]),
        ("lock-gpu-clock.sh", ["--clock", "1201"]),
        ("lock-gpu-clock.sh", ["--json", "--", "true"]),
        ("reset-gpu-clock.sh", ["--", "true"]),
        ("reset-gpu-clock.sh", ["--clock", "1200"]),
    ],
)
def test_a_wrong_call_touches_nothing(card, script, arguments):
    _, err = card.run(script, *arguments, code=2)
    assert err.count("\n") == 1 and card["sets"] == [] and card["resets"] == 0


def test_without_a_gpu_it_says_so(card):
    card.environment["CUDA_VISIBLE_DEVICES"] = "GPU-stand-in-of-nothing"
    _, err = card.run("lock-gpu-clock.sh", code=3)
    assert "no NVIDIA GPU here" in err and card["sets"] == []
