"""Exploring: the candidates of files and of a SPACE, who is dropped, and the tool on the CPU interpreter."""

import contextlib
import itertools
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import BUNDLE, FIXTURES, call_tool, explored, tool_json
from kernelopt.audit import workspace_audit
from kernelopt.case_types import OracleCheck
from kernelopt.compiling.compiled import Compiled
from kernelopt.device import sandbox, standing, stop_signal
from kernelopt.device.outcomes import Fault, Outcome
from kernelopt.device.spent import Spent
from kernelopt.errors import Refused, Stopped, UsageError
from kernelopt.explore import candidates, entrants, halving, headers, opponents, run, store, table
from kernelopt.explore.race import Race, time_of_turn
from kernelopt.hardware import targets
from kernelopt.measure import cases
from kernelopt.session import explorations
from kernelopt.session.digests import digest
from kernelopt.session.record_store import RecordStore
from kernelopt.statuses import Status
from kernelopt.worker import faults

SPACE = """
import torch
import triton
import triton.language as tl

{space}
BLOCK: int = 128
WARPS = 4


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, {left} + tl.load(y + at, at < n), at < n)


def kernel_function(x, y):
    {first}
    out = torch.empty_like(x)
    add[(triton.cdiv(x.numel(), BLOCK),)](x, y, out, x.numel(), BLOCK, num_warps=WARPS)
    return out
"""
REFERENCE = """
import torch
class Model(torch.nn.Module):
    def forward(self, x, y): return x + y
def get_inputs(): return [torch.randn(8, 64), torch.randn(8, 64)]
"""


def source(space="", left="tl.load(x + at, at < n)", first="pass") -> str:
    return SPACE.format(space=f"SPACE = {space}" if space else "", left=left, first=first)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "reference.py").write_text(REFERENCE)
    (tmp_path / "c").mkdir()
    return tmp_path


# --- candidates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "names"),
    [
        (
            '{"BLOCK": [64, 256], "WARPS": [2, 4]}',
            ["BLOCK=64,WARPS=2", "BLOCK=64,WARPS=4", "BLOCK=256,WARPS=2", "BLOCK=256,WARPS=4"],
        ),
        ('[{"BLOCK": 64}, {"BLOCK": 32, "WARPS": 1}]', ["BLOCK=64", "BLOCK=32,WARPS=1"]),
        ('[{"BLOCK": 64}, {}]', ["BLOCK=64", None]),
        ('[{"BLOCK": 64}, {"BLOCK": 64}, {"WARPS": 4, "BLOCK": 64}]', ["BLOCK=64"]),  # WARPS is 4 in the file
        ('[{"BLOCK": 64}, {}, {"BLOCK": 128}, {}]', ["BLOCK=64", None]),  # and BLOCK 128
        ('[{"BLOCK": 64, "WARPS": 2}, {"WARPS": 2, "BLOCK": 64}]', ["BLOCK=64,WARPS=2"]),
        ('{"BLOCK": [64], "WARPS": ["a b", "two\\nlines"]}', ["BLOCK=64,WARPS=a b", "BLOCK=64,WARPS='two\\nlines'"]),
    ],
)
def test_a_space_is_a_product_of_lists_or_a_list_of_configurations(folder, space, names):
    (folder / "c/space.py").write_text(source(space))
    found = candidates.from_paths([folder / "c"])
    assert [candidate.name for candidate in found] == [f"space[{name}]" if name else "space" for name in names]
    first = found[0]
    assert "BLOCK: int = 64\n" in first.source and "SPACE" not in first.source and first.config["BLOCK"] == 64
    compile(first.source, "candidate", "exec")


NO_SPACES = [
    ("[]", "SPACE is empty; it must be a literal: a list of dicts, or a dict of lists"),
    ("{}", "SPACE is empty; "),
    ('{"BLOCK": 64}', "SPACE['BLOCK'] is 64; each entry is a list of values"),
    ('{"BLOCK": [64], "WARPS": []}', "SPACE['WARPS'] is []; each entry is a list of values, at least one"),
    ("64", "SPACE is 64; it must be a literal: a list of dicts, or a dict of lists"),
    ('[{"BLOCK": 64}, {}, "abc"]', "SPACE[2] is 'abc'; each entry is a dict of constants"),
    ('[{"BLOCK": 64}, {"BLOCK": WARPS}]', "SPACE[1] is {'BLOCK': WARPS}, which is no literal"),
    ('[{"BLOCK": n} for n in (1, 2)]', "SPACE is [{'BLOCK': n} for n in (1, 2)]; it must be a literal: "),
    ('{"ROWS": [1, 2]}', "names ROWS, which the module does not assign"),
    ('{"SPACE": [1, 2]}', "names SPACE, which the module does not assign"),
    ('{"BLOCK": range(4)}', "SPACE['BLOCK'] is range(4); each entry is a list of values"),
    ('{["BLOCK"]: [64]}', "SPACE is {['BLOCK']: [64]}, which is no literal"),
    ("{**others}", "SPACE[**] is others; each entry is a list of values"),
    ('[{"BLOCK": 64}]\nSPACE += [{"BLOCK": 32}]', "line 7: SPACE += [{'BLOCK': 32}] is not read; "),
    ('[{"BLOCK": 64}]\nSPACE.append({"BLOCK": 32})', "line 7: SPACE.append({'BLOCK': 32}) is not read; "),
    ('{"BLOCK": [64]}\nSPACE["WARPS"] = [2]', "line 7: SPACE['WARPS'] = [2] is not read; "),
    ("[]\nfor n in 64, 32:\n    SPACE.append({'BLOCK': n})", "line 8: SPACE.append({'BLOCK': n}) is not read; "),
    ('[{}]\nSPACE = [{"BLOCK": 64}]', "line 6: SPACE = [{}] is not read; write all configurations in one assignment"),
]
WITHOUT_ONE = [
    ("if True:\n    SPACE = [{'BLOCK': 64}]", "line 7: SPACE = [{'BLOCK': 64}] is not read; "),
    ("SPACE = CONFIGURATIONS = [{'BLOCK': 64}]", "line 6: SPACE = CONFIGURATIONS = [{'BLOCK': 64}] is not read; "),
]


@pytest.mark.parametrize(("text", "message"), WITHOUT_ONE)
def test_a_space_that_would_not_be_seen_is_refused(folder, text, message):
    (folder / "c/space.py").write_text(source().replace("\n\nBLOCK", f"\n{text}\nBLOCK"))
    (refused,) = candidates.from_paths([folder / "c"])
    assert message in refused.error


def test_a_name_of_a_function_is_no_space(folder):
    (folder / "c/right.py").write_text(source(first="SPACE = [x]; SPACE.append(y)"))
    (folder / "c/shown.py").write_text(source("[{}]") + 'if __name__ == "__main__":\n    print(SPACE)\n')
    assert [one.error for one in candidates.from_paths([folder / "c"])] == [None, None]


@pytest.mark.parametrize(("space", "message"), NO_SPACES)
def test_a_space_that_is_none_costs_its_file_alone(folder, space, message):
    """It ended the whole exploration."""
    (folder / "c/space.py").write_text(source(space))
    (folder / "c/right.py").write_text(source())
    right, wrong = candidates.from_paths([folder / "c"])
    assert (right.name, right.error, wrong.name, wrong.config) == ("right", None, "space", {})
    assert wrong.error.startswith(f"{folder / 'c/space.py'}: ") and message in wrong.error
    assert wrong.source == source(space)


def test_a_file_that_is_no_python_costs_itself_alone(folder):
    """The message is Python's own: what, in which file and line, and that line."""
    (folder / "c/closed.py").write_text("import torch\n\ndef kernel_function(x, y):\n    return x + (y\n")
    (folder / "c/latin.py").write_bytes("# \xfc\n".encode("latin-1"))
    (folder / "c/linked.py").symlink_to(folder / "nowhere.py")
    (folder / "c/named.py").write_text(source().replace("kernel_function", "kernel_fn"))
    (folder / "c/nested.py").write_text("x = " + "-" * 100_000 + "1\n")
    (folder / "c/right.py").write_text(source())
    found = {candidate.name: candidate.error for candidate in candidates.from_paths([folder / "c"])}
    assert list(found) == ["closed", "latin", "linked", "named", "nested", "right"] and found["right"] is None
    assert found["closed"].splitlines() == [
        f"SyntaxError: '(' was never closed ({folder / 'c/closed.py'}, line 4)",
        "    return x + (y",
        "               ^",
    ]
    assert found["latin"] == f"{folder / 'c/latin.py'} is no text in UTF-8: byte 2 is 0xfc"
    assert found["linked"] == f"{folder / 'c/linked.py'} cannot be read: No such file or directory"
    assert found["named"] == f"{folder / 'c/named.py'} is no kernel: it must define ModelNew or kernel_function"
    assert str(folder / "c/nested.py") in found["nested"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"space": source(str({"BLOCK": list(range(600))}))}, "600 candidates are more than"),
        ({"a": "x = 1\n", "b": "y = 1\n"}, "no candidate in .*: pass .py files with ModelNew or kernel_function"),
        ({}, "no candidate in"),
    ],
)
def test_candidates_that_are_too_many_or_none_are_refused_with_a_sentence(folder, files, message):
    for name, text in files.items():
        (folder / "c" / f"{name}.py").write_text(text)
    with pytest.raises(UsageError, match=message):
        candidates.from_paths([folder / "c"])


def test_a_path_that_is_not_there_is_refused(folder):
    (folder / "c/right.py").write_text(source())
    with pytest.raises(UsageError, match=r"wrong\.py is neither a file nor a folder"):
        candidates.from_paths([folder / "c/right.py", folder / "c/wrong.py"])


@pytest.mark.parametrize(
    ("written", "becomes"),
    [
        ("WARPS = 4; BLOCK = 128", "WARPS = 4; BLOCK = 64"),
        ("BLOCK: tl.constexpr = 128  # a global", "BLOCK: tl.constexpr = 64  # a global"),
        ("BLOCK = tl.constexpr(128)", "BLOCK = tl.constexpr(64)"),
        ("BLOCK: int = (\n    128\n)", "BLOCK: int = (\n    64\n)"),
        ("PI = 'π'; BLOCK = 128", "PI = 'π'; BLOCK = 64"),
        ("SPACE = [{'BLOCK': 64}]; BLOCK = 128", "pass; BLOCK = 64"),
        ("BLOCK = 128; SPACE = [\n    {'BLOCK': 64},\n]", "BLOCK = 64; pass"),
        ("BLOCK = 128\nSPACE = [\n    {'BLOCK': 64},\n]\nREST = 1", "BLOCK = 64\nREST = 1"),
    ],
)
def test_only_the_value_of_a_constant_changes(folder, written, becomes):
    """What stood beside it on its line was lost, and a global that a kernel reads was no longer a constexpr."""
    space = "" if "SPACE" in written else "SPACE = [{'BLOCK': 64}]\n"
    kernel = "\ndef kernel_function(x):\n    return x\n"
    (folder / "c/k.py").write_text(f"{space}{written}{kernel}")
    (found,) = candidates.from_paths([folder / "c/k.py"])
    assert found.source == f"{becomes}{kernel}"


