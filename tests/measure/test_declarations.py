"""Tasks with declarations: what is declared is judged, and what is not declared is refused aloud. torch on the CPU stands
in for kernels here."""

import functools

import pytest
from kernelopt.measure import timing
from kernelopt.measure.oracle import Oracle
from written_tasks import judge, written


@pytest.fixture
def judged(interpreter, tmp_path):
    """The verdict on a reference and a kernel, each the text of a file."""
    return functools.partial(judge, interpreter, tmp_path)


@pytest.fixture
def at_own_sizes(judged):
    """The same of what fails there already."""
    return functools.partial(judged, only_these_shapes=True)


NORM = """
class Model(nn.Module):
    def forward(self, x, residual):
        residual.add_(x)
        return residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + 1e-6)
def get_inputs(): return [torch.randn(12, 16), torch.randn(12, 16)]
"""
DECLARED = NORM + 'MUTATES = ("residual",)\n'
ADDS = """
def kernel_function(x, residual):
    residual += x
    return residual / (residual.square().mean(-1, keepdim=True) + 1e-6).sqrt()
"""
ON_A_COPY = ADDS.replace("residual += x", "residual = residual + x")


@pytest.mark.parametrize("kernel", [ADDS, ON_A_COPY])
def test_a_reference_that_changes_an_undeclared_input_makes_no_task(at_own_sizes, kernel):
    found = at_own_sizes(NORM, kernel)
    assert found["status"] == "INVALID_TASK"
    assert "changes its input 'residual' in place" in found["summary"]
    assert 'MUTATES = ("residual",)' in found["summary"]


def test_a_change_to_the_same_values_is_a_change_too(at_own_sizes):
    relu = "class Model(nn.Module):\n    def forward(self, x): return x.relu_() + 1\n"
    found = at_own_sizes(
        relu + "def get_inputs(): return [torch.rand(12, 16)]\n", "def kernel_function(x): return x.relu() + 1\n"
    )
    assert found["status"] == "INVALID_TASK" and 'MUTATES = ("x",)' in found["summary"]


def test_what_is_declared_is_an_output(judged, at_own_sizes):
    found = judged(DECLARED, ADDS)
    assert found["status"] == "OK", found["summary"]
    assert found["declared"] == {"mutates": ["residual"]} and "MUTATES residual" in found["summary"]
    found = at_own_sizes(DECLARED, ON_A_COPY)
    assert found["status"] == "WRONG_VALUES" and "input 'residual' after the call" in found["summary"]
    assert "the call left 'residual' as it was" in found["summary"] and "compare masks" not in found["summary"]
    found = at_own_sizes(DECLARED, ADDS.replace("residual += x", "residual += 2 * x"))
    assert found["status"] == "WRONG_VALUES" and "as it was" not in found["summary"]
    found = at_own_sizes(DECLARED, ADDS.replace("residual += x", "residual += x; x.mul_(2); x.div_(3)"))
    assert found["status"] == "INPUT_MUTATED" and "input 'x' was changed" in found["summary"]


def test_a_task_without_declarations_has_no_such_key(judged):
    plain = NORM.replace("residual.add_(x)", "residual = residual + x")
    found = judged(plain, ON_A_COPY)
    assert found["status"] == "OK" and "declared" not in found


def test_an_undeclared_input_beside_a_declared_one_is_named_with_it(at_own_sizes):
    reference = DECLARED.replace("residual.add_(x)", "residual.add_(x); x.mul_(2)")
    found = at_own_sizes(reference, ADDS)
    assert found["status"] == "INVALID_TASK" and 'MUTATES = ("residual", "x")' in found["summary"]


WRITE = """
class Model(nn.Module):
    def forward(self, cache, values, slots):
        cache[slots] = values
def get_inputs():
    return [torch.randn(40, 8), torch.randn(5, 8), torch.randperm(40)[:5]]
MUTATES = (0,)
"""
RIGHT = "def kernel_function(cache, values, slots):\n    cache[slots] = values\n"


