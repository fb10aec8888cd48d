"""On a real GPU, any of NVIDIA's from Volta on: pytest -m gpu. Each test runs the tools as a user does.

What is expected follows the architecture (gpu_card.py); a test is skipped, and says why, where the card or the machine
lacks something for it. Where the wiki has no measured rows of the card, sessions stand on a calibration of it, so that
targets can be met on any. `-m "gpu and not slow"` is meant to take less than eight minutes.
"""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import conftest
import gpu_card
import pytest
from conftest import BUNDLE, PLAN, REFERENCE, gpu_node, run_tool
from kernelopt.device import gpu
from kernelopt.device.sandbox import Sandbox
from kernelopt.hardware import roofline
from kernelopt.measure import verify
from kernelopt.session import platforms, workspace
from kernelopt.session.subject import KernelUnderTest
from kernelopt.session.task import Target

pytestmark = pytest.mark.gpu
tool_json = functools.partial(conftest.tool_json, run=run_tool)
EXAMPLE = BUNDLE / "examples" / "row_softmax"
SOFTMAX_GIB = 12  # inputs in several contents, outputs and their copies; 0.5 GiB a tensor
SHARE_PCT = 75  # of what this card was measured to give: the tests are about the loop, not about the last percents
SCALE = """
import torch, torch.nn as nn, triton, triton.language as tl

@triton.jit
def scale_relu(x, w, y, n, columns, scale, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    value = tl.load(x + offsets, mask=inside) * tl.load(w + offsets % columns, mask=inside)
    tl.store(y + offsets, tl.maximum(value, 0.0) * scale, mask=inside)

class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(16))
    def forward(self, x):
        x = x.contiguous()
        y = torch.empty_like(x)
        scale_relu[(triton.cdiv(x.numel(), 64),)](x, self.weight, y, x.numel(), 16, self.scale, BLOCK=64)
        return y
"""
BROKEN = {
    "COMPILE_ERROR": SCALE.replace("tl.maximum(value, 0.0)", "tl.no_such_function(value)"),
    "WRONG_VALUES": SCALE.replace("* scale, mask", "* scale * 1.01, mask"),
    "NONFINITE": SCALE.replace("offsets < n", "offsets < n - 1"),  # the last element is never written: poison shows
    "ILLEGAL_ACCESS": SCALE.replace("x + offsets, mask=inside", "x + offsets + (1 << 40), mask=inside"),
    "LAUNCH_ERROR": SCALE.replace("BLOCK=64)", "BLOCK=64, num_warps=64)"),
}


@pytest.fixture(scope="session")
def card() -> gpu_card.Card:
    return gpu_card.here()


@pytest.fixture(scope="session")
def calibration(tmp_path_factory) -> Path:
    """The page of this very card, measured once."""
    page = tmp_path_factory.mktemp("card") / "calibration.md"
    tool_json("calibrate_gpu.py", "--out", page, timeout=300)
    return page


@pytest.fixture
def start(tmp_path, card, request):
    """A function that starts a session on this card, its work counted; the workspace's folder."""
    if card.documented("measured_copy_bandwidth"):
        known_by = ["--platform", card.page.platform]
    else:
        known_by = ["--calibration", request.getfixturevalue("calibration")]

    def started(name: str, kernel: Path, *options) -> Path:
        done = run_tool("workspace_init.sh", name, kernel, *options, "--root", tmp_path, *known_by)
        assert done.returncode == 0, done.stderr
        root = Path(done.stdout.strip())
        tool_json("estimate_work.py", "--workspace", root)
        return root

    return started


def softmax(card: gpu_card.Card) -> list:
    """The options of the shipped softmax; skipped where the card is too small for it."""
    if not card.holds(SOFTMAX_GIB):
        pytest.skip(f"{card.name} has {card.memory_gib} GiB; the softmax takes {SOFTMAX_GIB}")
    return ["--reference", EXAMPLE / "reference.py", "--dtype", card.half_dtype()]


def files(tmp_path, kernel: str) -> list:
    (tmp_path / "k.py").write_text(kernel)
    (tmp_path / "r.py").write_text(REFERENCE)
    return ["--kernel", tmp_path / "k.py", "--reference", tmp_path / "r.py"]


