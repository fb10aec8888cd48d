"""The oracle computes its results once for each seed where cases may share them, and never shares them otherwise."""

from dataclasses import asdict

import pytest
import torch
from kernelopt.case_types import Variant
from kernelopt.worker import judging, problem, reference_runs, tensor_files
from kernelopt.worker.case_maker import CaseMaker
from kernelopt.worker.jobs import Context

SCALE = """
import torch
class Model(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
    def forward(self, x): return self.factor * x
def get_inputs(): return [torch.randn(64)]
def get_init_inputs(): return [3.0]
"""
SIZED = "get_inputs(*, size=64): return [torch.randn(size)]"
WITH_PARAMETERS = SCALE.replace("self.factor = factor", "self.factor = torch.nn.Parameter(torch.randn(64))")
DRAWN_FACTOR = SCALE.replace("[3.0]", "[torch.randn(()).item()]")
TENSOR = SCALE.replace("[3.0]", "[torch.randn(64)]")
TOLERANCES = {"fp32": 1e-4}
SEEDS = [5, 6, 7]


@pytest.fixture
def oracle(tmp_path, monkeypatch):
    """A function from the text of a reference to (the answers on SEEDS, how often the oracle ran in float64); each case
    has calls on its own inputs, on the next seed's, and on its own again. wrong: the seed whose result is wrong as
    another case's."""
    oracles = []
    outputs = problem.oracle_outputs
    monkeypatch.setattr(problem, "oracle_outputs", lambda *args, **more: oracles.append(args) or outputs(*args, **more))

    def run(text: str, third: bool = False, wrong: int | None = None):
        path = tmp_path / f"reference_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        loaded = problem.Reference(path)
        cases = []
        for at, seed in enumerate(SEEDS):
            calls = [seed, SEEDS[(at + 1) % len(SEEDS)]] + [seed] * third
            cases.append(entry(loaded, tmp_path, seed, calls, wrong))
        cases[0]["first"] = True
        context = Context("cpu", {}, None)
        oracles.clear()
        answers = judging.check(context, str(path), None, cases, TOLERANCES).cases
        count = len(oracles)
        alone = [judging.check(context, str(path), None, [case], TOLERANCES).cases[0] for case in cases]
        assert answers == alone
        return answers, count

    return run


def entry(loaded, folder, seed, seeds_of_calls, wrong) -> dict:
    """A case whose calls left what the reference itself returns."""
    case, calls = loaded.case("default", seed, None, "cpu"), []
    for call, inputs_seed in enumerate(seeds_of_calls):
        inputs = loaded.case("default", inputs_seed, None, "cpu").inputs
        result = reference_runs.outputs(loaded, case.with_inputs(inputs), "cpu")[0]
        file = folder / f"output-{seed}-{call}.pt"
        result = result + (inputs_seed != seed and inputs_seed == wrong)
        tensor_files.save({"outputs": [result], "inputs": {}, "structure": "tensor", "state": {}}, file)
        calls.append({"inputs_seed": inputs_seed, "output": str(file)})
    return {"workload": "default", "seed": seed, "variant": None, "first": False, "calls": calls, "draws": None}


def mismatches(answers) -> list[list[int]]:
    return [[call.outputs[0].errors.mismatches for call in answer.calls] for answer in answers]


def test_results_on_a_seed_are_computed_once_for_two_cases_that_follow_each_other(oracle):
    answers, count = oracle(SCALE)
    assert mismatches(answers) == [[0, 0]] * 3
    assert count == len(SEEDS) + 1  # and the first seed once more, for the last case


def test_results_that_are_shared_still_show_a_wrong_call(oracle):
    answers, _ = oracle(SCALE, wrong=6)
    assert mismatches(answers) == [[0, 64], [0, 0], [0, 0]]


@pytest.mark.parametrize("text", [WITH_PARAMETERS, DRAWN_FACTOR, TENSOR])
def test_cases_with_parameters_or_arguments_of_their_own_share_no_results(oracle, text):
    answers, count = oracle(text)
    assert mismatches(answers) == [[0, 0]] * 3
    assert count == 2 * len(SEEDS)


def test_a_third_call_on_the_first_contents_is_compared_with_them(oracle):
    answers, _ = oracle(SCALE, third=True)
    assert mismatches(answers) == [[0, 0, 0]] * 3
    assert not any(answer.random for answer in answers)


def test_each_case_asks_whether_the_reference_is_random(oracle, monkeypatch):
    asked = []
    run = reference_runs.run
    monkeypatch.setattr(reference_runs, "run", lambda *args, **more: asked.append(args[3:]) or run(*args, **more))
    oracle(SCALE.replace("return self.factor * x", "return self.factor * torch.nn.functional.dropout(x)"))
    assert asked.count((1,)) == 2 * len(SEEDS)  # together, and alone


