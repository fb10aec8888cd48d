"""Is a kernel right? Inputs, candidate and oracle each in a process of its own; the verdict is made here
(correctness.py).

1. `prepare` writes the inputs of every workload, seed and variant (variants.py) to files.
2. `run` loads the candidate, and nothing of the reference, and stores its raw outputs.
3. `check`, which never loads the candidate, makes the inputs anew, computes the reference in float64 and compares.
4. At the gate, compute-sanitizer looks at the memory accesses of one more run.
"""

import re
import secrets
from collections.abc import Callable
from pathlib import Path

from ..device import outcomes, programs
from ..device.sandbox import Outcome, Sandbox
from ..errors import EnvironmentLacks, TimedOut, UsageError
from ..session.target import KernelUnderTest
from . import correctness

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

# Seen on an H200: under ncu CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED, and the list of kernels is empty.
NO_KERNEL_NAMED = (
    "torch's profiler (CUPTI) named no kernel of a call; end what else profiles this GPU or runs round this program "
    "(nsys, ncu, DCGM), use a torch whose libcupti fits the driver, and run it again"
)

INPUT_BYTES = 1 << 30  # of input files per workload, beyond the seeds that are needed in any case
KNOWN_SEEDS = 1 << 16  # seeds from here on are secret
REPORT_KEYS = {
    "mutated",
    "changed",
    "aliased",
    "late",
    "out_of_bounds",
    "deterministic",
    "device",
    "guarded",
    "fails_guarded",
    "kernels",
}
SANITIZED_BYTES = 256 << 20  # of inputs: compute-sanitizer slows a kernel down some tens of times
HINTS = {
    "COMPILE_ERROR": "read the compiler's message",
    "IMPORT_ERROR": "the file must load by itself, without modules beside it, and define ModelNew or kernel_function",
    "LAUNCH_ERROR": "the launch asks for more than the GPU has: smaller blocks, fewer stages or warps",
    "ILLEGAL_ACCESS": "a load or store is out of bounds: check masks and strides",
    "OOM": "memory is exhausted",
    "TIMEOUT": "the kernel hangs or is far too slow; --timeout raises the limit",
    "WRONG_VALUES": "compare masks, reduction order and accumulation dtype; in Triton an fp32 tl.dot uses tf32 "
    "unless input_precision='ieee'",
    "NONFINITE": "look for unwritten output, overflow, or -inf minus -inf",
    "INPUT_MUTATED": "write to a new tensor, not into inputs or parameters",
    "ALIASED_OUTPUT": "allocate the output in each call",
    "OUT_OF_BOUNDS": "a load or store is out of bounds: check masks and strides",
    "WRONG_STRIDE": "return the memory layout that the reference returns",
    "INVALID_REFERENCE": "the reference itself fails; mend reference.py, which must load without modules beside it",
    "INVALID_TASK": "no kernel can be judged on this task; change the reference, its inputs or the tolerance",
}


def verify(
    sandbox: Sandbox,
    target: KernelUnderTest,
    workloads: list[str] | None = None,
    seeds: int = 3,
    sanitize: bool = False,
    timeout_s: float = 300,
    say: Callable[[str], None] = lambda _: None,
) -> dict:
    """{status, device, cases, summary, …}: the kernel against the reference on every workload, seed and variant.

    workloads: None for all. seeds: how many, at least two; the last ones are secret. sanitize: compute-sanitizer looks
    at a run, where it is installed. say: gets a line before each step that takes its time.
    UsageError when a workload is unknown; whatever the candidate does is a status.
    """
    with sandbox.folder("verify") as folder:
        variants = not target.only_these_shapes
        secret = draw_seeds(max(2, seeds))
        prepared = prepare(sandbox, target.reference, target.dtype, workloads, secret, timeout_s, variants, folder)
        if "error" in prepared:
            return verdict(sandbox, target, [], prepared["error"])
        cases = with_others(prepared["cases"])
        usual = [case for case in cases if not in_reserve(case)]
        say(f"on {len(usual)} cases: seeds" + ", other sizes, layouts and values" * variants)
        outcome, results, fault = judged(sandbox, target, usual, folder, timeout_s)
        if fault is None and (rest := called_up(cases, results)):
            say(f"on {len(rest)} more, at the task's own sizes, since it declines others")
            with sandbox.folder("outputs") as apart:
                outcome, more, fault = judged(sandbox, target, rest, apart, timeout_s)
            results += more
        if fault:
            return verdict(sandbox, target, [], fault, outcome)
        hide_secret(results)
        result = verdict(sandbox, target, results, None, outcome)
        if sanitize and result["status"] == "OK":
            say("under compute-sanitizer")
            result = sanitized(sandbox, target.kernel, usual, result, timeout_s)
        return result


