"""A kernel in place of modules, as an operator: values, gradients, what torch demands of an operator, parameters."""

import copy
from pathlib import Path

import pytest
import torch
from conftest import BUNDLE, IS_TORCH_2_6
from kernelopt.models import cutting
from kernelopt.worker import model_cut, model_put_back, model_swap, problem
from kernelopt.worker.context import Context
from torch.utils.flop_counter import FlopCounterMode

MODELS = BUNDLE / "tests" / "models"
CONTEXT = Context("cpu", {}, None)


def folder_with_cut(folder: Path, model: str, module: str) -> Path:
    """reference.py of a module, and Model itself as kernel.py."""
    report = model_cut.cut(CONTEXT, str(MODELS / model), module, None, None, 1, str(folder), None, None, {})
    text = Path(report.path).read_text()
    (folder / "reference.py").write_text(text)
    (folder / "kernel.py").write_text(text.split("\n\ndef get_inputs")[0].replace("class Model(", "class ModelNew("))
    return folder


@pytest.fixture(scope="module")
def mlp(tmp_path_factory) -> Path:
    return folder_with_cut(tmp_path_factory.mktemp("mlp"), "decoder.py", "layers.1.mlp")


def decoder() -> tuple[torch.nn.Module, list]:
    torch.manual_seed(0)
    file = problem.load_module(MODELS / "decoder.py")
    return file.load(), file.inputs()


def test_all_modules_that_fit_are_replaced_and_the_state_keeps_its_names(mlp):
    model, inputs = decoder()
    expected, names = model(*inputs), list(model.state_dict())
    assert model_swap.into(model, "layers.*.mlp", mlp) is model
    assert torch.equal(model(*inputs), expected) and list(model.state_dict()) == names
    assert all(isinstance(layer.mlp, model_swap.Replacement) for layer in model.layers)


def test_a_module_that_stands_at_several_paths_is_replaced_at_all_of_them(mlp):
    """As put_back.py checks and times it."""
    file, one = problem.load_module(MODELS / "decoder.py"), "layers.0.mlp"
    model = file.load()
    model.layers[1] = model.layers[0]
    assert model_swap.paths(model, one) == [one, "layers.1.mlp"]
    made = model_swap.replacements(model, one, model_swap.Operator(mlp / "kernel.py", mlp / "reference.py"))
    assert len({*made.values()}) == 1
    copied = model_put_back.with_modules(model, made)
    assert not isinstance(model.layers[1].mlp, model_swap.Replacement)
    model_swap.into(model, one, mlp)
    for whole in (copied, model):
        assert all(isinstance(layer.mlp, model_swap.Replacement) for layer in whole.layers)


def test_two_kernels_in_a_model_come_from_files_of_their_own(mlp):
    """Each folder of put_back.py has its own copy of model_swap.py."""
    model, inputs = decoder()
    expected = model(*inputs)
    for one in ("layers.0.mlp", "layers.1.mlp"):
        problem.load_module(Path(model_swap.__file__)).into(model, one, mlp)
    assert torch.allclose(model(*inputs), expected, atol=1e-6)


def test_a_pattern_that_fits_nothing_and_a_module_without_the_parameters_are_refused(mlp):
    model, _ = decoder()
    with pytest.raises(model_swap.NotReplaced, match=r"no module 'layers\.mlp'; modules in 'layers': 0, 1$"):
        model_swap.into(model, "layers.mlp", mlp)
    with pytest.raises(model_swap.NotReplaced, match=r"'layers\.\*\.mpl'; modules in 'layers\.\*': before, "):
        model_swap.into(model, "layers.*.mpl", mlp)
    with pytest.raises(model_swap.NotReplaced, match=r"no module 'layer'; its modules: embedding, "):
        model_swap.into(model, "layer", mlp)
    with pytest.raises(model_swap.NotReplaced, match=r"'norm\.x'; modules in 'norm': none"):
        model_swap.into(model, "norm.x", mlp)
    with pytest.raises(
        model_swap.NotReplaced, match=r"the module lacks 'gate.weight', which Model has; its own are: w"
    ):
        model_swap.into(model, "norm", mlp)


