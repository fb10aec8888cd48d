"""A reference on blank tensors: they have a shape and a dtype and no contents, so nothing is computed.

There are two kinds. Meta tensors cost nothing. Fake tensors also know their device and take real ones beside them,
but their first use imports torch._dynamo, which takes as long as importing torch. So fake tensors are the second try.
"""

import contextlib
import sys
import types
from collections.abc import Callable, Iterator

import torch

from . import problem


def on_meta(reference: problem.Reference, workload: str, dtype: str | None, do: Callable):
    """`do(model, inputs)` on meta tensors. Raises what the reference raises, and where it needs contents or mixes in
    tensors that lie on a device."""
    with without_dynamo(), torch.device("meta"):
        model, inputs, _ = reference.build(workload, 0, dtype, "meta")
        return do(model.to("meta"), inputs)


def on_fake(reference: problem.Reference, workload: str, dtype: str | None, do: Callable):
    """`do(model, inputs)` on fake tensors of the CPU. Raises what the reference raises, and where it needs contents."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        model, inputs, _ = reference.build(workload, 0, dtype, "cpu")
        return do(model, inputs)


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """Inside, torch._dynamo is a stand-in that holds `disable` alone, unless it is loaded already.

    torch imports it at the first call of many functions, only to keep torch.compile out of them (torch/_compile.py).
    Whatever needs more of it fails.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    stand_in = types.ModuleType("torch._dynamo")
    stand_in.disable = lambda function, *_, **__: function
    sys.modules["torch._dynamo"] = torch._dynamo = stand_in
    try:
        yield
    finally:
        del sys.modules["torch._dynamo"], torch._dynamo
