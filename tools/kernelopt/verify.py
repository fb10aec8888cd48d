"""Is a kernel right? Inputs, candidate and oracle each in a process of its own; the verdict is made here.

1. `prepare` writes the inputs of every workload and seed to files.
2. `run` loads the candidate, and nothing of the reference, and stores its raw outputs.
3. `check`, which never loads the candidate, computes the reference in float64 and compares.
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

INPUT_BYTES = 2 << 30  # of input files per workload, beyond the seeds that are needed in any case
KNOWN_SEEDS = 1 << 16  # seeds from here on are secret
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

    seeds: how many; the last is secret. tolerance: replaces the dtype's default for floating outputs.
    UsageError when a workload is unknown; whatever the candidate does is a status.
    """
    prepared = prepare(sandbox, reference, dtype, workloads, draw_seeds(seeds), timeout_s)
    if "error" in prepared:
        return verdict(sandbox, [], prepared["error"], tolerance)
    cases = prepared["cases"]
    outcome = sandbox.run(
        "run", {"kernel": str(kernel.resolve()), "cases": cases, "folder": sandbox.new_folder("outputs")}, timeout_s
    )
    ran = failure(outcome) or complete(outcome.result, cases)
    if "error" in ran:
        return verdict(sandbox, [], ran["error"], tolerance, outcome)
    table = tolerances(sandbox.device, tolerance)
    sound = [done for done in ran["cases"] if "error" not in done]
    checked = check(sandbox, reference, cases, [done["output"] for done in sound], table, timeout_s)
    if "error" in checked:
        return verdict(sandbox, [], checked["error"], tolerance)
    results = []
    for entry, done, found in zip(cases, ran["cases"], [*checked["cases"], None], strict=False):
        results.append({"workload": entry["workload"], "seed": entry["seed"], **judge(done, found)})
    hide_secret(results)
    return verdict(sandbox, results, None, tolerance, outcome)


def draw_seeds(count: int) -> list[int]:
    """0, 1, … and, last, one that nobody can know beforehand."""
    return [*range(count - 1), secret_seed()]


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


def check(sandbox: Sandbox, reference: Path, cases: list, outputs: list, table: dict, timeout_s: float) -> dict:
    if not outputs:
        return {"cases": []}
    arguments = {
        "reference": str(reference.resolve()),
        "cases": cases[: len(outputs)],
        "outputs": outputs,
        "tolerances": table,
    }
    return of_reference(sandbox.run("check", arguments, timeout_s))


def of_reference(outcome: Outcome) -> dict:
    """The result of a job that ran the reference; its crashes and time-outs are the reference's fault."""
    if outcome.timed_out:
        raise TimedOut("the reference did not finish in time; --timeout raises the limit")
    found = failure(outcome) or outcome.result
    if "error" in found:
        if found["error"]["status"] == "USAGE":
            raise UsageError(found["error"]["message"])
        no_space(found["error"])
        return {"error": {**found["error"], "status": "INVALID_REFERENCE"}}
    return found


def complete(ran: dict, cases: list) -> dict:
    """What the candidate's process reported, if it is about every case up to the first error."""
    done = ran.get("cases")
    ended = isinstance(done, list) and (len(done) == len(cases) or bool(done and "error" in done[-1]))
    if not ended or len(done) > len(cases):
        return error("RUNTIME_ERROR", "the process reported on fewer cases than it was given")
    if done and "error" in done[-1]:
        no_space(done[-1]["error"])
    return ran


def no_space(fault: dict) -> None:
    if fault["status"] == "NO_SPACE":
        place = f"{tempfile.gettempdir()} or the workspace"
        raise EnvironmentLacks(f"no space left in {place} for inputs and outputs; free some, or set TMPDIR")


def failure(outcome: Outcome) -> dict | None:
    """{error} when a child left no sound result behind; None when it did."""
    if outcome.timed_out:
        return error("TIMEOUT", f"no answer after {outcome.wall_s:.0f} s")
    if outcome.result is not None:
        return {"error": outcome.result["error"]} if "error" in outcome.result else None
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
    outputs = found["outputs"]
    status, message = "OK", ""
    if found["random"]:
        status, message = "INVALID_TASK", "the reference gives different results for the same inputs"
    elif found["count"] != found["expected_count"]:
        status, message = "WRONG_SHAPE", f"{found['count']} outputs, expected {found['expected_count']}"
    for number, output in enumerate(outputs):
        if status == "OK":
            status, message = judge_output(output, number)
    if status == "OK" and done["mutated"]:
        status, message = "INPUT_MUTATED", f"input {done['mutated'][0]} was changed"
    if status == "OK" and done["aliased"]:
        status, message = "ALIASED_OUTPUT", "an output shares memory with an input or with the output of another call"
    if status == "OK" and not done["plain"]:
        status, message = "CHEAT_SUSPECT", "an output is a tensor subclass"
    if status == "OK" and outputs and all(output["zeros_pass"] for output in outputs):
        status, message = "INVALID_TASK", "an output of zeros is within the tolerance"
    worst = max((output.get("max_rel", 0.0) for output in outputs), default=0.0)
    return {
        "status": status,
        "message": message,
        "max_rel": worst,
        "baseline_max_rel": max((output.get("baseline_max_rel", 0.0) for output in outputs), default=0.0),
        "deterministic": done["deterministic"],
        "oracle": found["oracle"],
        "outputs": outputs,
    }


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
    """The last seed of each workload stays unknown."""
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
