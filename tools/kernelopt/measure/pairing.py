"""Is A faster than B? A pure function of the times of paired rounds."""

import math
from dataclasses import dataclass

from ..statuses import Speed

# A difference below 0.3 % may come from where buffers lie: on an H200 the medians of 60 rounds of a kernel against
# itself lay within 0.14 % at 180 us and above, and within 0.45 % at 42 us; three processes agree on no more.
LEAST = 0.003
# A difference below two ticks of the GPU's event clock, which counts in 32 ns, means nothing either.
LEAST_US = 0.064
# Two kernels are EQUAL when they differ by less than this for certain.
SAME = 0.01
RESAMPLES = 2000


@dataclass(frozen=True)
class PairedTimes:
    """Single times of one process, microseconds: a list of rounds, each with the calls of that kernel in it.

    b_us: of the baseline, None where the kernel ran alone.
    """

    a_us: list[list[float]]
    b_us: list[list[float]] | None


@dataclass(frozen=True)
class Comparison:
    """How kernel A compares with B. speedup: B's time over A's, so above 1 means that A is faster.

    ci95: its 95 % interval. process_speedups: of each process. aa_noise: the share by which A differs from itself.
    least_difference: the share that a difference must exceed to count. rounds: of all processes.
    """

    verdict: Speed
    speedup: float
    ci95: tuple[float, float]
    process_speedups: tuple[float, ...]
    aa_noise: float
    least_difference: float
    rounds: int

    def to_json(self) -> dict:
        return {
            "verdict": self.verdict,
            "speedup": {"point": self.speedup, "ci95": list(self.ci95)},
            "per_process": list(self.process_speedups),
            "aa_noise": self.aa_noise,
            "least": self.least_difference,
            "rounds": self.rounds,
        }

    @classmethod
    def from_json(cls, comparison: dict) -> "Comparison":
        return cls(
            verdict=Speed(comparison["verdict"]),
            speedup=comparison["speedup"]["point"],
            ci95=tuple(comparison["speedup"]["ci95"]),
            process_speedups=tuple(comparison["per_process"]),
            aa_noise=comparison["aa_noise"],
            least_difference=comparison["least"],
            rounds=comparison["rounds"],
        )

    def describe(self) -> str:
        """Half a line: "1.234x (95 % interval 1.230 to 1.238, A/A noise 0.10%)"."""
        low, high = self.ci95
        return f"{self.speedup:.3f}x (95 % interval {low:.3f} to {high:.3f}, A/A noise {self.aa_noise:.2%})"


def compare(runs: list[PairedTimes]) -> Comparison:
    """The comparison of two kernels from the paired times of each process.

    The speedup is the median over all rounds of the ratio of geometric means, with a bootstrap interval over rounds.
    aa_noise: the same of A against itself, with its two calls in a round treated as two kernels in turn: the interval's
    edge that is farther from 1. least_difference: the largest of the A/A noise, LEAST, and LEAST_US of the kernel's
    time.
    """
    import numpy

    ratios, control, times = [], [], []
    for run in runs:
        a, b = (numpy.log(numpy.asarray(us, dtype=float)) for us in (run.a_us, run.b_us))
        ratios.append(b.mean(axis=1) - a.mean(axis=1))
        turns = numpy.where(numpy.arange(len(a)) % 4 < 2, 1, -1)  # each of the two is the earlier one equally often
        control.append((a[:, 0] - a[:, 1]) * turns)
        times.append(numpy.exp(a).reshape(-1))
    interval = median_interval(numpy.concatenate(ratios))
    noise = max(abs(edge) for edge in median_interval(numpy.concatenate(control)))
    ticks = LEAST_US / float(numpy.median(numpy.concatenate(times)))
    least = max(math.log1p(LEAST), noise, ticks)
    medians = [float(numpy.median(own)) for own in ratios]
    return Comparison(
        verdict=speed_of(interval, medians, least, max(math.log1p(SAME), ticks)),
        speedup=math.exp(float(numpy.median(numpy.concatenate(ratios)))),
        ci95=(math.exp(interval[0]), math.exp(interval[1])),
        process_speedups=tuple(map(math.exp, medians)),
        aa_noise=math.expm1(noise),
        least_difference=math.expm1(least),
        rounds=sum(map(len, ratios)),
    )


def speed_of(interval: tuple[float, float], medians: list[float], least: float, same: float) -> Speed:
    """The verdict from logarithms of speedups: the interval over all rounds, and the median of each process.

    FASTER or SLOWER: the interval is clear of 0 by more than `least`, and every process agrees on the direction. EQUAL:
    the interval lies within `same` of 0.
    """
    low, high = interval
    if low > least and min(medians) > 0:
        return Speed.FASTER
    if high < -least and max(medians) < 0:
        return Speed.SLOWER
    return Speed.EQUAL if -same < low and high < same else Speed.AMBIGUOUS


def median_interval(values, resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % bootstrap interval of the median; the generator is seeded, so the same times give the same verdict."""
    import numpy

    generator = numpy.random.default_rng(0)
    picks = generator.choice(values, size=(resamples, len(values)))
    low, high = numpy.percentile(numpy.median(picks, axis=1), [2.5, 97.5])
    return float(low), float(high)
