"""Inputs are made once for each set of sizes, seed and values, and never where their shapes show that they are too
large to be judged."""

import math
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from kernelopt.measure import cases, runs
from kernelopt.worker import case_files, keyword_sizes, preparing, problem, size_trials, variants
from kernelopt.worker.contract import ContractError
from kernelopt.worker.jobs import Context

SUM = (
    "import torch\n"
    "class Model(torch.nn.Module):\n"
    "    def forward(self, x): return x.sum(-1)\n"
    "def get_inputs(*, rows=300, columns=1024):\n"
    "    return [torch.randn(rows, columns)]\n"
)
# Entries of a table by index: the contents of more rows than the table has cannot be made, their shapes can.
TABLE = SUM.replace(
    "return [torch.randn(rows, columns)]", "at = torch.arange(rows); return [torch.ones(300, columns)[at]]"
)
SEEDS = [0, 1, 2, 70_000]


def prepared(tmp_path, text, monkeypatch):
    """(the answer of the job, the inputs that were made: (seed, sizes, device, whether other values were drawn))"""
    path, folder, made = tmp_path / "reference.py", tmp_path / "inputs", []
    path.write_text(text)
    folder.mkdir()
    build = problem.Reference.build

    def noted(self, workload, seed, dtype, device, sizes=None, within=None):
        built = build(self, workload, seed, dtype, device, sizes, within)
        made.append((seed, tuple(sorted((sizes or {}).items())), device, within and type(within).__name__))
        return built

    monkeypatch.setattr(problem.Reference, "build", noted)
    context = Context("cpu", {}, None)
    return preparing.prepare(context, str(path), None, None, SEEDS, 2, 1 << 30, True, str(folder)), made


def test_inputs_are_made_once_for_each_set_of_sizes_seed_and_values(tmp_path, monkeypatch):
    answer, made = prepared(tmp_path, SUM, monkeypatch)
    real = Counter(one for one in made if one[2] != "meta")
    assert max(real.values()) == 1, real
    assert len(answer["cases"]) > len(SEEDS) + 10


def test_variants_that_do_not_stay_in_memory_are_made_again_with_the_same_contents(tmp_path, monkeypatch):
    monkeypatch.setattr(keyword_sizes, "randbelow", lambda most: most // 2)  # the drawn sizes are the same
    stored = []
    for number, kept in enumerate((preparing.KEPT_BYTES, 0)):
        (tmp_path / str(number)).mkdir()
        monkeypatch.setattr(preparing, "KEPT_BYTES", kept)
        answer, made = prepared(tmp_path / str(number), SUM, monkeypatch)
        most = max(Counter(one for one in made if one[2] != "meta").values())
        assert most == 1 + number
        stored.append([problem.Case.load(Path(case["path"])).fingerprints() for case in answer["cases"]])
    assert stored[0] == stored[1]


def test_sizes_too_large_to_be_judged_are_never_made(tmp_path, monkeypatch):
    monkeypatch.setattr(variants, "LARGE_BYTES", 4 * 300 * 1024)  # the task's own
    answer, made = prepared(tmp_path, SUM, monkeypatch)
    shapes = [dict(sizes) for _, sizes, device, _ in made if device != "meta"]
    held = [4 * one.get("rows", 300) * one.get("columns", 1024) for one in shapes]
    assert max(held) <= variants.LARGE_BYTES
    asked = [dict(sizes) for _, sizes, device, _ in made if device == "meta"]
    assert any(4 * one.get("rows", 300) * one.get("columns", 1024) > variants.LARGE_BYTES for one in asked)
    assert all(case["shapes"][0] != [301, 1024] for case in answer["cases"])


def test_sizes_above_a_mebibyte_are_chosen_by_shapes(tmp_path, monkeypatch):
    _, made = prepared(tmp_path, SUM, monkeypatch)
    on_trial = [dict(sizes) for seed, sizes, device, _ in made if seed == 0 and sizes and device == "cpu"]
    assert on_trial
    assert all(4 * one.get("rows", 300) * one.get("columns", 1024) <= 1 << 20 for one in on_trial)


def test_where_contents_fail_whose_shapes_pass_sizes_are_chosen_by_contents(tmp_path, monkeypatch):
    answer, _ = prepared(tmp_path, TABLE, monkeypatch)
    names = [case["variant"].name for case in answer["cases"] if case["variant"]]
    assert "rows 300 -> 150" in names
    assert "rows 300 -> 301" in answer["left_out"]


RAGGED = (
    "import torch\n"
    "class Model(torch.nn.Module):\n"
    "    def forward(self, x, offsets): return x[: offsets.tolist()[-1]]\n"
    "def get_inputs(*, rows=2**40, columns=2**20, parts=8):\n"
    "    drawn = torch.multinomial(torch.rand(parts), 100, replacement=True)\n"
    "    offsets = torch.bincount(drawn, minlength=parts).cumsum(0)\n"
    "    return [BODY, offsets]\n"
)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("torch.randn(rows, columns).bfloat16()", 2 << 60),
        ("torch.randn(rows, columns) * torch.rand(columns)", 4 << 60),
        ("torch.randn(rows, columns)[drawn]", 4 * 100 << 20),
        ("torch.randn(rows, columns)[torch.randn(rows, columns)[:, 0] > 0]", None),
        ("torch.rand(columns).copy_(torch.randn(rows, columns)[0])", None),
    ],
    ids=["plain", "beside small ones", "by small indices", "by its contents", "written into a small one"],
)
def test_shapes_show_the_size_of_inputs_beside_offsets_that_are_drawn_by_random_shares(tmp_path, body, shown):
    """No machine could make these."""
    path = tmp_path / "reference.py"
    path.write_text(RAGGED.replace("BODY", body))
    held = size_trials.held(problem.Reference(path), "default", 0, None, {"parts": 5})
    assert (held and held.inputs) == (shown and shown + 8 * 5)


