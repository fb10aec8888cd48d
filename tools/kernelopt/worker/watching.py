"""A mode that watches torch's operations. Imported by worker processes only."""

from torch.utils._python_dispatch import TorchDispatchMode


class Watching(TorchDispatchMode):
    """A TorchDispatchMode that does not load torch's compiler: torch would import all of torch._dynamo at the first
    operation, to keep torch.compile out of `__torch_dispatch__`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
