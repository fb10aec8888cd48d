"""Is a kernel right? Inputs, candidate and oracle each in a process of its own; the verdict is made here.

1. `prepare` writes the inputs of every workload and seed to files.
2. `run` loads the candidate, and nothing of the reference, and stores its raw outputs.
3. `check`, which never loads the candidate, makes the inputs anew, computes the reference in float64 and compares.
"""

import secrets
import tempfile
from pathlib import Path

from .errors import EnvironmentLacks, TimedOut, UsageError
from .sandbox import Outcome, Sandbox

# Bound on |error| / (|reference| + rms(reference)), by the dtype of the output. bf16 and fp16: two units in
# the last place (bf16 equals torch.testing's rtol); fp32: KernelBench's 1e-4, which a tf32 product fails;
# fp64: torch.testing; fp8: one unit of e4m3; integers and bool: equal.
TOLERANCES = {"fp64": 1e-7, "fp32": 1e-4, "fp16": 2e-3, "bf16": 1.6e-2, "fp8": 0.125, "exact": 0.0}
# The interpreter truncates fp32 to bf16 where the GPU rounds: up to one more unit in the last place.
INTERPRETER_TOLERANCES = {**TOLERANCES, "bf16": 2.4e-2}

# Triton's interpreter holds bf16 as integers: its arithmetic and tl.dot on bf16 tiles are wrong, conversions are right.
BF16_SYMPTOMS = ("WRONG_VALUES", "NONFINITE")
INTERPRETED_BF16 = (
    "Triton's interpreter computes wrongly with bf16 tiles (tl.dot, arithmetic before .to(tl.float32)), so a right "
    "kernel may look wrong here: use a GPU, or check the logic with --kernel K --reference R --dtype fp16"
)

INPUT_BYTES = 2 << 30  # of input files per workload, beyond the seeds that are needed in any case
KNOWN_SEEDS = 1 << 16  # seeds from here on are secret
# What a child process can report of itself; anything else in a report is forged.
CANDIDATE_FAULTS = (
    "COMPILE_ERROR",
    "IMPORT_ERROR",
    "LAUNCH_ERROR",
    "RUNTIME_ERROR",
    "ILLEGAL_ACCESS",
    "OOM",
    "NO_SPACE",
    "OPPONENT",
    "CHEAT_SUSPECT",
)
REPORT_KEYS = {"outputs", "mutated", "aliased", "deterministic", "plain"}
HINTS = {
    "COMPILE_ERROR": "read the compiler's message",
    "IMPORT_ERROR": "the file must load and define ModelNew or kernel_function",
    "LAUNCH_ERROR": "the launch asks for more than the GPU has: smaller blocks, fewer stages or warps",
    "ILLEGAL_ACCESS": "a load or store is out of bounds: check masks and strides",
    "OOM": "memory is exhausted",
    "TIMEOUT": "the kernel hangs or is far too slow; --timeout raises the limit",
    "WRONG_VALUES": "compare masks, reduction order and accumulation dtype; in Triton an fp32 tl.dot uses tf32 "
    "unless input_precision='ieee'",
    "NONFINITE": "NaN or Inf where the reference has none: unwritten output, overflow, or -inf minus -inf",
    "INPUT_MUTATED": "write to a new tensor, not into the inputs",
    "ALIASED_OUTPUT": "allocate the output in each call",
    "WRONG_STRIDE": "return the memory layout that the reference returns",
    "INVALID_REFERENCE": "the reference itself fails; mend reference.py",
    "INVALID_TASK": "no kernel can be judged on this task; change the reference, its inputs or the tolerance",
}


