"""Parts cut out of a model: what the reference says of them, and that a cut which is not the same is refused."""

import ast
import shutil
from pathlib import Path

import pytest
import torch
from conftest import BUNDLE, IS_TORCH_2_6
from kernelopt.worker import model_cut, problem, reference_runs
from kernelopt.worker.context import Context
from kernelopt.worker.contract import NotCut, WrongModelFile

MODELS = BUNDLE / "tests" / "models"
CONTEXT = Context("cpu", {}, None)


def cut(folder: Path, module: str, between=None, model: str = "parts.py", workload=None, inputs=None, call=1):
    return model_cut.cut(CONTEXT, str(MODELS / model), module, between, workload, call, str(folder), None, inputs, {})


# module, operators from and to: MUTATES, results, the keywords of get_inputs
PARTS = [
    ("cache", None, ["cache"], 0, {"cache_dim0": 9, "cache_dim1": 4, "keys_dim0": 2}),
    ("norm", None, ["residual"], 1, {"x_dim0": 5}),
    ("views", None, ["x"], 1, {"x_dim0": 5, "x_dim1": 4}),
    ("state", None, [], 2, {"x_dim0": 5}),
    ("top", None, [], 2, {"x_dim0": 5, "x_dim1": 4}),
    ("views", ["add_", "relu"], ["x"], 1, {"x_dim0": 5, "x_dim1": 4}),
    ("norm", ["to", "mul"], [], 1, {"add_dim0": 5}),
    ("norm", ["square", "mul_"], ["to"], 0, {"to_dim0": 5}),
]


@pytest.mark.parametrize("module, between, mutates, results, sizes", PARTS)
def test_views_and_writes_in_place_are_cut_and_proved(tmp_path, module, between, mutates, results, sizes):
    report = cut(tmp_path, module, between)
    assert (report.mutates, report.results, report.sizes) == (mutates, results, sizes)
    assert [(proof.workload, proof.equal) for proof in report.proofs] == [("default", True), ("six", True)]
    reference = problem.Reference(Path(report.path))
    assert reference.declarations.to_json() == ({"mutates": mutates} if mutates else {})
    model, inputs, _ = reference.build("default", 0, None, "cpu")
    assert [[name, list(one.shape)] for name, one in zip(reference.declarations.parameters, inputs, strict=True)] == [
        [name, shape] for name, _, shape, _ in report.inputs
    ]
    problem.call(model, inputs)


def test_places_that_are_written_to_are_different_ones(tmp_path):
    """Two numbers for one slot of a cache: which of them stays is not defined."""
    reference = problem.Reference(Path(cut(tmp_path, "cache").path))
    for seed in range(20):
        _, inputs, _ = reference.build("default", seed, None, "cpu", {"keys_dim0": 6})
        assert inputs[2].unique().numel() == 6 and inputs[2].min() >= 1 and inputs[2].max() <= 7
    with pytest.raises(ValueError, match="fewer places"):
        reference.build("default", 0, None, "cpu", {"keys_dim0": 8})


def test_parameters_have_the_models_names_and_numbers_like_its_own(tmp_path):
    report = cut(tmp_path, "layers.1", model="decoder.py")
    own = problem.load_module(MODELS / "decoder.py").Decoder().get_submodule("layers.1")
    model, _, _ = problem.Reference(Path(report.path)).build("default", 0, None, "cpu")
    wanted = {**own.state_dict(), "attention.frequencies": own.attention.frequencies}
    assert {name: one.shape for name, one in model.state_dict().items()} == {n: one.shape for n, one in wanted.items()}
    assert model.mlp.up.weight.std().item() == pytest.approx(own.mlp.up.weight.std().item(), rel=0.1)
    assert torch.equal(model.attention.frequencies, own.attention.frequencies)
    assert report.workloads == ["default", "long"] and report.sizes == {"x_dim0": 2, "x_dim1": 7}


