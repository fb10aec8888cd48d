"""Tasks that name their sizes as keyword arguments: variants are made by the task, never cut out of its own inputs."""

import functools
from dataclasses import replace

import pytest
from kernelopt.case_types import Variant
from kernelopt.measure import failures, verdict
from kernelopt.statuses import Status
from kernelopt.worker import case_maker, keyword_sizes, preparing, problem, variants
from kernelopt.worker.drawn_values import OtherDraws
from written_tasks import judge


@pytest.fixture
def judged(interpreter, tmp_path):
    """The verdict on a reference and a kernel, each the text of a file."""
    return functools.partial(judge, interpreter, tmp_path)


PAGED = """
class Model(nn.Module):
    def forward(self, cache, table, lengths):
        rows = []
        for request, length in enumerate(lengths.tolist()):
            assert 0 <= length <= table.shape[1] * cache.shape[1]
            pages = cache[table[request, : -(-length // cache.shape[1])].long()]
            rows.append(pages.flatten(0, 1)[:length].sum(0) if length else cache.new_zeros(cache.shape[2]))
        return torch.stack(rows)
def get_inputs(*, requests=4, pages=30, page=8, width=16):
    if pages < requests:
        raise ValueError("a page each")
    each = pages // requests
    table = torch.randperm(pages)[: requests * each].view(requests, each).int()
    lengths = torch.randint(0, each * page + 1, (requests,), dtype=torch.int32)
    lengths[0] = each * page
    return [torch.randn(pages, page, width), table, lengths]
"""
RIGHT = """
def kernel_function(cache, table, lengths):
    at = torch.arange(table.shape[1] * cache.shape[1])
    rows = cache[table.long()].flatten(1, 2)
    return (rows * (at[None, :] < lengths[:, None])[..., None]).sum(1)
"""


def test_a_right_kernel_is_right_at_every_size_that_the_task_makes(judged):
    found = judged(PAGED, RIGHT)
    assert found["status"] == "OK", found["summary"]
    assert found["declared"]["sizes"] == {"default": {"requests": 4, "pages": 30, "page": 8, "width": 16}}
    names = {case["variant"] for case in found["cases"] if case["resized"]}
    assert {"prime sizes", "requests 4 -> 1", "page 8 -> 9", "width 16 -> 17", "pages 30 -> 33"} <= names
    assert any(name.startswith("drawn sizes (") for name in names) and "larger sizes" in names
    assert "requests 4 -> 65" not in names
    few = [case for case in found["cases"] if not (case["variant"] or "").endswith("others larger")]
    tables = [case["shapes"][1] for case in few]
    assert all(rows <= 30 for rows, _ in tables) and [1, 30] in tables
    more = [case["shapes"][1] for case in found["cases"] if case not in few]
    assert [33, 1] in more  # 61 pages: the task wants one each
    assert not found.get("left_out")


@pytest.mark.parametrize(
    "wrong",
    [
        RIGHT.replace("cache.shape[1])", "8)")
        .replace(".flatten(1, 2)", "[:, :, :8].flatten(1, 2)[:, : len(at)]")
        .replace("return", "at = at[: rows.shape[1]]\n    return"),  # another size of a page
        RIGHT.replace("table.shape[1] * cache.shape[1]", "min(240, table.shape[1] * cache.shape[1])")
        .replace("rows = cache[table.long()]", "rows = cache[table.long()[:, :30]]")
        .replace("(rows * (at", "at = at[: rows.shape[1]]\n    return (rows[:4] * (at")
        .replace("lengths[:, None]", "lengths[:4, None]"),
    ],
)
def test_a_kernel_for_its_own_sizes_alone_is_wrong(judged, wrong):
    assert judged(PAGED, wrong)["status"] not in ("OK", "INVALID_TASK", "INVALID_REFERENCE")


