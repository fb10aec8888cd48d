"""Accepted kernels in the formats of other projects: what is written, that it loads back, and when nothing is left."""

import ast
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import BUNDLE, recorded, run_tool, task, tool_json, with_floor_share
from kernelopt.errors import Refused, UsageError
from kernelopt.formats import artefact, exporting, write_flashinfer_bench, write_gpu_mode, write_hf_kernels
from kernelopt.formats.artefact import Export, Options
from kernelopt.gate import readiness, rounds
from kernelopt.session import creation
from kernelopt.session.digests import digest
from kernelopt.session.interface import Interface
from kernelopt.session.record_store import RecordStore
from kernelopt.session.source_names import names_in
from kernelopt.session.workspace import Workspace

OPTIONS = {
    "flashinfer-bench": ["--definition", "scaled_relu", "--author", "us"],
    "gpu-mode": ["--leaderboard", "scaled_relu", "--gpus", "H100", "B200"],
    "hf-kernels": ["--license", "apache-2.0", "--name", "scaled-relu"],
}
FILES = {
    "flashinfer-bench": ["test_v0.json"],
    "gpu-mode": ["submission.py"],
    "hf-kernels": [
        "README.md",
        *(f"build/torch-cuda/{name}" for name in ("__init__.py", "kernel.py", "metadata.json")),
    ],
}


def accepted(folder: Path, reference: str, kernel: str, **changes) -> Workspace:
    """A workspace whose v0 is this kernel, accepted on a recorded measurement of an H200. changes: of the Task block."""
    for name, text in {"reference.py": reference, "kernel.py": kernel}.items():
        (folder / name).write_text(f"import torch\nimport torch.nn as nn\n{text}")
    made = creation.create(folder, "some", folder / "kernel.py", folder / "reference.py", task(**changes))
    start = readiness.RoundStart.of(made)
    measured = with_floor_share(recorded("v0", digest(made.kernel), comparisons=None, against=None), 10.0)
    rounds.settle(start, "v0", readiness.check_ready(start, "v0"), measured, None)
    return made


@pytest.fixture
def exported(interpreter, tmp_path):
    """Export the best version of a workspace to a folder, and return what exporting.export does."""

    def run(made: Workspace, form: str, name: str | None = None):
        options = Options(name, "us", "mit", "scaled_relu", "relu")
        return exporting.export(interpreter, made, RecordStore(made).best(), form, options, tmp_path / "out")

    return run


@pytest.mark.parametrize("name", OPTIONS)
def test_an_accepted_kernel_is_written_and_loads_back(ready, run_here, tmp_path, name):
    out = tmp_path / "out"
    place = "--workspace", ready.root, "--device", "cpu-interpreter", "--out", out
    done = tool_json("export_kernel.py", *place, "--format", name, *OPTIONS[name], run=run_here)
    loaded = {"device": "cpu-interpreter", "workloads": ["default", "tall"], "cases": 4, "same_bits": 4}
    assert done["loaded_back"] == loaded and done["version"] == "v0"
    assert sorted(done["files"]) == sorted(str(out / file) for file in FILES[name])
    assert "the model's weights are arguments after the inputs: weight" in done["remarks"]
    assert "the constructor's arguments are fixed: ModelNew(2.0)" in done["remarks"]
    text = "".join(Path(file).read_text() for file in done["files"])
    record = RecordStore(ready).best()
    for fact in (record.git_commit_hash, record.kernel_sha256, "session test", "NVIDIA H200: 516.61 us", "cpu-interp"):
        assert fact in text
    assert str(ready.root) not in text  # where somebody works is nobody's business


def wanted(ready: Workspace, name: str | None = None, **interface) -> Export:
    """What is to be written of the workspace's v0; interface: other values for some of its fields."""
    given = {"parameters": ["x"], "kinds": ["tensor"], "constructor": ["2.0"], "weights": ["weight"], "mutates": []}
    call = Interface(**{**given, "workloads": ["default", "tall"], **interface})
    options = Options(name, "us", "mit", "scaled_relu", "relu", ("H100", "B200"))
    return Export("test", RecordStore(ready).best(), ready.kernel.read_text(), call, None, "stand-in", options)