@pytest.mark.parametrize(
    "made",
    [
        "torch.randn(2**21), torch.randn(int(torch.randint(1, 2**20, ())))",  # of other numbers than for real
        "torch.zeros(int(torch.bincount(torch.ones(1, dtype=int))[1])), kept.setdefault(0, torch.randn(2**21))",
    ],
    ids=["a size is drawn", "the file keeps tensors, and can be executed once"],
)
def test_shapes_do_not_tell_what_a_draw_decides_or_what_would_leave_blank_tensors_behind(tmp_path, made):
    text = (
        "import torch\n"
        f'LIBRARY = torch.library.Library("{tmp_path.name}", "DEF")\n'
        "kept = {}\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x, y): return x.sum() + y.sum()\n"
        f"def get_inputs(*, parts=8): return [{made}]\n"
    )
    (tmp_path / "reference.py").write_text(text)
    reference = problem.Reference(tmp_path / "reference.py")
    assert size_trials.held(reference, "default", 0, None, {"parts": 5}) is None
    assert not any(one.is_meta for one in reference.build("default", 0, None, "cpu", {"parts": 5})[1])


def test_every_file_is_whole_when_the_job_ends(tmp_path, monkeypatch):
    answer, _ = prepared(tmp_path, SUM, monkeypatch)
    paths = [case["path"] for case in answer["cases"]]
    assert len(set(paths)) == len(paths)
    for case in answer["cases"]:
        assert [list(tensor.shape) for tensor in problem.Case.load(case["path"]).inputs] == case["shapes"]
    assert torch.serialization.get_crc32_options()


def test_no_more_than_a_limit_waits_in_memory_to_be_written(tmp_path, monkeypatch):
    waiting = []
    write = case_files.write

    def slow(content, path):
        time.sleep(0.05)
        write(content, path)

    monkeypatch.setattr(case_files, "write", slow)
    for limit, most in ((10, 0), (5000, 1), (1 << 30, 2)):
        monkeypatch.setattr(case_files, "AHEAD_BYTES", limit)
        folder = tmp_path / str(limit)
        folder.mkdir()
        waiting.clear()
        with case_files.CaseFiles(folder) as files:
            for _ in range(5):
                files.add(problem.Case([torch.zeros(600)], [], {}, None))
                waiting.append(len(files._writing) - 1)
        assert max(waiting) == most
        assert len(list(folder.iterdir())) == 5


def test_seeds_end_where_their_files_hold_the_limit(tmp_path):
    path, bytes_of_one = tmp_path / "reference.py", 4 * 300 * 1024
    path.write_text(SUM)
    for limit, seeds in ((0, SEEDS[-2:]), (2 * bytes_of_one, SEEDS[-3:]), (1 << 30, SEEDS)):
        folder = tmp_path / str(limit)
        folder.mkdir()
        context = Context("cpu", {}, None)
        answer = preparing.prepare(context, str(path), None, None, SEEDS, 2, limit, False, str(folder))
        assert [case["seed"] for case in answer["cases"]] == seeds


