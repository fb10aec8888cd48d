"""Which page a task's hardware values come from: its platform's page of the wiki, and what was measured on this very
card.

A workspace may name a calibration (`calibration` of its Task block): a page in the wiki's own form that
calibrate_gpu.py wrote. Its measured rows go before the wiki's. Of a card that the wiki lacks, it is the page.
"""

import contextlib
import hashlib
from dataclasses import replace
from pathlib import Path

from ..errors import Refused, UsageError
from ..hardware import roofline, wiki
from ..hardware.work import Work
from .task import Task
from .workspace import Workspace

CALIBRATION = "calibration.md"  # its name in a workspace
WORKSPACE = "<workspace>"  # where its citations say that it lies
MEASURED = "measured_"
DIGEST = "Digest of the text above: "


def of_task(workspace: Workspace, task: Task, gpu_wiki: Path | None = None) -> wiki.Page:
    """The page of the task's platform; Refused when neither the wiki nor the calibration knows it."""
    return known(task.platform, wiki.root(gpu_wiki or task.gpu_wiki_path), calibration_of(workspace, task))


def of_device(name: str, workspace: Workspace, task: Task) -> wiki.Page:
    """The page of the device of that name, as this workspace knows it; Refused when there is none."""
    return known(name, wiki.root(task.gpu_wiki_path), calibration_of(workspace, task))


def known(name: str, root: Path, calibration: wiki.Page | None) -> wiki.Page:
    """The page called `name`, in the wiki of the folder `root` or the calibration of that card; Refused when there
    is none."""
    own = calibration if calibration and wiki.normalised(name) in wiki.spellings(calibration) else None
    try:
        page = wiki.find(name, wiki.pages(root))
    except Refused:
        if own is None:
            raise
        return replace(own, limits=wiki.limit_pages(root).get(own.limits_key()))
    return calibrated(page, own) if own else page


def calibrated(page: wiki.Page, calibration: wiki.Page) -> wiki.Page:
    """A product's page with what was measured on one card of it before what the wiki has of others, and with what
    that card told where the page knows nothing."""
    own = {name: row for name, row in calibration.rows.items() if row.text != "UNKNOWN"}
    taken = {name: row for name, row in own.items() if name.startswith(MEASURED) or page.known(name) is None}
    return replace(page, rows={**page.rows, **taken}, aliases=(*page.aliases, *calibration.aliases))


def calibration_of(workspace: Workspace, task: Task) -> wiki.Page | None:
    """The calibration that the Task block names; None when it names none, UsageError when it cannot be read."""
    return read(workspace.root / task.calibration) if task.calibration else None


def read(path: Path) -> wiki.Page:
    """A calibration from its file; UsageError when it is none, or was changed by hand."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise UsageError(f"{path} cannot be read; measure this card again: calibrate_gpu.py") from None
    if unsealed(text):
        raise UsageError(f"{path} is not as calibrate_gpu.py wrote it; measure this card again")
    return wiki.parse_page(text, CALIBRATION, WORKSPACE)


def sealed(text: str) -> str:
    """A calibration's text with the digest that `read` wants, its last line."""
    return f"{text}\n{DIGEST}{hashlib.sha256(text.encode()).hexdigest()}\n"


def unsealed(text: str) -> bool:
    """Was a page changed after a program wrote it?"""
    body, _, digest = text.rpartition(f"\n{DIGEST}")
    return digest.strip() != hashlib.sha256(body.encode()).hexdigest()


def check_platform(workspace: Workspace, task: Task, device: str) -> None:
    """UsageError when the GPU is not the platform of the task: its times would be compared with another product's
    rates."""
    if task.platform and wiki.normalised(device) not in wiki.spellings(of_task(workspace, task)):
        raise UsageError(
            f"this GPU is {device}, the task is for {task.platform}; {other_platform(workspace, task, device)}"
        )


def other_platform(workspace: Workspace, task: Task, device: str) -> str:
    """What to do about a task that is for another product than the GPU."""
    try:
        page = of_device(device, workspace, task)
    except Refused:
        return "the wiki has no page of it: start a session without --platform, then calibrate_gpu.py --workspace W"
    return f"set the platform {page.platform} in the README's Task block"


def roof_of_task(workspace: Workspace, task: Task) -> roofline.Roof | None:
    """The roof of the default workload; None when the platform, its values or the work are unknown."""
    if task.platform is None or task.work is None:
        return None
    page = of_task(workspace, task)
    with contextlib.suppress(Refused):
        return roofline.roof_for(page, task.work["default"])
    return None


def utilization(
    workspace: Workspace, task: Task, time_us: float, work: Work | None = None, max_clocks: dict | None = None
) -> roofline.Utilization | None:
    """Roofline figures of a workload, given by its work (None: the default one); None when the work is not known,
    and the rates alone where the platform or its values are not. max_clocks: of this card (gpu.identify)."""
    work = work or task.work_of()
    if work is None:
        return None
    roof = roof_of_task(workspace, task)
    return roofline.utilization(time_us, work.flops, work.bytes_min, roof, max_clocks)
