"""The checks of a model with a kernel in it, and the limit on what torch.compile may take."""

import contextlib
import copy
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernelopt.worker import model_cut, model_profile, model_put_back, model_steps, model_swap
from kernelopt.worker.context import Context
from kernelopt.worker.contract import NotCut, WrongModelFile
from kernelopt.worker.model_file import ModelFile

CACHED = """
import torch, torch.nn as nn

class Cached(nn.Module):
    writes = True
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.register_buffer("cache", torch.zeros(2, 20, 16))
    def forward(self, tokens, position):
        new = self.embedding(tokens)
        if self.writes:
            self.cache.index_copy_(1, position, new)
        return self.head(self.cache.sum(1, keepdim=True) + new)

def load(): return Cached()
def inputs(): return [torch.randint(0, 50, (2, 1)), torch.tensor([3])]
"""
ADVANCE = "def advance(inputs, tokens): return [tokens[:, None], inputs[1] + 1]\n"
TOLERANCES = {"fp32": 1e-4}
CONTEXT = Context("cpu", {}, None)


def cached(tmp_path, text: str, name: str = "model.py") -> ModelFile:
    (tmp_path / name).write_text(text)
    return ModelFile(tmp_path / name, "cpu")


def test_greedy_tokens_of_a_model_with_a_cache_come_from_a_cache_of_its_own(tmp_path):
    """A kernel that leaves the cache as it was must not profit from what the original wrote there."""
    file = cached(tmp_path, CACHED + ADVANCE)
    before = file.module.cache.clone()
    same, forgetful = copy.copy(file.module), copy.copy(file.module)
    forgetful.writes = False
    assert model_put_back.Judge(file, same, {}, TOLERANCES).tokens(6).detail == "6 of 6 equal"
    assert model_put_back.Judge(file, forgetful, {}, TOLERANCES).tokens(6).passed is False
    assert file.module.cache.equal(before)
    same.forward = lambda *_: 1 / 0
    assert "ZeroDivisionError" in model_put_back.Judge(file, same, {}, TOLERANCES).tokens(6).detail


def test_more_tokens_than_a_cache_holds_are_told_with_a_number_that_fits(tmp_path):
    file = cached(tmp_path, CACHED + ADVANCE)
    with pytest.raises(
        WrongModelFile, match=r"index 20 is out of bounds.*at token 18 of 30; --generate 17 compares fewer"
    ):
        model_put_back.Judge(file, file.module, {}, TOLERANCES).tokens(30)


def test_without_advance_the_tokens_grow(tmp_path):
    text = CACHED.replace("self.cache.index_copy_(1, position, new)", "pass").replace("[3])]", "[3.0])]")
    file = cached(tmp_path, text)
    assert model_put_back.Judge(file, file.module, {}, TOLERANCES).tokens(2).passed
    file = cached(tmp_path, text.replace("[3.0]", "[[3, 4]]"), "two.py")
    with pytest.raises(WrongModelFile, match=r"or advance\(inputs, tokens\) in two\.py"):
        model_put_back.Judge(file, file.module, {}, TOLERANCES).tokens(2)


def stubborn(module):
    """Like a compiler that goes on after any exception."""
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


def test_a_way_of_running_that_is_not_ready_in_time_is_left_out():
    times = model_profile.against_eager(SimpleNamespace(slow=stubborn), "slow", lambda: None, None, 1, 0.1)
    assert times.failed == "it was not ready after 0 s" and times.after_us == []
    times = model_steps.compared_way(stubborn, None, None, 1, 0.1)
    assert times.failed == "the original fails: it was not ready after 0 s"


TRAINED = """
import torch, torch.nn as nn
def load(): return nn.Sequential(nn.Linear(4, 4), nn.ReLU())
def inputs(): return [torch.randn(2, 4)]
"""


