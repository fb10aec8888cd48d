"""The comparison at the end of a run: the best version with v0 and with torch.compile of the reference."""

from dataclasses import dataclass
from pathlib import Path

from ..device.sandbox import Sandbox
from ..errors import ToolError
from ..measure import baselines, pairing, timing
from ..measure.pairing import Comparison
from ..session.record_store import RecordStore
from ..session.workspace import Workspace


@dataclass(frozen=True)
class Final:
    """comparisons: of the best version, by the name of the baseline, in paired runs. left_out: why others are not."""

    comparisons: dict[str, Comparison]
    left_out: tuple[str, ...] = ()

    def to_json(self) -> dict:
        return {
            "comparisons": {name: one.to_json() for name, one in self.comparisons.items()},
            "left_out": list(self.left_out),
        }

    @classmethod
    def from_json(cls, final: dict) -> "Final":
        comparisons = {name: Comparison.from_json(one) for name, one in final["comparisons"].items()}
        return cls(comparisons, tuple(final["left_out"]))

    @classmethod
    def of(cls, workspace: Workspace, timeout_s: float) -> "Final":
        """Compare on the first visible GPU. timeout_s: of each process. ToolError when nothing can be compared."""
        best, dtype = RecordStore(workspace).best(), workspace.task().dtype
        comparisons, left_out = {}, []
        with Sandbox("cuda", workspace.cache) as sandbox:
            kernel = workspace.extract(best.git_commit_hash, sandbox.scratch)
            cases = timing.inputs(sandbox, workspace.reference, dtype, ["default"], timeout_s)
            for name, baseline in baseline_files(workspace, best.version, sandbox.scratch).items():
                try:
                    timed = timing.measure(sandbox, kernel, baseline, cases, timeout_s=timeout_s)
                    comparisons[name] = pairing.compare(timed["default"].runs)
                except ToolError as error:
                    left_out.append(f"not compared with {name}: {error}")
        return cls(comparisons, tuple(left_out))


def baseline_files(workspace: Workspace, best: str, folder: Path) -> dict[str, Path]:
    """{name: kernel file in `folder`}; v0 only where it was accepted and is not the best itself."""
    compiled = folder / "compiled.py"
    compiled.write_bytes(baselines.source(workspace.first_reference(), "torch.compile"))
    files = {"torch.compile": compiled}
    first = RecordStore(workspace).read("v0")
    if best != "v0" and first.git_commit_hash:
        files["v0"] = workspace.extract(first.git_commit_hash, folder)
    return files