def test_members_with_numbers_for_names_are_written_so_that_python_reads_them(tmp_path):
    text = (
        "class Own(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.scales = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])\n"
        "        self.parts = nn.ModuleList([nn.Linear(4, 4)])\n"
        "    def forward(self, x): return self.parts[0](x * self.scales[1])\n"
        "def load(): return nn.Sequential(Own())\n"
    )
    report = cut(tmp_path, "0", model=write_model(tmp_path, text + ONE_INPUT))
    model, inputs, _ = problem.Reference(Path(report.path)).build("default", 0, None, "cpu")
    assert set(model.state_dict()) == {"scales.1", "parts.0.weight", "parts.0.bias"}
    problem.call(model, inputs)


def test_a_constant_is_written_out_exactly_or_refused(tmp_path):
    text = (
        "class Own(nn.Module):\n"
        "    def forward(self, x): return x + torch.tensor([0.5, 3.0, 1.0, 2.0]) + torch.tensor(MANY)[:4]\n"
        "def load(): return nn.Sequential(Own())\n"
    )
    fine = write_model(tmp_path, text.replace("MANY", "[2.0] * 100") + ONE_INPUT)
    report = cut(tmp_path, "0", model=fine)
    model, _, _ = problem.Reference(Path(report.path)).build("default", 7, None, "cpu")
    assert model.constant_0.tolist() == [0.5, 3.0, 1.0, 2.0] and model.constant_1.tolist() == [2.0] * 100
    for many in ("list(map(float, reversed(range(100))))", "[1.0, 2.0, 2.0, 1.0] * 50"):
        (tmp_path / many[:4]).mkdir()
        odd = write_model(tmp_path / many[:4], text.replace("MANY", many) + ONE_INPUT)
        with pytest.raises(NotCut, match="let the module hold it as a buffer"):
            cut(tmp_path / many[:4], "0", model=odd)


def test_the_reference_also_runs_in_float64(tmp_path):
    """The oracle does, so a cast to the model's own dtype must follow the inputs."""
    reference = problem.Reference(Path(cut(tmp_path, "norm").path))
    case = reference.case("default", 0, None, "cpu")
    like = reference_runs.outputs(reference, case, "cpu")
    outputs, name = problem.oracle_outputs(reference, case, "cpu", like)
    assert name == "fp64" and {one.dtype for one in outputs} == {torch.float64}


def test_sizes_at_which_the_model_takes_another_way_are_no_case(tmp_path):
    report = cut(tmp_path, "odd")
    assert [proof.equal for proof in report.proofs] == [True, False] and report.workloads == ["default"]
    reference = problem.Reference(Path(report.path))
    if "x_dim0" not in report.sizes:  # older torch does not tell when the model takes another way
        return
    reference.build("default", 0, None, "cpu", {"x_dim0": 7})
    with pytest.raises(ValueError, match="another way"):
        reference.build("default", 0, None, "cpu", {"x_dim0": 8})


LOOP = """
class Last(nn.Module):
    def forward(self, x):
        h = x[:, 0]
        for at in range(1, x.shape[1]):
            h = h * 0.5 + x[:, at]
        return h
def load(): return nn.Sequential(Last(), nn.ReLU())
def inputs(): return [torch.randn(2, 6, 4)]
"""


@pytest.mark.skipif(IS_TORCH_2_6, reason="torch 2.6 does not tell on which sizes the way through a module depends")
def test_a_call_of_sizes_that_the_cut_is_not_made_for_is_refused(tmp_path):
    """A loop over time has as many turns as were recorded: more tokens would be left out without a word."""
    call = problem.load_module(Path(cut(tmp_path, "0", model=write_model(tmp_path, LOOP)).path)).call
    assert call(lambda x: x, None, torch.ones(3, 6, 4)).shape == (3, 6, 4)
    with pytest.raises(
        ValueError, match=r"cut out of a call with x\.shape\[1\] == 6; put_back\.py --where 'x\.shape\["
    ):
        call(lambda x: x, None, torch.ones(3, 9, 4))
    folder = tmp_path / "odd"
    folder.mkdir()
    odd = cut(folder, "odd")
    if "x_dim0" in odd.sizes:  # older torch does not tell when the model takes another way
        with pytest.raises(ValueError, match="cut out of a call with"):
            problem.load_module(Path(odd.path)).call(lambda x: x, None, torch.ones(6, 4))