@pytest.mark.parametrize("training", [True, False])
def test_opcheck_tries_gradients_in_training_alone(tmp_path, monkeypatch, training):
    """torch 2.13 dies of a GroupNorm over channels_last whose weights alone get gradients, on a CPU."""
    cached(tmp_path, TRAINED)
    folder, model = str(tmp_path), str(tmp_path / "model.py")
    text = Path(model_cut.cut(CONTEXT, model, "0", None, None, 1, folder, None, None, {}).path).read_text()
    (tmp_path / "cut.py").write_text(text)
    (tmp_path / "kernel.py").write_text(text.replace("class Model(", "class ModelNew("))
    operator = model_swap.Operator(tmp_path / "kernel.py", tmp_path / "cut.py")
    file = ModelFile(tmp_path / "model.py", "cpu", training)
    made = model_swap.replacements(file.module, "0", operator)
    tried = []
    monkeypatch.setattr(torch.library, "opcheck", lambda op, given, **_: tried.extend(given) or {})
    model_put_back.Judge(file, model_put_back.with_modules(file.module, made), made, TOLERANCES).operator(operator)
    assert len(tried) == 3 and any(one.requires_grad for one in tried) is training


CHAIN = """
import torch, torch.nn as nn
class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return torch.sigmoid(self.linear(x)) * x
def load(): return nn.Sequential(nn.Linear(4, 4), Chain())
def inputs(): return [torch.randn(2, 4)]
"""


def test_opcheck_passes_where_one_input_was_made_from_another(tmp_path):
    """x, and linear(x): the first backward pass of the check must not go on into the model and free its graph."""
    cached(tmp_path, CHAIN)
    folder, model, between = str(tmp_path), str(tmp_path / "model.py"), ["sigmoid", "mul"]
    text = Path(model_cut.cut(CONTEXT, model, "1", between, None, 1, folder, None, None, {}).path).read_text()
    (tmp_path / "cut.py").write_text(text)
    (tmp_path / "kernel.py").write_text(text.replace("class Model(", "class ModelNew("))
    operator = model_swap.Operator(tmp_path / "kernel.py", tmp_path / "cut.py")
    file = ModelFile(tmp_path / "model.py", "cpu", training=True)
    made = model_swap.replacements(file.module, "1", operator)
    judge = model_put_back.Judge(file, model_put_back.with_modules(file.module, made), made, TOLERANCES)
    check = judge.operator(operator)
    assert check.passed, check.detail


def test_gradients_of_a_kernel_that_writes_in_place_are_refused_with_what_to_do(tmp_path):
    cached(tmp_path, CACHED)
    folder, model = str(tmp_path), str(tmp_path / "model.py")
    text = Path(model_cut.cut(CONTEXT, model, "", None, None, 1, folder, None, None, {}).path).read_text()
    (tmp_path / "reference.py").write_text(text)
    (tmp_path / "kernel.py").write_text(text.replace("class Model(", "class ModelNew("))
    with pytest.raises(NotCut, match=r"writes to 'cache' in place, .* leave --training out, or cut with --between"):
        model_put_back.put_back(CONTEXT, model, folder, "", None, None, True, 0, TOLERANCES, None, 1.0, 1.0)


def test_the_original_takes_the_calls_that_do_not_fit_and_a_check_says_so(tmp_path):
    workloads = "def workloads(): return {'wide': lambda: [torch.randn(3, 4)]}\n"
    file = cached(tmp_path, TRAINED + workloads)
    folder, model = str(tmp_path), str(tmp_path / "model.py")
    text = Path(model_cut.cut(CONTEXT, model, "0", None, None, 1, folder, None, None, {}).path).read_text()
    (tmp_path / "cut.py").write_text(text)
    (tmp_path / "kernel.py").write_text(
        text.replace("class Model(", "class ModelNew(").replace(
            "(self, input):", "(self, input):\n        assert len(input) == 2"
        )
    )
    operator = model_swap.Operator(tmp_path / "kernel.py", tmp_path / "cut.py")

    def judged(where):
        made = model_swap.replacements(file.module, "0", operator, where)
        judge = model_put_back.Judge(file, model_put_back.with_modules(file.module, made), made, TOLERANCES)
        return judge, judge.outputs()

    judge, checks = judged(None)
    assert [one.passed for one in checks] == [True, False] and judge.left_out == []
    with pytest.raises(WrongModelFile, match="--where fails in workload default: AttributeError"):
        judged("input.size.none == 2")
    judge, checks = judged("input.shape[0] == 2")
    assert [one.passed for one in checks] == [True, True] and judge.left_out == ["wide"]
    assert checks[1].detail.startswith("the original takes 1 of 1 calls; ")
    assert operator.workload == "default" and judge.calls == {"default": 1, "wide": 0}


