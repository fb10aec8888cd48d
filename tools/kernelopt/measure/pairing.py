"""The verdicts: is A faster than B, and is a candidate accepted? Pure functions of recorded evidence."""

import math

# A difference below 0.3 % is not told from where buffers lie: on an H200 the medians of 60 rounds of a kernel against
# itself lay within 0.14 % at 180 us and above, and within 0.45 % at 42 us; three processes agree on no more.
LEAST = 0.003
# Nor is one below two ticks of the GPU's event clock, which counts in 32 ns.
LEAST_US = 0.064
# Two kernels are EQUAL when they differ by less than this for certain.
SAME = 0.01
RESAMPLES = 2000


def paired_verdict(runs: list[dict]) -> dict:
    """{verdict, speedup{point, ci95}, per_process, aa_noise, least, rounds} from paired times.

    runs: per process {a_us, b_us}, each a list of rounds of the two times of that kernel, microseconds. The speedup is
    b / a, so above 1 means that a is faster: the median over all rounds of the ratio of geometric means, with a 95 %
    bootstrap interval over rounds. aa_noise: the same of a against itself, its two calls in a round taken for two
    kernels in turn: the interval's edge that is farther from 1.
    FASTER or SLOWER: the interval is clear of 1 by more than `least` (the A/A noise, LEAST, or LEAST_US of the
    kernel's time), and every process agrees on the direction. EQUAL: the interval lies within SAME (or LEAST_US) of 1.
    AMBIGUOUS: anything else; measure again, accept nothing.
    """
    import numpy

    ratios, control, times = [], [], []
    for run in runs:
        a, b = (numpy.log(numpy.asarray(run[name], dtype=float)) for name in ("a_us", "b_us"))
        ratios.append(b.mean(axis=1) - a.mean(axis=1))
        turns = numpy.where(numpy.arange(len(a)) % 4 < 2, 1, -1)  # each of the two is the earlier one equally often
        control.append((a[:, 0] - a[:, 1]) * turns)
        times.append(numpy.exp(a).reshape(-1))
    low, high = _interval(numpy.concatenate(ratios), numpy)
    noise = max(abs(edge) for edge in _interval(numpy.concatenate(control), numpy))
    ticks = LEAST_US / float(numpy.median(numpy.concatenate(times)))
    least = max(math.log1p(LEAST), noise, ticks)
    medians = [float(numpy.median(own)) for own in ratios]
    same = max(math.log1p(SAME), ticks)
    if low > least and min(medians) > 0:
        verdict = "FASTER"
    elif high < -least and max(medians) < 0:
        verdict = "SLOWER"
    elif -same < low and high < same:
        verdict = "EQUAL"
    else:
        verdict = "AMBIGUOUS"
    point = float(numpy.median(numpy.concatenate(ratios)))
    return {
        "verdict": verdict,
        "speedup": {"point": math.exp(point), "ci95": [math.exp(low), math.exp(high)]},
        "per_process": [math.exp(median) for median in medians],
        "aa_noise": math.expm1(noise),
        "least": math.expm1(least),
        "rounds": sum(len(own) for own in ratios),
    }


def _interval(values, numpy) -> tuple[float, float]:
    """95 % bootstrap interval of the median; the generator is seeded, so the same times give the same verdict."""
    generator = numpy.random.default_rng(0)
    picks = generator.choice(values, size=(RESAMPLES, len(values)))
    low, high = numpy.percentile(numpy.median(picks, axis=1), [2.5, 97.5])
    return float(low), float(high)


def describe(comparison: dict) -> str:
    """A paired verdict in half a line."""
    low, high = comparison["speedup"]["ci95"]
    return f"{comparison['speedup']['point']:.3f}x (95 % interval {low:.3f} to {high:.3f}, A/A noise {comparison['aa_noise']:.2%})"