HALVES = """
class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
    def forward(self, x):
        first, second = x.chunk(2, -1)
        return first * self.norm(second)
def load(): return nn.Sequential(Halves(), nn.ReLU())
def inputs(): return [torch.randn(3, 5, 16)]
"""


def test_a_size_that_its_conditions_leave_one_value_is_fixed(tmp_path):
    report = cut(tmp_path, "0", model=write_model(tmp_path, HALVES))
    assert report.sizes == {"x_dim0": 3, "x_dim1": 5}
    text = Path(report.path).read_text()
    assert "x_dim2" not in text and text.count("required(") == 2  # its definition, and the size
    assert "required(x.shape[2] == 16, 'x.shape[2] == 16')" in text


WINDOWS = """
class Windows(nn.Module):
    def forward(self, x):
        b, h, d = x.shape
        return x.view(b, h // 4, 4, d).transpose(1, 2).reshape(-1, 2, d // 2).softmax(1).view(b, h, d)
def load(): return nn.Sequential(Windows(), nn.ReLU())
def inputs(): return [torch.randn(2, 8, 4)]
"""


def test_all_conditions_on_sizes_count_where_one_of_them_is_an_alternative(tmp_path):
    """a and b == 512 or b % 512 == 0 and c: without brackets c alone would do."""
    report = cut(tmp_path, "0", model=write_model(tmp_path, WINDOWS))
    text = Path(report.path).read_text()
    tests = [node.test for node in ast.walk(ast.parse(text)) if isinstance(node, ast.If) and "x_dim" in ast.dump(node)]
    assert all(isinstance(test.operand, ast.Compare) or isinstance(test.operand.op, ast.And) for test in tests)
    assert IS_TORCH_2_6 or " or " in text


def test_a_size_of_1_is_left_open_where_another_workload_has_more(tmp_path):
    text = "class Twice(nn.Module):\n    def forward(self, x): return x.view(x.shape[0], -1) * 2\n"
    text += "def load(): return nn.Sequential(Twice(), nn.ReLU())\ndef inputs(): return [torch.randn(1, 4, 3)]\n"
    text += "def workloads(): return {'two': lambda: [torch.randn(2, 5, 3)]}\n"
    report = cut(tmp_path, "0", model=write_model(tmp_path, text))
    assert report.sizes == {"x_dim0": 1, "x_dim1": 4, "x_dim2": 3} and report.workloads == ["default", "two"]
    assert "# float32 (1, 12)" in Path(report.path).read_text()


def test_a_size_of_1_is_left_open_in_the_call_around_a_chain_too(tmp_path):
    text = "class Flat(nn.Module):\n    def forward(self, x): return (x.exp() * 2).view(x.shape[0], -1) + 1\n"
    text += "def load(): return nn.Sequential(Flat(), nn.ReLU())\ndef inputs(): return [torch.randn(1, 4, 3)]\n"
    text += "def workloads(): return {'two': lambda: [torch.randn(2, 5, 3)]}\n"
    report = cut(tmp_path, "0", ["exp", "mul"], model=write_model(tmp_path, text))
    assert [proof.equal for proof in report.proofs] == [True, True] and report.workloads == ["default", "two"]


