"""A reference on blank tensors: they have a shape and a dtype and no contents, so nothing is computed.

There are two kinds. Meta tensors cost nothing. Fake tensors also know their device and take real ones beside them,
but their first use imports torch._dynamo, which takes as long as importing torch. So fake tensors are the second try.
The third is for references that loop over offsets or lengths: fake tensors beside real whole numbers. The fourth is for
offsets that are drawn by shares or scores: small floats are real there too.
"""

import contextlib
import sys
import types
from collections.abc import Callable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from . import problem, tensor_trees

UNWATCHED = contextlib.nullcontext()
SMALL = 1 << 20  # elements: scores of 16384 tokens for 64 experts


def on_meta(
    reference: problem.Reference,
    workload: str,
    dtype: str | None,
    do: Callable,
    sizes: dict[str, int] | None = None,
    seed: int = 0,
    within: contextlib.AbstractContextManager | None = None,
    watch: contextlib.AbstractContextManager = UNWATCHED,
):
    """`do(model, inputs)` on meta tensors. Raises what the reference raises, and where it needs contents or mixes in
    tensors that lie on a device. sizes: other values for the workload's keyword sizes. within: see Reference.build.
    watch: a mode that sees all operations, those that make the model and the inputs as well."""
    reference = reference.apart("meta")
    with without_compilers(), torch.device("meta"), watch:
        model, inputs, _ = reference.build(workload, seed, dtype, "meta", sizes, within)
        with reference.on("meta"):
            return do(model.to("meta"), inputs)


def inputs_on_meta(
    reference: problem.Reference,
    workload: str,
    dtype: str | None,
    do: Callable,
    sizes: dict[str, int] | None = None,
    seed: int = 0,
):
    """`do(model, inputs)` on meta tensors beside real ones of at most SMALL elements, such as offsets by random shares.
    `do` must not call the model. Raises what making them raises, and where it needs the contents of large tensors."""
    apart = reference.apart("inputs on meta")
    if apart is reference:
        raise NotImplementedError("what the file keeps between its calls would hold tensors without contents")
    with without_compilers(), LargeOnMeta():
        model, inputs, _ = apart.build(workload, seed, dtype, "cpu", sizes)
        return do(model, inputs)


class LargeOnMeta(TorchDispatchMode):
    """Inside, a new tensor of more than SMALL elements is a meta tensor, and so is what meta tensors give."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = tensor_trees.input_tensors([*args, *kwargs.values()])
        if not tensors and any(argument.name == "device" for argument in function._schema.arguments):
            new = function(*args, **{**kwargs, "device": "meta"})
            return new if new.numel() > SMALL else function(*args, **kwargs)
        if any(tensor.is_meta for tensor in tensors) and not all(tensor.is_meta for tensor in tensors):
            refuse_unknown(function, args, kwargs, lambda tensor: tensor.is_meta)
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        return function(*args, **kwargs)


def refuse_unknown(function, args: tuple, kwargs: dict, is_blank: Callable[[torch.Tensor], bool]) -> None:
    """NotImplementedError where an operation on blank tensors writes into a real one."""
    if not all(map(is_blank, written(function, args, kwargs))):
        raise NotImplementedError(f"{function} writes unknown numbers into a real tensor")


def on_fake(reference: problem.Reference, workload: str, dtype: str | None, do: Callable, seed=0, watch=UNWATCHED):
    """`do(model, inputs)` on fake tensors of the CPU. Raises what the reference raises, and where it needs contents."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    reference = reference.apart("fake")
    with FakeTensorMode(allow_non_fake_inputs=True), watch:
        model, inputs, _ = reference.build(workload, seed, dtype, "cpu")
        with reference.on("cpu"):
            return do(model, inputs)


def beside_whole_numbers(
    reference: problem.Reference, workload: str, dtype: str | None, do: Callable, seed: int = 0, watch=UNWATCHED
):
    """`do(model, inputs)` on fake tensors of the CPU, with the contents of what whole numbers alone decide. Raises what
    the reference raises, and where it needs the contents of other numbers."""
    return _beside_real_ones(reference, workload, dtype, do, seed, watch, real_floats=0)


def beside_small_numbers(
    reference: problem.Reference, workload: str, dtype: str | None, do: Callable, seed: int = 0, watch=UNWATCHED
):
    """The same, with the contents of new tensors of at most SMALL floats as well."""
    return _beside_real_ones(reference, workload, dtype, do, seed, watch, real_floats=SMALL)