def test_a_module_of_other_sizes_is_refused(mlp):
    """torch would say no more than: Error(s) in loading state_dict for ModelNew."""
    model, _ = decoder()
    model.layers[1].mlp.gate = torch.nn.Linear(32, 48, bias=False)
    with pytest.raises(
        model_swap.NotReplaced,
        match=r"'gate\.weight' is \(48, 32\) in a module that --at takes in, and \(64, 32\) in Model",
    ):
        model_swap.into(model, "layers.*.mlp", mlp)


def test_gradients_are_those_of_the_original(mlp):
    model, inputs = decoder()
    replaced = model_swap.into(copy.deepcopy(model), "layers.*.mlp", mlp)
    for one in (model, replaced):
        one(*inputs).square().mean().backward()
    pairs = zip(model.parameters(), replaced.parameters(), strict=True)
    assert all(torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-7) for a, b in pairs)


def test_the_kernel_is_called_directly_where_nobody_follows_the_call(mlp):
    operator = model_swap.Operator(mlp / "kernel.py", mlp / "reference.py")
    model, (op, calls) = decoder()[0], (operator.op, [])
    operator.op = lambda *arguments: (calls.append(1), op(*arguments))[1]
    state = [model_swap.find(model.layers[0].mlp, name) for name in operator.state]
    arguments = [torch.randn(2, 3, 32), *state]
    with torch.no_grad():
        expected = operator.apply(*arguments)
        assert not calls
        with FlopCounterMode(display=False):
            assert torch.equal(operator.apply(*arguments), expected) and len(calls) == 1
        with torch._subclasses.FakeTensorMode() as fake:
            assert operator.apply(*map(fake.from_tensor, arguments)).shape == expected.shape and len(calls) == 2
    assert torch.equal(operator.apply(*arguments), expected) and len(calls) == 3  # autograd follows it


def test_an_operator_that_writes_in_place_says_so(tmp_path):
    folder = folder_with_cut(tmp_path, "parts.py", "norm")
    operator = model_swap.Operator(folder / "kernel.py", folder / "reference.py", "test_writes")
    assert str(operator.op._opoverload._schema) == (
        "kernelopt::test_writes(Tensor x, Tensor(a1!) residual, Tensor weight) -> Tensor"
    )
    x, residual, weight = (torch.randn(*shape).bfloat16() for shape in ((5, 4), (5, 4), (4,)))
    before = residual.clone()
    operator.op(x, residual, weight)
    assert torch.equal(residual, before + x)
    assert set(torch.library.opcheck(operator.op, (x, residual, weight)).values()) == {"SUCCESS"}


def test_the_kernel_leaves_the_models_random_numbers_as_they_are(mlp):
    """It makes its weights anew in the first call: dropout after it would drop others than in the original."""
    model, inputs = decoder()
    replaced = model_swap.into(copy.deepcopy(model), "layers.*.mlp", mlp)
    drawn = []
    for one in (model, replaced):
        torch.manual_seed(3)
        one(*inputs).sum().backward()
        drawn.append(torch.rand(4))
    assert torch.equal(*drawn)


STATE_KERNEL = """
import torch, torch.nn as nn
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.packed = None
        self.register_load_state_dict_pre_hook(self.pack)
    def pack(self, module, state, prefix, *_):
        self.packed = torch.cat([state.pop(name) for name in ("gate.weight", "up.weight")]), state.pop("down.weight")
    def forward(self, x):
        gate, up = torch.nn.functional.linear(x, self.packed[0]).chunk(2, -1)
        return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, self.packed[1])
"""


def test_a_kernel_that_packs_its_parameters_follows_their_changes(mlp, tmp_path):
    (tmp_path / "reference.py").write_text((mlp / "reference.py").read_text())
    (tmp_path / "kernel.py").write_text(STATE_KERNEL)
    model, inputs = decoder()
    replaced = model_swap.into(copy.deepcopy(model), "layers.*.mlp", tmp_path)
    for one in (model, replaced, model, replaced):
        with torch.no_grad():
            one.result = one(*inputs)
            one.layers[1].mlp.up.weight.mul_(1.5)
    assert torch.allclose(model.result, replaced.result, atol=1e-6)


