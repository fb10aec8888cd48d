"""cut_problem.py: a problem out of a model's file, that a session can start from."""

from conftest import BUNDLE, task, tool_json
from kernelopt.model_types import CutReport, Proof
from kernelopt.models import cutting, putting_back
from kernelopt.session import creation

MODELS = BUNDLE / "tests" / "models"
ON_CPU = ("--device", "cpu-interpreter")


def test_a_module_becomes_a_problem_that_a_session_starts_from(tmp_path, run_here):
    out, weights = tmp_path / "reference.py", tmp_path / "weights.pt"
    kept = ["--keep-weights", weights, "--keep-inputs", tmp_path / "inputs.pt"]
    command = [MODELS / "decoder.py", "--module", "layers.1.mlp", "--out", out, *kept, *ON_CPU]
    done = run_here("cut_problem.py", *command)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"{out}: layers.1.mlp (Mlp), 5 operators, 6144 numbers of state, called once in a step"
    assert lines[1:3] == ["input x: float32 (2, 7, 32)", "sizes that may differ: x_dim0=2, x_dim1=7"]
    assert lines[3] == "workloads: default, long, recorded_default, recorded_long"
    assert [line.split(":")[0] for line in lines[4:]] == [
        f"proved on cpu-interpreter, workload {name}" for name in ("default", "long")
    ]
    assert str(weights) in out.read_text() and weights.stat().st_size > 6144 * 4
    made = creation.create(tmp_path, "mlp", out, None, task())
    facts = putting_back.cut_facts(made.reference)
    assert facts["module"] == "layers.1.mlp" and facts["between"] is None and facts["workload"] == "default"
    kernel = made.reference.read_text().replace("class Model(", "class ModelNew(")
    made.kernel.write_text(kernel)
    options = ["--workspace", made.root, "--allow-libraries", "--quick", *ON_CPU]
    assert tool_json("verify_kernel.py", *options, run=run_here)["status"] == "OK"
    again = run_here("cut_problem.py", *command)
    assert again.returncode == 2 and f"{out} exists" in again.stderr and out.read_text() == made.reference.read_text()


def test_calls_of_another_form_are_told_with_what_to_do():
    proof = Proof("default", 0.0, 0.0, 4, None, calls=1, left=2, condition="skip is None")
    cut = CutReport("r.py", "own", "Own", 1, [], ["x"], 1, 0, 0, [], {}, "none", 3, ["default"], [proof])
    lines = cutting.lines(cutting.CutProblem(cut, "cpu-interpreter"))
    proved, others = lines[-2:]
    assert proved.endswith("are equal with the cut in place of 1 of 3 calls")
    assert "input x holds one value alone, so a kernel that leaves it out is not found" in "\n".join(lines)
    assert others.startswith("the other calls lack skip is None: put_back.py --where 'skip is None' leaves them to")


def test_a_line_shows_an_operator():
    shown = cutting.operator_line(
        {"name": "to", "operator": "aten.to.dtype", "origin": "norm (Norm)", "dtype": "float32", "shape": [2, 7]}
    )
    assert shown.split() == ["to", "aten.to.dtype", "float32", "(2,", "7)", "norm", "(Norm)"]


def test_exit_codes_tell_a_wrong_call_from_a_part_that_cannot_be_cut(tmp_path, run_here):
    out, model = tmp_path / "r.py", MODELS / "parts.py"
    for module, code, message in (
        ("nothing", 2, "the model has no module 'nothing'; its modules: cache, norm"),
        ("unused", 1, "the model does not call 'unused'"),
    ):
        done = run_here("cut_problem.py", model, "--module", module, "--out", out, *ON_CPU)
        assert (done.returncode, done.stdout, out.exists()) == (code, "", False) and message in done.stderr
    assert run_here("cut_problem.py", model, "--module", "norm", *ON_CPU).returncode == 2
    assert run_here("cut_problem.py", tmp_path / "no.py", "--out", out, *ON_CPU).returncode == 2
