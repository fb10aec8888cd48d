"""An exploration from start to end: compile and check all candidates side by side, time them in turn, drop the slower
ones.

Times are taken cold, by CUDA events, one call after a flush of the L2. One process runs at a time while times are
taken.
"""

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..compiling import compiler
from ..compiling.ahead import Ahead
from ..compiling.compiled import NOT_CHECKED, status_after
from ..device import gpu, gpu_memory, gpu_watch, standing
from ..device.sandbox import Sandbox
from ..device.spent import Spent
from ..errors import Stopped, ToolError, UsageError
from ..hardware import targets, wiki
from ..hardware.targets import Target
from ..measure import cases, oracle
from ..measure.cases import Case
from ..profilers import ncu
from ..session.subject import KernelUnderTest
from ..statuses import Status
from . import halving, probes, resources
from .candidates import Candidate, builds_cuda, compiles_torch
from .entrants import (
    LIFE_S,
    MORE_BUDGET,
    MORE_EACH,
    NONE_RIGHT,
    NOT_STARTED,
    NOT_WAITED_FOR,
    Entrant,
    Judge,
    KeyMetrics,
    Starter,
)
from .race import Race, median_of

SEEDS = 2
ALL = "all"  # in place of names: the task's workloads
OTHERS_SHARE = 0.4  # of the budget, for the workloads after the first
# Of the budget: kept for times, and of that for registers, occupancy and sustained times.
TIMES_SHARE, END_SHARE = 0.15, 0.05
COMPILING_SHARE = 0.5  # of the budget, without a GPU, where candidates are compiled for a card
SUSTAINED_S = 0.5  # the second half counts
MOST_SUSTAINED = 3  # of those in the lead, the best: half a second each
MAY_BE_RIGHT = {Status.OK, Status.OOM}  # what ran out of memory beside others is started again by itself
LEAST_PATIENCE_S = 10.0  # for opponents, once the candidates are checked
LONGEST_WAIT_S = 20.0  # for what is compiled ahead and not checked yet
# Of the inputs of all seeds, in a process: those of the timed calls, those of the check, which lie between guard bands,
# and the results of its calls; where a call changes inputs, their contents before it too.
COPIES, MUTATING_COPIES = 4, 6
ORACLE_COPIES = 10  # of the inputs of one seed: in float64 those, the result, temporaries, and the errors
TRACE_S = 60.0
PROFILE_S = 120.0  # of one process under ncu
KEY_METRICS = ("dram_throughput", "sm_throughput", "tensor_cycles", "achieved_occupancy", "issue_active", "l2_hit_rate")


def seconds_each(budget_s: float, device: str) -> float:
    """For one candidate to compile and be checked, where the user names none. In the interpreter a call has no other
    limit, and there are few cores: what hangs would leave the others no time."""
    return budget_s if device == "cuda" else budget_s / 3


@dataclass(frozen=True)
class Plan:
    """The parts of an exploration. opponents: name -> file, timed beside the candidates. candidate_s: for each to
    compile and run. headers_s: at least, to compile one with torch's headers. against: the opponent that ratios refer
    to. product: the page of the GPU, where there is one. compile_for: without a GPU, what candidates are compiled for,
    or None. also: the workloads after this one, which workloads.py explores; ALL for those that the task has."""

    subject: KernelUnderTest
    candidates: list[Candidate]
    opponents: dict[str, Path]
    against: str | None
    workload: str = "default"
    budget_s: float = 90.0
    candidate_s: float = 90.0
    headers_s: float = 0.0
    product: wiki.Page | None = None
    compile_for: Target | None = None
    also: tuple[str, ...] = ()

    @property
    def is_cuda(self) -> bool:
        """Do all candidates that can be loaded build CUDA C++?"""
        return all(builds_cuda(one.source) for one in self.candidates if not (one.error or one.is_probe))


