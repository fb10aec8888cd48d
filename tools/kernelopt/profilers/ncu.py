"""Nsight Compute: collect a report of one marked call, and read a report into metrics."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .. import bundle
from ..device import gpu, outcomes, programs
from ..device.outcomes import Outcome
from ..device.pipes import last_line
from ..device.sandbox import Sandbox
from ..errors import EnvironmentLacks, Refused, TimedOut, ToolError
from . import metrics
from .profile import KernelProfile, NvidiaRule

# stderr of ncu -> what it means and what to do
FAILURES = {
    "ERR_NVGPUCTRPERM": "no permission to read the GPU's counters: run as root or with CAP_SYS_ADMIN, or let the "
    "administrator load the driver with NVreg_RestrictProfilingToAdminUsers=0",
    "LibraryNotLoaded": "ncu cannot load its driver library (a gVisor sandbox, or an ncu older than the GPU): "
    "profile outside the sandbox or with a newer Nsight Compute",
    "driver resource was unavailable": "another profiler holds the counters: stop it (DCGM: dcgmi profile --pause)",
    "Failed to save memory for replay": "the problem is too large for kernel replay: profile a smaller workload",
}
Launch = TypeVar("Launch")  # what a caller of read_launches reads from one profiled launch
GLOBAL = 2  # ncu_report's type of an estimated speed-up that is one of the whole kernel
INSTALL_ROOTS = ("/opt/nvidia/nsight-compute", "/usr/local/NVIDIA-Nsight-Compute")


def installed() -> str | None:
    return programs.find("ncu")


def program() -> str:
    """The path of ncu; EnvironmentLacks when there is none."""
    if (path := installed()) is None:
        raise EnvironmentLacks(
            "ncu (Nsight Compute) is neither on the PATH nor in the CUDA toolkit; install it or add its folder to PATH"
        )
    return path


def program_version() -> str:
    """ "Nsight Compute 2025.3.1.0" """
    done = subprocess.run([program(), "--version"], capture_output=True, text=True)
    version = re.search(r"Version (\S+)", done.stdout)
    return f"Nsight Compute {version[1]}" if version else "Nsight Compute, version unknown"


def check_supported() -> None:
    """EnvironmentLacks when this Nsight Compute no longer profiles this GPU: it would find no kernel."""
    try:
        capability = gpu.query().get("compute_capability")
    except EnvironmentLacks:  # no GPU, which shows when the kernel runs
        return
    if capability and metrics.last_version(capability) and (lack := left_out(capability, program_version())):
        raise EnvironmentLacks(lack)


def left_out(capability: str, version: str) -> str | None:
    """Why that version of Nsight Compute does not profile GPUs of compute capability "7.0", and which one does. None
    where it does, or where its number is not known. Pure."""
    last, number = metrics.last_version(capability), re.search(r"(\d+)\.(\d+)", version)
    if last is None or number is None or (int(number[1]), int(number[2])) <= tuple(map(int, last.split("."))):
        return None
    return (
        f"{version} profiles no GPU of compute capability {capability}; the last version that does is {last}: "
        "install it, and put its folder before the newer one on the PATH"
    )


def command(report: Path, cache: str, everything: bool = False, names: list[str] | None = None) -> list[str]:
    """The ncu command line that starts the worker's.

    cache: cold (flushed before each pass) or warm. everything: all sections, and metrics by instruction and source
    line. names: of single metrics; None: all that are requested.

    The clocks are left alone. ncu profiles the range that the worker marks, so no name pattern can catch another
    kernel.
    """
    sections = [part for section in metrics.ncu_sections() for part in ("--section", section)]
    if everything:
        sections = ["--set", "full", "--import-source", "on"]
    return [
        installed() or "ncu",
        *("--export", str(report), "--force-overwrite"),
        *("--profile-from-start", "off"),
        *("--target-processes", "all"),
        *("--clock-control", "none"),
        *("--cache-control", "all" if cache == "cold" else "none"),
        *sections,
        *("--metrics", ",".join(names or metrics.requested())),
        "--",
    ]


def collect(
    sandbox: Sandbox,
    kernel: Path,
    inputs: str,
    report: Path,
    cache: str,
    timeout_s: float,
    everything: bool = False,
    compiled: Path | None = None,
) -> Outcome:
    """Profile one call of `kernel` into `report`. compiled: the folder for what Triton compiled.

    EnvironmentLacks: the message names the remedy. Refused: the kernel failed or launched nothing. TimedOut.
    """
    report.unlink(missing_ok=True)
    program()
    check_supported()
    with sandbox.folder("report") as folder:
        made, stages = Path(folder, "report.ncu-rep"), Path(folder, "compiled")
        stages.mkdir()
        arguments = {"kernel": str(kernel.resolve()), "inputs": inputs, "compiled": str(stages) if compiled else None}
        outcome = profiled(sandbox, arguments, timeout_s, lambda names: command(made, cache, everything, names))
        if made.exists():
            shutil.copyfile(made, report)
        if compiled:
            shutil.copytree(stages, compiled, dirs_exist_ok=True)
    check_outcome(outcome, report.exists(), timeout_s)
    return outcome


def profiled(
    sandbox: Sandbox, arguments: dict, timeout_s: float, command_for: Callable[[list[str]], list[str]]
) -> Outcome:
    """The worker's job `profile` under ncu. Metrics whose names this ncu does not know are left out, and it runs
    again. command_for: ncu's command line for a list of metrics."""
    names = metrics.requested()
    while True:
        outcome = sandbox.run_under(command_for(names), "profile", arguments, timeout_s)
        refused = refused_names(outcome.log_tail, names)
        if not refused:
            return outcome
        names = [name for name in names if name not in refused]


