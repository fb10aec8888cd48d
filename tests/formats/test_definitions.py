"""Definitions and their workloads: axes, constraints, random values, names, tolerances, origin."""

import json
import subprocess
from dataclasses import replace

import pytest
import torch
from kernelopt.errors import UsageError
from kernelopt.formats import detecting, provenance, read_gpu_mode, read_sol_execbench, tasks, workloads
from kernelopt.formats.definitions import Spec, derived, evaluated, read_definition
from kernelopt.formats.source_code import Source
from kernelopt.formats.tasks import Options, Workload
from small_definition import definition


def test_expressions_over_axes():
    values = {"heads": 8, "dim": 64}
    for text, number in (("heads * dim", 512), ("-(heads - 3) ** 2 % 7", 3), ("dim // 3 + +1", 22), ("dim / 4", 16)):
        assert evaluated(text, values, "here") == number
    for text in ("dim / 3", "heads.real", "len(heads)", "dim // 0", "", "other + 1"):
        with pytest.raises(UsageError, match="here: expression"):
            evaluated(text, values, "here")


def test_an_axis_that_a_constraint_states_is_computed(tmp_path):
    var = {"type": "var"}
    axes = {"a": var, "b": var, "c": var, "d": var}
    made = definition(
        tmp_path,
        axes=axes,
        inputs={},
        outputs={},
        constraints=["b == a  + 1  # one more", "c == b * 2", "d == a", "a == d", "a > 0"],
    )
    stated = [{"a": 3, "b": 4, "c": 8, "d": 3}, {"a": 1, "b": 2, "c": 4, "d": 2}]
    assert derived(read_definition(made), stated[:1]) == {"b": "a + 1", "d": "a"}
    assert derived(read_definition(made), stated) == {"b": "a + 1"}


def test_outputs_that_run_writes_into_are_declared(run_here, tmp_path):
    source = definition(tmp_path, reference="def run(x, y):\n    y.copy_(x * 2)\n")
    arguments = [source, "--out", tmp_path / "reference.py", "--device", "cpu-interpreter", "--json"]
    told = json.loads(run_here("import_task.py", *arguments).stdout)
    assert told["declared"]["mutates"] == ["y"] and set(told["declared"]["compare"]) == {"y"}
    assert "torch.empty((n, m), dtype=torch.float32)" in (tmp_path / "reference.py").read_text()


@pytest.mark.parametrize(
    ("name", "shape", "about", "holds"),
    [
        ("x", "3 4", "", lambda t: bool((t < 0).any() and (t > 0).any())),
        ("input_layernorm_weight", "4", "", lambda t: bool((t != 1).all() and (t - 1).abs().max() < 1)),
        ("norm_bias", "4", "", lambda t: bool((t != 0).all() and t.abs().max() < 1)),
        ("causal_mask", "5 5", "", lambda t: bool((t.tril() == 0).all() and t[0, 1] < -1e30)),
        ("drop_mask", "9 9", "", lambda t: set(t.unique().tolist()) == {0.0, 1.0}),
        ("key_mask", "9 9", "1.0 for valid positions", lambda t: set(t.unique().tolist()) == {0.0, 1.0}),
        ("rope_sin", "9 9", "", lambda t: bool((t.abs() <= 1).all())),
        ("rstd", "9 9", "", lambda t: bool((t > 0).all())),
        ("A_log", "9 9", "", lambda t: bool((t >= -5).all() and (t <= -1).all())),
        ("A_cumsum", "9 9", "", lambda t: bool((t.diff(dim=-1) <= 0).all())),
        ("routing_weights", "9 9", "", lambda t: bool(torch.allclose(t.sum(-1), torch.ones(9)))),
        ("q_proj", "64 400", "", lambda t: 0.04 < float(t.std()) < 0.06),
    ],
)
def test_names_say_which_numbers_an_input_holds(name, shape, about, holds):
    torch.manual_seed(0)
    text = read_sol_execbench.named_random(name, Spec(tuple(shape.split()), "float32", about))
    made = eval(text, {"torch": torch})
    assert list(made.shape) == list(map(int, shape.split())) and made.dtype == torch.float32 and holds(made)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float8_e4m3fn", "int64", "int8", "bool", "uint8"])
def test_random_values_have_the_dtype_and_shape(dtype):
    made = eval(workloads.usual_random("x", Spec(("2", "3"), dtype, "")), {"torch": torch})
    assert made.dtype == getattr(torch, dtype) and made.shape == (2, 3)
    number = eval(workloads.usual_random("x", Spec(None, dtype, "")), {"torch": torch})
    assert type(number) is (bool if dtype == "bool" else float if "float" in dtype else int)