def test_the_gpu_is_detected_and_what_it_says_of_itself_agrees_with_its_page(card):
    if card.page is None:
        done = run_tool("gpu_specs.py", "detect")
        assert done.returncode == 1 and card.name in done.stderr
        pytest.skip(f"the wiki has no page of {card.name}")
    found = tool_json("gpu_specs.py", "detect")
    assert found["platform"] == card.page.platform and found["disagreements"] == []
    assert {"compute_capability", "sm_count", "memory_capacity"} <= set(found["device"])


def test_a_calibration_measures_what_the_card_has(card, calibration):
    page = platforms.read(calibration)
    measured = {metric for metric, row in page.rows.items() if roofline.is_measured(metric) and row.known}
    assert measured >= {"measured_copy_bandwidth", *(f"measured_{dtype}_matmul" for dtype in card.matmul_dtypes())}
    if (peak := card.documented("memory_bandwidth")) is not None:
        assert 0.5 * peak < page.rows["measured_copy_bandwidth"].value < peak


def test_what_fits_in_the_l2_is_faster_only_while_it_is_warm(card):
    if (size := card.l2_buffer_mb()) is None:
        pytest.skip(f"the L2 of {card.name} is too small: {card.l2_mib} MiB")
    rates = tool_json("bench_bandwidth.py", "--size-mb", size, 1024, "--rep-ms", 20)["rates"]
    copy = {(r["buffer_bytes"] >> 20, r["cache"]): r["median"] for r in rates if r["pattern"] == "copy"}
    assert copy[size, "warm"] > (1.5 if card.is_hopper else 1.1) * copy[size, "cold"]
    assert (1024, "warm") not in copy  # far above the L2 there is no difference to measure


@pytest.mark.parametrize("moved", [(1 << 29, 1 << 29), ((1 << 32) + (1 << 21), 1 << 12)], ids=["copy", "beyond_int32"])
def test_the_ceiling_of_a_size_is_below_the_documented_peak(moved, card):
    if not card.holds(2 * sum(moved) / 2**30):
        pytest.skip(f"{card.name} has {card.memory_gib} GiB")
    arguments = ["--bytes-in", moved[0], "--bytes-out", moved[1], "--dtype", card.half_dtype(), "--rep-ms", 20]
    best = tool_json("measure_bandwidth_ceiling.py", *arguments)["best"]["median"]
    assert best > 0
    if (peak := card.documented("memory_bandwidth")) is None:
        pytest.skip(f"measured {best:.0f} GB/s, and the wiki has no bandwidth of {card.name} to hold it against")
    assert 0.7 * peak < best < peak


def test_bare_tensor_operations_are_faster_than_a_librarys_product_and_slower_than_the_peak(card):
    """The probe checks its own sums and count, and fails where they are wrong."""
    dtype = card.half_dtype()
    if not ((8, 0) <= card.capability <= (9, 0) or card.capability[0] == 12):
        pytest.skip(f"the probe has no tensor operations for {card.name}")
    arguments = ["--flops", 2 * 8192**3, "--dtype", dtype, "--per-k-block", 128, "--fp32-fma", 1]
    found = tool_json("measure_ceiling.py", *arguments)
    bare, beside, library = found["tensor"], found["with_other_arithmetic"], found["library_rate"]
    assert bare["sustained_tflops"] > library["sustained_tflops"] and bare["cold_tflops"] > library["rested_tflops"]
    assert bare["cold_us"] < 1.02 * beside["cold_us"] and bare["relative_error"] < 2e-3
    small = tool_json("measure_ceiling.py", "--flops", 2 * 1024**3, "--dtype", dtype)["tensor"]
    assert small["start_up_us"]["cold"] > 0.5 and small["cold_tflops"] > 0.8 * bare["cold_tflops"]  # no launch in it
    if (peak := card.documented(f"peak_{dtype}_tensor")) is not None:
        assert 0.5 * peak < bare["cold_tflops"] < 1.1 * peak  # a board may exceed the clock of its peak


