"""Triton kernels that the compiler refuses. Print {name: the compiler's message} as JSON.

The names are those of the sections of gpu-wiki/docs/errors/triton.md, which quotes the messages. Compiled for compute
capability 9.0 or that of CAPABILITIES, without a GPU. x: pointer to fp32; n: int32; B: a constant where it is annotated so."""

import json

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SCALE = 2.0
CAPABILITIES = {"fp8_before_ada": 80}  # 90 elsewhere
LENGTHS = {"range_not_a_power_of_two": 100, "operands_of_two_types": 16}  # of B; 8 elsewhere


@triton.jit
def range_not_a_power_of_two(x, n, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), 1.0)


@triton.jit
def range_of_an_argument(x, n, B: tl.constexpr):
    tl.store(x + tl.arange(0, n), 1.0)


@triton.jit
def operands_of_two_types(x, n, B: tl.constexpr):
    at = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    a = tl.load(x + at)
    tl.store(x + at, tl.dot(a, a.to(tl.bfloat16)))


@triton.jit
def type_that_changes_in_a_loop(x, n, B: tl.constexpr):
    acc = 0
    for i in range(n):
        acc += tl.load(x + i)
    tl.store(x, acc)


@triton.jit
def shapes_of_two_branches(x, n, B: tl.constexpr):
    if n > 1:
        a = 1.0
    else:
        a = tl.zeros([B], tl.float32)
    tl.store(x, a)


@triton.jit
def set_in_one_branch(x, n, B: tl.constexpr):
    if n > 1:
        a = 1.0
    tl.store(x, a)


@triton.jit
def branch_on_a_tile(x, n, B: tl.constexpr):
    a = tl.load(x + tl.arange(0, B))
    if a > 0:
        a = a + 1
    tl.store(x + tl.arange(0, B), a)


@triton.jit
def shapes_that_do_not_broadcast(x, n, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), tl.arange(0, B) + tl.arange(0, 2 * B))


@triton.jit
def element_of_a_tile(x, n, B: tl.constexpr):
    a = tl.load(x + tl.arange(0, B))
    tl.store(x, a[0])


@triton.jit
def break_in_a_loop(x, n, B: tl.constexpr):
    for i in range(n):
        if i > 3:
            break
    tl.store(x, 1.0)


@triton.jit
def continue_in_a_loop(x, n, B: tl.constexpr):
    for i in range(n):
        if i > 3:
            continue
        tl.store(x + i, 1.0)


@triton.jit
def return_in_a_loop(x, n, B: tl.constexpr):
    for _ in range(n):
        return
    tl.store(x, 1.0)


@triton.jit
def global_number(x, n, B: tl.constexpr):
    tl.store(x, SCALE)


def plain_python(value):
    """A function without @triton.jit."""
    return value


@triton.jit
def function_without_jit(x, n, B: tl.constexpr):
    tl.store(x, plain_python(tl.load(x)))


@triton.jit
def other_without_mask(x, n, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), tl.load(x + tl.arange(0, B), other=0.0))


@triton.jit
def tuple_for_a_value(x, n, B: tl.constexpr):
    tl.store(x, (1, 2))


@triton.jit
def unrolled_over_an_argument(x, n, B: tl.constexpr):
    for i in tl.static_range(n):
        tl.store(x + i, 1.0)


@triton.jit
def number_for_a_pointer(x, n, B: tl.constexpr):
    tl.store(n, 1.0)


@triton.jit
def product_of_rank_one(x, n, B: tl.constexpr):
    a = tl.load(x + tl.arange(0, B))
    tl.store(x, tl.dot(a, a))


@triton.jit
def fp8_before_ada(x, n, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), tl.load(x + tl.arange(0, B)).to(tl.float8e4nv).to(tl.float32))


@triton.jit
def tile_that_is_too_large(x, n, B: tl.constexpr):
    tl.store(x + tl.arange(0, B * 65536 * 64), 1.0)


def message_of(kernel, length: int) -> str:
    """What the compiler says of a kernel, or nothing."""
    types = {"x": "*fp32", "n": "i32", "B": "constexpr"}
    target = GPUTarget("cuda", CAPABILITIES.get(kernel.__name__, 90), 32)
    try:
        triton.compile(ASTSource(kernel, types, constexprs={"B": length}), target=target)
    except Exception as error:
        return str(error)
    return ""


if __name__ == "__main__":
    kernels = {name: kernel for name, kernel in globals().items() if isinstance(kernel, triton.JITFunction)}
    print(json.dumps({name: message_of(kernel, LENGTHS.get(name, 8)) for name, kernel in kernels.items()}))