@pytest.mark.parametrize(
    ("kernel", "status", "said"),
    [
        (RIGHT, "OK", "MUTATES cache"),
        ("def kernel_function(cache, values, slots): pass\n", "WRONG_VALUES", "input 'cache' after the call"),
        (RIGHT + "    cache[(slots[0] + 1) % len(cache)] *= 1.00001\n", "WRONG_VALUES", "leaves as they were"),
        (RIGHT.replace("cache[slots] = values", "cache[slots[:-1]] = values[:-1]"), "WRONG_VALUES", "input 'cache'"),
        (RIGHT + "    return cache\n", "WRONG_SHAPE", "1 outputs, expected 0"),
    ],
)
def test_a_reference_may_return_none_and_regions_must_stay(judged, at_own_sizes, kernel, status, said):
    found = (judged if status == "OK" else at_own_sizes)(WRITE, kernel)
    assert found["status"] == status and said in found["summary"], found["summary"]


ROTATED = """
class Model(nn.Module):
    def forward(self, x, y):
        x.mul_(2).sub_(y)
        return x
def get_inputs(): return [torch.randn(12, 16), torch.randn(12, 16)]
MUTATES = ("x",)
"""


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("x.mul_(2).sub_(y)\n    return x", "OK"),
        ("x.mul_(2).sub_(y)\n    return x.clone()", "OK"),
        ("z = 2 * x - y\n    return z", "WRONG_VALUES"),
        ("x.mul_(2).sub_(y)\n    return y.copy_(x)", "INPUT_MUTATED"),
        ("x.mul_(2).sub_(y)\n    return KEPT.setdefault(x.shape, x).copy_(x)", "ALIASED_OUTPUT"),
    ],
)
def test_a_result_may_lie_in_a_declared_input_alone(judged, at_own_sizes, body, status):
    found = (judged if status == "OK" else at_own_sizes)(
        ROTATED, f"KEPT = {{}}\ndef kernel_function(x, y):\n    {body}\n"
    )
    assert found["status"] == status, found["summary"]


def test_an_output_that_the_task_allocates_is_poisoned(judged, at_own_sizes):
    out = "class Model(nn.Module):\n    def forward(self, x, out): torch.add(x, 1, out=out)\n"
    out += "def get_inputs(): return [torch.randn(12, 16), torch.empty(12, 16)]\nMUTATES = ('out',)\n"
    assert judged(out, "def kernel_function(x, out): out.copy_(x + 1)\n")["status"] == "OK"
    late = "def kernel_function(x, out): out[:-1] = (x + 1)[:-1]\n"
    assert at_own_sizes(out, late)["status"] == "NONFINITE"


def test_a_declared_input_that_may_stay_as_it_was_makes_no_task(at_own_sizes):
    reference = WRITE.replace("cache[slots] = values", "cache[slots] += 0 * values")
    found = at_own_sizes(reference, RIGHT)
    assert (
        found["status"] == "INVALID_TASK" and "MUTATES declares 'cache', and leaving it as it was" in found["summary"]
    )


REJECTS = """
class Model(nn.Module):
    def forward(self, taken, ratios): taken.copy_((ratios > 0.5).int().cumprod(-1).sum(-1))
def get_inputs():
    ratios = torch.rand(3, 4)
    return [torch.zeros(3, dtype=torch.int32), ratios / 2 if torch.initial_seed() == 0 else ratios]
MUTATES = ("taken",)
"""


def test_an_output_that_stays_by_chance_at_one_seed_is_judged_at_the_others(at_own_sizes):
    counts = "def kernel_function(taken, ratios): taken.copy_((ratios > 0.5).int().cumprod(-1).sum(-1))\n"
    found = at_own_sizes(REJECTS, counts, seeds=5)
    assert found["status"] == "OK", found["summary"]
    assert at_own_sizes(REJECTS, "def kernel_function(taken, ratios): pass\n", seeds=5)["status"] == "WRONG_VALUES"


