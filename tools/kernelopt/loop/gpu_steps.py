"""The steps of a round that need a GPU: profile and brief, quick verification, the comparison at the end."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from .. import bundle
from ..audit import workspace_audit
from ..diagnosis import analysis, profile_folder
from ..diagnosis.diagnosis import Finding
from ..errors import EnvironmentLacks, Refused, ToolError, UsageError
from ..hardware import wiki
from ..measure.pairing import Comparison
from ..report import brief
from ..session import plans
from ..session.record_store import RecordStore
from ..session.workspace import Workspace
from ..statuses import Status
from . import executors, restart

INSTRUCTIONS = """
## What to leave here

You are in a git clone of your own, a copy of the workspace. Write these two files, and nothing else:

- `kernel.py`: one change to it, which keeps the interface (ModelNew or kernel_function): one idea, and all that it
  takes.
- `plan.md`: copy {bundle}/reference/plan.md and fill it in; every section, one action, the expected effect before any
  measurement. A hardware value is copied with its citation from the GPU section above.

`reference.py` is the oracle; the verifier will run your kernel on other seeds, sizes and layouts. See for yourself
beforehand: {beforehand}
Timing is done after you, against the best version.
gpu-wiki is the folder {wiki}: a figure that comes from a page or from compiled code names its source.
To look for more there: `{tools}/search_wiki.py WORDS`
"""

BEFOREHAND = """`{tools}/verify_kernel.py --workspace .`
What it compiled to, when it has run: `{tools}/extract_asm.py .cache`"""
BEFOREHAND_WITHOUT_GPU = """`{tools}/verify_kernel.py --workspace . --device cpu-interpreter`
That runs Triton kernels on the CPU, their logic only: your sandbox hides the GPU."""


@dataclass(frozen=True)
class GpuSteps:
    """asking.Steps on real GPUs, those of an executor. agents_see_gpu: commands that agents run may use one."""

    workspace: Workspace
    executor: executors.Executor
    say: Callable[[str], None]
    agents_see_gpu: bool = True

    def brief(self, version: str, number: int) -> str:
        """The brief on a version, which is profiled first if it has no profile.

        number: of the candidate in its round; each gets another direction.
        """
        folder = self.profiled(version)
        tools = f"{quote(sys.executable)} {quote(str(bundle.ROOT / 'tools'))}"
        beforehand = (BEFOREHAND if self.agents_see_gpu else BEFOREHAND_WITHOUT_GPU).format(tools=tools)
        instructions = INSTRUCTIONS.format(bundle=bundle.ROOT, tools=tools, beforehand=beforehand, wiki=wiki.root())
        if not (folder / "metrics.json").exists():
            return f"Make the kernel in kernel.py faster. It could not be profiled here.\n{instructions}"
        try:
            profile = profile_folder.read(folder, self.workspace)
            diagnosis = analysis.diagnose(profile)
        except ToolError as error:
            return f"Make the kernel in kernel.py faster. Its profile could not be diagnosed: {error}\n{instructions}"
        parts, left_out = brief.of_workspace(self.workspace, profile, diagnosis)
        for message in left_out:
            self.say(f"not in the brief: {message}")
        prompts = brief.compose(parts, answer=instructions + direction(diagnosis.findings, number))
        return f"{prompts.system}\n\n{prompts.user}"

    def profiled(self, version: str) -> Path:
        """The folder of its profile. The profile is taken first if there is none; metrics.json is missing when that
        failed."""
        folder = self.workspace.profile(version, profile_folder.MODE)
        if not (folder / "metrics.json").exists():
            try:
                self.executor.profile(version, self.say)
            except ToolError as error:
                self.say(f"{version} could not be profiled: {error}")
        return folder

    def check(self, kernel: Path, plan: Path) -> tuple[str, str]:
        """(status, message) of an agent's plan and of a quick verification of its kernel."""
        try:
            plans.plan_fields(plan)
        except UsageError as error:
            return Status.PLAN, str(error)
        # The plan is audited by the workspace that it lies in.
        if problems := workspace_audit.of_files([plan], wiki.root(None), None).problems:
            _, first = problems[0]
            return Status.PLAN, f"plan.md, line {first.line}: {first.message}"
        try:
            verdict = self.executor.verify(kernel.read_bytes())
        except EnvironmentLacks:
            raise
        except ToolError as error:
            return Status.CRASH, str(error)
        return verdict.status, verdict.summary

    def restart(self) -> str | None:
        """Make a partial restart and describe it in a line; None when there is too little to mask."""
        try:
            return restart.begin(self.workspace, restart.random_seed()).describe()
        except Refused:
            return None

    def final(self) -> dict[str, Comparison]:
        """{name: comparison} of the best version with v0 and with torch.compile of the reference, in paired runs.

        The best is profiled too, for the report. A failed comparison is named and left out.
        """
        comparisons: dict[str, Comparison] = {}
        try:
            final = self.executor.compare()
            comparisons = final.comparisons
            for message in final.left_out:
                self.say(message)
        except ToolError as error:
            self.say(f"no comparison at the end: {error}")
        self.profiled(RecordStore(self.workspace).best().version)
        return comparisons


def direction(findings: Sequence[Finding], number: int) -> str:
    """The finding that a candidate shall remove; each candidate of a round gets another one. Pure."""
    if number < len(findings):
        chosen = findings[number]
        return f"\nDirection of this candidate: {chosen.id}: {chosen.actions[0]}.\n"
    others = ", ".join(finding.id for finding in findings)
    return f"\nDirection of this candidate: one of your own; others are working on {others}.\n" if findings else ""
