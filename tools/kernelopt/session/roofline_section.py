"""The README's sections Hardware Spec and Roofline: what bounds each workload, by the page of the task's GPU."""

from collections.abc import Mapping

from ..hardware import roofline, wiki
from ..hardware.work import Work
from . import platforms
from .task import Task
from .workspace import Workspace


def roofs_of(work: Mapping[str, Work], page: wiki.Page) -> dict[str, roofline.Roof]:
    """The roof of each workload on that page's GPU."""
    return {name: roofline.roof_for(page, one) for name, one in work.items()}


def citations(roofs: Mapping[str, roofline.Roof]) -> list[str]:
    """The rows that the roofs rest on, each once."""
    return list(dict.fromkeys(line for roof in roofs.values() for line in roof.citations()))


def sections(work: Mapping[str, Work], roofs: Mapping[str, roofline.Roof]) -> dict[str, str]:
    """The text of both sections, by heading."""
    return {
        "Hardware Spec": "\n".join(f"- {line}" for line in citations(roofs)),
        "Roofline": "\n".join(line(name, work[name], roof) for name, roof in roofs.items()),
    }


def renewed(workspace: Workspace, task: Task) -> dict[str, str]:
    """Both sections, after the page of the workspace has changed; none before Step 0 has written them."""
    if not task.targets or not task.work:
        return {}
    return sections(task.work, roofs_of(task.work, platforms.of_task(workspace, task)))


def line(name: str, work: Work, roof: roofline.Roof) -> str:
    """A workload's intensity, the ridge point, what bounds it, and its floor."""
    bound = roofline.bound(work.flops, work.bytes_min, roof)
    if bound.arithmetic_intensity is None:
        return f"- {name}: moves no byte"
    ridge = f"ridge point {bound.ridge_point:.4g}" if bound.ridge_point else "no ridge point for this dtype"
    text = (
        f"- {name}: {work.flops} FLOP over {work.bytes_min} bytes ({work.source}) = "
        f"{bound.arithmetic_intensity:.4g} FLOP/byte, {ridge}: {bound.bound}-bound, {floor_words(bound, roof, work)}"
    )
    if bound.bound == "memory" and roofline.fits_in_cache(work.bytes_min, roof):
        text += (
            "; its bytes fit in the L2, so launch and ramp-up weigh, and the bandwidth of large buffers is out of reach"
        )
        if name == "default":  # the only one that it measures
            text += "; a target that can be met: tools/measure_ceiling.py --set-targets"
    return text


def floor_words(bound: roofline.Bound, roof: roofline.Roof, work: Work) -> str:
    """ "floor 206.2 us", or what stands in where no ceiling was measured."""
    if bound.library_rate:
        sustained = roofline.sustained_us(work.flops, bound, roof)
        other = f"{sustained:.2f} us at {roof.sustained_compute.metric}" if sustained else None
        return (
            f"{bound.floor_us:.2f} us at {roof.compute.metric}, {roofline.LIBRARY_RATE} "
            f"({other or 'measure_ceiling.py measures it'})"
        )
    return f"floor {bound.floor_us:.2f} us"
