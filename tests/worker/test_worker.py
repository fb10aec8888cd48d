"""The parts that a child process judges with: guard bands, other shapes and layouts, whose kernels ran."""

import os
import signal
import socket
import subprocess
import time

import forks_with_torch
import pytest
import torch
from kernelopt import intervals
from kernelopt.case_types import Variant
from kernelopt.worker import (
    accuracy,
    case_maker,
    faults,
    preparing,
    problem,
    server,
    state,
    tensor_trees,
    variant_inputs,
    variants,
)
from kernelopt.worker.guards import GuardedAllocation, Guards
from kernelopt.worker.state import all_identical, identical
from kernelopt.worker.timed_calls import close


def test_a_child_is_confined_before_cuda_starts_and_says_last_that_it_is_ready(monkeypatch):
    """Landlock binds only threads that are made later, and CUDA makes some."""
    done = []
    monkeypatch.setattr(server.landlock, "confine", lambda folders: done.append(folders))
    monkeypatch.setattr(server, "_require_gpu", lambda: done.append("CUDA"))
    monkeypatch.setitem(server.jobs.IMPORTS, "check", lambda: done.append("imports"))
    monkeypatch.setitem(server.jobs.WARM_UPS, "check", done.append)
    monkeypatch.setattr(server.os, "write", lambda line, _: done.append(line))
    server._get_ready(7, "check", "cuda", True, ["/open"])
    server._get_ready(7, "run", "cpu", False, ["/open"])
    assert done == [["/open"], "imports", "CUDA", "cuda", 7, 7]


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_server_hears_at_once_that_its_child_ended_or_its_parent_hung_up(is_refused, monkeypatch):
    def refused(_):
        raise OSError("as an older Linux, or a sandbox")

    if is_refused:
        monkeypatch.setattr(os, "pidfd_open", refused)
    parent, control = socket.socketpair()
    child = subprocess.Popen(["sleep", "600"])
    try:
        with server._news_of(child.pid, control) as next_news:
            began = time.monotonic()
            assert not next_news(0.2)
            assert is_refused or time.monotonic() - began > 0.19  # else it looks every 10 ms
            child.send_signal(signal.SIGTERM)
            assert not next_news(30)
            parent.close()
            assert next_news(30)
        assert time.monotonic() - began < 20
        assert is_refused or os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    finally:
        child.kill()
        child.wait()
        control.close()


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


def test_what_lies_beside_one_tensor_breaks_the_guard_of_another():
    """An unmasked load and store carry the bytes beside an input into those beside an output."""
    for fill in (0xFF, 0):
        guards = Guards()
        guards.fill = fill
        inputs = [guards.memory(torch.empty(4), "cpu", number=number) for number in (0, 1)]
        output = guards.like(torch.empty(4), "cpu")
        assert not guards.broken()
        beside = [tensor.as_strided((1,), (1,), tensor.storage_offset() + 4) for tensor in (*inputs, output)]
        beside[2].copy_(beside[0])
        assert guards.broken()
    beside[1].copy_(beside[0] * 2)
    assert guards.broken()


def test_arithmetic_beside_an_input_breaks_its_guard():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        guards = Guards()
        tensor = guards.memory(torch.empty(4, dtype=dtype), "cpu", number=100)
        beside = tensor.as_strided((1,), (1,), tensor.storage_offset() + 4)
        assert beside.isnan()
        beside.mul_(2)
        assert guards.broken()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.bool])
@pytest.mark.parametrize("layout", ["contiguous", "padded"])
def test_the_gaps_of_an_input_are_guarded(layout, dtype):
    guards, wide = Guards(), torch.empty(3, 12, dtype=dtype)
    tensor = guards.memory(wide[:, :4] if layout == "contiguous" else wide, "cpu", layout)
    tensor.fill_(1.0)
    assert not guards.broken()
    tensor.as_strided((1,), (1,), tensor.storage_offset() + tensor.shape[1] + 1).fill_(1)
    assert guards.broken()


def test_padded_inputs_of_one_shape_have_rows_of_other_lengths():
    guards = Guards()
    pitches = [guards.memory(torch.empty(3, 4), "cpu", "padded", number).stride(0) for number in range(3)]
    assert len(set(pitches)) == 3 and all(pitch % 8 == 4 for pitch in pitches)


