"""Cases: the inputs of one workload, seed and variant, which a process that runs the reference writes to files."""

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..case_types import CandidateCase, Draws, SeededCalls, StoredCall, StoredCase, Variant
from ..device import outcomes
from ..device.outcomes import Fault, Outcome
from ..device.sandbox import Sandbox
from ..errors import EnvironmentLacks, Refused, TimedOut, UsageError
from ..statuses import Status

# Of input files per workload, beyond the seeds that are always needed. With 1 GiB a gate made ten seeds of 100 MB, with
# twice 268 MB of results each: it took 25 s on an H100, and 17 with this.
INPUT_BYTES = 1 << 28
KNOWN_SEEDS = 1 << 16  # seeds from here on are secret


@dataclass(frozen=True)
class Case:
    """The inputs of one workload, seed and variant. path: the file that holds them. state_path: the file that
    holds its parameters, where that is another one. shapes: of its tensors.

    names: of the parameters of forward that hold its tensors. mutates: numbers of those that forward is declared to
    change. samples: how each output that is drawn at random is drawn. repeatable: equal inputs, a seed among them, must
    give equal results. compares: the task declares how outputs are compared. contents: fingerprints of inputs and
    parameters. other: another case of the workload, on whose contents the kernel is called in between. first: of its
    workload.
    """

    workload: str
    seed: int
    variant: Variant | None
    path: str
    dtype: str
    shapes: list[list[int]]
    names: Sequence[str] = ()
    mutates: Sequence[int] = ()
    samples: Sequence[Draws] = ()
    repeatable: bool = False
    compares: bool = False
    contents: Sequence[tuple[float, float]] = ()
    other: "Case | None" = None
    first: bool = False
    state_path: str | None = None

    @classmethod
    def from_json(cls, fields: dict) -> "Case":
        samples = [Draws(**one) for one in fields["samples"]]
        return cls(**{**fields, "variant": Variant.from_json(fields["variant"]), "samples": samples})

    @property
    def files(self) -> list[str]:
        """The files that hold it."""
        return [self.path, *([self.state_path] if self.state_path else [])]

    def bytes(self) -> int:
        """What its files hold: its inputs and parameters."""
        return sum(Path(file).stat().st_size for file in self.files)

    @property
    def in_reserve(self) -> bool:
        """Is it a variant that only a kernel which declines it at smaller sizes is called on?"""
        return self.variant is not None and self.variant.instead_of is not None

    @property
    def draws(self) -> bool:
        """Is the kernel called on it over many seeds?"""
        return bool(self.samples) and (self.first or self.variant is not None)

    def for_candidate(self) -> CandidateCase:
        """What the candidate's process gets of it."""
        drawn = self.samples if self.draws else ()
        samples = [SeededCalls(one.output, one.seed, draw_sample_seeds(one.calls)) for one in drawn]
        return CandidateCase(self.path, self.other and self.other.path, self.variant, self.first, samples)

    def for_oracle(self, calls: Sequence[StoredCall], draws: str | None = None) -> StoredCase:
        """What the oracle's process gets of it, with the files that the candidate's calls left."""
        return StoredCase(self.workload, self.seed, self.variant, self.first, self.contents, calls, draws)


@dataclass(frozen=True)
class Prepared:
    """The cases of a task, what its reference declares (worker.declarations.DeclaredJson), the names of variants of its
    own making that it fails on, and of all its workloads. fixed: the one whole number that inputs of that name hold in
    all cases."""

    cases: list[Case]
    declared: dict
    left_out: list[str]
    workloads: list[str]
    fixed: dict[str, int]


def files_of(cases: Iterable[Case]) -> list[str]:
    """All files that hold these, which a candidate must not open."""
    return [file for case in cases for file in case.files]


class ReferenceFailed(Refused):
    """The reference fails, or no kernel can be judged on its task; `fault` says which."""

    def __init__(self, fault: Fault):
        super().__init__(f"the reference fails: {fault.message.strip()}")
        self.fault = fault