def test_a_value_that_no_file_holds_ends_the_job_before_its_variants_are_tried(tmp_path):
    text = "import torch, fractions\nclass Model(torch.nn.Module):\n    def forward(self, x, y): return x\n"
    text += "def get_inputs(*, n=8): return [torch.randn(n), fractions.Fraction(1, 2)]\n"
    (tmp_path / "reference.py").write_text(text)
    loaded = problem.Reference(tmp_path / "reference.py")
    with pytest.raises(ContractError, match="Fraction"), case_files.CaseFiles(tmp_path) as files:
        files.add(loaded.case("default", 0, None, "cpu"))


def test_cases_name_the_file_that_holds_their_parameters_and_nothing_else(tmp_path, monkeypatch):
    text = SUM.replace(
        "    def forward(self, x): return x.sum(-1)\n",
        "    def __init__(self):\n        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.randn(300, 1024))\n"
        "    def forward(self, x): return x * self.weight[0, : x.shape[-1]]\n",
    ).replace("rows=300, ", "rows=16, ")
    answer, _ = prepared(tmp_path, text, monkeypatch)
    of_candidate = [cases.Case.from_json({**case, "variant": None}) for case in answer["cases"]]
    own = [case for case, one in zip(of_candidate, answer["cases"], strict=True) if not one["variant"]]
    assert len({case.state_path for case in own}) == len(own) == len(SEEDS)
    assert len(of_candidate) - len({case.state_path for case in of_candidate}) > 5
    for case in of_candidate:
        weight = problem.Case.load(Path(case.path)).state["weight"]
        assert torch.equal(torch.load(case.state_path)["weight"], weight)
        inputs_bytes = 4 * sum(map(math.prod, case.shapes))
        assert case.bytes() - inputs_bytes - weight.nbytes in range(20_000)
        assert runs.hidden_files(tmp_path / "reference.py", tmp_path / "reference.py", [case]) == case.files


@pytest.mark.parametrize("change", ["nothing", "tensor", "contents", "contents of another", "name", "size"])
def test_parameters_are_stored_again_where_they_are_others(tmp_path, change):
    weight = torch.ones(10 if change == "size" else case_files.SHARED_BYTES)  # few are not worth a file
    first = problem.Case([], [], {"weight": weight}, None)
    second = problem.Case([1], [], {"bias" if change == "name" else "weight": weight}, None)
    with case_files.CaseFiles(tmp_path) as files:
        before = files.add(first)
        files.settle()
        if change == "contents":
            weight[3] = 2
        if change in ("tensor", "contents of another"):
            weight = second.state["weight"] = weight.clone()
        if change == "contents of another":
            weight[3] = 2
        added = files.add(second)
    assert (added.state_path is None) == (change == "size")
    assert (added.state_path == before.state_path) == (change in ("nothing", "tensor", "size"))
    (read,) = problem.Case.load(added.path).state.values()
    assert torch.equal(read, weight)


CACHED = """
import functools, torch
@functools.lru_cache
def table(columns): return torch.arange(columns) / 2
KEPT = {}
class Model(torch.nn.Module):
    def forward(self, x, y): return KEPT.setdefault(x.shape, 2 * y) + x
def get_inputs(*, rows=4, columns=24): return [torch.randn(rows, columns), table(columns)]
"""


def test_what_a_reference_keeps_between_calls_holds_no_tensor_without_contents(tmp_path, monkeypatch):
    answer, _ = prepared(tmp_path, CACHED, monkeypatch)
    assert not answer["left_out"]
    names = [case["variant"].name for case in answer["cases"] if case["variant"]]
    assert {"primes just below", "columns 24 -> 25", "larger sizes", "input 0 transposed"} <= set(names)


def test_whole_numbers_that_no_case_varies_are_named(tmp_path, monkeypatch):
    others = "torch.full((rows,), 3), torch.arange(rows), torch.zeros((), dtype=torch.int8), rows, 100, True"
    text = SUM.replace("columns)]", f"columns), {others}]").replace(
        "self, x", "self, x, shift, at, zero, n, limit, flag"
    )
    answer, _ = prepared(tmp_path, text.replace("columns)]", f"columns), {others}]"), monkeypatch)
    assert answer["fixed"] == {"shift": 3, "zero": 0, "limit": 100}
