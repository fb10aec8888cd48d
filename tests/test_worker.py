"""The parts that a child process judges with: guard bands, other shapes and layouts, whose kernels ran."""

import pytest
import torch
from kernelopt import intervals, problem, variants
from kernelopt.worker import tracing
from kernelopt.worker.candidate import all_identical, identical
from kernelopt.worker.guards import GuardedAllocation, Guards
from kernelopt.worker.timing import close

PRODUCT = """
import torch
class Model(torch.nn.Module):
    def forward(self, a, b): return a @ b
def get_inputs(): return [torch.randn(300, 64), torch.randn(64, 20)]
"""


@pytest.mark.parametrize("offset", [-1, 12])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "misaligned"])
def test_one_element_beside_a_tensor_breaks_its_guard(offset, layout):
    guards = Guards()
    tensor = guards.memory(torch.empty(3, 4), "cpu", layout)
    assert tensor.isnan().all() and not guards.broken()
    tensor.fill_(1.0)
    assert not guards.broken()
    torch.as_strided(tensor, (1,), (1,), tensor.storage_offset() + offset).fill_(1.0)
    assert guards.broken()


def test_layouts_are_what_their_names_say():
    guards, tensor, row = Guards(), torch.empty(6, 4), torch.empty(5)
    assert guards.memory(tensor, "cpu").stride() == (4, 1)
    assert guards.memory(tensor, "cpu", "transposed").stride() == (1, 6)
    assert guards.memory(row, "cpu", "transposed").stride() == (2,)
    assert guards.memory(tensor, "cpu").data_ptr() % 16 == 0
    assert guards.memory(tensor, "cpu", "misaligned").data_ptr() % 16 == 4


def test_what_torch_allocates_is_guarded_and_what_it_fills_stays_filled():
    guards = Guards()
    with GuardedAllocation(guards, "cpu"):
        empty, like, zeros = torch.empty(4), torch.empty_like(torch.zeros(4)), torch.zeros(4)
        ones = torch.full((4,), 1.0)
    assert empty.isnan().all() and like.isnan().all() and not zeros.any() and bool((ones == 1).all())
    torch.as_strided(zeros, (1,), (1,), zeros.storage_offset() + 4).fill_(1.0)
    assert guards.broken()


def found_variants(tmp_path, text: str) -> dict[str, dict]:
    path = tmp_path / f"reference_{len(list(tmp_path.iterdir()))}.py"  # a file is loaded once in a process
    path.write_text(text)
    reference = problem.Reference(path)
    case = reference.case("default", 0, None, "cpu")
    return {v["name"]: v for v in variants.of_workload(reference, "default", case, full=True)}


def sizes_of(variant: dict) -> set[tuple]:
    return {tuple(change) for change in variant["sizes"]}


def test_sizes_change_in_the_dimensions_that_hang_together(tmp_path):
    found = found_variants(tmp_path, PRODUCT)  # 300 x 64 @ 64 x 20
    assert sizes_of(found["300 -> 1 (input 0, dimension 0)"]) == {(0, 0, 1)}
    assert sizes_of(found["64 -> 1 (input 0, dimension 1)"]) == {(0, 1, 1), (1, 0, 1)}
    assert sizes_of(found["300 -> 127 (input 0, dimension 0)"]) == {(0, 0, 127)}
    assert sizes_of(found["64 -> 61 (input 0, dimension 1)"]) == {(0, 1, 61), (1, 0, 61)}
    assert sizes_of(found["prime sizes"]) == {(0, 0, 127), (0, 1, 61), (1, 0, 61), (1, 1, 13)}
    assert sizes_of(found["block - 1"]) == {(0, 0, 127), (0, 1, 31), (1, 0, 31), (1, 1, 15)}
    assert sizes_of(found["block + 1"]) == {(0, 0, 129), (0, 1, 33), (1, 0, 33), (1, 1, 17)}
    assert sizes_of(found["primes just below"]) == {(0, 0, 293), (0, 1, 61), (1, 0, 61), (1, 1, 19)}
    assert {
        "transposed inputs",
        "input 0 transposed",
        "input 1 transposed",
        "padded inputs",
        "misaligned inputs",
    } <= set(found)
    assert "outer dimensions swapped" not in found


def test_equal_sizes_change_together_unless_the_reference_refuses(tmp_path):
    found = found_variants(tmp_path, PRODUCT.replace("300, 64", "48, 48").replace("64, 20", "48, 48"))
    ones = [sizes_of(variant) for name, variant in found.items() if "-> 1" in name]
    assert ones == [{(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)}]
    layer = "import torch\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    layer += "        self.layer = torch.nn.Linear(64, 8)\n    def forward(self, x): return self.layer(x)\n"
    found = found_variants(tmp_path, layer + "def get_inputs(): return [torch.randn(64, 64)]\n")
    assert [sizes_of(variant) for name, variant in found.items() if "-> 1" in name] == [{(0, 0, 1)}]