def test_an_empty_configuration_is_the_files_own_constants(folder):
    """A list of "as it is, and these" was refused, after a GPU had been asked for."""
    (folder / "c/k.py").write_text(source('[{}, {"BLOCK": 64}]'))
    own, other = candidates.from_paths([folder / "c/k.py"])
    assert (own.name, own.config, other.name) == ("k", {}, "k[BLOCK=64]")
    assert own.source == other.source.replace("= 64", "= 128") and "BLOCK: int = 128\n" in own.source
    assert "SPACE" not in own.source


@pytest.mark.parametrize("together", ["BLOCK, ROWS = 128, 2", "BLOCK = ROWS = 128"])
def test_a_constant_of_a_space_is_assigned_on_its_own(folder, together):
    (folder / "c/k.py").write_text(source('{"BLOCK": [64]}').replace("BLOCK: int = 128", together))
    (refused,) = candidates.from_paths([folder / "c/k.py"])
    assert refused.error.endswith("does not assign at its top level on its own, as BLOCK = …")


def probing(space: str) -> str:
    """A kernel that can leave out its loads."""
    left = "(0.0 if PROBE != '' else 1.0) * tl.load(x + at, at < n)"
    text = source(space).replace("WARPS = 4", "WARPS = 4\nPROBE = tl.constexpr('')")
    return text.replace("tl.load(x + at, at < n)", left)


def test_a_probe_is_a_configuration_whose_probe_is_true(folder):
    file = folder / "c" / "k.py"
    file.write_text(probing('[{}, {"PROBE": "no loads"}, {"PROBE": 0, "WARPS": 8}]'))
    found = candidates.of_file(file)
    assert [one.name for one in found if one.is_probe] == ["k[PROBE=no loads]"] and len(found) == 3
    file.write_text(f"{source()}\nPROBE = tl.constexpr(True)\n")
    assert [one.is_probe for one in candidates.of_file(file)] == [True]
    file.write_text(f"{source()}\nPROBE = BLOCK > 64\n")  # known when it runs, too late
    assert [one.is_probe for one in candidates.of_file(file)] == [False]


def test_a_probe_is_run_though_it_is_wrong(folder, run_here):
    (folder / "c" / "k.py").write_text(probing('[{}, {"PROBE": "no loads"}]'))
    options = ("--reference", folder / "reference.py", "--device", "cpu-interpreter")
    result = tool_json("explore_kernels.py", folder / "c", *options, run=run_here)
    own, probe = (next(row for row in result["rows"] if row["name"] == name) for name in ("k", "k[PROBE=no loads]"))
    assert (own["status"], own["probe"], probe["status"], probe["probe"]) == ("OK", False, "OK", True)
    assert probe["opponent"]
    assert any(line.split()[:3] == ["k[PROBE=no", "loads]", "probe"] for line in table.lines(result, None))


def test_an_opponent_with_a_candidates_name_gets_another(folder):
    """The file of the one was written over that of the other, and the candidate could not be kept."""
    (folder / "o").mkdir()
    for path in ("c/k.py", "o/k.py"):
        (folder / path).write_text(source())
    subject = SimpleNamespace(workspace=None, reference=folder / "reference.py")
    names = [str(folder / "o/k.py"), "eager"]
    assert list(opponents.of(subject, names, folder, ["k", "eager"])) == ["k (opponent)", "eager (opponent)"]
    assert list(opponents.of(subject, names, folder, ["row"])) == ["k", "eager"]
    with pytest.raises(UsageError, match="two opponents have the name k; rename a file"):
        opponents.of(subject, [str(folder / "o/k.py"), str(folder / "c/k.py")], folder, [])


def test_explorations_that_end_at_once_are_two(session):
    """Both were e1, and one was lost. What a killed one left of its files stays as it is."""
    made = [store.save(session, {"rows": [number]}, []) for number in range(2)]
    (session.root / "explore" / "e3").mkdir()
    made.append(store.save(session, {"rows": [2]}, []))
    assert [path.name for path in made] == ["e1.json", "e2.json", "e4.json"]
    with ThreadPoolExecutor(4) as pool:
        others = list(pool.map(lambda number: store.save(session, {"rows": [number]}, []), range(8)))
    assert len({*made, *others}) == 11
    assert [json.loads(path.read_text())["rows"] for path in others] == [[number] for number in range(8)]


def test_a_candidate_that_cannot_be_kept_is_refused_before_it_is_explored(folder, run_here):
    (folder / "c/k.py").write_text(source())
    options = ("--reference", folder / "reference.py", "--device", "cpu-interpreter", "--keep", "k")
    done = run_here("explore_kernels.py", folder / "c/k.py", *options)
    assert done.returncode == 2 and "pass --workspace W" in done.stderr and "exploring" not in done.stderr


def test_a_file_without_a_kernel_is_refused(folder):
    with pytest.raises(UsageError, match=r"no candidate in .*: pass \.py files with ModelNew"):
        candidates.from_paths([folder / "reference.py"])


# --- who is dropped --------------------------------------------------------------------------------------------


def rounds_of(times_us: dict[str, float], count: int = 12, noise: float = 0.003, drift: float = 0.1) -> dict:
    """Rounds in which the card drifts by `drift` and each time has `noise`."""
    generator = random.Random(0)
    drifts = [1 + drift * number / count for number in range(count)]
    return {
        name: [time_us * factor * (1 + generator.gauss(0, noise)) for factor in drifts]
        for name, time_us in times_us.items()
    }


def test_what_is_slower_for_certain_is_dropped_although_the_card_drifts_by_more():
    rounds = rounds_of({"best": 100.0, "equal": 100.2, "slower": 103.0, "slow": 200.0})
    assert halving.leader(rounds) in ("best", "equal")
    assert halving.slower(rounds, "best") == ["slower", "slow"]


def test_leaders_within_one_percent_stay_and_are_settled_when_they_are_known():
    few, many = (rounds_of({"a": 100.0, "b": 100.5}, count, noise=0.02, drift=0) for count in (5, 400))
    assert not halving.slower(few, "a") and not halving.settled(few, "a") and halving.settled(many, "a")


def test_leaders_are_ranked_by_the_rounds_that_they_ran_in_turn():
    """The median of "late" is lower, since the card was fast when it ran alone."""
    rounds = {"early": [100.0, 100.0, 120.0, 120.0, 120.0], "late": [None, None, 121.0, 121.0, 121.0]}
    assert list(halving.places(rounds)) == ["early", "late"]
    rounds["early"][:2], rounds["late"][:2] = [None, None], [90.0, 90.0]
    assert halving.leader(rounds) == "early"
    assert halving.leader({"a": [2.0, None], "b": [None, 1.0]}) == "b" and halving.places({}) == {}


def test_a_ratio_counts_the_rounds_in_which_both_ran():
    ratio = halving.ratio([100.0, 100.0, 100.0], [150.0, None, 150.0])
    assert ratio.point == pytest.approx(1.5) and ratio.low <= 1.5 <= ratio.high + 1e-9
    assert halving.ratio([None, 1.0], [1.0, None]) is None


def test_the_first_error_of_a_compiler_is_what_is_shown():
    log = '[1/2] nvcc …\nnote: x\na.cu(7): error: identifier "foo" is undefined\n  foo();\n\n1 error detected'
    assert entrants.first_lines(log).splitlines()[0] == 'a.cu(7): error: identifier "foo" is undefined'


def test_a_message_of_a_compiler_begins_with_its_first_error():
    """nvcc's command lines and the warnings before would push it out of what a report keeps."""
    log = (
        "RuntimeError: Error building extension 'k': [1/2] nvcc "
        + "-I/x " * 900
        + "\nk.cu(3): error: no foo\n1 error detected"
    )
    assert faults.describe(RuntimeError(log))["message"] == "k.cu(3): error: no foo\n1 error detected"
    assert faults.describe(RuntimeError(log))["status"] == "COMPILE_ERROR"


class Timed:
    """A stand-in for a process that times its kernel."""

    def __init__(self, time_us: float):
        self.time_us, self.turns, self.moves = time_us, 0, 0

    def ask(self, timeout_s: float, **order) -> dict:
        if order["do"] == "move":
            self.moves += 1
            return {}
        self.turns += 1
        return {"us": [self.time_us * (1 + 0.001 * (self.turns % 3))] * order["calls"]}

    def end(self) -> None:
        pass


def racing(folder, times_us: dict[str, float]) -> list[entrants.Entrant]:
    return [entrants.Entrant(name, folder / "k.py", process=Timed(time_us)) for name, time_us in times_us.items()]


class Counted(Timed):
    """A stand-in that counts its calls. first_us: of those in its first turn, on a card that is not at its clock."""

    def __init__(self, time_us: float, first_us: float | None = None):
        super().__init__(time_us)
        self.first_us, self.calls = first_us or time_us, 0

    def ask(self, timeout_s: float, **order) -> dict:
        self.calls += order.get("calls", 0)
        answer = super().ask(timeout_s, **order)
        return {"us": [self.first_us] * len(answer["us"])} if self.turns == 1 and "us" in answer else answer


def test_a_turns_time_is_what_most_of_its_calls_take_on_each_of_the_two_inputs():
    """On an H100 kernels of 18 us had rounds of 22: one call of ten took 60."""
    assert time_of_turn([61.0, 18.0, 18.5, 18.0, 18.5, 18.0, 18.5, 18.0, 18.5, 18.0]) == pytest.approx(
        (18.5 * 18) ** 0.5
    )
    assert time_of_turn([60.0, 18.0, 18.5, 18.2]) == pytest.approx((18.5 * 18) ** 0.5)  # of a long kernel: four calls
    assert time_of_turn([100.0, 400.0] * 2) == pytest.approx(200.0)  # values make the second input more work
    assert time_of_turn([7.0]) == pytest.approx(7.0)


def test_what_is_hopeless_has_two_turns_and_what_all_ratios_refer_to_all_of_them(folder):
    """A probe of 94 ms a call took 1.4 s of the rounds, beside candidates of 0.3 ms."""
    times_us = {"fast": 100.0, "slow": 290.0, "probe": 94_000.0, "eager": 1000.0}
    entered = racing(folder, times_us)
    for entrant in entered:
        entrant.process = Counted(entrant.process.time_us)
    entered.append(entrants.Entrant("cold", folder / "k.py", process=Counted(100.1, first_us=900.0)))
    entered[2].is_opponent = entered[3].is_opponent = True
    race = Race(entered, time.monotonic() + 60, against="eager")
    race.run(last=True, say=lambda text: None)
    calls = {one.name: one.process.calls for one in entered}
    assert calls["probe"] == 4 + 2 and len(entered[2].rounds_us) == 2 and entered[2].dropped
    assert calls["eager"] == 4 * halving.FIRST_ROUNDS
    assert calls["slow"] >= 3 * halving.FIRST_ROUNDS and entered[1].dropped  # slower, and not hopelessly
    assert [one.name for one in race.running()] == ["fast", "cold"]