def test_what_torch_allocates_is_guarded_and_what_it_fills_stays_filled():
    guards = Guards()
    with GuardedAllocation(guards, "cpu"):
        empty, like, zeros = torch.empty(4), torch.empty_like(torch.zeros(4)), torch.zeros(4)
        ones = torch.full((4,), 1.0)
    assert empty.isnan().all() and like.isnan().all() and not zeros.any() and bool((ones == 1).all())
    torch.as_strided(zeros, (1,), (1,), zeros.storage_offset() + 4).fill_(1.0)
    assert guards.broken()


def found_variants(tmp_path, text: str) -> dict[str, Variant]:
    path = tmp_path / f"reference_{len(list(tmp_path.iterdir()))}.py"  # a file is loaded once in a process
    path.write_text(text)
    reference = problem.Reference(path)
    case = reference.case("default", 0, None, "cpu")
    return {v.name: v for v in variants.of_workload(reference, "default", case, full=True)}


def sizes_of(variant: Variant) -> set[tuple]:
    return {tuple(change) for change in variant.sizes}


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
    assert variant_inputs.of_case(case, Variant("small", [[0, 0, 127]])).inputs[1].tolist() == [55, 5, 5, -100]
    assert variant_inputs.of_case(case, Variant("small", [[0, 1, 61]])).inputs[1].tolist() == [
        299,
        127,
        5,
        -100,
    ]


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
    cut = variant_inputs.of_case(case, Variant("small", [[0, 0, 2]]))
    assert cut.inputs[0].tolist() == [[0, 1, 2], [3, 4, 5]] and cut.inputs[1] == 7
    signs = variant_inputs.of_case(case, Variant("signs", [], values="mixed signs")).inputs[0]
    assert signs.abs().equal(case.inputs[0]) and (signs < 0).any() and (signs > 0).any()
    below = variant_inputs.of_case(case, Variant("below", [], values="nothing positive")).inputs[0]
    above = variant_inputs.of_case(case, Variant("above", [], values="nothing negative")).inputs[0]
    assert below.equal(-case.inputs[0].abs()) and above.equal(case.inputs[0].abs())
    large = variant_inputs.of_case(case, Variant("large", [], values="64 times the inputs")).inputs[0]
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


def test_a_span_reaches_over_streams_and_pauses_and_busy_time_counts_neither():
    kernels = [(10.0, 5.0), (12.0, 9.0), (100.0, 1.0)]
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
    grown = variant_inputs.of_case(case, Variant("grown", [[0, 0, 5], [1, 0, 3]])).inputs
    assert grown[0].flatten().tolist() == [1, 2, 0.75, 1.5, 0.5625] and grown[1].tolist() == [3, 4, 3]


def test_a_view_is_copied_as_it_lies_and_an_expanded_one_densely():
    half = torch.arange(12.0).view(2, 6)[:, :3]
    for made in (tensor_trees.place(half, "cpu"), tensor_trees.place(half.mT, "cpu").mT):
        assert made.stride() == (6, 1) and made.equal(half) and made.data_ptr() != half.data_ptr()
    assert tensor_trees.place(torch.ones(3, 1).expand(3, 4), "cpu").stride() == (4, 1)
    assert tensor_trees.memory_like(half, "meta").stride() == (6, 1)


def test_whole_numbers_are_compared_as_such():
    exact = torch.tensor([2**62, 5])
    found = accuracy.compare(exact + torch.tensor([1, 0]), exact, exact, 0.0)
    assert found.errors.mismatches == 1 and accuracy.compare(exact, exact, exact, 0.0).errors.mismatches == 0


def test_one_sum_near_zero_is_held_against_the_usual_size_of_the_output():
    exact = torch.tensor([1e-3], dtype=torch.float64)
    off = exact.float() + 5e-7
    found = [accuracy.compare(off, exact, exact.float(), 1e-4, usual).errors.mismatches for usual in (0.0, 10.0)]
    assert found == [1, 0]
    assert accuracy.compare(off + 0.01, exact, exact.float(), 1e-4, 10.0).errors.mismatches == 1


