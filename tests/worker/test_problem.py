"""The contract, in process: building inputs, binding kernels, counting work, comparing."""

import math

import pytest
import torch
from conftest import REFERENCE, kernel_text
from kernelopt.worker import accuracy, problem, reference_runs, tensor_trees
from kernelopt.worker.contract import ContractError, UnsupportedInput


def reference(tmp_path, text: str = REFERENCE) -> problem.Reference:
    path = tmp_path / "reference_file.py"
    path.write_text(text)
    return problem.Reference(path)


def bound(tmp_path, text: str, case: problem.Case):
    path = tmp_path / "kernel_file.py"
    path.write_text(text)
    return problem.load_kernel(path, case, "cpu")


def test_a_seed_gives_the_same_case_and_another_seed_another(tmp_path):
    oracle = reference(tmp_path)
    a, b, c = (oracle.case("default", seed, None, "cpu") for seed in (1, 1, 2))
    assert torch.equal(a.inputs[0], b.inputs[0]) and torch.equal(a.state["weight"], b.state["weight"])
    assert not torch.equal(a.inputs[0], c.inputs[0]) and not torch.equal(a.state["weight"], c.state["weight"])


def test_a_case_survives_its_file_with_strides_and_dtypes(tmp_path):
    inputs = [torch.randn(4, 6).t(), torch.arange(3), 2.5, [torch.ones(1, dtype=torch.bool)]]
    problem.Case(inputs, ["mean", 3], {}, None).save(tmp_path / "case.pt")
    case = problem.Case.load(tmp_path / "case.pt")
    assert case.inputs[0].stride() == (1, 6) and case.inputs[1].dtype == torch.int64
    assert case.inputs[2] == 2.5 and case.init == ["mean", 3] and case.inputs[3][0].dtype == torch.bool


def test_the_candidate_gets_the_parameters_of_the_reference(tmp_path):
    oracle = reference(tmp_path)
    case = oracle.case("default", 0, "bf16", "cpu")
    kernel = bound(tmp_path, kernel_text(), case)
    assert case.inputs[0].dtype == kernel.weight.dtype == torch.bfloat16
    expected = problem.call(oracle.model(case, "cpu"), case.inputs)
    assert torch.allclose(problem.call(kernel, case.inputs), expected)


KEEPERS = """    __slots__ = ("slot",)
    def state_dict(self, *arguments, **options):
        whole = super().state_dict(*arguments, **options)
        return {name: value for name, value in whole.items() if name != "unsaved"}
"""