def _beside_real_ones(reference, workload, dtype, do, seed: int, watch, real_floats: int):
    from torch._subclasses.fake_tensor import FakeTensorMode

    reference = reference.apart("fake")
    with FakeTensorMode(allow_non_fake_inputs=True), RealNumbers(real_floats), watch:
        model, inputs, _ = reference.build(workload, seed, dtype, "cpu")
        with reference.on("cpu"):
            return do(model, inputs)


class RealNumbers(TorchDispatchMode):
    """Inside a FakeTensorMode: a new tensor of whole numbers, or of at most so many floats, is a real one, and so is
    what real tensors give."""

    def __init__(self, floats: int):
        super().__init__()
        self._floats = floats

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

        kwargs = kwargs or {}
        tensors = tensor_trees.input_tensors([*args, *kwargs.values()])
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            new = None if tensors else function(*args, **kwargs)
            floats = new.numel() if isinstance(new, torch.Tensor) and new.is_floating_point() else 0
            if tensors or floats <= self._floats:
                with unset_fake_temporarily():
                    return function(*args, **kwargs)
            return new
        refuse_unknown(function, args, kwargs, lambda tensor: isinstance(tensor, FakeTensor))
        return function(*args, **kwargs)


def is_blank(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return tensor.is_meta or isinstance(tensor, FakeTensor)


def written(function, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that an operation writes, by its schema."""
    given = dict(zip((each.name for each in function._schema.arguments), args, strict=False)) | kwargs
    names = [each.name for each in function._schema.arguments if each.alias_info and each.alias_info.is_write]
    return tensor_trees.input_tensors([given[name] for name in names if name in given])


BLANK = (on_meta, on_fake, beside_whole_numbers, beside_small_numbers)


def on_shapes(
    reference: problem.Reference,
    workload: str,
    dtype: str | None,
    device: str,
    do: Callable,
    decisive: tuple[type[Exception], ...] = (),
    watch: contextlib.AbstractContextManager = UNWATCHED,
    seed: int = 0,
):
    """`do(model, inputs)` on the first blank tensors that it can run on, else on real ones on `device`. decisive:
    exceptions that are raised at once, since no other tensors help. watch: see on_meta. seed: of real numbers."""
    try:
        return on_shapes_alone(reference, workload, dtype, do, decisive, watch, seed)
    except decisive:
        raise
    except Exception:
        with watch:
            model, inputs, _ = reference.build(workload, seed, dtype, device)
            with reference.on(device):
                return do(model, inputs)


def on_shapes_alone(
    reference: problem.Reference,
    workload: str,
    dtype: str | None,
    do: Callable,
    decisive: tuple[type[Exception], ...] = (),
    watch: contextlib.AbstractContextManager = UNWATCHED,
    seed: int = 0,
):
    """The same without real ones: raises what the reference raises on the last blank tensors."""
    for on_blank in BLANK[:-1]:
        try:
            return on_blank(reference, workload, dtype, do, seed=seed, watch=watch)
        except decisive:
            raise
        except Exception:
            continue
    return BLANK[-1](reference, workload, dtype, do, seed=seed, watch=watch)


def itself(value, *_, **__):
    return value


# By module: what torch takes from it while it runs on meta tensors, whose sizes are plain numbers.
STAND_INS = {
    "torch._dynamo": {"disable": itself},
    "sympy": {"Basic": type("Basic", (), {})},
    "torch.fx.experimental.symbolic_shapes": {
        **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious"), itself),
        "_advise_is_size": itself,  # torch 2.6, for each new tensor
        **dict.fromkeys(("definitely_true", "statically_known_true", "size_hint", "guarding_hint_or_throw"), itself),
        **dict.fromkeys(("has_hint", "has_guarding_hint"), lambda _: True),
        **dict.fromkeys(("is_nested_int", "free_unbacked_symbols"), lambda _: False),
        "sym_and": lambda *conditions: all(conditions),
        "sym_or": lambda *conditions: any(conditions),
        "sym_eq": lambda a, b: tuple(a) == tuple(b) if isinstance(a, list | tuple) else a == b,
    },
}


@contextlib.contextmanager
def without_compilers() -> Iterator[None]:
    """Inside, stand-ins take the place of modules that torch imports for the sake of torch.compile, unless they are
    loaded already.

    torch imports torch._dynamo at the first call of many functions, only to keep torch.compile out of them, and sympy
    to ask whether a size is a plain number. That takes as long as importing torch. Whatever needs more of these modules
    fails.
    """
    absent = {name: types.ModuleType(name) for name in STAND_INS if name not in sys.modules}
    for name, module in absent.items():
        vars(module).update(STAND_INS[name])
    sys.modules.update(absent)
    if dynamo := absent.get("torch._dynamo"):
        torch._dynamo = dynamo
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
        if dynamo:
            del torch._dynamo
