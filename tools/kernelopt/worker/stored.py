"""Tensors that a task keeps in a file, for references that tools/import_task.py made."""

import hashlib
from pathlib import Path

import torch

from .contract import ContractError


def tensor(path: str, start: int, end: int, sha256: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor that the bytes from start to end of a file hold, on torch's default device. ContractError where the
    file is gone, or holds other bytes than it did when the task was imported."""
    try:
        with open(path, "rb") as file:
            file.seek(start)
            content = file.read(end - start)
    except OSError as error:
        raise ContractError(
            f"the task's tensors in {path} cannot be read ({error.strerror}); import it again"
        ) from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ContractError(f"{Path(path).name} has changed since the task was imported; import it again")
    if not content:
        return torch.empty(shape, dtype=dtype)
    made = torch.frombuffer(bytearray(content), dtype=dtype).view(shape)
    return made.to(torch.empty(0).device)