def test_sets_of_sizes_are_workloads(judged):
    more = PAGED + "def get_workloads(): return {'one': {'requests': 1}, 'own': lambda: get_inputs(pages=9)}\n"
    found = judged(more, RIGHT)
    assert found["status"] == "OK", found["summary"]
    assert {case["workload"] for case in found["cases"]} == {"default", "one", "own"}
    assert found["declared"]["sizes"]["one"] == {"requests": 1, "pages": 30, "page": 8, "width": 16}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("*, requests=4", "*, heads, requests=4", "the keyword 'heads' without a default"),
        ("page=8", "page=0", "has the size 'page' below 1"),
        ("class Model", "def get_workloads(): return {'w': {'rows': 3}}\nclass Model", "workload 'w' sets 'rows' to 3"),
        ("class Model", "def get_workloads(): return {'w': {'page': 3.5}}\nclass Model", "sets 'page' to 3.5"),
        (
            "class Model",
            "def get_workloads(): return {'w': {'width': 8}}\nclass Model",
            "workload 'w' sets 'width', which has a default of type Tensor in get_inputs; a size has a whole number",
        ),
    ],
)
def test_sizes_that_cannot_be_read_make_no_task(judged, old, new, said):
    task = PAGED.replace("width=16", "width=torch.tensor(16)") if "'width'" in new else PAGED
    found = judged(task.replace(old, new, 1), RIGHT)
    assert found["status"] == "INVALID_TASK" and said in found["summary"], found["summary"]


def test_keywords_that_are_no_whole_numbers_stay_as_they_are(judged):
    dtype = PAGED.replace("width=16)", "width=16, dtype=torch.float16, causal=True)").replace(
        "torch.randn(pages, page, width)", "torch.randn(pages, page, width, dtype=dtype) * causal"
    )
    found = judged(dtype, RIGHT.replace(".sum(1)", ".sum(1, dtype=torch.float32).half()"))
    assert found["status"] == "OK", found["summary"]
    assert found["declared"]["sizes"] == {"default": {"requests": 4, "pages": 30, "page": 8, "width": 16}}


def test_sizes_that_break_the_reference_are_left_out_and_counted(judged):
    reference = PAGED.replace("rows = []", "rows = []\n        assert cache.shape[2] != 17, 'no 17'")
    found = judged(reference, RIGHT)
    assert found["status"] == "OK", found["summary"]
    assert "width 16 -> 17" in found["left_out"] and "left out " in found["summary"]
    assert "on which the reference itself fails: " in found["summary"]
    assert "width 16 -> 17" not in {case["variant"] for case in found["cases"]}


def test_a_variant_of_the_tools_own_that_breaks_the_reference_when_it_judges_is_left_out(judged):
    """Large inputs are not tried before."""
    reference = """
class Model(nn.Module):
    def forward(self, x):
        assert x.shape == (513, 512)
        if not x.is_meta and x.abs().max() > 40: DEATH
        return x.exp().clamp(max=1e4) + 1
def get_inputs(): return [torch.randn(513, 512)]
"""
    kernel = "def kernel_function(x): return x.exp().clamp(max=1e4) + 1\n"
    for death in ("raise ValueError('too large')", "import os; os.abort()"):
        found = judged(reference.replace("DEATH", death), kernel)
        assert found["status"] == "OK", found["summary"]
        assert found["left_out"] == ("64 times the inputs",)


def test_layouts_that_the_task_leaves_out_are_not_tried(judged):
    declared = PAGED + 'LAYOUTS = "contiguous"\n'
    dense = RIGHT.replace("    at =", "    if not cache.is_contiguous(): raise ValueError\n    at =")
    found = judged(declared, dense)
    assert found["status"] == "OK" and "declined" not in found["summary"], found["summary"]
    assert "LAYOUTS contiguous" in found["summary"]
    assert "(8 of them declined)" in judged(PAGED, dense)["summary"]


def test_whole_numbers_of_one_dimension_lie_densely_in_every_variant(judged):
    strided = RIGHT.replace("    at =", "    if not lengths.is_contiguous(): return cache[0, :4].clone()\n    at =")
    assert judged(PAGED, strided)["status"] == "OK"


def test_no_other_size_is_said_first(judged):
    fixed = (
        "class Model(nn.Module):\n    W = torch.ones(5, 16)\n    def forward(self, x): return x @ self.W.T + x.sum()\n"
    )
    fixed += "def get_inputs(): return [torch.randn(3, 16)]\n"
    kernel = "def kernel_function(x): return x @ torch.ones(16, 5) + x.sum()\n"
    found = judged(fixed.replace("self.W.T", "self.W.T + torch.zeros(3, 1)"), kernel)
    assert found["status"] == "OK" and found["summary"].startswith("OK, at its own sizes alone, on "), found["summary"]
    found = judged(PAGED, RIGHT, only_these_shapes=True)  # as asked for
    assert found["summary"].startswith("OK, at its own sizes alone, on "), found["summary"]