def verify(
    sandbox: Sandbox,
    kernel: Path,
    reference: Path,
    dtype: str | None = None,
    tolerance: float | None = None,
    workloads: list[str] | None = None,
    seeds: int = 3,
    timeout_s: float = 300,
) -> dict:
    """{status, device, cases, summary, …}: the kernel against the reference on every workload and seed.

    seeds: how many; the last ones are secret. tolerance: replaces the dtype's default for floating outputs.
    UsageError when a workload is unknown; whatever the candidate does is a status.
    """
    oracle = reference.read_bytes()
    prepared = prepare(sandbox, reference, dtype, workloads, draw_seeds(seeds), timeout_s)
    if "error" in prepared:
        return verdict(sandbox, [], prepared["error"], tolerance)
    cases = prepared["cases"]
    arguments = {
        "kernel": str(kernel.resolve()),
        "inputs": [case["path"] for case in cases],
        "folder": sandbox.new_folder("outputs"),
    }
    outcome = sandbox.run("run", arguments, timeout_s)
    ran = failure(outcome) or complete(outcome.result, len(cases))
    if reference.read_bytes() != oracle:
        reference.write_bytes(oracle)
        ran = error("CHEAT_SUSPECT", "the kernel changed the reference while it ran; the file is restored")
    if "error" in ran:
        return verdict(sandbox, [], ran["error"], tolerance, outcome)
    sound = [
        {**case, "outputs": done["outputs"], "first": first}
        for case, done, first in zip(cases, ran["cases"], firsts(cases), strict=False)
        if "outputs" in done
    ]
    checked = check(sandbox, reference, dtype, sound, tolerance, timeout_s)
    if "error" in checked:
        return verdict(sandbox, [], checked["error"], tolerance)
    results = []
    for entry, done, found in zip(cases, ran["cases"], [*checked["cases"], None], strict=False):
        named = {name: entry[name] for name in ("workload", "seed", "dtype")}
        results.append({**named, **judge(done, found)})
    hide_secret(results)
    return verdict(sandbox, results, None, tolerance, outcome)


