"""Outputs that are drawn at random: SAMPLES, and the judgement of draws against the reference's probabilities.

    SAMPLES = {0: {"tvd": 0.02, "draws": 200_000}}

The reference returns probabilities over the last dimension; the kernel returns an index for each row. A parameter of
forward holds the seed: "seed", or the one that {"seed": name} states. Every index must be in range and possible, and
the same seed must give the same result. Over secret seeds the total variation distance of the draws of a row to its
probabilities may be `tvd`. Rows of equal probabilities count as one, so few calls suffice where get_inputs repeats
them; each of them must then vary by itself, and apart from the others.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from ..case_types import OutputCheck, OutputErrors, OutputLayout
from .contract import InvalidDeclaration

MOST_TVD = 0.5
FEWEST_DRAWS, MOST_DRAWS = 1000, 10_000_000
FEWEST_CALLS = 100
FEWEST_EXPECTED = 0.5  # draws of an index in a call, so that their number varies nearly normally over many calls
MOST_CALLS = {"cuda": 20_000, "cpu": 400}
INTERPRETED_S = 60  # after which the CPU interpreter, which takes 10 ms a program, draws no more
SIGMAS = 4  # of the noise of a right kernel's distance
SIGMAS_OF_MANY = 6  # the same where each of many rows is tested
EXPONENT = SIGMAS_OF_MANY**2 / 2  # exp(-EXPONENT) bounds how often a normal count is SIGMAS_OF_MANY above its mean
RARE = 1e-3  # equal draws of two seeds are no chance where so few are expected
BETWEEN_SEEDS, MOST_SEED = 1_000_003, 2**31 - 1  # of the seeds of one call
SUM_TOLERANCE = 1e-2  # of probabilities of a row, in the task's dtype


@dataclass(frozen=True)
class Sampling:
    """One output that is drawn. seed: position of the parameter of forward that holds the seed."""

    tvd: float
    draws: int
    seed: int

    def to_json(self) -> dict[str, float | int]:
        return {"tvd": self.tvd, "draws": self.draws}


def read(declared, parameters: tuple[str, ...]) -> dict[int, Sampling]:
    """The outputs that SAMPLES declares. Raises InvalidDeclaration for what cannot be read."""
    if not isinstance(declared, dict):
        raise InvalidDeclaration('SAMPLES must be a dict, such as {0: {"tvd": 0.02, "draws": 200_000}}')
    return {output: read_one(output, modes, parameters) for output, modes in declared.items()}


def read_one(output, modes, parameters: tuple[str, ...]) -> Sampling:
    where = f"SAMPLES[{output!r}]"
    if type(output) is not int or output < 0:
        raise InvalidDeclaration(f"SAMPLES has the key {output!r}; a key is the position of an output, from 0")
    if not isinstance(modes, dict) or not {"tvd", "draws"} <= set(modes) <= {"tvd", "draws", "seed"}:
        raise InvalidDeclaration(f'{where} must hold "tvd" and "draws", and may hold "seed", the parameter\'s name')
    tvd, draws, seed = modes["tvd"], modes["draws"], modes.get("seed", "seed")
    if type(tvd) not in (int, float) or not 0 < tvd <= MOST_TVD:
        raise InvalidDeclaration(f"{where}: tvd is {tvd!r}; it must be a number above 0, up to {MOST_TVD}")
    if type(draws) is not int or not FEWEST_DRAWS <= draws <= MOST_DRAWS:
        raise InvalidDeclaration(
            f"{where}: draws is {draws!r}; it must be a whole number from {FEWEST_DRAWS} to {MOST_DRAWS}"
        )
    if seed not in parameters:
        raise InvalidDeclaration(
            f"{where}: forward has no parameter {seed!r} that holds the seed; without one the same result cannot be "
            'asked for twice (another name: {"seed": "its name"})'
        )
    return Sampling(float(tvd), draws, parameters.index(seed))


def calls_needed(sampling: Sampling, probabilities: torch.Tensor, device: str, own: bool = True) -> int:
    """How often a kernel must be called for the declared draws of each row, and for each of equal rows to vary; at
    other sizes than the task's own for FEWEST_DRAWS. Fewer where that is too often."""
    group, counts = groups(probabilities)
    draws = sampling.draws if own else min(sampling.draws, FEWEST_DRAWS)
    calls = math.ceil(draws / int(counts.min()))
    if own:
        rows = probabilities.double().reshape(-1, probabilities.shape[-1])
        repeated = [rows[int((group == number).nonzero()[0])] for number in (counts > 1).nonzero()[:, 0].tolist()]
        calls = max(calls, FEWEST_CALLS, *(calls_to_see_a_constant(row, sampling.tvd) for row in repeated))
    return min(calls, MOST_CALLS[device])