def test_a_backward_pass_that_the_model_itself_has_not_is_its_own_fault(tmp_path):
    text = "class Own(nn.Module):\n    def forward(self, x): return x.exp().mul_(x)\n"
    text = TRAINED.replace("def load", text + "def load").replace("nn.ReLU()", "Own()")
    cached(tmp_path, text)
    file = ModelFile(tmp_path / "model.py", "cpu", training=True)
    with pytest.raises(WrongModelFile, match="the backward pass failed: RuntimeError: one of the variables"):
        model_put_back.Judge(file, file.module, {}, TOLERANCES).gradients()


def swapped(
    folder, text: str, kernel: str, training: bool = False, at: str = "0", own: float | None = None, between=None
) -> model_put_back.Judge:
    """A judge of a model whose part at `at` was cut out; kernel: changes `old -> new` to the text of the cut."""
    file = cached(folder, text)
    model = str(folder / "model.py")
    made = model_cut.cut(CONTEXT, model, at.replace("*", "0"), between, None, 1, str(folder), None, None, {})
    source = Path(made.path).read_text()
    (folder / "cut.py").write_text(source)
    old, new = kernel.split(" -> ") if kernel else ("", "")
    assert old in source
    (folder / "kernel.py").write_text(source.replace(old, new).replace("class Model(", "class ModelNew("))
    operator = model_swap.Operator(folder / "kernel.py", folder / "cut.py")
    file = ModelFile(folder / "model.py", "cpu", training)
    made = model_swap.replacements(file.module, at, operator)
    return model_put_back.Judge(file, model_put_back.with_modules(file.module, made), made, TOLERANCES, None, own)


COUNTING = """
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(4))
    def forward(self, x):
        with torch.no_grad():
            self.seen.mul_(3)
        return x * self.seen
"""


def test_gradients_leave_the_wider_model_as_it_was(tmp_path):
    """Else the original is far off it afterwards, and twice that error would let any compiled kernel pass."""
    text = TRAINED.replace("nn.ReLU()", "Counting()").replace("def load", COUNTING + "def load")
    judge = swapped(tmp_path, text, "", training=True)
    (before,) = judge.outputs()
    assert judge.gradients().passed and "where 0.0001 is allowed" in before.detail
    assert judge.outputs() == [before] and "where 0.0001 is allowed" in judge.compiled(60).detail


NOISY = "class Noisy(nn.Module):\n    def forward(self, x): return x + torch.rand_like(x)\n"


@pytest.mark.parametrize(("kernel", "right"), [("", True), ("return linear -> return linear * 1.05", False)])
@pytest.mark.parametrize("after", ["nn.Dropout(0.5)", "Noisy()"])
def test_a_model_that_draws_random_numbers_is_compared_with_itself_alone(tmp_path, after, kernel, right):
    """In a wider dtype it draws others, and twice that error would let any kernel pass."""
    text = TRAINED.replace("nn.ReLU()", after).replace("def load", NOISY + "def load")
    judge = swapped(tmp_path, text, kernel, training=True)
    assert [one.passed for one in judge.outputs()] == [right]
    assert judge.gradients().passed is right


SHIFTED = """
import torch, torch.nn as nn
class Window(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(3, 4))
    def forward(self, x):
        self.last[:-1] = self.last[1:].clone()
        self.last[-1] = x
        return self.last.mean(0) + x
def load(): return nn.Sequential(Window(), nn.ReLU())
def inputs(): return [torch.randn(4)]
"""


FORGETS = "torch.ops.aten.copy_.default(slice_2, clone) -> slice_2.clone()"


@pytest.mark.parametrize(("kernel", "right"), [("", True), (FORGETS, False)])
def test_a_model_that_remembers_is_compared_once_something_is_in_its_memory(tmp_path, kernel, right):
    """All zeros at first, the window looks the same wherever it is shifted."""
    judge = swapped(tmp_path, SHIFTED, kernel)
    assert [one.passed for one in judge.outputs()] == [right] and judge.each_call().passed is right
    assert judge.calls == {"default": 1}


