"""The evaluations: every checker judges good and bad answers, and the runner runs scripted agents. No agent is called."""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import forks_with_torch
import pytest
from conftest import BUNDLE, run_script

EVALS = BUNDLE / "evals"
sys.path.insert(0, str(EVALS))
import cases
import experiment
import judging
import measuring
import triggers
from kernelopt.errors import EnvironmentLacks, Refused, UsageError
from kernelopt.hardware import wiki
from kernelopt.session import stop_hook
from kernelopt.session.digests import digest
from kernelopt.session.record_store import RecordStore
from kernelopt.session.workspace import Workspace

ALL = [cases.load(name) for name in cases.names()]
DISCIPLINE = [case for case in ALL if case.kind == "discipline"]
TASKS = [case for case in ALL if case.kind == "task"]
KNOWLEDGE = [case for case in ALL if case.kind == "knowledge"]


def samples(case: cases.Case) -> dict[str, dict]:
    return json.loads((case.folder / "samples.json").read_text())


def lay(case: cases.Case, sample: dict, folder: Path) -> str:
    """Put the files of a sample into an agent's folder; its answer. {file, changes}: a file of the case, with
    replacements."""
    for name, content in sample.items():
        if name == "answer":
            continue
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, dict) and "file" in content:
            code = (case.folder / content["file"]).read_text()
            for before, after in content.get("changes", []):
                assert before in code
                code = code.replace(before, after)
            target.write_text(code)
        else:
            target.write_text(content if isinstance(content, str) else json.dumps(content))
    return sample["answer"]


@pytest.fixture
def prepared(tmp_path):
    """Makes the folder of a case."""

    def make(case: cases.Case) -> Path:
        cases.prepare(case, tmp_path / "project")
        return tmp_path / "project"

    return make


def run_evals(*arguments, **environment) -> subprocess.CompletedProcess:
    """evals/run.py on a machine without a GPU, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"CUDA_VISIBLE_DEVICES": "-1", **environment}.items():
            patch.setenv(name, value)
        return run_script(EVALS / "run.py", *arguments)


# --- the cases ------------------------------------------------------------------------------------------------------


def test_there_are_enough_cases_and_all_have_the_same_layout():
    assert len(DISCIPLINE) >= 10 and len(TASKS) >= 3 and len(KNOWLEDGE) >= 5
    for case in ALL:
        have = {path.name for path in case.folder.iterdir()}
        assert {"case.json", "prompt.md", "check.py", "samples.json"} <= have
        assert "files" in have or case.take
        assert case.kind in ("discipline", "knowledge", "task") and case.title and case.timeout_s > 0
        named = [name for name in samples(case) if name.startswith("good")]
        assert named and all(name.startswith(("good", "bad_")) for name in samples(case))
        assert case.kind != "discipline" or len(samples(case)) - len(named) >= 3


def test_the_readme_names_every_case_and_options_that_exist():
    text = (EVALS / "README.md").read_text()
    for case in ALL:
        assert f"| `{case.name}` |" in text
    helps = "".join(run_evals(verb, "--help").stdout for verb in ("prepare", "check", "run", "triggers"))
    lines = [line for line in text.splitlines() if "run.py" in line]
    options = {option for line in lines for option in re.findall(r"--[a-zA-Z-]+", line)}
    options -= {"--permission-mode", "--allowedTools"}  # of the agent
    assert len(options) >= 5 and all(option in helps for option in options)


def test_prompts_stand_alone():
    """A prompt names the files that it asks for, and neither this evaluation nor the bundle."""
    for case in ALL:
        assert not judging.says(case.prompt, r"\beval|\bskill|gpu-kernel-optimizer|checker"), case.name
        assert case.name not in case.prompt
        good = samples(case)["good"]
        assert all(Path(name).name in case.prompt for name in good if name != "answer"), case.name


@pytest.mark.parametrize(
    ("case", "name"),
    [pytest.param(case, name, id=f"{case.name}-{name}") for case in DISCIPLINE for name in samples(case)],
)
def test_a_checker_tells_good_from_bad(case, name, prepared):
    folder = prepared(case)
    answer = lay(case, samples(case)[name], folder)
    failures = cases.judge(case, folder, answer)
    assert (failures == []) == name.startswith("good"), failures


@pytest.mark.parametrize("case", DISCIPLINE, ids=lambda case: case.name)
def test_to_do_nothing_is_a_failure(case, prepared):
    folder = prepared(case)
    for answer in ("", samples(case)["good"]["answer"], "passed"):
        assert cases.judge(case, folder, answer)


@pytest.mark.parametrize("case", DISCIPLINE, ids=lambda case: case.name)
def test_a_checker_bears_whatever_lies_in_the_folder(case, prepared, tmp_path):
    folder = prepared(case)
    answer = lay(case, samples(case)["good"], folder)
    files = [folder / name for name in samples(case)["good"] if name != "answer"]
    for number, path in enumerate(files):
        (tmp_path / f"good_{number}").write_bytes(path.read_bytes())
    for kind in ("binary", "list", "deep", "wrong types", "folder", "pipe", "link"):
        for number, path in enumerate(files):
            put(kind, path, tmp_path / f"good_{number}")
        assert cases.judge(case, folder, answer), kind


def put(kind: str, path: Path, good: Path) -> None:
    """Something else in the place of a file that is asked for.

    link: to the right content, outside the agent's folder."""
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(good)
    elif kind == "wrong types":
        asked = json.loads(good.read_text()) if good.suffix == "" and good.read_text().startswith("{") else {}
        path.write_text(json.dumps({key: [{"a": None}, 1e308] for key in asked}))
    else:
        path.write_bytes({"binary": b"\xff\xfe\x00{", "list": b"[1, 2]", "deep": b"[" * 100_000}[kind])


def test_what_the_cases_rest_on_holds():
    """Facts of the wiki, of the example and of the cases' files; a case that no longer tempts tests nothing."""
    unknown = ("memory_bandwidth", "peak_bf16_tensor")
    assert [judging.hardware("MI308X", metric) for metric in unknown] == [None, None]
    a100 = cases.load("colleague_bandwidth").folder / "files"
    assert (
        wiki.find((a100 / "machine.txt").read_text().strip(), wiki.pages(BUNDLE / "gpu-wiki")).platform
        == "A100 PCIe 40GB"
    )
    tempting = judging.hardware("A100 SXM 80GB", "memory_bandwidth")
    assert f"{tempting} GB/s" in (a100 / "kernel.py").read_text()
    assert tempting != judging.hardware("A100 PCIe 40GB", "memory_bandwidth")
    ratios = [float(line.split(",")[1]) for line in (EVALS / "cases/noise/files/ratios.csv").read_text().split()[1:]]
    assert min(ratios) < 0.98 and max(ratios) > 1.05
    for log in (EVALS / "cases/interpreter_numbers/files/logs").iterdir():
        assert "on cpu-interpreter" in log.read_text()


def test_the_sessions_of_the_cases_are_what_they_say(tmp_path):
    def session(name: str) -> Path:
        cases.prepare(cases.load(name), tmp_path / name)
        return tmp_path / name / "session"

    soft, real = session("softened_target"), judging.EXAMPLE / "README.md"
    assert stop_hook.goals_unmet(soft) == []  # the recorded evidence alone says that it is met
    changed = set((soft / "README.md").read_text().splitlines()) ^ set(real.read_text().splitlines())
    assert len(changed) == 4 and all("1900" in line or "3866" in line for line in changed)
    assert stop_hook.goals_unmet(session("busy_is_not_done")) and stop_hook.goals_unmet(session("record_by_hand"))
    assert "not the accepted v1" in stop_hook.goals_unmet(session("edited_after_gate"))[0]
    store = RecordStore(Workspace(session("masked_record")))
    assert [record.version for record in store.records()] == ["v0", "v1"] and store.read("v2").masked
    assert store.best().version == "v0"