def test_a_problem_that_fits_in_the_l2_gets_a_target_that_can_be_met(tmp_path, start):
    (tmp_path / "k.py").write_text(SCALE)
    (tmp_path / "r.py").write_text(REFERENCE)
    root = start("small", tmp_path / "k.py", "--reference", tmp_path / "r.py")
    result = tool_json("measure_bandwidth_ceiling.py", "--workspace", root, "--set-target", "--rep-ms", 20)
    assert 0 < result["target"]["target"] < result["best"]["median"]
    assert workspace.Workspace(root).task().targets == (Target(**result["target"]),)


def test_every_dtype_that_the_tensor_cores_take_is_measured_and_no_other_spoils_it(card):
    found = tool_json("bench_matmul.py", "--size", 2048, "--rep-ms", 20)
    measured = {rate["dtype"] for rate in found["rates"] if rate["median"] > 0}
    assert measured >= card.matmul_dtypes() and not measured & set(found["failed"])


def test_a_right_triton_kernel_passes(tmp_path, card):
    found = tool_json("verify_kernel.py", *files(tmp_path, SCALE))
    assert found["status"] == "OK" and found["device"] == card.name


def test_each_wrong_triton_kernel_lands_in_its_status_and_the_gpu_works_after_it(tmp_path):
    target = KernelUnderTest(tmp_path / "k.py", tmp_path / "r.py")
    statuses = {}
    with Sandbox("cuda") as sandbox:
        for status, kernel in BROKEN.items():
            files(tmp_path, kernel)
            statuses[status] = verify.verify(sandbox, target, seeds=2).status
        files(tmp_path, SCALE)
        right = verify.verify(sandbox, target, seeds=2)
    assert statuses == {status: status for status in BROKEN} and right.status == "OK", right.summary


def test_an_opponent_may_keep_a_process_that_has_the_gpu_open(card, tmp_path):
    """torch.compile's max-autotune does. A kernel that is judged may not: kernels/cheats/torch_in_child.py."""
    with_child = tmp_path / "with_child.py"
    holder = "import subprocess\nholder = subprocess.Popen(['sleep', '1000'], stdin=open('/dev/nvidia-uvm'))\n"
    with_child.write_text((EXAMPLE / "one_pass.py").read_text() + holder)
    one = ["--reference", EXAMPLE / "reference.py", "--kernel"]
    same = tool_json("measure_kernel_time.py", *one, EXAMPLE / "one_pass.py", "--against", with_child, code=1)
    assert same["verdict"] == "EQUAL"
    refused = run_tool("measure_kernel_time.py", *one, with_child, "--against", EXAMPLE / "one_pass.py")
    assert refused.returncode == 1 and "CHEAT_SUSPECT" in refused.stdout + refused.stderr


def test_a_kernel_is_equal_to_itself_and_faster_than_the_naive_one(card):
    one = ["--kernel", EXAMPLE / "one_pass.py", *softmax(card)]
    same = tool_json("measure_kernel_time.py", *one, "--against", EXAMPLE / "one_pass.py", code=1)
    assert same["verdict"] == "EQUAL", same["speedup"]
    better = tool_json("measure_kernel_time.py", *one, "--against", EXAMPLE / "three_passes.py")
    low, high = (1.8, 2.2) if card.is_hopper else (1.2, 4.0)  # by the bytes of both: 2
    assert better["verdict"] == "FASTER" and low < better["speedup"]["point"] < high
    assert better["clock"] == "triton.testing.do_bench" and better["gpu_state"]["samples"] > 0
    assert better["latency_us"]["p20"] <= better["latency_us"]["median"] <= better["latency_us"]["p80"]