def test_a_process_that_dies_says_in_which_case(judged):
    dies = RIGHT.replace("    at =", "    if len(lengths) == 1: import ctypes; ctypes.string_at(0)\n    at =")
    found = judged(PAGED, dies)
    assert found["status"] == "ILLEGAL_ACCESS" and "requests 4 -> 1" in found["summary"], found["summary"]


def test_a_refusal_says_in_words_what_the_variant_is(judged):
    wrong = RIGHT.replace("    at =", "    if not cache.is_contiguous(): cache = cache + 1\n    at =")
    found = judged(PAGED, wrong)
    assert "swapped in memory" in found["summary"] and "means inputs of [" in found["summary"], found["summary"]
    assert set(failures.LAYOUTS_IN_WORDS) == set(__import__("kernelopt.worker.variants").worker.variants.LAYOUTS)


ROTATE = """
class Model(nn.Module):
    def forward(self, x, cos, sin):
        return x * cos + torch.cat([-x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]], -1) * sin
def get_inputs(*, rows=6, half=8):
    angles = torch.randint(0, 99, (rows,))[:, None] / torch.arange(1, half + 1).float()
    angles = torch.cat([angles, angles], -1)
    return [torch.randn(rows, 2 * half), angles.cos(), angles.sin()]
"""
BY_HALVES = """
def kernel_function(x, cos, sin):
    half = x.shape[1] // 2
    a, b, cos, sin = x[:, :half], x[:, half:], cos[:, :half], sin[:, :half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
"""
NORMS = """
class Model(nn.Module):
    def forward(self, x, dy, mean, scale):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(nn.functional.layer_norm(x, x.shape[-1:]), x, dy)
        return dx
def get_inputs(*, rows=6, columns=32):
    if columns < 3: raise ValueError("the gradient is 0 but for rounding")
    x = torch.randn(rows, columns)
    mean, variance = x.mean(-1), x.var(-1, unbiased=False)
    return [x, torch.randn(rows, columns), mean, (variance + 1e-5).rsqrt()]
"""
FROM_SAVED = """
def kernel_function(x, dy, mean, scale):
    normal = (x - mean[:, None]) * scale[:, None]
    return (dy - dy.mean(-1, keepdim=True) - normal * (dy * normal).mean(-1, keepdim=True)) * scale[:, None]
"""


@pytest.mark.parametrize(("reference", "kernel"), [(ROTATE, BY_HALVES), (NORMS, FROM_SAVED)])
def test_inputs_that_the_task_computes_from_others_follow_them_in_all_values(judged, reference, kernel):
    found = judged(reference, kernel)
    assert found["status"] == "OK", found["summary"]
    assert "mixed signs" in {case["variant"] for case in found["cases"]}


def test_other_values_are_drawn_where_the_task_draws_them(tmp_path):
    path = tmp_path / "reference.py"
    path.write_text("""
import torch
class Model(torch.nn.Module):
    def forward(self, *inputs): return inputs
def get_inputs(*, n=400):
    x = torch.rand(n)
    drawn = [x, torch.empty(n).normal_(), torch.randint(0, 9, (n,)).float(), torch.randn_like(x), torch.normal(0., 1., (n,))]
    return [*drawn, x.softmax(-1), torch.arange(n).float(), torch.randint(0, 9, (n,)), 3 * x]
""")
    loaded = problem.Reference(path)
    own, negative = (
        loaded.build("default", 0, None, "cpu", None, within)[1] for within in (None, OtherDraws("nothing positive"))
    )
    mixed = loaded.build("default", 0, None, "cpu", None, OtherDraws("mixed signs"))[1]
    for before, after, signs in list(zip(own, negative, mixed, strict=True))[:5]:
        assert after.equal(-before.abs()) and signs.abs().equal(before.abs())
        assert 0.3 < float((signs[before != 0] != before[before != 0]).float().mean()) < 0.7
    assert negative[5].equal(negative[0].softmax(-1)) and bool((negative[5] > 0).all())
    assert all(before.equal(after) for before, after in zip(own[6:8], negative[6:8], strict=True))
    assert negative[8].equal(3 * negative[0])


def test_each_variant_of_keyword_sizes_draws_other_contents(judged):
    """With one seed for all, one lucky draw of lengths would hide an empty request everywhere."""
    once_in_a_while = """
class Model(nn.Module):
    def forward(self, x, lengths):
        return torch.stack([x[:n].sum(0) + (n == 0) for n in lengths.tolist()])
def get_inputs(*, requests=2, longest=5, width=16):
    return [torch.randn(longest, width), torch.randint(0, longest + 1, (requests,))]
"""
    kernel = """
def kernel_function(x, lengths):
    return torch.stack([x[:n].sum(0) for n in lengths.tolist()])
"""
    assert judged(once_in_a_while, kernel)["status"] == "WRONG_VALUES"