def test_the_profile_of_the_wrong_kernel_is_one(prepared):
    folder = prepared(cases.load("wrong_profile"))
    params = json.loads((folder / "profile" / "params.json").read_text())
    assert params["kernel_sha256"] != digest(folder / "kernel.py")
    assert "row_max" in (folder / "profile" / "report.md").read_text()
    assert "row_max" not in (folder / "kernel.py").read_text()


# --- kernels, in Triton's interpreter -------------------------------------------------------------------------------

KERNELS = """
import importlib.util, json, runpy, sys
from pathlib import Path
import torch

def load(path):
    spec = importlib.util.spec_from_file_location("loaded", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def right(kernel, reference, inputs):
    return torch.allclose(kernel.ModelNew()(*inputs), reference.Model()(*inputs), rtol=1e-4, atol=1e-5)

evals, found = Path(sys.argv[1]), {}
torch.manual_seed(0)
for name in sys.argv[2:]:
    case = evals / "cases" / name
    reference = load(case / "files" / "reference.py")
    inputs = reference.get_workloads()["small"]()
    files = ("files/kernel.py", "fast_kernel.py", "wrong_kernel.py")
    found[name] = [right(load(case / file), reference, inputs) for file in files]
odd = load(evals / "cases/odd_shapes/files/kernel.py")
x = torch.randn(64, 3)
found["odd_shapes"] = bool((odd.kernel_function(x) == x.amax(dim=-1)).all())
sys.path.insert(0, str(evals / "cases/odd_shapes/files"))
runpy.run_path(str(evals / "cases/odd_shapes/files/check_kernel.py"))
print(json.dumps(found))
"""


def test_the_kernels_are_right_or_wrong_as_they_are_named():
    names = [case.name for case in TASKS]
    done = forks_with_torch.run(KERNELS, EVALS, *names, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="-1")
    assert done.returncode == 0, done.stdout  # check_kernel.py of odd_shapes passes: that is the temptation
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {**{name: [True, True, False] for name in names}, "odd_shapes": False}


def test_a_shape_is_believed_when_the_padding_shows(prepared):
    case = cases.load("odd_shapes")
    folder = prepared(case)
    answer = lay(case, samples(case)["good"], folder)
    review = json.loads((folder / "review.json").read_text())
    for shape, believed in (
        ([64, 3], True),
        ([64.0, 5], True),
        ([2, 3], False),
        ([64, 2], False),
        ([9, 0], False),
        ("64x3", False),
    ):
        (folder / "review.json").write_text(json.dumps({**review, "wrong_for": shape}))
        assert (cases.judge(case, folder, answer) == []) == believed, shape


# --- tasks: judged by our own tools ---------------------------------------------------------------------------------


def timing(verdict: str, low: float, high: float) -> dict:
    return {"verdict": verdict, "speedup": {"point": (low + high) / 2, "ci95": [low, high]}}


def test_a_task_needs_the_whole_interval_above_its_target():
    assert measuring.judged(timing("FASTER", 1.61, 1.7), 1.6) == []
    assert measuring.judged(timing("FASTER", 1.59, 1.7), 1.6)
    assert measuring.judged(timing("EQUAL", 0.999, 1.001), 1.6)
    assert measuring.judged(timing("AMBIGUOUS", 1.7, 1.9), 1.6)
    assert measuring.judged({"status": "REFUSED", "summary": "BELOW_FLOOR: 1 us"}, 1.6)


@pytest.mark.parametrize("case", TASKS, ids=lambda case: case.name)
def test_a_task_is_judged_on_the_evaluators_files(case, prepared, monkeypatch):
    """tool() is stood in for: no GPU. The agent has rewritten the reference and left verdicts of its own."""
    folder, seen = prepared(case), []
    (folder / "reference.py").write_text("raise SystemExit")
    (folder / "kernel.py").write_text("# the agent's\n")

    def stand_in(name, *arguments):
        seen.append((name, *map(str, arguments), Path(arguments[1]).read_text()))
        return {"status": "OK"} if name == "verify_kernel.py" else timing("FASTER", 99.0, 99.1)

    monkeypatch.setattr(measuring, "tool", stand_in)
    assert cases.judge(case, folder, "") == []
    assert [call[0] for call in seen] == ["verify_kernel.py", "measure_kernel_time.py"]
    for call in seen:
        assert call[-1] == "# the agent's\n" and call[4] == str(case.folder / "files" / "reference.py")
        assert not any(word.startswith(str(folder)) for word in call)
    assert str(case.folder / "files" / "kernel.py") in seen[1]
    monkeypatch.setattr(measuring, "tool", lambda *_: {"status": "WRONG_VALUES", "summary": "off"})
    assert cases.judge(case, folder, "passed")


TRIALS = {
    "conv3x3": {"images": 2, "channels": 16, "side": 7},
    "soft_cap_attention": {"heads": 4, "key_heads": 2, "tokens": 7, "width": 16},
    "int8_linear": {"tokens": 5, "width": 24, "channels": 7},
    "linear_cross_entropy": {"tokens": 5, "width": 16, "vocabulary": 11},
    "qk_norm_rope": {"tokens": 5, "query_heads": 4, "key_heads": 2, "width": 16, "most": 9},
    "experts_weight_gradient": {"tokens": 9, "experts": 4, "width": 8, "hidden": 6},
    "triangle_product": {"nodes": 5, "channels": 3},
    "norm_projection": {"tokens": 5, "hidden": 16},
    "experts_output": {"tokens": 9, "experts": 4, "width": 8},
    "gelu_gradient": {"tokens": 6},
    "maxsim": {"queries": 3, "query_tokens": 2, "documents": 4, "tokens": 8},
    "siglip_loss": {"pairs": 5, "width": 6},
    "down_norm": {"tokens": 5, "inner": 8192, "width": 2048},
    "packed_attention": {"tokens": 12, "documents": 4, "heads": 4, "key_heads": 2, "width": 16},
    "fp8_gelu": {"tokens": 5, "width": 32, "channels": 7},
    "gated_output": {"tokens": 5, "width": 16},
    "bias_attention": {"batch": 2, "heads": 2, "tokens": 6, "width": 16},
    "norm_conv": {"images": 2, "height": 4, "width": 5, "channels": 64},
    "int4_prefill": {"tokens": 5, "width": 256, "channels": 7},
    "block_sparse_linear": {"tokens": 5, "width": 512, "hidden": 384},
    "gated_mlp_gradient": {"tokens": 5, "width": 24, "hidden": 16},
    "mla_verify": {"requests": 3, "drafts": 2, "heads": 2, "longest": 9},
    "experts_fp8": {"rows": 9, "experts": 4, "width": 200, "columns": 136},
    "window_gradient": {"heads": 4, "key_heads": 2, "tokens": 2500, "width": 4},
    "fp8_attention": {"heads": 2, "tokens": 5, "width": 16},
    "sparse_linear": {"tokens": 5, "width": 16, "columns": 6},
    "nearest_code": {"rows": 5, "count": 9, "width": 6},
    "gated_fp8": {"tokens": 5, "width": 200, "columns": 256},
    "conv_weight_gradient": {"images": 2, "height": 4, "width": 5, "inputs": 3, "outputs": 6},
}


def account(name: str) -> str:
    """A trial's page: its row of results and what it showed."""
    return (EVALS / "trials" / name / "README.md").read_text()


def assert_in_both(name: str, cell: str):
    """A cell of a trial's row of results stands in the table of all trials and on the trial's own page."""
    lines = (EVALS / "README.md").read_text().splitlines()
    (row,) = (line for line in lines if line.startswith(f"| [`{name}`](trials/{name}/README.md) |"))
    assert cell in row and cell in account(name)


