"""What the loop needs a GPU for: a profile and its brief, quick verification, measurement, the comparison at the end."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from .. import bundle
from ..audit import workspace_audit
from ..device.sandbox import Sandbox
from ..diagnosis import analysis, profile_folder, profile_run
from ..diagnosis.diagnosis import Finding
from ..errors import EnvironmentLacks, Refused, ToolError, UsageError
from ..gate import rounds
from ..hardware import wiki
from ..measure import baselines, pairing, timing
from ..report import brief
from ..session import plans, record_store, target
from ..session.workspace import Workspace
from . import executors, remote, restart

INSTRUCTIONS = """
## What to leave here

You are in a git clone of your own, a copy of the workspace. Write these two files, and nothing else:

- `kernel.py`: one change to it, which keeps the interface (ModelNew or kernel_function): one idea, and all that it takes.
- `plan.md`: copy {bundle}/reference/plan.md and fill it in; every section, one action, the expected effect before any measurement. A hardware value is
  copied with its citation from the GPU section above.

`reference.py` is the oracle; the verifier will run your kernel on other seeds, sizes and layouts. See for yourself beforehand:
`{tools}/verify_kernel.py --workspace .` Timing is done after you, against the best version.
What it compiled to, when it has run: `{tools}/extract_asm.py .cache`
gpu-wiki is the folder {wiki}: a figure that comes from a page or from compiled code names its source. To look for more there: `{tools}/search_wiki.py WORDS`
"""


@dataclass(frozen=True)
class Machine:
    """loop.Machine on real GPUs, those of an executor (executors.py). timeout_s: of each process."""

    workspace: Workspace
    executor: executors.Local | executors.Ray
    timeout_s: float
    say: Callable[[str], None]

    @property
    def slots(self) -> int:
        return self.executor.slots

    def brief(self, version: str, number: int) -> str:
        """The brief on a version, profiled first if it is not yet; for a candidate beside others, a direction of its own."""
        folder = self.profiled(version)
        instructions = INSTRUCTIONS.format(
            bundle=bundle.ROOT, tools=f"{quote(sys.executable)} {quote(str(bundle.ROOT / 'tools'))}", wiki=wiki.root()
        )
        if not (folder / "metrics.json").exists():
            return f"Make the kernel in kernel.py faster. It could not be profiled here.\n{instructions}"
        try:
            profile = profile_folder.read(folder, self.workspace)
            diagnosis = analysis.diagnose(profile)
        except ToolError as error:
            return f"Make the kernel in kernel.py faster. Its profile says nothing: {error}\n{instructions}"
        parts, left_out = brief.of_workspace(self.workspace, profile, diagnosis)
        for what in left_out:
            self.say(f"not in the brief: {what}")
        prompts = brief.compose(parts, answer=instructions + direction(diagnosis.findings, number))
        return f"{prompts['system']}\n\n{prompts['user']}"

    def profiled(self, version: str) -> Path:
        """The folder of its profile, which is taken first if there is none; without metrics.json where that failed."""
        folder = self.workspace.profile(version, profile_folder.MODE)
        if not (folder / "metrics.json").exists():
            try:
                profile_run.run(profile_run.Request(self.workspace, version), self.say)
            except ToolError as error:
                self.say(f"{version} could not be profiled: {error}")
        return folder

    def check(self, kernel: Path, plan: Path) -> tuple[str, str]:
        """(status, message) of an agent's plan and of a quick verification of its kernel."""
        try:
            plans.plan_fields(plan)
        except UsageError as error:
            return "PLAN", str(error)
        if problems := workspace_audit.of_files(
            [plan], wiki.root(None), None
        ).problems:  # held against the workspace it lies in
            _, first = problems[0]
            return "PLAN", f"plan.md, line {first.line}: {first.message}"
        try:
            packed = remote.pack("verify", self.workspace, kernel.read_bytes())
            found = self.executor.examine("verify", packed, self.timeout_s)
        except EnvironmentLacks:
            raise
        except ToolError as error:
            return "CRASH", str(error)
        return found["status"], found["message"]

    def measure(self, kernels: list[bytes]) -> list[rounds.Evidence | Refused]:
        """The evidence of each kernel against the best version, or why there is none."""
        return executors.measured(self.executor, self.workspace, kernels, self.timeout_s)

    def restart(self) -> str | None:
        """What a partial restart did; None when there is too little to mask."""
        try:
            return restart.described(restart.begin(self.workspace, restart.random_seed()))
        except Refused:
            return None

    def stop(self) -> None:
        """End what the executor runs."""
        self.executor.stop()

    def final(self) -> dict[str, dict]:
        """The best version against v0 and against torch.compile of the reference, each in paired runs: {name: comparison}; and its
        profile, for the report.

        What cannot be compared is named and left out: the rounds were worth something without it."""
        found: dict[str, dict] = {}
        try:
            self._compare(found)
        except ToolError as error:
            self.say(f"no comparison at the end: {error}")
        self.profiled(record_store.Memory(self.workspace).best()["version"])
        return found

    def _compare(self, found: dict[str, dict]) -> None:
        records = record_store.Memory(self.workspace)
        best, first = records.best(), records.read("v0")
        what = target.of_workspace(self.workspace)
        with Sandbox("cuda", what.cache) as sandbox:
            kernel = self.workspace.extract(best["git_commit_hash"], sandbox.scratch)
            compiled = sandbox.scratch / "compiled.py"
            compiled.write_bytes(baselines.source(self.workspace.first_reference(), "torch.compile"))
            others = {"torch.compile": compiled}
            if best["version"] != "v0" and first["git_commit_hash"]:
                others["v0"] = self.workspace.extract(first["git_commit_hash"], sandbox.scratch)
            cases = timing.inputs(sandbox, what.reference, what.dtype, ["default"], self.timeout_s)
            for name, opponent in others.items():
                try:
                    measured = timing.measure(sandbox, kernel, opponent, cases, timeout_s=self.timeout_s)
                    found[name] = pairing.paired_verdict(measured["default"]["rounds"])
                except ToolError as error:
                    self.say(f"not compared with {name}: {error}")


def direction(findings: Sequence[Finding], number: int) -> str:
    """What a candidate is to go for, so that several of one round are not the same. Pure."""
    if number < len(findings):
        chosen = findings[number]
        return f"\nDirection of this candidate: {chosen.id}: {chosen.actions[0]}.\n"
    others = ", ".join(finding.id for finding in findings)
    return f"\nDirection of this candidate: one of your own; others are working on {others}.\n" if findings else ""
