"""The demo behind scripts/demo.sh: every step is a command that a user could type, shown before it runs."""

import argparse
import datetime
import json
import shutil
import subprocess
import sys
from pathlib import Path

BUNDLE = Path(__file__).resolve().parents[1]
EXAMPLE = BUNDLE / "examples" / "row_softmax"
RECORDED = EXAMPLE / "h200"  # a finished workspace of this demo, from an H200


class Demo:
    """Runs commands and keeps what goes into the table at the end."""

    def __init__(self):
        self.rows: list[tuple[str, str, str]] = []

    def run(self, title: str, *command, expect: int = 0, also: int | None = None) -> str:
        """Show and run a command; its exit code must be the expected one, or `also`. Returns its stdout."""
        print(f"\n=== {title}\n$ {' '.join(shown(part) for part in command)}", flush=True)
        arguments = [sys.executable, *command] if str(command[0]).endswith(".py") else command
        done = subprocess.run([str(part) for part in arguments], stdout=subprocess.PIPE, text=True)
        print(done.stdout, end="", flush=True)
        if done.returncode not in (expect, also):
            print(
                f"demo: exit code {done.returncode} where {expect} was expected; the demo stops here", file=sys.stderr
            )
            sys.exit(done.returncode or 1)
        return done.stdout.strip()

    def tool(self, title: str, name: str, *arguments, expect: int = 0, also: int | None = None) -> str:
        return self.run(title, BUNDLE / "tools" / name, *arguments, expect=expect, also=also)

    def row(self, step: str, result: str, kind: str) -> None:
        self.rows.append((step, result.splitlines()[0] if result else "", kind))

    def table(self) -> None:
        print("\n=== Summary")
        widths = [max(len(row[i]) for row in self.rows) for i in (0, 2)]
        for step, result, kind in self.rows:
            print(f"{step:{widths[0]}}  {kind:{widths[1]}}  {result}")


def shown(part) -> str:
    """A part of a command as a user in the bundle's folder would type it."""
    text = str(part).removeprefix(f"{BUNDLE}/")
    return f"python {text}" if text.startswith("tools/") and text.endswith(".py") else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default="/tmp", help="where the workspace is made (default /tmp)")
    root = parser.parse_args().root
    demo = Demo()
    gpu, platform = detect()
    workspace = start(demo, root, platform if gpu else "H200")
    step_0(demo, workspace, calibrated=gpu and not measured(platform))
    if gpu:
        on_gpu(demo, workspace)
    else:
        without_gpu(demo, workspace)
    demo.table()
    print(f"\nThe workspace stays for you to look at; remove it with: rm -r {workspace}")


def detect() -> tuple[bool, str | None]:
    """(is there an NVIDIA GPU here, the wiki's name of it; None for one that the wiki lacks)"""
    done = gpu_specs("detect")
    if done.returncode == 3:
        print(
            "No GPU here: kernels run in the CPU interpreter, the profile is a recorded one, nothing can be accepted."
        )
        return False, None
    if done.returncode == 1:
        print(f"{done.stderr.strip()}\nThe demo measures this card and goes on.")
        return True, None
    if done.returncode:
        sys.exit(f"demo: {done.stderr.strip()}")
    return True, json.loads(done.stdout)["platform"]


def measured(platform: str | None) -> bool:
    """Has the wiki measured rates of this product?"""
    return platform is not None and gpu_specs("lookup", platform, "measured_copy_bandwidth").returncode == 0


def gpu_specs(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BUNDLE / "tools" / "gpu_specs.py"), *arguments, "--json"]
    return subprocess.run(command, capture_output=True, text=True)


def start(demo: Demo, root: str, platform: str | None) -> Path:
    name = f"row_softmax_demo_{datetime.datetime.now():%Y%m%d_%H%M%S}"
    path = demo.run(
        "Session start",
        *("bash", BUNDLE / "reference" / "workspace_init.sh", name, EXAMPLE / "three_passes.py"),
        *("--reference", EXAMPLE / "reference.py", *(("--platform", platform) if platform else ())),
        *("--framework", "triton", "--dtype", "bf16", "--root", root),
    )
    demo.row("session start", path, "real")
    return Path(path)