def test_a_reference_that_does_not_run_when_it_is_followed_runs_by_itself(oracle):
    alone = "if torch.overrides._get_current_function_mode_stack(): raise RuntimeError('no mode')\n        return"
    answers, _ = oracle(SCALE.replace("def forward(self, x): return", f"def forward(self, x):\n        {alone}"))
    assert mismatches(answers) == [[0, 0]] * 3


def test_a_variant_that_needs_more_memory_than_there_is_is_left_out_alone(tmp_path):
    path = tmp_path / "reference.py"
    full = "if len(x) == 31: raise torch.OutOfMemoryError('CUDA out of memory')\n        return"
    path.write_text(SCALE.replace("forward(self, x): return", f"forward(self, x):\n        {full}"))
    path.write_text(path.read_text().replace("get_inputs(): return [torch.randn(64)]", SIZED))
    own = entry(problem.Reference(path), tmp_path, 5, [5], None)
    variants = [{**own, "variant": {"name": f"{size}", "sizes": [], "keywords": {"size": size}}} for size in (31, 32)]
    answers = judging.check(Context("cpu", {}, None), str(path), None, [own, *variants], TOLERANCES).cases
    assert [answer.broken for answer in answers] == [None, "OutOfMemoryError: CUDA out of memory", None]
    path.write_text(path.read_text().replace("== 31", "== 64"))
    problem.load_module.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        judging.check(Context("cpu", {}, None), str(path), None, [own], TOLERANCES)


def test_more_outputs_at_other_sizes_are_judged_like_the_others(tmp_path):
    path = tmp_path / "reference.py"
    returns = "return x\ndef get_inputs(*, parts=3): return [[torch.randn(40) for _ in range(parts)]]\n"
    path.write_text(f"import torch\nclass Model(torch.nn.Module):\n    def forward(self, x): {returns}")
    cases = []
    for parts, variant in ((3, None), (4, {"name": "more", "sizes": [], "keywords": {"parts": 4}})):
        outputs = problem.Reference(path).case("default", 5, None, "cpu", {"parts": parts}).inputs[0]
        outputs[3:] = [outputs[-1] + 1] * (parts - 3)
        file = tmp_path / f"output-{parts}.pt"
        tensor_files.save({"outputs": outputs, "inputs": {}, "structure": None, "state": {}}, file)
        calls = [{"inputs_seed": 5, "output": str(file)}]
        cases.append({"workload": "default", "seed": 5, "variant": variant, "first": False, "calls": calls})
    answers = judging.check(Context("cpu", {}, None), str(path), None, cases, TOLERANCES).cases
    assert [answer.broken for answer in answers] == [None, None]
    assert [output.errors.mismatches for output in answers[1].outputs] == [0, 0, 0, 40]


ONE_SUM = """
import torch
COMPARE = {0: {"rms": 0.01}}
class Model(torch.nn.Module):
    def forward(self, x, y, z): return (x * y).sum(-1, keepdim=True) * z
def get_inputs(*, rows=64): return [torch.randn(rows, 128) for _ in range(3)]
"""


@pytest.mark.parametrize("by_keywords", [True, False])
def test_a_sum_near_0_is_no_scale_for_its_error(tmp_path, by_keywords):
    """At one row the output is a sum and its multiples. Of random terms one sum in seven is so near 0 that roundings to
    bf16 are more than 1 % of it. A kernel is right on it as it is on others, and one that is 5 % off is wrong."""
    path = tmp_path / "reference.py"
    path.write_text(ONE_SUM if by_keywords else ONE_SUM.replace("*, rows=64", "").replace("rows", "64"))
    loaded = problem.Reference(path)
    maker = CaseMaker(loaded, None, "cpu")
    one = {"keywords": {"rows": 1}, "sizes": []} if by_keywords else {"sizes": [[n, 0, 1] for n in range(3)]}
    variant = Variant("one", **one)

    def refusals(off: float) -> int:
        cases = []
        for seed in range(60):
            x, y, z = maker.case("default", seed, variant).inputs
            rounded = (x.bfloat16().float() * y.bfloat16().float()).sum(-1, keepdim=True).bfloat16().float() * z
            file = str(tmp_path / f"{seed}.pt")
            tensor_files.save({"outputs": [rounded * off], "inputs": {}, "structure": "Tensor", "state": {}}, file)
            call = {"inputs_seed": seed, "output": file}
            cases.append({"workload": "default", "seed": seed, "variant": asdict(variant), "calls": [call]})
        answers = judging.check(Context("cpu", {}, None), str(path), None, cases, TOLERANCES).cases
        return sum(bool(answer.calls[0].outputs[0].errors.refused) for answer in answers)

    assert refusals(1.0) == 0 and refusals(1.05) > 40