def judged(
    sandbox: Sandbox, target: KernelUnderTest, cases: list[dict], folder: str, timeout_s: float
) -> tuple[Outcome, list[dict], dict | None]:
    """(how the candidate's process ended, a result a case, the error that leaves none); outputs go to `folder`."""
    outcome, ran = run(sandbox, target.kernel, target.reference, cases, folder, timeout_s)
    if "error" in ran:
        return outcome, [], ran["error"]
    stored = [
        {**case, "calls": stored_calls(case, folder, number)}
        for number, (case, done) in enumerate(zip(cases, ran["cases"], strict=False))
        if "error" not in done
    ]
    checked = check(sandbox, target.reference, target.dtype, stored, target.tolerance, timeout_s)
    if "error" in checked:
        return outcome, [], checked["error"]
    found = iter(checked["cases"])
    results = [
        {**named(case), **correctness.judge(case, done, None if "error" in done else next(found), target.libraries)}
        for case, done in zip(cases, ran["cases"], strict=False)
    ]
    return outcome, results, None


def in_reserve(case: dict) -> bool:
    """A variant at the task's own sizes, which is asked of kernels alone that decline it at others."""
    return bool(case["variant"] and case["variant"]["instead_of"])


def called_up(cases: list[dict], results: list[dict]) -> list[dict]:
    """The cases in reserve whose counterparts at other sizes were declined."""
    declined = {result["variant"] for result in results if result["status"] == "DECLINED"}
    return [case for case in cases if in_reserve(case) and case["variant"]["instead_of"] in declined]


def run(
    sandbox: Sandbox, kernel: Path, reference: Path, cases: list[dict], folder: str, timeout_s: float
) -> tuple[Outcome, dict]:
    """How the candidate's process ended, and {cases} that it reported or {error}; its outputs are in `folder`."""
    oracle = reference.read_bytes()
    hidden = [case["path"] for case in cases] + ([] if kernel.samefile(reference) else [reference.resolve()])
    outcome = sandbox.run("run", run_arguments(kernel, cases, folder), timeout_s, hidden)
    if reference.read_bytes() != oracle:
        reference.write_bytes(oracle)
        return outcome, outcomes.error(
            "CHEAT_SUSPECT", "the kernel changed the reference while it ran; the file is restored"
        )
    return outcome, outcomes.failure(outcome) or complete(outcome.result, cases)


def with_others(cases: list[dict]) -> list[dict]:
    """The cases, each with the next one of its workload, whose contents it is also called on, and whether it is its
    workload's first. Variants have neither."""
    found = []
    for case in cases:
        own = [other for other in cases if other["workload"] == case["workload"] and other["variant"] is None]
        at = None if case["variant"] else own.index(case)
        other = None if at is None or len(own) < 2 else own[(at + 1) % len(own)]
        found.append(
            {**case, "other": other and other["path"], "other_seed": other and other["seed"], "first": at == 0}
        )
    return found