def test_buffers_that_a_run_binds_anew_are_the_former_ones_afterwards(tmp_path):
    text = SHIFTED.replace("self.last[:-1] = self.last[1:].clone()", "self.last = torch.cat([self.last[1:], x[None]])")
    file = cached(tmp_path, text.replace("self.register", 'self.register_buffer("none", None)\n        self.register'))
    first, second = (file.left_by(file.module, "default") for _ in range(2))
    names = ["output 0 of a first run", "output 0", "input 0 afterwards", "buffer 0.last afterwards"]
    assert [*first] == names and all(map(torch.equal, first.values(), second.values()))
    assert not file.module[0].last.any()


RESIDUAL = """
import torch, torch.nn as nn
class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), factor
        self.register_buffer("seen", torch.zeros(4))
    def forward(self, x, shift=None):
        self.seen.add_(x.mean(0))
        return self.linear(x) * self.factor + (0 if shift is None else shift)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Scale(factor) for factor in FACTORS)
    def forward(self, x):
        for part in self.parts: x = 1e4 * x + part(x)
        return x
def load(): return Net()
def inputs(): return [torch.randn(2, 4)]
"""


def test_a_small_error_that_goes_under_in_the_model_is_found_in_the_call_itself(tmp_path):
    judge = swapped(tmp_path, RESIDUAL.replace("FACTORS", "(1.0, 1.0)"), "1.0) -> 1.01)", at="parts.*")
    assert [one.passed for one in judge.outputs()] == [True]
    assert judge.calls == {"default": 2}  # in a step, though a model that remembers runs twice
    check = judge.each_call()
    assert (check.name, check.passed) == ("each call by itself", False)
    assert check.detail.startswith(
        "call 1 of parts.0 in workload default: 100 % of output 0 is off by more than 0.0001"
    )


def test_a_call_may_be_as_far_off_as_the_session_lets_the_kernel_be(tmp_path):
    judge = swapped(tmp_path, RESIDUAL.replace("FACTORS", "(1.0, 1.0)"), "1.0) -> 1.01)", at="parts.*", own=0.02)
    assert judge.outputs()[0].passed and judge.each_call().passed


def test_the_call_of_a_module_that_is_made_in_another_way_is_named(tmp_path):
    judge = swapped(tmp_path, RESIDUAL.replace("FACTORS", "(1.0, 1.01)"), "", at="parts.*")
    assert judge.outputs()[0].passed and judge.each_call().detail.startswith("call 1 of parts.1 in workload default: ")


def test_each_call_starts_from_the_buffers_of_the_original(tmp_path):
    judge = swapped(tmp_path, RESIDUAL.replace("FACTORS", "(1.0, 1.0)"), "", at="parts.*")
    judge.outputs()
    assert judge.each_call().detail == "4 calls in 1 workload, off by 0 at most, where 0.0001 is allowed"
    (tmp_path / "more").mkdir()
    forgets = "torch.ops.aten.add_.Tensor(self.seen, mean) -> self.seen + mean"
    judge = swapped(tmp_path / "more", RESIDUAL.replace("FACTORS", "(1.0, 1.0)"), forgets, at="parts.*")
    judge.outputs()
    assert "of buffer seen afterwards is off" in judge.each_call().detail


def test_what_a_module_computes_in_training_alone_is_told(tmp_path):
    """A cut is of the model in evaluation."""
    text = TRAINED.replace("nn.Linear(4, 4)", "nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))")
    judge = swapped(tmp_path, text, "", training=True)
    assert [one.passed for one in judge.outputs()] == [False]
    assert "it is right for the module in evaluation" in judge.each_call().detail


@pytest.mark.parametrize(("kernel", "right"), [("", True), ("return relu -> return relu * 1.05", False)])
def test_dropout_beside_a_chain_drops_in_training(tmp_path, kernel, right):
    """It was recorded in evaluation."""
    dropping = "nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5))"
    text = TRAINED.replace("nn.Linear(4, 4)", dropping)
    judge = swapped(tmp_path, text, kernel, training=True, between=["linear", "relu"])
    assert [one.passed for one in judge.outputs()] == [right]
    assert judge.each_call().passed is right and judge.gradients().passed is right