@pytest.mark.parametrize(
    ("kept", "place"),
    [
        ("self.sizes, self.name = (3, [4.5, None]), torch.float32", "meta"),
        ('self.register_buffer("table", torch.ones(2))', "meta"),
        ('self.register_buffer("table", torch.arange(2) ** 0.5, persistent=False)', "cpu"),
        ("self.table = torch.arange(2) ** 0.5", "cpu"),
        ("self.tables = {'cos': [torch.ones(2)]}", "cpu"),
        ("noise = torch.rand(2); self.scaled = lambda x: x * noise", "cpu"),
        ("self.inner = nn.RNN(2, 2)", "cpu"),
        ("self.share = torch.rand(1, device='cpu').item()", "cpu"),
        ("self.order = torch.randperm(3, device='cpu').tolist()", "cpu"),
        ("KEPT['table'] = torch.rand(2) * 2", "cpu"),
        ("type(self).table = torch.rand(2)", "cpu"),
        ("self.slot = torch.rand(2)", "cpu"),
        ("self.angles = Angles(2)", "cpu"),
        ('self.register_buffer("unsaved", torch.rand(2))', "cpu"),
        ("self.unsaved = nn.Parameter(torch.rand(2))", "cpu"),
        ("self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))", "meta"),
        ("self.inner = nn.MultiheadAttention(4, 2); self.inner.out_proj.weight = self.inner.in_proj_weight", "meta"),
        ("self.inner = nn.Sequential(nn.Conv2d(2, 2, 1), nn.GELU(), nn.LayerNorm(2))", "meta"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*meta parameter in the current model")
def test_a_model_is_built_on_the_device_where_that_changes_no_number(tmp_path, kept, place):
    """Its parameters are loaded; the device may compute other tensors differently, and draws others."""
    text = REFERENCE.replace("super().__init__()", f"super().__init__(); self.place = DEVICE_OF_NEW(); {kept}")
    text = text.replace("    def __init__", f"{KEEPERS}    def __init__", 1)
    assert KEEPERS in text and kept in text
    text += """
import dataclasses
KEPT, DEVICE_OF_NEW = {}, lambda: torch.empty(0).device.type
@dataclasses.dataclass
class Angles:
    count: int
    def __post_init__(self): self.table = torch.arange(self.count) ** 0.5
"""
    oracle = reference(tmp_path, text)
    assert oracle.model(oracle.case("default", 0, None, "cpu"), "meta").place == place


@pytest.mark.filterwarnings("ignore:.*meta parameter in the current model")
def test_a_model_that_depends_on_the_device_is_built_there_once(tmp_path):
    kept = "super().__init__(); BUILT.append(torch.empty(0).device.type); self.table = torch.ones(2)"
    oracle = reference(tmp_path, "BUILT = []\n" + REFERENCE.replace("super().__init__()", kept))
    case = oracle.case("default", 0, None, "cpu")
    for _ in range(2):
        oracle.model(case, "meta")
    assert oracle.model_class.__init__.__globals__["BUILT"] == ["cpu", "meta", "cpu", "cpu"]


def test_parameters_have_the_sizes_that_a_workload_gives_to_the_inputs(tmp_path):
    oracle = reference(
        tmp_path,
        "import torch, torch.nn as nn\n"
        "class Model(nn.Linear):\n    pass\n"
        "def get_inputs(*, rows=2, width=4): return [torch.randn(rows, width)]\n"
        "def get_init_inputs(*, width=4, out=3): return [width, out]\n"
        'def get_workloads(): return {"wide": {"width": 6}, "other": lambda: [torch.randn(1, 4)]}\n',
    )
    for workload, sizes, width in (("default", {}, 4), ("wide", {}, 6), ("wide", {"width": 5}, 5), ("other", {}, 4)):
        case = oracle.case(workload, 0, None, "cpu", sizes)
        assert case.inputs[0].shape[1] == width and case.state["weight"].shape == (3, width)
        assert problem.call(oracle.model(case, "cpu"), case.inputs).shape[1] == 3


def test_inputs_are_copied_each_time(tmp_path):
    case = reference(tmp_path).case("default", 0, None, "cpu")
    case.placed_inputs("cpu")[0].zero_()
    assert case.inputs[0].abs().sum() > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "neither ModelNew nor kernel_function"),
        ("def kernel_function(x): return x", "has parameters"),
        (kernel_text().replace("self.weight =", "self.other ="), "lacks parameters of Model: weight"),
    ],
)
def test_a_file_that_breaks_the_contract_is_told_so(tmp_path, text, message):
    case = reference(tmp_path).case("default", 0, None, "cpu")
    with pytest.raises(ContractError, match=message):
        bound(tmp_path, text, case)


def compared(actual, oracle, baseline=None, tolerance=1e-4):
    return accuracy.compare(actual, oracle, oracle if baseline is None else baseline, tolerance)


def test_compare_measures_against_the_scale_of_the_result():
    oracle = torch.rand(1000, dtype=torch.float64) * 1e-6
    assert compared(oracle * (1 + 1e-5), oracle).errors.mismatches == 0
    assert compared(oracle * (1 + 1e-3), oracle).errors.mismatches > 0
    zeros = compared(torch.zeros(1000, dtype=torch.float64), oracle)
    assert zeros.errors.mismatches > 900


def test_compare_counts_nan_and_infinity():
    oracle = torch.tensor([1.0, float("nan"), float("inf"), 2.0])
    assert compared(oracle.clone(), oracle).errors.nonfinite == 0
    for wrong in ([1.0, 1.0, float("inf"), 2.0], [1.0, float("nan"), float("-inf"), 2.0], [float("nan")] * 4):
        assert compared(torch.tensor(wrong), oracle).errors.nonfinite > 0


def test_compare_of_integers_is_exact_and_of_shapes_strict():
    oracle = torch.arange(5)
    assert compared(oracle + 0, oracle, tolerance=0.0).errors.mismatches == 0
    off = oracle.clone()
    off[3] += 1
    found = compared(off, oracle, tolerance=0.0)
    assert found.errors.mismatches == 1 and found.errors.first_bad_index == 3
    assert compared(torch.zeros(1, 5), torch.zeros(5)).errors is None


def test_compare_survives_a_scale_of_zero_another_dtype_and_eight_bits():
    zero = torch.zeros(4, dtype=torch.int64)
    wrong = compared(zero + 1, zero, tolerance=0.0)
    assert wrong.errors.mismatches == 4 and wrong.errors.max_rel == accuracy.LARGEST_ERROR
    assert compared(torch.zeros(4), torch.zeros(4, dtype=torch.complex64)).errors is None
    eight = torch.tensor([0.5, 1.0, 2.0]).to(torch.float8_e4m3fn)
    assert compared(eight, eight, tolerance=0.125).errors.mismatches == 0


