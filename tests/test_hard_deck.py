"""The problems of the hard deck: what their sessions start from, and the deck's own formulas."""

import ast
import json
import runpy

import pytest
from conftest import BUNDLE

DECK = BUNDLE / "benchmarks" / "hard_deck"
PROBLEMS = sorted(path.parent for path in DECK.glob("*/about.json"))


@pytest.fixture(scope="module")
def session() -> dict:
    return runpy.run_path(str(DECK / "session.py"))


@pytest.mark.parametrize("folder", PROBLEMS, ids=lambda folder: folder.name)
def test_a_problem_has_what_its_session_takes(session, folder):
    problem = session["Problem"].read(folder.name)
    assert problem.framework in ("triton", "cuda") and problem.notes and 10 <= problem.explore_seconds <= 120
    assert 0 < problem.share_pct <= 100
    files = [folder / "reference.py", folder / "v0.py", *problem.files("candidates"), *problem.files("opponents")]
    assert problem.files("candidates") and problem.files("opponents")
    for file in files:
        names = {node.name for node in ast.parse(file.read_text()).body if hasattr(node, "name")}
        assert names & ({"Model"} if file.name == "reference.py" else {"kernel_function", "ModelNew"}), file
    plan = (folder / "v1_plan.md").read_text()
    assert "explore/e1.json#NAME" in plan and "RATIO" in plan and (folder / "README.md").exists()


def test_the_leader_is_the_first_right_candidate(session):
    rows = [
        {"name": "library", "status": "OK", "opponent": True, "against_best": None},
        {"name": "wrong", "status": "WRONG_VALUES", "opponent": False, "against_best": None},
        {"name": "a[B=64]", "status": "OK", "opponent": False, "against_best": {"point": 1.5}},
    ]
    assert session["leader"](rows) == ("a[B=64]", "1.50x")
    assert session["leader"]([{**rows[2], "against_best": None}]) == ("a[B=64]", "an unknown multiple")
    with pytest.raises(SystemExit, match="no candidate of the exploration is right"):
        session["leader"](rows[:2])


@pytest.mark.parametrize(("rejected", "last"), [("v1", "report"), ("v0", "gate v0")])
def test_a_session_goes_on_after_a_refused_v1_alone(session, monkeypatch, tmp_path, rejected, last):
    """Stand-ins for the tools, which need a GPU."""
    run = session["Session"](session["Problem"](DECK, "triton", "-", 45, 90), tmp_path)
    run.workspace.mkdir()

    def tool(command):
        wrong = command[1].endswith("run_gate.py") and command[-1] == rejected
        return type("Done", (), {"returncode": int(wrong)})

    monkeypatch.setattr(session["subprocess"], "run", tool)
    try:
        run.start("H200")
        run.judge("v0")
        run.judge("v1")
        run.end()
        assert json.loads((run.workspace / "seconds.json").read_text()) == run.seconds
    except SystemExit as ended:
        assert ended.code == 1
    assert list(run.seconds)[-1] == last


def test_the_decks_formulas_and_its_table():
    deck = runpy.run_path(str(BUNDLE / "benchmarks" / "hard_deck" / "score.py"))
    amounts = {name: problem.amount(**problem.shapes[0]) for name, problem in deck["DECK"].items()}
    assert amounts["fp8_product"] == 2 * 4096**3 and amounts["top_k"] == 4 * 131072 + 12 * 64
    assert amounts["w4a16"] == 2 * 4096 + 2048 * 12288 + 4 * 32 * 12288 + 2 * 12288
    assert amounts["paged_decode"] == 8 * 1024 * 8 * 128 * 2 * 2 + 8 * 32 * 128 * 2 * 2
    scores = [deck["Score"]({}, 10.0, (9.0, 11.0), fraction) for fraction in (0.1, 0.4)]
    assert deck["table"]({"kda": scores}).endswith("| 02 kda | 10.0, 10.0 | 0.100, 0.400 | 0.2000 | 0.0135 |")


def test_one_row_by_tl_dot_compiles_with_k_split(tmp_path, monkeypatch):
    """Triton makes a constant of M = 1. The example's v1 raises there, for columns that do not divide by 16."""
    compiler = pytest.importorskip("triton.compiler")
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    product = runpy.run_path(str(DECK / "w4a16/candidates/fragments.py"))["unpacked_product"]
    constants = {"M": 1, "BM": 16, "BN": 64, "SPLIT": 4, "STAGES": 2}
    pointers = {"x": "*bf16", "packed": "*u8", "scales": "*bf16", "zeros": "*bf16", "y": "*bf16", "parts": "*fp32"}
    types = pointers | {"arrived": "*i32", "N": "i32", "K": "i32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types[name] for name in product.arg_names}
    source = compiler.ASTSource(product, signature, constants)
    assert compiler.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4}).asm["ptx"]