def test_a_solution_has_the_fields_of_flashinfer_bench(ready):
    solution = json.loads(write_flashinfer_bench.write(wanted(ready)).files["test_v0.json"])
    assert [solution[key] for key in ("name", "definition", "author")] == ["test_v0", "scaled_relu", "us"]
    assert solution["spec"] == {
        "language": "python",
        "target_hardware": ["H100", "B200"],
        "entry_point": "main.py::run",
        "dependencies": ["torch"],
        "destination_passing_style": False,
    }
    sources = {source["path"]: source["content"] for source in solution["sources"]}
    assert sources["kernel.py"] == ready.kernel.read_text() and "def run(x, weight):" in sources["main.py"]


def test_a_submission_begins_with_the_header_of_gpu_mode(ready):
    text = write_gpu_mode.write(wanted(ready)).files["submission.py"]
    assert text.splitlines()[:2] == ["#!POPCORN leaderboard relu", "#!POPCORN gpu H100 B200"]
    assert ready.kernel.read_text().strip() in text


def test_a_package_has_a_name_an_id_and_a_digest_of_each_file(ready):
    files = write_hf_kernels.write(wanted(ready, "scaled-relu")).files
    metadata = json.loads(files["build/torch-cuda/metadata.json"])
    assert metadata["name"] == "scaled-relu" and metadata["id"].isidentifier() and metadata["license"] == "mit"
    assert set(metadata["digest"]["files"]) == {"__init__.py", "kernel.py"}
    init = ast.parse(files["build/torch-cuda/__init__.py"])
    assert {"scaled_relu", "ModelNew", "__all__"} <= names_in(init)


def test_what_a_kernel_needs_where_it_goes_is_said(ready):
    source = (
        "import cutlass\nfrom torch.utils.cpp_extension import load_inline\n# a stream\n" + ready.kernel.read_text()
    )
    compiled = replace(wanted(ready), source=source)
    assert compiled.packages == ["nvidia-cutlass-dsl", "torch"]
    remarks = write_gpu_mode.write(compiled).remarks
    assert any("takes nvcc" in one for one in remarks) and any("the word stream" in one for one in remarks)
    package = write_hf_kernels.write(compiled)
    assert json.loads(package.files["build/torch-cuda/metadata.json"])["python-depends"] == ["nvidia-cutlass-dsl"]