def test_the_baselines_own_error_widens_the_bound_and_no_further_than_its_cap():
    oracle = torch.ones(8, dtype=torch.float64)
    for error, expected in ((0.0, 1e-4), (1e-4, 1e-4), (3e-4, 3e-4), (1.0, 4e-4)):
        found = compared(oracle, oracle, baseline=oracle * (1 + error), tolerance=1e-4)
        assert found.errors.bound == pytest.approx(expected, rel=1e-3)


def test_tied_weights_are_bound_to_a_kernel_that_ties_them_and_to_one_that_does_not(tmp_path):
    text = """
import torch, torch.nn as nn
class CLASS(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight
    def forward(self, x): return self.b(self.a(x))
def get_inputs(): return [torch.randn(4, 8)]
"""
    case = reference(tmp_path, text.replace("CLASS", "Model")).case("default", 0, "bf16", "cpu")
    kernel = text.replace("CLASS", "ModelNew")
    for one in (kernel, kernel.replace("        self.b.weight = self.a.weight\n", "")):
        (tmp_path / "kernel_file.py").unlink(missing_ok=True)
        problem.load_module.cache_clear()
        found = bound(tmp_path, one, case)
        assert found.a.weight.equal(found.b.weight) and found.b.weight.equal(case.state["a.weight"])


def test_the_structure_of_a_result():
    x = torch.ones(1)
    assert tensor_trees.structure(x) == tensor_trees.structure(3.0) == "tensor"
    assert (
        tensor_trees.structure((x, [x, None])) == tensor_trees.structure([x, (x, None)]) == "[tensor, [tensor, None]]"
    )
    assert (
        tensor_trees.structure({"b": x, "a": None}) == "{'a': None, 'b': tensor}" != tensor_trees.structure([None, x])
    )


def test_a_dict_may_have_numbers_beside_strings_as_keys():
    mixed = {"x": torch.ones(1), 2: torch.zeros(1)}
    assert [int(t) for t in tensor_trees.tensors(mixed)] == [int(t) for t in tensor_trees.input_tensors([mixed])]
    assert tensor_trees.map_tensors(mixed, torch.neg)[2] == 0


@pytest.mark.parametrize("made", ["torch.ones(4, dtype=torch.uint16)", "torch.eye(4).to_sparse()"])
def test_inputs_that_no_kernel_can_be_judged_on_are_no_fault_of_the_reference(tmp_path, made):
    text = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x): return x\n"
    oracle = reference(tmp_path, text + f"def get_inputs(): return [{made}]\n")
    with pytest.raises(UnsupportedInput, match="a limit of this bundle"):
        oracle.case("default", 0, None, "cpu")


def test_arguments_may_be_dataclasses_named_tuples_dtypes_and_none(tmp_path):
    text = """
import collections, dataclasses, torch
@dataclasses.dataclass(frozen=True)
class Pages:
    table: torch.Tensor
    sizes: list
    scale: float = 2.0
Pair = collections.namedtuple("Pair", "left right")
class Model(torch.nn.Module):
    def forward(self, x, pages, pair, dtype, nothing, options):
        return (x[pages.table] * pages.scale + pages.sizes[0] + pair.left).to(dtype)
def get_inputs():
    pages = Pages(torch.tensor([2, 0]), [torch.ones(1), 3])
    return [torch.randn(4, 8), pages, Pair(torch.zeros(1), 1), torch.float16, None, {"a": [None, torch.ones(2)]}]
"""
    oracle = reference(tmp_path, text)
    made = oracle.case("default", 0, None, "cpu")
    made.save(tmp_path / "case.pt")
    case = problem.Case.load(tmp_path / "case.pt")
    _, pages, pair, dtype, nothing, options = case.inputs
    assert type(pages).__name__ == "Pages" and pages.table.tolist() == [2, 0] and pages.scale == 2.0
    assert pages.sizes[0].equal(torch.ones(1)) and pages.sizes[1] == 3 and pair.right == 1 and pair[1] == 1
    assert dtype is torch.float16 and nothing is None and options["a"][0] is None
    assert len(tensor_trees.input_tensors(case.inputs)) == len(tensor_trees.input_tensors(made.inputs)) == 5
    placed = made.placed_inputs("cpu")
    assert placed[1].table is not made.inputs[1].table and placed[1].table.equal(made.inputs[1].table)
    assert problem.call(oracle.model(case, "cpu"), case.inputs).equal(
        problem.call(oracle.model(made, "cpu"), made.inputs)
    )