def test_what_a_view_holds_counts_with_its_gaps():
    half = torch.arange(12.0).view(2, 6)[:, :3]
    assert tensor_trees.held_bytes([tensor_trees.place(half, "cpu")]) == 9 * 4 and half.nbytes == 6 * 4


def test_sizes_are_varied_in_another_dtype_too(tmp_path):
    layer = "import torch\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    layer += "        self.layer, self.state = torch.nn.Linear(16, 16), torch.nn.LSTM(16, 16)\n"
    layer += "        self.again = self.layer\n"
    layer += "    def forward(self, x): return self.state(self.again(x))[0]\n"
    (tmp_path / "reference.py").write_text(layer + "def get_inputs(): return [torch.randn(40, 16)]\n")
    reference = problem.Reference(tmp_path / "reference.py")
    model, *_ = reference.build("default", 0, "bf16", "cpu")
    assert model.again.weight is model.layer.weight and model.layer.weight.dtype == torch.bfloat16
    found = variants.of_workload(reference, "default", reference.case("default", 0, "bf16", "cpu"), full=True)
    assert any(variant.sizes for variant in found)


def cut_case(inputs: list, sizes: list, **options) -> list:
    return variant_inputs.of_case(problem.Case(inputs, [], {}, None), Variant("cut", sizes, **options)).inputs


def test_offsets_rise_to_the_total_at_every_size():
    offsets = torch.tensor([0, 10, 33, 60, 96], dtype=torch.int32)
    for sizes, count, total in (([[0, 0, 61]], 5, 61), ([[1, 0, 3]], 3, 96), ([[0, 0, 129], [1, 0, 9]], 9, 129)):
        found = cut_case([torch.zeros(96, 4), offsets], sizes)[1]
        assert len(found) == count and found[0] == 0 and found[-1] == total and (found.diff() > 0).all(), found
        assert found.dtype == torch.int32


def test_offsets_are_never_fewer_than_two(tmp_path):
    text = (
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x, ends): return x.cumsum(0)[ends[:-1]]\n"
    )
    text += "def get_inputs(): return [torch.randn(96, 8), torch.tensor([0, 10, 33, 60, 96])]\n"
    sizes = [change for variant in found_variants(tmp_path, text).values() for change in sizes_of(variant)]
    assert (1, 0, 3) in sizes and (1, 0, 1) not in sizes


def test_no_stretch_between_offsets_grows_beyond_the_longest_where_that_is_an_input(tmp_path):
    text = "import torch\nclass Model(torch.nn.Module):\n"
    text += "    def forward(self, x, ends, longest):\n"
    text += "        return torch.cat([torch.zeros_like(x[:1]), x.cumsum(0)])[ends].diff(dim=0)\n"
    text += "def get_inputs(): return [torch.randn(96, 8), torch.tensor([0, 10, 33, 60, 96]), 36]\n"
    sizes = [change for variant in found_variants(tmp_path, text).values() for change in sizes_of(variant)]
    assert (0, 0, 61) in sizes and (1, 0, 3) not in sizes
    sizes = [
        change
        for variant in found_variants(tmp_path, text.replace(", 36]", ", 50]")).values()
        for change in sizes_of(variant)
    ]
    assert (1, 0, 3) in sizes


def test_edges_stay_sorted_and_permutations_permutations():
    edges = torch.linspace(-2, 2, 17)
    for size in (7, 33):
        found = cut_case([edges], [[0, 0, size]])[0]
        assert len(found) == size and (found.diff() >= 0).all()
        shuffled = cut_case([torch.randperm(17)], [[0, 0, size]])[0]
        assert shuffled.sort().values.equal(torch.arange(size))
    assert cut_case([edges], [], values="mixed signs")[0].equal(edges)
    segments = cut_case([torch.tensor([0, 0, 1, 2, 7, 9]), torch.zeros(10, 2)], [[1, 0, 5]])[0]
    assert (segments.diff() >= 0).all() and segments.max() < 5


def test_only_floats_without_an_order_get_other_contents():
    case = problem.Case([torch.randn(5), torch.arange(6), torch.linspace(0, 1, 7)], [], {}, None)
    seen = [variant_inputs.of_case(case, Variant("turned", []), other).inputs for other in range(5)]
    assert len({tuple(inputs[0].tolist()) for inputs in seen}) == 5 and seen[0][0].equal(case.inputs[0])
    for inputs in seen:
        assert inputs[0].sort().values.equal(case.inputs[0].sort().values)
        assert all(map(torch.equal, inputs[1:], case.inputs[1:]))