def test_hopeless_is_whose_quickest_call_took_three_times_as_long_as_the_leaders_slowest():
    calls_us = {"first": [100.0, 101.0, 130.0], "slow": [380.0, 900.0, 900.0], "hopeless": [391.0, 400.0, 400.0]}
    assert halving.hopeless(calls_us, "first") == ["hopeless"]


def test_a_speed_up_of_few_rounds_is_as_wide_as_the_calls_are(folder):
    """Two rounds say nothing of a median's scatter."""
    (folder / "k.py").write_text(source())
    opponent = entrants.Entrant("eager", folder / "k.py", rounds_us=[100.0] * 9, calls_us=[98.0, *[100.0] * 40, 105.0])
    few = entrants.Entrant("few", folder / "k.py", rounds_us=[50.0, 50.0], calls_us=[49.0, 50.0, 50.0, 52.0])
    many = entrants.Entrant("many", folder / "k.py", rounds_us=[50.0] * 9, calls_us=[49.0, *[50.0] * 40, 52.0])
    rows = {row.name: row.against_best for row in store.rows([few, many, opponent], "eager")}
    assert (rows["few"].point, rows["few"].low, rows["few"].high) == pytest.approx((2.0, 98 / 52, 105 / 49))
    assert (rows["many"].point, rows["many"].low, rows["many"].high) == pytest.approx((2.0, 2.0, 2.0))


def test_a_race_drops_what_is_slower_and_makes_room_for_the_next_wave(folder):
    first = racing(folder, {"fast": 100.0, "slow": 150.0, "near": 100.4, "slower": 300.0})
    first[1].is_opponent = True
    waiting = entrants.Entrant("waiting", folder / "k.py")
    race = Race([*first, waiting], time.monotonic() + 60)
    race.run(last=False, say=lambda text: None)
    assert [one.name for one in race.running()] == ["fast", "near"] and race.rounds == halving.FIRST_ROUNDS
    assert [one.process is None for one in first] == [False, True, False, True] and not waiting.dropped
    waiting.process = Timed(90.0)
    race.run(last=True, say=lambda text: None)
    assert [one.name for one in race.running()] == ["waiting"]
    assert [one.dropped for one in (first[0], first[2])] == [True, True] and first[0].process is not None
    assert waiting.rounds_us[: halving.FIRST_ROUNDS] == [None] * halving.FIRST_ROUNDS


@pytest.mark.parametrize(
    ("times_us", "stay"),
    [
        ({"best": 50.0, "candidate": 100.0}, ["candidate"]),
        ({"best": 50.0, "candidate": 100.0, "probe": 20.0, "other": 102.0}, ["best", "candidate"]),
        ({"best": 500.0, "candidate": 100.0, "probe": 20.0, "other": 100.4}, ["candidate", "other"]),
    ],
    ids=["two", "the one that ratios refer to", "that one is too slow"],
)
def test_opponents_make_room_before_the_fastest_candidate(folder, times_us, stay):
    """A probe computes less, so it is fast; the candidate of the next wave would lead, though this one is faster."""
    entered = racing(folder, times_us)
    for entrant in entered:
        entrant.is_opponent = entrant.name in ("best", "probe")
    race = Race(entered, time.monotonic() + 60, against="best")
    race.run(last=False, say=lambda text: None)
    assert [one.name for one in race.running()] == stay


class SmallCard:
    """A stand-in for a Starter on a GPU whose memory holds so many processes."""

    def __init__(self, holds: int, times_us: dict[str, float]):
        self.holds, self.times_us, self.started, self.entrants = holds, times_us, [], []
        self.judge, self.spent = SimpleNamespace(renew=lambda: None), Spent()
        self.sandbox = SimpleNamespace(gpu=True)

    def start(self, entrant: entrants.Entrant, until: float) -> None:
        self.started.append(entrant.name)
        self.entrants = [one for one in self.entrants if one.process]
        if len(self.entrants) < self.holds:
            entrant.status, entrant.process = Status.OK, Timed(self.times_us[entrant.name])
            self.entrants.append(entrant)
        else:
            entrant.fail(Fault(Status.OOM, "CUDA out of memory"))


class Oracle:
    """A stand-in for the oracle's process: it answers as many orders as it is told, then it has ended."""

    def __init__(self, orders: int, ended: Outcome):
        self.left, self.ended = orders, ended

    def answer(self, timeout_s: float) -> dict:
        return {"stage": "ready"}

    def ask(self, timeout_s: float, **order) -> dict:
        if not self.left:
            raise standing.Ended(self.ended)
        self.left -= 1
        return {"checked": {}}


def ended_with(status: Status, message: str) -> Outcome:
    return Outcome({"error": {"status": status, "message": message}}, 1, None, False, 3.0, message)


def test_an_oracle_that_ran_out_of_memory_is_started_again_for_the_next_wave():
    processes = [Oracle(1, ended_with(Status.OOM, "CUDA out of memory")), Oracle(1, None)]
    judge = entrants.Judge(lambda: processes.pop(0), 10)
    judge.renew()
    judge.compare([])
    for _ in range(2):
        with pytest.raises(standing.Ended) as ended:
            judge.compare([])
        assert entrants.unjudged(ended.value).status == Status.OOM
    judge.renew()
    assert judge.compare([]) == OracleCheck() and not processes


def test_an_oracle_that_fails_ends_the_exploration_with_its_reason():
    for status in (Status.RUNTIME_ERROR, Status.INVALID_REFERENCE):  # the latter was "the process left no sound report"
        ended = standing.Ended(ended_with(status, "the reference raised KeyError"))
        with pytest.raises(Refused, match="the reference raised KeyError"):
            entrants.unjudged(ended)
    late = entrants.unjudged(standing.Ended(Outcome(None, None, None, True, 90.0, "")))
    assert late.status == Status.TIMEOUT and "--budget-seconds" in late.message


@pytest.mark.parametrize(("mib", "mutates", "at_once"), [(1, (), 156), (2000, (), 5), (2000, (0,), 3), (60_000, (), 2)])
def test_as_many_run_at_once_as_the_memory_holds_beside_the_judge(monkeypatch, mib, mutates, at_once):
    """Of two seeds' inputs, on a card with 136 GiB free."""
    monkeypatch.setattr(run.gpu, "free_bytes", lambda: 136 << 30)
    inputs = [SimpleNamespace(bytes=lambda: mib << 20, mutates=mutates)] * 2
    assert run.live_at_once(inputs) == at_once


class Halves:
    """A stand-in for run_waves: nothing fits with the inputs of two seeds; with one all are right but `wrong`."""

    def __init__(self, wrong: str):
        self.wrong, self.seeds = wrong, []

    def __call__(self, starter, waiting, race, until, say, ahead=None) -> None:
        self.seeds.append(len(starter.inputs))
        for entrant in race.entrants:
            assert not entrant.process and not entrant.calls_us
            fits = len(starter.inputs) < 2 or entrant.is_opponent
            entrant.status = Status.OK if fits and entrant.name != self.wrong else Status.OOM
            entrant.process, entrant.calls_us = (Timed(1.0), [1.0]) if entrant.status == Status.OK else (None, [])
            if not fits and entrant.name == self.wrong:
                entrant.status = Status.WRONG_VALUES


@pytest.mark.parametrize(("wrong", "left_s", "seeds"), [("none", 60, [2, 1]), ("a", 60, [2, 1]), ("none", -1, [2])])
def test_where_all_ran_out_of_memory_they_start_anew_with_the_inputs_of_one_seed(
    folder, monkeypatch, wrong, left_s, seeds
):
    """With 7 GiB of each seed all candidates ran out of memory on a card with 136 GiB free."""
    named = [entrants.Entrant(name, folder / "k.py", is_opponent=name == "best") for name in ("best", "a", "b")]
    inputs, said = [SimpleNamespace(seed=seed, bytes=lambda: 7 << 30, mutates=()) for seed in (5, 6)], []
    ended, made = [], []
    judge = SimpleNamespace(end=lambda: ended.append("judge"))
    starter = SimpleNamespace(inputs=inputs, judge=judge, spent=Spent())
    plan = SimpleNamespace(budget_s=left_s, against="best")
    sandbox = SimpleNamespace(forked_ahead=SimpleNamespace(count=lambda: 0))
    waves = Halves(wrong)
    monkeypatch.setattr(run, "run_waves", waves)
    monkeypatch.setattr(run, "finish", lambda *_: None)
    monkeypatch.setattr(run, "judge_of", lambda plan, sandbox, inputs: made.append(inputs) or "another judge")
    monkeypatch.setattr(run.gpu, "free_bytes", lambda: 136 << 30)
    monkeypatch.setattr(run.gpu_watch, "Watch", contextlib.nullcontext)
    run.check_and_time(plan, sandbox, starter, named, time.monotonic(), said.append, None)
    assert waves.seeds == seeds and len(said) == len(seeds) - 1
    if len(seeds) > 1:
        assert ended == ["judge"] and starter.judge == "another judge" and made == [inputs[:1]]
        assert [one.status for one in named] == ["OK", "OK" if wrong == "none" else "OOM", "OK"]


def test_an_error_in_a_configuration_names_the_users_file_and_line(tmp_path):
    """The text that runs has no SPACE, and constants of one line: its lines are others."""
    own = tmp_path / "space.py"
    own.write_text("SPACE = [\n    {'N': 1},\n    {'N': 2},\n]\nN = [\n    3\n]\ndef kernel_function(x): return y\n")
    plan = run.Plan(None, candidates.from_paths([own]), {}, None)
    first, second = run.entered(plan, tmp_path)
    for entrant in (first, second):
        number = entrant.file.read_text().splitlines().index("def kernel_function(x): return y") + 1
        entrant.fail(Fault(Status.COMPILE_ERROR, f"{entrant.file.name}({number}): error: y"))
    assert first.error == second.error == "space.py(8): error: y"


def test_where_one_candidate_fits_no_seed_is_left_out(folder):
    named = [entrants.Entrant(name, folder / "k.py") for name in "ab"]
    named[0].status, named[1].status = Status.OOM, Status.OK
    assert not run.all_ran_out(named)
    named[1].status = Status.WRONG_VALUES
    assert run.all_ran_out(named)


@pytest.mark.parametrize(
    ("holds", "seconds", "failed"),
    [(4, 60, []), (2, 60, []), (1, 60, ["b", "c", "d", "e"]), (4, -1, ["e"])],
    ids=["one too many", "two beside each other", "one fills the card", "no time left"],
)
def test_what_ran_out_of_memory_beside_others_is_started_again_when_they_made_room(
    folder, monkeypatch, holds, seconds, failed
):
    monkeypatch.setattr(run.os, "cpu_count", lambda: 1)  # in the order of their names
    times_us = {"a": 100.0, "b": 200.0, "c": 120.0, "d": 150.0, "e": 90.0}
    all_of_them = [entrants.Entrant(name, folder / "k.py") for name in times_us]
    card, race, said = SmallCard(holds, times_us), Race(all_of_them, time.monotonic() + 60), []
    run.run_waves(card, [all_of_them], race, time.monotonic() + seconds, said.append)
    assert [one.name for one in all_of_them if one.status == Status.OOM] == failed
    assert all((one.status == Status.OK) == bool(one.calls_us) for one in all_of_them)
    assert race.leader() == ("a" if failed else "e") and len(card.started) <= 12
    assert any("ran out of GPU memory" in line for line in said) == (not failed)