def test_a_reference_apart_shares_nothing_and_stands_in_for_a_file_that_runs_once_alone(tmp_path):
    path = tmp_path / "reference.py"
    path.write_text("KEPT = []\nclass Model: forward = lambda self, x: KEPT\ndef get_inputs(): return []\n")
    loaded = problem.Reference(path)
    apart = loaded.apart("meta")
    assert apart is loaded.apart("meta") and loaded.apart("cpu") is not apart
    assert apart.model_class().forward(0) is not loaded.model_class().forward(0)
    path.write_text("raise RuntimeError('registered twice')")
    assert loaded.apart("fake") is loaded


DRAWS = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(50.0),
        torch.randperm(50, generator=DRAWS),
        torch.tensor(3),
        torch.rand(40, generator=DRAWS) < 0.5,
        torch.complex(torch.rand(9, generator=DRAWS), torch.rand(9, generator=DRAWS)),
        torch.arange(40.0).to(torch.float8_e4m3fn),
        torch.tensor([1.0, math.nan, -math.inf, 2.0]),
        torch.tensor([1.0, math.nan, -math.inf, 2.0], dtype=torch.float64),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_a_fingerprint_tells_contents_apart_and_is_the_same_in_pieces(monkeypatch, tensor):
    before = tensor.clone()
    own, other = tensor_trees.fingerprint(tensor), torch.cat([tensor[1:], tensor[:1]]) if tensor.dim() else tensor + 2
    assert not tensor_trees.is_same(own, tensor_trees.fingerprint(other))
    monkeypatch.setitem(tensor_trees.PIECES, "cpu", 4)
    assert tensor_trees.fingerprint(tensor) == pytest.approx(own)
    if tensor.is_floating_point():
        assert tensor_trees.is_same(own, tensor_trees.fingerprint(tensor.double() * (1 + 1e-6)))
        assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8))


ROUNDED = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64).bfloat16())
    def forward(self, x):
        {check}
        return {product}
def get_inputs(): return [torch.randn(32, 64, dtype=torch.bfloat16)]
"""


@pytest.mark.parametrize(
    ("product", "check", "precision"),
    [
        ("(x.float() * 3).bfloat16() @ self.weight", "", "fp64"),
        ("(x.float() * 3).to(torch.bfloat16) @ self.weight", "", "fp64"),
        ("x * 3 @ self.weight", "", "fp64"),
        ("x * 3 @ self.weight", "assert x.dtype == torch.bfloat16", "as given"),
    ],
)
def test_the_oracle_leaves_out_conversions_that_keep_a_reference_from_float64(tmp_path, product, check, precision):
    """Otherwise the oracle rounds as PyTorch does, and a right kernel is refused for the sum of both roundings."""
    loaded = reference(tmp_path, ROUNDED.format(product=product, check=check))
    case = loaded.case("default", 0, None, "cpu")
    like = reference_runs.outputs(loaded, case, "cpu")
    (oracle,), name = problem.oracle_outputs(loaded, case, "cpu", like)
    exact = 3 * case.inputs[0].double() @ case.state["weight"].double()
    torch.testing.assert_close(oracle, exact if precision == "fp64" else like[0], rtol=1e-12, atol=1e-12)
    assert name == precision


@pytest.mark.parametrize(
    ("product", "check"),
    [
        ("x.bfloat16() @ self.weight, x - x.bfloat16().float()", ""),  # the rest of a rounding
        ("x.bfloat16() @ self.weight, (1e5 * x).half().isinf()", ""),  # what overflows
        (  # numbers that are drawn in this dtype
            "(x * drawn).bfloat16() @ self.weight",
            "drawn = torch.rand(x.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float32)",
        ),
    ],
)
def test_a_reference_whose_conversions_decide_its_results_keeps_them(tmp_path, product, check):
    text = ROUNDED.replace("torch.randn(32, 64, dtype=torch.bfloat16)", "torch.randn(32, 64)")
    loaded = reference(tmp_path, text.format(product=product, check=check))
    case = loaded.case("default", 0, None, "cpu")
    like = reference_runs.outputs(loaded, case, "cpu")
    outputs, name = problem.oracle_outputs(loaded, case, "cpu", like)
    assert name == "as given" and all(map(torch.equal, outputs, like))


def test_what_a_reference_does_in_place_to_a_converted_input_stays_out_of_the_input(tmp_path):
    """x.float() of an x in float64 would be x itself."""
    product = "(x.float().mul_(3).bfloat16() @ self.weight) + x"
    loaded = reference(tmp_path, ROUNDED.format(product=product, check=""))
    case = loaded.case("default", 0, None, "cpu")
    (oracle,), name = problem.oracle_outputs(loaded, case, "cpu", reference_runs.outputs(loaded, case, "cpu"))
    x = case.inputs[0].double()
    torch.testing.assert_close(oracle, 3 * x @ case.state["weight"].double() + x, rtol=1e-12, atol=1e-12)
    assert name == "fp64"
