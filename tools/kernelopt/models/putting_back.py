"""An accepted kernel put back into the model that its problem was cut out of: checks, times, and the files to use."""

import ast
import itertools
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import bundle
from ..device.sandbox import Sandbox
from ..errors import Refused, UsageError
from ..measure import oracle, pairing
from ..model_types import ModelCheck
from ..session import put_backs, record_store, version_kernels
from ..session.digests import content_digest
from ..session.put_backs import ALONE, Promise, PutBack, Way
from ..session.record_store import RecordStore
from ..session.workspace import Workspace
from ..statuses import Speed
from . import jobs

SWAP = Path(__file__).resolve().parents[1] / "worker" / "model_swap.py"  # works without the tools too


@dataclass(frozen=True)
class Kernel:
    """version: None for one that is not accepted."""

    version: str | None
    source: bytes

    @property
    def sha256(self) -> str:
        return content_digest(self.source)


@dataclass(frozen=True)
class Wanted:
    """What to check. at: a pattern of module paths; None takes the path that the problem was cut at. where: the calls
    that the kernel takes; None for all. workload: of the step; None takes that of the cut. tolerance: None takes that
    of the model's dtype. budget_s: of each way of running. ready_s: how long each may take to compile."""

    model: Path
    at: str | None
    where: str | None
    workload: str | None
    training: bool
    generate: int
    tolerance: float | None
    budget_s: float
    ready_s: float
    timeout_s: float


def kernel_of(workspace: Workspace, candidate: bool) -> Kernel:
    """The best accepted version, or kernel.py as it stands. Refused when none is accepted."""
    if candidate:
        return Kernel(None, bundle.read_bytes(workspace.kernel))
    best = RecordStore(workspace).best()
    if best is None:
        raise Refused(f"no version of {workspace.root} is accepted yet; --candidate tries kernel.py as it stands")
    return Kernel(best.version, version_kernels.kernel_of(workspace, best))


def put_back(sandbox: Sandbox, workspace: Workspace, kernel: Kernel, wanted: Wanted) -> PutBack:
    """Check the model with the kernel in it, and time it on a GPU. The result and the files that were checked go to the
    workspace's put_back/. Refused when the kernel cannot be put there."""
    facts = cut_facts(workspace.reference)
    at = wanted.at or facts.get("module")
    if at is None:
        raise UsageError("the problem was not cut out by cut_problem.py; say where the kernel goes: --at PATH")
    with sandbox.folder("put-back") as folder:
        for name, content in files(kernel, workspace).items():
            Path(folder, name).write_bytes(content)
        arguments = {
            "model": str(wanted.model.resolve()),
            "folder": folder,
            "at": at,
            "where": wanted.where,
            "workload": wanted.workload,
            "training": wanted.training,
            "generate": wanted.generate,
            "tolerances": oracle.tolerances(wanted.tolerance),
            "own_tolerance": workspace.task().tolerance,
            "budget_s": wanted.budget_s,
            "ready_s": wanted.ready_s,
        }
        report = jobs.run(sandbox, "put_back", arguments, wanted.timeout_s)
    result = PutBack(
        timestamp=record_store.now(),
        model=wanted.model.name,
        at=at,
        where=wanted.where,
        paths=tuple(report["paths"]),
        workload=report["workload"],
        calls=report["calls"],
        left_out=tuple(report["left_out"]),
        version=kernel.version,
        kernel_sha256=kernel.sha256,
        device=sandbox.device_name,
        training=wanted.training,
        checks=tuple(ModelCheck(**check) for check in report["checks"]),
        ways=tuple(way_of(name, times) for name, times in report["steps"].items()),
        alone=report["alone"] and way_of(ALONE, report["alone"]),
        promise=promise_of(facts),
    )
    keep(workspace, kernel, result)
    return result


def files(kernel: Kernel, workspace: Workspace) -> dict[str, bytes]:
    """What stands in for the modules, with and without the tools."""
    return {"kernel.py": kernel.source, "reference.py": workspace.reference.read_bytes(), SWAP.name: SWAP.read_bytes()}


def keep(workspace: Workspace, kernel: Kernel, result: PutBack) -> None:
    """The result; and the files, where they passed."""
    shutil.rmtree(put_backs.folder_of(workspace), ignore_errors=True)
    for name, content in files(kernel, workspace).items() if result.is_right else ():
        bundle.write_bytes(put_backs.folder_of(workspace) / name, content)
    put_backs.write(workspace, result)


