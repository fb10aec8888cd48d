"""Tasks in the formats of other projects, written here in their form (tests/fixtures/formats): each becomes a reference
that says what it declares, and against it a right kernel passes and a wrong one does not. torch on the CPU stands in for
kernels."""

import ast
import importlib.util
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import FIXTURES
from kernelopt.device.sandbox import Sandbox
from kernelopt.formats import detecting, importing
from kernelopt.formats.tasks import Options
from kernelopt.measure import observing, verify
from kernelopt.measure.cases import ReferenceFailed
from kernelopt.session.subject import KernelUnderTest

TASKS = FIXTURES / "formats"
HEAD = "import torch\nimport torch.nn as nn\n\n\n"


@dataclass(frozen=True)
class Expected:
    """What an import says, a right kernel for it, and how that becomes a wrong one. smallest: the workload that it ran.
    said: parts of remarks."""

    source: str
    format: str
    workloads: dict
    smallest: str
    declared: dict
    said: tuple[str, ...]
    kernel: str
    wrong: tuple[str, str]


EXPECTED = {
    "rmsnorm": Expected(
        "flashinfer/definitions/rmsnorm/rmsnorm_h48.json",
        "FlashInfer-Bench",
        {"default": {"rows": 20}, "3f1c0f0a": {"rows": 3}},
        "3f1c0f0a",
        {"compare": {"0": {"atol": 0.005, "rtol": 0.005}}, "layouts": "contiguous"},
        ("traces: 1 results", "timing:", "half of both"),
        "def kernel_function(x, weight, eps):\n    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * weight\n",
        (" * weight", ""),
    ),
    "paged decode": Expected(
        "flashinfer/definitions/gqa_paged/paged_decode_h4_d16_ps4.json",
        "FlashInfer-Bench",
        {
            "default": {"requests": 3, "pages": 9, "used": 5},
            "bbbb0002": {"requests": 2, "pages": 9, "used": 7},
        },
        "bbbb0002",
        {
            "compare": {"0": {"atol": 0.005, "rtol": 0.005}, "1": {"atol": 0.005, "rtol": 0.005}},
            "layouts": "contiguous",
        },
        ("workload cccc0003: ./blob/workloads/paged_gone.safetensors is absent", "keep these where they are"),
        "def kernel_function(q, k_cache, v_cache, indptr, indices, scale):\n"
        "    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)\n"
        "    for at, (first, last) in enumerate(zip(indptr.tolist(), indptr.tolist()[1:])):\n"
        "        if first < last:\n"
        "            k, v = (cache[indices[first:last].long()].reshape(-1, 16) for cache in (k_cache, v_cache))\n"
        "            weights = (q[at] @ k.T * scale).exp()\n"
        "            out[at], lse[at] = weights @ v / weights.sum(-1, keepdim=True), weights.sum(-1).log()\n"
        "    return out, lse\n",
        ("indices[first:last]", "indices[first:last].clamp(max=7)"),
    ),
    "sampling": Expected(
        "flashinfer/definitions/sampling/top_k_sampling_v12.json",
        "FlashInfer-Bench",
        {"default": {"rows": 4}},
        "default",
        {"samples": {"0": {"tvd": 0.2, "draws": 500000}}, "layouts": "contiguous"},
        ("its code draws at random", "a further argument `seed`"),
        "def kernel_function(probs, top_k, seed):\n"
        "    best = probs.topk(min(top_k, probs.shape[-1]))\n"
        "    drawn = torch.multinomial(best.values, 1, generator=torch.Generator(probs.device).manual_seed(seed))\n"
        "    return best.indices.gather(-1, drawn)[:, 0]\n",
        ("probs.topk(min(top_k,", "probs.topk(min(top_k + 3,"),
    ),
    "custom inputs": Expected(
        "solexec/gated_product",
        "SOL-ExecBench",
        {"default": {"tokens": 18}, "gated-1": {"tokens": 5}},
        "gated-1",
        {"compare": {"0": {"atol": 0.001, "rtol": 0.001, "share": 0.99, "cap": 0.5}}},
        ("the strictest of each kind", "a fixed seed"),
        "def kernel_function(x, expert, w, gain):\n"
        "    return torch.sigmoid((x[:, :, None] * w[expert]).sum(1)) * gain\n",
        (" * gain", " * gain.round()"),
    ),
    "in place": Expected(
        "gpumode/pairwise_py",
        "GPU MODE",
        {"default": {"size": 96}, "benchmark0": {"size": 200}, "test0": {"size": 31}, "test1": {"size": 32}},
        "test0",
        {
            "mutates": ["total"],
            "compare": {"0": {"atol": 0.001, "rtol": 0.001}, "total": {"atol": 0.001, "rtol": 0.001}},
        },
        ("timing: eval.py",),
        "def kernel_function(a, b, total):\n    return torch.add(b, a, out=total)\n",
        ("torch.add(b, a, out=total)", "a + b"),
    ),
    "cases of several kinds": Expected(
        "gpumode/rank_py",
        "GPU MODE",
        {"default": {"size": 64}, "test0": {"size": 17}, "test1": {"size": 40}},
        "test0",
        {"compare": {"0": {"atol": 1e-8, "rtol": 1e-5}}},
        ("check_implementation is code", "passes False as text", "ranking: by the geom"),
        "def kernel_function(values, down):\n    up = values.sort().values\n    return up.flip(0) if down else up\n",
        ("up.flip(0) if down else up", "up.flip(0)"),
    ),
    "module with state": Expected(
        "kernelbench/scaled_rows.py",
        "KernelBench",
        {"default": {}},
        "default",
        {"mutates": ["state"]},
        ("bounds by dtype",),
        "class ModelNew(nn.Module):\n"
        "    def __init__(self, width):\n"
        "        super().__init__()\n"
        "        self.weight = nn.Parameter(torch.empty(width))\n\n"
        "    def forward(self, x, state):\n"
        "        state.copy_(x + 0.5 * state)\n"
        "        return self.weight * state\n",
        ("        state.copy_(x + 0.5 * state)\n", "        state = x + 0.5 * state\n"),
    ),
    "sizes of the module": Expected(
        "kernelbench_hard/07_best_of",
        "KernelBench-Hard",
        {"default": {"ROWS": 4, "N": 24, "k": 3}, "shape1": {"ROWS": 2, "N": 70, "k": 1}},
        "shape1",
        {"compare": {"0": {"atol": 0.05, "rtol": 0.05}, "1": {"ties": "x"}}},
        (
            "forbidden, and not checked here: torch.topk, torch.sort",
            "regime memory",
            "check.py is code",
            "flops_formula",
        ),
        "class ModelNew(nn.Module):\n"
        "    def __init__(self, rows, n, best):\n"
        "        super().__init__()\n"
        "        self.best = best\n"
        '        self.register_buffer("scale", torch.empty(best))\n\n'
        "    def forward(self, x):\n"
        "        order = x.shape[-1] - 1 - x.flip(-1).argsort(dim=-1, descending=True, stable=True)[:, : self.best]\n"
        "        return (x.gather(-1, order) * self.scale).bfloat16(), order\n",
        ("* self.scale)", "* self.scale[0])"),
    ),
}