@dataclass(frozen=True)
class Explored:
    """The outcome. entrants: best first, with their status and times. workloads: all that the task has.
    stopped_after_s: when it was ended from outside, in seconds from the start of the command; None where it was not.
    seconds: of each phase. seeds: of the inputs that they were checked and timed on. others: the workloads of `also`.
    elsewhere: what came of each of them, by its name."""

    entrants: list[Entrant]
    workloads: list[str]
    stopped_after_s: float | None
    seconds: dict[str, float]
    seeds: int = SEEDS
    others: tuple[str, ...] = ()
    elsewhere: dict[str, "Explored"] = field(default_factory=dict)


def explore(plan: Plan, sandbox: Sandbox, say: Callable[[str], None], profiled: int = 0) -> Explored:
    """Compile, check and time the candidates and opponents. sandbox: open. profiled: the number of best candidates that
    get ncu's key metrics. Where other workloads are to follow, OTHERS_SHARE of the budget is left. Refused when the
    reference itself fails; UsageError for a workload that the task does not have; Stopped when the sandbox is told to
    stop before the inputs are ready, and after that the budget ends when it is told so."""
    began = time.monotonic()
    entrants = entered(plan, sandbox.scratch)
    loadable = [entrant for entrant in entrants if entrant.error is None]
    if plan.compile_for and not sandbox.gpu and plan.is_cuda:
        return compiled_alone(plan, sandbox, compilable(entrants), began, say)
    starter = ahead = None
    try:
        sandbox.forked_ahead.get_ready("prepare", "judge", *(one.job for one in loadable))
        ahead = compiled_ahead(plan, sandbox, loadable)
        starter, workloads = prepared(plan, sandbox)
        if others := others_of(plan, workloads):
            plan = replace(plan, budget_s=(1 - OTHERS_SHARE) * plan.budget_s)
        starter.spent.note("inputs", began)
        sandbox.stop.interrupts = False
        with contextlib.suppress(Stopped):
            if sandbox.gpu:
                check_and_time(plan, sandbox, starter, loadable, began, say, ahead)
            else:
                check_and_compile(plan, sandbox, starter, loadable, began, say)
    finally:
        end_all([*entrants, *filter(None, (starter and starter.judge, ahead))])
        sandbox.forked_ahead.end()
    if sandbox.stop.after_s is not None:
        tell_stopped(loadable, plan, sandbox)
    best = ranked(entrants)
    for entrant in [one for one in best if one.calls_us and not one.is_opponent][:profiled]:
        with starter.spent.noted("profile"):
            entrant.metrics = key_metrics(entrant, sandbox, starter.inputs[0].path, say)
    return Explored(best, workloads, sandbox.stop.after_s, starter.spent.seconds(), len(starter.inputs), others)


def others_of(plan: Plan, workloads: list[str]) -> tuple[str, ...]:
    """The workloads after the plan's first. workloads: those that the task has; UsageError for any other. Pure."""
    for name in plan.also:
        if name not in (ALL, *workloads):
            raise UsageError(f"the reference has no workload '{name}'; it has: {', '.join(workloads)}")
    named = workloads if ALL in plan.also else plan.also
    return tuple(name for name in dict.fromkeys(named) if name != plan.workload)


def compiled_ahead(plan: Plan, sandbox: Sandbox, entrants: list[Entrant]) -> Ahead | None:
    """The compilation of the candidates while inputs are made; None without a GPU, and for one without a page."""
    if not (sandbox.gpu and plan.product and plan.product.limits_key()):
        return None
    case = compiler.case_without_values(plan.subject, plan.workload)
    return Ahead(sandbox, [one.file for one in compilable(entrants)], case, targets.of_page(plan.product))


def end_all(running: list[Entrant | Judge | Ahead]) -> None:
    """End their processes side by side: one that uses the GPU takes its time."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.end(), running))


def tell_stopped(entrants: list[Entrant], plan: Plan, sandbox: Sandbox) -> None:
    """Put what was not done before a stop into the entrants' errors. What was checked stays right."""
    for entrant in entrants:
        if entrant.status == Status.INTERNAL and entrant.error is None:
            entrant.never_started("stopped before it was started")
        elif entrant.status == Status.OK and sandbox.gpu and not entrant.calls_us:
            entrant.error = "stopped before it was timed"
        elif entrant.status == Status.OK and plan.compile_for and not (entrant.compiled or entrant.is_opponent):
            entrant.error = "stopped before it was compiled"


