"""Which targets a kernel is compiled for: those that are named, the GPU that is here, the workspace's platform."""

import contextlib

from ..device import amd, gpu
from ..errors import EnvironmentLacks, UsageError
from ..hardware import targets, wiki
from ..hardware.targets import Target
from ..session import platforms
from ..session.workspace import Workspace

NO_TARGET = "{option} names no target; pass architectures or cards, as sm_90 or h100-sxm; gpu_specs.py list prints them"


def of_names(names: str, workspace: Workspace | None, option: str) -> list[Target]:
    """The targets in a list with commas, each once. Refused when one names neither an architecture nor a card.
    option: that of the command line."""
    chosen = {
        target.title: target for name in names.split(",") if name.strip() for target in [of_name(name, workspace)]
    }
    if not chosen:
        raise UsageError(NO_TARGET.format(option=option))
    return list(chosen.values())


def of_name(name: str, workspace: Workspace | None) -> Target:
    """The target that an architecture (sm_90, 9.0, gfx942) or a card names. Refused for another name."""
    root = wiki.root(workspace.task().gpu_wiki_path if workspace else None)
    known = targets.of_architecture(name, wiki.pages(root), wiki.limit_pages(root))
    return known or targets.of_page(platforms.existing_page_of(name, workspace))


def default(workspace: Workspace | None, gpu_is_wanted: bool, option: str) -> Target:
    """The GPU that is here, or else the workspace's platform. EnvironmentLacks or UsageError when there is neither."""
    name = workspace.task().platform if workspace else None
    if gpu_is_wanted:
        try:
            name = gpu.identify().name
        except EnvironmentLacks as lacks:
            name = amd_gpu() or name
            if name is None:
                raise EnvironmentLacks(f"{lacks}; {option} NAME compiles for a GPU that is not here") from None
    if name is None:
        raise UsageError(f"pass {option} NAME: the GPU to compile for, as h100-sxm, sm_90 or gfx942")
    return of_name(name, workspace)


def amd_gpu() -> str | None:
    """The architecture of the AMD GPU that is here; None where there is none."""
    with contextlib.suppress(EnvironmentLacks):
        if card := amd.identify():
            return card.gfx_target
    return None


def of_platform(workspace: Workspace | None) -> Target | None:
    """The workspace's platform; None where it has none, or the wiki does not know it."""
    page = platforms.page_of(workspace.task().platform or "", workspace) if workspace else None
    return targets.of_page(page) if page and page.limits_key() else None