AT_OTHER_SIZES = ("in place", "sizes of the module")  # are judged with all variants; on a GPU each is


@pytest.fixture(scope="module")
def made(run_here, tmp_path_factory):
    """By name: (the JSON that the import printed, the reference that it wrote)."""
    known = {}

    def of(name: str) -> tuple[dict, Path]:
        if name not in known:
            file = tmp_path_factory.mktemp("imported") / "reference.py"
            source = TASKS / EXPECTED[name].source
            done = run_here("import_task.py", source, "--out", file, "--device", "cpu-interpreter", "--json")
            assert done.returncode == 0, done.stderr
            known[name] = json.loads(done.stdout), file
        return known[name]

    return of


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_carried_over_and_what_is_not_is_said(made, name):
    told, file = made(name)
    expected = EXPECTED[name]
    assert told["format"] == expected.format and told["reference"] == str(file)
    assert told["workloads"] == expected.workloads
    assert {key: value for key, value in told["declared"].items() if key != "sizes"} == expected.declared
    assert told["checked"] == {"device": "cpu-interpreter", "workload": expected.smallest, "ran": "values"}
    docstring = " ".join(ast.get_docstring(ast.parse(file.read_text())).split())
    for part in expected.said:
        assert any(part in remark for remark in told["not_carried"])
    for remark in told["not_carried"]:
        assert " ".join(remark.split()) in docstring
    assert str(TASKS / expected.source) in docstring.replace(" ", "") or expected.source in docstring