def result_of_reference(outcome: Outcome) -> dict:
    """The result of a job that ran the reference and nothing of a candidate's.

    Raises ReferenceFailed when it crashed, TimedOut, UsageError when the reference lacks a requested part, or
    EnvironmentLacks when it needs more memory than there is.
    """
    if outcome.timed_out:
        raise TimedOut("the reference did not finish in time; --timeout raises the limit")
    error = outcome.result.get("error") if outcome.result else None
    fault = Fault(Status(error["status"]), error["message"]) if error else outcomes.failure(outcome)
    if fault is None:
        return outcome.result
    if fault.status == Status.USAGE:
        raise UsageError(fault.message)
    if fault.status == Status.OOM:
        raise EnvironmentLacks(
            "the reference in high precision needs more memory than is free here; take smaller inputs (get_inputs) or "
            f"a GPU with more: {fault.message.strip().splitlines()[0][:300]}"
        )
    if fault.status != Status.INVALID_TASK:
        fault = replace(outcomes.unless_disk_is_full(fault), status=Status.INVALID_REFERENCE)
    raise ReferenceFailed(fault)


def prepare(*arguments, **options) -> list[Case]:
    """The cases of `prepare_task`."""
    return prepare_task(*arguments, **options).cases


def prepare_task(
    sandbox: Sandbox,
    reference: Path,
    dtype: str | None,
    workloads: list[str] | None,
    seeds: list[int],
    timeout_s: float,
    with_variants: bool,
    folder: str,
    for_kernel: bool = True,
    limit_bytes: int = INPUT_BYTES,
) -> Prepared:
    """Write input files for each workload, seed and variant to `folder`.

    Large inputs get fewer seeds: the last two, and more while a workload's files stay below limit_bytes. for_kernel: a
    kernel will run on them; then UsageError where there are too many elements for the CPU interpreter. Raises as
    `result_of_reference` does.
    """
    arguments = {
        "reference": str(reference.resolve()),
        "dtype": dtype,
        "workloads": workloads,
        "seeds": seeds,
        "at_least": 2,
        "limit_bytes": limit_bytes,
        "with_variants": with_variants,
        "folder": folder,
        "most_elements": MOST_INTERPRETED if for_kernel and sandbox.gpu is None else None,
    }
    made = result_of_reference(sandbox.run("prepare", arguments, timeout_s))
    return Prepared(**{**made, "cases": list(map(Case.from_json, made["cases"]))})


SLOW_ELEMENTS = 1 << 20  # of a case: the interpreter takes minutes for them
MOST_INTERPRETED = 1 << 26  # with 90 million a verification took nine minutes and gave no answer


def slow_in_interpreter(cases: list[Case]) -> str | None:
    """The warning that these cases will take the CPU interpreter minutes; None when they will not."""
    elements = max((sum(map(math.prod, case.shapes)) for case in cases), default=0)
    if elements <= SLOW_ELEMENTS:
        return None
    return (
        f"the inputs hold {elements} elements, for which the CPU interpreter takes minutes: name a small workload with "
        "--workload, or give it a reference with small inputs"
    )


def with_others(cases: list[Case]) -> list[Case]:
    """The cases; each that is no variant with the next one of its workload, and with whether it is the first of it."""
    return [case if case.variant else _with_other(case, cases) for case in cases]


def _with_other(case: Case, cases: list[Case]) -> Case:
    own = [other for other in cases if other.workload == case.workload and other.variant is None]
    at = own.index(case)
    return replace(case, other=own[(at + 1) % len(own)] if len(own) > 1 else None, first=at == 0)


def called_up(cases: Iterable[Case], declined: set[str | None]) -> list[Case]:
    """The cases in reserve whose counterparts at smaller sizes were declined, by the names of these."""
    return [case for case in cases if case.in_reserve and case.variant.instead_of in declined]


def draw_seeds(count: int) -> list[int]:
    """0, 1, … and, last, a third of them (at least one) that are secret."""
    secret = max(1, count // 3)
    return [*range(count - secret), *(secret_seed() for _ in range(secret))]


def draw_sample_seeds(count: int) -> list[int]:
    """Secret seeds, each another, for a kernel that draws at random. The first ones differ from one of them in a single
    bit, each in another, so that a kernel which leaves out a part of the seed draws the same twice."""
    generator = secrets.SystemRandom()
    one = 3 * KNOWN_SEEDS + generator.randrange(2**31 - 4 * KNOWN_SEEDS)
    beside = [one, *(one ^ (1 << bit) for bit in range(31))]
    near = [seed for seed in beside if KNOWN_SEEDS <= seed < 2**31 - 1]
    far = generator.sample(range(KNOWN_SEEDS, 2**31 - 1), count + len(near))
    return [*near, *(seed for seed in far if seed not in near)][:count]


def secret_seed() -> int:
    return KNOWN_SEEDS + secrets.randbelow(2**31)


def shown_seed(seed: int) -> int | str:
    """The seed as a result may show it: the last seeds of each workload stay unknown."""
    return "secret" if seed >= KNOWN_SEEDS else seed