def test_a_seed_that_counts_less_than_the_tolerance_makes_no_task(at_own_sizes):
    reference = """
from kernelopt.worker.philox import rand
class Model(nn.Module):
    def forward(self, x, seed): return x * 2 + 1e-6 * (rand(seed, torch.arange(x.numel())).view(x.shape) > 0.5)
def get_inputs(): return [torch.randn(6, 8), 5]
"""
    found = at_own_sizes(reference, "def kernel_function(x, seed): return x * 2\n")
    assert found["status"] == "INVALID_TASK" and "the result with another 'seed' is within" in found["summary"]
    exact = reference + 'COMPARE = {0: {"atol": 0, "rtol": 0}}\n'
    assert at_own_sizes(exact, "def kernel_function(x, seed): return x * 2\n")["status"] == "WRONG_VALUES"
    unused = reference.replace("1e-6", "0.0")
    assert at_own_sizes(unused, "def kernel_function(x, seed): return x * 2\n")["status"] == "OK"


def test_arguments_that_hold_several_tensors_are_declared_as_one(judged, at_own_sizes):
    reference = """
class Model(nn.Module):
    def forward(self, states, x):
        for state in states:
            state.mul_(0.5).add_(x)
def get_inputs(): return [[torch.randn(6, 8), torch.randn(6, 8)], torch.randn(6, 8)]
MUTATES = ("states",)
"""
    kernel = "def kernel_function(states, x):\n    for state in states[:LAST]: state.copy_(state / 2 + x)\n"
    assert judged(reference, kernel.replace("LAST", ""))["status"] == "OK"
    assert at_own_sizes(reference, kernel.replace("LAST", "1"))["status"] == "WRONG_VALUES"


@pytest.mark.parametrize("effect", ["states[0] = states[0] / 2 + x", "states.clear()", "own[0] = own[0] * 2"])
def test_a_list_among_the_inputs_holds_the_same_tensors_after_a_call(at_own_sizes, effect):
    reference = """
class Model(nn.Module):
    def forward(self, states, own, x):
        for state in states:
            state.mul_(0.5).add_(x)
        return own[0] + x
def get_inputs(): return [[torch.randn(6, 8), torch.randn(6, 8)], [torch.randn(6, 8)], torch.randn(6, 8)]
MUTATES = ("states",)
"""
    kernel = "def kernel_function(states, own, x):\n    for state in states: state.copy_(state / 2 + x)\n    y = own[0] + x\n"
    assert at_own_sizes(reference, f"{kernel}    return y\n")["status"] == "OK"
    found = at_own_sizes(reference, f"{kernel}    {effect}\n    return y\n")
    assert found["status"] == "INPUT_MUTATED" and "holds other things after the call" in found["summary"]


def test_a_reference_that_appends_to_a_list_among_its_inputs_is_told_so(at_own_sizes):
    reference = """
class Model(nn.Module):
    def forward(self, states, x):
        states.append(x * 2)
        return torch.stack(states).sum(0)
def get_inputs(): return [[torch.randn(6, 8)], torch.randn(6, 8)]
"""
    found = at_own_sizes(reference, "def kernel_function(states, x): return states[0] + 2 * x\n")
    assert found["status"] == "INVALID_TASK" and "puts tensors into a list" in found["summary"], found["summary"]


def test_one_of_several_tensors_of_a_declared_argument_may_stay(at_own_sizes):
    pairs = """
class Model(nn.Module):
    def forward(self, pairs):
        for x, sums in pairs: sums.add_(x)
def get_inputs(): return [[(torch.randn(6, 8), torch.randn(6, 8)), (torch.randn(5), torch.randn(5))]]
MUTATES = ("pairs",)
"""
    adds = "def kernel_function(pairs):\n    for x, sums in pairs: sums += x\n"
    assert at_own_sizes(pairs, adds)["status"] == "OK"
    assert at_own_sizes(pairs, adds.replace("in pairs", "in pairs[:1]"))["status"] == "WRONG_VALUES"
    found = at_own_sizes(pairs, adds.replace("sums += x", "sums += x; x *= 1.00001"))
    assert found["status"] == "WRONG_VALUES" and "leaves as they were" in found["summary"]
    found = at_own_sizes(pairs.replace("add_(x)", "add_(x * 1e-9)"), adds)
    assert found["status"] == "INVALID_TASK" and "leaving it as it was" in found["summary"]


