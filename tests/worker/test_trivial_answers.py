"""Answers that compute nothing, on tasks that would take them and on others (worker.trivial_answers)."""

import torch
from kernelopt.measure import oracle
from kernelopt.worker import exploring, problem, trivial_answers
from kernelopt.worker.case_maker import CaseMaker
from kernelopt.worker.expected_outputs import ChangedInput, ExpectedOutput

ONE_OF_TWO = """
import torch
class Model(torch.nn.Module):
    def forward(self, x): return (x.sum() > 0).float() + 2
def get_inputs(): return [torch.randn(16)]
"""
TOLERANCES = oracle.tolerances(None)
ANOTHER_CALL = "the result of another call"


def bland(result, *inputs, other, bound=1e-4):
    oracle = result.double() if result.dtype == torch.float32 else result
    return trivial_answers.bland([ExpectedOutput(result, oracle, bound, list(inputs))], list(inputs), [other])


def test_answers_without_work_are_seen_on_trivial_tasks_alone():
    x, y = torch.randn(2, 50)
    assert bland(x.exp(), x, other=y.exp()) == []
    assert bland(torch.zeros(4), x, other=torch.zeros(4)) == ["an output of zeros", "the result of another call"]
    assert bland(x * 1, y, x, other=y) == []  # only the first input of that shape is tried
    assert bland(x * 1, x, other=y) == ["an input"]
    assert bland(torch.zeros(0), x, other=torch.zeros(0)) == []


def test_trivial_answers_of_eight_bit_floats():
    result = torch.tensor([1.0, 2.0, 4.0]).to(torch.float8_e4m3fn)
    assert bland(result, other=result, bound=0.125) == ["the result of another call"]


def test_a_declared_input_may_not_stay_unless_the_reference_changes_another_tensor_of_the_argument():
    before, after = torch.zeros(4), torch.ones(4)

    def changed(result: torch.Tensor, number: int) -> ExpectedOutput:
        return ExpectedOutput(result, result.double(), 1e-4, [], changed=ChangedInput(number, "caches", before))

    untouched, moved = changed(before, 0), changed(after, 1)
    assert not trivial_answers.may_stay(moved, [moved])
    assert trivial_answers.may_stay(untouched, [untouched])
    assert not trivial_answers.may_stay(untouched, [untouched, moved])


def maker_of(tmp_path, text: str) -> CaseMaker:
    path = tmp_path / "reference.py"
    path.write_text(text)
    return CaseMaker(problem.Reference(path), None, "cpu")


def results(maker: CaseMaker, seeds: range) -> list[float]:
    model = maker.loaded.model_class()
    return [model(*maker.case("default", seed).inputs).item() for seed in seeds]


def alike_and_not(maker: CaseMaker) -> tuple[int, int]:
    """(a seed whose result is that of the next one too, a seed whose result is not)"""
    found = results(maker, range(60))
    same = {found[seed] == found[seed + 1]: seed for seed in range(59)}
    return same[True], same[False]


def judged(maker: CaseMaker, seeds: list[int], monkeypatch) -> list[str]:
    """The trivial answers that the judge of an exploration finds."""
    answers = []

    class Context:
        device = "cpu"

        def answer(self, answer):
            answers.append(answer)

        def orders(self):
            yield {"files": []}

    monkeypatch.setattr(exploring, "load_reference", lambda *_: maker.loaded)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(exploring.judging.Check, "compared_with", lambda _, calls, known: known)
    exploring.judge(Context(), "", None, "default", seeds, TOLERANCES)
    return [one for expected in answers[-1]["checked"].values() for one in expected.trivial_answers]


def test_two_draws_with_the_same_result_do_not_make_a_task_trivial(tmp_path, monkeypatch):
    """An exploration of a mean loss was refused so, in one of ten. Each seed that is judged must take the answer."""
    maker = maker_of(tmp_path, ONE_OF_TWO)
    alike, other = alike_and_not(maker)
    assert judged(maker, [alike, other], monkeypatch) == [] == judged(maker, [other, alike], monkeypatch)
    assert judged(maker, [alike, alike], monkeypatch) == [ANOTHER_CALL]


def test_a_task_with_one_result_is_trivial_on_all_seeds(tmp_path, monkeypatch):
    maker = maker_of(tmp_path, ONE_OF_TWO.replace("(x.sum() > 0).float()", "0 * x.sum()"))
    assert ANOTHER_CALL in judged(maker, [3, 8], monkeypatch)
