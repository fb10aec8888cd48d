"""FlashInfer-Bench: a definition in definitions/OP/NAME.json, its workloads in workloads/OP/NAME.jsonl.

Fields as of flashinfer-bench 40e6ca7 (flashinfer_bench/data, bench/config.py, bench/evaluators)."""

from pathlib import Path

from ..errors import UsageError
from . import wrapping
from .definitions import Definition, read_definition
from .files import json_lines
from .tasks import Bounds, Options, Task, Wrapped, tolerated
from .workloads import Stated, located, stated, usual_random, workloads_file, written

NAME = "FlashInfer-Bench"
ATOL = RTOL = 1e-2  # its runner's defaults; an error may be within one of the two
MATCHED = {"moe": 0.95}  # by op_type, in its runner's configuration
MATCHED_IN_NAME = {"moe_fp8_block_scale": 0.95}
HALVES = "tolerance: within 0.01 absolutely or relatively there; half of both together here, which is never looser"
TVD, DRAWS = 0.2, 500_000
SEED = "1234"  # the verifier puts others in its place
TIMING = (
    "timing: its rule (CUPTI, 10 warm-up and 50 timed calls, mean of 3 input sets) gives way to the paired rounds here"
)
CHECKERS = {
    "dsa_topk_indexer": "checker: its evaluator of sparse indices compares sorted scores; here indices are compared "
    "exactly (COMPARE takes ties where an input holds the scores)",
    "dsa_sparse_attention": "checker: its evaluator lets a kernel leave out lse; here each output is compared",
}
PROBABILITIES = '''def probabilities(probs, top_k, top_p):
    """What is drawn from, (rows, values): the top_k of each row; of these, summing to 1, as many as exceed top_p."""
    ranked, order = probs.sort(dim=-1, descending=True)
    if top_k is not None:
        most = torch.as_tensor(top_k, device=probs.device).long().reshape(-1, 1)
        place = torch.arange(probs.shape[-1], device=probs.device)
        ranked = torch.where((place < most) | (most <= 0), ranked, 0.0)
        ranked = ranked / ranked.sum(-1, keepdim=True)
    if top_p is not None:
        most = torch.as_tensor(top_p, device=probs.device).to(probs.dtype).reshape(-1, 1)
        taken = (ranked.cumsum(-1) - ranked <= most) | (most >= 1)
        taken[..., 0] = True
        ranked = torch.where(taken, ranked, 0.0)
    return torch.zeros_like(probs).scatter(-1, order, ranked / ranked.sum(-1, keepdim=True))
'''


def read(path: Path, options: Options) -> Task:
    """The task of a definition's file."""
    definition = read_definition(path)
    file = workloads_file(path, options)
    cases, remarks = workloads_in(file, definition)
    cases, more = located(cases, definition, folders(path, file, options))
    remarks += more
    if not cases:
        raise UsageError(
            f"{path}: no workload can be carried over; the first reason: {(remarks or ['there is none'])[0]}"
        )
    samples = definition.op_type == "sampling" and "probs" in definition.inputs
    runnable = sampling(definition) if samples else wrapping.of_definition(definition)
    draw = random_probabilities if samples else usual_random
    inputs, workloads, more = written(runnable.definition, cases, draw, options, runnable.more)
    modes, stricter = tolerated(ATOL / 2, RTOL / 2, matched(definition))
    judged = [HALVES, *stricter, *checkers(definition), *whole_numbers(definition)]
    return wrapping.task_of(
        NAME,
        path,
        runnable,
        inputs,
        workloads,
        Bounds(modes),
        contiguous=True,
        remarks=(*remarks, *more, *runnable.remarks, *([] if samples else judged), TIMING),
        more=f'SAMPLES = {{0: {{"tvd": {TVD}, "draws": {DRAWS}}}}}\n' if samples else "",
    )


def workloads_in(file: Path, definition: Definition) -> tuple[list[Stated], list[str]]:
    """(workloads of the definition, remarks); of another definition's they are left out."""
    cases, others, traces = [], 0, 0
    for number, line in enumerate(json_lines(file), start=1):
        where = f"{file}, line {number}"
        if not isinstance(line.get("workload"), dict):
            raise UsageError(f"{where} has no workload object")
        if line.get("definition") != definition.name:
            others += 1
        elif line.get("solution") or line.get("evaluation"):
            traces += 1
        else:
            cases.append(stated(line["workload"], definition, where))
    remarks = [f"workloads: {others} lines of {file.name} are of other definitions"] if others else []
    return cases, remarks + ([f"traces: {traces} results of solutions in {file.name}"] if traces else [])


def folders(path: Path, file: Path, options: Options) -> list[Path]:
    """Where stored tensors may lie: paths count from the root of the data set."""
    return [options.blobs] if options.blobs else [*path.resolve().parents[:4], *file.resolve().parents[:4]]


def matched(definition: Definition) -> float:
    """The share of elements that must be within the tolerance."""
    by_name = next((ratio for part, ratio in MATCHED_IN_NAME.items() if part in definition.name), 1.0)
    return MATCHED.get(definition.op_type, by_name)


def checkers(definition: Definition) -> list[str]:
    return [remark for start, remark in CHECKERS.items() if definition.name.startswith(start)]


def whole_numbers(definition: Definition) -> list[str]:
    """Its tolerance holds for whole numbers too; here they are compared exactly."""
    names = [name for name, spec in definition.outputs.items() if "int" in spec.dtype]
    return (
        [f"tolerance: {', '.join(names)} of whole numbers: compared exactly, while 1 % off passes there"]
        if names
        else []
    )


def sampling(definition: Definition) -> wrapping.Runnable:
    """A task that draws: the reference gives the probabilities, and a kernel gets a seed besides the inputs."""
    top_k, top_p = (name if name in definition.inputs else "None" for name in ("top_k", "top_p"))
    return wrapping.Runnable(
        definition=definition,
        code=PROBABILITIES,
        model=Wrapped(f"probabilities(probs, {top_k}, {top_p})"),
        parameters=(*definition.inputs, "seed"),
        more=(SEED,),
        remarks=(
            "reference: its code draws at random; probabilities() takes its place: the top_k, and of these top_p",
            "interface: forward has a further argument `seed`, so that draws can be repeated",
        ),
    )


def random_probabilities(name: str, spec) -> str:
    return f"torch.softmax({usual_random(name, spec)}, -1)" if name == "probs" else usual_random(name, spec)