def check_and_time(
    plan: Plan,
    sandbox: Sandbox,
    starter: Starter,
    entrants: list[Entrant],
    began: float,
    say: Callable[[str], None],
    ahead: Ahead | None,
) -> None:
    """On a GPU. began: on the monotonic clock, the begin of the budget."""
    compiled_by, timed_by = (began + (1 - share) * plan.budget_s for share in (TIMES_SHARE, END_SHARE))
    with gpu_watch.Watch() as watch:
        waiting = waves(entrants, live_at_once(starter.inputs, sandbox.forked_ahead.count()))
        run_waves(starter, waiting, Race(entrants, timed_by, plan.against), compiled_by, say, ahead)
        if all_ran_out(entrants) and time.monotonic() < compiled_by:
            say("no candidate is right, and one ran out of GPU memory: again with the inputs of one seed")
            take_one_seed(plan, sandbox, starter, entrants)
            waiting = waves(entrants, live_at_once(starter.inputs))
            run_waves(starter, waiting, Race(entrants, timed_by, plan.against), compiled_by, say)
        with starter.spent.noted("sustained times and resources"):
            finish(entrants, sandbox, watch, plan)


def all_ran_out(entrants: list[Entrant]) -> bool:
    """Is no candidate right, and did one run out of GPU memory?"""
    statuses = [entrant.status for entrant in compilable(entrants)]
    return Status.OOM in statuses and Status.OK not in statuses


def take_one_seed(plan: Plan, sandbox: Sandbox, starter: Starter, entrants: list[Entrant]) -> None:
    """Have all entrants start anew, on the inputs of one seed: each holds half of the memory or less, and so does the
    oracle. What a kernel keeps from call to call is then not seen."""
    end_all([*entrants, starter.judge])
    starter.inputs = starter.inputs[:1]
    starter.judge = judge_of(plan, sandbox, starter.inputs)
    for entrant in entrants:
        entrant.calls_us, entrant.rounds_us, entrant.dropped = [], [], False


def compiled_alone(
    plan: Plan, sandbox: Sandbox, candidates: list[Entrant], began: float, say: Callable[[str], None]
) -> Explored:
    """Candidates that nothing here can check: all are CUDA C++. They are compiled with inputs that have no values, so
    that the time of making those is spared. Of the task's workloads the plan's alone is known."""
    spent = Spent()
    if plan.also:
        say("nothing here can check them, so only the first workload is compiled for")
    sandbox.stop.interrupts = False
    loadable = [entrant for entrant in candidates if entrant.error is None]
    with contextlib.suppress(Stopped), spent.noted("compile"):
        case = compiler.case_without_values(plan.subject, plan.workload)
        compile_all(loadable, sandbox, case, plan, began + plan.budget_s, say)
    compiler.raise_faults_of_task([entrant.compiled for entrant in loadable if entrant.compiled])
    if sandbox.stop.after_s is not None:
        tell_stopped(loadable, plan, sandbox)
    tell_not_checked(loadable)
    return Explored(ranked(candidates), [plan.workload], sandbox.stop.after_s, spent.seconds())


def check_and_compile(
    plan: Plan, sandbox: Sandbox, starter: Starter, entrants: list[Entrant], began: float, say: Callable[[str], None]
) -> None:
    """Without a GPU: nothing is timed, and each process ends after its check. Files that may build CUDA C++, which
    nothing here runs, are compiled first: they would otherwise wait for the interpreter. began: on the monotonic clock,
    the begin of the budget."""
    if warning := cases.slow_in_interpreter(starter.inputs):
        say(warning)
    ends, case = began + plan.budget_s, {"inputs": starter.inputs[0].path}
    share = COMPILING_SHARE if plan.compile_for else 0  # of what is left, for compiling
    cuda = {one.name for one in plan.candidates if plan.compile_for and builds_cuda(one.source)}
    first = [one for one in entrants if one.name in cuda]
    if first:
        with starter.spent.noted("compile"):
            compile_all(first, sandbox, case, plan, ends - share * (ends - time.monotonic()), say)
    done = [one for one in first if one.compiled and (one.compiled.cuda or one.compiled.refused)]
    tell_not_checked(done)
    left = [one for one in entrants if one not in done]
    with starter.spent.noted("check"):
        start_all(starter, left, ends - share * (ends - time.monotonic()), say)
    if plan.compile_for:
        with starter.spent.noted("compile"):
            compile_all(compilable(left), sandbox, case, plan, ends, say)