def calls_to_see_a_constant(expected: torch.Tensor, tvd: float) -> int:
    """Calls after which a row that always draws the likeliest index draws it twice as far above its share as
    `drawn_too_often` allows; 1 where `tvd` allows it."""
    share = float(expected.max())
    off = 1 - share - tvd
    if off <= 0:
        return 1
    # excess_of is at most 2/3 EXPONENT + sqrt(2 EXPONENT variance): twice each term alone, solved for the calls.
    return math.ceil(4 / 3 * EXPONENT / off + 8 * EXPONENT * share * (1 - share) / off**2)


def in_time(seeds: Iterable[int], device: str, clock: Callable[[], float] = time.monotonic) -> Iterator[int]:
    """The seeds; on a CPU until INTERPRETED_S have passed."""
    end = clock() + (INTERPRETED_S if device == "cpu" else math.inf)
    for seed in seeds:
        if clock() > end:
            return
        yield seed


def groups(probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the group of each row, rows per group); rows of equal probabilities are one group."""
    rows = probabilities.reshape(-1, probabilities.shape[-1])
    _, group, counts = rows.unique(dim=0, return_inverse=True, return_counts=True)
    return group, counts


def reseeded(inputs: list, position: int, seed: int) -> list:
    """The arguments of a call with another seed, as a number or in its tensor's memory; a tensor of several seeds, such
    as one for each request, gets as many."""
    held = inputs[position]
    if isinstance(held, torch.Tensor):
        each = torch.arange(held.numel(), device=held.device) * BETWEEN_SEEDS
        held.copy_(((seed + each) % MOST_SEED).view(held.shape))
        return inputs
    return [*inputs[:position], seed, *inputs[position + 1 :]]


def check_probabilities(probabilities: torch.Tensor, sampling: Sampling) -> None:
    """InvalidDeclaration where an output is no distribution, or a constant answer would pass."""
    if not probabilities.is_floating_point() or probabilities.dim() == 0:
        raise InvalidDeclaration("SAMPLES: the reference must return probabilities over the last dimension")
    rows = probabilities.double()
    if not are_distributions(rows):
        raise InvalidDeclaration("SAMPLES: the reference's probabilities are negative, or do not sum to 1 in each row")
    if float((1 - rows.amax(-1)).max()) <= sampling.tvd:
        raise InvalidDeclaration("SAMPLES: in every row the likeliest index alone is within the declared distance")


def are_distributions(rows: torch.Tensor) -> bool:
    return bool((rows >= 0).all()) and bool(((rows.double().sum(-1) - 1).abs() <= SUM_TOLERANCE).all())


def compare(actual: torch.Tensor, probabilities: torch.Tensor) -> OutputCheck:
    """accuracy.compare for indices: in range, and of a probability above 0. Their strides do not count."""
    shape, whole = list(probabilities.shape[:-1]), not actual.is_floating_point() and actual.dtype != torch.bool
    given = OutputLayout(list(actual.shape), str(actual.dtype), [])
    expected = OutputLayout(shape, str(actual.dtype) if whole else "torch.int64", [])
    return OutputCheck(given, expected, errors_of(actual, probabilities) if given == expected else None)


def errors_of(actual: torch.Tensor, probabilities: torch.Tensor) -> OutputErrors:
    """The errors of indices, one for each row of the probabilities."""
    count = probabilities.shape[-1]
    at = actual.long().reshape(-1, 1)
    rows = probabilities.reshape(-1, count)
    inside = (at >= 0) & (at < count)
    wrong = (~inside | (rows.gather(1, at.clamp(0, count - 1)) <= 0)).reshape(-1)
    bad = int(wrong.sum())
    return OutputErrors(
        elements=actual.numel(),
        finite=actual.numel(),
        rms=0.0,
        bound=0.0,
        max_rel=0.0,
        mismatches=0,
        nonfinite=0,
        spurious=0,
        infinite=0,
        first_bad_index=int(wrong.nonzero()[0]) if bad else None,
        baseline_max_rel=0.0,
        lost_pct=0.0,
        baseline_lost_pct=0.0,
        refused=f"{bad} indices are out of range, or have a probability of 0" if bad else None,
    )


def distance(draws: torch.Tensor, probabilities: torch.Tensor, sampling: Sampling) -> str | None:
    """Why draws, (calls, …rows), do not follow the probabilities, (…rows, values); None when they do."""
    values = probabilities.shape[-1]
    rows = probabilities.double().reshape(-1, values)
    if draws.shape[1:] != probabilities.shape[:-1] or draws.numel() == 0:
        return f"the draws have shape {list(draws.shape[1:])}, expected {list(probabilities.shape[:-1])}"
    drawn = draws.long().reshape(len(draws), -1)
    if bool(((drawn < 0) | (drawn >= values)).any()):
        return "an index is out of range"
    if impossible := int((rows.gather(1, drawn.T) <= 0).sum()):
        return f"{impossible} of {drawn.numel()} draws are of probability 0"
    group, counts = groups(probabilities)
    for number in range(len(counts)):
        members = (group == number).nonzero()[:, 0]
        own, expected = drawn[:, members], rows[int(members[0])] / rows[int(members[0])].sum()
        if why := wrong_together(own, expected, sampling) or wrong_alone(own, expected, sampling):
            return why
    return same_draws(drawn, rows)


def wrong_together(drawn: torch.Tensor, expected: torch.Tensor, sampling: Sampling) -> str | None:
    """Why the draws of rows of equal probabilities, taken together, do not follow them. drawn: (calls, rows)."""
    own, limit = drawn.reshape(-1), sampling.tvd
    distance, noise = off_by(own, expected), noise_of(expected, len(own))
    if noise > limit and len(own) >= sampling.draws:
        needed = math.ceil(len(own) * (noise / limit) ** 2)
        raise InvalidDeclaration(
            f"SAMPLES: {len(own)} draws of {len(expected)} values are off by up to {noise:.3g} by chance alone, more "
            f"than the declared {limit:g}; state {needed} draws or more, or fewer values"
        )
    if distance > max(limit, noise):
        return (
            f"the draws of a row have a total variation distance of {distance:.3g} to its probabilities over "
            f"{len(own)} draws, more than {max(limit, noise):.3g}"
        )
    return None


def wrong_alone(drawn: torch.Tensor, expected: torch.Tensor, sampling: Sampling) -> str | None:
    """Why one of several rows of equal probabilities does not follow them by itself, or draws with its neighbour."""
    calls, count = drawn.shape
    limit = max(sampling.tvd, noise_of(expected, calls, SIGMAS_OF_MANY))
    for row in range(count if count > 1 and limit < 1 else 0):
        if (distance := off_by(drawn[:, row], expected)) > limit:
            return (
                f"the draws of row {row} alone have a total variation distance of {distance:.3g} to its probabilities "
                f"over {calls} seeds, more than {limit:.3g}"
            )
    if count < 2:
        return None
    if why := drawn_too_often(drawn, expected, sampling):
        return why
    alike, by_chance = float((drawn[:, 1:] == drawn[:, :-1]).double().mean()), float(expected.square().sum())
    if abs(alike - by_chance) > max(sampling.tvd, SIGMAS_OF_MANY * math.sqrt(0.75 / (calls * (count - 1)))):
        return (
            f"neighbouring rows of equal probabilities draw the same index in {alike:.0%} of the calls, by chance "
            f"{by_chance:.0%}: each row needs random numbers of its own"
        )
    return drawn_alike(drawn, len(expected))


def drawn_alike(drawn: torch.Tensor, values: int) -> str | None:
    """Why rows of equal probabilities draw with others, however far apart. Where two tiles of rows share their numbers,
    say, a call draws each index an even number of times. drawn: (calls, rows)."""
    calls, rows = drawn.shape
    share = torch.bincount(drawn.reshape(-1), minlength=values).double() / drawn.numel()
    often = rows * torch.minimum(share, 1 - share) >= FEWEST_EXPECTED
    if calls < FEWEST_CALLS or not often.any():
        return None
    own = share[often]
    place = torch.where(often, often.cumsum(0) - 1, len(own))[drawn]
    counts = torch.zeros(calls, len(own) + 1, device=drawn.device).scatter_add_(
        1, place, torch.ones_like(place).float()
    )
    by_chance = rows * own * (1 - own)  # the variance of a count
    varies = float(((counts[:, :-1] - rows * own).square() / by_chance).sum(1).mean()) / len(own)
    odds = own / (1 - own)
    variance = 2 * (len(own) + odds.sum() ** 2 - odds.square().sum()) + (1 / by_chance).sum()
    if varies <= 1 + SIGMAS_OF_MANY * math.sqrt(float(variance) / calls) / len(own):
        return None
    return (
        f"how often the rows of a call draw an index varies {varies:.2g} times as much as by chance: each row needs "
        "random numbers of its own"
    )


def drawn_too_often(drawn: torch.Tensor, expected: torch.Tensor, sampling: Sampling) -> str | None:
    """Why one of several rows draws an index too often by itself. Of many values the distance of so few draws is
    mostly noise, this is not."""
    most = drawn.mode(dim=0).values
    calls, times, share = len(drawn), (drawn == most).sum(0), expected[most]
    limit = calls * (share + sampling.tvd) + excess_of(calls * share * (1 - share))
    row = int((times - limit).argmax())
    if times[row] <= limit[row]:
        return None
    return (
        f"the draws of row {row} alone hold index {most[row]} in {times[row]} of {calls} calls, by chance in "
        f"{limit[row]:.0f} at most"
    )


def excess_of(variance: torch.Tensor) -> torch.Tensor:
    """How far above its mean a right kernel's count stays, by Bernstein's inequality; SIGMAS_OF_MANY where many are
    expected."""
    return EXPONENT / 3 + (EXPONENT**2 / 9 + 2 * EXPONENT * variance).sqrt()


def same_draws(drawn: torch.Tensor, rows: torch.Tensor) -> str | None:
    """Why seeds do not count: two of them gave the same draws in all rows, which chance does not explain."""
    calls = len(drawn)
    by_chance = calls * (calls - 1) / 2 * math.exp(float(rows.square().sum(-1).log().sum()))
    repeated = calls - len(drawn.unique(dim=0))
    if repeated and by_chance < RARE:
        return f"{repeated} of {calls} seeds gave the same draws as another one: all of the seed must count"
    return None


def too_few(sampling: Sampling, probabilities: torch.Tensor, calls: int) -> str | None:
    """What so many calls cannot tell of the declared distance; None where they suffice."""
    rows = probabilities.double().reshape(-1, probabilities.shape[-1])
    group, counts = groups(probabilities)
    fewest = int(counts.argmin())
    draws, expected = calls * int(counts[fewest]), rows[int((group == fewest).nonzero()[0])]
    noise = noise_of(expected, draws)
    if draws >= sampling.draws or noise <= sampling.tvd:
        return None
    return f"{draws} of {sampling.draws} declared draws, too few to see a distance below {noise:.2g}"


def off_by(drawn: torch.Tensor, expected: torch.Tensor) -> float:
    """The total variation distance of draws to probabilities."""
    shares = torch.bincount(drawn, minlength=len(expected)).double() / len(drawn)
    return float((shares - expected).abs().sum() / 2)


def noise_of(expected: torch.Tensor, draws: int, sigmas: int = SIGMAS) -> float:
    """The distance that the draws of a right kernel stay within: its mean and some standard deviations."""
    mean = float((expected * (1 - expected)).clamp(min=0).sqrt().sum()) / math.sqrt(2 * math.pi * draws)
    return mean + sigmas * 0.5 / math.sqrt(draws)
