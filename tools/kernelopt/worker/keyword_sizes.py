"""Sizes that a task names itself, as keyword arguments of get_inputs, and the other values that they are tried at.

    def get_inputs(*, requests=4, pages=300, page=16): …

Inputs of other sizes are then made by the task, and never cut out of its own: which input depends on which only the
task knows. get_inputs raises ValueError where there is no case of these sizes. Imported by worker processes only.
"""

import inspect
from collections.abc import Callable, Iterator
from secrets import randbelow

from .contract import InvalidDeclaration

Keywords = dict[str, int]
SMALL_PRIMES = (127, 61, 31, 13, 7, 5, 3, 2)
STRUCTURE = 3  # a size up to this one is a structure (a pair, a colour, a window)
TILE = 32  # a kernel may work in tiles of this size, however small the task's own sizes are
EQUAL = 5  # of all sizes at once: a kernel may take a shape for another one of the same sizes
WHOLE = 128  # a kernel that declines parts of a tile takes multiples of this size
MOST_HALVED = 256  # the least size that a kernel with tiles of twice WHOLE takes
DRAWS = 8  # attempts to draw sizes that the task takes
MOST_DRAWN = 2  # times its own value is the most that a size is drawn at


def of_function(make: Callable, name: str) -> Keywords:
    """The sizes of a function that makes inputs: its parameters that have a whole number as default. Others keep their
    default. Raises InvalidDeclaration for a keyword that has none."""
    sizes = {}
    for parameter in inspect.signature(make).parameters.values():
        if type(parameter.default) is int:
            sizes[parameter.name] = parameter.default
        elif parameter.kind == parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            raise InvalidDeclaration(f"{name} has the keyword '{parameter.name}' without a default")
    if small := [size for size, value in sizes.items() if value < 1]:
        raise InvalidDeclaration(f"{name} has the size '{small[0]}' below 1; a size is at least 1")
    return sizes


def chosen(make: Callable, sizes: Keywords, own: dict, workload: str) -> Keywords:
    """The sizes of a workload that get_workloads states as a dict. make: get_inputs, whose sizes these are. Raises
    InvalidDeclaration for an unknown one."""
    parameters = inspect.signature(make).parameters
    for name, value in own.items():
        if name in parameters and name not in sizes:
            default = parameters[name].default
            kind = "no default" if default is inspect.Parameter.empty else f"a default of type {type(default).__name__}"
            raise InvalidDeclaration(
                f"workload '{workload}' sets {name!r}, which has {kind} in get_inputs; a size has a whole number as "
                f"default, such as {name}=8"
            )
        if name not in sizes or type(value) is not int or value < 1:
            known = ", ".join(sizes) or "none"
            raise InvalidDeclaration(
                f"workload '{workload}' sets {name!r} to {value!r}; it can set the keyword sizes of get_inputs "
                f"({known}) to whole numbers from 1"
            )
    return {**sizes, **own}


def other_sizes(
    sizes: Keywords, small: Keywords, larger: Keywords, narrow: bool, possible: Callable[[Keywords], bool]
) -> Iterator[tuple[str, Keywords]]:
    """(name, keywords) for all sizes but the primes just below. small: small primes where the task takes them. larger:
    sizes above its own where those are small, or none. narrow: the task's own sizes are large, so that the sizes that
    stay are small. A size that can only be a power of two, or a multiple of something, becomes twice and half as large.
    A size that passes a tile stands beside larger ones too: of few lengths drawn up to it, none may pass the tile."""
    yield "prime sizes", small
    others = small if narrow else {}
    for name, size in sizes.items():
        yield one(name, size, 1), {**others, name: 1}
        if prime := small_prime(size):
            yield one(name, size, prime), {**others, name: prime}
        yield one(name, size, size + 1), {**others, name: size + 1}
        if not possible({**others, name: size + 1}):
            for other in (2 * size, max(size // 2, 1)):
                yield one(name, size, other), {**others, name: other}
        passing = max(beyond(size), TILE + 1)
        yield one(name, size, passing) + ", others small" * (passing == size + 1), {**small, name: passing}
        if larger:
            yield f"{one(name, size, passing)}, others larger", {**larger, name: passing}
    yield "all sizes 1", dict.fromkeys(sizes, 1)
    yield f"all sizes {EQUAL}", dict.fromkeys(sizes, EQUAL)
    drawn = drawn_sizes(sizes, possible)
    yield f"drawn sizes ({', '.join(f'{name} {size}' for name, size in drawn.items())})", drawn


def drawn_sizes(sizes: Keywords, possible: Callable[[Keywords], bool]) -> Keywords:
    """Random sizes, which no kernel can know; drawn again where the task has no case of them."""
    drawn: Keywords = {}
    for _ in range(DRAWS):
        drawn = {name: 1 + randbelow(MOST_DRAWN * size) for name, size in sizes.items()}
        if possible(drawn):
            break
    return drawn


def just_below(sizes: Keywords) -> Keywords:
    """The largest prime below each size that is no structure."""
    return {name: prime_below(size) for name, size in sizes.items() if size > STRUCTURE}


def smallest(sizes: Keywords, possible: Callable[[Keywords], bool]) -> Keywords:
    """Small primes in as many places as the task takes together."""
    return together({name: small_prime(size) for name, size in sizes.items() if size > STRUCTURE}, possible)


def larger(sizes: Keywords, possible: Callable[[Keywords], bool], structures: bool = True) -> Keywords:
    """More than twice each size, in as many places as the task takes together: where lengths are drawn up to a size,
    some of them then pass what a tile for the task's own size can hold. structures: of small sizes too."""
    own = {name: size for name, size in sizes.items() if structures or size > STRUCTURE}
    return together({name: 2 * size + 1 for name, size in own.items()}, possible)


def halved(sizes: Keywords, possible: Callable[[Keywords], bool]) -> Keywords:
    """The sizes of `few_tiles` in as many places as the task takes together."""
    return together({name: half for name, size in sizes.items() if (half := few_tiles(size)) < size}, possible)


def few_tiles(size: int) -> int:
    """The size, halved while it is even and above MOST_HALVED; a multiple of WHOLE stays one."""
    while size > MOST_HALVED and size % 2 == 0 and (size % WHOLE or size // 2 % WHOLE == 0):
        size //= 2
    return size


def together(wanted: dict[str, int | None], possible: Callable[[Keywords], bool]) -> Keywords:
    """As many of these sizes as the task takes together."""
    taken: Keywords = {}
    for name, size in wanted.items():
        if size and possible({**taken, name: size}):
            taken[name] = size
    return taken


def one(name: str, size: int, new: int) -> str:
    """ "requests 4 -> 1" """
    return f"{name} {size} -> {new}"


def small_prime(size: int) -> int | None:
    """The largest of SMALL_PRIMES below `size`."""
    return next((number for number in SMALL_PRIMES if number < size), None)


def prime_below(size: int) -> int:
    """The largest prime below a size above 2."""
    return next(n for n in range(size - 1, 1, -1) if all(n % factor for factor in range(2, int(n**0.5) + 1)))


def beyond(size: int) -> int:
    """One more than the next power of two: a tile for `size` cannot hold it."""
    return (1 << (size - 1).bit_length()) + 1