def test_a_size_that_the_reference_needs_stays_and_indices_stay_within_theirs(tmp_path):
    linear = PRODUCT.replace("def forward(self, a, b): return a @ b", "def forward(self, a, b): return a @ W @ b")
    linear = linear.replace("import torch", "import torch\nW = torch.ones(64, 64)", 1)
    changed = {change[:2] for variant in found_variants(tmp_path, linear).values() for change in sizes_of(variant)}
    assert changed == {(0, 0), (1, 1)}
    index = PRODUCT.replace("return a @ b", "return a[b]").replace("torch.randn(64, 20)", "torch.arange(299, 20, -1)")
    changed = {change[:2] for variant in found_variants(tmp_path, index).values() for change in sizes_of(variant)}
    assert changed == {(0, 0), (0, 1), (1, 0)}
    case = problem.Case([torch.zeros(300, 64), torch.tensor([299, 127, 5, -100])], [], {}, None)
    assert variants.of_case(case, variants.variant("small", [[0, 0, 127]])).inputs[1].tolist() == [55, 5, 5, -100]
    assert variants.of_case(case, variants.variant("small", [[0, 1, 61]])).inputs[1].tolist() == [299, 127, 5, -100]


def test_rows_with_an_index_each_change_however_large_they_are_together(tmp_path):
    losses = "import torch\nclass Model(torch.nn.Module):\n"
    losses += (
        "    def forward(self, x, targets): return torch.nn.functional.cross_entropy(x, targets, reduction='none')\n"
    )
    losses += "def get_inputs(): return [torch.zeros(9000, 2000), torch.full((9000,), 1999)]\n"  # 72 MB
    found = found_variants(tmp_path, losses)
    assert sizes_of(found["prime sizes"]) == {(0, 0, 127), (1, 0, 127), (0, 1, 127)}
    assert sizes_of(found["9000 -> 1 (input 0, dimension 0)"]) == {(0, 0, 1), (1, 0, 1)}


def test_a_case_is_cut_to_its_first_elements_and_gets_other_values():
    case = problem.Case([torch.arange(12.0).view(4, 3), 7], [], {}, None)
    cut = variants.of_case(case, variants.variant("small", [[0, 0, 2]]))
    assert cut.inputs[0].tolist() == [[0, 1, 2], [3, 4, 5]] and cut.inputs[1] == 7
    signs = variants.of_case(case, variants.variant("signs", [], values="mixed signs")).inputs[0]
    assert signs.abs().equal(case.inputs[0]) and (signs < 0).any() and (signs > 0).any()
    below = variants.of_case(case, variants.variant("below", [], values="nothing positive")).inputs[0]
    above = variants.of_case(case, variants.variant("above", [], values="nothing negative")).inputs[0]
    assert below.equal(-case.inputs[0].abs()) and above.equal(case.inputs[0].abs())
    large = variants.of_case(case, variants.variant("large", [], values="64 times the inputs")).inputs[0]
    assert large.equal(64 * case.inputs[0])


def test_large_inputs_are_not_copied_at_full_size():
    assert variants.just_below([torch.empty(1 << 14, 1 << 13, device="meta")])(1 << 14) == 8191
    assert variants.just_below([torch.empty(300, 20)])(300) == 293


def test_results_are_the_same_or_close():
    nan = torch.tensor([1.0, float("nan")])
    assert identical(nan, nan.clone()) and not identical(nan, torch.tensor([1.0, 2.0]))
    assert not all_identical([nan], [nan, nan]) and not identical(nan, nan.double())
    values = torch.randn(1000)
    assert close(values, values + 1e-3) and not close(values, values.roll(1)) and close(values[:0], values[:0])


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("softmax_kernel", "own"),
        ("void scale<float>(float const*, float*)", "own"),
        ("kernel_cutlass_add_kernel_0", "own"),  # CuteDSL's own prefix
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "library"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_nn_n_tilesize128x128x64", "library"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(...)", "library"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel>", "library"),
        ("triton_per_fused__softmax_0", "library"),
        ("Memcpy DtoD (Device -> Device)", "moving"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "moving"),
    ],
)
def test_a_kernels_name_says_whose_it_is(name, origin):
    """Names of the kind that CUPTI gives."""
    assert tracing.origin(name, set(), set()) == origin


