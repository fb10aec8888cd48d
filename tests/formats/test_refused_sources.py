"""Sources that are broken, hostile, ambiguous or in none of the formats: one sentence, the right exit code, nothing
written. Their code never runs in the tool's own process, which is this one here."""

import ast
import json
import shutil
import sys
from pathlib import Path

import pytest
from conftest import FIXTURES
from small_definition import RUN, definition

TASKS = FIXTURES / "formats"


@pytest.fixture
def refusal(run_here, tmp_path):
    """A function that imports a source and gives (exit code, the last line on stderr, the reference's file)."""

    def of(source: Path, *options) -> tuple[int, str, Path]:
        file = tmp_path / "made" / "reference.py"
        done = run_here("import_task.py", source, "--out", file, "--device", "cpu-interpreter", *options)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr.splitlines()[-1], file

    return of


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reference": "def run(x:\n"}, "is not valid Python"),
        ({"reference": "def go(x):\n    return x\n"}, "does not define the function run"),
        ({"reference": "def run(x, z):\n    return x\n"}, "run takes 2 arguments, the definition has 1"),
        ({"reference": ""}, "reference must be the text of Python code"),
        ({"reference": RUN.replace("x * 2", "x.no_such()")}, "fails on the workload default: AttributeError"),
        ({"reference": "raise SystemExit(3)\n" + RUN}, "fails on the workload default: SystemExit: 3"),
        ({"reference": "import os\nos._exit(0)\n" + RUN}, "ended with exit code 0 and left no result"),
        ({"reference": RUN.replace("x * 2", "'no tensor'")}, "the result holds a str, which is no tensor"),
        ({"inputs": {"x": {"shape": ["n", "k"], "dtype": "float32"}}}, "shape names 'k', which is no axis"),
        ({"inputs": {"x": {"shape": ["n"], "dtype": "float4_e2m1"}}}, "dtype is 'float4_e2m1'"),
        ({"inputs": {"lambda": {"shape": ["n"], "dtype": "int8"}}}, "'lambda' is no name in Python"),
        ({"inputs": []}, "inputs must be an object"),
        ({"constraints": "n > 0"}, "constraints must be a list of text"),
        ({"axes": {"n": {"type": "var"}, "m": {"type": "const", "value": "4"}}}, "value must be a whole number"),
        ({"axes": {"n": {"type": "var"}, "m": {"type": "expr", "expression": "9**9**9"}}}, "too large a power"),
        ({"axes": {"n": {"type": "var"}, "m": {"type": "expr", "expression": "open('x')"}}}, "whole numbers, axes and"),
        ({"axes": {"n": {"type": "var"}, "m": {"type": "var"}}}, "axis m is None"),
    ],
)
def test_a_wrong_definition_is_named_in_a_sentence(refusal, tmp_path, changes, message):
    code, told, file = refusal(definition(tmp_path, **changes))
    assert code == 2 and message in told and not file.exists(), told


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"{", "is not valid JSON"),
        ("a.json", b"[" * 200_000, "is not valid JSON"),
        ("a.json", b"[]", "holds no JSON object"),
        ("a.json", b"\xff\xfe", "is not UTF-8 text"),
        ("a.json", b"{}", "is in none of the formats"),
        ("a.py", b"def f(:\n", "is not valid Python"),
        ("a.py", b"x = 1\0", "is not valid Python"),
        ("a.py", b"x = 1\n", "is in none of the formats"),
        ("a.txt", b"words", "is in none of the formats"),
    ],
)
def test_files_that_are_no_task(refusal, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    code, told, file = refusal(tmp_path / name)
    assert code == 2 and message in told and not file.exists(), told


def test_places_that_are_no_task(refusal, tmp_path):
    assert "does not exist" in refusal(tmp_path / "none")[1]
    assert "is in none of the formats" in refusal(tmp_path)[1]
    code, told, _ = refusal(TASKS / "kernelbench/scaled_rows.py", "--format", "gpu-mode")
    assert code == 2 and "is no task of gpu-mode" in told


def test_what_may_be_of_two_formats_must_be_named(refusal, tmp_path):
    folder = shutil.copytree(TASKS / "gpumode/rank_py", tmp_path / "both" / "rank_py")
    shutil.copyfile(TASKS / "gpumode/utils.py", tmp_path / "both" / "utils.py")
    (folder / "problem.yaml").write_text("name: x\n")
    code, told, _ = refusal(folder)
    assert code == 2 and "may be gpu-mode or kernelbench-hard; say which with --format" in told
    assert refusal(folder, "--format", "gpu-mode")[0] == 0
    shutil.rmtree(tmp_path / "made")
    bare = definition(tmp_path)
    bare.with_suffix(".jsonl").unlink()
    code, told, _ = refusal(bare)
    assert code == 2 and "may be flashinfer-bench or sol-execbench" in told
    assert "has no workloads, such as" in refusal(bare, "--format", "sol-execbench")[1]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("task.yml", "lang: [", "is not valid YAML"),
        ("task.yml", "!!python/object/apply:os.system [exit]", "is not valid YAML"),
        ("task.yml", "- 1", "holds no mapping"),
        ("task.yml", "lang: cu\n", "is in the language 'cu', not py"),
        ("task.yml", "lang: py\nmulti_gpu: true\n", "needs several GPUs"),
        ("task.yml", "lang: py\nfiles: {}\n", "files must be a list"),
        (
            "task.yml",
            "lang: py\nfiles: [{name: reference.py, source: ../../../reference.py}]\n",
            "lies outside the task's",
        ),
        ("reference.py", "def ref_kernel(data): return data\n", "does not define generate_input"),
        (
            "reference.py",
            "import utils\ndef ref_kernel(d): return utils.f(d)\ndef generate_input(size, down, seed): return 1\n",
            "imports utils as a whole",
        ),
    ],
)
def test_a_broken_task_of_gpu_mode(refusal, tmp_path, file, text, message):
    folder = shutil.copytree(TASKS / "gpumode/rank_py", tmp_path / "rank_py")
    shutil.copyfile(TASKS / "gpumode/utils.py", tmp_path / "utils.py")
    (folder / file).write_text(text)
    code, told, made = refusal(folder)
    assert code == 2 and message in told and not made.exists(), told


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("shapes.py", '"rows": 4', '"lines": 4', "sets 'lines', and reference.py has no such name"),
        ("shapes.py", "[\n", "list(\n", "is not valid Python"),
        ("shapes.py", '"k": 1}', '"k": 2 - 1.5}', "computes SHAPES; write its value out"),
        ("shapes.py", '"k": 1}', '"k": 0}', "sets k to 0, no whole number from 1 on"),
        ("problem.yaml", "5e-2", "tight", "tolerance torch.bfloat16 is 'tight'"),
        ("reference.py", "k=self.best", "k=k", "Model reads the name k of its module"),
    ],
)
def test_a_broken_problem_of_kernelbench_hard(refusal, tmp_path, file, old, new, message):
    folder = shutil.copytree(TASKS / "kernelbench_hard/07_best_of", tmp_path / "07_best_of")
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    code, told, made = refusal(folder)
    assert code == 2 and message in told and not made.exists(), told


