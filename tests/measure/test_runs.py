"""A candidate's cases in one process, or in several side by side."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from kernelopt.case_types import Variant
from kernelopt.device import standing
from kernelopt.device.outcomes import Outcome
from kernelopt.errors import UsageError
from kernelopt.measure import cases, runs, verify
from kernelopt.measure.cases import Case, slow_in_interpreter
from kernelopt.session.subject import KernelUnderTest
from kernelopt.statuses import Status

CONTIGUOUS = Variant("3 rows", [[0, 0, 3]], "contiguous", None, None)


def a_case(path, number: int, variant: Variant | None = None) -> Case:
    file = path / f"{number}.pt"
    file.write_bytes(b"0" * 1000)
    return Case("default", number, variant, str(file), "fp32", [[4]])


def test_the_tasks_own_cases_stay_together_and_variants_are_dealt_out(tmp_path):
    own = [a_case(tmp_path, number) for number in range(2)]
    variants = [a_case(tmp_path, number, CONTIGUOUS) for number in range(2, 5)]
    assert runs.parts_of(own + variants, 1) == [own + variants]
    assert runs.parts_of(own + variants, 3) == [own, [variants[0], variants[2]], [variants[1]]]
    assert runs.parts_of(own, 3) == [own]


@pytest.mark.parametrize(
    ("free", "cores", "processes"),
    [(80 << 30, 16, 5), (80 << 30, 4, 2), (80 << 30, 1, 1), (4 << 30, 16, 1), (0, 16, 1)],
)
def test_processes_share_the_gpu_where_its_memory_and_the_cores_suffice(tmp_path, monkeypatch, free, cores, processes):
    monkeypatch.setattr(runs.gpu, "shared_bytes", lambda: free)
    monkeypatch.setattr(runs.os, "sched_getaffinity", lambda _: set(range(cores)))
    assert runs.processes_at_once(SimpleNamespace(gpu="stand-in"), [a_case(tmp_path, 0)]) == processes


def test_side_by_side_the_cases_come_to_the_same_in_the_same_order(problem, interpreter, monkeypatch):
    verdicts = {}
    for processes in (1, 3):
        monkeypatch.setattr(runs, "processes_at_once", lambda *_, processes=processes: processes)
        verdicts[processes] = verify.verify(interpreter, KernelUnderTest(**problem), ["default"], seeds=2)
    one, three = ([(case.variant, case.status) for case in verdict.cases] for verdict in verdicts.values())
    assert one == three and {status for _, status in one} == {Status.OK} and len(one) > 3


def test_a_crash_in_a_process_for_variants_is_the_verdict(problem, interpreter, monkeypatch):
    monkeypatch.setattr(runs, "processes_at_once", lambda *_: 3)
    text = problem["kernel"].read_text()
    crash = "        if x.shape[0] == 1:\n            __import__('ctypes').string_at(0)\n"
    head, forward, rest = text.partition("    def forward(self, x):\n")
    problem["kernel"].write_text(head + forward + crash + rest)
    verdict = verify.verify(interpreter, KernelUnderTest(**problem), ["default"], seeds=2)
    assert verdict.status == Status.ILLEGAL_ACCESS, verdict.summary


def test_a_kernel_that_kills_its_server_beside_others_did_not_run_out_of_time(problem, interpreter, monkeypatch):
    monkeypatch.setattr(runs, "processes_at_once", lambda *_: 3)
    monkeypatch.setattr(interpreter, "isolation", "none")
    kill = "        __import__('ctypes').CDLL(None).kill(__import__('os').getppid(), 9)\n"
    head, forward, rest = problem["kernel"].read_text().partition("    def forward(self, x):\n")
    problem["kernel"].write_text(head + forward + kill + rest)
    verdict = verify.verify(interpreter, KernelUnderTest(**problem), ["default"], seeds=2)
    assert verdict.status == Status.RUNTIME_ERROR, verdict.summary


def test_where_memory_is_short_side_by_side_the_cases_run_once_more_alone(problem, tmp_path, monkeypatch):
    out_of_memory = {"error": {"status": "OOM", "message": "CUDA out of memory"}}
    asked = []

    def side_by_side(_, jobs):
        asked.append([len(job.arguments["cases"]) for job in jobs])
        result = out_of_memory if len(jobs) > 1 else {"cases": [out_of_memory]}
        return [Outcome(result, 0, None, False, 1.0, "") for _ in jobs]

    monkeypatch.setattr(standing, "side_by_side", side_by_side)
    monkeypatch.setattr(runs, "processes_at_once", lambda *_: 3)
    cases = [a_case(tmp_path, 0), replace(a_case(tmp_path, 1), variant=CONTIGUOUS)]
    waiting = [0, 4, 0]
    own = SimpleNamespace(forked_ahead=SimpleNamespace(end=lambda: waiting.pop()))
    _, ran = runs.run(own, problem["kernel"], problem["reference"], cases, str(tmp_path), 60)
    assert asked == [[1, 1], [2]] and ran[0].report.status == Status.OOM
    monkeypatch.setattr(runs, "processes_at_once", lambda *_: 1)
    runs.run(own, problem["kernel"], problem["reference"], cases, str(tmp_path), 60)
    assert asked[2:] == [[2], [2]]  # other processes waited and held memory
    runs.run(own, problem["kernel"], problem["reference"], cases, str(tmp_path), 60)
    assert asked[4:] == [[2]]


def test_large_inputs_are_announced_where_the_interpreter_takes_minutes(tmp_path):
    small, large = (replace(a_case(tmp_path, 0), shapes=[[rows, 1024], [8]]) for rows in (8, 4096))
    assert slow_in_interpreter([small]) is None and slow_in_interpreter([]) is None
    assert "4194312 elements" in slow_in_interpreter([small, large])


def test_more_elements_than_the_interpreter_gets_through_are_refused_before_anything_runs(
    interpreter, problem, monkeypatch
):
    monkeypatch.setattr(cases, "MOST_INTERPRETED", 8 * 16)
    target = KernelUnderTest(problem["kernel"], problem["reference"])
    assert verify.verify(interpreter, target, ["default"], 2).status == Status.OK
    monkeypatch.setattr(cases, "MOST_INTERPRETED", 8 * 16 - 1)
    monkeypatch.setattr(runs, "run", lambda *_: pytest.fail("a kernel ran"))
    with pytest.raises(UsageError, match=r"default hold 128 elements, too many .* small workload with --workload"):
        verify.verify(interpreter, target, ["default"], 2)
    with interpreter.folder("inputs") as folder:
        asked = (interpreter, problem["reference"], None, ["default"], [0, 1], 60, False, folder)
        assert len(cases.prepare(*asked, for_kernel=False)) == 2