SEEDED = """
from kernelopt.worker.philox import rand
class Model(nn.Module):
    def forward(self, x, p, seed):
        kept = rand(seed, torch.arange(x.numel())).view(x.shape) >= p
        return torch.where(kept, x / (1 - p), 0.0)
def get_inputs(*, rows=4, columns=24): return [torch.randn(rows, columns), 0.25, SEED]
"""


@pytest.mark.parametrize("seed", ["1234", "torch.tensor([1234])"])
def test_a_kernel_that_knows_the_tasks_seed_is_wrong(judged, seed):
    reference = SEEDED.replace("SEED", seed)
    kernel = SEEDED[: SEEDED.index("def get_inputs")].replace("Model", "ModelNew")
    found = judged(reference, kernel)
    assert found["status"] == "OK" and "another seed" in {case["variant"] for case in found["cases"]}
    found = judged(reference, kernel.replace("rand(seed,", "rand(1234,"))
    assert found["status"] == "WRONG_VALUES" and "another seed" in found["summary"], found["summary"]
    found = judged(reference, kernel.replace("x / (1 - p)", "x / 0.75"))
    assert found["status"] == "WRONG_VALUES" and "other numbers" in found["summary"], found["summary"]


def test_a_number_that_other_inputs_follow_from_stays(judged):
    """A kernel may use the saved sums, which belong to the task's own scale."""
    reference = """
class Model(nn.Module):
    def forward(self, x, dy, sums, scale):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad((x * scale).softmax(-1), x, dy)[0]
def get_inputs(*, rows=6, columns=24):
    scale = columns**-0.5
    if columns < 3: raise ValueError("one value has no gradient but rounding")
    x = torch.randn(rows, columns)
    return [x, torch.randn(rows, columns), (x * scale).logsumexp(-1), scale]
"""
    kernel = """
def kernel_function(x, dy, sums, scale):
    y = torch.exp(x * scale - sums[:, None])
    return y * (dy - (y * dy).sum(-1, keepdim=True)) * scale
"""
    found = judged(reference, kernel)
    assert found["status"] == "OK", found["summary"]
    assert "other numbers" not in {case["variant"] for case in found["cases"]}


def test_what_a_kernel_draws_at_other_sizes_counts_too(judged):
    reference = """
class Model(nn.Module):
    def forward(self, probs, seed): return probs * 1.0
def get_inputs(*, rows=64, values=16):
    return [torch.softmax(torch.randn(1, values), -1).repeat(rows, 1), 17]
SAMPLES = {0: {"tvd": 0.08, "draws": 4_000}}
"""
    kernel = """
def kernel_function(probs, seed):
    known = probs.shape[1] // 8 * 8 or 1
    return torch.multinomial(probs[:, :known], 1, generator=torch.Generator().manual_seed(int(seed)))[:, 0]
"""
    assert judged(reference, kernel.replace("// 8 * 8 or 1", ""))["status"] == "OK"
    found = judged(reference, kernel)
    assert found["status"] == "WRONG_VALUES" and "total variation" in found["summary"], found["summary"]


WARM = """
class Model(nn.Module):
    def forward(self, logits, temperature, seed): return torch.softmax(logits / HOW, -1)
def get_inputs(*, rows=64, values=8):
    return [torch.randperm(values).float()[None].repeat(rows, 1), GIVEN, 17]
SAMPLES = {0: {"tvd": 0.06, "draws": 4_000}}
"""


@pytest.mark.parametrize(
    ("how", "given"), [("temperature", "1.4"), ("temperature[:, None]", "torch.full((rows,), 1.4)")]
)
def test_a_number_that_draws_depend_on_counts(judged, how, given):
    kernel = f"""
def kernel_function(logits, temperature, seed):
    seeds = torch.Generator().manual_seed(int(seed))
    return torch.multinomial(torch.softmax(logits / {how}, -1), 1, generator=seeds)[:, 0]
"""
    reference = WARM.replace("HOW", how).replace("GIVEN", given)
    assert judged(reference, kernel)["status"] == "OK"
    found = judged(reference, kernel.replace(f"/ {how}", "/ 1.4"))
    assert found["status"] == "WRONG_VALUES" and "other numbers" in found["summary"], found["summary"]