def test_inputs_of_one_size_get_other_signs():
    found = cut_case([torch.ones(40)] * 3, [], values="mixed signs")
    assert not found[0].equal(found[1]) and not found[1].equal(found[2])


def test_zeros_and_ones_are_varied_and_single_floats_too():
    case = problem.Case(
        [torch.zeros(40, dtype=torch.int64), torch.full((40,), 7), torch.ones(1), torch.zeros(1)],
        [],
        {"keep": torch.ones(40, dtype=torch.bool), "zeros": torch.zeros(40, dtype=torch.int8), "w": torch.ones(1)},
        None,
    )
    flags = variant_inputs.of_case(case, Variant("flags", [], values=variant_inputs.FLAGS))
    assert flags.inputs[0].unique().tolist() == [0, 1] and flags.inputs[1:3] == case.inputs[1:3]
    assert flags.state["zeros"].unique().tolist() == [0, 1] and flags.state["keep"].all()
    constants = variant_inputs.of_case(case, Variant("constants", [], values=variant_inputs.CONSTANTS))
    assert constants.inputs[2] > 1 and constants.inputs[3] > 0 and constants.inputs[2] - 1 != constants.inputs[3]
    assert not constants.state["keep"].all() and constants.state["w"] == 1 and not constants.inputs[0].any()


def test_whole_numbers_of_ours_are_asked_only_where_the_reference_takes_them(tmp_path):
    text = "import torch\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    text += "        self.table = torch.nn.Parameter(torch.randn(ROWS, 8))\n"
    text += "    def forward(self, at): return self.table[at]\n"
    text += "def get_inputs(): return [torch.zeros(40, dtype=torch.int64)]\n"
    for rows, asked in ((1, False), (2, True), (1 << 16, False)):  # a large table is not tried
        path = tmp_path / f"table_{rows}.py"
        path.write_text(text.replace("ROWS", str(rows)))
        loaded = problem.Reference(path)
        maker = case_maker.CaseMaker(loaded, None, "cpu")
        possible = variants.of_workload(loaded, "default", maker.case("default", 0), full=True)
        sound = preparing.taken(preparing.seeded(possible, 0), maker, "default").sound
        assert (variant_inputs.FLAGS in [one.variant.name for one in sound]) == asked


def test_a_small_batch_grows_by_one(tmp_path):
    found = found_variants(tmp_path, PRODUCT.replace("300, 64", "3, 30, 64"))
    assert (0, 0, 4) in sizes_of(found["batch of 4 (input 0)"])


def test_a_reference_that_looks_at_values_gets_other_sizes_where_inputs_are_small(tmp_path):
    text = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x, n): return x[: int(n[0])]\n"
    text += "def get_inputs(): return [torch.randn(300, COLUMNS), torch.tensor([5, 9])]\n"
    found = found_variants(tmp_path, text.replace("COLUMNS", "8"))
    assert (0, 0, 127) in sizes_of(found["prime sizes"])
    assert not any(map(sizes_of, found_variants(tmp_path, text.replace("COLUMNS", "2000")).values()))


def test_what_is_declined_at_other_sizes_is_asked_at_the_tasks_own(tmp_path):
    found = found_variants(tmp_path, PRODUCT)
    apart = found["transposed inputs, own sizes"]
    assert apart.instead_of == "transposed inputs" and not apart.sizes
    assert not any(one.values == variant_inputs.SCALED for one in found.values() if one.instead_of)
    assert not any(one.instead_of for one in found_variants(tmp_path, PRODUCT.replace("300", "9000")).values())


def test_a_number_that_is_a_dimensions_size_follows_it(tmp_path):
    text = (
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x, n, d): return x.view(n, 2, -1).sum(d)\n"
    )
    found = found_variants(tmp_path, text + "def get_inputs(): return [torch.randn(300, 64), 300, 2]\n")
    assert (0, 0, 127) in sizes_of(found["prime sizes"])
    assert cut_case([torch.zeros(300, 2), 300, {"n": 300}, True, 2], [[0, 0, 127]])[1:] == [127, {"n": 127}, True, 2]