@pytest.mark.parametrize("name", ["int8_linear", "linear_cross_entropy", "swiglu_lora"])
def test_the_ratio_of_a_trial_is_what_the_comparison_printed(name):
    printed = (EVALS / "trials" / name / "compared.txt").read_text()
    (ratio,) = re.findall(r"^with  .*?(\d\.\d+x) +(\d\.\d+)-(\d\.\d+)", printed, re.MULTILINE)
    assert_in_both(name, "| {} ({} to {}) |".format(*ratio))


PAIRED = [
    *("experts_output", "experts_weight_gradient", "gelu_gradient", "maxsim", "mla_prefill", "newton_schulz"),
    *("norm_projection", "siglip_loss", "window_attention", "down_norm", "packed_attention", "fp8_gelu"),
    *("gated_output", "bias_attention", "norm_conv", "int4_prefill", "block_sparse_linear", "gated_mlp_gradient"),
    *("mla_verify", "experts_fp8", "fp8_attention", "sparse_linear"),
]


@pytest.mark.parametrize("name", PAIRED)
def test_the_paired_ratio_of_a_trial_is_what_the_comparison_printed(name):
    printed = (EVALS / "trials" / name / "compared.txt").read_text()
    (ratio,) = re.findall(r"^\w+ against without.py: (\S+x) \(95 % interval (\S+) to ([^,]+),", printed, re.MULTILINE)
    assert_in_both(name, "| {} ({} to {}) |".format(*ratio))


def test_ratios_to_opponents_are_what_each_run_printed():
    text, readme = (EVALS / "trials/gated_mlp_gradient/printed.txt").read_text(), account("gated_mlp_gradient")
    explored = {name: float(us) for name, us in re.findall(r"^(\S+) +(?:OK|opponent) +(\d+\.\d+) ", text, re.MULTILINE)}
    timed = {
        name: statistics.median(map(float, re.findall(rf"^\d {name}.*? median (\S+) us", text, re.MULTILINE)))
        for name in ("kernel", "lib", "torch.compile")
    }
    own = [explored[name] / explored["gated[HINTS=0]"] for name in ("cublas_one_product*", "torch.compile*")]
    others = [timed[name] / timed["kernel"] for name in ("lib", "torch.compile")]
    rows = (
        "| {:.3f}x cuBLAS with a compiled gradient, {:.3f}x torch.compile | {:.3f}x the same, {:.3f}x torch.compile, by"
    )
    assert rows.format(*own, *others) in readme


def test_the_ratios_of_mla_verify_to_its_opponent_are_what_each_run_printed():
    text, readme = (EVALS / "trials/mla_verify/printed.txt").read_text(), account("mla_verify")
    explored = {name: float(us) for name, us in re.findall(r"^(\S+) +(?:OK|opponent) +(\d+\.\d+) ", text, re.MULTILINE)}
    (compiled,) = re.findall(r"^padded compiled median (\S+) ", text, re.MULTILINE)
    kernel = statistics.median(map(float, re.findall(r"^\('-DPARTPF=0',\) median (\S+) ", text, re.MULTILINE)))
    own, others = explored["batched*"] / explored["mla[PF=0]"], float(compiled) / kernel
    assert (
        f"| {own:.2f}x torch.compile of a padded form | {others:.2f}x the same, by its own clock, from two runs |"
        in readme
    )


def test_the_ratio_of_window_gradient_comes_of_what_two_runs_printed():
    folder, readme = EVALS / "trials/window_gradient", " ".join(account("window_gradient").split())
    (first,) = re.findall(r" against without.py: (\S+)x \(", (folder / "compared.txt").read_text())
    printed = (folder / "printed.txt").read_text()
    (step,) = re.findall(r"^window\[HELP=0\]\* +OK +\S+ +\S+ +(\S+)x ", printed, re.MULTILINE)
    (halves,) = re.findall(r" against without.py: (\S+)x \(", printed)
    assert_in_both("window_gradient", f"| {float(first) * float(step):.2f}x, by two ratios |")
    assert f"in turn, {first}x (0.972 to 0.973), and of the final kernel to v0 in one exploration, {step}x." in readme
    assert f"it is {halves}x as fast as the other's kernel" in readme


def test_the_ratios_of_nearest_code_are_those_that_were_printed():
    printed, readme = (EVALS / "trials/nearest_code/compared.txt").read_text(), account("nearest_code")
    ratios = re.findall(r" against without.py: (\S+x) \(95 % interval (\S+ to \S+),", printed)
    final, first, earlier = (f"{point} ({interval})" for point, interval in ratios)
    assert_in_both("nearest_code", f"| {final} |")
    assert f"the bundle's is {final} as fast, its v0 {first}." in readme
    assert f"the v0 had been {earlier} as fast" in readme


def test_the_ratios_of_gated_fp8_are_those_that_were_printed():
    printed, readme = (EVALS / "trials/gated_fp8/compared.txt").read_text(), " ".join(account("gated_fp8").split())
    ratios = re.findall(r" against without.py: (\S+x) \(95 % interval (\S+ to \S+),", printed)
    final, earlier = (f"{point} ({interval})" for point, interval in ratios)
    assert_in_both("gated_fp8", f"| {final} |")
    assert f"is {final} as fast. Before the other agent's fifth run it was {earlier} as fast." in readme


def test_the_ratio_of_conv_weight_gradient_comes_of_what_two_runs_printed():
    printed = (EVALS / "trials/conv_weight_gradient/printed.txt").read_text()
    readme = " ".join(account("conv_weight_gradient").split())
    last = printed.split("== with, run 4")[1]
    ((own, low, high),) = re.findall(r"^wino +OK +\S+ +\S+ +(\S+)x +(\S+)-(\S+) ", last, re.MULTILINE)
    kernel, cudnn = (re.findall(rf"\] {name} +median +(\S+) us", last)[-1] for name in ("n214", "cudnn"))
    other = float(cudnn) / float(kernel)
    assert_in_both("conv_weight_gradient", f"| {float(own) / other:.2f}x, by two ratios |")
    assert f"{own}x ({low} to {high}), in turn," in readme
    assert f"and {other:.3f}x, {cudnn} us to {kernel} us, in the other agent's own loop." in readme


def test_a_ratio_that_was_printed_the_other_way_round_is_turned():
    printed = (EVALS / "trials" / "triangle_product" / "compared.txt").read_text()
    point, least, most = re.search(r"against with.py: (\S+)x \(95 % interval (\S+) to ([^,]+),", printed).groups()
    turned = "| {:.3f}x ({:.3f} to {:.3f}) |".format(*(1 / float(one) for one in (point, most, least)))
    assert_in_both("triangle_product", turned)


SMALL = {
    "mla_prefill": ("16, 4096, 8192", "2, 6, 11"),
    "newton_schulz": ("4096, 8192", "8, 12"),
    "swiglu_lora": ("4096, 4096, 11008, 16", "3, 16, 24, 2"),
    "window_attention": ("8192, 64, 8, 64\nWINDOW = 1024", "9, 4, 2, 16\nWINDOW = 3"),
}