@pytest.mark.skipif(IS_TORCH_2_6, reason="torch 2.6 names the operators alike")
def test_operators_that_have_other_names_at_size_1_are_the_same_chain(tmp_path):
    """torch.export leaves a slice of all out at size 1, and numbers what comes after it otherwise."""
    text = "class Own(nn.Module):\n    def forward(self, x): return ((x * 2)[:, None] * 3).exp() * 5\n"
    text += "def load(): return nn.Sequential(Own(), nn.ReLU())\ndef inputs(): return [torch.randn(1, 4)]\n"
    text += "def workloads(): return {'two': lambda: [torch.randn(2, 4)]}\n"
    model = write_model(tmp_path, text)
    named = [
        [one["name"] for one in model_cut.operators(CONTEXT, model, "0", workload)["operators"]]
        for workload in ("default", "two")
    ]
    report = cut(tmp_path, "0", ["mul_1", "exp"], model=model)
    assert named[0] != named[1] and report.workloads == ["default", "two"] and 1 in report.sizes.values()


def test_a_chain_is_cut_by_the_names_of_its_own_workload(tmp_path):
    """Where a workload with more sizes above 1 runs other operators, those names would mean others."""
    text = "class Own(nn.Module):\n    def forward(self, x): return (x * 2 if x.shape[0] == 1 else x * 3 * 5) * 7\n"
    text += "def load(): return nn.Sequential(Own(), nn.ReLU())\ndef inputs(): return [torch.randn(1, 4)]\n"
    text += "def workloads(): return {'two': lambda: [torch.randn(2, 4)]}\n"
    report = cut(tmp_path, "0", ["mul_1", "mul_1"], model=write_model(tmp_path, text))
    assert "mul.Tensor(mul, 7)" in Path(report.path).read_text() and report.inputs[0][2] == [1, 4]


def test_a_workload_that_leaves_an_argument_out_is_told_so(tmp_path):
    text = "class Own(nn.Module):\n    def forward(self, x, mask): return x if mask is None else x.masked_fill(mask, 0.0)\n"
    text += "class Top(nn.Module):\n    def __init__(self):\n        super().__init__(); self.own = Own()\n"
    text += "    def forward(self, x, mask=None): return self.own(x, mask)\ndef load(): return Top()\n"
    text += "def inputs(): return [torch.randn(3, 4), torch.zeros(3, 4, dtype=torch.bool)]\n"
    text += "def workloads(): return {'bare': lambda: [torch.randn(3, 4)]}\n"
    report = cut(tmp_path, "own", model=write_model(tmp_path, text))
    assert [proof.why for proof in report.proofs] == [None, "the call lacks mask is not None"]


RESIZED = """
class Resize(nn.Module):
    def forward(self, x, *, skip=None, scale=1.0):
        y = x.relu() * scale
        return y if skip is None else y + skip
class Top(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = Resize()
    def forward(self, x):
        y = self.own(self.own(x), scale=0.5)
        return self.own(self.own(y, skip=y, scale=2.0)[:1]) + self.own(y[:, :3]).sum()
def load(): return Top()
def inputs(): return [torch.randn(2, 4)]
"""


def test_a_module_that_is_called_in_several_forms_is_cut_in_one_of_them(tmp_path):
    """Calls of the same form and other sizes are workloads; the original takes those of another form."""
    model = write_model(tmp_path, RESIZED)
    (tmp_path / "third").mkdir()
    report, third = cut(tmp_path, "own", model=model), cut(tmp_path / "third", "own", model=model, call=3)
    (proof,) = report.proofs
    assert (proof.equal, proof.calls, proof.left, proof.condition) == (True, 3, 2, "scale == 1.0 and skip is None")
    assert report.workloads == ["default", "call_4", "call_5"] and report.sizes == {"x_dim0": 2, "x_dim1": 4}
    reference = problem.Reference(Path(report.path))
    assert [reference.build(name, 0, None, "cpu")[1][0].shape for name in report.workloads] == [(2, 4), (1, 4), (2, 3)]
    assert [name for name, *_ in third.inputs] == ["x", "skip"] and third.proofs[0].calls == 1
    with pytest.raises(NotCut, match="the model calls 'own' 5 times in workload 'default', so there is no --call 6"):
        cut(tmp_path, "own", model=model, call=6)