def check_outcome(outcome: Outcome, has_report: bool, timeout_s: float) -> None:
    """Raises what `collect` raises for a run that ended so."""
    for symptom, remedy in FAILURES.items():
        if symptom in outcome.log_tail:
            raise EnvironmentLacks(f"{symptom}: {remedy}")
    if outcome.timed_out:
        raise TimedOut(f"ncu did not finish in {timeout_s:.0f} s; --timeout raises the limit")
    if outcome.result is None and not has_report:
        raise Refused(f"ncu did not start the kernel; its message: {last_message(outcome.log_tail)}")
    if failed := outcomes.failure(outcome):
        raise Refused(f"the kernel failed under ncu: {failed.message.strip()}")
    if not has_report:
        raise Refused(
            f"ncu profiled no kernel: does the call launch one? Its message: {last_message(outcome.log_tail)}"
        )


def refused_names(log: str, names: list[str]) -> set[str]:
    """The names at which ncu stopped. It skips a metric that the GPU does not have. It stops at one of its own names,
    which have no suffix, when its version does not know that name."""
    refused = set(re.findall(r"Failed to find metric (?:regex:\^)?(\w+)", log))
    return {name for name in names if name.partition(".")[0] in refused}


def last_message(log: str) -> str:
    """The last message of ncu in the log, else its last line."""
    messages = [line for line in log.splitlines() if line.startswith("==")]
    return last_line("\n".join(messages) or log)


def reader():
    """The module ncu_report: from PyPI, else the copy inside an Nsight Compute install."""
    sys.path += [str(folder) for folder in installed_readers()]
    try:
        import ncu_report
    except ImportError:
        raise EnvironmentLacks(
            "no reader of .ncu-rep files here: run bash scripts/setup.sh (package ncu-report), or install Nsight "
            "Compute"
        ) from None
    return ncu_report


def installed_readers() -> list[Path]:
    """Folders with NVIDIA's own reader: beside ncu (in a CUDA toolkit ncu is a script that starts another one), then
    where installers put Nsight Compute, newest first."""
    beside = [Path(path).resolve().parent] if (path := installed()) else []
    usual = [path for root in INSTALL_ROOTS for path in sorted(Path(root).glob("*"), reverse=True)]
    folders = [path / "extras" / "python" for path in (*beside, *usual)]
    return [folder for folder in folders if (folder / "ncu_report.py").is_file()]