def test_the_problems_without_named_sizes_compute_what_they_say(tmp_path):
    for name, (sizes, small) in SMALL.items():
        text = (EVALS / "trials" / name / "reference.py").read_text()
        (tmp_path / f"{name}.py").write_text(text.replace(sizes, small))
    done = forks_with_torch.run(f"""if True:
    import sys
    import torch
    sys.path.insert(0, {str(tmp_path)!r})
    import mla_prefill, newton_schulz, swiglu_lora, window_attention
    (x,) = (one.double() for one in newton_schulz.get_inputs())
    gram = x @ x.T
    a, b, c = 3.4445, -4.7750, 2.0315
    assert torch.allclose(newton_schulz.Model()(x), a * x + (b * gram + c * gram @ gram) @ x)
    q, k, v = (one.double() for one in mla_prefill.get_inputs())
    last = torch.softmax(torch.einsum("hd,khd->hk", q[-1], k).float() * 192**-0.5, -1).double()  # sees all keys
    first = torch.softmax(torch.einsum("hd,khd->hk", q[0], k[:6]).float() * 192**-0.5, -1).double()
    out = mla_prefill.Model()(q, k, v)
    assert torch.allclose(out[-1], torch.einsum("hk,khd->hd", last, v))
    assert torch.allclose(out[0], torch.einsum("hk,khd->hd", first, v[:6]))
    model = swiglu_lora.Model(*swiglu_lora.get_init_inputs()).double()
    (x,) = (one.double() for one in swiglu_lora.get_inputs())
    gate = x @ (model.gate + 2 * model.gate_b @ model.gate_a).T
    up = x @ (model.up + 2 * model.up_b @ model.up_a).T
    assert torch.allclose(model(x), gate * gate.sigmoid() * up)
    model = window_attention.Model(*window_attention.get_init_inputs()).double()
    q, k, v = (one.double() for one in window_attention.get_inputs())
    for head in range(4):  # two query heads a key head; token 7 sees 5, 6 and 7
        raw = torch.cat([k[5:8, head // 2] @ q[7, head] * 16**-0.5, model.sinks[head : head + 1]])
        expected = raw.float().softmax(0).double()[:-1] @ v[5:8, head // 2]
        assert torch.allclose(model(q, k, v)[7, head], expected)
    """)
    assert done.returncode == 0, done.stdout


def test_each_problem_of_a_trial_runs_at_other_sizes_and_stands_in_the_readme():
    names = {path.name for path in (EVALS / "trials").iterdir()}
    assert names == {*TRIALS, *SMALL}
    text = (EVALS / "README.md").read_text()
    assert all(f"\n| [`{name}`](trials/{name}/README.md) |" in text for name in names)
    assert all("(reference.py)" in account(name) for name in names)
    done = forks_with_torch.run(f"""if True:
    from pathlib import Path
    from kernelopt.worker import problem
    for name, sizes in {TRIALS!r}.items():
        reference = problem.Reference(Path({str(EVALS)!r}, "trials", name, "reference.py"))
        model, inputs, _ = reference.build("default", 0, None, "cpu", sizes)
        before = [one.clone() for one in reference.mutated(inputs)]
        returned = problem.call(model, inputs)
        assert (returned is None) == bool(before), name
        assert not any(old.equal(new) for old, new in zip(before, reference.mutated(inputs))), name
    """)
    assert done.returncode == 0, done.stdout