def draw_seeds(count: int) -> list[int]:
    """0, 1, … and, last, a third of them (at least one) that nobody can know beforehand."""
    secret = max(1, count // 3)
    return [*range(count - secret), *(secret_seed() for _ in range(secret))]


def secret_seed() -> int:
    return KNOWN_SEEDS + secrets.randbelow(2**31)


def tolerances(device: str, tolerance: float | None) -> dict[str, float]:
    table = TOLERANCES if device == "cuda" else INTERPRETER_TOLERANCES
    if tolerance is not None:
        table = {name: tolerance if name != "exact" else 0.0 for name in table}
    return table


def prepare(
    sandbox: Sandbox,
    reference: Path,
    dtype: str | None,
    workloads: list[str] | None,
    seeds: list[int],
    timeout_s: float,
    at_least: int = 2,
) -> dict:
    """Input files for each workload and seed: {cases: [{workload, seed, path, dtype, shapes}]} or {error}.

    Large inputs get fewer seeds: the last `at_least`, and more while a workload's files stay below INPUT_BYTES.
    """
    arguments = {
        "reference": str(reference.resolve()),
        "dtype": dtype,
        "workloads": workloads,
        "seeds": seeds,
        "at_least": at_least,
        "limit_bytes": INPUT_BYTES,
        "folder": sandbox.new_folder("inputs"),
    }
    return of_reference(sandbox.run("prepare", arguments, timeout_s))


def check(
    sandbox: Sandbox, reference: Path, dtype: str | None, cases: list[dict], tolerance: float | None, timeout_s: float
) -> dict:
    """{cases} of the worker's `check`, or {error}; each case names the files of its outputs and whether it is the
    first of its workload."""
    if not cases:
        return {"cases": []}
    arguments = {
        "reference": str(reference.resolve()),
        "dtype": dtype,
        "cases": [{key: case[key] for key in ("workload", "seed", "outputs", "first")} for case in cases],
        "tolerances": tolerances(sandbox.device, tolerance),
    }
    return of_reference(sandbox.run("check", arguments, timeout_s))


def firsts(cases: list[dict]) -> list[bool]:
    """Which case is the first of its workload: there `check` asks what answer without work would pass."""
    names = [case["workload"] for case in cases]
    return [names.index(name) == at for at, name in enumerate(names)]


def check_timed(
    sandbox: Sandbox,
    reference: Path,
    dtype: str | None,
    timed: list[tuple[dict, str]],
    tolerance: float | None,
    timeout_s: float,
) -> tuple[str, str]:
    """(status, message) of outputs that timed calls left: [(case, file)]. A kernel may be right only when verified."""
    cases = [{**case, "outputs": [output], "first": False} for case, output in timed]
    checked = check(sandbox, reference, dtype, cases, tolerance, timeout_s)
    if "error" in checked:
        return checked["error"]["status"], checked["error"]["message"]
    for case, found in zip(cases, checked["cases"], strict=True):
        status, message = judge_outputs(found)
        if status != "OK":
            return status, f"right when verified, wrong when timed (workload {case['workload']}): {message}"
    return "OK", ""


def of_reference(outcome: Outcome) -> dict:
    """The result of a job that ran the reference; its crashes and time-outs are the reference's fault."""
    if outcome.timed_out:
        raise TimedOut("the reference did not finish in time; --timeout raises the limit")
    own = outcome.result.get("error") if outcome.result else None  # this child ran nothing of the candidate's
    found = {"error": own} if own else failure(outcome) or outcome.result
    if "error" in found:
        if found["error"]["status"] == "USAGE":
            raise UsageError(found["error"]["message"])
        no_space(found["error"])
        return {"error": {**found["error"], "status": "INVALID_REFERENCE"}}
    return found


def complete(ran: dict, count: int) -> dict:
    """What the candidate's process reported, if it is of the form that an honest run has; nothing in it is a
    verdict, but a forged report must not look like one."""
    done = ran.get("cases")
    if not isinstance(done, list) or not all(isinstance(case, dict) for case in done):
        return error("RUNTIME_ERROR", "the process left no sound report")
    faults = [case for case in done if "error" in case]
    if faults and (faults != done[-1:] or fault_of(faults[0]) is None):
        return error("RUNTIME_ERROR", "the process left no sound report")
    if len(done) > count or (len(done) < count and not faults):
        return error("RUNTIME_ERROR", "the process reported on fewer cases than it was given")
    if any(REPORT_KEYS - set(case) for case in done if "error" not in case):
        return error("RUNTIME_ERROR", "the process left no sound report")
    if faults:
        no_space(faults[0]["error"])
    return ran


def fault_of(report: dict) -> dict | None:
    """The error in a child's report, if it is one that a candidate can have."""
    fault = report.get("error")
    sound = (
        isinstance(fault, dict) and fault.get("status") in CANDIDATE_FAULTS and isinstance(fault.get("message"), str)
    )
    return fault if sound else None


def no_space(fault: dict) -> None:
    if fault["status"] == "NO_SPACE":
        place = f"{tempfile.gettempdir()} or the workspace"
        raise EnvironmentLacks(f"no space left in {place} for inputs and outputs; free some, or set TMPDIR")


def failure(outcome: Outcome) -> dict | None:
    """{error} when a child left no sound result behind; None when it did."""
    if outcome.timed_out:
        return error("TIMEOUT", f"no answer after {outcome.wall_s:.0f} s")
    if outcome.result is not None and "error" not in outcome.result:
        return None
    if outcome.result is not None:
        fault = fault_of(outcome.result)
        return {"error": fault} if fault else error("RUNTIME_ERROR", "the process left no sound report")
    if outcome.signal in ("SIGSEGV", "SIGBUS"):
        return error("ILLEGAL_ACCESS", f"the process died of {outcome.signal}")
    if outcome.signal:
        return error("RUNTIME_ERROR", f"the process died of {outcome.signal}")
    return error("RUNTIME_ERROR", f"the process ended with exit code {outcome.exit_code} and left no result")


def error(status: str, message: str) -> dict:
    return {"error": {"status": status, "type": "process", "message": message}}


def judge(done: dict, found: dict | None) -> dict:
    """The status of one case from what ran and what was compared. Pure."""
    if "error" in done:
        return {"status": done["error"]["status"], "message": done["error"]["message"]}
    status, message = judge_outputs(found)
    if done["mutated"]:  # told first: it is why a second call is wrong
        status, message = "INPUT_MUTATED", f"input {done['mutated'][0]} was changed"
    if status == "OK" and done["aliased"]:
        status, message = "ALIASED_OUTPUT", "an output shares memory with an input or with the output of another call"
    if status == "OK" and not done["plain"]:
        status, message = "CHEAT_SUSPECT", "an output is a tensor subclass"
    outputs = [output for call in found.get("calls", []) for output in call["outputs"]]
    return {
        "status": status,
        "message": message,
        "max_rel": max((output.get("max_rel", 0.0) for output in outputs), default=0.0),
        "baseline_max_rel": max((output.get("baseline_max_rel", 0.0) for output in outputs), default=0.0),
        "deterministic": done["deterministic"],
        "oracle": found.get("oracle"),
        "outputs": outputs,
    }


def judge_outputs(found: dict) -> tuple[str, str]:
    """(status, message) of the outputs of one case, over all its calls. Pure."""
    if "unreadable" in found:
        return "RUNTIME_ERROR", f"the stored outputs cannot be read: {found['unreadable']}"
    if found["random"]:
        return "INVALID_TASK", "the reference gives different results for the same inputs"
    if found["bland"]:
        return "INVALID_TASK", f"{found['bland'][0]} is within the tolerance"
    for call in found["calls"]:
        if call["count"] != found["expected_count"]:
            return "WRONG_SHAPE", f"{call['count']} outputs, expected {found['expected_count']}"
        for number, output in enumerate(call["outputs"]):
            status, message = judge_output(output, number)
            if status != "OK":
                return status, message
        filled = [output for output in call["outputs"] if output["elements"]]
        if filled and not any(output["finite"] for output in filled):
            return "INVALID_TASK", "the reference's outputs hold no finite value, so there is nothing to compare"
    return "OK", ""


def judge_output(output: dict, number: int) -> tuple[str, str]:
    """(status, message) of one output tensor. Pure."""
    for name in ("shape", "dtype", "stride"):
        if output[name] != output[f"expected_{name}"]:
            expected = output[f"expected_{name}"]
            return f"WRONG_{name.upper()}", f"output {number} has {name} {output[name]}, expected {expected}"
    if output["nonfinite"]:
        return "NONFINITE", f"output {number}: {output['nonfinite']} elements are NaN or Inf where they must not be"
    if output["mismatches"]:
        share = 100 * output["mismatches"] / output["elements"]
        return (
            "WRONG_VALUES",
            f"output {number}: {output['mismatches']} elements ({share:.3g} %) are off, "
            f"error up to {output['max_rel']:.3g} of (|reference| + rms), first at index {output['first_bad_index']}",
        )
    return "OK", ""


def hide_secret(results: list[dict]) -> None:
    """The last seeds of each workload stay unknown."""
    for result in results:
        if result["seed"] >= KNOWN_SEEDS:
            result["seed"] = "secret"


def verdict(
    sandbox: Sandbox, cases: list, fault: dict | None, tolerance: float | None, outcome: Outcome | None = None
) -> dict:
    """The result of verify_kernel.py: the first bad case's status, or OK when there are cases and all are OK."""
    bad = next((case for case in cases if case["status"] != "OK"), None)
    status = fault["status"] if fault else bad["status"] if bad else "OK" if cases else "INTERNAL"
    worst = max((case.get("max_rel", 0.0) for case in cases), default=None)
    if status == "OK":
        names = list(dict.fromkeys(case["workload"] for case in cases))
        summary = (
            f"OK on {sandbox.device_name}: {len(cases)} cases, workloads {', '.join(names)}; worst error {worst:.3g}"
        )
    else:
        where = f" (workload {bad['workload']}, seed {bad['seed']})" if bad and not fault else ""
        message = (fault or bad or {"message": "nothing was checked"})["message"]
        hint = f"; {HINTS[status]}" if status in HINTS else ""
        if sandbox.device == "cpu-interpreter" and bad and bad["dtype"] == "bf16" and status in BF16_SYMPTOMS:
            hint = f"; {INTERPRETED_BF16}"
        summary = f"{status}{where}: {message.strip()}{hint}"
    return {
        "status": status,
        "device": sandbox.device_name,
        "summary": summary,
        "worst_rel_err": worst,
        "tolerance": tolerance or "by dtype",
        "cases": cases,
        "process": None
        if outcome is None
        else {
            "exit": outcome.exit_code,
            "signal": outcome.signal,
            "wall_s": outcome.wall_s,
            "log_tail": outcome.log_tail,
        },
    }