SAVED = """
class Model(nn.Module):
    def forward(self, x, rstd, scale, seed): return x * rstd[:, None] * (scale if seed % 2 else scale + 1)
def get_inputs(*, rows=6, columns=24):
    x = torch.randn(rows, columns) + 1
    return [x, x.sum(-1).square(), 0.3, 17]
"""
FROM_SAVED = """
def kernel_function(x, rstd, scale, seed): return x * x.sum(-1, keepdim=True).square() * (scale if seed % 2 else scale + 1)
"""


def test_other_numbers_and_seeds_leave_what_the_task_computes_as_it_is(judged):
    found = judged(SAVED, FROM_SAVED)
    assert found["status"] == "OK", found["summary"]
    assert {"other numbers", "another seed"} <= {case["variant"] for case in found["cases"]}
    for wrong in (FROM_SAVED.replace("(scale", "(0.3"), FROM_SAVED.replace("seed % 2", "True")):
        assert judged(SAVED, wrong)["status"] == "WRONG_VALUES"


ROWS = """
class Model(nn.Module):
    def forward(self, probs, seed): return probs * 1.0, probs.square().sum(-1)
def get_inputs(SIZES):
    return [torch.softmax(torch.randn(1, 12), -1).repeat(64, 1), 17]
SAMPLES = {0: {"tvd": 0.08, "draws": 4_000}}
"""


@pytest.mark.parametrize("sizes", ["", "*, width=5"])
def test_a_kernel_for_equal_rows_alone_is_wrong(judged, sizes):
    reference = ROWS.replace("SIZES", sizes)
    kernel = """
def kernel_function(probs, seed):
    seeds = torch.Generator().manual_seed(int(seed))
    return torch.multinomial(probs, 1, generator=seeds)[:, 0], (probs * probs).sum(-1)
"""
    assert judged(reference, kernel)["status"] == "OK"
    for own, first in (
        ("(probs, 1,", "(probs[:1].repeat(len(probs), 1), 1,"),
        ("(probs * probs)", "(probs[:1] * probs)"),
    ):
        found = judged(reference, kernel.replace(own, first))
        assert found["status"] == "WRONG_VALUES" and "unequal rows" in found["summary"], found["summary"]


def test_a_threshold_that_decides_on_few_elements_counts(judged):
    reference = """
class Model(nn.Module):
    def forward(self, scores, least): return (scores > least).nonzero()[:, 0]
def get_inputs(*, boxes=8): return [(torch.randperm(boxes) + 0.5) / boxes, 0.34]
"""
    kernel = "def kernel_function(scores, least): return (scores > least).nonzero()[:, 0]\n"
    assert judged(reference, kernel)["status"] == "OK"
    found = judged(reference, kernel.replace("> least", "> 0.34"))
    assert found["status"] == "WRONG_SHAPE" and "other numbers" in found["summary"], found["summary"]


def variants_of(tmp_path, text: str, workload: str = "default") -> dict[str, Variant]:
    """The variants of a task, by name."""
    (tmp_path / "reference.py").write_text("import torch\n" + text)
    loaded = problem.Reference(tmp_path / "reference.py")
    made = variants.of_workload(loaded, workload, loaded.case(workload, 0, None, "cpu"), workload == "default")
    return {one.name: one for one in made}


SCALED = """
class Model(torch.nn.Module):
    def forward(self, x, lengths, scale): return x[lengths] * scale
def get_inputs(*, rows=8, columns=24): return [torch.randn(rows, columns), torch.randint(0, rows, (5,)), 0.3]
def get_workloads(): return {"decode": {"rows": 1, "columns": 300}}
"""


def test_other_numbers_are_tried_at_two_sizes(tmp_path):
    """The loss of a few rows may be the same with another number by chance."""
    made = variants_of(tmp_path, SCALED)
    tried = [made[name].keywords for name in ("other numbers", "other numbers, prime sizes")]
    assert tried == [{"rows": 17, "columns": 49}, {"rows": 7, "columns": 13}]


def test_a_task_that_names_no_sizes_gets_other_numbers_too(tmp_path):
    plain = SCALED.replace("*, rows=8, columns=24", "").replace("(rows", "(8").replace("rows,", "8,")
    plain = plain.replace("columns", "24").split("def get_workloads")[0]
    made = variants_of(tmp_path, plain)
    assert made["other numbers"].sizes and made["other numbers, own sizes"].instead_of == "other numbers"
    assert "other numbers" not in variants_of(tmp_path, plain.replace("0.3]", "3]"))


