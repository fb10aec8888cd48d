"""A constructor's large random tensors, in process."""

import forks_with_torch
import pytest
import torch
from conftest import REFERENCE
from kernelopt.worker import problem
from kernelopt.worker.repeated_draws import DRAWN, LARGE, RepeatedDraws, WatchedBuild

SIZE = (LARGE // 1000 + 1, 1000)


def numbers_drawn(make) -> int:
    """How many random numbers of the CPU's generator `make` takes, as far as DRAWN and multiples of it go."""
    torch.manual_seed(7)
    make()
    following = torch.rand(1)
    for count in range(9):
        torch.manual_seed(7)
        for _ in range(count):
            torch.rand(DRAWN)
        if torch.equal(torch.rand(1), following):
            return count
    return -1


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.rand(SIZE),
        lambda: torch.rand(*SIZE, dtype=torch.bfloat16),
        lambda: torch.empty(SIZE).uniform_(-3, -1),
        lambda: torch.nn.init.xavier_uniform_(torch.empty(SIZE)),
        lambda: torch.randn(SIZE),
        lambda: torch.empty(SIZE).normal_(5, 0.1),
        lambda: torch.nn.Linear(*SIZE).weight.detach(),
        lambda: torch.nn.Embedding(*SIZE).weight.detach(),
    ],
)
def test_a_large_tensor_repeats_few_numbers_of_the_same_distribution(make):
    with RepeatedDraws():
        torch.manual_seed(0)
        made = make()
    torch.manual_seed(0)
    usual, numbers = make(), made.flatten()
    assert made.shape == usual.shape and made.dtype == usual.dtype
    assert torch.equal(numbers[DRAWN : 2 * DRAWN], numbers[:DRAWN])
    assert torch.equal(numbers[3 * DRAWN :], numbers[: len(numbers) - 3 * DRAWN])
    assert not torch.equal(made[0], made[1]) and not torch.equal(made[0], made[999])
    spread = usual.double().std()
    assert abs(made.double().mean() - usual.double().mean()) < 0.01 * spread
    assert abs(made.double().std() - spread) < 0.01 * spread


def test_it_draws_so_few():
    def make():
        with RepeatedDraws():
            torch.rand(SIZE)

    assert numbers_drawn(lambda: torch.rand(2 * DRAWN)) == 2
    assert numbers_drawn(make) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(300, 200),  # small
        lambda: torch.empty(SIZE).t().normal_(),  # not contiguous
        lambda: torch.rand(SIZE, generator=torch.Generator().manual_seed(1)),
        lambda: torch.randperm(1000),
        lambda: torch.randn(SIZE, device="meta").shape,
    ],
)
def test_other_tensors_are_drawn_as_usual(make):
    torch.manual_seed(0)
    usual = make()
    torch.manual_seed(0)
    with RepeatedDraws():
        made = make()
    assert torch.equal(made, usual) if isinstance(made, torch.Tensor) else made == usual


@pytest.mark.parametrize(
    ("make", "has_read"),
    [
        (lambda: torch.rand(3) * 2, False),
        (lambda: torch.rand(3).to(torch.float64), False),
        (lambda: torch.rand(1).item(), True),
        (lambda: float(torch.rand(3).sum()), True),
        (lambda: bool((torch.rand(3) > 2).any()), True),
        (lambda: torch.equal(torch.rand(3), torch.zeros(3)), True),
        (lambda: len(torch.nonzero(torch.rand(9) > 0.5)), True),
        (lambda: torch.ops.aten._to_copy.default(torch.rand(3), device=torch.device("cpu")), True),  # tolist() on a GPU
    ],
)
def test_numbers_that_leave_the_tensors_are_noted(make, has_read):
    """Those that a device draws would differ from those of the CPU, on which the kernel's model is built."""
    with WatchedBuild() as watched:
        make()
    assert watched.has_read is has_read


def test_model_and_kernel_get_the_same_other_numbers_and_the_parameters_of_the_case(tmp_path):
    text = (
        "import torch, torch.nn as nn\n"
        "class NAME(nn.Linear):\n"
        "    def __init__(self, *sizes):\n"
        "        super().__init__(*sizes)\n"
        "        self.noise, self.small = torch.randn(sizes), torch.randn(3)\n"
        f"def get_inputs(): return [torch.randn(2, {SIZE[0]})]\n"
        f"def get_init_inputs(): return {list(SIZE)}\n"
    )
    (tmp_path / "reference.py").write_text(text.replace("NAME", "Model"))
    (tmp_path / "kernel.py").write_text(text.replace("NAME", "ModelNew"))
    oracle = problem.Reference(tmp_path / "reference.py")
    case = oracle.case("default", 0, None, "cpu")
    model, kernel = oracle.model(case, "cpu"), problem.load_kernel(tmp_path / "kernel.py", case, "cpu")
    assert torch.equal(model.noise, kernel.noise) and torch.equal(model.small, kernel.small)
    assert torch.equal(model.noise.flatten()[:DRAWN], model.noise.flatten()[DRAWN : 2 * DRAWN])
    assert torch.equal(model.weight, case.state["weight"]) and torch.equal(kernel.weight, case.state["weight"])
    weight = case.state["weight"].flatten()
    assert not torch.equal(weight[:DRAWN], weight[DRAWN : 2 * DRAWN])  # the case is drawn in full


def test_a_model_is_built_without_importing_torch_dynamo(tmp_path):
    (tmp_path / "reference.py").write_text(REFERENCE)
    code = f"""
import pathlib, sys
from kernelopt.worker import problem
reference = problem.Reference(pathlib.Path({str(tmp_path / "reference.py")!r}))
reference.model(reference.case("default", 0, None, "cpu"), "cpu")
assert "torch._dynamo" not in sys.modules
"""
    done = forks_with_torch.run(code)
    assert done.returncode == 0, done.stdout