def test_code_of_a_source_runs_elsewhere_alone(refusal, tmp_path):
    (tmp_path / "a.py").write_text(
        "import sys\nimport torch\nsys.modules['left_behind'] = sys\nclass Model(torch.nn.Module):\n"
        "    def forward(self, x): return x + 1\ndef get_inputs(): return [torch.rand(3)]\n"
    )
    assert refusal(tmp_path / "a.py")[0] == 0 and "left_behind" not in sys.modules


def test_text_of_a_source_cannot_leave_the_docstring(refusal, tmp_path):
    words = 'Ends """ here\n\nraise SystemExit\n\\'
    code, _, file = refusal(definition(tmp_path, name="twice", description=words))
    tree = ast.parse(file.read_text())
    assert code == 0 and "raise SystemExit" in ast.get_docstring(tree)
    assert not any(isinstance(node, ast.Raise) for node in tree.body)


def test_a_file_that_exists_stays_unless_force_says_otherwise(refusal, tmp_path):
    source = definition(tmp_path)
    assert refusal(source)[0] == 0
    file = tmp_path / "made" / "reference.py"
    file.write_text("mine")
    code, told, _ = refusal(source)
    assert code == 2 and "exists; --force replaces it" in told and file.read_text() == "mine"
    assert refusal(source, "--force")[0] == 0 and file.read_text() != "mine"
    broken = definition(tmp_path, reference="raise ValueError\n" + RUN)
    file.write_text("mine")
    assert refusal(broken, "--force")[0] == 2 and file.read_text() == "mine"
    file.unlink()
    file.mkdir()
    assert "is a folder; name a file" in refusal(source)[1]


def test_what_the_machine_lacks_is_no_fault_of_the_source(refusal, tmp_path, monkeypatch):
    code, told, file = refusal(
        definition(tmp_path, reference="import no_such_package\n" + RUN.replace("x * 2", "no_such_package.f(x)"))
    )
    assert code == 3 and "imports no_such_package, which is not installed here" in told
    assert "declarations: none" in " ".join(file.read_text().split())
    text = RUN.replace("return", "raise OSError('no CUDA device')\n    return")
    code, told, file = refusal(definition(tmp_path, reference=text), "--force")
    assert code == 3 and "its code needs a GPU (OSError: no CUDA device)" in told and "COMPARE" not in file.read_text()
    monkeypatch.setitem(sys.modules, "yaml", None)
    code, told, _ = refusal(TASKS / "gpumode/rank_py", "--force")
    assert code == 3 and "PyYAML is not installed; run: bash scripts/setup.sh formats" in told


@pytest.mark.parametrize("factor", ["1", "int(torch.arange(3).sum())"])  # the second needs the contents of offsets
def test_what_needs_more_memory_is_looked_at_on_shapes_alone(factor, run_here, tmp_path):
    source = definition(tmp_path, reference=RUN.replace("x * 2", f"torch.empty(1 << 50)[:1] + x * {factor}"))
    arguments = [source, "--out", tmp_path / "shapes.py", "--device", "cpu-interpreter", "--json"]
    told = json.loads(run_here("import_task.py", *arguments).stdout)
    assert told["checked"]["ran"] == "shapes" and set(told["declared"]["compare"]) == {"0"}


def test_code_that_does_not_end_is_a_time_out(refusal, tmp_path):
    source = definition(tmp_path, reference="import time\n" + RUN.replace("return", "time.sleep(60)\n    return"))
    code, told, file = refusal(source, "--timeout", 1)
    assert code == 4 and "did not finish in time" in told and file.exists()