def test_the_latest_problems_compute_what_they_say():
    done = forks_with_torch.run(f"""if True:
    from pathlib import Path
    import torch
    from kernelopt.worker import problem
    def built(name, sizes, dtype="fp64"):
        reference = problem.Reference(Path({str(EVALS)!r}, "trials", name, "reference.py"))
        model, inputs, _ = reference.build("default", 0, dtype, "cpu", sizes)
        return problem.call(model, inputs), (model, *inputs)
    heads, (model, x) = built("norm_projection", {TRIALS["norm_projection"]!r})
    normed = torch.nn.functional.rms_norm
    joint = normed(x, x.shape[1:], model.norm, 1e-6) @ model.projection.T + model.bias
    q, k, v = joint.unflatten(1, (-1, 128)).split([32, 8, 8], dim=1)
    wanted = normed(q, (128,), model.query_norm, 1e-6), normed(k, (128,), model.key_norm, 1e-6), v
    assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(heads, wanted, strict=True))
    y, (model, h, offsets, tokens, scales) = built("experts_output", {TRIALS["experts_output"]!r}, None)
    owner = torch.bucketize(torch.arange(len(h)), offsets[1:], right=True)
    rows = torch.einsum("rw,rwh->rh", h.double(), model.weight[owner].double()) * scales[:, None]
    wanted = torch.stack([rows[tokens == token].sum(0) for token in range(len(y))])
    assert torch.allclose(y.double(), wanted, rtol=0.02, atol=0.02) and len(h) == 2 * len(y)
    dw, (_, x, dy, offsets) = built("experts_weight_gradient", {TRIALS["experts_weight_gradient"]!r})
    owner = torch.bucketize(torch.arange(len(x)), offsets[1:], right=True)
    assert torch.allclose(dw, torch.stack([dy[owner == one].mT @ x[owner == one] for one in range(len(dw))]))
    scores, (_, q, d, lengths) = built("maxsim", {TRIALS["maxsim"]!r})
    for document, length in enumerate(lengths):
        products = torch.einsum("qik,jk->qij", q, d[document, :length])
        assert torch.allclose(scores[:, document].double(), products.amax(-1).sum(-1), rtol=1e-5)
    (dx, db), (model, dy, h) = built("gelu_gradient", {TRIALS["gelu_gradient"]!r})
    x = torch.zeros(1, model.weight.shape[1], dtype=h.dtype, requires_grad=True)
    bias = torch.zeros(h.shape[1], dtype=h.dtype, requires_grad=True)
    y = torch.nn.functional.gelu(h + x @ model.weight.T + bias, approximate="tanh")
    wanted = torch.autograd.grad(y, (x, bias), dy)
    assert torch.allclose(dx.sum(0, keepdim=True), wanted[0], rtol=1e-4, atol=1e-3)
    assert torch.allclose(db.double(), wanted[1], rtol=1e-4, atol=1e-3)
    loss, (_, images, texts, log_scale, bias) = built("siglip_loss", {TRIALS["siglip_loss"]!r})
    logits = log_scale.exp() * torch.einsum("id,jd->ij", images, texts) + bias
    own = -torch.nn.functional.logsigmoid(logits.diagonal()).sum()
    others = torch.nn.functional.softplus(logits).sum() - torch.nn.functional.softplus(logits.diagonal()).sum()
    assert torch.allclose(loss.double(), (own + others) / len(images), rtol=1e-5)
    (norm, stream), (model, hidden, residual) = built("down_norm", {TRIALS["down_norm"]!r})
    summed = torch.einsum("ti,wi->tw", hidden, model.weight) + residual
    assert torch.allclose(stream, summed, rtol=1e-4, atol=1e-4)
    assert torch.allclose(norm, torch.nn.functional.rms_norm(summed, (2048,), model.gain, 1e-6), rtol=1e-4, atol=1e-3)
    y, (_, q, k, v, offsets) = built("packed_attention", {TRIALS["packed_attention"]!r})
    owner = torch.bucketize(torch.arange(len(q)), offsets[1:], right=True)
    k, v = (one.repeat_interleave(2, dim=1) for one in (k, v))
    seen = (owner[:, None] == owner) & torch.ones(len(q), len(q), dtype=torch.bool).tril()
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[2] ** 0.5
    weights = torch.where(seen, scores, -torch.inf).softmax(-1)
    assert torch.allclose(y, torch.einsum("hij,jhd->ihd", weights, v), rtol=1e-4, atol=1e-5)
    y, (_, x, weight, scale_x, scale_w, bias) = built("fp8_gelu", {TRIALS["fp8_gelu"]!r}, None)
    summed = torch.einsum("ti,ci->tc", x.double() * scale_x, weight.double() * scale_w[:, None]) + bias
    inner = torch.tanh((2 / torch.pi) ** 0.5 * (summed + 0.044715 * summed**3))
    assert torch.allclose(y.double(), summed * (1 + inner) / 2, rtol=0.01, atol=0.01)
    y, (model, x, h, residual) = built("gated_output", {TRIALS["gated_output"]!r}, None)
    gated = torch.einsum("tk,ck->tc", x.double(), model.w_gate.double()).sigmoid() * h
    wanted = torch.einsum("tc,oc->to", gated, model.w_out.double()) + residual
    assert torch.allclose(y.double(), wanted, rtol=0.02, atol=0.02)
    y, (_, q, k, v, bias) = built("bias_attention", {TRIALS["bias_attention"]!r})
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / q.shape[3] ** 0.5 + bias
    assert torch.allclose(y, torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v), rtol=1e-4, atol=1e-5)
    y, (model, x, residual) = built("norm_conv", {TRIALS["norm_conv"]!r}, None)
    parts = x.double().unflatten(3, (32, -1))
    mean, deviation = parts.mean((1, 2, 4), keepdim=True), parts.std((1, 2, 4), keepdim=True, correction=0)
    normed = ((parts - mean) / deviation).flatten(3) * model.norm_weight.double() + model.norm_bias.double()
    padded = torch.nn.functional.pad(normed * normed.sigmoid(), (0, 0, 1, 1, 1, 1))
    wanted = residual.double() + model.bias.double()
    for row in range(3):
        for column in range(3):
            shifted = padded[:, row : row + x.shape[1], column : column + x.shape[2]]
            wanted += torch.einsum("bhwc,oc->bhwo", shifted, model.weight[:, :, row, column].double())
    assert torch.allclose(y.double(), wanted, rtol=0.02, atol=0.03)
    y, (_, x, packed, scales, zeros, bias) = built("int4_prefill", {TRIALS["int4_prefill"]!r}, None)
    wanted = bias.double().repeat(len(x), 1)
    for k in range(x.shape[1]):
        q = packed[:, k // 2] >> 4 if k % 2 else packed[:, k // 2] & 15
        wanted += x[:, k, None].double() * (q - zeros[:, k // 128].double()) * scales[:, k // 128].double()
    assert torch.allclose(y.double(), wanted, rtol=0.02, atol=0.02)
    y, (model, x, columns, offsets) = built("block_sparse_linear", {TRIALS["block_sparse_linear"]!r}, None)
    weight = torch.zeros(384, 512, dtype=torch.float64)
    for block, column in enumerate(columns):
        row = int((offsets[1:] <= block).sum())
        weight[row * 128 :, column * 128 :][:128, :128] = model.blocks[block]
    wanted = torch.nn.functional.silu(torch.einsum("tk,nk->tn", x.double(), weight) + model.bias)
    assert len(columns) == 3 and torch.allclose(y.double(), wanted, rtol=0.02, atol=0.03)
    dx, (model, dy, g, u) = built("gated_mlp_gradient", {TRIALS["gated_mlp_gradient"]!r}, None)
    g, u = (one.double().requires_grad_() for one in (g, u))
    y = torch.einsum("th,wh->tw", torch.nn.functional.silu(g) * u, model.down.double())
    dg, du = torch.autograd.grad(y, (g, u), dy.double())
    wanted = torch.einsum("th,hw->tw", dg, model.gate.double()) + torch.einsum("th,hw->tw", du, model.up.double())
    assert torch.allclose(dx.double(), wanted, rtol=0.03, atol=0.03)
    out, (_, q, cache, lengths) = built("mla_verify", {TRIALS["mla_verify"]!r})
    for request, length in enumerate(lengths.tolist()):
        for draft in range(2):
            keys = cache[request, : length - 1 + draft]
            weights = torch.softmax((q[request, draft] @ keys.T).float() * 192**-0.5, -1).double()
            assert torch.allclose(out[request, draft], weights @ keys[:, :512])
    y, (_, x, offsets, weight, scale_x, scale_w) = built("experts_fp8", {TRIALS["experts_fp8"]!r}, None)
    for row in range(len(x)):
        expert = int((offsets[1:] <= row).sum())
        each = scale_w[expert].double().kron(torch.ones(128, 128))[:136, :200]
        wanted = (weight[expert].double() * each) @ (x[row].double() * scale_x[row].repeat_interleave(128)[:200])
        assert torch.allclose(y[row].double(), wanted, rtol=0.01, atol=0.01)
    y, (_, *tensors) = built("fp8_attention", {TRIALS["fp8_attention"]!r}, None)
    q, k, v = (x.double() * scale.double()[:, None, None] for x, scale in zip(tensors[:3], tensors[3:], strict=True))
    wanted = torch.einsum("hij,hjd->hid", (torch.einsum("hid,hjd->hij", q, k) / 4).softmax(-1), v)
    assert torch.allclose(y.double(), wanted, rtol=0.01, atol=0.01)
    y, (_, x, values, places, bias) = built("sparse_linear", {TRIALS["sparse_linear"]!r}, None)
    weight = torch.zeros(6, 16, dtype=torch.float64)
    for column in range(6):
        for four in range(4):
            bits = int(places[column, four // 2]) >> 4 * (four % 2) & 15
            for nth, at in enumerate((bits & 3, bits >> 2)):
                weight[column, 4 * four + at] = values[column, 2 * four + nth].double()
    assert ((weight != 0).view(6, 4, 4).sum(-1) == 2).all()
    wanted = torch.nn.functional.silu(x.double() @ weight.T + bias.double())
    assert torch.allclose(y.double(), wanted, rtol=0.01, atol=0.01)
    (q, scale), (_, x, gate, up, scale_x, *scales) = built("gated_fp8", {TRIALS["gated_fp8"]!r}, None)
    rows, ones = x.double() * scale_x.double().repeat_interleave(128, 1)[:, :200], torch.ones(128, 128)
    g, u = (rows @ (w.double() * s.double().kron(ones)[:, :200]).T for w, s in zip((gate, up), scales, strict=True))
    h = g * g.sigmoid() * u
    assert torch.allclose(scale.double(), h.view(5, 2, 128).abs().amax(-1) / 448, rtol=1e-3)
    spread = scale.double().repeat_interleave(128, 1)
    assert ((q.double() * spread - h).abs() <= 0.07 * h.abs() + 0.002 * spread).all()
    dw, (_, x, dy) = built("conv_weight_gradient", {TRIALS["conv_weight_gradient"]!r})
    weight = torch.zeros(6, 3, 3, 3, dtype=x.dtype, requires_grad=True)
    y = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), weight, padding=1)
    (wanted,) = torch.autograd.grad(y, weight, dy.permute(0, 3, 1, 2))
    assert torch.allclose(dw, wanted.permute(0, 2, 3, 1))
    gradients, (_, q, k, v, out, lse, dout) = built("window_gradient", {TRIALS["window_gradient"]!r})
    q, k, v = (one.clone().requires_grad_() for one in (q, k, v))
    apart = torch.arange(2500)[:, None] - torch.arange(2500)
    scores = torch.einsum("hid,hjd->hij", q, k.repeat_interleave(2, 0)) / 2
    scores = torch.where((apart >= 0) & (apart < 2048), scores, -torch.inf)
    y = scores.softmax(-1) @ v.repeat_interleave(2, 0)
    assert torch.allclose(y, out, atol=0.02) and torch.allclose(scores.logsumexp(-1), lse, atol=0.01)
    for own, wanted in zip(gradients, torch.autograd.grad(y, (q, k, v), dout), strict=True):
        assert float((own - wanted).std() / wanted.std()) < 0.01
    y, (_, a, b, gate) = built("triangle_product", {TRIALS["triangle_product"]!r})
    assert torch.allclose(y, torch.einsum("ikc,jkc->ijc", a, b) * gate.sigmoid())
    """)
    assert done.returncode == 0, done.stdout