def test_another_way_in_another_call_of_a_step_is_asked_for(tmp_path):
    text = (
        "class Own(nn.Module):\n    def forward(self, x): return x + 1 if x.shape[0] > 2 else x * 2\n"
        "class Top(nn.Module):\n    def __init__(self):\n        super().__init__(); self.own = Own()\n"
        "    def forward(self, x): return self.own(x).sum() + self.own(x[:2])\ndef load(): return Top()\n"
    )
    with pytest.raises(NotCut, match=r"Does one of the 2 calls in a step take another way than the others\?"):
        cut(tmp_path, "own", model=write_model(tmp_path, text + ONE_INPUT))


def test_a_tensor_inside_an_argument_that_another_call_leaves_out_is_named(tmp_path):
    text = (
        "class Own(nn.Module):\n    def forward(self, pair): return pair[0] if pair[1] is None else pair[0] * pair[1]\n"
        "class Top(nn.Module):\n    def __init__(self):\n        super().__init__(); self.own = Own()\n"
        "    def forward(self, x): return self.own((x, x)) + self.own([x, None])\ndef load(): return Top()\n"
    )
    (proof,) = cut(tmp_path, "own", model=write_model(tmp_path, text + ONE_INPUT)).proofs
    assert (proof.calls, proof.left, proof.condition) == (1, 1, "pair[1] is not None")


def test_a_scripted_module_is_refused_and_spoils_no_other(tmp_path):
    text = (
        "class Own(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.script, self.plain = torch.jit.script(nn.Sequential(nn.ReLU())), nn.Linear(4, 4)\n"
        "    def forward(self, x): return self.script(self.plain(x) if x.sum() < 99 else x)\n"
        "def load(): return nn.Sequential(Own())\n"
    )
    model = write_model(tmp_path, text + ONE_INPUT)
    with pytest.raises(NotCut, match=r"is a module of torch\.jit\.script"):
        cut(tmp_path, "0.script", model=model)
    with pytest.raises(NotCut, match=r"inside it these can be cut: --module 0\.plain$"):
        cut(tmp_path, "0", model=model)


def test_another_workload_is_cut_on_its_own(tmp_path):
    report = cut(tmp_path, "odd", workload="six")
    assert report.inputs[0][2] == [6, 4] and report.workloads == ["default"]


REFUSED = {
    "count": "a size or a branch depends on the contents of a tensor",
    "noise": "draws random numbers that no kernel can repeat",
    "alias": "lie in the same memory, and it changes one of them",
    "opaque": "the argument tool is an object of class Tool",
    "exported": "the model's outputs differ by",
    "unused": "the model does not call 'unused' by its forward in workload 'default'; cut a module around it",
}


@pytest.mark.parametrize("module", REFUSED)
def test_a_part_that_cannot_be_cut_out_is_refused_with_a_sentence(tmp_path, module):
    with pytest.raises(NotCut, match=REFUSED[module]):
        cut(tmp_path, module)


def test_a_branch_on_contents_is_named_with_its_line(tmp_path):
    text = (
        "class Routed(nn.Module):\n    def forward(self, x):\n        rows = torch.where(x[:, 0] > 0)[0]\n"
        "        return x if rows.numel() == 0 else x[rows].sum(0, keepdim=True) + x\n"
        "def load(): return nn.Sequential(Routed())\n"
    )
    with pytest.raises(NotCut, match=r"depends on the contents of a tensor \(.*model\.py:5.*; no module inside it can"):
        cut(tmp_path, "0", model=write_model(tmp_path, text + ONE_INPUT))


EXPERTS = """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 3), nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
    def forward(self, x):
        chosen, y = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            SKIP
            y.index_add_(0, rows, expert(x[rows]))
        return y
def load(): return nn.Sequential(Experts(), nn.ReLU())
def inputs(): return [torch.randn(2, 4)]
def workloads(): return {"more": lambda: [torch.randn(9, 4)]}
"""


def test_a_mixture_of_experts_is_cut_as_a_whole_whatever_the_routing(tmp_path):
    report = cut(tmp_path, "0", model=write_model(tmp_path, EXPERTS.replace("SKIP", "pass")))
    assert [proof.equal for proof in report.proofs] == [True, True] and report.sizes == {"x_dim0": 2}