def test_results_in_one_piece_of_memory_are_parted():
    whole = torch.arange(6.0)
    first, second, same = model_swap.apart([whole[:3], whole[3:], whole], [torch.ones(1)])
    places = {one.untyped_storage().data_ptr() for one in (first, second, same)}
    assert len(places) == 3 and torch.equal(second, torch.tensor([3.0, 4.0, 5.0]))
    (own,) = model_swap.apart([whole.view(2, 3)], [whole])
    assert own.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


SOMETIMES = """
import torch, torch.nn as nn
class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("scale", torch.full((4,), 2.0))
    def forward(self, x, *, factor=3.0):
        return self.drop(self.linear(x) * self.scale * factor)
def load(): return nn.Sequential(Sometimes(), nn.ReLU())
def inputs(): return [torch.randn(2, 1, 4)]
"""
TWICE = """
import torch, torch.nn as nn
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
    def forward(self, x):
        return torch.nn.functional.linear(x, self.linear.weight, self.linear.bias) * self.scale * 3
"""


@pytest.fixture
def sometimes(tmp_path) -> torch.nn.Module:
    """A model whose kernel takes calls with one token only; it is off by one, which tells who was called."""
    (tmp_path / "model.py").write_text(SOMETIMES)
    folder_with_cut(tmp_path, str(tmp_path / "model.py"), "0")
    (tmp_path / "kernel.py").write_text(TWICE.replace("Twice(", "ModelNew(").replace("* 3", "* 3 + 1"))
    torch.manual_seed(0)
    model = problem.load_module(tmp_path / "model.py").load().eval()
    return model_swap.into(model, "0", tmp_path, where="x.shape[1] == 1 and factor == 3.0")


def test_the_original_takes_the_calls_that_do_not_fit(sometimes):
    x, linear = torch.randn(2, 5, 4), sometimes[0].linear
    for made in (sometimes, torch.compile(sometimes, backend="eager", dynamic=True)):
        with torch.no_grad():
            for tokens, added in ((5, 0.0), (1, 1.0), (3, 0.0)):
                part = x[:, :tokens]
                assert torch.allclose(made(part), (linear(part) * 6 + added).relu()), tokens
    assert list(sometimes.state_dict()) == ["0.scale", "0.linear.weight", "0.linear.bias"]


def test_the_original_follows_what_becomes_of_the_model(sometimes):
    """Its mode, its dtype, and buffers that are others then."""
    x = torch.ones(2, 3, 4, dtype=torch.float64)
    sometimes.train().double()
    assert (sometimes(x) == 0).any() and sometimes.eval()(x).dtype == torch.float64
    sometimes[0].scale = torch.zeros(4, dtype=torch.float64)
    assert not sometimes(x).any() and not copy.deepcopy(sometimes)(x).any()


@pytest.mark.parametrize(
    ("where", "message"),
    [("x.shape[", "is no expression of Python"), ("y.shape[0] > 1", "names 'y', and the module's arguments are: x, f")],
)
def test_a_condition_in_other_names_is_refused(sometimes, where, message):
    with pytest.raises(model_swap.NotReplaced, match=message):
        model_swap.condition(where, sometimes[0]._others[0])