def tell_not_checked(entrants: list[Entrant]) -> None:
    """Without a GPU: CUDA C++ runs on a GPU alone, so it was not checked, and may not have been compiled."""
    for entrant in [one for one in entrants if one.status == Status.INTERNAL and one.error is None]:
        why = entrant.compiled and entrant.compiled.error
        if why and entrant.compiled.status == Status.TIMEOUT:
            entrant.status, entrant.error = Status.TIMEOUT, why
        else:
            failed = f"; not compiled: {why}" if why else ""
            entrant.status, entrant.error = Status.NO_GPU, f"{NOT_CHECKED}{failed}"


def compilable(entrants: list[Entrant]) -> list[Entrant]:
    """Candidates and probes, without the other opponents."""
    return [entrant for entrant in entrants if entrant.is_probe or not entrant.is_opponent]


def compile_all(
    candidates: list[Entrant], sandbox: Sandbox, case: dict, plan: Plan, ends: float, say: Callable[[str], None]
) -> None:
    """Compile the candidates, as many at a time as the machine has cores, until the budget `ends`; each may take
    `candidate_s`, with torch's headers `headers_s`. Those that did not finish their check come last: the same may
    happen again. case: of the worker's `compile_only`."""
    candidates = sorted(candidates, key=lambda entrant: entrant.status == Status.TIMEOUT)
    slow = {one.name for one in plan.candidates if compiles_torch(one.source)}
    say(f"compiling {len(candidates)} for {plan.compile_for.arch}")

    def compile_one(entrant: Entrant) -> None:
        now = time.monotonic()
        if now + compiler.LEAST_S > ends and entrant.status == Status.INTERNAL:
            entrant.never_started(NOT_STARTED)
            return
        own = now + (max(plan.candidate_s, plan.headers_s) if entrant.name in slow else plan.candidate_s)
        until, more = min((ends, MORE_BUDGET), (own, MORE_EACH))
        limits = compiler.Limits(until, more=more)
        result = compiling.compile(entrant.file, case, plan.compile_for, limits)
        result = replace(result, error=result.error and entrant.in_origin(result.error))
        entrant.compiled, entrant.resources = result, resources.of_compiled(result)
        entrant.status, entrant.error = status_after(entrant.status, entrant.error, result)

    with compiler.Compiler(sandbox) as compiling, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, candidates))


def key_metrics(entrant: Entrant, sandbox: Sandbox, inputs: str, say: Callable[[str], None]) -> KeyMetrics | None:
    """KEY_METRICS of the kernel that takes most of a call; None, with the reason in `error`, where they cannot be
    read."""
    report = Path(sandbox.new_folder("profile"), "report.ncu-rep")
    try:
        with sandbox.stop.interrupting():
            say(f"profiling {entrant.name}")
            ncu.collect(sandbox, entrant.file, inputs, report, "cold", PROFILE_S, False)
        main = max(ncu.read(report), key=lambda kernel: kernel.duration_us or 0)
    except ToolError as error:
        entrant.error = f"not profiled: {error}"
        return None
    return KeyMetrics(main.name, {name: main.metrics.get(name) for name in KEY_METRICS})


def entered(plan: Plan, scratch: Path) -> list[Entrant]:
    """The opponents and the candidates, each in a file of its own. What cannot be loaded has its status and error, and
    an empty file where nothing can be read."""
    folder = Path(tempfile.mkdtemp(prefix="candidates-", dir=scratch))
    entrants = [Entrant(name, file, is_opponent=True) for name, file in plan.opponents.items()]
    for number, candidate in enumerate(plan.candidates):
        file = folder / f"candidate_{number}.py"
        file.write_text(candidate.source, encoding="utf-8")
        status = Status.IMPORT_ERROR if candidate.error else Status.INTERNAL
        own = {"status": status, "error": candidate.error, "origin": candidate.file}
        entrant = Entrant(candidate.name, file, candidate.config, **own)
        entrant.is_opponent = entrant.is_probe = candidate.is_probe
        entrants.append(entrant)
    return entrants