@pytest.mark.parametrize(
    ("declaration", "said"),
    [
        ('MUTATES = ("cash",)', "names 'cash', which is no parameter of forward; it has: cache, values, slots"),
        ("MUTATES = 'cache'", "MUTATES must be a tuple"),
        ("MUTATES = (1.0,)", "MUTATES must be a tuple"),
        ("MUTATES = (-1,)", "begin at 0"),
        ("MUTATES = (7,)", "MUTATES names position 7, but get_inputs gives 3 inputs"),
        ('LAYOUTS = "dense"', 'it can only be "contiguous"'),
        ("COMPARE = [1]", "COMPARE must be a dict"),
        ("COMPARE = {'values': {'atol': 1}}", "has the key 'values'"),
        ("COMPARE = {0: {'tolerance': 1}}", "has the mode 'tolerance'; the modes are atol, rtol, share"),
        ("COMPARE = {0: {'share': 0.5}}", "share is 0.5; it must be a number from 0.9 to 1"),
        ("COMPARE = {0: {'rtol': '0.1'}}", "rtol is '0.1'"),
        ("COMPARE = {0: {'ties': 'scores'}}", "ties must name the parameter"),
        ("COMPARE = {0: {'set': 0.5}}", "set must be the dimension"),
        ("COMPARE = {0: {'valid': 1}}", "valid must be a function"),
        ("COMPARE = {0: {'set': -1, 'atol': 1}}", "set goes with valid alone"),
        ("MUTATE = ('cache',)", "MUTATE is no declaration, and nothing uses it: write MUTATES, or leave it out"),
        ("LAYOUT = 'contiguous'", "write LAYOUTS"),
    ],
)
def test_a_declaration_that_cannot_be_read_makes_no_task(at_own_sizes, declaration, said):
    found = at_own_sizes(WRITE + declaration + "\n", RIGHT)
    assert found["status"] == "INVALID_TASK" and said in found["summary"], found["summary"]


def test_constants_of_a_file_are_no_misspelt_declarations(judged):
    task = WRITE.replace("def get_inputs", "SAMPLE, EXAMPLES, LAYERS, mutate = 0, 1, 2, 3\ndef get_inputs")
    task = task.replace("class Model(nn.Module):", "class Model(nn.Module):\n    sample = lambda self: SAMPLE")
    found = judged(task + 'MUTATES = ("cache",)\n', RIGHT)
    assert found["status"] == "OK", found["summary"]


def test_inputs_that_calls_change_are_restored_when_they_are_timed(interpreter, tmp_path):
    kernel, reference = written(
        tmp_path, WRITE, RIGHT.replace("cache[slots]", "assert cache.abs().max() < 99\n    cache[slots]")
    )
    # A call on what another left would find 100 in the cache.
    reference.write_text(reference.read_text().replace("= values", "= values + 100"))
    kernel.write_text(kernel.read_text().replace("= values", "= values + 100"))
    cases = timing.inputs(interpreter, reference, None, ["default"])
    timed = timing.measure(interpreter, kernel, reference.rename(tmp_path / "b.py"), cases, warmup_ms=1, rep_ms=1)
    assert "restored before each call" in timed["default"].timing.clock
    stored = [timed["default"].outputs]
    assert Oracle(interpreter, tmp_path / "b.py").fault_of_timed(stored) is None