def test_a_guarded_tensor_that_is_resized_stays_guarded():
    guards = Guards()
    with GuardedAllocation(guards, "cpu"):
        tensor = torch.empty(1).fill_(3.0).resize_(100, 400)
    assert tensor.shape == (100, 400) and tensor[0, 0] == 3.0
    tensor.fill_(1.0)
    assert not guards.broken()
    torch.as_strided(tensor, (1,), (1,), tensor.storage_offset() + 40000).fill_(1.0)
    assert guards.broken()


def test_what_a_call_changed_of_a_model_is_told_and_put_back():
    model = torch.nn.BatchNorm1d(4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    watched = state.State(model, before)
    assert not watched.changed()
    model(torch.randn(8, 4))
    model.weight.data.zero_()
    model.running_var = model.running_var + 1
    assert set(watched.changed()) == {"weight", "running_mean", "running_var", "num_batches_tracked"}
    watched.restore(watched.changed())
    assert not watched.changed() and all(map(torch.equal, model.state_dict().values(), before.values()))


def test_work_that_never_ends_on_the_gpu_is_reported_and_the_process_ends():
    """In a process of its own, whose torch waits for a GPU without end: a stand-in for a kernel that hangs."""
    code = """if True:
        import time, torch
        from kernelopt.worker.context import Context
        class Line:
            def send(self, message): print(message["result"]["error"]["status"], flush=True)
        torch.cuda.synchronize = lambda: time.sleep(0.01)
        Context("cuda", {}, Line(), hang_s=5).synchronize()
        torch.cuda.synchronize = lambda: time.sleep(60)
        Context("cuda", {}, Line(), hang_s=0.2).synchronize()
    """
    done = forks_with_torch.run(code)
    assert (done.returncode, done.stdout) == (1, "TIMEOUT\n")


def test_the_comparison_that_follows_a_call_waits_under_watch(tmp_path):
    """The first thing after a call that waits for the GPU compares inputs; a kernel that hung was never given up. In a
    process of its own, which the tripwire then watches."""
    (tmp_path / "kernel.py").write_text("def kernel_function(x): return x * 2")
    problem.Case([torch.ones(4)], [], {}, None).save(tmp_path / "input.pt")
    code = f"""if True:
        import contextlib
        from kernelopt.case_types import CandidateCase
        from kernelopt.worker import candidate
        from kernelopt.worker.context import Candidate, Context
        watched, within, identical = [], [], candidate.identical
        class Watching(Context):
            @contextlib.contextmanager
            def watched(self):
                watched.append(1)
                yield
                watched.pop()
        candidate.identical = lambda *pair: within.append(len(watched)) or identical(*pair)
        context = Watching("cpu", {{"writable": [{str(tmp_path)!r}], "hidden": []}}, None)
        given = CandidateCase({str(tmp_path / "input.pt")!r}, None, first=True)
        run = candidate.Run(context, Candidate(context, {str(tmp_path / "kernel.py")!r}), given, guarded=False)
        run._call(run._memory(run.case), run.case)
        print(within)
    """
    done = forks_with_torch.run(code)
    assert done.stdout == "[1, 0]\n"  # the second comparison finds the GPU idle


@pytest.mark.parametrize(
    ("cuda", "hip", "why", "said"),
    [
        (None, None, "no GPU", "Install a torch that is built with CUDA"),
        ("13.0", None, "no GPU", "It is built with CUDA 13.0: install one for this GPU and driver"),
        (None, "6.4.1", "no GPU", "It is built for AMD's GPUs, with ROCm 6.4.1: install one that is built with CUDA"),
        ("13.0", None, "CUDA error: out of memory", "Other processes hold its memory: nvidia-smi lists them"),
    ],
)
def test_a_torch_that_cannot_use_the_gpu_says_what_to_do(monkeypatch, cuda, hip, why, said):
    """The GPU's full memory was taken for a torch of the wrong build."""

    def no_gpu(*_, **__):
        raise RuntimeError(why)

    monkeypatch.setattr(torch, "zeros", no_gpu)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    with pytest.raises(faults.NoGpuError, match=f"cannot use it: {why}") as caught:
        server._require_gpu()
    assert str(caught.value).endswith(said) or f". {said}" in str(caught.value)
