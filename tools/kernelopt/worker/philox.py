"""Philox 4x32-10, the counter-based generator of Triton's tl.rand and of cuRAND, for references with a seed.

A reference may say `from kernelopt.worker.philox import rand`: `rand(seed, offsets)` are the numbers of
`tl.rand(seed, offsets)`, so that a kernel that draws them so can be compared element by element (dropout, noise).

The algorithm is of Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""

import torch

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # added to the two halves of the key in each round
MASK = 0xFFFFFFFF
HALF = 1 << 16
UNIT = 4.6566127342e-10  # maps 0 … 2**31 - 1 to numbers from 0 to just below 1


def rand(seed: int | torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Numbers from 0 to just below 1 in float32, in the shape of `offsets`, which are whole numbers from 0."""
    signed = randint4(seed, offsets)[0]
    signed = torch.where(signed >= 1 << 31, signed - (1 << 32), signed)
    return torch.where(signed < 0, -signed - 1, signed).float() * UNIT


def randint4(seed: int | torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Four whole numbers below 2**32 for each offset, as int64."""
    seed = torch.as_tensor(seed, dtype=torch.int64, device=offsets.device)
    keys = [seed & MASK, (seed >> 32) & MASK]
    offsets = offsets.to(torch.int64)
    nothing = torch.zeros_like(offsets)
    numbers = (offsets & MASK, (offsets >> 32) & MASK, nothing, nothing)
    for _ in range(ROUNDS):
        first, second, third, fourth = numbers
        numbers = (
            high(MULTIPLIERS[1], third) ^ second ^ keys[0],
            low(MULTIPLIERS[1], third),
            high(MULTIPLIERS[0], first) ^ fourth ^ keys[1],
            low(MULTIPLIERS[0], first),
        )
        keys = [(key + step) & MASK for key, step in zip(keys, WEYL, strict=True)]
    return numbers


def high(a: int, b: torch.Tensor) -> torch.Tensor:
    """The upper 32 bits of a product of two 32-bit numbers; int64 would not hold the product itself."""
    return (a // HALF * b + (a % HALF * b >> 16)) >> 16


def low(a: int, b: torch.Tensor) -> torch.Tensor:
    """The lower 32 bits of the product."""
    return (((a // HALF * b & 0xFFFF) << 16) + a % HALF * b) & MASK