def test_the_whole_way_on_a_small_problem(tmp_path, card, start):
    launch = next(line for line in SCALE.splitlines() if "[(triton.cdiv" in line) + "\n"
    (tmp_path / "k.py").write_text(SCALE.replace(launch, 2 * launch))  # does its work twice
    (tmp_path / "r.py").write_text(REFERENCE.replace("torch.randn(8, 16)", "torch.randn(1 << 20, 16)"))
    root = start("way", tmp_path / "k.py", "--reference", tmp_path / "r.py")
    tool_json("compute_utilization.py", "--workspace", root, "--set-targets")
    assert tool_json("run_gate.py", "--workspace", root, "--version", "v0")["accepted"]
    counters = profiled(root, card)

    made = workspace.Workspace(root)
    (tmp_path / "once.py").write_text(SCALE)
    made.plan("v1").write_text(PLAN)
    (tmp_path / "probe.py").write_text(f"{BROKEN['WRONG_VALUES']}\nPROBE = True\n")
    files = tmp_path / "once.py", tmp_path / "probe.py"
    explored = tool_json("explore_kernels.py", *files, "--workspace", root, "--gate", "v1")
    (probe,) = [row for row in explored["rows"] if row["probe"]]
    assert probe["name"] == "probe" and probe["status"] == "OK" and probe["latency_us"]["median"] > 0
    found = explored["gate"]
    assert found["accepted"] and found["commit"] == made.git("rev-parse", "HEAD")
    record = json.loads((root / "memory/v1.json").read_text())
    assert record["performance"]["gpu_state"] and record["references"][-1]["path_or_url"] == "explore/e1.json#once"
    assert not counters or record["profile_evidence"]["tool_used"] == "ncu"

    made.kernel.write_text(BROKEN["WRONG_VALUES"])
    made.plan("v2").write_text(PLAN)
    assert not tool_json("run_gate.py", "--workspace", root, "--version", "v2", code=1)["accepted"]
    assert made.kernel.read_text() == SCALE
    assert run_tool("check_goal.py", root).returncode in (0, 1)
    if not counters:
        pytest.skip("all but the counters passed: there is no ncu here, or no permission to read them")


def profiled(root: Path, card: gpu_card.Card) -> bool:
    """Is v0's profile, with its two kernels, as it should be? False where this machine gives no counters."""
    done = run_tool("profile_kernel.sh", "--workspace", root, "--version", "v0", "--json", timeout=600)
    assert done.returncode in (0, 3), done.stderr
    if done.returncode == 3:
        return False
    profile = json.loads(done.stdout)
    names = [kernel["name"] for kernel in profile["kernels"]]
    assert names == 2 * ["scale_relu"]  # no fill, no cast, no random numbers
    assert profile["classification"]["class"] != "unknown"
    assert not card.is_hopper or profile["missing_metrics"] == []
    again = tool_json("analyze_profile.py", root / "profiles/v0/annotation")
    assert again["classification"] == profile["classification"]
    assert (root / "profiles/v0/annotation/report.md").stat().st_size > 1000
    return True


AGENT = """cat > {folder}/brief-$$.txt
if mkdir {folder}/first 2>/dev/null; then cp {example}/one_pass.py kernel.py
else sed -i 's/BLOCK=BLOCK)/BLOCK=BLOCK, num_warps=8)/' kernel.py; fi
cp {example}/one_pass_plan.md plan.md"""


def session_with_baseline(card: gpu_card.Card, start) -> Path:
    """The shipped softmax, its targets set and v0 accepted."""
    root = start("loop", EXAMPLE / "three_passes.py", *softmax(card), "--framework", "triton")
    tool_json("compute_utilization.py", "--workspace", root, "--set-targets", "--share", SHARE_PCT)
    assert tool_json("run_gate.py", "--workspace", root, "--version", "v0")["accepted"]
    if run_tool("check_goal.py", root).returncode == 0:
        pytest.skip(f"three passes reach {SHARE_PCT} % of what {card.name} gives, so there is nothing to be driven to")
    return root


@pytest.fixture(params=["local", pytest.param("node", marks=pytest.mark.slow)])
def address(request):
    """For --on: this machine, or a GPU node on it."""
    if request.param == "local":
        yield "local"
        return
    with gpu_node(len(gpu.visible())) as (_, address, _):
        yield address


def test_an_agent_is_driven_to_the_target(tmp_path, address, card, start):
    """Two scripted agents a round, one of which knows the answer; on several GPUs they are judged side by side."""
    root = session_with_baseline(card, start)
    agent = AGENT.format(folder=tmp_path, example=EXAMPLE)
    arguments = ["--agent", agent, "--rounds", 2, "--candidates", 2, "--on", address]
    found = tool_json("optimize_kernel.py", "--workspace", root, *arguments, timeout=600)
    assert found["met"] and found["rounds"] == 1 and "targets are met" in found["reason"]
    assert found["final"]["v0"]["verdict"] == "FASTER" and found["final"]["torch.compile"]["speedup"]["point"] > 0.5
    briefs = [path.read_text() for path in tmp_path.glob("brief-*.txt")]
    assert len(briefs) == 2 and run_tool("render_report.py", root).returncode == 0
    if not (root / "profiles" / "v0" / "annotation" / "report.ncu-rep").is_file():
        pytest.skip("all but the counters passed: there is no ncu here, or no permission to read them")
    assert all("excess_dram_traffic" in text for text in briefs) or not card.is_hopper
    assert (root / "profiles" / found["best"] / "annotation" / "metrics.json").is_file()


