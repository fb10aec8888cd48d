"""In which 16-bit dtype a result was computed, and what it is without those roundings."""

import pytest
import torch
from kernelopt.worker.roundings import Roundings, Widened

X, W = torch.randn(8, 16), torch.randn(16, 8)


def product(dtype=torch.bfloat16):
    return X.to(dtype) @ W.to(dtype)


def written_by_index():
    made = torch.zeros(2, 8, 8)
    made[1] = product()
    return made.transpose(1, 2)


def added_in_place():
    return torch.zeros(8, 8).add_(product())


@pytest.mark.parametrize(
    ("made", "dtype"),
    [
        (lambda: product().float(), "bf16"),
        (lambda: product(torch.float16).float().softmax(-1), "fp16"),
        (lambda: product(torch.float16).float() + product().float(), "bf16"),
        (lambda: product().float().argmax(-1), "bf16"),
        (lambda: torch.nn.functional.linear(X.half(), W.t().half()).float()[1:], "fp16"),
        (written_by_index, "bf16"),
        (added_in_place, "bf16"),
        (product, None),  # its own dtype says so
        (lambda: product(torch.float16).bfloat16(), None),
        (lambda: X @ W, None),
        (lambda: X.bfloat16().float() @ W, None),  # the numbers given, converted: no kernel rounds them differently
        (lambda: torch.cat([X.half()[:, :4].t().contiguous(), X.half()[:4]], 1).float().exp(), None),
        (lambda: torch.zeros(tuple(X.half().shape)), None),
    ],
)
def test_the_coarsest_dtype_that_a_result_was_computed_in(made, dtype):
    with Roundings() as followed:
        result = made()
    assert followed.of(result) == dtype


def test_memory_that_is_used_anew_tells_nothing_of_its_former_tensor():
    with Roundings() as followed:
        for _ in range(4):
            product()  # its memory is free again
            made = torch.empty(8, 8, dtype=torch.bfloat16).fill_(1)
        result = made.float()  # outside it would not be followed, and may get the memory of a product
    assert followed.of(result) is None


def test_functions_that_map_another_run_as_they_are():
    with Roundings():
        assert torch.equal(torch.func.vmap(lambda row: row.bfloat16() * 2)(X), X.bfloat16() * 2)


def test_compiled_code_is_called_as_it_is():
    compiled = torch.compile(lambda x: (x.half() * 2).float(), backend="eager")
    with Roundings():
        assert torch.equal(compiled(X), (X.half() * 2).float())


def test_conversions_to_fewer_bits_are_left_out():
    x, w = X.double(), W.double()
    right = x @ w
    with Widened(torch.float64):
        for made in (
            (x.half() @ w.to(dtype=torch.bfloat16)).float(),
            torch.matmul(x.type(torch.float32), w.bfloat16()),
            torch.zeros(8, 8, dtype=torch.float32) + x @ w,
        ):
            assert made.dtype == torch.float64 and torch.allclose(made, right, rtol=1e-12)
        assert x.to(torch.float8_e4m3fn).float().equal(x.to(torch.float8_e4m3fn).to(torch.float64))
        assert x.float().view(torch.int64).equal(x.view(torch.int64)) and x.long().dtype == torch.int64