def test_where_a_branch_on_the_routing_stops_the_cut_the_parts_inside_are_named(tmp_path):
    model = write_model(tmp_path, EXPERTS.replace("SKIP", "if not len(rows): continue"))
    said = r"model\.py:\d+.*inside it these can be cut: --module 0\.experts\.\d \(one of \d\), --module 0\.router$"
    with pytest.raises(NotCut, match=said):
        cut(tmp_path, "0", model=model)


def test_the_operators_of_a_module_are_listed():
    listed = model_cut.operators(CONTEXT, str(MODELS / "decoder.py"), "layers.1.mlp", None)["operators"]
    assert [one["name"] for one in listed] == ["linear", "silu", "linear_1", "mul", "linear_2"]
    assert listed[2] == {
        "name": "linear_1",
        "operator": "aten.linear.default",
        "origin": "up (Linear)",
        "dtype": "float32",
        "shape": [2, 7, 64],
    }


def test_one_of_several_results_is_an_operator_of_its_own():
    listed = model_cut.operators(CONTEXT, str(MODELS / "decoder.py"), "layers.1.attention", None)["operators"]
    assert {one["operator"] for one in listed if one["name"].startswith("getitem")} == {"getitem"}


def test_the_ends_of_a_chain_must_be_operators_in_order(tmp_path):
    for between, message in ((["mul", "to"], "runs after"), (["mul", "none"], "there is no operator 'none'")):
        with pytest.raises(NotCut, match=message):
            cut(tmp_path, "norm", between)


SCORES = """
class Own(nn.Module):
    def forward(self, x):
        scores = x @ x.t()
        scores.mul_(0.5)
        later = (x + 1).t()
        return scores.softmax(-1) @ later.t()
def load(): return nn.Sequential(Own())
"""


def test_a_tensor_that_nobody_reads_afterwards_is_no_result(tmp_path):
    """A kernel that kept the scores in registers would have to write them for nothing."""
    model = write_model(tmp_path, SCORES + ONE_INPUT)
    report = cut(tmp_path, "0", ["mul_", "softmax"], model=model)
    assert report.mutates == [] and report.proofs[0].equal
    reference = problem.Reference(Path(report.path))
    own, inputs, _ = reference.build("default", 0, None, "cpu")
    before = inputs[0].clone()
    problem.call(own, inputs)
    assert reference.declarations.to_json() == {} and torch.equal(inputs[0], before)


CACHE = """
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 8, 4))
        self.register_buffer("count", torch.zeros(2))
    def forward(self, x, shift, at):
        self.keys.index_copy_(1, at, 5 + x)
        self.count.add_(1)
        return self.keys.sum(1) + shift + self.count[0]
def load(): return nn.Sequential(Own())
class Top(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = Own()
    def forward(self, x): return self.own(x, torch.zeros(2, 4), torch.tensor([3]))
def load(): return Top()
def inputs(): return [torch.randn(2, 1, 4)]
"""


def test_an_empty_cache_is_filled_and_an_input_of_one_value_is_named(tmp_path):
    """A kernel that leaves the cache or the shift out would be right on zeros."""
    report = cut(tmp_path, "own", model=write_model(tmp_path, CACHE))
    model, _, _ = problem.Reference(Path(report.path)).build("default", 0, None, "cpu")
    assert 4 < model.keys.mean() < 6 and model.keys.std() > 0.3 and model.keys.unique().numel() > 50
    assert not model.count.any() and report.constant == ["shift"]


def test_parameters_that_were_never_trained_are_drawn_around_their_value(tmp_path):
    """A kernel that leaves the ones of a norm's weight out, or the zeros of its bias, is wrong once it is trained."""
    model = write_model(
        tmp_path, "def load(): return nn.Sequential(nn.LayerNorm(400))\n" + ONE_INPUT.replace("4, 4", "4, 400")
    )
    made, _, _ = problem.Reference(Path(cut(tmp_path, "0", model=model).path)).build("default", 0, None, "cpu")
    for one, value in ((made.weight, 1.0), (made.bias, 0.0)):
        assert one.mean().item() == pytest.approx(value, abs=0.03) and 0.05 < one.std() < 0.15