def run_arguments(kernel: Path, cases: list[dict], folder: str, guarded: bool = True, trace: bool = True) -> dict:
    """Arguments of the job `run`, whose outputs go to `folder`; the candidate's process gets to know no seed."""
    entries = [{name: case[name] for name in ("path", "other", "variant", "first")} for case in cases]
    path = {"kernel": str(kernel.resolve()), "path": f"{folder}/output"}
    return {**path, "cases": entries, "guarded": guarded, "trace": trace}


def stored_calls(case: dict, folder: str, number: int) -> list[dict]:
    """[{inputs_seed, output}] of a case: the files that its calls left. The third call leaves one only if it differs
    from the first, whose contents it got."""
    seeds = [case["seed"]] if case["other"] is None else [case["seed"], case["other_seed"], case["seed"]]
    files = [Path(folder) / f"output-{number}-{call}.pt" for call in range(len(seeds))]
    needed = files[:2]
    return [
        {"inputs_seed": seed, "output": str(file)}
        for seed, file in zip(seeds, files, strict=True)
        if file in needed or file.exists()
    ]


def named(case: dict) -> dict:
    """What tells a case from the others."""
    variant = case["variant"] or {"name": None, "sizes": []}
    own = {name: case[name] for name in ("workload", "seed", "dtype")}
    return {**own, "variant": variant["name"], "resized": bool(variant["sizes"])}


def sanitized(sandbox: Sandbox, kernel: Path, cases: list[dict], result: dict, timeout_s: float) -> dict:
    """The result after compute-sanitizer's memcheck has looked at one run of the kernel; `sanitizer` says what it
    found, and where it did not run why, which the summary says too."""
    small = [case for case in cases if Path(case["path"]).stat().st_size <= SANITIZED_BYTES]
    program = programs.find("compute-sanitizer")
    why = {
        "there is no GPU": sandbox.gpu is None,
        "it is neither on the PATH nor in the CUDA toolkit": program is None,
        "all inputs are too large for it": not small,
    }
    if reasons := [reason for reason, holds in why.items() if holds]:
        return not_sanitized(result, reasons[0])
    arguments = run_arguments(kernel, small[:1], sandbox.new_folder("outputs"), guarded=False, trace=False)
    tool = [program, "--tool", "memcheck", "--show-backtrace", "no", "--print-limit", "1"]
    tool += ["--error-exitcode", str(SANITIZER_FOUND)]
    # Every tensor gets an allocation of its own, or an access out of bounds would hit its neighbour in torch's pool.
    outcome = sandbox.run_under(tool, "run", arguments, timeout_s, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    lines = [line.removeprefix("=========").strip() for line in outcome.log_tail.splitlines()]
    if outcome.exit_code != SANITIZER_FOUND:
        if not any(line.startswith("ERROR SUMMARY") for line in lines):
            said = next(filter(None, reversed(lines)), "it said nothing")
            return not_sanitized(result, f"time-out after {timeout_s:.0f} s" if outcome.timed_out else said)
        return {**result, "sanitizer": {"ran": True, "tool": "memcheck", "errors": 0}}
    first = next((line for line in lines if line.startswith(("Invalid", "Program hit"))), "see the log")
    message = f"OUT_OF_BOUNDS: compute-sanitizer: {first}; {HINTS['OUT_OF_BOUNDS']}"
    process = {**result["process"], "log_tail": outcome.log_tail}
    found = {"status": "OUT_OF_BOUNDS", "summary": message, "process": process}
    return {**result, **found, "sanitizer": {"ran": True, "tool": "memcheck", "errors": "at least 1"}}


def not_sanitized(result: dict, why: str) -> dict:
    """The result, which says that compute-sanitizer did not look at the kernel's memory accesses, and why."""
    summary = f"{result['summary']}; compute-sanitizer did not run: {why[:120]}"
    return {**result, "summary": summary, "sanitizer": {"ran": False, "why": why}}


SANITIZER_FOUND = 86


def check_profiler(sandbox: Sandbox, timeout_s: float) -> None:
    """EnvironmentLacks when torch's profiler names no kernel in a process that runs nothing of a candidate's."""
    outcome = sandbox.run("probe", {}, timeout_s)
    if outcomes.failure(outcome) or not outcome.result["kernels"]:
        raise EnvironmentLacks(
            f"own work cannot be checked here: {NO_KERNEL_NAMED.replace('a call', 'torch itself')}; nothing is recorded"
        )


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
    with_variants: bool,
    folder: str,
) -> dict:
    """Input files in `folder` for each workload, seed and variant: {cases: [{workload, seed, variant, path, dtype, shapes}]} or {error}.

    Large inputs get fewer seeds: the last two, and more while a workload's files stay below INPUT_BYTES.
    """
    arguments = {
        "reference": str(reference.resolve()),
        "dtype": dtype,
        "workloads": workloads,
        "seeds": seeds,
        "at_least": 2,
        "limit_bytes": INPUT_BYTES,
        "with_variants": with_variants,
        "folder": folder,
    }
    return of_reference(sandbox.run("prepare", arguments, timeout_s))