@pytest.mark.parametrize("name", EXPECTED)
def test_a_right_kernel_passes_and_a_wrong_one_fails(interpreter, made, tmp_path, name):
    _, reference = made(name)
    right, (old, new) = EXPECTED[name].kernel, EXPECTED[name].wrong
    assert old in right
    kernel = tmp_path / "kernel_file.py"
    kernel.write_text(HEAD + right)
    verdict = judged(interpreter, kernel, reference, only_these_shapes=name not in AT_OTHER_SIZES)
    assert verdict.status == "OK", verdict.summary
    kernel.write_text(HEAD + right.replace(old, new))
    verdict = judged(interpreter, kernel, reference, only_these_shapes=True)
    assert verdict.status in ("WRONG_VALUES", "NONFINITE"), verdict.summary


def judged(interpreter, kernel: Path, reference: Path, **options) -> verify.Verdict:
    return verify.verify(interpreter, KernelUnderTest(kernel, reference, **options), seeds=2)


def test_the_inputs_of_a_stored_workload_are_those_of_its_file(made):
    text = made("paged decode")[1].read_text()
    assert "paged_small.safetensors" in text and "len_indptr = requests + 1" in text
    assert 'raise ValueError("no such case: used == indptr[-1].item()")' in text


def test_changed_files_of_stored_tensors_are_noticed(interpreter, run_here, tmp_path):
    data = shutil.copytree(TASKS / "flashinfer", tmp_path / "data")
    source = data / "definitions/gqa_paged/paged_decode_h4_d16_ps4.json"
    arguments = [source, "--out", tmp_path / "reference.py", "--device", "cpu-interpreter"]
    assert run_here("import_task.py", *arguments).returncode == 0
    blob = data / "blob/workloads/paged_small.safetensors"
    blob.write_bytes(blob.read_bytes()[:-1] + b"\1")
    with pytest.raises(ReferenceFailed, match="has changed since the task was imported"):
        observing.observe(interpreter, tmp_path / "reference.py", "default", 60)
    blob.unlink()
    done = run_here("import_task.py", *arguments, "--force")
    assert done.returncode == 0 and "workload aaaa0001" in done.stdout and "left out" in done.stdout
    moved = tmp_path / "elsewhere" / "blob/workloads/paged_small.safetensors"
    moved.parent.mkdir(parents=True)
    shutil.copyfile(TASKS / "flashinfer/blob/workloads/paged_small.safetensors", moved)
    done = run_here("import_task.py", *arguments, "--force", "--blobs", tmp_path / "elsewhere", "--json")
    assert list(json.loads(done.stdout)["workloads"]) == ["default"]


def test_which_workload_counts_most_and_how_many_there_are_is_the_users(run_here, tmp_path):
    source = TASKS / "gpumode/pairwise_py"
    arguments = [source, "--out", tmp_path / "reference.py", "--device", "cpu-interpreter", "--json"]
    told = json.loads(run_here("import_task.py", *arguments, "--default", "test1", "--most", 2).stdout)
    assert told["workloads"] == {"default": {"size": 32}, "test0": {"size": 31}} and told["default"] == "test1"
    assert "workloads left out by --most: benchmark0, benchmark1" in told["not_carried"]
    done = run_here("import_task.py", *arguments, "--force", "--default", "none")
    assert done.returncode == 2 and "there is no workload 'none'; it has: benchmark0" in done.stderr