def test_a_kernel_that_leaves_its_input_alone_when_it_is_timed_is_caught(interpreter, tmp_path):
    lazy = RIGHT.replace("cache[slots]", "CALLS.append(1)\n    if len(CALLS) > 5: return\n    cache[slots]")
    kernel, reference = written(tmp_path, WRITE, "CALLS = []\n" + lazy)
    cases = timing.inputs(interpreter, reference, None, ["default"])
    try:
        timed = timing.measure(interpreter, kernel, None, cases, warmup_ms=1, rep_ms=1)["default"]
        fault = Oracle(interpreter, reference).fault_of_timed([timed.outputs])
    except timing.KernelFailed as error:
        fault = error
    assert fault is not None and fault.status in ("WRONG_VALUES", "CHEAT_SUSPECT")


TOP = """
class Model(nn.Module):
    def forward(self, scores):
        values, indices = torch.sort(scores, dim=-1, descending=True, stable=True)
        return values[:, :5], indices[:, :5]
def get_inputs(*, rows=9, count=40): return [torch.randint(0, 20, (rows, count)).float() + 0 * torch.rand(rows, count)]
COMPARE = {1: {"ties": "scores"}}
"""
LAST_FIRST = """
def kernel_function(scores):
    order = torch.sort(scores.flip(-1), dim=-1, descending=True, stable=True)
    return order.values[:, :5], (scores.shape[-1] - 1 - order.indices)[:, :5]
"""


def test_ties_may_go_either_way_where_the_task_says_so(judged, at_own_sizes):
    assert at_own_sizes(TOP.replace("COMPARE =", "IGNORED ="), LAST_FIRST)["status"] == "WRONG_VALUES"
    found = judged(TOP, LAST_FIRST)
    assert found["status"] == "OK", found["summary"]
    assert found["declared"]["compare"] == {"1": {"ties": "scores"}} and "COMPARE 1: ties: scores" in found["summary"]
    assert "worst error 0;" in found["summary"], found["summary"]
    found = at_own_sizes(TOP, LAST_FIRST.replace("order.indices)[:, :5]", "order.indices)[:, :5].clamp(max=30)"))
    assert found["status"] == "WRONG_VALUES" and "points to another score" in found["summary"]
    assert "look at masks, at ties" in found["summary"] and "tl.dot" not in found["summary"]


QUANTISED = """
class Model(nn.Module):
    def forward(self, x): return torch.round(x * 20).clamp(-127, 127).to(torch.int8)
def get_inputs(*, rows=64, columns=128): return [torch.randn(rows, columns)]
"""


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ("0, ::64", "whole numbers must be equal, and nearly all are: if these are roundings that may fall either way"),
        ("::2", "look at masks, at ties and rounding, and at the first and last index"),
    ],
)
def test_roundings_that_fall_otherwise_may_be_declared(at_own_sizes, others, said):
    kernel = "def kernel_function(x):\n    y = torch.round(x * 20).clamp(-127, 127).to(torch.int8)\n"
    kernel += f"    y[{others}] ^= 1\n    return y\n"
    found = at_own_sizes(QUANTISED, kernel)
    assert found["status"] == "WRONG_VALUES" and said in found["summary"], found["summary"]
    declared = QUANTISED + "COMPARE = {0: {'share': 0.999, 'cap': 1}}\n"
    assert (at_own_sizes(declared, kernel)["status"] == "OK") == ("COMPARE" in found["summary"])


def test_a_bound_that_lets_an_empty_answer_pass_makes_no_task(at_own_sizes):
    reference = NORM.replace("residual.add_(x)", "residual = residual + x") + "COMPARE = {0: {'atol': 9.0}}\n"
    found = at_own_sizes(reference, ON_A_COPY)
    assert found["status"] == "INVALID_TASK" and "an output of zeros is within the tolerance" in found["summary"]


