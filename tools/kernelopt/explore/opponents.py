"""The opponents that candidates are timed against: the workspace's best version, PyTorch, torch.compile, or any
file."""

from pathlib import Path

from ..errors import UsageError
from ..measure import baselines
from ..session.explorations import BEST, is_best
from ..session.record_store import RecordStore
from ..session.subject import KernelUnderTest


def of(subject: KernelUnderTest, names: list[str] | None, folder: Path, candidates: list[str]) -> dict[str, Path]:
    """{name: file}; files that must be made go to `folder`. names None: the best version where there is one, else
    eager. candidates: their names, which no opponent gets."""
    best = RecordStore(subject.workspace).best() if subject.workspace else None
    if names is None:
        names = [BEST if best else "eager"]
    opponents: dict[str, Path] = {}
    for name in names:
        if name == BEST:
            if best is None:
                raise UsageError("--against best: no version is accepted yet")
            found, file = f"{BEST} ({best.version})", subject.workspace.extract(best.git_commit_hash, folder)
        elif name in baselines.MODES:
            file = folder / f"opponent_{len(opponents)}.py"
            file.write_bytes(baselines.source(subject.reference.read_bytes(), name))
            found = name
        elif Path(name).is_file():
            found, file = Path(name).stem, Path(name).resolve()
        else:
            raise UsageError(f"--against {name}: it is no file; {BEST}, {', '.join(baselines.MODES)} are names")
        found = f"{found} (opponent)" if found in candidates else found
        if opponents.get(found, file) != file and name not in (BEST, *baselines.MODES):
            raise UsageError(f"two opponents have the name {found}; rename a file")
        opponents[found] = file
    return opponents


def check_first(subject: KernelUnderTest, opponents: dict[str, Path]) -> None:
    """UsageError unless ratios refer to the workspace's best version, where it has one."""
    if RecordStore(subject.workspace).best() and not is_best(next(iter(opponents), None)):
        raise UsageError("--keep-leader compares with the best version; pass --against best first, or leave it out")