def check(
    sandbox: Sandbox, reference: Path, dtype: str | None, cases: list[dict], tolerance: float | None, timeout_s: float
) -> dict:
    """{cases} of the worker's `check`, or {error}; each case names the calls whose outputs it left."""
    if not cases:
        return {"cases": []}
    entries = [{name: case[name] for name in ("workload", "seed", "variant", "first", "calls")} for case in cases]
    arguments = {
        "reference": str(reference.resolve()),
        "dtype": dtype,
        "cases": entries,
        "tolerances": tolerances(sandbox.device, tolerance),
    }
    return of_reference(sandbox.run("check", arguments, timeout_s))


def check_timed(
    sandbox: Sandbox,
    reference: Path,
    dtype: str | None,
    timed: list[dict],
    tolerance: float | None,
    timeout_s: float,
) -> tuple[str, str]:
    """(status, message) of the outputs that timed calls left: cases with their calls, [{inputs_seed, output}].

    A kernel may be right only when verified.
    """
    cases = [
        {**case, "first": False, "calls": sorted(case["calls"], key=lambda call: call["inputs_seed"])} for case in timed
    ]
    checked = check(sandbox, reference, dtype, cases, tolerance, timeout_s)
    if "error" in checked:
        return checked["error"]["status"], checked["error"]["message"]
    for case, found in zip(cases, checked["cases"], strict=True):
        status, message = correctness.judge_outputs(found)
        if status != "OK":
            return status, f"wrong when timed (workload {case['workload']}): {message}"
    return "OK", ""


def of_reference(outcome: Outcome) -> dict:
    """The result of a job that ran the reference; its crashes and time-outs are the reference's fault."""
    if outcome.timed_out:
        raise TimedOut("the reference did not finish in time; --timeout raises the limit")
    own = outcome.result.get("error") if outcome.result else None  # this child ran nothing of the candidate's
    found = {"error": own} if own else outcomes.failure(outcome) or outcome.result
    if "error" in found:
        if found["error"]["status"] == "USAGE":
            raise UsageError(found["error"]["message"])
        outcomes.no_space(found["error"])
        status = "INVALID_TASK" if found["error"]["status"] == "INVALID_TASK" else "INVALID_REFERENCE"
        return {"error": {**found["error"], "status": status}}
    return found


def complete(ran: dict, cases: list[dict]) -> dict:
    """What the candidate's process reported, if it is of the form that an honest run has; nothing in it is a
    verdict, but a forged report must not look like one."""
    done = ran.get("cases")
    sound = isinstance(done, list) and all(isinstance(case, dict) for case in done) and len(done) <= len(cases)
    if not sound or not all(outcomes.fault_of(case) if "error" in case else set(case) == REPORT_KEYS for case in done):
        return outcomes.error("RUNTIME_ERROR", "the process left no sound report")
    if len(done) < len(cases) and (not done or "error" not in done[-1]):
        return outcomes.error("RUNTIME_ERROR", "the process reported on fewer cases than it was given")
    return ran