def test_a_chain_of_views_alone_is_no_work(tmp_path):
    with pytest.raises(NotCut, match=r"only make views.*; add an operator that computes"):
        cut(tmp_path, "0", ["t_1", "t_1"], model=write_model(tmp_path, SCORES + ONE_INPUT))


def test_a_chain_that_only_writes_to_what_the_module_holds_has_no_result(tmp_path):
    with pytest.raises(NotCut, match=r"only write to what the module holds \('seen'\)"):
        cut(tmp_path, "state", ["mean", "add_"])
    assert cut(tmp_path, "state", ["mean", "mul"]).proofs[0].equal


def test_operators_that_could_drop_numbers_and_drop_none_are_not_random(tmp_path):
    text = (
        "class Own(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.cells, self.drop = nn.LSTM(4, 4, batch_first=True), nn.Dropout(0.5)\n"
        "    def forward(self, x):\n        y = self.drop(self.cells(x[None])[0])\n"
        "        return nn.functional.scaled_dot_product_attention(y, y, y)\n"
        "def load(): return nn.Sequential(Own())\n"
    )
    assert cut(tmp_path, "0", model=write_model(tmp_path, text + ONE_INPUT)).proofs[0].equal
    with pytest.raises(NotCut, match="draws random numbers"):
        cut(tmp_path, "0", model=write_drawing(tmp_path, text))


def write_drawing(folder: Path, text: str) -> str:
    (folder / "drawing").mkdir()
    drawing = text.replace("y, y, y)", "y, y, y, dropout_p=0.5)") + ONE_INPUT
    return write_model(folder / "drawing", drawing)


def write_model(folder: Path, text: str) -> str:
    (folder / "model.py").write_text("import torch, torch.nn as nn\n" + text)
    return str(folder / "model.py")


WRONG_FILES = {
    "x = 1": "defines no load()",
    "def load(): return 3": "returns no torch.nn.Module but 3",
    "def load(): return nn.ReLU()": r"must define inputs\(\), or workloads\(\)",
    "def load(): return nn.ReLU()\ndef inputs(): return torch.ones(3)": "returns a Tensor; return a list",
    "def load(): return nn.Linear(3, 3)\ndef inputs(): return [torch.ones(4)]": "model.py failed while running the model, workload default: RuntimeError",
    "def load(): return torch.compile(nn.ReLU())\ndef inputs(): return [torch.ones(3)]": r"load\(\) of model.py returns a compiled model; return it as it is",
    "def load(): return nn.Sequential(torch.compile(nn.ReLU()))\ndef inputs(): return [torch.ones(3)]": "in which '0' is compiled",
    "def load(): raise OSError('no weights')": r"load\(\) failed: OSError: no weights",
}


@pytest.mark.parametrize("text", WRONG_FILES)
def test_a_wrong_file_is_told_what_it_lacks(tmp_path, text):
    with pytest.raises(WrongModelFile, match=WRONG_FILES[text]):
        cut(tmp_path, "", model=write_model(tmp_path, text))


def test_a_model_that_remembers_proves_nothing(tmp_path):
    text = "import sys; sys.path.insert(0, '')\n" + (MODELS / "parts.py").read_text()
    model = write_model(tmp_path, f"{text}\ndef load(): return nn.Sequential(Counting(), nn.ReLU())\n" + ONE_INPUT)
    with pytest.raises(NotCut, match="two runs of the model on equal inputs differ"):
        cut(tmp_path, "1", model=model)