def test_what_torch_launched_is_its_own_whatever_the_name():
    assert (
        tracing.origin("scale", {"scale"}, set()) == "library" and tracing.origin("scale", set(), {"scale"}) == "moving"
    )


def test_a_span_reaches_over_streams_and_pauses_and_busy_time_counts_neither():
    kernels = [{"start_us": 10.0, "us": 5.0}, {"start_us": 12.0, "us": 9.0}, {"start_us": 100.0, "us": 1.0}]
    assert (intervals.span_us(kernels), intervals.busy_us(kernels)) == (91.0, 12.0)
    assert (intervals.span_us([]), intervals.busy_us([])) == (0.0, 0.0)


def test_sizes_grow_beyond_a_tile_and_equal_sizes_part_where_the_reference_allows_it(tmp_path):
    found = found_variants(tmp_path, PRODUCT)  # 300 x 64 @ 64 x 20
    assert sizes_of(found["300 -> 513 (input 0, dimension 0)"]) >= {(0, 0, 513)}
    assert sizes_of(found["64 -> 65 (input 0, dimension 1)"]) >= {(0, 1, 65), (1, 0, 65)}
    found = found_variants(tmp_path, PRODUCT.replace("300, 64", "48, 48").replace("64, 20", "48, 48"))
    parts = [sizes_of(variant) for name, variant in found.items() if "others of its size stay" in name]
    assert {(0, 0, 31)} in parts and {(0, 1, 31), (1, 0, 31)} in parts and {(1, 1, 31)} in parts
    found = found_variants(tmp_path, PRODUCT.replace("300, 64", "1, 300, 64"))
    assert (0, 0, 2) in sizes_of(found["batch of 2 (input 0)"])


def test_what_is_more_than_the_inputs_comes_again_with_other_values():
    case = problem.Case([torch.tensor([[1.0], [2.0]]), torch.tensor([3, 4])], [], {}, None)
    grown = variants.of_case(case, variants.variant("grown", [[0, 0, 5], [1, 0, 3]])).inputs
    assert grown[0].flatten().tolist() == [1, 2, 0.75, 1.5, 0.5625] and grown[1].tolist() == [3, 4, 3]


def test_a_view_is_copied_as_it_lies_and_an_expanded_one_densely():
    half = torch.arange(12.0).view(2, 6)[:, :3]
    for made in (problem.place(half, "cpu"), problem.place(half.mT, "cpu").mT):
        assert made.stride() == (6, 1) and made.equal(half) and made.data_ptr() != half.data_ptr()
    assert problem.place(torch.ones(3, 1).expand(3, 4), "cpu").stride() == (4, 1)
    assert problem.memory_like(half, "meta").stride() == (6, 1)


def test_whole_numbers_are_compared_as_such():
    exact = torch.tensor([2**62, 5])
    found = problem.compare(exact + torch.tensor([1, 0]), exact, exact, 0.0)
    assert found["mismatches"] == 1 and problem.compare(exact, exact, exact, 0.0)["mismatches"] == 0


def test_one_sum_near_zero_is_held_against_the_usual_size_of_the_output():
    exact = torch.tensor([1e-3], dtype=torch.float64)
    off = exact.float() + 5e-7
    found = [problem.compare(off, exact, exact.float(), 1e-4, usual)["mismatches"] for usual in (0.0, 10.0)]
    assert found == [1, 0]
    assert problem.compare(off + 0.01, exact, exact.float(), 1e-4, 10.0)["mismatches"] == 1


def test_what_a_view_holds_counts_with_its_gaps():
    half = torch.arange(12.0).view(2, 6)[:, :3]
    assert problem.held_bytes([problem.place(half, "cpu")]) == 9 * 4 and half.nbytes == 6 * 4


def test_sizes_are_varied_in_another_dtype_too(tmp_path):
    layer = "import torch\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    layer += "        self.layer, self.state = torch.nn.Linear(64, 64), torch.nn.LSTM(64, 64)\n        self.again = self.layer\n"
    layer += "    def forward(self, x): return self.state(self.again(x))[0]\n"
    (tmp_path / "reference.py").write_text(layer + "def get_inputs(): return [torch.randn(300, 64)]\n")
    reference = problem.Reference(tmp_path / "reference.py")
    model, *_ = reference.build("default", 0, "bf16", "cpu")
    assert model.again.weight is model.layer.weight and model.layer.weight.dtype == torch.bfloat16
    found = variants.of_workload(reference, "default", reference.case("default", 0, "bf16", "cpu"), full=True)
    assert any(variant["sizes"] for variant in found)