@pytest.mark.parametrize(
    ("write", "changes", "message"),
    [
        (artefact.check, {"constructor": None}, "cannot be written into a file"),
        (artefact.check, {"kinds": ["number"], "weights": []}, "no argument of ModelNew is a tensor"),
        (write_flashinfer_bench.write, {"kinds": ["dict"]}, "takes tensors and numbers as inputs, and x is a dict"),
        (write_flashinfer_bench.write, {"name": "a/b"}, "'a/b' cannot name a solution"),
        (write_hf_kernels.write, {"name": "A b"}, "'A b' cannot name a package"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(ready, write, changes, message):
    with pytest.raises(UsageError, match=message):
        write(wanted(ready, **changes))


def test_a_name_that_a_submission_needs_is_not_the_kernels(ready):
    source = ready.kernel.read_text() + "def custom_kernel(x): return x\n"
    with pytest.raises(UsageError, match="itself defines custom_kernel"):
        write_gpu_mode.write(replace(wanted(ready), source=source))


NORM = """
class Model(nn.Module):
    def forward(self, x, residual):
        residual.add_(x)
        return residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + 1e-6)
def get_inputs(): return [torch.randn(6, 16), torch.randn(6, 16)]
MUTATES = ("residual",)
COMPARE = {0: {"atol": 1e-3}}
"""
ADDS = """
import triton
import triton.language as tl


@triton.jit
def add_norm(x, residual, out, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    place = tl.program_id(0) * columns + at
    total = tl.load(x + place, at < columns) + tl.load(residual + place, at < columns)
    tl.store(residual + place, total, at < columns)
    scale = tl.rsqrt(tl.sum(tl.where(at < columns, total * total, 0.0), 0) / columns + 1e-6)
    tl.store(out + place, total * scale, at < columns)


def kernel_function(x, residual):
    out = torch.empty_like(x)
    add_norm[(x.shape[0],)](x, residual, out, x.shape[1], triton.next_power_of_2(x.shape[1]))
    return out
"""


@pytest.mark.parametrize(
    ("name", "remark"),
    [
        ("flashinfer-bench", "works on a copy of residual and returns the new contents"),
        ("gpu-mode", "changes residual in place, and check_implementation must look there"),
        ("hf-kernels", "changes residual in place"),
    ],
)
def test_a_triton_kernel_that_changes_an_input(exported, tmp_path, name, remark):
    made = accepted(tmp_path, NORM, ADDS)
    done = exported(made, name)
    assert (done.loaded.cases, done.loaded.same_bits) == (2, 2)
    assert any(remark in one for one in done.remarks), done.remarks
    assert any("how outputs are compared (COMPARE)" in one for one in done.remarks)
    if name == "flashinfer-bench":
        assert json.loads(done.files[0].read_text())["spec"]["language"] == "triton"


def test_a_dtype_of_the_task_reaches_the_model(exported, tmp_path):
    reference = """
class Model(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.inner = nn.Linear(size, size)
    def forward(self, x): return self.inner(x)
def get_inputs(): return [torch.randn(4, 8)]
def get_init_inputs(): return [8]
"""
    kernel = """
class ModelNew(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.inner = nn.Linear(size, size)
        self.register_buffer("one", torch.ones(1), persistent=False)
    def forward(self, x):
        assert self.one.dtype == self.inner.weight.dtype == x.dtype
        return x @ self.inner.weight.T + self.inner.bias * self.one
"""
    done = exported(accepted(tmp_path, reference, kernel, dtype="bf16"), "gpu-mode")
    text = done.files[0].read_text()
    assert ".to(device, torch.bfloat16)" in text and "def exported_call(x, inner_weight, inner_bias):" in text


def test_a_kernel_with_other_bits_each_time_is_judged_by_the_oracle(exported, tmp_path):
    reference = (
        "class Model(nn.Module):\n    def forward(self, x): return x * 3\ndef get_inputs(): return [torch.randn(64)]\n"
    )
    kernel = "import os\ndef kernel_function(x): return x * 3 + 1e-6 * int.from_bytes(os.urandom(1), 'big') / 256\n"
    loaded = exported(accepted(tmp_path, reference, kernel), "hf-kernels").loaded
    assert loaded.same_bits < loaded.cases and "right by the task's oracle" in loaded.sentence


def test_a_kernel_that_names_the_gpu_is_loaded_back_without_one(exported, tmp_path):
    reference = "class Model(nn.Module):\n    def forward(self, x): return x * torch.arange(64, device='cuda')\n"
    reference += "def get_inputs(): return [torch.randn(3, 64, device='cuda')]\n"
    kernel = "def kernel_function(x): return torch.arange(64, device='cuda') * x\n"
    loaded = exported(accepted(tmp_path, reference, kernel), "hf-kernels").loaded
    assert loaded.same_bits == loaded.cases


PACKS = """
class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16))
        self.register_load_state_dict_post_hook(lambda module, _: module.pack())
        self.scale = scale
        self.pack()
    def pack(self): self.packed = self.weight.detach() * self.scale
    def forward(self, x): return torch.clamp(x * self.packed.to(x.device), min=0)
"""


def test_nothing_is_left_of_an_artefact_that_computes_something_else(ready, exported, tmp_path):
    made = accepted(tmp_path, ready.reference.read_text(), PACKS)
    with pytest.raises(Refused, match=r"does not compute what the kernel does: output 0: .* convert them in forward"):
        exported(made, "flashinfer-bench")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_is_left_of_an_artefact_that_does_not_load(ready, exported, tmp_path, monkeypatch, name):
    form = exporting.FORMATS[name]

    def broken(wanted):
        made = form.write(wanted)
        return replace(made, files={file: text.replace("functools", "functoolz") for file, text in made.files.items()})

    monkeypatch.setitem(exporting.FORMATS, name, replace(form, write=broken))
    with pytest.raises(Refused, match=r"the artefact does not run on cpu-interpreter: IMPORT_ERROR: .*functoolz"):
        exported(ready, name)
    assert not (tmp_path / "out").exists()


def test_a_kernel_that_fails_by_itself_is_not_blamed_on_the_artefact(ready, exported, tmp_path):
    fails = ready.kernel.read_text().replace("return torch.clamp", "raise ValueError('no')\n        return torch.clamp")
    made = accepted(tmp_path, ready.reference.read_text(), fails)
    with pytest.raises(Refused, match=r"the kernel itself does not run on cpu-interpreter: RUNTIME_ERROR: .*no"):
        exported(made, "gpu-mode")


def test_a_file_that_exists_is_replaced_only_with_force(ready, run_here, tmp_path):
    out = tmp_path / "mine.py"
    out.write_text("mine")
    place = "--workspace", ready.root, "--device", "cpu-interpreter", "--out", out
    options = "--format", "gpu-mode", "--leaderboard", "l", "--workload", "tall"
    done = run_here("export_kernel.py", *place, *options)
    assert done.returncode == 2 and "exists; choose another --out, or pass --force" in done.stderr
    assert out.read_text() == "mine"
    done = tool_json("export_kernel.py", *place, *options, "--force", run=run_here)
    assert done["files"] == [str(out)] and "custom_kernel" in out.read_text()
    assert done["loaded_back"]["workloads"] == ["tall"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "gpu_mode"], "invalid choice: 'gpu_mode'"),
        (["--format", "flashinfer-bench", "--author", "us"], "--format flashinfer-bench needs --definition"),
        (["--format", "flashinfer-bench", "--definition", "d"], "needs --author"),
        (["--format", "gpu-mode"], "--format gpu-mode needs --leaderboard"),
        (["--format", "hf-kernels"], "--format hf-kernels needs --license"),
        (
            ["--format", "hf-kernels", "--license", "mit", "--gpus", "H100"],
            "--gpus does not go with --format hf-kernels",
        ),
        (["--format", "gpu-mode", "--leaderboard", "two words"], "'two words' is no word"),
        (["--format", "gpu-mode", "--leaderboard", "l", "--version", "1"], "'1' is no version"),
        (["--format", "gpu-mode", "--leaderboard", "l", "--workload", "small"], "no workload 'small'"),
    ],
)
def test_a_wrong_call_is_a_sentence(ready, run_here, tmp_path, arguments, message):
    place = "--workspace", ready.root, "--device", "cpu-interpreter", "--out", tmp_path / "out"
    done = run_here("export_kernel.py", *place, *arguments)
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1], done.stderr
    assert not (tmp_path / "out").exists()