def test_what_is_compiled_ahead_is_waited_for_before_a_later_wave_and_ends_before_times_are_taken(folder):
    order = []

    class Turn(Timed):
        def ask(self, timeout_s: float, **asked) -> dict:
            order.append("a time")
            return super().ask(timeout_s, **asked)

    class Card(SmallCard):
        def start(self, entrant: entrants.Entrant, until: float) -> None:
            order.append(f"start {entrant.name}")
            entrant.status, entrant.process = Status.OK, Turn(self.times_us[entrant.name])

    times_us = {"a": 100.0, "b": 200.0}
    both = [entrants.Entrant(name, folder / "k.py") for name in times_us]
    ahead = SimpleNamespace(wait=lambda seconds: order.append("wait"), end=lambda: order.append("end"))
    race = Race(both, time.monotonic() + 60)
    run.run_waves(Card(2, times_us), [[both[0]], [both[1]]], race, time.monotonic() + 60, lambda text: None, ahead)
    assert [step for step, _ in itertools.groupby(order)] == [
        *("start a", "wait", "end", "a time"),
        *("start b", "end", "a time"),
    ]


def test_what_did_not_end_says_why_where_its_code_shows_it(folder):
    wave = [entrants.Entrant(name, folder / f"{name}.py", status=Status.TIMEOUT, error=name) for name in ("a", "b")]
    wave.append(entrants.Entrant("c", folder / "c.py", status=Status.OK))
    why = {folder / "a.py": "it waits", folder / "c.py": "no hang"}
    run.explain_hangs(wave, SimpleNamespace(why_endless=why.get))
    assert [one.error for one in wave] == ["a; it waits", "b", None]


def test_a_kernel_is_given_up_sooner_once_another_has_ended():
    starter = entrants.Starter(None, None, [], None, False, candidate_s=9)
    limits = [starter.hang_s()]
    for starter._quickest_s in (5.0, 0.5, 0.001):
        limits.append(starter.hang_s())
    assert limits == [20, 20, 10, 6]


def test_processes_that_have_started_cuda_take_no_more_room(monkeypatch):
    inputs = [SimpleNamespace(bytes=lambda: 1 << 30, mutates=())] * 2
    monkeypatch.setattr(run.gpu, "free_bytes", lambda: 80 << 30)
    alone = run.live_at_once(inputs)
    monkeypatch.setattr(run.gpu, "free_bytes", lambda: (80 << 30) - 8 * run.gpu_memory.WAITING_BYTES)
    assert run.live_at_once(inputs, 8) == alone > run.live_at_once(inputs)


def test_leaders_are_timed_again_with_their_inputs_elsewhere(folder):
    """The second is 0.4 % slower where its inputs lie first, and 0.4 % faster in the other places."""

    class Placed(Timed):
        def ask(self, timeout_s: float, **order) -> dict:
            answer = super().ask(timeout_s, **order)
            return {name: [time * (0.996 if self.moves else 1.004) for time in times] for name, times in answer.items()}

    both = racing(folder, {"first": 100.0, "second": 100.0})
    both[1].process = Placed(100.0)
    for entrant in both:
        entrant.status = Status.OK
    race = Race(both, time.monotonic() + 60)
    race.run(last=True, say=lambda text: None)
    assert [entrant.process.moves for entrant in both] == [halving.PLACEMENTS - 1] * 2
    assert race.rounds >= halving.PLACEMENTS * halving.ROUNDS_A_PLACEMENT
    assert [entrant.name for entrant in run.ranked(both)] == ["second", "first"]


@pytest.mark.parametrize(
    ("move_s", "round_s", "left_s", "rounds"),
    [
        (0.02, 0.01, 900.0, [15] * 12),
        (0.3, 0.2, 900.0, [10, 3, 3, 3, 5]),
        (1.0, 0.05, 900.0, [15, 15, 51]),  # a third move would leave no time for as many rounds
        (3.0, 0.05, 900.0, [15, 46]),
        (6.0, 0.05, 900.0, [15]),
        (0.8, 0.05, 1.0, [7]),
    ],
)
def test_where_moving_takes_long_the_inputs_lie_in_fewer_places(folder, monkeypatch, move_s, round_s, left_s, rounds):
    now = [100.0]
    monkeypatch.setattr("kernelopt.explore.race.time.monotonic", lambda: now[0])
    both = racing(folder, {"first": 100.0, "second": 100.1})
    ran = [0]

    def move(limit):
        now[0] += move_s
        ran.append(0)

    def one_round(running):
        now[0] += round_s
        ran[-1] += 1

    for entrant in both:
        entrant.status = Status.OK
    monkeypatch.setattr(both[0], "move", move)
    monkeypatch.setattr(both[1], "move", lambda limit: None)
    race = Race(both, 100.0 + left_s)
    monkeypatch.setattr(race, "one_round", one_round)
    race.final()
    assert [number for number in ran if number] == rounds


def test_what_torch_compiles_waits_in_a_process_that_has_loaded_its_compiler(folder):
    """Its loading took six of nine seconds after all candidates were checked, on an H200."""
    (folder / "k.py").write_text("")
    file = folder / "behind.py"
    file.write_bytes(opponents.baselines.source(b"import torch\n", "torch.compile"))
    eager = entrants.Entrant("eager", folder / "k.py", is_opponent=True)
    behind = entrants.Entrant("torch.compile", file, is_opponent=True)
    assert [one.job for one in (eager, behind, entrants.Entrant("a candidate", file))] == [
        *("contest", "contest_compiled", "contest")
    ]


def test_probes_have_no_part_in_the_last_rounds_and_stand_where_their_medians_say(folder):
    """On an H200 they were five of seven in the lead, and most of 8 s."""
    times_us = {"a": 100.0, "b": 100.1, "probe": 60.0, "slow probe": 100.2, "best": 100.3}
    entered = racing(folder, times_us)
    for entrant in entered:
        entrant.status, entrant.is_opponent = Status.OK, entrant.name not in "ab"
        entrant.is_probe = "probe" in entrant.name
    race = Race(entered, time.monotonic() + 60, against="best")
    race.run(last=True, say=lambda text: None)
    assert len(entered[2].rounds_us) == halving.FIRST_ROUNDS < len(entered[0].rounds_us) == len(entered[4].rounds_us)
    assert [one.name for one in run.ranked(entered)] == ["probe", "a", "b", "slow probe", "best"]


class Sustaining(Timed):
    """A stand-in that is also timed in a row."""

    def ask(self, timeout_s: float, **order) -> dict:
        return (
            {"us": self.time_us, "window": [0.0, 0.5]} if order["do"] == "sustain" else super().ask(timeout_s, **order)
        )


def test_only_the_best_in_the_lead_are_timed_in_a_row(folder, monkeypatch):
    """Half a second each was 9 of 31 s where seventeen were in the lead."""
    monkeypatch.setattr(run, "describe", lambda *_: None)
    times_us = {name: 100.0 + 0.1 * ((at * 5) % 8) for at, name in enumerate("abcdefgh")}
    leaders = [
        entrants.Entrant(
            name, folder / "k.py", status=Status.OK, process=Sustaining(us), rounds_us=[us] * 5, calls_us=[us] * 5
        )
        for name, us in times_us.items()
    ]
    leaders[0].dropped = True  # the fastest of all by its median
    leaders[5].is_probe = True
    sandbox_here = SimpleNamespace(new_folder=lambda name: folder)
    watch = SimpleNamespace(state=lambda window: SimpleNamespace(sm_clock_mhz=SimpleNamespace(median=1980.0)))
    run.finish(leaders, sandbox_here, watch, SimpleNamespace(product=None))
    timed = [one.name for one in run.ranked(leaders) if one.sustained_us and one.sm_clock_mhz == 1980.0]
    leaders.pop(5)
    assert timed == [one.name for one in run.ranked(leaders)][: run.MOST_SUSTAINED] and len(timed) == 3
    assert leaders[0].sustained_us is None
    result = {**result_with(["default"]), "seconds": {}}
    assert any("MHz: of the best 3 in the lead" in line for line in table.lines(result, None))


def test_a_process_that_ends_during_its_turn_leaves_the_race(folder):
    class Dies(Timed):
        def ask(self, timeout_s: float, **order) -> dict:
            raise standing.Ended(Outcome(None, None, "SIGSEGV", False, 1.0, ""))

    first = racing(folder, {"fast": 100.0, "dies": 50.0})
    first[1].process = Dies(50.0)
    race = Race(first, time.monotonic() + 60)
    race.run(last=True, say=lambda text: None)
    assert [one.name for one in race.running()] == ["fast"] and first[1].status == "ILLEGAL_ACCESS"


def test_the_errors_of_a_compiler_are_not_cut(folder):
    errors = "\n".join(f"k.cu({n}): error: no foo{n}" for n in range(30))
    entrant = entrants.Entrant("k", folder / "k.py")
    entrant.fail(Fault(Status.COMPILE_ERROR, errors))
    assert entrant.error == errors
    entrant.fail(Fault(Status.RUNTIME_ERROR, errors))
    assert len(entrant.error.splitlines()) == 12


# --- processes that stay ---------------------------------------------------------------------------------------


def test_a_process_that_does_not_answer_is_ended_and_the_others_go_on(folder, interpreter):
    (folder / "c/k.py").write_text(source())
    arguments = {"kernel": str(folder / "c/k.py"), "inputs": [], "path": "", "check": False}
    one, other = (standing.Standing(interpreter, interpreter.server(), "contest", arguments, 60) for _ in range(2))
    with pytest.raises(standing.Ended) as ended:
        for _ in range(9):
            one.answer(20)
    assert "IndexError" in ended.value.outcome.result["error"]["message"]  # there are no inputs
    late = time.monotonic()
    assert other.end().result is None or time.monotonic() - late < 5