def test_a_tolerance_below_rounding_becomes_a_rounding_step_and_sets_of_tasks_share_files(run_here, tmp_path):
    if not importlib.util.find_spec("yaml"):
        pytest.skip("needs PyYAML")
    folder = shutil.copytree(TASKS / "gpumode/rank_py", tmp_path / "set/rank_py")
    shutil.copyfile(TASKS / "gpumode/utils.py", tmp_path / "utils.py")
    for name, old, new in (
        ("task.yml", "../utils.py", "../../utils.py"),
        ("reference.py", "torch.randn(size, device=DEVICE) * 10", "torch.randn(size, device=DEVICE).half()"),
    ):
        (folder / name).write_text((folder / name).read_text().replace(old, new))
    file = tmp_path / "reference.py"
    done = run_here("import_task.py", folder, "--out", file, "--device", "cpu-interpreter")
    assert done.returncode == 0, done.stderr
    assert "rtol 1e-05 is less than rounding to float16 costs; here it is one rounding step, 0.00098" in done.stdout
    assert '0: {"atol": 1e-08, "rtol": 0.0009765625}' in file.read_text()


def test_code_that_names_the_gpu_is_carried_as_it_is(run_here, tmp_path):
    if not importlib.util.find_spec("yaml"):
        pytest.skip("needs PyYAML")
    folder = shutil.copytree(TASKS / "gpumode", tmp_path / "set") / "rank_py"
    text = (folder / "reference.py").read_text()
    text = text.replace('DEVICE = "cuda"\n', 'DEVICE = "cuda"\nSCALE = torch.full((2,), 10.0, device="cuda")\n')
    (folder / "reference.py").write_text(text.replace("* 10", "* SCALE[1]"))
    file = tmp_path / "reference.py"
    done = run_here("import_task.py", folder, "--out", file, "--device", "cpu-interpreter")
    assert done.returncode == 0, done.stderr
    assert "torch.randn(size, device=DEVICE) * SCALE[1]" in file.read_text()


def test_a_tolerance_that_zeros_would_pass_is_the_verifiers_own(run_here, tmp_path):
    value = {
        "name": "shares",
        "axes": {"rows": {"type": "var"}, "width": {"type": "const", "value": 4096}},
        "inputs": {"x": {"shape": ["rows", "width"], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["rows", "width"], "dtype": "float32"}},
        "reference": "import torch\ndef run(x): return torch.softmax(x, -1)\n",
    }
    (tmp_path / "definition.json").write_text(json.dumps(value))
    (tmp_path / "workload.jsonl").write_text(
        json.dumps({"uuid": "one", "axes": {"rows": 3}, "inputs": {"x": {"type": "random"}}}) + "\n"
    )
    file = tmp_path / "reference.py"
    done = run_here(
        "import_task.py", tmp_path, "--out", file, "--device", "cpu-interpreter", "--format", "sol-execbench"
    )
    assert done.returncode == 0, done.stderr
    assert "atol 0.01 is more than output 0 itself (rms 0.0004" in done.stdout and "COMPARE" not in file.read_text()


@pytest.mark.gpu
def test_on_a_gpu_the_code_runs_there_and_right_kernels_pass(tmp_path):
    with Sandbox("cuda") as sandbox:
        for name, expected in EXPECTED.items():
            if expected.source.startswith(("gpumode", "kernelbench_hard")) and not importlib.util.find_spec("yaml"):
                continue
            task = detecting.read_task(TASKS / expected.source, None, Options())
            made = importing.imported(task, sandbox, 60)
            declared = {key: value for key, value in made.declared.items() if key != "sizes"}
            assert (made.ran, declared) == ("values", expected.declared), (name, made.unchecked)
            kernel, reference = tmp_path / f"{name}.py", tmp_path / f"{name} reference.py"
            kernel.write_text(HEAD + expected.kernel)
            reference.write_text(made.text)
            verdict = verify.verify(sandbox, KernelUnderTest(kernel, reference, libraries=True), seeds=2)
            assert verdict.status == "OK", (name, verdict.summary)