def test_without_an_accepted_version_there_is_nothing_to_export(session):
    with pytest.raises(UsageError, match=r"has no accepted version; run_gate\.py accepts one"):
        exporting.accepted(session, None)


def test_only_an_accepted_version_is_exported(ready):
    with pytest.raises(Refused):
        exporting.accepted(ready, "v7")
    store = RecordStore(ready)
    rejected = replace(store.read("v0"), version="v1", git_commit_hash=None)
    store.save(replace(rejected, quality_gate=replace(rejected.quality_gate, result="FAIL")))
    with pytest.raises(UsageError, match="v1 was not accepted"):
        exporting.accepted(ready, "v1")
    assert exporting.accepted(ready, None).version == "v0"
    ready.reference.write_text(ready.reference.read_text().replace("2.0", "3.0"))
    with pytest.raises(UsageError, match=r"reference\.py was changed since the session began"):
        exporting.accepted(ready, None)


def test_a_result_that_is_no_tuple_of_tensors_is_no_solution(exported, tmp_path):
    reference = "class Model(nn.Module):\n    def forward(self, x): return {'y': x + 1}\ndef get_inputs(): return [torch.ones(4)]\n"
    made = accepted(tmp_path, reference, "def kernel_function(x): return {'y': x + 1}\n")
    with pytest.raises(Refused, match="takes a tensor or a tuple of tensors"):
        exported(made, "flashinfer-bench")
    assert exported(made, "hf-kernels").loaded.same_bits == 2