def step_0(demo: Demo, workspace: Path, calibrated: bool) -> None:
    demo.tool("Step 0: the least work", "estimate_work.py", "--workspace", workspace)
    if calibrated:
        printed = demo.tool("Step 0: what this card gives", "calibrate_gpu.py", "--workspace", workspace)
        demo.row("calibration", printed.splitlines()[-2], "measured")
    printed = demo.tool(
        "Step 0: roofline and Stop Conditions", "compute_utilization.py", "--workspace", workspace, "--set-targets"
    )
    demo.row("stop condition", printed.splitlines()[-1].removeprefix("- "), "cited")


def on_gpu(demo: Demo, workspace: Path) -> None:
    judge(demo, workspace, "v0", "Stage 1: the baseline goes through the gate")
    profile(demo, workspace, "v0")
    one_pass = (EXAMPLE / "one_pass.py").read_text()
    change(workspace, "v1", one_pass, EXAMPLE / "one_pass_plan.md")
    judge(demo, workspace, "v1", "Stage 2: one pass in place of three, through the gate")
    profile(demo, workspace, "v1")
    change(workspace, "v2", one_pass.replace("softmax_row", "softmax_row_renamed"), EXAMPLE / "renamed_plan.md")
    judge(demo, workspace, "v2", "Stage 2: the same kernel under another name must be refused", expect=1)
    goal = demo.tool("Stop check", "check_goal.py", workspace, also=1 if on_paper(workspace) else None)
    demo.row("goal", goal, "measured")
    demo.tool("All versions", "memory_manager.py", "summary", "--workspace", workspace)


def on_paper(workspace: Path) -> bool:
    """Does the target rest on documented peaks, which may be out of reach? Then missing it is said, and no error."""
    command = [sys.executable, str(BUNDLE / "tools" / "check_goal.py"), str(workspace), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    return any(target["documented"] for target in json.loads(done.stdout)["targets"])


def judge(demo: Demo, workspace: Path, version: str, title: str, expect: int = 0) -> None:
    printed = demo.tool(title, "run_gate.py", "--workspace", workspace, "--version", version, expect=expect)
    demo.row(f"gate {version}", printed, "measured")


def profile(demo: Demo, workspace: Path, version: str) -> None:
    demo.run(
        f"Profile {version}",
        "bash",
        BUNDLE / "tools" / "profile_kernel.sh",
        "--workspace",
        workspace,
        "--version",
        version,
        also=3,  # no right to read counters, or no profiler: there are durations all the same
    )
    folder = workspace / "profiles" / version / "annotation"
    printed = demo.tool(f"What limits {version}, and what to try", "analyze_profile.py", folder, "--findings", "2")
    demo.row(f"profile {version}", classification(printed), "measured")


def classification(report: str) -> str:
    return next((line for line in report.splitlines() if ", of kernel" in line), report.splitlines()[0])


def change(workspace: Path, version: str, kernel: str, plan: Path) -> None:
    """What the agent does in a round: a plan, and one change."""
    (workspace / "kernel.py").write_text(kernel)
    shutil.copyfile(plan, workspace / "plans" / f"{version}_plan.md")


def without_gpu(demo: Demo, workspace: Path) -> None:
    for version, file in (("v0", "three_passes.py"), ("v1", "one_pass.py")):
        shutil.copyfile(EXAMPLE / file, workspace / "kernel.py")
        printed = demo.tool(
            f"Is {version} right? (logic only: CPU interpreter, smallest workload)",
            *(
                "verify_kernel.py",
                "--workspace",
                workspace,
                "--device",
                "cpu-interpreter",
                "--workload",
                "small",
                "--seeds",
                "2",
            ),
        )
        demo.row(f"verify {version}", printed, "cpu-interpreter")
        recorded = RECORDED / "profiles" / version / "annotation"
        printed = demo.tool(
            f"What limits {version} (a report recorded on an H200)", "analyze_profile.py", recorded, "--findings", "2"
        )
        demo.row(f"profile {version}", classification(printed), "recorded")
    demo.tool("The gate wants a GPU", "run_gate.py", "--workspace", workspace, "--version", "v0", expect=3)
    demo.row("gate", "refused: no GPU, nothing accepted, nothing recorded", "not run")
    demo.tool("Stop check: nothing was measured here", "check_goal.py", workspace, expect=1)
    demo.row("goal", "not met: not measured", "not run")
    demo.tool("The same demo on an H200, as recorded", "memory_manager.py", "summary", "--workspace", RECORDED)
    goal = demo.tool("Its Stop check, as recorded", "check_goal.py", RECORDED)
    demo.row("goal on the H200", goal, "recorded")


if __name__ == "__main__":
    main()