def prepared(plan: Plan, sandbox: Sandbox) -> tuple[Starter, list[str]]:
    """(the inputs of two seeds, and the oracle at work on them; the task's workloads)"""
    subject, seeds = plan.subject, [cases.secret_seed() for _ in range(SEEDS)]
    folder = sandbox.new_folder("inputs")
    made = cases.prepare_task(
        sandbox,
        subject.reference,
        subject.dtype,
        [plan.workload],
        seeds,
        plan.budget_s,
        with_variants=False,
        folder=folder,
    )
    judge = judge_of(plan, sandbox, made.cases)
    starter = Starter(sandbox, sandbox.server(), made.cases, judge, subject.libraries, plan.candidate_s)
    return starter, made.workloads


def judge_of(plan: Plan, sandbox: Sandbox, inputs: list[Case]) -> Judge:
    """The oracle at work on these inputs, which it makes again."""
    subject = plan.subject
    arguments = {
        "reference": str(subject.reference.resolve()),
        "dtype": subject.dtype,
        "workload": plan.workload,
        "seeds": [case.seed for case in inputs],
        "tolerances": oracle.tolerances(subject.tolerance),
    }
    return Judge(lambda: standing.Standing(sandbox, sandbox.server(), "judge", arguments, LIFE_S), plan.budget_s)


def live_at_once(inputs: list[Case], waiting: int = 0) -> int:
    """How many processes fit on the GPU beside each other and the oracle, each with what a check holds at its peak.
    waiting: so many of them have started CUDA."""
    size = sum(case.bytes() for case in inputs)
    held = (MUTATING_COPIES if any(case.mutates for case in inputs) else COPIES) * size + gpu_memory.EXPLORING_BYTES
    free = (gpu.free_bytes() or gpu_memory.ASSUMED_FREE_BYTES) + waiting * gpu_memory.WAITING_BYTES
    left = gpu_memory.EXPLORING_SHARE * free - ORACLE_COPIES * size / len(inputs) - gpu_memory.EXPLORING_BYTES
    return max(2, int(left / held))