def test_sizes_are_all_equal_in_one_variant(tmp_path):
    """A kernel may take the shape of a square for that of its transpose."""
    assert variants_of(tmp_path, SCALED)["all sizes 5"].keywords == {"rows": 5, "columns": 5}


def test_another_workload_gets_larger_sizes_where_it_is_small(tmp_path):
    made = variants_of(tmp_path, SCALED, "decode")
    assert {name: one.keywords for name, one in made.items()} == {
        "primes just below": {"columns": 293},
        "larger sizes": {"columns": 601},
    }


def test_a_size_that_can_only_be_a_power_of_two_or_a_multiple_is_another_one_too(judged):
    reference = """
class Model(nn.Module):
    def forward(self, x): return x.unflatten(-1, (4, -1)).sum(-1)
def get_inputs(*, rows=3, width=16):
    if width & (width - 1): raise ValueError("a power of two is needed")
    return [torch.randn(rows, max(width, 4))]
"""
    kernel = "def kernel_function(x): return x.unflatten(-1, (4, -1))[..., :4].sum(-1)\n"
    found = judged(reference, kernel)
    assert found["status"] == "WRONG_VALUES" and "'width 16 -> 32'" in found["summary"], found["summary"]
    found = judged(reference, kernel.replace("[..., :4]", ""))
    variants = {case["variant"] for case in found["cases"]}
    assert found["status"] == "OK" and {"width 16 -> 32", "width 16 -> 8"} <= variants and "rows 3 -> 6" not in variants


@pytest.mark.parametrize("longest", [5, 12])
def test_a_kernel_that_serves_short_requests_alone_is_wrong(judged, longest):
    reference = """
class Model(nn.Module):
    def forward(self, x, lengths):
        return torch.stack([x[:n].sum(0) for n in lengths.tolist()])
def get_inputs(*, requests=9, longest=LONGEST, width=16):
    return [torch.randn(longest, width), torch.randint(1, longest + 1, (requests,))]
"""
    kernel = "def kernel_function(x, lengths): return torch.stack([x[:min(n, 16)].sum(0) for n in lengths.tolist()])\n"
    found = judged(reference.replace("LONGEST", str(longest)), kernel)
    assert found["status"] == "WRONG_VALUES", found["summary"]


def test_a_size_that_passes_a_tile_stands_beside_many_others(tmp_path):
    """Of seven lengths drawn up to 33, none is above 16 once in 160 verdicts; of nineteen, once in a million."""
    made = variants_of(
        tmp_path,
        """
class Model(torch.nn.Module):
    def forward(self, x, lengths): return torch.stack([x[:n].sum(0) for n in lengths.tolist()])
def get_inputs(*, requests=9, longest=5):
    return [torch.randn(longest, 3), torch.randint(1, longest + 1, (requests,))]
""",
    )
    assert made["longest 5 -> 33"].keywords == {"requests": 7, "longest": 33}
    assert made["longest 5 -> 33, others larger"].keywords == {"requests": 19, "longest": 33}


def test_primes_just_below_and_small_ones():
    assert keyword_sizes.just_below({"rows": 300, "pair": 2}) == {"rows": 293}
    assert keyword_sizes.smallest({"a": 64, "b": 300}, lambda sizes: "b" not in sizes) == {"a": 61}


LOSS = """
class Model(nn.Module):
    def forward(self, logits, target):
        return nn.functional.cross_entropy(logits, target, reduction="none")
def get_inputs(*, tokens=33, values=20):
    return [torch.randn(tokens, values), torch.randint(0, values, (tokens,))]
"""
LOGARITHM = """
def kernel_function(logits, target):
    own = logits.gather(1, target[:, None])[:, 0]
    return (torch.log(torch.exp(logits - 1).sum(-1)) - own) + 1
"""


def test_sizes_are_drawn_again_where_the_task_has_no_case_of_them(monkeypatch):
    """Every sixteenth verdict on PAGED lacked drawn sizes: fewer pages than requests."""
    numbers = iter([7, 2, 1, 30, 7, 2] + [7, 2] * 8)  # each one less than a size
    monkeypatch.setattr(keyword_sizes, "randbelow", lambda _: next(numbers))
    sizes = {"requests": 4, "pages": 30}
    assert keyword_sizes.drawn_sizes(sizes, lambda one: one["pages"] >= one["requests"]) == {"requests": 2, "pages": 31}
    assert keyword_sizes.drawn_sizes(sizes, lambda _: False) == {"requests": 8, "pages": 3}