def read(report: Path) -> tuple[KernelProfile, ...]:
    """The kernels of a report in launch order, metrics in the schema's units. Refused when there is no kernel."""
    return read_apart(report) if crashes_here() else read_launches(report, _kernel)


def crashes_here() -> bool:
    """Would the reader end this process? The copy in Nsight Compute 2025.3.1 died in metric.unit() beside numpy, on an
    H200. The package from PyPI does not."""
    spec = importlib.util.find_spec("ncu_report")
    from_install = spec is None or Path(spec.origin).parent in installed_readers()
    return "numpy" in sys.modules and from_install


def read_apart(report: Path) -> tuple[KernelProfile, ...]:
    """`read` in a separate process. Refused quotes the messages of that process, also when it dies."""
    command = [sys.executable, "-m", "kernelopt.profilers.ncu", str(report.resolve())]
    environment = {**os.environ, "PYTHONPATH": bundle.python_path()}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == EnvironmentLacks.exit_code:
        raise EnvironmentLacks(done.stderr.strip())
    if done.returncode:
        why = done.stderr.strip() or f"its reader ended with {done.returncode}"
        raise Refused(f"{report} cannot be read: {why}")
    return tuple(map(KernelProfile.from_json, json.loads(done.stdout)))


def read_launches(report: Path, read_action: Callable[[Any], Launch]) -> tuple[Launch, ...]:
    """`read_action` of each profiled launch of a report, in order. Refused when there is none.

    read_action: takes an action of ncu_report, and keeps nothing of it.
    """
    # The documentation of ncu_report does not promise that an action keeps its range and the report's context alive.
    # Without them, reading an action ends the process: metric.unit() crashed on a GPU machine. So no action leaves this
    # function. Its frames hold the context until the last range is read, and a range until its last action is read.
    context = _context(report)
    ranges = map(context.range_by_idx, range(context.num_ranges()))
    launches = tuple(launch for span in ranges for launch in _read_range(span, read_action))
    if not launches:
        raise Refused(f"{report} holds no kernel: nothing was profiled, or the file was cut off")
    return launches


def _context(report: Path):
    try:
        return reader().load_report(str(report))
    except EnvironmentLacks:
        raise
    except Exception as error:
        raise Refused(f"{report} is no readable Nsight Compute report ({error})") from None


def _read_range(span, read_action: Callable[[Any], Launch]) -> list[Launch]:
    return [read_action(action) for action in map(span.action_by_idx, range(span.num_actions()))]


def _kernel(action) -> KernelProfile:
    names = set(metrics.names()) & set(action.metric_names())
    values = metrics.values({name: (action[name].value(), action[name].unit()) for name in names})
    rules = tuple(rule for result in action.rule_results_as_dicts() if (rule := _rule(result)))
    return KernelProfile(action.name(), values["duration"], values, rules)


def _rule(result: dict) -> NvidiaRule | None:
    """One of NVIDIA's findings in plain text; None where it concerns no metric. Their messages hold links:
    @section:NAME:text@ and @url:text:address@."""
    message = result["rule_message"]
    text = " ".join(part for part in (message.get("title"), message.get("message")) if part)
    text = re.sub(r"@url:([^:@]*):[^@]*@|@section:[^:@]*:([^@]*)@", r"\1\2", text)
    if not text or not result.get("focus_metrics"):
        return None
    estimate = result.get("speedup_estimation") or {}
    whole = estimate.get("type") == GLOBAL  # other estimates are for one unit of the GPU, not for the time
    return NvidiaRule(result["name"], " ".join(text.split()), estimate["speedup"] if whole else None)


if __name__ == "__main__":  # for read_apart
    try:
        print(json.dumps([kernel.to_json() for kernel in read_launches(Path(sys.argv[1]), _kernel)]))
    except ToolError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
