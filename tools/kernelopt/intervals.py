"""How long kernels run, from the start and duration of each: [{start_us, us}], in the order of their start."""


def span_us(kernels: list[dict]) -> float:
    """From the start of the first to the end of the last, on whatever streams."""
    return max(k["start_us"] + k["us"] for k in kernels) - min(k["start_us"] for k in kernels) if kernels else 0.0


def busy_us(kernels: list[dict]) -> float:
    """Time in which at least one of them runs."""
    total, end = 0.0, float("-inf")
    for kernel in kernels:
        start, stop = kernel["start_us"], kernel["start_us"] + kernel["us"]
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