@pytest.mark.slow
def test_a_candidate_is_carried_judged_and_brought_home(tmp_path, card, start):
    root = session_with_baseline(card, start)
    (root / "waiting").mkdir()
    for suffix, name in ((".py", "one_pass.py"), (".md", "one_pass_plan.md")):
        shutil.copyfile(EXAMPLE / name, root / "waiting" / f"one_pass{suffix}")
    run_tool("carry.py", "pack", root, "--out", tmp_path / "trip.tar.gz")
    judged = tool_json("carry.py", "judge", tmp_path / "trip.tar.gz", timeout=600)
    assert [one["accepted"] for one in judged["judged"]] == [True]
    run_tool("carry.py", "unpack", judged["file"], root)
    assert run_tool("check_goal.py", root).returncode == 0 and (root / "profiles" / "v1" / "annotation").is_dir()


@pytest.mark.slow
def test_a_loop_that_is_killed_while_it_measures_goes_on(card, start):
    root = session_with_baseline(card, start)
    agent = f"cat > /dev/null; cp {EXAMPLE}/one_pass.py kernel.py; cp {EXAMPLE}/one_pass_plan.md plan.md"
    command = [sys.executable, BUNDLE / "tools" / "optimize_kernel.py", "--workspace", root, "--agent", agent]
    with subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        said = next(line for line in process.stderr if line.startswith("measuring "))
        os.killpg(process.pid, signal.SIGKILL)
    assert said and not (root / "memory" / "v1.json").exists()
    found = tool_json("optimize_kernel.py", "--workspace", root, "--agent", agent, "--resume", timeout=600)
    assert found["met"] and found["best"] == "v1" and "targets are met" in found["reason"]
    assert workspace.Workspace(root).git("worktree", "list").count("\n") == 0


def test_a_kernel_that_launches_nothing_has_no_profile(tmp_path, start):
    (tmp_path / "k.py").write_text("def kernel_function(x):\n    return x\n")
    (tmp_path / "r.py").write_text(
        "import torch, torch.nn as nn\nclass Model(nn.Module):\n    def forward(self, x): return x\n"
        "def get_inputs(): return [torch.randn(8)]\n"
    )
    root = start("none", tmp_path / "k.py", "--reference", tmp_path / "r.py")
    done = run_tool("profile_kernel.sh", "--workspace", root, "--version", "v0")
    if done.returncode == 3:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 1 and "profiled no kernel" in done.stderr


def test_a_kernel_that_hides_on_another_stream_is_caught(tmp_path, card):
    largest = 28 if card.holds(40) else 26 if card.holds(10) else 24
    (tmp_path / "k.py").write_text(
        "import torch\nside = torch.cuda.Stream()\n"
        "def kernel_function(x):\n"
        "    y = torch.empty_like(x)\n"
        "    with torch.cuda.stream(side):\n"
        "        torch.mul(x, 2, out=y)\n"
        "    return y\n"
    )
    (tmp_path / "honest.py").write_text("def kernel_function(x):\n    return x * 2\n")
    reference = (
        "import torch, torch.nn as nn\nclass Model(nn.Module):\n    def forward(self, x): return x * 2\n"
        "def get_inputs(): return [torch.randn(1 << {})]\n"
    )
    (tmp_path / "r.py").write_text(reference.format(largest))
    done = run_tool("measure_kernel_time.py", "--kernel", tmp_path / "k.py", "--reference", tmp_path / "r.py")
    assert done.returncode == 1 and "CHEAT_SUSPECT" in done.stderr and "another stream" in done.stderr
    for count in (largest, 12):
        (tmp_path / "r.py").write_text(reference.format(count))
        tool_json("measure_kernel_time.py", "--kernel", tmp_path / "honest.py", "--reference", tmp_path / "r.py")