def waves(entrants: list[Entrant], at_once: int) -> list[list[Entrant]]:
    """The entrants in groups, each started when the slower ones of those before have made room."""
    first, rest = entrants[:at_once], entrants[at_once:]
    half = max(1, at_once // 2)
    return [first, *(rest[at : at + half] for at in range(0, len(rest), half))]


def run_waves(
    starter: Starter,
    waiting: list[list[Entrant]],
    race: Race,
    until: float,
    say: Callable[[str], None],
    ahead: Ahead | None = None,
) -> None:
    """Start and time one wave after the other. What ran out of memory beside others starts again by itself, once the
    slower ones have made room. until: as for `start_all`. ahead: ends before times are taken."""
    while waiting:
        wave, *waiting = waiting
        with starter.spent.noted("compile and check"):
            start_all(starter, wave, until, say, race, last=not waiting)
            if ahead:
                if waiting:
                    ahead.wait(min(LONGEST_WAIT_S, until - time.monotonic()))  # for those of later waves
                ahead.end()
                explain_hangs(wave, ahead)
        crowded = crowded_out(wave, len(race.running())) if time.monotonic() < until else []
        if crowded:
            say(f"{len(crowded)} ran out of GPU memory beside others: started again one by one, with fewer beside them")
        waiting += [[entrant] for entrant in crowded]
        with starter.spent.noted("rounds"):
            race.run(last=not waiting, say=say)


def explain_hangs(wave: list[Entrant], ahead: Ahead) -> None:
    """Add to the error of each that did not end in time what its code shows."""
    stuck = [entrant for entrant in wave if entrant.status == Status.TIMEOUT]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for entrant, why in zip(stuck, pool.map(lambda one: ahead.why_endless(one.file), stuck), strict=True):
            entrant.error = f"{entrant.error}; {why}" if why else entrant.error


def crowded_out(wave: list[Entrant], running: int) -> list[Entrant]:
    """The entrants of a wave that ran out of memory while so many others held some that Race.make_room would end: with
    one alone, which stays, they would find no more room."""
    return [entrant for entrant in wave if entrant.status == Status.OOM] if running > 1 else []


def start_all(
    starter: Starter,
    wave: list[Entrant],
    until: float,
    say: Callable[[str], None],
    race: Race | None = None,
    last: bool = True,
) -> None:
    """Compile and check the entrants of a wave, as many at a time as the machine has cores. Opponents are waited for as
    long again as the candidates took, but for the one that ratios refer to; none where all candidates of the race
    failed. race: None for one of this wave alone. last: no candidate is started after this wave."""
    say(f"compiling and checking {len(wave)}")
    starter.judge.renew()
    began, candidates = time.monotonic(), compilable(wave)
    opponents = [one for one in wave if one not in candidates]
    if opponents:
        starter.forget(opponents)
    more = len(opponents) if starter.sandbox.gpu else 0  # which must keep no candidate waiting
    with ThreadPoolExecutor((os.cpu_count() or 1) + more) as pool:
        starts = {one.name: pool.submit(starter.start, one, until) for one in wave}
        if opponents and candidates:
            futures.wait(starts[one.name] for one in candidates)
            now, race = time.monotonic(), race or Race(wave, until)
            checked = {one.status for one in race.entrants if not one.is_opponent}
            if last and checked and not checked & MAY_BE_RIGHT:
                starter.hurry(opponents, now, NONE_RIGHT)
            else:
                optional = [one for one in opponents if one.name != race.against]
                starter.hurry(optional, now + max(LEAST_PATIENCE_S, now - began), NOT_WAITED_FOR)
        for start in starts.values():
            start.result()


def finish(entrants: list[Entrant], sandbox: Sandbox, watch: gpu_watch.Watch, plan: Plan) -> None:
    """Sustained times of the best that lead, and clocks meanwhile; the compiled code of all that still run."""
    living = [entrant for entrant in entrants if entrant.process]
    for entrant in ranked([one for one in living if not (one.dropped or one.is_probe)])[:MOST_SUSTAINED]:
        if taken := entrant.sustain(30, SUSTAINED_S):
            entrant.sustained_us = taken.us
            state = watch.state(taken.window)
            entrant.sm_clock_mhz = state and state.sm_clock_mhz and state.sm_clock_mhz.median
    folder = Path(sandbox.new_folder("traces"))
    traces = [folder / f"{number}.json" for number in range(len(living))]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        described = pool.map(lambda one, trace: describe(one, trace, plan.product), living, traces)
        calls = dict(zip((one.name for one in living), described, strict=True))
    dropped = probes.left_out(ranked(living), calls)
    for one in living:
        one.resources = replace(one.resources, products_dropped=dropped.get(one.name))


def describe(entrant: Entrant, trace: Path, product: wiki.Page | None) -> resources.CompiledCall | None:
    """Put what a call needs into `resources`; its compiled code. A trace that fails says nothing of the kernel."""
    status, error = entrant.status, entrant.error
    call = entrant.describe(TRACE_S, trace)
    entrant.status, entrant.error = status, error
    if call is not None:
        entrant.resources = resources.of_call(call, trace, product)
    return call


def ranked(entrants: list[Entrant]) -> list[Entrant]:
    """Best first: entrants that stayed, by the rounds that they ran in turn; then dropped ones; then failures. Probes
    that stayed, which have no part in the last rounds, take their place by their medians."""
    leaders = [one for one in entrants if one.status == Status.OK and not (one.dropped or one.is_probe)]
    stayed = {one.name: one.rounds_us for one in leaders}
    places = halving.places({name: times for name, times in stayed.items() if times})
    if timed := [one for one in leaders if one.calls_us]:
        first = min(timed, key=lambda one: places[one.name])
        probes = [one for one in entrants if one.is_probe and one.calls_us]
        places |= {one.name: places[first.name] + math.log(median_of(one) / median_of(first)) for one in probes}
    return sorted(
        entrants,
        key=lambda one: (one.status != Status.OK, one.dropped, places.get(one.name, math.inf), median_of(one)),
    )
