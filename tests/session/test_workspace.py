import os
import subprocess
from pathlib import Path

import pytest
from conftest import BUNDLE, KERNEL, REFERENCE, kernel_text, run_script, run_tool, task, with_changes
from kernelopt.errors import UsageError
from kernelopt.session import creation, workspace
from kernelopt.session.source_names import defined_names
from kernelopt.session.task import dtype_name
from kernelopt.session.version_names import version_number

KERNELBENCH = """
import torch
import torch.nn as nn

class Model(nn.Module):
    \"\"\"Simple model that performs a single matrix multiplication (C = A * B)\"\"\"
    def __init__(self):
        super(Model, self).__init__()

    def forward(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return torch.matmul(A, B)

M = 256
K = 64

def get_inputs():
    A = torch.rand(M, K)
    B = torch.rand(K, 1)
    return [A, B]

def get_init_inputs():
    return []  # No special initialization inputs needed
"""


def init(*arguments) -> subprocess.CompletedProcess:
    """What workspace_init.sh starts."""
    return run_script(BUNDLE / "tools" / "init_workspace.py", *arguments)


def test_session_start_makes_the_workspace_and_prints_its_path_alone(tmp_path, problem):
    files = problem["kernel"], "--reference", problem["reference"]
    done = run_tool("workspace_init.sh", "softmax-1", *files, "--root", tmp_path, "--platform", "h200")
    root = tmp_path / "kernel_opt_softmax-1"
    assert done.returncode == 0 and done.stdout == f"{root}\n"
    made = workspace.Workspace(root)
    assert made.task().platform == "H200" and made.task().arch == "Hopper"
    names = {
        "README.md",
        "kernel.py",
        "reference.py",
        "test_kernel.py",
        "baseline_report.md",
        "memory",
        "plans",
        "profiles",
    }
    assert names <= {path.name for path in root.iterdir()}
    assert made.git("log", "--format=%an %s") == "gpu-kernel-optimizer Session softmax-1 starts"
    assert made.git("status", "--porcelain") == ""
    assert made.kernel.read_text() == problem["kernel"].read_text()


def test_a_kernelbench_file_works_unchanged(tmp_path):
    source = tmp_path / "4_Matrix_vector.py"
    source.write_text(KERNELBENCH)
    done = init("kb", source, "--root", tmp_path)
    assert done.returncode == 0, done.stderr
    made = workspace.Workspace(Path(done.stdout.strip()))
    assert made.reference.read_text() == KERNELBENCH


def test_a_demo_that_holds_everything_becomes_kernel_and_reference(tmp_path):
    source = tmp_path / "both.py"
    source.write_text(REFERENCE + kernel_text())
    made = creation.create(tmp_path, "both", source, None, task())
    assert made.kernel.read_text() == made.reference.read_text() == source.read_text()


@pytest.mark.parametrize("name", ["", "-x", "_x", "a b", "../x", "a/b", "ä", "a\n"])
def test_a_bad_name_leaves_nothing_behind(tmp_path, problem, name):
    done = init("--root", tmp_path, "--reference", problem["reference"], "--", name, problem["kernel"])
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout
    assert not list(tmp_path.glob("kernel_opt*"))


@pytest.mark.parametrize(
    ("kernel", "reference", "message"),
    [
        (None, REFERENCE, "not a readable file"),
        ("def broken(:", REFERENCE, "not valid Python"),
        ("x = 1", None, "neither a kernel"),
        (kernel_text(), None, "pass --reference"),
        (kernel_text(), "class Model: pass", "is no reference"),
        ("x = 1", REFERENCE, "is no kernel"),
    ],
)
def test_bad_files_get_one_sentence(tmp_path, kernel, reference, message):
    arguments = [tmp_path / "k.py"]
    if kernel is not None:
        arguments[0].write_text(kernel)
    if reference is not None:
        (tmp_path / "r.py").write_text(reference)
        arguments += ["--reference", tmp_path / "r.py"]
    done = init("x", *arguments, "--root", tmp_path)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("kernel_opt*"))


def test_an_existing_folder_is_never_written_into(tmp_path, problem):
    target = tmp_path / "kernel_opt_x"
    target.mkdir()
    (target / "mine.txt").write_text("kept")
    done = init("x", problem["kernel"], "--reference", problem["reference"], "--root", tmp_path)
    assert done.returncode == 2 and "exists" in done.stderr
    assert [path.name for path in target.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    "option",
    [
        ("--platform", "H100"),
        ("--platform", "X1"),
        ("--platform", ""),
        ("--framework", ""),
        ("--root", ""),
        ("--dtype", "int3"),
        ("--tolerance", "-1"),
        ("--tolerance", "nan"),
        ("--tolerance", "1e30"),
        ("--tolerance", "tight"),
    ],
)
def test_a_bad_option_is_a_usage_error(tmp_path, problem, option):
    done = init("x", problem["kernel"], "--reference", problem["reference"], "--root", tmp_path, *option)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not list(tmp_path.glob("kernel_opt*"))