# --- the tool --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "candidate_s", "gpu", "advice"),
    [
        (1, 900, True, "--budget-seconds"),
        (1, 9, True, "--candidate-seconds"),
        (1, 9, False, "--candidate-seconds"),
        (2, 9, True, None),
    ],
)
def test_who_compiles_for_too_long_is_told_which_option_allows_more(
    folder, monkeypatch, stage, candidate_s, gpu, advice
):
    """The interpreter compiles nothing: it runs the kernel when it is launched."""

    class Late(Timed):
        """Answers up to a stage; the next one takes too long."""

        def __init__(self, *arguments):
            self.left = stage

        def answer(self, timeout_s: float) -> dict:
            if not self.left:
                raise standing.Ended(Outcome(None, None, None, True, 47.0, ""))
            self.left -= 1
            return {}

    monkeypatch.setattr(standing, "Standing", Late)
    entrant = entrants.Entrant("opponent", folder / "reference.py", is_opponent=True)
    sandbox = SimpleNamespace(new_folder=lambda name: folder, caches=folder, gpu=gpu)
    starter = entrants.Starter(sandbox, None, [], None, False, candidate_s)
    starter.start(entrant, until=time.monotonic() + 60)
    assert entrant.status == Status.TIMEOUT and ("compiled and launched in 47 s" in entrant.error) == (
        stage == 1 and gpu
    )
    assert (
        gpu
        or "its first call did not end in 47 s on the CPU, which interprets kernels: it hangs, or is slow there"
        in entrant.error
    )
    assert entrant.error.endswith(f"; a larger {advice} gives it more time" if advice else "47 s after its start")


@pytest.mark.parametrize(
    "status, last, expected",
    [
        (Status.OK, True, [("second", 10)]),
        (Status.WRONG_VALUES, True, [("first", 0), ("second", 0)]),
        (Status.WRONG_VALUES, False, [("second", 10)]),  # a later wave may have a right one
        (Status.OOM, True, [("second", 10)]),  # it is started again
    ],
)
def test_opponents_are_not_waited_for_once_the_candidates_are_checked(folder, status, last, expected):
    """torch.compile of an opponent took 38 s more than eleven candidates, all of them wrong."""
    hurried, told = [], threading.Event()

    def hurry(opponents, until, why):
        hurried.extend((one.name, round(until - time.monotonic())) for one in opponents)
        assert (why == entrants.NONE_RIGHT) == (hurried[-1][1] == 0)
        told.set()

    def start(entrant, until):
        if entrant.is_opponent and not entrant.is_probe:
            assert told.wait(10)
        entrant.status = status if entrant.name == "k" else Status.OK

    wave = [entrants.Entrant(name, folder / f"{name}.py", is_opponent=True) for name in ("first", "second", "probe")]
    wave[2].is_probe = True
    wave.append(entrants.Entrant("k", folder / "k.py"))
    judge, sandbox = SimpleNamespace(renew=lambda: None), SimpleNamespace(gpu=True)
    starter = SimpleNamespace(judge=judge, sandbox=sandbox, start=start, hurry=hurry, forget=lambda opponents: None)
    race = Race(wave, time.monotonic() + 60, against="first")
    run.start_all(starter, wave, time.monotonic() + 60, lambda text: None, race, last)
    assert hurried == expected


def test_an_opponent_that_is_not_waited_for_says_so(folder, monkeypatch):
    class Compiling(Timed):
        def __init__(self, *_):
            super().__init__(1.0)

        def answer(self, timeout_s) -> dict:
            starter.hurry([entrant], time.monotonic() - 1, entrants.NOT_WAITED_FOR)
            assert timeout_s() == pytest.approx(0.1)
            raise standing.Ended(Outcome(None, None, None, True, 12.0, ""))

    monkeypatch.setattr(standing, "Standing", Compiling)
    entrant = entrants.Entrant("opponent", folder / "reference.py", is_opponent=True)
    sandbox = SimpleNamespace(new_folder=lambda name: folder, caches=folder, gpu=True)
    starter = entrants.Starter(sandbox, None, [], None, False, 60)
    starter.start(entrant, until=time.monotonic() + 60)
    assert entrant.status == Status.TIMEOUT and entrant.error.endswith("is waited for longer")


def test_an_opponent_that_the_budget_ends_first_says_so_and_one_that_starts_again_has_its_time(folder, monkeypatch):
    left = []

    class Compiling(Timed):
        def __init__(self, *_):
            super().__init__(1.0)

        def answer(self, timeout_s) -> dict:
            left.append(timeout_s())
            starter.hurry([entrant], time.monotonic() + 100, entrants.NOT_WAITED_FOR)
            raise standing.Ended(Outcome(None, None, None, True, 12.0, ""))

    monkeypatch.setattr(standing, "Standing", Compiling)
    entrant = entrants.Entrant("opponent", folder / "reference.py", is_opponent=True)
    sandbox = SimpleNamespace(new_folder=lambda name: folder, caches=folder, gpu=True)
    starter = entrants.Starter(sandbox, None, [], None, False, 600)
    for _ in range(2):
        starter.start(entrant, until=time.monotonic() + 60)
        assert entrant.error.endswith("a larger --budget-seconds gives it more time")
    starter.hurry([entrant], time.monotonic() - 5, entrants.NONE_RIGHT)
    starter.start(entrant, until=time.monotonic() + 60)  # it was queued behind others
    assert (entrant.status, entrant.error) == (Status.TIMEOUT, entrants.NONE_RIGHT) and len(left) == 2
    starter.forget([entrant])
    starter.start(entrant, until=time.monotonic() + 60)
    assert all(seconds == pytest.approx(60, abs=1) for seconds in left) and len(left) == 3


def test_without_a_gpu_checks_and_compilation_share_the_budget(folder, monkeypatch):
    """A candidate that hangs takes neither the compilation's time nor more than the budget, and is compiled last."""
    asked = []

    class Compiler(contextlib.nullcontext):
        def compile(self, file, task, target, limits):
            asked.append((file.stem, limits.until))
            return Compiled(target, Status.OK, None, cuda=("one.cubin",) if file.stem == "cuda" else ())

    began = time.monotonic() - 40  # of 60 s
    known = targets.of_architecture("sm_90", [], {})
    of_plan = [SimpleNamespace(name=name, source="# cpp_extension") for name in ("cuda", "right")]
    plan = SimpleNamespace(budget_s=60, candidate_s=30, headers_s=0, compile_for=known, candidates=of_plan)
    started = []

    def start_all(_, of_them, until, __):
        started.extend(sorted(one.name for one in of_them))
        asked.append(until)

    monkeypatch.setattr(run, "start_all", start_all)
    monkeypatch.setattr(run.compiler, "Compiler", lambda sandbox: Compiler(Compiler()))
    monkeypatch.setattr(run.os, "cpu_count", lambda: 1)
    all_of_them = [entrants.Entrant(name, folder / f"{name}.py") for name in ("hangs", "right", "cuda")]
    all_of_them[0].status, all_of_them[1].status = Status.TIMEOUT, Status.OK
    starter = SimpleNamespace(inputs=[SimpleNamespace(path="inputs", bytes=0)], spent=Spent())
    monkeypatch.setattr(run.cases, "slow_in_interpreter", lambda inputs: None)
    run.check_and_compile(plan, None, starter, all_of_them, began, lambda text: None)
    *first, checked, last, last_of_all = asked
    assert sorted(name for name, _ in first) == ["cuda", "right"]  # a file that only names it is checked too
    assert all(until == pytest.approx(began + 50, abs=1) for _, until in first)  # inputs may take half of the budget
    assert checked == pytest.approx(began + 50, abs=1) and started == ["hangs", "right"]
    assert (last, last_of_all) == (("right", began + 60), ("hangs", began + 60))
    assert all_of_them[2].status == Status.NO_GPU  # it is not called: six of twelve were not compiled for want of time


def test_in_the_interpreter_one_candidate_gets_a_third_of_the_budget(folder, monkeypatch, run_here):
    """One that hangs took the whole budget, and with as many as there are cores nothing else was checked."""
    planned = []

    def explore(plan, *_):
        planned.append(plan.candidate_s)
        raise Refused("enough")

    monkeypatch.setattr(run, "explore", explore)
    (folder / "c/k.py").write_text(source())
    options = ("--reference", folder / "reference.py", "--device", "cpu-interpreter", "--budget-seconds", 60)
    for given in ((), ("--candidate-seconds", 7)):
        run_here("explore_kernels.py", folder / "c/k.py", *options, *given)
    assert planned == [20, 7] and run.seconds_each(60, "cuda") == 60


HEADERS = source() + "\n# load_inline('k', '', CUDA, functions=['f'])  cpp_extension\n"


@pytest.mark.parametrize(
    ("options", "limits", "said"),
    [
        ((), (405, 30, 135), "; all have 405 s, --budget-seconds changes that"),
        (("--budget-seconds", 402), (402, 134, 135), None),
        (("--budget-seconds", 90), (90, 30, 90), "the budget of 90 s may be over before all 5 are compiled: pass"),
        (("--budget-seconds", 30), (30, 10, 30), "leaves 30 s for them, which is less than one takes: pass"),
        (("--budget-seconds", 400, "--candidate-seconds", 40), (400, 40, 0), "seconds 40 is less than one takes"),
    ],
)
def test_what_compiles_torchs_headers_has_the_time_that_this_takes(
    folder, monkeypatch, run_here, options, limits, said
):
    """Each was cut at a third of the budget, 30 s, after the tool had said that it takes 45."""
    planned = []

    def explore(plan, *_):
        planned.append((plan.budget_s, plan.candidate_s, plan.headers_s))
        raise Refused("enough")

    monkeypatch.setattr(run, "explore", explore)
    monkeypatch.setattr(headers.os, "cpu_count", lambda: 2)
    for number in range(5):
        (folder / f"c/k{number}.py").write_text(HEADERS)
    where = ("--reference", folder / "reference.py", "--device", "cpu-interpreter", "--card", "h100-sxm")
    done = run_here("explore_kernels.py", folder / "c", *where, *options)
    assert planned == [limits]
    assert "about 45 s of processor time each" in done.stderr and ("270" in done.stderr) == ("pass" in str(said))
    assert (said in done.stderr) if said else ("seconds" not in done.stderr)


def compiled_alone(folder, monkeypatch, answers: dict[str, Compiled], left_s: float) -> tuple[list, dict]:
    """(the entrants, what the compiler was asked for) of an exploration of CUDA C++, with so much left of the budget.
    answers: of the compiler, by name."""
    asked = []

    class Compiler(contextlib.nullcontext):
        def compile(self, file, task, target, limits):
            asked.append((file.stem, limits))
            return answers[file.stem]

    known = targets.of_architecture("sm_90", [], {})
    entries = [candidates.Candidate(name, {}, HEADERS) for name in answers]
    plan = run.Plan(None, entries, {}, None, budget_s=90, candidate_s=5, headers_s=50, compile_for=known)
    monkeypatch.setattr(run.compiler, "Compiler", lambda sandbox: Compiler(Compiler()))
    monkeypatch.setattr(run.compiler, "case_without_values", lambda *_: {})
    sandbox = SimpleNamespace(stop=stop_signal.Stop(), gpu=None)
    all_of_them = [entrants.Entrant(name, folder / f"{name}.py") for name in answers]
    run.compiled_alone(plan, sandbox, all_of_them, time.monotonic() - 90 + left_s, lambda text: None)
    return all_of_them, dict(asked)


