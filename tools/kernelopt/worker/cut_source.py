"""The text of reference.py as a whole, from that of its parts (cut_model.py, cut_inputs.py, cut_call.py)."""

import hashlib
from pathlib import Path

from . import recorded_values
from .cut_call import REQUIRED

HEAD = '''"""{title}

The operators are those that ran, by torch.export, with the tensors that they got: sizes, strides and kinds of numbers.
cut_problem.py wrote this file. `call` is for put_back.py: the module's call in the model, with a kernel in it.
"""

import math

import torch
import torch.nn as nn

CUT = {{
{cut}}}
'''
KEPT = '''
def kept(path, digest):
    """The tensors of a file of cut_problem.py."""
    import hashlib
    import pathlib

    if hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest() != digest:
        raise ValueError(f"{path} is not the file that this problem was made with")
    return torch.load(path, map_location=torch.empty(0).device, weights_only=True)
'''


def reference_text(title: str, about: dict, mutated: list[str], parts: list[str]) -> str:
    """The whole file."""
    text = HEAD.format(title=title, cut="".join(f"    {key!r}: {value!r},\n" for key, value in about.items()))
    if mutated:
        text += f"MUTATES = {tuple(mutated)!r}\n"
    body = "".join(parts)
    helpers = {**recorded_values.HELPERS, "kept": KEPT, "required": REQUIRED}
    body = "".join(f"\n{code}" for name, code in helpers.items() if f"{name}(" in body) + body
    text += body
    return text if "math." in body else text.replace("import math\n\n", "")


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
