"""The page with a task's hardware values. It combines the platform's wiki page and the calibration of this card.

A workspace may name a calibration (`calibration` of its Task block), a page that calibrate_gpu.py wrote in the format
of the wiki. Its measured rows override the wiki's. If the wiki has no page for the card, the calibration is the page.
"""

import contextlib
import hashlib
from dataclasses import replace
from pathlib import Path

from ..errors import Refused, UsageError
from ..hardware import roofline, wiki
from ..hardware.card import MaxClocks
from ..hardware.work import Work
from .task import Task
from .workspace import Workspace

CALIBRATION = "calibration.md"  # its name in a workspace
WORKSPACE = "<workspace>"  # the folder of the calibration in citations
DIGEST = "Digest of the text above: "


def of_task(workspace: Workspace, task: Task, gpu_wiki: Path | None = None) -> wiki.Page:
    """Return the page of the task's platform. Raise Refused if neither the wiki nor the calibration has it."""
    return known(task.platform, wiki.root(gpu_wiki or task.gpu_wiki_path), calibration_of(workspace, task))


def of_device(name: str, workspace: Workspace, task: Task) -> wiki.Page:
    """Return the page of the device with that name. Raise Refused if neither the wiki nor the calibration has it."""
    return known(name, wiki.root(task.gpu_wiki_path), calibration_of(workspace, task))


def page_of(name: str, workspace: Workspace | None, task: Task | None = None) -> wiki.Page | None:
    """Return the page of the device with that name, or None if there is none. Without a workspace the bundle's wiki is
    searched. task: the Task block of the workspace; None reads it."""
    with contextlib.suppress(Refused):
        return existing_page_of(name, workspace, task)
    return None


def existing_page_of(name: str, workspace: Workspace | None, task: Task | None = None) -> wiki.Page:
    """Return what `page_of` returns. Raise Refused if there is no page."""
    return of_device(name, workspace, task or workspace.task()) if workspace else wiki.product(name)


def known(name: str, root: Path, calibration: wiki.Page | None) -> wiki.Page:
    """Return the page called `name` from the wiki in `root` or from the calibration of that card. Raise Refused if
    neither has it."""
    of_card = calibration if calibration and wiki.normalised(name) in wiki.spellings(calibration) else None
    try:
        page = wiki.find(name, wiki.pages(root))
    except Refused:
        if of_card is None:
            raise
        return replace(of_card, limits=wiki.limit_pages(root).get(of_card.limits_key()))
    return calibrated(page, of_card) if of_card else page


def calibrated(page: wiki.Page, calibration: wiki.Page) -> wiki.Page:
    """Return a product's page with the rows of a calibration. Measured rows replace the wiki's rows. Other rows fill
    the gaps of the page."""
    known_rows = {name: row for name, row in calibration.rows.items() if row.text != "UNKNOWN"}
    taken = {name: row for name, row in known_rows.items() if roofline.is_measured(name) or page.known(name) is None}
    return replace(page, rows={**page.rows, **taken}, aliases=(*page.aliases, *calibration.aliases))


def calibration_of(workspace: Workspace, task: Task) -> wiki.Page | None:
    """Return the calibration that the Task block names, or None. Raise UsageError if it cannot be read."""
    return read(workspace.root / task.calibration) if task.calibration else None


def read(path: Path) -> wiki.Page:
    """Read a calibration from its file. Raise UsageError if the file cannot be read or was edited."""
    return wiki.parse_page(unsealed_text(path), CALIBRATION, WORKSPACE)


def unsealed_text(path: Path) -> str:
    """Return the text of a calibration above its digest. Raise UsageError if it cannot be read or was edited."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise UsageError(f"{path} cannot be read; measure this card again: calibrate_gpu.py") from None
    if unsealed(text):
        raise UsageError(f"{path} is not as calibrate_gpu.py wrote it; measure this card again")
    return text.rpartition(f"\n{DIGEST}")[0]


def sealed(text: str) -> str:
    """Append the digest that `read` checks, as the last line."""
    return f"{text}\n{DIGEST}{hashlib.sha256(text.encode()).hexdigest()}\n"


def unsealed(text: str) -> bool:
    """Return whether a page was edited after a program wrote it."""
    body, _, digest = text.rpartition(f"\n{DIGEST}")
    return digest.strip() != hashlib.sha256(body.encode()).hexdigest()


def check_platform(workspace: Workspace, task: Task, device: str) -> None:
    """Raise UsageError if the GPU is not the platform of the task. Times on it must not be compared with another
    product's rates."""
    if task.platform and wiki.normalised(device) not in wiki.spellings(of_task(workspace, task)):
        raise UsageError(
            f"this GPU is {device}, the task is for {task.platform}; {other_platform(workspace, task, device)}"
        )


def other_platform(workspace: Workspace, task: Task, device: str) -> str:
    """Return advice for a task whose platform is not this GPU."""
    try:
        page = of_device(device, workspace, task)
    except Refused:
        return "the wiki has no page of it: start a session without --platform, then calibrate_gpu.py --workspace W"
    return f"set the platform {page.platform} in the README's Task block"


def roof_of_task(workspace: Workspace, task: Task) -> roofline.Roof | None:
    """Return the roof of the default workload, or None if the platform, its values or the work are unknown."""
    if task.platform is None or task.work is None:
        return None
    page = of_task(workspace, task)
    with contextlib.suppress(Refused):
        return roofline.roof_for(page, task.work["default"])
    return None


def rests_on_library_rate(workspace: Workspace, task: Task) -> bool:
    """Return whether a library's rate stands in for the floor of the default workload, by the rates known now. Return
    False if there is no roof, or a page cannot be read."""
    with contextlib.suppress(Refused, UsageError):
        if roof := roof_of_task(workspace, task):
            work = task.work_of()
            return roofline.bound(work.flops, work.bytes_min, roof).library_rate
    return False


def floor_share_pct(workspace: Workspace, task: Task, time_us: float | None) -> float | None:
    """Return the share of the floor of a time of the default workload, by the rates that are known now. Return None
    if the floor is unknown: a library's rate is none."""
    used = utilization(workspace, task, time_us) if time_us else None
    return None if used is None or used.library_rate else used.floor_share_pct


def utilization(
    workspace: Workspace, task: Task, time_us: float, work: Work | None = None, max_clocks: MaxClocks | None = None
) -> roofline.Utilization | None:
    """Return the roofline figures of a workload. Return None if the work is unknown, and only the rates if the
    platform or its values are unknown. work: the work of the workload, or None for the default workload. max_clocks:
    the card's highest clocks."""
    work = work or task.work_of()
    if work is None:
        return None
    roof = roof_of_task(workspace, task)
    return roofline.utilization(time_us, work.flops, work.bytes_min, roof, max_clocks)