def test_a_broken_readme_is_named(session, run_here):
    text = session.readme.read_text()
    spoilt = [text.replace('"tolerance": null', f'"tolerance": {value}').encode() for value in ("NaN", "[" * 100_000)]
    for broken in (*spoilt, b"\xff" + text.encode(), b"empty"):
        session.readme.write_bytes(broken)
        done = run_here("check_goal.py", session.root)
        assert done.returncode == 2 and "README.md" in done.stderr and done.stderr.count("\n") == 1
    assert "no json block under '## Task'; take it back from an earlier commit: git log -p" in done.stderr


def test_a_revision_without_the_file_is_told_where_others_are(session):
    with pytest.raises(UsageError, match=rf"git -C {session.root} log --oneline -- kernel\.py$"):
        session.file_at("nowhere", "kernel.py")


def test_the_task_block_is_checked_and_the_rest_of_the_readme_kept(session):
    text = session.readme.read_text()
    session.update_readme(with_changes(session.task(), additional_notes="a ``` b"), {"Roofline": "new\\1"})
    assert session.task().additional_notes == "a ``` b"
    assert "## Roofline\n\nnew\\1\n\n## Stop Conditions" in session.readme.read_text()
    assert session.readme.read_text().endswith(text[text.index("## Files") :])
    with pytest.raises(UsageError, match="platform"):
        session.update_readme(with_changes(session.task(), platform=200), {})


@pytest.mark.parametrize("text", ["v01", "v1x", "v-1", "1", "v1/../../x", "v", "V1", "v1\n", f"v{'1' * 5000}"])
def test_versions_are_strict(text):
    with pytest.raises(UsageError):
        version_number(text)


def test_dtypes_have_one_spelling():
    assert [dtype_name(n) for n in ("bfloat16", "torch.float16", "FP32")] == ["bf16", "fp16", "fp32"]


def test_defined_names_sees_imports_and_assignments(tmp_path):
    path = tmp_path / "k.py"
    path.write_text("from a import b as ModelNew\nkernel_function = 3\n" + KERNEL.split("class")[0])
    assert {"ModelNew", "kernel_function", "torch", "nn"} <= defined_names(path)


def test_an_inherited_git_dir_leads_nowhere_else(tmp_path, problem):
    mine = tmp_path / "mine"
    subprocess.run(["git", "init", "-q", mine], check=True)
    arguments = ["x", problem["kernel"], "--reference", problem["reference"], "--root", tmp_path]
    done = run_tool("workspace_init.sh", *arguments, env={"GIT_DIR": str(mine / ".git"), "GIT_WORK_TREE": str(mine)})
    assert done.returncode == 0 and (tmp_path / "kernel_opt_x/.git").is_dir()
    assert subprocess.run(["git", "-C", mine, "log"], capture_output=True).returncode != 0  # still without a commit


def test_a_session_that_lost_a_file_is_told_how_to_take_it_back(session, run_here):
    session.readme.unlink()
    done = run_here("check_goal.py", session.root)
    assert (
        done.returncode == 2
        and f"lacks README.md; take it back: git -C {session.root} checkout -- README.md" in done.stderr
    )
    session.git("checkout", "--", "README.md")
    session.kernel.unlink()
    done = run_here("verify_kernel.py", "--workspace", session.root, "--device", "cpu-interpreter")
    assert done.returncode == 2 and "checkout -- kernel.py" in done.stderr


def test_what_a_session_will_miss_is_said_at_its_start(tmp_path, problem):
    common = (problem["kernel"], "--reference", problem["reference"], "--root", tmp_path)
    bare = init("bare", *common, "--framework", "fortran")
    assert bare.returncode == 0 and bare.stdout.count("\n") == 1
    assert "no --platform" in bare.stderr and "no page of the wiki is about fortran" in bare.stderr
    assert init("whole", *common, "--platform", "H200", "--framework", "triton").stderr == ""


@pytest.mark.parametrize(
    "line",
    [
        "memory_manager.py summary --workspace",
        "optimize_kernel.py --agent none --workspace",
        "check_goal.py",
        "render_report.py",
        "partial_restart.py",
    ],
)
def test_a_link_that_leads_to_itself_is_no_workspace(tmp_path, line, run_here):
    (tmp_path / "loop").symlink_to("loop")
    done = run_here(*line.split(), tmp_path / "loop")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("tool", ["check_goal.py", "partial_restart.py"])
def test_a_pipe_is_no_kernel(ready, tool):
    target = {"workload": "default", "metric": "latency_us", "target": 1, "unit": "us", "basis": "the user"}
    ready.update_readme(with_changes(ready.task(), targets=[target]), {})
    ready.kernel.unlink()
    os.mkfifo(ready.kernel)
    done = run_tool(tool, ready.root, timeout=20)
    assert done.returncode == 2 and f"{ready.kernel} is no file; remove it" in done.stderr