def test_a_result_that_is_0_but_for_rounding_at_other_sizes_is_right(judged):
    found = judged(LOSS, LOGARITHM)
    assert found["status"] == "OK" and "values 20 -> 1" in {case["variant"] for case in found["cases"]}, found[
        "summary"
    ]
    off = "\n    if logits.shape[1] == 1: own = own + 1e-3\n    return"
    found = judged(LOSS, LOGARITHM.replace("\n    return", off))
    assert found["status"] == "WRONG_VALUES" and "values 20 -> 1" in found["summary"], found["summary"]


def test_a_verdict_names_some_of_many_workloads():
    names = [f"w{number}" for number in range(20)]
    assert verdict.some_of(names) == "w0, w1, w2, w3, w4 and 15 more" and verdict.some_of(names[:6]).endswith("w4, w5")
    right = verdict.Verdict("OK", "here", "OK here")
    found = verdict.with_task(right, {"sizes": {name: {"rows": 4, "columns": 9} for name in names}}, names, {})
    assert "left out 20 variants on which the reference itself fails: w0, w1, w2, w3, w4 and 15 more" in found.summary
    assert found.summary.endswith("SIZES w0: rows: 4, columns: 9, and those of 19 other workloads")
    assert len(found.declared["sizes"]) == len(found.left_out) == 20


EMPTY = """
class Model(nn.Module):
    def forward(self, x, lengths):
        return torch.stack([x[:n].logsumexp(0) for n in lengths.tolist()])
def get_inputs(*, requests=4, longest=9):
    lengths = torch.full((requests,), longest)
    if requests != 4:
        lengths[-1] = 0
    return [torch.randn(longest, 6), lengths]
"""


def test_an_infinity_in_what_the_task_makes_at_other_sizes_counts(judged):
    kernel = "def kernel_function(x, lengths):\n    return torch.stack([FIRSTx[:n].logsumexp(0) for n in lengths.tolist()])\n"
    assert judged(EMPTY, kernel.replace("FIRST", ""))["status"] == "OK"
    found = judged(EMPTY, kernel.replace("FIRST", "torch.zeros(6) if n == 0 else "))
    assert found["status"] == "NONFINITE" and "primes just below" in found["summary"], found["summary"]
    assert "differ from the reference's NaN or Inf" in found["summary"]


def test_a_verdict_names_whole_numbers_that_were_never_others():
    right = verdict.Verdict(Status.OK, "H200", "OK")
    found = verdict.with_task(right, {}, [], {"shift": 3, "zero": 0})
    said = "'shift' is always 3, 'zero' is always 0: draw other whole numbers in get_inputs where they are possible"
    assert found.summary == f"OK; {said}"
    assert verdict.with_task(replace(right, status=Status.OOM), {}, [], {"shift": 3}).summary == "OK"


LARGEST = """
class Model(nn.Module):
    def forward(self, x): return x.amax(1)
def get_inputs(*, rows=512, columns=1536):  # nothing is near 0, which a largest of negative numbers would be
    return [torch.randn(rows, columns).sign() * (1 + torch.rand(rows, columns))]
"""
OF_WHOLE_TILES = """
def kernel_function(x):
    if x.shape[0] % 128 or x.shape[1] % 128:
        raise ValueError("no whole tiles")
    return FIRST.amax(1)
"""


def test_a_kernel_that_declines_small_sizes_gets_other_values_at_halved_ones(judged):
    right = judged(LARGEST, OF_WHOLE_TILES.replace("FIRST", "x"))
    assert right["status"] == "OK", right["summary"]
    halves = [case for case in right["cases"] if (case["variant"] or "").endswith(", halved sizes")]
    assert len(halves) > 4 and {tuple(case["shapes"][0]) for case in halves} >= {(256, 384)}
    wrong = judged(LARGEST, OF_WHOLE_TILES.replace("FIRST", "nn.functional.pad(x, (0, 1))"))
    assert wrong["status"] == "WRONG_VALUES" and "nothing positive, halved sizes" in wrong["summary"], wrong["summary"]
    right = judged(LARGEST, OF_WHOLE_TILES.replace("x.shape[0] % 128 or x.shape[1] % 128", "0").replace("FIRST", "x"))
    assert not any("halved" in (case["variant"] or "") for case in right["cases"])