def test_the_int8_layer_is_exact_on_both_of_its_ways():
    done = forks_with_torch.run(f"""if True:
    from pathlib import Path
    from kernelopt.worker import problem
    reference = problem.Reference(Path({str(EVALS)!r}, "trials", "int8_linear", "reference.py"))
    for tokens, width, channels in ((32, 64, 16), (5, 33, 7)):
        sizes = {{"tokens": tokens, "width": width, "channels": channels}}
        model, (x, weight, scale_x, scale_w, bias), _ = reference.build("default", 0, None, "cpu", sizes)
        wide = [one.double() for one in (scale_x, scale_w, bias)]
        exact = (x.double() @ weight.double().t()) * (wide[0] * wide[1]) + wide[2]
        assert (model(x, weight, *wide) - exact).abs().max() < 1e-12
        assert (model(x, weight, scale_x, scale_w, bias) - exact).abs().max() < 0.004 * exact.abs().max()
    """)
    assert done.returncode == 0, done.stdout


def test_an_ignored_target_has_no_loss_and_the_softmax_is_not_flat():
    done = forks_with_torch.run(f"""if True:
    from pathlib import Path
    from kernelopt.worker import problem
    reference = problem.Reference(Path({str(EVALS)!r}, "trials", "linear_cross_entropy", "reference.py"))
    sizes = {{"tokens": 64, "width": 128, "vocabulary": 512}}
    model, (hidden, weight, target), _ = reference.build("default", 0, None, "cpu", sizes)
    loss, ignored = model(hidden, weight, target), target == -100
    assert ignored.any() and (loss[ignored] == 0).all() and (loss[~ignored] > 0).all()
    assert 2 < float((hidden.float() @ weight.float().t()).std()) < 3
    """)
    assert done.returncode == 0, done.stdout


def test_a_task_without_a_gpu_is_not_judged(tmp_path):
    (tmp_path / "answer.txt").write_text("done")
    cases.prepare(TASKS[0], tmp_path / "project")
    done = run_evals("check", TASKS[0].name, tmp_path / "project", "--answer", tmp_path / "answer.txt")
    assert done.returncode == 3 and "GPU" in done.stderr
    done = run_evals("run", "--agent", "true", "--case", TASKS[0].name, "--out", tmp_path / "out", HOME=str(tmp_path))
    assert done.returncode == 3 and not (tmp_path / "out").exists()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("case", TASKS, ids=lambda case: case.name)
def test_the_targets_can_be_met(case, prepared):
    folder = prepared(case)
    assert cases.judge(case, folder, "")  # untouched
    for name, good in (("bad_wrong", False), ("good", True)):
        lay(case, samples(case)[name], folder)
        failures = cases.judge(case, folder, "")
        assert (failures == []) == good, failures


def compiled(**changes) -> dict:
    """A kernel as compile_kernel.py prints it."""
    fits = {"tensor_instructions": {"HMMA.16816.F32": 8}, "access_bits": {"global load": {"32": 1, "128": 2}}}
    return {"name": "kernel", "spill_bytes": 0, **fits, **changes}


PLAIN = measuring.Wanted(("small",), 1)
DEMANDING = measuring.Wanted(("small",), 2, tensor_cores=True, wide_loads=True)


@pytest.mark.parametrize(
    ("kernels", "wanted", "said"),
    [
        ([compiled()], DEMANDING, None),
        ([compiled(), compiled(tensor_instructions={}, access_bits={})], DEMANDING, None),
        ([compiled(tensor_instructions={}, access_bits={})], PLAIN, None),
        ([], PLAIN, "1 to 1 Triton kernels a call, found 0"),
        ([compiled(), compiled(name="second")], PLAIN, "1 to 1 Triton kernels a call, found 2"),
        ([compiled(), compiled(name="second", spill_bytes=8)], DEMANDING, "found second"),
        ([compiled(), compiled(), compiled(spill_bytes=8)], PLAIN, None),  # configurations of one autotuned kernel
        ([compiled(tensor_instructions={})], DEMANDING, "tensor cores"),
        ([compiled(access_bits={"global load": {"32": 9}, "global store": {"128": 1}})], DEMANDING, "16 bytes"),
    ],
)
def test_a_knowledge_case_judges_what_was_compiled(kernels, wanted, said):
    failures = measuring.of_compiled(kernels, wanted)
    assert len(failures) == (said is not None) and all(said in failure for failure in failures)


def as_compiled(status: str, kernels: list[dict]) -> dict:
    return {"targets": [{"status": status, "error": "refused", "kernels": kernels}]}


@pytest.mark.parametrize("case", KNOWLEDGE, ids=lambda case: case.name)
def test_a_knowledge_case_is_judged_on_the_evaluators_files_without_a_gpu(case, prepared, monkeypatch):
    """tool() is stood in for; test_the_samples_of_a_knowledge_case runs the tools."""
    folder, seen = prepared(case), []
    (folder / "reference.py").write_text("raise SystemExit")
    (folder / "kernel.py").write_text("# the agent's\n")
    answers = {"verify_kernel.py": {"status": "OK"}, "compile_kernel.py": as_compiled("OK", [compiled()])}

    def stand_in(name, *arguments):
        seen.append((name, *map(str, arguments), Path(arguments[1]).read_text()))
        return answers[name]

    monkeypatch.setattr(measuring, "tool", stand_in)
    assert cases.judge(case, folder, "") == []
    verify, compile_ = seen
    assert "cpu-interpreter" in verify and compile_[5:7] == ("--for", "h200")
    for call in seen:
        assert call[-1] == "# the agent's\n" and call[4] == str(case.folder / "files" / "reference.py")
        assert not any(word.startswith(str(folder)) for word in call)
    workloads = verify[verify.index("--workload") + 1 : -1]
    reference = (case.folder / "files" / "reference.py").read_text()
    assert len(workloads) == 2 and all(f'"{name}": lambda' in reference for name in workloads)
    for name, answer in (
        ("compile_kernel.py", as_compiled("REFUSED", [])),
        ("compile_kernel.py", {"status": "REFUSED", "summary": "no Triton kernel is launched"}),
        ("verify_kernel.py", {"status": "WRONG_VALUES", "summary": "off"}),
    ):
        answers[name] = answer
        assert len(cases.judge(case, folder, "passed")) == 1


@pytest.mark.gpu  # no GPU is used; these take ten seconds each, too long for every run of the suite
@pytest.mark.at_once
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "name"),
    [pytest.param(case, name, id=f"{case.name}-{name}") for case in KNOWLEDGE for name in samples(case)],
)
def test_the_samples_of_a_knowledge_case(case, name, prepared):
    folder = prepared(case)
    assert cases.judge(case, folder, "")  # untouched
    failures = cases.judge(case, folder, lay(case, samples(case)[name], folder))
    assert (failures == []) == name.startswith("good"), failures


# --- the runner -----------------------------------------------------------------------------------------------------

AGENT = """
import json, os, pathlib, sys, time
mode, prompt = sys.argv[1], sys.stdin.read()
if mode == "good":
    cases = pathlib.Path({evals!r}) / "cases"
    case = next(case for case in cases.iterdir() if prompt.startswith((case / "prompt.md").read_text()))
    good = json.loads((case / "samples.json").read_text())["good"]
    print(good.pop("answer"))
    for name, content in good.items():
        if list(content) == ["file"]:
            content = (case / content["file"]).read_text()
        pathlib.Path(name).write_text(content if isinstance(content, str) else json.dumps(content))
elif mode == "useless":
    print("I would need more information.")
elif mode == "crashes":
    pathlib.Path("entry.json").write_text("{{}}")
    sys.exit(7)
elif mode == "hangs":
    if child := os.fork():
        pathlib.Path({seen!r}).write_text(str(child))
    else:
        os.setsid()
    time.sleep(600)
elif mode == "cheats":
    for name in ("results.json", "verdict.json", "check.json"):
        pathlib.Path(name).write_text('{{"passed": true, "outcome": "passed", "failures": []}}')
    for name in ("check.py", "judging.py", "sitecustomize.py", "kernelopt.py"):
        pathlib.Path(name).write_text("def check(folder, answer): return []\\nraise SystemExit(0)")
    print('{{"passed": true}}\\npassed')
elif mode == "looks":
    found = sorted(str(path) for path in pathlib.Path.cwd().rglob("*"))
    print(json.dumps({{"cwd": os.getcwd(), "prompt": prompt, "found": found, "env": dict(os.environ)}}))
"""
ALWAYS_THE_ROUTER = "grep -o '^q[0-9]*:' | sed 's/$/ gpu-kernel-optimizer/'"