@pytest.mark.skipif(IS_TORCH_2_6, reason="opcheck of torch 2.6 fails at index_add_")
def test_sizes_that_follow_from_contents_inside_do_not_reach_the_model(tmp_path):
    """Rows of a mixture of experts: as many as its router says."""
    text = (
        "import torch, torch.nn as nn\n"
        "class Routed(nn.Module):\n    def forward(self, x):\n        rows = torch.where(x[:, 0] > 0)[0]\n"
        "        return torch.zeros_like(x).index_add_(0, rows, x[rows] * 2)\n"
        "def load(): return nn.Sequential(Routed(), nn.ReLU())\ndef inputs(): return [torch.randn(5, 4)]\n"
    )
    (tmp_path / "model.py").write_text(text)
    folder_with_cut(tmp_path, str(tmp_path / "model.py"), "0")
    operator = model_swap.Operator(tmp_path / "kernel.py", tmp_path / "reference.py")
    assert set(torch.library.opcheck(operator.op, (torch.randn(5, 4),)).values()) == {"SUCCESS"}


ASKED = """
import dataclasses
import torch, torch.nn as nn
@dataclasses.dataclass
class Out:
    y: torch.Tensor
class Asked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.width = nn.Linear(4, 4), 4
    @property
    def half(self): return self.width // 2
    def doubled(self, x): return 2 * x
    def forward(self, x): return Out(self.linear(x))
class Top(nn.Module):
    def __init__(self):
        super().__init__()
        self.asked = Asked()
    def forward(self, x):
        y = self.asked(self.asked.doubled(x)).y.view(-1, self.asked.width, 1) if isinstance(self.asked, Asked) else x
        return y * self.asked.half
def load(): return Top()
def inputs(): return [torch.randn(3, 4)]
def workloads(): return {"more": lambda: [torch.randn(5, 4)]}
"""


def test_a_model_may_ask_for_what_its_module_is_and_has(tmp_path):
    """Its class, attributes, properties and methods; and what it returned is of the model's own class."""
    (tmp_path / "model.py").write_text(ASKED)
    folder_with_cut(tmp_path, str(tmp_path / "model.py"), "asked")
    file = problem.load_module(tmp_path / "model.py")
    model, inputs = file.load(), [*file.inputs(), *file.workloads()["more"]()]
    with torch.no_grad():
        expected = [model(one) for one in inputs]
        model_swap.into(model, "asked", tmp_path)
        assert isinstance(model.asked, model_swap.Replacement) and isinstance(model.asked, file.Asked)
        for made in (model, copy.deepcopy(model), torch.compile(model, backend="eager", dynamic=True)):
            assert all(torch.allclose(made(one), right) for one, right in zip(inputs, expected, strict=True))


def test_more_tensors_than_an_operator_takes_are_told_at_the_cut_and_refused(tmp_path):
    text = (
        "import torch, torch.nn as nn\n"
        "class Many(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.parts = nn.ParameterList(nn.Parameter(torch.randn(2)) for _ in range(70))\n"
        "    def forward(self, x):\n        for one in self.parts: x = x + one\n        return x\n"
        "def load(): return nn.Sequential(Many())\ndef inputs(): return [torch.randn(2)]\n"
    )
    (tmp_path / "model.py").write_text(text)
    report = model_cut.cut(CONTEXT, str(tmp_path / "model.py"), "0", None, None, 1, str(tmp_path), None, None, {})
    assert report.tensors == 71 and model_swap.MOST_TENSORS == cutting.MOST_TENSORS
    assert "an operator takes 62 tensors at most" in "\n".join(cutting.lines(cutting.CutProblem(report, "cpu")))
    kernel = Path(report.path).read_text().replace("class Model(", "class ModelNew(")
    (tmp_path / "kernel.py").write_text(kernel)
    with pytest.raises(model_swap.NotReplaced, match=r"the kernel takes 71 tensors, .* 62 at most"):
        model_swap.Operator(tmp_path / "kernel.py", Path(report.path))


class Sealed(torch.nn.Linear):
    def __init_subclass__(cls):
        raise TypeError("no subclass")


class Slotted(torch.nn.Linear):
    __slots__ = ("more",)


@pytest.mark.parametrize("kind", [Sealed, Slotted])
def test_a_module_whose_class_takes_no_other_beside_it_is_replaced_all_the_same(kind):
    made = model_swap.StandIn(kind(2, 2), {})
    assert type(made) is model_swap.StandIn and made.in_features == 2 and made.weight.shape == (2, 2)
