"""Parameters and buffers of a model: the ones that a call changed, and their former values."""

import torch

from . import accuracy

EXTRA_STATE = "_extra_state"  # its name in a module's state_dict
WATCHED_BYTES = 1 << 30  # of a model's state, which is copied once; a larger one is not watched


def watched(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state of a case; empty when it is large."""
    return state if sum(tensor.nbytes for tensor in state.values()) <= WATCHED_BYTES else {}


def held(model) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, tied ones under each name. A function has none."""
    if not isinstance(model, torch.nn.Module):
        return {}
    both = *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
    return {name: tensor.detach() for name, tensor in both}


def saved(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by their names in the model's state_dict, which a case stores. What modules keep by
    get_extra_state is left out: it may be anything, and each constructor makes it again."""
    both = model.state_dict().items()
    return {name: value.detach() for name, value in both if name.rpartition(".")[2] != EXTRA_STATE}


def changed(model, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The values that differ from before, by name."""
    both = {name: (now, before[name]) for name, now in held(model).items() if name in before}
    return {name: now for name, (now, old) in both.items() if not identical(now, old.to(now.device))}


class State:
    """The part of Model's state that a kernel holds, as it was bound. Each call must start from it."""

    def __init__(self, kernel, names):
        self._kernel = kernel
        self._bound = {name: tensor for name, tensor in held(kernel).items() if name in names}
        self._kept = {name: tensor.clone() for name, tensor in self._bound.items()}

    def changed(self) -> dict[str, torch.Tensor]:
        return changed(self._kernel, self._kept)

    def restore(self, names) -> None:
        """Restore tensors that were changed in place, and buffers that were replaced."""
        for name in names:
            owner, _, leaf = name.rpartition(".")
            buffers = self._kernel.get_submodule(owner)._buffers
            if leaf in buffers:
                buffers[leaf] = self._bound[name]
            self._bound[name].copy_(self._kept[name])


def identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit where finite, NaN where the other is NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(accuracy.same(accuracy.comparable(a), accuracy.comparable(b)).all())


def all_identical(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(identical, a, b))
