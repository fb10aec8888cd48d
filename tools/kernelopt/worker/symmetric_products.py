"""Which matrices of a reference are symmetric by the way they are made: X X^T, A A of a symmetric A, and what
element-wise operations make of these. Of a product whose result is symmetric, a kernel needs one half and the diagonal.

A copy of a tensor is another tensor here, so `x.float() @ x.float().mT` is not seen. Imported by worker processes only.
"""

from fractions import Fraction

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .traffic import place

ELEMENTWISE = {"_to_copy", "clone"}  # beside those that torch marks as such


class Symmetric:
    """The tensors known to be symmetric in their last two dimensions."""

    def __init__(self):
        self._known = WeakIdKeyDictionary()  # tensor -> its storage, which `tensor.data = other` changes unseen

    def see(self, function, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """An operation on these tensors made those: where it works on single elements, symmetric ones stay so."""
        by_element = torch.Tag.pointwise in function.tags or function._overloadpacket.__name__ in ELEMENTWISE
        if not by_element or torch.Tag.nondeterministic_seeded in function.tags:
            return
        for result in made:
            if given and all(one.numel() == 1 or self.holds(one, result.shape) for one in given):
                self._keep(result)

    def _keep(self, tensor: torch.Tensor) -> None:
        if not tensor.is_complex():  # whose X X^H is its conjugate's transpose
            self._known[tensor] = place(tensor)

    def holds(self, tensor: torch.Tensor, shape: torch.Size) -> bool:
        return self._known.get(tensor) == place(tensor) and tensor.shape == shape

    def share_of_product(
        self, a: torch.Tensor, b: torch.Tensor, made: torch.Tensor, added: torch.Tensor | None
    ) -> Fraction:
        """The share of its FLOPs that a product needs. added: to it, so that `made` is the sum."""
        own, mirrored = lies(b), lies(b, mirrored=True)
        if lies(a) != mirrored and not (self.holds(a, a.shape) and lies(a) == own):
            return Fraction(1)
        if added is None or self.holds(added, made.shape):
            self._keep(made)
        rows = made.shape[-1]
        return Fraction(rows + 1, 2 * rows) if rows else Fraction(1)

    def forget(self, tensor: torch.Tensor) -> None:
        """It is written, and so are its views."""
        for other in [one for one in list(self._known) if place(one) == place(tensor)]:
            del self._known[other]


def lies(tensor: torch.Tensor, mirrored: bool = False) -> tuple:
    """Equal for views of the same elements in the same places. mirrored: of its transpose."""
    shape, strides = list(tensor.shape), [step * (n > 1) for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    for each in (shape, strides) if mirrored else ():
        each[-2:] = reversed(each[-2:])
    return place(tensor), tensor.storage_offset(), tensor.dtype, shape, strides