def hide_secret(results: list[dict]) -> None:
    """The last seeds of each workload stay unknown."""
    for result in results:
        if result["seed"] >= KNOWN_SEEDS:
            result["seed"] = "secret"


def verdict(
    sandbox: Sandbox, target: KernelUnderTest, cases: list, fault: dict | None, outcome: Outcome | None = None
) -> dict:
    """The result of verify_kernel.py: the first bad case's status, or OK when there are cases and all are OK."""
    own_work = correctness.own_work(cases, target.libraries)
    bad = next((case for case in cases if case["status"] not in ("OK", "DECLINED", "DOUBTFUL")), None)
    status = fault["status"] if fault else bad["status"] if bad else "OK" if cases else "INTERNAL"
    worst = max((case.get("max_rel", 0.0) for case in cases), default=None)
    if status == "OK":
        names = ", ".join(dict.fromkeys(case["workload"] for case in cases))
        summary = f"OK on {sandbox.device_name}: {len(cases)} cases, workloads {names}; worst error {worst:.3g}"
        summary += "".join(f"; {remark}" for remark in remarks(cases))
        if own_work == correctness.NOT_CHECKED:
            unknown = "whether kernels of its own do the work shows on a GPU"
            summary += f"; {unknown if sandbox.gpu is None else f'OWN WORK NOT CHECKED: {NO_KERNEL_NAMED}'}"
    else:
        where = f" ({place(bad)})" if bad and not fault else ""
        message = (fault or bad or {"message": "nothing was checked"})["message"]
        hint = f"; {HINTS[status]}" if status in HINTS else ""
        if bad and bad["variant"]:
            hint = f"; the reference takes this, so the kernel must be right on it too, or raise a ValueError{hint}"
        if sandbox.device == "cpu-interpreter" and status == "TIMEOUT":
            hint += "; the CPU interpreter takes seconds for thousands of elements: give it small inputs, in a reference of its own"
        if sandbox.device == "cpu-interpreter" and bad and bad["dtype"] == "bf16" and status in BF16_SYMPTOMS:
            hint += f"; or: {INTERPRETED_BF16}"
        if "InterpreterError" in message and re.search("libdevice|inline_asm|extern", message):
            hint += "; Triton's interpreter lacks libdevice and inline assembly, which need a GPU"
        summary = f"{status}{where}: {message.strip()}{hint}"
    return {
        "status": status,
        "device": sandbox.device_name,
        "summary": summary,
        "worst_rel_err": worst,
        "tolerance": target.tolerance or "by dtype",
        "own_work": own_work,
        "sandbox": sandbox.isolation,
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


def remarks(cases: list[dict]) -> list[str]:
    """What a reader should know of a kernel that is right."""
    judged = [case for case in cases if case["status"] == "OK"]
    served = {case["variant"] for case in judged}
    refused = dict.fromkeys(case["variant"] for case in cases if case["status"] == "DECLINED")
    declined = [f"{variant}{' in part' * (variant in served)}" for variant in refused]
    bare = sum(case["fails_guarded"] for case in judged)
    said = [f"declines {', '.join(declined)}"] if declined else []
    said += [
        f"NOT RIGHT on {case['variant']} ({case['message'][:120]})" for case in cases if case["status"] == "DOUBTFUL"
    ]
    if any(case["deterministic"] is False for case in judged):
        said.append("two calls on the same contents differ")
    if any(case["variant"] for case in cases) and not any(case["resized"] for case in cases):
        said.append("no size could be varied, so only the task's own were tried")
    if bare:
        said.append(f"{bare} cases without guard bands around the outputs, with which the kernel fails")
    return said


def place(case: dict) -> str:
    """Which case it is, for a message."""
    variant = f", {case['variant']}" if case["variant"] else ""
    return f"workload {case['workload']}, seed {case['seed']}{variant}"
