"""The least time of some calls of modules, by the rates of a card. Pure."""

from collections.abc import Callable

from ..errors import Refused
from ..hardware import roofline, wiki
from ..hardware.work import COUNTED, ModuleWork, Work
from .groups import Floor


def floor_on(page: wiki.Page, parameter_bytes: int) -> Callable[[list[ModuleWork]], Floor | None]:
    """A function from calls to their floor on a card; None where a rate is unknown. parameter_bytes: of the whole
    model: what the L2 cannot hold must be read anew in each step."""

    def floor_of(calls: list[ModuleWork]) -> Floor | None:
        try:
            bounds = [bound_of(call, page, parameter_bytes) for call in calls]
        except Refused:
            return None
        longest = max(bounds, key=lambda bound: bound.floor_us)
        total = sum(bound.floor_us for bound in bounds)
        return Floor(total, longest.bound, longest.library_rate)

    return floor_of


def bound_of(call: ModuleWork, page: wiki.Page, parameter_bytes: int) -> roofline.Bound:
    """The bound of one call. What fits into the L2 may still be there from the module before."""
    other = call.bytes_in + call.bytes_out
    work = Work(
        flops=max(0, call.flops),
        bytes_in=None,
        bytes_out=None,
        bytes_min=call.bytes_state + other,
        dtype=call.dtype,
        source=COUNTED,
    )
    roof = roofline.roof_for(page, work)
    state = call.bytes_state if parameter_bytes > roof.l2_bytes else 0
    return roofline.bound(work.flops, state + (other if other > roof.l2_bytes else 0), roof)