def test_cuda_that_was_compiled_or_late_or_never_started_is_told_apart(folder, monkeypatch):
    """All three were NO_GPU: 'CUDA C++ runs on a GPU alone: it was not checked'."""
    known = targets.of_architecture("sm_90", [], {})
    late = Compiled(
        known, Status.TIMEOUT, "it was not compiled in 50 s; a larger --candidate-seconds gives it more time"
    )
    died = Compiled(known, Status.RUNTIME_ERROR, "the process ended early")
    answers = {"done": Compiled(known, Status.OK, None, cuda=True), "late": late, "died": died}
    all_of_them, asked = compiled_alone(folder, monkeypatch, answers, 90)
    rows = {one.name: one for one in all_of_them}
    assert rows["done"].status == Status.NO_GPU and rows["done"].error.endswith("here, not run")
    assert (rows["late"].status, rows["late"].error, rows["late"].started) == (Status.TIMEOUT, late.error, True)
    assert rows["died"].status == Status.NO_GPU
    assert rows["died"].error.endswith("it was not checked; not compiled: the process ended early")
    assert 49 < asked["late"].left_s <= 50 and asked["late"].more == entrants.MORE_EACH
    (over,), asked = compiled_alone(folder, monkeypatch, {"late": late}, 0)
    assert (over.status, over.error, over.started, asked) == (Status.TIMEOUT, entrants.NOT_STARTED, False, {})
    _, asked = compiled_alone(folder, monkeypatch, {"late": late}, 30)
    assert asked["late"].more == entrants.MORE_BUDGET


def test_the_table_has_a_word_for_what_never_started():
    result = result_with(["default"])
    row = result["rows"][-1] | {"status": "TIMEOUT", "started": False, "error": entrants.NOT_STARTED}
    result["rows"].append(row)
    lines = table.lines(result, None)
    assert any(line.startswith(row["name"]) and "not started" in line and "TIMEOUT" not in line for line in lines)


@pytest.mark.parametrize(
    ("statuses", "started", "code"),
    [
        (["OK", "TIMEOUT"], False, 0),  # the budget may be over once some are right
        (["WRONG_VALUES", "TIMEOUT"], True, 1),
        (["WRONG_VALUES", "TIMEOUT"], False, 4),  # nobody knows whether one is right
    ],
)
def test_where_none_is_right_and_one_never_started_time_is_over(statuses, started, code):
    usual = {"opponent": False, "compiled": None, "started": True, "others": {}}
    rows = [{**usual, "status": status} for status in statuses]
    rows[-1]["started"] = started
    tool = runpy.run_path(str(BUNDLE / "tools/explore_kernels.py"))
    assert tool["exit_code"]({"stopped_after_s": None, "rows": rows}) == code


LONG = "rotary_embedding_with_the_cache_write_of_vllm_by_slots"


def test_the_table_keeps_the_constants_of_a_name_and_keep_takes_what_it_shows(session):
    """Of two names that differ in their last constant it showed the same 59 characters, which --keep refused."""
    hints = [f"{LONG}[BLOCK=128,WARPS=4,loads={hint}]" for hint in ("evict_last", "evict_first")]
    shown = [candidates.short_name(name) for name in hints]
    assert [name.partition("[")[2] for name in shown] == [name.partition("[")[2] for name in hints]
    assert all(name.startswith("rotary_") and "…" in name and len(name) == 60 for name in shown)
    assert candidates.short_name("k[BLOCK=1]") == "k[BLOCK=1]"
    assert len(candidates.short_name("x" * 90)) == 60 and "…" not in candidates.short_name("x" * 60)
    rows = [row_of(name, opponent=False) | {"dropped": False} for name in hints]
    other = {"timestamp": "", "device": "", "workload": "", "against": None, "wall_s": 1}
    store.save(session, {**other, "rows": rows}, [])
    assert [store.find(session, name)[1].name for name in shown] == hints
    assert store.find(session, f"e1#{shown[0]}")[1].name == hints[0]
    twins = [row_of(f"{'x' * 40}{middle}{'y' * 40}") for middle in "ab"]
    store.save(session, {**other, "rows": twins}, [])
    with pytest.raises(UsageError, match="is the short form of 2 candidates of e2; pass one of: x"):
        store.find(session, candidates.short_name(twins[0]["name"]))


def test_each_candidate_costs_itself_alone(folder, run_here):
    """Four right ones, and others: wrong, broken, without end, killed, of two files, without a launch, no Python, and a
    SPACE of unknown constants."""
    for name, text in {
        "space": source('{"BLOCK": [64, 256], "WARPS": [2, 4]}'),
        "wrong": source(left="2 * tl.load(x + at, at < n)"),
        "broken": source(left="undefined"),
        "hangs": source(first="import time; time.sleep(600)"),  # a busy one would take a core from the others
        "dies": source(first="import ctypes; ctypes.string_at(0)"),
        "parts": f"import beside\n{source()}",
        "torch_alone": source().replace("add[(triton", "out.copy_(x + y) if True else add[(triton"),
        "closed": source().replace("BLOCK)\n", "BLOCK\n", 1),
        "no_space": source('{"ROWS": [1, 2]}'),
    }.items():
        (folder / "c" / f"{name}.py").write_text(text)
    options = ("--reference", folder / "reference.py", "--device", "cpu-interpreter", "--candidate-seconds", 8)
    result = tool_json("explore_kernels.py", folder / "c", *options, run=run_here)
    status = {row["name"]: row["status"] for row in result["rows"]}
    assert [name for name in status if status[name] == "OK"] == [
        "eager",
        *(f"space[BLOCK={b},WARPS={w}]" for b in (64, 256) for w in (2, 4)),
    ]
    assert status["wrong"] == "WRONG_VALUES" and status["hangs"] == "TIMEOUT" and status["dies"] == "ILLEGAL_ACCESS"
    assert status["broken"] == status["torch_alone"] == "RUNTIME_ERROR"
    errors = {row["name"]: row["error"] for row in result["rows"]}
    assert "undefined" in errors["broken"] and "its first call did not end in" in errors["hangs"]
    assert "a larger --candidate-seconds gives" in errors["hangs"]
    assert status["parts"] == "IMPORT_ERROR" and "the file must load by itself" in errors["parts"]
    assert status["closed"] == status["no_space"] == "IMPORT_ERROR"
    assert errors["closed"].startswith("SyntaxError: ") and "c/closed.py, line " in errors["closed"].splitlines()[0]
    assert "SPACE names ROWS" in errors["no_space"]
    assert all(row["latency_us"] is None for row in result["rows"]) and result["file"] is None
    assert [*result["seconds"]] == ["inputs", "check"] and sum(result["seconds"].values()) <= result["wall_s"] + 0.2


def test_candidates_none_of_which_can_be_started_end_before_the_gpu_is_opened(ready, tmp_path, monkeypatch):
    """The GPU was opened, inputs were made and the opponents timed, for a table without a candidate."""
    (tmp_path / "closed.py").write_text("def kernel_function(x:\n")
    (tmp_path / "space.py").write_text(source("[64]"))
    monkeypatch.setattr(sandbox, "Sandbox", None)
    for options in (("--keep-leader",), ("--device", "cpu-interpreter", "--card", "h100-sxm", "--json")):
        done = call_tool("explore_kernels.py", tmp_path, "--workspace", ready.root, *options)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"closed: SyntaxError: '(' was never closed ({tmp_path / 'closed.py'}, line 1)\n" in done.stderr
        assert f"space: {tmp_path / 'space.py'}: SPACE[0] is 64; each entry is a dict of constants\n" in done.stderr
        assert done.stderr.endswith("none of the 2 candidates can be started, so nothing was run\n")
    assert not (ready.root / "explore").exists()


def result_with(workloads: list[str]) -> dict:
    """The result of an exploration, as table.lines takes it."""
    own = {"device": "NVIDIA H200", "workload": "default", "workloads": workloads, "against": None, "compiled": None}
    own |= {"stopped_after_s": None, "wall_s": 17.7, "seconds": {"inputs": 2.2, "compile and check": 9.6}}
    # What the recorded exploration lacks.
    later = {
        "probe": False,
        "wgmma_serialized": None,
        "products_dropped": None,
        "started": True,
        "others": {},
        "mean": None,
    }
    rows = json.loads((FIXTURES / "exploration" / "e1.json").read_text())["rows"]
    return {**own, "rows": [{**later, **row} for row in rows]}


def test_the_table_of_a_task_with_more_workloads_says_which_one_it_is_of():
    lines = table.lines(result_with(["default", "tall", "wide"]), None)
    assert lines[0] == ("workload default alone, all columns; the task also has tall, wide (--workload all takes all)")
    assert lines[1:] == table.lines(result_with(["default"]), None) and lines[1].startswith("candidate")
    assert "took 18 s: inputs 2, compile and check 10" in lines


def test_what_many_rows_share_is_one_line_of_the_table():
    said = [("a", "one"), ("b", "two"), ("c", "one")]
    assert table.by_text(said) == ["a, c: one", "b: two"]
    assert table.by_text([(name, "one") for name in "abcde"]) == ["a, b, c, 2 more: one"]


def test_the_table_names_candidates_whose_wgmma_ptxas_serializes():
    result = result_with(["default"])
    slow, other, *_ = result["rows"]
    slow["wgmma_serialized"] = other["wgmma_serialized"] = "insufficient register resources"
    lines = table.lines(result, None)
    said = lines.index(f"ptxas serializes wgmma, insufficient register resources: {slow['name']}, {other['name']}")
    page = lines[said + 1].rpartition(" ")[2]
    assert f"`{slow['wgmma_serialized']}" in (BUNDLE / page).read_text()


def test_a_plan_that_cites_a_wrong_kernel_says_so(ready):
    explored(ready, "e1")
    rows = json.loads((ready.root / "explore/e1.json").read_text())["rows"]
    bad = next(row for row in rows if row["status"] != "OK")
    plan = f"explore/e1.json#{bad['name']} takes 3 us\nexplore/e1.json#{bad['name']} is {bad['status']}\n"
    ready.plan("v1").write_text(f"{plan}explore/e1.json#row[BLOCK=128,WARPS=1] takes 10 us, see explore/e1.json\n")
    audited = workspace_audit.of_workspace(ready, ready.task(), RecordStore(ready)).problems
    (problem,) = [problem for path, problem in audited if path == ready.plan("v1")]
    assert problem.line == 1 and f"#{bad['name']} is {bad['status']}, so it shows no speed" in problem.message


def problems_of_plan(ready, line: str) -> list[str]:
    """What the audit says of a plan with that line. The rows of e1, in order: 40 us for the opponent, 10, 11, 12, 13."""
    ready.plan("v1").write_text(f"{line}\n")
    audited = workspace_audit.of_workspace(ready, ready.task(), RecordStore(ready)).problems
    return [problem.message for path, problem in audited if path == ready.plan("v1")]


ROW, OTHER = "explore/e1.json#row[BLOCK=128,WARPS=1]", "explore/e1.json#row[BLOCK=128,WARPS=4]"