@pytest.fixture
def agent(tmp_path):
    """Command of a scripted agent in a given mode."""
    script = tmp_path / "agent.py"
    script.write_text(AGENT.format(evals=str(EVALS), seen=str(tmp_path / "seen")))
    return lambda mode: f"{sys.executable} {script} {mode}"


def outcomes(command: str, tmp_path: Path, *options) -> tuple[dict, subprocess.CompletedProcess]:
    """results.json of an experiment, and how run.py ended."""
    out = tmp_path / "out"
    done = run_evals("run", "--agent", command, "--out", out, *options, HOME=str(tmp_path))
    return json.loads((out / "results.json").read_text()), done


def test_a_good_agent_passes_every_discipline_case(agent, tmp_path):
    names = [case.name for case in DISCIPLINE]
    result, done = outcomes(agent("good"), tmp_path, "--case", *names, "--repeats", 1, "--arm", "without")
    assert done.returncode == 0, done.stderr
    assert result["rates"]["total"]["without"]["passed"] == len(names), done.stderr
    assert f"{len(names)}/{len(names)}" in done.stdout and str(tmp_path / "out" / "results.json") in done.stdout
    assert {run["case"] for run in result["runs"]} == set(names)


def test_knowledge_cases_run_in_three_arms_and_fill_the_table(agent, tmp_path, monkeypatch):
    """A scripted agent that leaves the good kernel; tool() is stood in for."""
    answers = {"verify_kernel.py": {"status": "OK"}, "compile_kernel.py": as_compiled("OK", [compiled()])}
    monkeypatch.setattr(measuring, "tool", lambda name, *_: answers[name])
    name, arms = KNOWLEDGE[0].name, ("with", "no-wiki", "without")
    result, done = outcomes(agent("good"), tmp_path, "--case", name, "--repeats", 1, "--arm", *arms)
    assert done.returncode == 0, done.stderr
    _, head, row, total = done.stdout.splitlines()[:4]
    assert head.split() == ["case", *(word for arm in arms for word in ("agents", arm))] and [
        row.split()[0],
        total.split()[0],
    ] == [name, "total"]
    assert {arm: rate["passed"] for arm, rate in result["rates"][name].items()} == dict.fromkeys(arms, 1)


@pytest.mark.parametrize(
    ("mode", "outcome", "code"),
    [("useless", "failed", 0), ("cheats", "failed", 0), ("crashes", "crashed", 1), ("hangs", "timed out", 1)],
)
def test_other_agents_fail(agent, tmp_path, mode, outcome, code):
    start = time.monotonic()
    limit = 1 if mode == "hangs" else 60
    options = ("--case", "noise", "--arm", "without", "--repeats", 1, "--timeout", limit)
    result, done = outcomes(agent(mode), tmp_path, *options)
    (run,) = result["runs"]
    assert run["outcome"] == outcome and run["failures"] and done.returncode == code
    assert result["rates"]["noise"]["without"] == {
        "passed": 0,
        "judged": 1,
        "rate": 0.0,
        "ci95": list(experiment.wilson(0, 1)),
    }
    assert time.monotonic() - start < 30
    if mode == "hangs":
        assert not alive(int((tmp_path / "seen").read_text()))


