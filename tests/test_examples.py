"""The worked examples hold together: records, commits, kernels, citations, pictures and the table of results agree."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BUNDLE, tool_json
from kernelopt.measure import baselines
from kernelopt.session import record_store
from kernelopt.session.digests import digest
from kernelopt.session.workspace import Workspace

EXAMPLES = sorted(path.parent for path in (BUNDLE / "examples").glob("**/git-log.txt"))
# Kernels that name the card they were tuned on, and stay as the gate judged them (the example's lessons say so).
JUDGED_WITH_A_CONSTANT = {"maxpool3d": ["kernel.py", "v2_kernel.py"]}
# Their lessons say by how much.
GOAL_MISSED = {"attention_backward", "fp8_block_product", "int8_linear", "linear_cross_entropy"}
RESULTS = BUNDLE / "docs" / "results.json"
RESULTS_H100 = BUNDLE / "docs" / "results-h100.json"
BENCHMARK = BUNDLE / "benchmarks" / "run_examples.py"


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: str(folder.relative_to(BUNDLE / "examples")))
def test_an_example_is_a_finished_workspace_whose_parts_agree(folder, run_here):
    workspace = Workspace(folder)
    records = record_store.RecordStore(workspace)
    best = records.best()
    assert digest(workspace.kernel) == best.kernel_sha256, "kernel.py is not the best version"
    log = (folder / "git-log.txt").read_text()
    for record in records.records(masked=True):
        assert record.quality_gate.result in ("PASS", "FAIL", "TIMEOUT_FAIL")
        commit, version = record.git_commit_hash, record.version
        assert (commit in log) if commit else (folder / "rejected" / f"{version}_kernel.py").exists()
        assert version == "v0" or workspace.plan(version).exists()
        if commit and folder.name != "h200":
            kept = workspace.kernel if version == best.version else folder / "versions" / f"{version}_kernel.py"
            assert digest(kept) == record.kernel_sha256
    assert not records.broken
    audited = tool_json("check_citations.py", folder, run=run_here)
    assert audited["problems"] == []
    assert [Path(hint["file"]).name for hint in audited["hints"]] == JUDGED_WITH_A_CONSTANT.get(folder.name, [])
    assert run_here("check_goal.py", folder).returncode == (1 if folder.name in GOAL_MISSED else 0)
    assert "TBD" not in workspace.readme.read_text()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert size < 1 << 20, f"{size} bytes; an example is kept under 1 MB"


def test_figures_in_documents_are_those_of_the_records_and_of_the_results():
    text = (BUNDLE / "docs" / "results.md").read_text()
    results = {
        card: {row["name"]: row["against"] for row in json.loads(file.read_text())}
        for card, file in (("H200", RESULTS), ("H100", RESULTS_H100))
    }
    for folder in EXAMPLES:
        if folder.parent.name == "row_softmax":
            continue  # test_house.py holds the table of the demo
        records = record_store.RecordStore(Workspace(folder))
        first, best = records.read("v0").performance, records.best().performance
        ratio = 1.0
        for record in records.records():
            if record.git_commit_hash and record.version != "v0":
                ratio *= record.comparison.speedup
        cells = [f"{first.latency_us:.1f} us", f"{best.latency_us:.1f} us", f"{ratio:.2f}x"]
        cells.append(f"{best.floor_share_pct:.1f} %")
        (card,) = (card for card in results if card in records.best().device)
        for name in baselines.MODES:
            found = results[card].get(folder.name, {}).get(name)
            cells.append(f"{found['speedup']['point']:.2f}x" if found else "not run")
        cells.append(card)
        assert f"](../{folder.relative_to(BUNDLE)}) | {' | '.join(cells)} |" in text, folder.name


def test_the_readmes_results_are_those_that_were_measured():
    text = (BUNDLE / "README.md").read_text().split("<!-- results -->")[1].split("<!-- /results -->")[0]
    shown = re.findall(r"\]\(examples/(\w+)\) \| (.*) \|$", text, re.MULTILINE)
    rows = {row["name"]: row for row in json.loads(RESULTS.read_text())}
    assert len(shown) == 4
    for name, cells in shown:
        against = [rows[name]["against"][opponent]["speedup"]["point"] for opponent in list(baselines.MODES)[::2]]
        assert cells == " | ".join([f"{rows[name]['ours_us']:.1f} us", *(f"{ratio:.2f}x" for ratio in against)])


def test_an_opponent_is_the_reference_behind_torch_compile(tmp_path):
    reference = b"import torch\nclass Model(torch.nn.Module):\n    def __init__(self, by):\n        super().__init__()\n        self.by = by\n    def forward(self, x): return x * self.by\n"
    for name, mode in baselines.MODES.items():
        found: dict = {}
        exec(compile(baselines.source(reference, name), name, "exec"), found)
        assert ("ModelNew" in found) == (mode is not None)
        if mode:
            assert isinstance(found["ModelNew"](3), found["Model"])


@pytest.mark.parametrize("file", [RESULTS, RESULTS_H100], ids=["h200", "h100"])
def test_the_table_of_results_is_what_was_measured(file):
    printed = subprocess.run([sys.executable, BENCHMARK, "--table", file], capture_output=True, text=True)
    rows = json.loads(file.read_text())
    assert printed.returncode == 0, printed.stderr
    page = (BUNDLE / "docs" / "results.md").read_text()
    assert printed.stdout.strip() in page
    part = page if file == RESULTS else page.split("## On an H100")[1]
    unmeasured = {folder.name for folder in EXAMPLES if folder.parent.name != "row_softmax"}
    unmeasured -= {row["name"] for row in rows}
    assert all(f"`{name}`" in part.split("**Not measured**")[1].split("\n\n")[0] for name in unmeasured)


def test_the_picture_shows_the_results():
    drawn = runpy.run_path(str(BUNDLE / "benchmarks" / "results_picture.py"))
    measured = drawn["measured"]()
    assert drawn["picture"](measured) == (BUNDLE / "docs" / "results.svg").read_text()
    rows = [row for file in (RESULTS, RESULTS_H100) for row in json.loads(file.read_text()) if row["status"] == "OK"]
    for row, share in zip(rows, [share for shares in measured.values() for share in shares], strict=True):
        assert share.of_kind["ours"] == pytest.approx(row["floor_share_pct"])
        if "speedup" in row["against"].get("torch.compile", {}):
            compiled = row["against"]["torch.compile"]["speedup"]["point"]
            assert share.of_kind["compiled"] >= share.of_kind["ours"] / compiled * 0.9999


def test_a_wrong_kernel_and_an_opponent_that_cannot_run_are_rows_of_the_table_too(tmp_path):
    compared = {"speedup": {"point": 1.5, "ci95": [1.4, 1.6]}, "us": 15.0}
    row = {
        "name": "a",
        "shapes": "8 -> 8",
        "status": "OK",
        "ours_us": 10.0,
        "latency_us": {"median": 10.5},
        "floor_us": 9.0,
        "floor_share_pct": 90.0,
    }
    row |= {"bound": "memory", "tflops": 1.0, "bandwidth_gbps": 3900.4, "ceiling": {"median": 4000.0}}
    row |= {"rounds": 5, "minutes": 6.4}
    row["against"] = {
        "eager": compared,
        "torch.compile": compared,
        "torch.compile max-autotune": {"error": "OOM"},
        "library": compared,
    }
    wrong = {"name": "b", "shapes": "8 -> 8", "status": "WRONG_VALUES", "summary": "WRONG_VALUES: off"}
    (tmp_path / "rows.json").write_text(json.dumps([row, wrong]))
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--table", tmp_path / "rows.json"], capture_output=True, text=True
    )
    assert (
        done.returncode == 1
        and "| a | 8 -> 8 | 10.0 | 10.5 | 90.0 % of 9.0 us | 3900 GB/s | 97.5 % of 4000 GB/s | 15.0 us, 1.500x (1.400 to 1.600) |"
        in done.stdout
    )
    assert done.stdout.count("| 5 | 6 |\n") == 1 and len({line.count("|") for line in done.stdout.splitlines()}) == 1
    assert "not run: OOM" in done.stdout and "library: 15.0 us" in done.stdout and "WRONG_VALUES: off" in done.stdout


def test_a_workspace_becomes_an_example_and_a_broken_one_leaves_it_as_it_was(ready, tmp_path, run_here):
    folder = tmp_path / "example"
    (folder / "memory").mkdir(parents=True)
    (folder / "memory" / "v7.json").write_text("of another session")
    (folder / "lessons.md").write_text("Mine.\n")
    for name in ("README.md", "test_kernel.py"):  # as if another checkout had started the session
        path = ready.root / name
        path.write_text(path.read_text().replace(str(BUNDLE), "/opt/bundle"))
    archive = lambda: run_here("../scripts/archive_workspace.py", ready.root, folder)  # noqa: E731
    assert archive().returncode == 0
    assert {path.name for path in (folder / "memory").iterdir()} == {"v0.json"}
    assert not (folder / "baseline_report.md").exists()  # nobody filled it in
    assert "The bundle is in `../..`." in (folder / "README.md").read_text()
    assert 'HERE / "../.." / "tools"' in (folder / "test_kernel.py").read_text()
    assert (folder / "lessons.md").read_text() == "Mine.\n" and "<!doctype html>" in (
        folder / "report.html"
    ).read_text()
    assert (
        record_store.RecordStore(Workspace(folder)).best().version == "v0"
        and "V0" in (folder / "git-log.txt").read_text()
    )
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for name, text in (("memory/v0.json", "{"), ("reference.py", None)):
        path = ready.root / name
        path.unlink() if text is None else path.write_text(text)
        done = archive()
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