def test_a_changed_input_is_compared_as_declared_by_its_name(at_own_sizes):
    rough = ADDS.replace("residual += x", "residual += x * 1.004")
    assert at_own_sizes(DECLARED, rough)["status"] == "WRONG_VALUES"
    loose = DECLARED + "COMPARE = {'residual': {'atol': 0.1}, 0: {'atol': 0.1}}\n"
    assert at_own_sizes(loose, rough)["status"] == "OK"  # a single column would be a sign, which any error may turn
    assert at_own_sizes(loose.replace("'residual'", "1"), rough)["status"] == "OK"
    assert at_own_sizes(loose, ON_A_COPY)["status"] == "WRONG_VALUES"


def test_what_a_mask_leaves_out_of_a_changed_input_may_be_touched(judged):
    reference = WRITE + "COMPARE = {'cache': {'valid': lambda cache: torch.arange(len(cache)) > 0}}\n"
    touches = "    cache[ROW] *= 1.00001\n"
    reference = reference.replace("torch.randperm(40)[:5]", "1 + torch.randperm(39)[:5]")
    assert judged(reference, RIGHT + touches.replace("ROW", "0"))["status"] == "OK"
    found = judged(reference, RIGHT + touches.replace("ROW", "(slots[0] % 39) + 1"))
    assert found["status"] == "WRONG_VALUES" and "leaves as they were" in found["summary"]


MASKED = """
class Model(nn.Module):
    def forward(self, x, n): return x * 2, x + 1
def get_inputs(): return [torch.randn(6, 8), 3]
"""


@pytest.mark.parametrize(
    ("compare", "said"),
    [
        ('{0: {"valid": lambda q: q > 0}}', "`valid` in COMPARE raises TypeError"),
        ('{0: {"set": lambda x: x.nonsense()}}', "`set` in COMPARE raises AttributeError"),
        ('{0: {"valid": lambda x: x > 99}}', "anything as output 0, of which COMPARE's `valid` selects nothing"),
    ],
)
def test_a_function_that_says_nothing_of_the_output_makes_no_task(at_own_sizes, compare, said):
    kernel = "def kernel_function(x, n): return x * 2, x + 1\n"
    found = at_own_sizes(MASKED + f"COMPARE = {compare}\n", kernel)
    assert found["status"] == "INVALID_TASK" and said in found["summary"], found["summary"]


def test_an_argument_that_is_none_changes_nothing(at_own_sizes):
    optional = """
class Model(nn.Module):
    def forward(self, x, residual=None):
        return x.tanh() if residual is None else residual.add_(x).tanh()
def get_inputs(): return [torch.randn(6, 8), torch.randn(6, 8)]
def get_workloads(): return {"first layer": lambda: [torch.randn(6, 8), None]}
MUTATES = ("residual",)
"""
    kernel = optional[: optional.index("def get_inputs")].replace("Model", "ModelNew")
    found = at_own_sizes(optional, kernel)
    assert found["status"] == "OK" and "first layer" in found["summary"], found["summary"]
    assert at_own_sizes(optional, kernel.replace(".add_(x)", ".add(x)"))["status"] == "WRONG_VALUES"


DRAWS = """
class Model(nn.Module):
    def forward(self, probs, seed): return probs * 1.0
def get_inputs(): return [torch.softmax(torch.randn(ROWS, 9), -1).repeat(64 // ROWS, 1), 17]
SAMPLES = {0: {"tvd": 0.06, "draws": 8_000}}
"""
DRAWN = """
def kernel_function(probs, seed):
    return torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(int(seed)))[:, 0]
"""


def test_each_of_equal_rows_is_drawn_for_itself_and_too_few_draws_are_said(at_own_sizes):
    greedy = DRAWN.replace("[:, 0]", "[:, 0].index_fill(0, torch.tensor([63]), int(probs[63].argmax()))")
    found = at_own_sizes(DRAWS.replace("ROWS", "1"), greedy)
    assert found["status"] == "WRONG_VALUES" and "draws of row 63 alone" in found["summary"], found["summary"]
    assert "tl.dot" not in found["summary"]
    found = at_own_sizes(DRAWS.replace("ROWS", "64"), DRAWN)
    assert found["status"] == "OK" and "output 0: 400 of 8000 declared draws, too few" in found["summary"]