@pytest.mark.parametrize(
    "line",
    [
        f"{ROW} takes 10 us",
        f"| {ROW} | which block? | 10.0 us, 4.00x of v0's speed | BLOCK = 128 |",
        f"| {ROW} | how near the floor of 7 us? | 0.010 ms | - |",
        f"| {ROW} | against v0 at 40 us | 4x | - |",
        f"{ROW}: **10.00 us** instead of 40.1 us, 2.5 us faster than before, a tile of 128 x 64 in 4 us less",
        f"{ROW} 10 us beats {OTHER}",
        f"{ROW} is 1.10x of the next",
        f"{ROW}, unrolled 8x, at most 9 us wanted",
    ],
)
def test_a_plan_may_cite_a_row_with_its_own_figures(ready, line):
    explored(ready, "e1")
    assert problems_of_plan(ready, line) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{ROW} takes 9 us", f"{ROW} was timed at 10.00 us (p20 9.90, p80 10.20), and the line says 9 us"),
        (f"| {ROW} | which block? | 12.0 us | BLOCK = 128 |", "and the line says 12.0 us"),
        (
            f"| {ROW} | which block? | 1.56x of v0's speed | - |",
            "was timed at 4.000x of eager, and the line says 1.56x",
        ),
        (f"{ROW} 10 us, {OTHER} 17 us", f"{OTHER} was timed at 11.00 us"),
        ("explore/e7.json says so", "there is no explore/e7.json"),
        ("explore/e7.json#x: 10 us", "there is no explore/e7.json"),
    ],
)
def test_a_figure_beside_a_cited_row_is_one_of_that_row(ready, line, said):
    explored(ready, "e1")
    (message,) = problems_of_plan(ready, line)
    assert said in message


def test_a_row_that_was_not_timed_supports_no_time(ready):
    file = explored(ready, "e1")
    content = json.loads(file.read_text())
    for row in content["rows"]:
        row["latency_us"] = row["against_best"] = None
    file.write_text(json.dumps({**content, "device": "cpu-interpreter"}))
    (message,) = problems_of_plan(ready, f"{ROW}: 10 us")
    assert "was not timed on cpu-interpreter, and the line says 10 us" in message
    assert problems_of_plan(ready, f"{ROW} is right") == []


NAMES = ["two [a=1]", "list[TILE=[64, 64]]", "list[TILE=[64, 64],NAME=a]#b]", "list", "a#b"]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_any_name_can_be_cited_and_kept(session, name):
    """A name with a space, a bracket within brackets or a # was cut short."""
    path = explored(session, "e1")
    content = json.loads(path.read_text())
    row = next(row for row in content["rows"] if row["status"] == "OK" and not row["opponent"])
    rows = []
    for number, own in enumerate(NAMES):
        file = path.parent / "e1" / store.file_name(own)
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"number = {number}\n")
        rows.append({**row, "name": own, "kernel_sha256": digest(file)})
    path.write_text(json.dumps({**content, "rows": rows}))
    assert problems_of_plan(session, f"| explore/e1.json#{name} | - | right | - |") == []
    assert problems_of_plan(session, f"`explore/e1.json#{name}` is right") == []
    for given in (name, f"e1#{name}", f"explore/e1.json#{name}"):
        assert f"#{name};" in store.keep(session, given)
        assert session.kernel.read_text() == f"number = {NAMES.index(name)}\n"


def test_a_candidate_that_is_kept_before_a_baseline_will_be_that_baseline(session):
    path = explored(session, "e1")
    content = json.loads(path.read_text())
    row = next(row for row in content["rows"] if row["status"] == "OK" and not row["opponent"])
    file = path.parent / "e1" / store.file_name(row["name"])
    file.parent.mkdir()
    file.write_text("right = True\n")
    path.write_text(json.dumps({**content, "rows": [{**row, "kernel_sha256": digest(file)}, *content["rows"]]}))
    assert "the gate will judge it as v0, the baseline" in store.keep(session, row["name"])
    assert session.kernel.read_text() == "right = True\n"
    with pytest.raises(UsageError, match="eager of e1 was not checked: it is an opponent or a probe; pass its file as"):
        store.keep(session, "eager")
    wrong = next(row for row in content["rows"] if row["status"] != "OK")
    with pytest.raises(UsageError, match=f"is {wrong['status']}; nothing was written"):
        store.keep(session, wrong["name"])


def test_a_workspace_keeps_its_explorations_and_takes_a_candidate_of_them(ready, tmp_path, compile_here):
    text = ready.kernel.read_text()
    (tmp_path / "space.py").write_text(f'SPACE = [{{"UNUSED": 1}}, {{"UNUSED": 2}}]\nUNUSED = 0\n{text}')
    options = ("--workspace", ready.root, "--device", "cpu-interpreter", "--budget-seconds", 30)
    first = tool_json("explore_kernels.py", tmp_path / "space.py", *options, run=compile_here)
    assert first["file"].endswith("explore/e1.json")
    stored = json.loads((ready.root / "explore/e1.json").read_text())
    assert stored["exploration"] == "e1" and [row["name"] for row in stored["rows"]] == [
        "best (v0)",
        "space[UNUSED=1]",
        "space[UNUSED=2]",
    ]
    done = compile_here("explore_kernels.py", "--workspace", ready.root, "--keep", "space[UNUSED=2]")
    assert done.returncode == 0 and "explore/e1.json#space[UNUSED=2]" in done.stdout and "v0" not in done.stdout
    assert "UNUSED = 2\n" in ready.kernel.read_text() and "SPACE" not in ready.kernel.read_text()
    ready.plan("v1").write_text(
        "explore/e1.json#space[UNUSED=2] and `explore/e1.json#space[UNUSED=9]`, explore/e4.json#x\n"
    )
    audited = workspace_audit.of_workspace(ready, ready.task(), RecordStore(ready)).problems
    assert [problem.message for path, problem in audited if path == ready.plan("v1")] == [
        "explore/e1.json has no row 'space[UNUSED=9]'",
        "there is no explore/e4.json that can be read; explore_kernels.py writes it",
    ]
    exploration, row = store.find(ready, "e1#space[UNUSED=1]")
    assert (exploration, row.name, row.is_right) == ("e1", "space[UNUSED=1]", True)
    file = store.file_of(ready, exploration, row.name)
    file.write_text(file.read_text() + "# changed\n")
    with pytest.raises(UsageError, match="was changed since e1"):
        store.keep(ready, "space[UNUSED=1]")
    with pytest.raises(UsageError, match="no exploration"):
        store.keep(ready, "e7#space[UNUSED=1]")
    (file.parents[1] / "e2.json").write_text("{}")  # damaged; older ones still serve
    with pytest.raises(UsageError, match="was changed since e1"):
        store.keep(ready, "space[UNUSED=1]")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("load_inline('k', '', CUDA, functions=['f'])", True),
        ("load_inline('k', '', CUDA, no_implicit_headers=True)", False),
        ('load_inline("k", "#include <torch/extension.h>", no_implicit_headers=True)', True),
        ('CUDA = "# include"\nCUDA = """#include  <ATen/cuda/CUDAContext.h>"""', True),
        ("import torch, triton", False),
        ("torch.utils.cpp_extension.load('k', ['k.cu'])", True),
        ("from torch.utils.cpp_extension import load\nk = load(name='k', sources=['k.cu'])", True),
        (
            "from torch.utils.cpp_extension import load\nCUDA = '#include <Python.h>'\nk = load('k', [written(CUDA)])",
            False,
        ),
        ("from torch.utils import cpp_extension  # none\nx = tl.load(at)", False),
    ],
)
def test_candidates_whose_builds_take_torchs_headers_are_known(source, expected):
    assert candidates.compiles_torch(source) == expected


def row_of(name: str, ratio: tuple[float, float, float] | None = None, **changes) -> dict:
    against = ratio and {"point": ratio[0], "ci95": list(ratio[1:])}
    usual = {
        "name": name,
        "status": Status.OK,
        "opponent": False,
        "latency_us": {"median": 9.0, "p20": 8.0, "p80": 9.5},
    }
    others = {**dict.fromkeys(explorations.NUMBERS), "dropped": False, "error": None, "kernel_sha256": ""}
    return {**usual, **others, "against_best": against, **changes}


EAGER, BEST = row_of("eager", opponent=True), row_of("best (v2)", opponent=True)


@pytest.mark.parametrize(
    ("against", "rows", "expected"),
    [
        ("eager", [EAGER, row_of("slow", (0.9, 0.8, 0.95)), row_of("slower", (0.5, 0.4, 0.6))], "slow"),
        (None, [row_of("wrong", status=Status.WRONG_VALUES, latency_us=None), row_of("k")], "k"),
        ("best (v2)", [row_of("k", (1.02, 1.01, 1.03)), BEST], "k"),
        ("best (v2)", [BEST, row_of("k", (1.004, 0.999, 1.01))], "the leader, k, is 1.004x against best"),
        ("best (v2)", [row_of("k"), BEST], "the leader, k, is not known to be faster against best"),
        ("eager", [EAGER, row_of("k", status=Status.OOM, latency_us=None)], "no candidate is right and timed"),
    ],
)
def test_the_leader_is_the_fastest_candidate_that_beats_the_best_version(against, rows, expected):
    other = dict.fromkeys(("timestamp", "device"), "") | {"workload": "default", "wall_s": 1}
    exploration = explorations.of_result({**other, "against": against, "rows": rows}, "e1")
    if expected in {row["name"] for row in rows}:
        assert store.leaders(exploration)[0] == expected
    else:
        with pytest.raises(Refused, match=expected):
            store.leaders(exploration)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "pass files or a folder"),
        (("k.py", "--reference", "reference.py", "--keep-leader"), "pass --workspace W"),
        (("k.py", "--workspace", "w", "--keep-leader", "--device", "cpu-interpreter"), "which only a GPU gives"),
        (("k.py", "--workspace", "w", "--keep-leader", "--keep", "k"), "not allowed with"),
        (("k.py", "--workspace", "w", "--gate", "v1", "--keep", "k"), "not allowed with"),
        (("k.py", "--reference", "reference.py", "--gate", "v1"), "pass --workspace W"),
        (("k.py",), "pass --workspace W, or --reference"),
        (("k.py", "--reference", "nowhere.py"), "is not a file"),
        (("k.py", "--reference", "reference.py", "--against", "best"), "no version is accepted"),
        (("k.py", "--reference", "reference.py", "--against", "fastest"), "it is no file"),
        (("--keep", "x"), "pass --workspace W"),
    ],
)
def test_wrong_calls_are_refused_with_a_sentence(folder, arguments, message, run_here):
    (folder / "k.py").write_text(source())
    given = [folder / word if word.endswith(".py") and "nowhere" not in word else word for word in arguments]
    done = run_here("explore_kernels.py", *given)
    assert done.returncode == 2 and message in done.stderr