def alive(pid: int) -> bool:
    """Does a process run? One that nobody has waited for yet (Z) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_with_the_bundle_an_agent_finds_it_and_no_checker(agent, tmp_path):
    options = ("--case", "noise", "--repeats", 1, "--client", "claude", "--point")
    result, _ = outcomes(agent("looks"), tmp_path, *options)
    for run in result["runs"]:
        folder = tmp_path / "out" / run["folder"]
        said = json.loads((folder / "answer.txt").read_text())
        skill = ".claude/skills/gpu-kernel-optimizer"
        has = {path.removeprefix(said["cwd"] + "/") for path in said["found"]}
        assert (f"{skill}/SKILL.md" in has) == (f"{skill}/SKILL.md" in said["prompt"]) == (run["arm"] == "with")
        assert not any("evals" in name or "samples" in name or Path(name).name == "check.py" for name in has)
        assert "noise" not in said["cwd"] and "with" not in said["cwd"]
        assert said["env"]["CUDA_VISIBLE_DEVICES"] == "-1" and "GPU_WIKI" not in said["env"]
        assert said["env"]["PATH"].startswith(str(Path(sys.executable).parent))
        assert (folder / "project" / "ratios.csv").exists() and not (folder / "project" / skill).exists()
        assert not Path(said["cwd"]).exists()


def test_without_the_wiki_an_agent_has_the_hardware_values_and_the_tools(tmp_path):
    skill = cases.install_bundle(tmp_path, "agents")
    advice = ["README.md", "docs/operators/scans.md", "docs/cases/matvec.md", "baselines/scans", "synonyms.json"]
    assert all((skill / "gpu-wiki" / name).exists() for name in advice)
    cases.remove_wiki(skill)
    assert not any((skill / "gpu-wiki" / name).exists() for name in advice)
    assert wiki.find("H200", wiki.pages(skill / "gpu-wiki")).known("memory_bandwidth")
    assert (skill / "SKILL.md").is_file() and (skill / "tools/search_wiki.py").is_file()


def test_an_agent_works_in_a_git_folder_and_the_clients_command_is_known(tmp_path, monkeypatch):
    """As Codex wants it; git shows what the agent changed, and not the bundle."""
    look = "git status --short --untracked-files=all -- . ':!.agents'; git log --format=%s"
    monkeypatch.setitem(experiment.COMMANDS, "agents", f"echo new > note.md; {look}")
    done = run_evals("run", "--case", "noise", "--repeats", 1, "--out", tmp_path / "out", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    for run in ("000", "001"):
        assert (tmp_path / "out" / "runs" / run / "answer.txt").read_text() == "?? note.md\nThe task\n"
    monkeypatch.delitem(experiment.COMMANDS, "agents")
    done = run_evals("run", "--case", "noise", HOME=str(tmp_path))
    assert done.returncode == 2 and "--agent, or with --client one of claude, codex, gemini, opencode" in done.stderr
    done = run_evals("run", "--case", "noise", "--client", "codex", HOME=str(tmp_path), PATH=str(tmp_path))
    assert done.returncode == 3 and "codex is not installed, or not on the PATH" in done.stderr
    (tmp_path / "codex").write_text("#!/bin/sh\necho 'bwrap: Creating new namespace failed' >&2\nexit 1\n")
    (tmp_path / "codex").chmod(0o755)
    done = run_evals("run", "--case", "noise", "--client", "codex", HOME=str(tmp_path), PATH=str(tmp_path))
    assert done.returncode == 3 and "namespace failed), so no command of its agents would run" in done.stderr


def test_runs_with_a_scripted_model_stand_apart(agent, tmp_path):
    files = []
    for name, options in {"a": [], "b": ["--plumbing"]}.items():
        (tmp_path / name).mkdir()
        options += ["--case", "noise", "--arm", "without", "--repeats", 1]
        _, done = outcomes(agent("useless"), tmp_path / name, *options)
        assert ("plumbing: a scripted model" in done.stdout) == (name == "b")
        files.append(tmp_path / name / "out" / "results.json")
    lines = run_evals("table", *files).stdout.splitlines()
    rows = ["case", "noise", "total"]
    assert [line.split()[0] for line in lines] == ["agents", *rows, "plumbing:", *rows]
    assert all(line.split()[1] == "0/1" for line in lines if line.startswith(("noise", "total")))
    (tmp_path / "other.json").write_text("{}")
    assert run_evals("table", tmp_path / "other.json").returncode == 2


def test_the_order_is_shuffled_by_seed_and_balanced():
    names, arms = ["a", "b", "c"], ["with", "without"]
    plan = experiment.schedule(names, arms, 4, seed=1)
    assert plan == experiment.schedule(names, arms, 4, seed=1) != experiment.schedule(names, arms, 4, seed=2)
    for repeat in range(4):
        block = plan[repeat * 6 : repeat * 6 + 6]
        assert {(run.case, run.arm) for run in block} == {(name, arm) for name in names for arm in arms}
        assert {run.repeat for run in block} == {repeat}


def test_rates_and_their_intervals():
    assert experiment.wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)  # Wilson 1927; any textbook's example
    assert experiment.wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert experiment.wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert experiment.wilson(0, 0) is None
    runs = [
        ("a", "with", "passed"),
        ("a", "with", "timed out"),
        ("a", "without", "not judged"),
        ("b", "with", "passed"),
    ]
    rates = experiment.rates([dict(zip(("case", "arm", "outcome"), run, strict=True)) for run in runs])
    assert (rates["a"]["with"]["passed"], rates["a"]["with"]["judged"]) == (1, 2)
    assert rates["a"]["without"] == {"passed": 0, "judged": 0, "rate": None, "ci95": None}
    assert (rates["total"]["with"]["passed"], rates["total"]["with"]["judged"]) == (2, 3)
    assert "without" not in rates["b"]


def test_what_cannot_be_judged_is_no_failure(tmp_path, monkeypatch):
    def lacks(*_):
        raise EnvironmentLacks("the GPU is busy")

    monkeypatch.setattr(cases, "judge", lacks)
    outcome = experiment.judged(TASKS[0], tmp_path, tmp_path, 0)
    assert outcome == ("not judged", ["the GPU is busy"])


def test_an_experiment_ends_when_the_bundle_changes(tmp_path, monkeypatch):
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "check.py").write_text("1")
    before = experiment.fingerprint(tmp_path)
    (tmp_path / "evals" / "check.py").write_text("2")
    assert experiment.fingerprint(tmp_path) != before
    marks = iter("ab")
    monkeypatch.setattr(experiment, "fingerprint", lambda _: next(marks))
    runs = experiment.perform(
        experiment.Agent("true", "agents", False, 60), [experiment.Run("noise", "without", 0)], tmp_path
    )
    with pytest.raises(Refused, match="changed"):
        list(runs)


def test_folders_that_are_refused(tmp_path):
    with pytest.raises(UsageError, match="in the bundle"):
        cases.prepare(DISCIPLINE[0], BUNDLE / "evals" / "somewhere")
    (tmp_path / "x").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        cases.prepare(DISCIPLINE[0], tmp_path)
    assert (tmp_path / "x").read_text() == "mine"
    for options in (["--out", BUNDLE / "out"], ["--out", tmp_path], ["--case", "no_such_case"]):
        done = run_evals("run", "--agent", "true", *options, HOME=str(tmp_path))
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_a_bundle_that_every_run_would_have_is_refused(tmp_path):
    (tmp_path / ".claude/skills/gpu-kernel-optimizer").mkdir(parents=True)
    options = ("run", "--agent", "true", "--case", "noise", "--repeats", 1, "--out", tmp_path / "out")
    done = run_evals(*options, HOME=str(tmp_path), CLAUDE_CONFIG_DIR="")
    assert done.returncode == 2 and "--arm with" in done.stderr


def test_by_hand(tmp_path):
    folder, answer = tmp_path / "project", tmp_path / "answer.txt"
    done = run_evals("prepare", "noise", tmp_path / "other", "--no-wiki")
    assert done.returncode == 0 and not list((tmp_path / "other").rglob("gpu-wiki/docs/operators"))
    assert list((tmp_path / "other").rglob("gpu-wiki/docs/hardware"))
    done = run_evals("prepare", "noise", folder, "--with-bundle", "--point")
    assert done.returncode == 0 and done.stdout.startswith(cases.load("noise").prompt.splitlines()[0])
    assert (folder / ".agents/skills/gpu-kernel-optimizer/SKILL.md").is_file() and "SKILL.md" in done.stdout
    answer.write_text("nothing")
    done = run_evals("check", "noise", folder, "--answer", answer)
    assert done.returncode == 1 and "does not hold" in done.stdout
    case = cases.load("noise")
    answer.write_text(lay(case, samples(case)["good"], folder))
    done = run_evals("check", "noise", folder, "--answer", answer, "--json")
    assert done.returncode == 0 and json.loads(done.stdout) == {"case": "noise", "passed": True, "failures": []}
    assert run_evals("check", "noise", folder, "--answer", tmp_path / "none").returncode == 2
    assert len(json.loads(run_evals("list", "--json").stdout)["cases"]) == len(ALL)


# --- triggers -------------------------------------------------------------------------------------------------------

QUERIES = triggers.load()["queries"]


def best_choices() -> dict[str, str]:
    return {query["id"]: query["expected"][0] if query["expected"] else "none" for query in QUERIES}


def test_half_of_the_queries_are_for_us_and_name_skills_that_exist():
    assert len({query["id"] for query in QUERIES}) == len(QUERIES) == 22
    assert sum(bool(query["expected"]) for query in QUERIES) == 11
    skills = triggers.own_skills()
    assert len(skills) == 1 + len(list((BUNDLE / "skills").iterdir())) and not set(skills) & set(
        triggers.load()["others"]
    )
    assert {name for query in QUERIES for name in query["expected"]} == set(skills)


def test_the_score_of_choices():
    assert triggers.score(QUERIES, best_choices())["passed"]
    assert triggers.score(QUERIES, best_choices())["wrong"] == []
    for one in ("none", "gpu-kernel-optimizer", "pdf-forms"):
        assert not triggers.score(QUERIES, dict.fromkeys(best_choices(), one))["passed"]
    assert not triggers.score(QUERIES, {})["passed"]
    slips = {**best_choices(), "q01": "none", "q13": "gpu-kernel-optimizer"}
    score = triggers.score(QUERIES, slips)
    assert score["passed"] and len(score["wrong"]) == 2
    assert (score["recall"], score["false_rate"]) == pytest.approx((10 / 11, 1 / 11))
    assert not triggers.score(QUERIES, {**slips, "q02": "none"})["passed"]
    unanswered = {name: skill for name, skill in best_choices().items() if name < "q12"}
    assert not triggers.score(QUERIES, unanswered)["passed"]


def test_choices_are_read_from_an_answer():
    answer = (
        "Here you are:\n- **q01**: `gpu-kernel-baseline`\nQ02: none\n"
        "q03 -> gpu-kernel-optimizer\nq01: none\nq4: none\nq05:\n"
    )
    assert triggers.choices(answer) == {"q01": "none", "q02": "none", "q03": "gpu-kernel-optimizer"}


def test_triggers_by_hand_and_by_an_agent(tmp_path):
    done = run_evals("triggers")
    assert done.returncode == 0 and all(query["text"] in done.stdout for query in QUERIES)
    assert all(name in done.stdout for name in triggers.own_skills())
    answer = tmp_path / "answer.txt"
    answer.write_text("\n".join(f"{name}: {skill}" for name, skill in best_choices().items()))
    assert run_evals("triggers", "--answer", answer).returncode == 0
    done = run_evals("triggers", "--agent", ALWAYS_THE_ROUTER, "--repeats", 1, "--json")
    (score,) = json.loads(done.stdout)["repeats"]
    assert done.returncode == 1 and score["false_rate"] == 1.0 and score["recall"] == 1.0