def test_a_buffer_that_each_call_binds_anew_is_named(tmp_path):
    text = (
        "class Own(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('last', torch.zeros(4, 4))\n"
        "    def forward(self, x):\n        self.last = torch.cat([self.last[1:], x[:1]])\n        return x + self.last\n"
        "def load(): return nn.Sequential(Own())\n"
    )
    with pytest.raises(NotCut, match=r"binds 'last' to another tensor.*: self\.last\.copy_\("):
        cut(tmp_path, "0", model=write_model(tmp_path, text + ONE_INPUT))


ONE_INPUT = "def inputs(): return [torch.randn(4, 4)]\ndef workloads(): return {}\n"


OWN_CLASSES = {
    "dict": "class Out(dict):\n    def __init__(self, x): super().__init__(x=x); self.x = x\n",
    "dataclass with an __init__ of its own": "import dataclasses\n@dataclasses.dataclass\nclass Out:\n    x: torch.Tensor\n"
    "    def __init__(self, y): self.x = y\n",
}


@pytest.mark.parametrize("kind", OWN_CLASSES)
def test_results_in_a_class_of_the_users_own_are_refused(tmp_path, kind):
    text = (
        f"{OWN_CLASSES[kind]}class Own(nn.Module):\n    def forward(self, x): return Out(x * 2)\n"
        "class Top(nn.Module):\n    def __init__(self):\n        super().__init__(); self.own = Own()\n"
        "    def forward(self, x): return self.own(x).x\n"
        "def load(): return Top()\n"
    )
    with pytest.raises(NotCut, match="returns an object of class Out"):
        cut(tmp_path, "own", model=write_model(tmp_path, text + ONE_INPUT))


def test_dataclasses_and_named_tuples_are_returned_as_such(tmp_path):
    text = (
        "import dataclasses, typing\n"
        "@dataclasses.dataclass\nclass Out:\n    x: torch.Tensor\n    none: object = None\n    step: int = 0\n"
        "class Pair(typing.NamedTuple):\n    out: Out\n    y: torch.Tensor\n"
        "class Own(nn.Module):\n    def forward(self, x): return Pair(Out(x * 2, step=3), x + 1)\n"
        "class Top(nn.Module):\n    def __init__(self):\n        super().__init__(); self.own = Own()\n"
        "    def forward(self, x):\n        pair = self.own(x)\n        return pair.out.x * pair.out.step + pair.y\n"
        "def load(): return Top()\n"
    )
    report = cut(tmp_path, "own", model=write_model(tmp_path, text + ONE_INPUT))
    assert report.proofs[0].equal and report.results == 2


def test_arguments_stay_positional_or_keywords(tmp_path):
    """A wrapper that looks at its keywords would get one twice."""
    text = (
        "class Own(nn.Module):\n"
        "    def forward(self, *args, scale=None, **rest): return args[0] * args[1] * scale + rest['more']\n"
        "class Top(nn.Module):\n    def __init__(self):\n        super().__init__(); self.own = Own()\n"
        "    def forward(self, x): return self.own(x, x + 1, scale=x + 2, more=x + 3)\n"
        "def load(): return Top()\n"
    )
    report = cut(tmp_path, "own", model=write_model(tmp_path, text + ONE_INPUT))
    assert [name for name, *_ in report.inputs] == ["args_0", "args_1", "scale", "rest_more"]


def test_real_inputs_become_workloads_that_are_never_quite_the_same(tmp_path):
    report = cut(tmp_path, "norm", inputs=str(tmp_path / "inputs.pt"))
    assert report.workloads == ["default", "six", "recorded_default", "recorded_six"]
    shutil.copyfile(Path(report.path).with_name("inputs.pt"), tmp_path / "inputs.pt")
    reference = problem.Reference(Path(report.path))
    first, second = (reference.build("recorded_six", seed, None, "cpu")[1] for seed in (0, 1))
    assert [one.shape for one in first] == [(6, 4), (6, 4)] and not torch.equal(first[0], second[0])
    assert torch.allclose(first[0].float(), second[0].float(), rtol=0.7)
    (tmp_path / "inputs.pt").write_bytes(b"others")
    with pytest.raises(ValueError, match="is not the file"):
        reference.build("recorded_six", 0, None, "cpu")