def test_a_candidate_that_is_not_reached_in_time_says_so(tmp_path):
    entrant = entrants.Entrant("late", tmp_path / "k.py")
    starter = entrants.Starter(None, None, [], None, False, candidate_s=9)
    starter.start(entrant, until=time.monotonic() - 1)
    assert entrant.status == Status.TIMEOUT
    assert entrant.error == "not started: the budget was over; a larger --budget-seconds gives it more time"
    assert not entrant.started
    entrant.started = True
    starter.start(entrant, until=time.monotonic() + 0.3)  # it was started, and 'did not end in 0 s'
    assert not entrant.started


# --- ended from outside ----------------------------------------------------------------------------------------

# One core, so that one candidate is checked after the other, in the order of their names.
ON_ONE_CORE = (
    "import os, runpy, sys; os.cpu_count = lambda: 1; sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


HANGS = "import pathlib, time; pathlib.Path('reached').touch(); time.sleep(600)"  # in the folder of its process


def explored_until_reached(root: Path, number: int, *options) -> tuple[subprocess.CompletedProcess, float]:
    """(the tool, which gets a signal once a process has HANGS, how long it then took). root: of the processes' folders.
    The signal comes twice at once, as `timeout` sends it: to the process and to its group."""
    command = [sys.executable, "-c", ON_ONE_CORE, BUNDLE / "tools/explore_kernels.py", *options]
    command += ["--device", "cpu-interpreter", "--sandbox", "none", "--budget-seconds", "900"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "TMPDIR": str(root)}
    with subprocess.Popen(list(map(str, command)), text=True, env=environment, **pipes) as process:
        while not list(root.glob("kernelopt-*/open/*/reached")) and process.poll() is None:
            time.sleep(0.02)
        began = time.monotonic()
        process.send_signal(number)
        process.send_signal(number)
        out, err = process.communicate()
    assert not list(root.glob("kernelopt-*"))
    return subprocess.CompletedProcess(command, process.returncode, out, err), time.monotonic() - began


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_ended_from_outside_prints_what_it_has(ready, tmp_path, number, interruptible):
    """All that was checked by then was lost."""
    text = ready.kernel.read_text()
    files = {"a_right": text, "b_hangs": text.replace("return", f"{HANGS}; return"), "c_late": text}
    (tmp_path / "c").mkdir()
    for name, content in files.items():
        (tmp_path / "c" / f"{name}.py").write_text(content)
    kept = "a_right" if number == signal.SIGTERM else "b_hangs"
    ready.kernel.write_text("before")
    options = (tmp_path / "c", "--workspace", ready.root, "--keep", kept)
    options += ("--json",) * (number == signal.SIGTERM)
    done, took_s = explored_until_reached(ready.cache, number, *options)
    assert done.returncode == 4 and took_s < 10, done.stderr
    stored = json.loads((ready.root / "explore/e1.json").read_text())
    rows = {row["name"]: (row["status"], row["error"]) for row in stored["rows"]}
    hangs = rows.pop("b_hangs")  # on a busy machine its word that it had loaded may not have been read
    reached = ("it had loaded", "its first call was compiled and launched")
    assert hangs in [("TIMEOUT", f"stopped before {stage}") for stage in reached]
    assert rows == {
        "best (v0)": ("OK", None),
        "a_right": ("OK", "stopped before it was compiled"),
        "c_late": ("TIMEOUT", "stopped before it was started"),
    }
    if number == signal.SIGTERM:
        assert json.loads(done.stdout)["stopped_after_s"] == stored["stopped_after_s"] > 0
        assert "kernel.py is now a_right of e1" in done.stderr and ready.kernel.read_text() == text
    else:
        after = f"stopped after {stored['stopped_after_s']:.0f} s: what was not finished by then is TIMEOUT"
        assert after in done.stdout and "c_late: stopped before it was started" in done.stdout
        assert "b_hangs of e1 is TIMEOUT; nothing was written" in done.stderr and ready.kernel.read_text() == "before"


@pytest.mark.timeout(120)
def test_without_inputs_there_is_nothing_to_print(folder):
    """While the reference prepares them."""
    (folder / "c/k.py").write_text(source())
    (folder / "reference.py").write_text(
        REFERENCE.replace("get_inputs(): return", f"get_inputs():\n    {HANGS}\n    return")
    )
    options = (folder / "c", "--reference", folder / "reference.py")
    done, took_s = explored_until_reached(folder, signal.SIGTERM, *options)
    assert (done.returncode, done.stdout) == (4, "") and took_s < 10
    said = done.stderr.splitlines()[-1]
    assert said.startswith("explore_kernels.py: stopped after ")
    assert said.endswith(" s, before the inputs were ready: there is no table")


class Stoppable(Timed):
    """A stand-in for a process that times its kernel, and is told to stop at a turn of its own."""

    def __init__(self, time_us: float, stop: stop_signal.Stop, at_turn: int):
        super().__init__(time_us)
        self.stop, self.at_turn = stop, at_turn

    def ask(self, timeout_s: float, **order) -> dict:
        if self.turns == self.at_turn:
            self.stop.signalled(signal.SIGTERM, None)
        self.stop.check()
        return super().ask(timeout_s, **order)


def explored_with_a_stop(folder, monkeypatch, at_turn: int, stops: str = "b") -> tuple[run.Explored, list[str]]:
    """The outcome and the messages of an exploration of four candidates on a stand-in for a GPU that holds two of them.
    One of them stops it at a turn of its own."""
    stop = stop_signal.Stop()
    nothing_waits = SimpleNamespace(get_ready=lambda *jobs: None, count=lambda: 0, end=lambda: 0)
    sandbox = SimpleNamespace(
        scratch=folder, gpu=True, stop=stop, new_folder=lambda name: folder, forked_ahead=nothing_waits
    )
    times_us = {"a": 100.0, "b": 200.0, "c": 120.0, "d": 150.0}

    class Card(SmallCard):
        inputs = (SimpleNamespace(path="inputs"),)

        def start(self, entrant: entrants.Entrant, until: float) -> None:
            stop.check()
            entrant.status = Status.OK
            turn = at_turn if entrant.name == stops else 10_000
            entrant.process = Stoppable(self.times_us[entrant.name], stop, turn)

    card = Card(2, times_us)
    card.judge = SimpleNamespace(renew=lambda: None, end=lambda: None)
    monkeypatch.setattr(run, "prepared", lambda *_: (card, ["default"]))
    monkeypatch.setattr(run, "live_at_once", lambda inputs, waiting: 2)
    plan = run.Plan(None, [candidates.Candidate(name, {}, "") for name in times_us], {}, None)
    said = []
    return run.explore(plan, sandbox, said.append, 1), said


def test_what_was_timed_before_a_stop_keeps_its_times(folder, monkeypatch):
    """What waited for room on the GPU was not started; what was checked and not timed says so."""
    explored, said = explored_with_a_stop(folder, monkeypatch, at_turn=2)
    assert explored.stopped_after_s is not None and "profiling a" not in said
    rows = {one.name: (one.status, one.error, len(one.rounds_us)) for one in explored.entrants}
    assert rows == {
        "a": ("OK", f"not profiled: stopped after {explored.stopped_after_s:.0f} s", 2 + 1),
        "b": ("OK", None, 2),
        "c": ("TIMEOUT", "stopped before it was started", 0),
        "d": ("TIMEOUT", "stopped before it was started", 0),
    }
    assert not any(one.process for one in explored.entrants)
    explored, _ = explored_with_a_stop(folder, monkeypatch, at_turn=0, stops="a")
    assert {one.name: one.error for one in explored.entrants if one.status == Status.OK} == {
        "a": "stopped before it was timed",
        "b": "stopped before it was timed",
    }


def test_what_was_checked_and_not_compiled_before_a_stop_says_so(folder):
    both = [entrants.Entrant(name, folder / "k.py", status=Status.OK) for name in ("eager", "k")]
    both[0].is_opponent = True
    plan = SimpleNamespace(compile_for="sm_90")
    run.tell_stopped(both, plan, SimpleNamespace(gpu=None))
    assert [one.error for one in both] == [None, "stopped before it was compiled"]


def test_an_entrant_whose_outputs_were_not_compared_is_not_right(folder, monkeypatch):
    """The stop came while the oracle compared them."""

    class Ran(Timed):
        def __init__(self, *arguments):
            super().__init__(1.0)

        def answer(self, timeout_s: float) -> dict:
            return {"done": {}}

    def stopped(*_):
        raise Stopped("stopped after 3 s")

    monkeypatch.setattr(standing, "Standing", Ran)
    monkeypatch.setattr(entrants.Starter, "fault_in", stopped)
    monkeypatch.setattr(entrants, "CaseReport", dict)
    (folder / "k.py").write_text(source())
    entrant = entrants.Entrant("k", folder / "k.py")
    sandbox = SimpleNamespace(new_folder=lambda name: folder, caches=folder, gpu=True)
    with pytest.raises(Stopped):
        entrants.Starter(sandbox, None, [], None, False, 9).start(entrant, until=time.monotonic() + 60)
    assert (entrant.status, entrant.error) == (Status.TIMEOUT, "stopped before its outputs were compared")


def test_a_candidate_must_open_no_file_of_its_inputs_or_parameters(folder, monkeypatch):
    given = {}

    class Noted(Timed):
        def __init__(self, sandbox, server, job, arguments, timeout_s, hidden):
            given.update(inputs=arguments["inputs"], hidden=hidden)
            raise Stopped("noted")

    monkeypatch.setattr(standing, "Standing", Noted)
    inputs = [cases.Case("default", 0, None, "input-0.pt", "fp32", [], state_path="state-0.pt")]
    sandbox = SimpleNamespace(new_folder=lambda name: folder, caches=folder, gpu=True)
    with pytest.raises(Stopped):
        starter = entrants.Starter(sandbox, None, inputs, None, False, 9)
        starter.start(entrants.Entrant("k", folder / "k.py"), until=time.monotonic() + 60)
    assert given == {"inputs": ["input-0.pt"], "hidden": ["input-0.pt", "state-0.pt"]}


def test_a_second_signal_ends_it_at_once(monkeypatch):
    """One that comes with the first one is that one: `timeout` sends its signal to the process and to its group."""
    now = [10.0]
    monkeypatch.setattr(stop_signal.time, "monotonic", lambda: now[0])
    stop = stop_signal.Stop()
    stop.interrupts = False
    now[0] = 13.0
    stop.signalled(signal.SIGTERM, None)
    now[0] = 13.5
    stop.signalled(signal.SIGTERM, None)
    assert stop.after_s == 3.0
    with pytest.raises(Stopped, match="stopped after 3 s"):
        stop.check()
    now[0] = 15.0
    with pytest.raises(SystemExit) as ended:
        stop.signalled(signal.SIGINT, None)
    assert ended.value.code == 128 + signal.SIGINT


def test_a_profile_is_interrupted_where_it_waits():
    stop = stop_signal.Stop()
    stop.interrupts = False
    with pytest.raises(Stopped), stop.interrupting():
        stop.signalled(signal.SIGTERM, None)
    assert not stop.interrupts
    with pytest.raises(Stopped), stop.interrupting():
        pytest.fail("it begins although it was stopped")