def test_names_of_workloads_are_short_and_each_another():
    uuids = ["3f1c0f0a-0001-4000-8000-000000000001", "9b2d0f0a-0002-4000-8000-000000000002"]
    given = [Workload(name, {}, 1) for name in (*uuids, "default", "w 1", "w 1", "")]
    assert [one.name for one in tasks.distinct(given)] == [
        "3f1c0f0a",
        "9b2d0f0a",
        "default_",
        "w_1",
        "w_1-again1",
        "workload",
    ]
    alike = [Workload(f"3f1c0f0a-{at}-long-enough-to-cut", {}, 1) for at in range(2)]
    assert len({one.name for one in tasks.distinct(alike)}) == 2


def test_the_workloads_taken_are_spread_over_the_work():
    given = [Workload(f"w{weight}", {}, weight) for weight in (5, 1, 9, 3, 7, 2)]
    taken, remarks = tasks.chosen(given, Options(most=3))
    assert [one.name for one in taken] == ["w9", "w1", "w7"] and remarks == ["workloads left out by --most: w5, w3, w2"]
    assert [one.name for one in tasks.chosen(given, Options(most=1))[0]] == ["w9"]
    assert tasks.chosen(given, Options(default="w3"))[0][0].name == "w3"


def test_a_tolerance_is_never_looser_than_a_task_may_declare():
    assert tasks.tolerated(0.1, 0.7, 0.5, 2.0)[0] == {"atol": 0.1, "rtol": 0.5, "share": 0.9, "cap": 2.0}
    assert len(tasks.tolerated(0.1, 0.7, 0.5)[1]) == 2 and tasks.tolerated(0.1, 0.2) == ({"atol": 0.1, "rtol": 0.2}, [])


@pytest.mark.parametrize(
    ("check", "modes"),
    [
        ("make_match_reference(ref_kernel)", {"atol": 1e-8, "rtol": 1e-5}),
        ("make_match_reference(ref_kernel, rtol=R, atol=2e-3)", {"atol": 2e-3, "rtol": 0.25}),
        ("lambda data, output: near(output, data)", None),
        ("lambda data, output: torch.allclose(output, data, 1e-2)", None),
        ("make_match_reference(ref_kernel, **bounds)", None),
        ("lambda data, output: verbose_allclose(output, data, rtol=len(data))", None),
        ("lambda d, o: verbose_allclose(o, d, rtol=1e-3) + verbose_allclose(o, d, rtol=1e-2)", None),
        ("lambda d, o: verbose_allequal(o[0], d[0]) + verbose_allequal(o[1], d[1])", {"atol": 0.0, "rtol": 0.0}),
    ],
)
def test_the_tolerance_of_a_checker_is_read_from_its_code(check, modes):
    bounds, remarks = read_gpu_mode.bounds_of(Source(f"R = 0.25\ncheck_implementation = {check}\n", "reference.py"))
    assert bounds.usual == modes and bool(remarks) == (modes is None)


def test_where_a_task_comes_from_is_kept(tmp_path):
    (tmp_path / "LICENSE").write_text("\n# The Licence of Licences #\nterms\n")
    folder = tmp_path / "problems" / "one"
    folder.mkdir(parents=True)
    for command in (
        ["init", "--quiet"],
        ["remote", "add", "origin", "https://me:secret@example.org/tasks.git"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    origin = provenance.origin_of(folder, ["x = 1"])
    assert origin.repository == "https://example.org/tasks.git" and len(origin.commit) == 40
    assert origin.licence == "The Licence of Licences (LICENSE)"
    assert provenance.origin_of(folder, ["# SPDX-License-Identifier: MIT\n"]).licence == "MIT"


def test_each_format_is_seen_from_its_own_files(tmp_path):
    made = definition(tmp_path)
    assert detecting.read_task(made, None, Options()).format == "FlashInfer-Bench"
    line = json.loads(made.with_suffix(".jsonl").read_text())["workload"]
    made.with_suffix(".jsonl").write_text(json.dumps(line))
    task = detecting.read_task(tmp_path, None, Options())
    assert task.format == "SOL-ExecBench" and task.bounds.of("float32") == {"atol": 0.01, "rtol": 0.01, "share": 0.99}
    assert task.bounds.of("int64") is None and task.contiguous
    elsewhere = tmp_path / "other.jsonl"
    elsewhere.write_text(json.dumps({**line, "axes": {"n": 8}}))
    task = detecting.read_task(made, None, replace(Options(), workloads=elsewhere))
    assert task.workloads[0].sizes == {"n": 8}