def test_a_finished_workspace_without_its_history_is_exported(exported, tmp_path):
    made = Workspace(shutil.copytree(BUNDLE / "examples" / "rmsnorm", tmp_path / "rmsnorm"))
    text = made.reference.read_text()
    made.reference.write_text(text.replace("112, 64, 512, 512", "1, 16, 8, 16"))
    done = exported(made, "flashinfer-bench")
    solution = json.loads(done.files[0].read_text())
    assert solution["spec"]["language"] == "triton" and solution["spec"]["dependencies"] == ["torch", "triton"]
    assert done.loaded.same_bits == done.loaded.cases == 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_a_cuda_kernel_with_weights_loads_back_on_a_gpu(tmp_path, name):
    made = shutil.copytree(BUNDLE / "examples" / "transposed_conv3d", tmp_path / "transposed_conv3d")
    place = "--workspace", made, "--out", tmp_path / "out"
    done = tool_json("export_kernel.py", *place, "--format", name, *OPTIONS[name], run=run_tool, timeout=300)
    assert done["loaded_back"]["device"].startswith("NVIDIA") and done["loaded_back"]["cases"] == 2
    assert any("takes nvcc" in one for one in done["remarks"])


def test_names_of_arguments_are_those_of_python_and_not_of_the_text_around(ready):
    assert artefact.names_of(["x", "lambda", "3"], taken=()) == ["x", "lambda_", "argument_3"]
    assert wanted(ready, parameters=["exported"]).inputs == ["exported_"]
    assert artefact.names_of(["a.weight", "a_weight", "x"], taken=["x"]) == ["a_weight", "a_weight_", "x_"]


# --- with the projects' own loaders, where they are installed ----------------------------------------------------


def test_flashinfer_bench_builds_the_solution(ready, exported, monkeypatch, tmp_path):
    data = pytest.importorskip("flashinfer_bench.data")
    builders = pytest.importorskip("flashinfer_bench.compile.builders")
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    (file,) = exported(ready, "flashinfer-bench").files
    solution = data.Solution.model_validate_json(file.read_text())
    tensor = {"shape": ["R", "N"], "dtype": "float32"}
    definition = data.Definition(
        name="scaled_relu",
        op_type="relu",
        axes={"R": {"type": "var"}, "N": {"type": "const", "value": 16}},
        inputs={"x": tensor, "weight": {"shape": ["N"], "dtype": "float32"}},
        outputs={"y": tensor},
        reference="def run(x, weight):\n    return (x * weight).relu() * 2.0\n",
    )
    run = builders.PythonBuilder().build(definition, solution)
    x, weight = torch.randn(3, 16), torch.randn(16)
    assert torch.equal(run(x, weight), (x * weight).relu() * 2.0)


def test_kernels_loads_the_package(ready, exported, tmp_path):
    kernels = pytest.importorskip("kernels.load")  # tests/kernels has its name, and no such module
    torch = pytest.importorskip("torch")
    exported(ready, "hf-kernels", name="scaled-relu")
    module = kernels.get_local_kernel(tmp_path / "out" / "build" / "torch-cuda")
    x, weight = torch.randn(3, 16), torch.randn(16)
    assert torch.equal(module.scaled_relu(x, weight), (x * weight).relu() * 2.0)