def cut_facts(reference: Path) -> dict:
    """CUT of a reference that cut_problem.py wrote; {} of another."""
    for node in ast.parse(reference.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "CUT":
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                return {}
            return value if isinstance(value, dict) else {}
    return {}


def promise_of(facts: dict) -> Promise | None:
    share = facts.get("share_pct")
    if not isinstance(share, int | float):
        return None
    return Promise(share, facts.get("at_most_pct"), facts.get("saved_us"), facts.get("floor_us"))


def way_of(name: str, times: dict) -> Way:
    """The comparison of a way of running."""
    held = {"before_bytes": times["before_bytes"], "after_bytes": times["after_bytes"]}
    if times["failed"]:
        return Way(name, None, None, None, None, None, times["failed"], **held)
    compared = pairing.compare([pairing.PairedTimes(a_us=times["after_us"], b_us=times["before_us"])])
    medians = (statistics.median(itertools.chain(*times[key])) for key in ("before_us", "after_us"))
    return Way(name, *medians, compared.speedup, compared.ci95, str(compared.verdict), None, **held)


def is_good(result: PutBack) -> bool:
    """All checks passed, and where the step was timed, the kernel pays."""
    return result.is_right and (not result.timed or result.pays)


def lines(result: PutBack, workspace: Workspace) -> Iterator[str]:
    version = result.version or "kernel.py, which is not accepted,"
    modules = (
        f"{len(result.paths)} module{'s' * (len(result.paths) > 1)} at {result.at}" if result.at else "the whole model"
    )
    times = "once" if result.calls == 1 else f"{result.calls} times"
    step = f"called {times} a step of workload {result.workload}"
    yield f"{version} in place of {modules}, {step}, on {result.device}"
    if result.where:
        yield f"the kernel takes the calls with {result.where}; the original takes the others"
    if result.left_out:
        yield f"left out, with the original in all calls: workload {', '.join(result.left_out)}"
    for check in result.checks:
        word = {True: "ok", False: "WRONG", None: "not known"}[check.passed]
        yield f"{word}: {check.name}: {check.detail}"
    if not result.is_right:
        yield "the model is not right with this kernel, so nothing was timed"
        yield from hint_lines(result)
    elif not result.ways:
        yield "nothing was timed: there is no GPU here"
    for way in (*result.ways, *([result.alone] if result.alone else [])):
        yield way_line(way)
    yield from promise_lines(result)
    yield from verdict_lines(result)
    if result.is_right:
        where = f", where={result.where!r}" if result.where else ""
        yield f"to use it: {put_backs.folder_of(workspace)}/{SWAP.name}, into(model, {result.at!r}{where})"


def hint_lines(result: PutBack) -> Iterator[str]:
    """What to do where the kernel is right in the workload that it is for, and wrong in others. A cut that was called
    in another form says so itself, with the condition."""
    own = f"{put_backs.OUTPUTS} {result.workload}"
    outputs = [check for check in result.checks if check.name.startswith(put_backs.OUTPUTS)]
    wrong = [check for check in outputs if check.passed is False]
    told = result.where or any("--where" in check.detail for check in wrong)
    if wrong and not told and any(check.passed and check.name == own for check in outputs):
        yield "--where 'x.shape[1] == 1', say, gives the kernel only the calls that it is made for"


def way_line(way: Way) -> str:
    if way.failed:
        return f"{way.name}: not timed: {way.failed}"
    low, high = way.ci95
    text = f"{way.name}: {ms(way.before_us)} before, {ms(way.after_us)} after, {way.verdict} {way.speedup:.3f}x"
    memory = ""
    if way.before_bytes is not None:
        memory = f"; memory {way.before_bytes / 2**20:.0f} MiB before, {way.after_bytes / 2**20:.0f} MiB after"
    return f"{text} (95 % interval {low:.3f} to {high:.3f}){memory}"


def ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.3f} ms"


def promise_lines(result: PutBack) -> Iterator[str]:
    """The gain that was promised, and what became of it."""
    eager = result.way(put_backs.EAGER)
    if result.promise is None or eager is None or eager.speedup is None:
        return
    most = result.promise.at_most_pct
    promised = f"at most {most:.1f} % of the eager step" if most is not None else "no figure, for want of a floor"
    yield f"promised: {promised}, of {result.promise.share_pct:.1f} % that the part took"
    if expected := result.expected():
        yield f"expected of the kernel's own {result.alone.speedup:.3f}x: a step {expected:.3f}x as fast"
    for way in result.timed:
        most = result.promise.most_pct(way.before_us)
        bound = f", where at most {most:.1f} % could come" if most is not None else ""
        yield f"came of it, {way.name}: {way.gain_pct:.1f} % of the step{bound}"


def verdict_lines(result: PutBack) -> Iterator[str]:
    """Whether the kernel pays, whatever way of running is the best with it and without."""
    if not result.timed:
        return
    compiled = result.way("compiled")
    if compiled and compiled.verdict == Speed.SLOWER:
        yield (
            "torch.compile fuses these operators with their neighbours and spares the host their calls; it can do "
            "neither with a kernel, so the compiled model is better off without it"
        )
    before, after = result.best_before, result.best_after
    without = f"a step takes at best {ms(before.before_us)} without the kernel ({before.name})"
    text = f"{without}, {ms(after.after_us)} with it ({after.name}): {before.before_us / after.after_us:.3f}x"
    if result.pays:
        yield f"it pays: {text}"
    elif result.broken:
        yield f"it does not pay as it is: {result.broken[0].name} works without the kernel alone; mend that first"
    else:
        yield f"it does not pay: {text}; leave the model as it was, and run it that way"
