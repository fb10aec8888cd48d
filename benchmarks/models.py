#!/usr/bin/env python3
"""Models with random weights, from the profiled step to the kernel put back, by the bundle's own tools on a GPU.

python benchmarks/models.py [NAME ...] [--json FILE]: for each model find_kernels, cut_problem, a workspace, the gate
with the kernel of benchmarks/models/kernels/, put_back. Writes FILE after each step, keeping what else is in it.
`--table FILE` prints Markdown tables from such a file. MODELS_SMALL=1 tries everything but the gate on small models,
without a GPU. exit 1 when a kernel is refused or a model is wrong."""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from kernelopt.session.put_backs import Promise

HERE = ROOT / "benchmarks" / "models"
SMALL = os.environ.get("MODELS_SMALL") == "1"
LONGEST_S = 900  # of one command


@dataclass(frozen=True)
class Proof:
    """A model, and the kernel that goes into it. at: the modules that it replaces. group: pattern of the group that is
    cut; whole: with submodules, where it has some. between: a chain of its operators, as cut_problem.py takes it.
    tokens: how many greedy ones are compared."""

    model: str
    kernel: str
    at: str
    group: str
    whole: bool = True
    between: tuple[str, ...] = ()
    tokens: int = 0


WAYS = ("eager", "compiled", "tuned", "graph", "compiled_graph")
STAGE = f"stages.{1 if SMALL else 2}.*.depthwise"
PROOFS = {
    "decode": Proof(
        "decode", "attention", "layers.*.attention", "layers.*.attention", False, ("--between", "chunk", "reshape"), 64
    ),
    "prefill": Proof("prefill", "norm", "layers.*.before", "layers.*.before", tokens=64),
    "convnext": Proof("convnext", "depthwise", STAGE, STAGE),
    "mamba": Proof("mamba", "scan", "layers.*.scan", "layers.*.scan"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help=f"of {', '.join(PROOFS)} (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the measurements; others in the file stay")
    parser.add_argument("--table", type=Path, metavar="FILE", help="measure nothing, print these measurements")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/kernelopt_models"), help="of profiles and workspaces")
    parser.add_argument("--budget-seconds", default="10", help="of each way of running (default 10)")
    parser.add_argument("--compile-seconds", default="300", help="of each way of running (default 300)")
    parser.add_argument("--ways", nargs="*", default=WAYS[1:], help="of find_kernels.py")
    parser.add_argument("--steps", nargs="*", default=list(STEPS), choices=STEPS, help="default: all, in this order")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return 0
    args.folder.mkdir(parents=True, exist_ok=True)
    good = [proved(name, args) for name in args.name or PROOFS]
    return int(not all(good))


def proved(name: str, args) -> bool:
    """Run one model through, and write what came of it after each step."""
    row = {"seconds": {}, **rows(args.json).get(name, {}), "date": datetime.date.today().isoformat(), "failed": None}
    try:
        for step in args.steps:
            STEPS[step](name, PROOFS[name], args, row)
            write_row(args.json, name, row)
    except StepFailed as error:
        row["failed"] = str(error)
        write_row(args.json, name, row)
        print(error, file=sys.stderr)
    return row["failed"] is None


class StepFailed(Exception):
    """A command said no; the message is what it said."""


def profiled(name: str, proof: Proof, args, row: dict) -> None:
    """The profiled step: its times, ways of running, groups and advice."""
    saved = args.folder / f"{name}.json.gz"
    options = ["--ways", *args.ways, *limits(args), "--save", str(saved)]
    page = ["--page", str(args.folder / f"{name}.html")]
    timed(row, "find", python("find_kernels.py", model_file(proof), *options, *page))
    report = json.loads(run(python("find_kernels.py", "--recorded", str(saved), "--json")))
    (args.folder / f"{name}_groups.json").write_text(json.dumps(report))
    facts = ("device", "torch", "parameters", "step_us", "busy_us", "idle_pct", "kernels", "ways", "advice")
    row["find"] = {fact: report[fact] for fact in facts}
    shown = ("number", "name", "us", "share_pct", "kernels", "floor", "saved_us", "saved_pct")
    row["find"]["groups"] = [{fact: group[fact] for fact in shown} for group in report["groups"][:12]]


def cut(name: str, proof: Proof, args, row: dict) -> None:
    """The problem cut out, and proved."""
    reference = args.folder / f"{name}_reference.py"
    reference.unlink(missing_ok=True)
    command = python("cut_problem.py", model_file(proof), *part(proof, args.folder / f"{name}_groups.json"))
    row["cut"] = json.loads(timed(row, "cut", [*command, "--out", str(reference), "--json"]))
    row["cut"] = {fact: row["cut"][fact] for fact in ("module", "operators", "inputs", "mutates", "sizes", "proofs")}


def gated(name: str, proof: Proof, args, row: dict) -> None:
    """A workspace, and the kernel accepted in it."""
    reference, workspace = args.folder / f"{name}_reference.py", args.folder / f"kernel_opt_{name}"
    shutil.rmtree(workspace, ignore_errors=True)
    start = ["init_workspace.py", name, str(reference), "--root", str(args.folder), "--framework", "triton"]
    run(python(*start, "--platform", platform()))
    text = sized((HERE / "kernels" / f"{proof.kernel}.py").read_text(), reference)
    (workspace / "kernel.py").write_text(text)
    run(python("estimate_work.py", "--workspace", str(workspace)))
    if SMALL:
        return  # nothing is accepted without a GPU
    verdict = json.loads(
        timed(row, "gate", python("run_gate.py", "--workspace", str(workspace), "--version", "v0", "--json"))
    )
    row["gate"] = {fact: verdict[fact] for fact in ("accepted", "reason", "verify", "timing")}


def put_back(name: str, proof: Proof, args, row: dict) -> None:
    """The model with the kernel in it: checks and times."""
    workspace = str(args.folder / f"kernel_opt_{name}")
    tokens = ["--generate", str(proof.tokens)] if proof.tokens else []
    options = ["--at", proof.at, *tokens, *limits(args), "--json"]
    candidate = ["--candidate"] if SMALL else []  # nothing is accepted without a GPU
    said = timed(row, "put back", python("put_back.py", workspace, model_file(proof), *options, *candidate), allowed=1)
    row["put_back"] = json.loads(said)
    if not all(check["passed"] is not False for check in row["put_back"]["checks"]):
        raise StepFailed(f"{name}: the model is wrong with the kernel")


STEPS = {"find": profiled, "cut": cut, "gate": gated, "put_back": put_back}


def part(proof: Proof, groups: Path) -> list[str]:
    """What cut_problem.py cuts."""
    listed = json.loads(groups.read_text())["groups"]
    number = next(
        group["number"]
        for group in listed
        if group["pattern"] == proof.group and (group["whole"] or not group["has_submodules"]) == proof.whole
    )
    return ["--group", str(number), "--groups", str(groups), *proof.between]


def sized(text: str, reference: Path) -> str:
    """A kernel with the sizes of the reference's parameters and buffers in its line SHAPES."""
    from kernelopt.worker.model_swap import held, load_file

    shapes = {name: tuple(tensor.shape) for name, tensor in held(load_file(reference).Model())}
    return re.sub(r"^SHAPES = .*$", f"SHAPES = {shapes!r}", text, flags=re.MULTILINE)


def limits(args) -> list[str]:
    return ["--budget-seconds", args.budget_seconds, "--compile-seconds", args.compile_seconds]


def platform() -> str:
    """The wiki's name for the GPU that is here; an H200 where there is none."""
    if SMALL:
        return "H200"
    return json.loads(run(python("gpu_specs.py", "detect", "--json")))["platform"]


def model_file(proof: Proof) -> str:
    return str(HERE / f"{proof.model}.py")


def python(tool: str, *arguments: str) -> list[str]:
    device = ["--device", "cpu-interpreter"] if SMALL and tool in ON_A_DEVICE else []
    return [sys.executable, str(ROOT / "tools" / tool), *arguments, *(device if "--recorded" not in arguments else [])]


ON_A_DEVICE = ("find_kernels.py", "cut_problem.py", "run_gate.py", "put_back.py")


def timed(row: dict, step: str, command: list[str], allowed: int = 0) -> str:
    began = perf_counter()
    try:
        return run(command, allowed)
    finally:
        row["seconds"][step] = round(perf_counter() - began, 1)
        print(f"## {step}: {row['seconds'][step]} s", file=sys.stderr, flush=True)


def run(command: list[str], allowed: int = 0) -> str:
    """What a command prints. StepFailed when its exit code is above `allowed`."""
    print("$", *(part.replace(f"{ROOT}/", "") for part in command[1:]), file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LONGEST_S)
    if "--json" not in command:
        print(done.stdout, file=sys.stderr, flush=True)
    if done.returncode > allowed or (allowed and not done.stdout):
        raise StepFailed(f"{Path(command[1]).name}: exit {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


def write_row(path: Path | None, name: str, row: dict) -> None:
    """Write a model's row into the file, beside the others."""
    if path:
        path.write_text(json.dumps({**rows(path), name: row}, indent=1) + "\n")


def rows(path: Path | None) -> dict:
    """The measurements in a file, by model."""
    return json.loads(path.read_text()) if path and path.exists() else {}


STEP_HEAD = ("model", "eager", "GPU waits", "compile", "max-autotune", "CUDA graph", "compile in a graph")
GAIN_HEAD = ("model", "kernel in place of", "module alone", "eager", "compile", "CUDA graph", "compile in a graph")


def table(measured: dict) -> str:
    """Two Markdown tables, of the steps as they were profiled and of those with a kernel, and the advice."""
    steps = [step_row(name, row["find"]) for name, row in measured.items() if "find" in row]
    gains = [gain_row(name, row["put_back"]) for name, row in measured.items() if "put_back" in row]
    advice = [advised(name, row["find"]["advice"]) for name, row in measured.items() if "find" in row]
    return "\n\n".join([markdown(STEP_HEAD, steps), markdown((*GAIN_HEAD, "at best"), gains), *advice])


def advised(name: str, advice: list[str]) -> str:
    lines = [f"{number}. {sentence}" for number, sentence in enumerate(advice, start=1)]
    return "\n".join([f"{name}:", "", *lines])


def markdown(head: tuple[str, ...], cells: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *cells))


def step_row(name: str, step: dict) -> tuple[str, ...]:
    ways = {way["name"]: way for way in step["ways"]}
    times = [way_cell(ways.get(way)) for way in WAYS[1:]]
    return name, ms(step["step_us"]), f"{step['idle_pct']:.0f} %", *times


def way_cell(way: dict | None) -> str:
    if way is None:
        return "-"
    return way["failed"] or f"{ms(way['us'])}, {way['speedup']:.2f}x"


def gain_row(name: str, result: dict) -> tuple[str, ...]:
    ways = {way["name"]: way for way in result["ways"]}
    cells = [gain_cell(ways.get(way), result["promise"]) for way in WAYS if way != "tuned"]
    return name, f"`{result['at']}`", f"{result['alone']['speedup']:.2f}x", *cells, at_best(result)


def gain_cell(way: dict | None, promise: dict | None) -> str:
    """Before, after, speed-up; and the promised share of that step beside what came of it."""
    if way is None or way["failed"]:
        return way["failed"] if way else "-"
    text = f"{ms(way['before_us'])} to {ms(way['after_us'])}, {way['speedup']:.2f}x {way['verdict']}"
    most = Promise(**promise).most_pct(way["before_us"]) if promise else None
    came = 100 * (1 - 1 / way["speedup"])
    return text if most is None else f"{text}; promised at most {most:.1f} %, came {came:.1f} %"


def at_best(result: dict) -> str:
    """The fastest step without the kernel and with it."""
    timed = [way for way in result["ways"] if way["verdict"]]
    if not timed:
        return "-"
    before, after = (min(timed, key=lambda way, side=side: way[side]) for side in ("before_us", "after_us"))
    ratio = before["before_us"] / after["after_us"]
    return f"{ms(before['before_us'])} ({before['name']}) to {ms(after['after_us'])} ({after['name']}), {ratio:.2f}x"


def ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.2f} ms"


if __name__ == "__main__":
    sys.exit(main())