def test_a_gpu_tries_other_values_at_its_own_sizes_too(tmp_path):
    """Sums over many elements of one sign lose more than those of a few, or of both."""
    assert "nothing positive, own sizes" not in variants_of(tmp_path, LARGEST.replace("nn.", "torch.nn."))
    loaded = problem.Reference(tmp_path / "reference.py")
    case = loaded.case("default", 0, None, "cpu")
    made = {one.name: one for one in variants.of_workload(loaded, "default", case, full=True, own_sizes=True)}
    assert made["nothing positive, own sizes"].values and not made["nothing positive, own sizes"].keywords


@pytest.mark.parametrize(
    ("size", "half"), [(8192, 256), (14336, 896), (11008, 5504), (300, 150), (1001, 1001), (256, 256), (7, 7)]
)
def test_a_halved_size_stays_a_number_of_whole_tiles(size, half):
    assert keyword_sizes.few_tiles(size) == half


def test_what_the_reference_does_not_take_at_small_sizes_is_not_tried_at_large_ones(tmp_path):
    text = """
class Model(torch.nn.Module):
    def forward(self, p): return torch.multinomial(p, 2)
def get_inputs(*, rows=512, columns=1536): return [torch.rand(rows, columns)]
"""
    (tmp_path / "reference.py").write_text("import torch\n" + text)
    loaded = problem.Reference(tmp_path / "reference.py")
    maker = case_maker.CaseMaker(loaded, None, "cpu")
    sound = preparing.sound_variants(maker, "default", 0, {"full": True, "own_sizes": True}).sound
    names = {one.variant.name for one in sound}
    assert "nothing negative, halved sizes" in names
    assert not names & {"nothing positive", "nothing positive, halved sizes", "nothing positive, own sizes"}


def test_two_variants_of_one_size_have_two_names(judged):
    """One beside the task's own sizes, one beside small ones. The reference is tried on the second alone, and fails."""
    reference = """
class Model(nn.Module):
    def forward(self, x):
        more = 128 * max(0, x.shape[1] - 2048)
        return x.amax(1), x[torch.arange(more, device=x.device)]
def get_inputs(*, rows=256, columns=2048): return [torch.randn(rows, columns)]
"""
    kernel = """
def kernel_function(x):
    more = 128 * max(0, x.shape[1] - 2048)
    return x.amax(1) * (x.shape[1] != 2049), x[torch.arange(more)]
"""
    found = judged(reference, kernel)
    assert found["status"] == "WRONG_VALUES" and "columns 2048 -> 2049)" in found["summary"], found["summary"]
    assert list(found["left_out"]) == ["columns 2048 -> 2049, others small"]


def test_where_nothing_can_be_halved_the_tasks_own_sizes_stand_in(judged):
    reference = """
class Model(nn.Module):
    def forward(self, x): return x.amax((2, 3))
def get_inputs(*, batch=8, channels=16, height=56, width=56): return [torch.randn(batch, channels, height, width)]
"""
    kernel = """
def kernel_function(x):
    if x.shape[3] % 8:
        raise ValueError("whole vectors of 8")
    return FIRST.flatten(2).amax(2)
"""
    assert judged(reference, kernel.replace("FIRST", "x"))["status"] == "OK"
    found = judged(reference, kernel.replace("FIRST", "x.relu()"))
    assert found["status"] == "WRONG_VALUES" and "nothing positive, own sizes" in found["summary"], found["summary"]


def test_cases_in_reserve_are_few_where_they_are_large(tmp_path, monkeypatch):
    """They are written for each verification, and most kernels need none. All sizes here are a sixteenth."""
    for limit in ("LARGE_BYTES", "RESERVE_BYTES", "OWN_BYTES", "RUN_BYTES"):
        monkeypatch.setattr(variants, limit, getattr(variants, limit) // 16)
    (tmp_path / "reference.py").write_text(
        "import torch\n" + LARGEST.replace("nn.", "torch.nn.").replace("512", "1567")
    )
    loaded = problem.Reference(tmp_path / "reference.py")
    maker = case_maker.CaseMaker(loaded, None, "cpu")
    sound = preparing.sound_variants(maker, "default", 0, {"full": True}).sound
    reserve = [one.variant.instead_of for one in sound if one.variant.instead_of]
    assert reserve == ["mixed signs", "nothing positive", "nothing negative"]  # of 2.4 MB each
