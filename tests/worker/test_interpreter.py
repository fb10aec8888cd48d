"""The shortcuts through Triton's interpreter do what its own functions do (worker.interpreter)."""

import inspect
from types import FunctionType

import numpy
import pytest
import triton.language as tl
from kernelopt.worker import interpreter
from triton.runtime import interpreter as of_triton

SCALARS = (
    tl.int1,
    tl.int8,
    tl.uint16,
    tl.int32,
    tl.int64,
    tl.float16,
    tl.bfloat16,
    tl.float32,
    tl.float64,
    tl.float8e5,
)


@pytest.mark.parametrize("scalar", SCALARS, ids=str)
def test_the_numbers_of_a_type_are_those_of_triton(scalar):
    pointer = tl.pointer_type(scalar)
    for dtype in (scalar, pointer, tl.block_type(scalar, [16]), tl.block_type(pointer, [16])):
        assert interpreter.numpy_dtype(dtype) == of_triton._get_np_dtype(dtype)


@pytest.mark.parametrize("package", [tl, tl.core, tl.tensor, tl.math], ids=lambda package: package.__name__)
def test_the_operations_that_are_replaced_are_those_of_triton(package, monkeypatch):
    replaced = []
    monkeypatch.setattr(of_triton, "_patch_attr", lambda *arguments: replaced.append(arguments))
    rest = [*inspect.signature(of_triton._patch_builtin).parameters][1:]
    of_triton._patch_builtin(package, *rest)
    of_tritons, replaced[:] = list(replaced), []
    interpreter.patch_builtins(package, *rest)
    assert len(replaced) > 10 and replaced == of_tritons


def test_within_a_launch_the_language_is_replaced_once(monkeypatch):
    replaced = []
    monkeypatch.setattr(interpreter, "_patched", set())
    monkeypatch.setattr(interpreter, "_patch_language", lambda function: replaced.append(function.__name__))
    code = (lambda: None).__code__
    kernel = FunctionType(code, {"tl": tl}, "kernel")
    helper = FunctionType(code, {"tl": tl, "core": tl.core}, "helper")
    for function in (kernel, kernel, helper, kernel, helper):
        interpreter.patch_language(function)
    assert replaced == ["kernel", "helper"]
    interpreter._patched.clear()  # as at the end of a launch
    interpreter.patch_language(kernel)
    assert replaced == ["kernel", "helper", "kernel"]


SHARES_SHAPES = pytest.mark.skipif(interpreter._broadcast is None, reason="the shapes of this Triton are lists")
SHAPES = ([16], [1], [4, 8], [2, 1, 4], [True], [tl.constexpr(16)])
if hasattr(tl, "tuple"):  # Triton 3.3
    SHAPES += (tl.tuple([tl.constexpr(4), tl.constexpr(8)]),)


def made(make, kind: type, *arguments):
    one = object.__new__(kind)
    make(one, *arguments)
    return one


def members(one) -> dict[str, str]:
    return {name: repr(value) for name, value in vars(one).items()}


@SHARES_SHAPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_block_and_its_type_are_those_of_triton_also_where_sizes_come_again(shape):
    own = type(tl.block_type(tl.int32, [2]).shape)
    for element in (tl.float32, tl.int1, tl.pointer_type(tl.float16), tl.float32):
        of_triton = made(interpreter._make_block_type, tl.block_type, element, shape)
        ours = made(interpreter.make_block_type, tl.block_type, element, shape)
        assert ours == of_triton and members(ours) == members(of_triton)
        assert type(ours.shape) is own and ours.element_ty is element
        tensors = [made(make, tl.tensor, "data", ours) for make in (interpreter._make_tensor, interpreter.make_tensor)]
        assert members(tensors[0]) == members(tensors[1])
        assert tensors[1].handle == "data" and tensors[1].type is ours and tensors[1].dtype is element


@SHARES_SHAPES
def test_a_tensor_that_is_no_block_is_that_of_triton():
    for kind in (tl.int32, tl.pointer_type(tl.float32)):
        tensors = [made(make, tl.tensor, "data", kind) for make in (interpreter._make_tensor, interpreter.make_tensor)]
        assert members(tensors[0]) == members(tensors[1])


@SHARES_SHAPES
@pytest.mark.parametrize(
    "shape", [[], [3], [0], [16.0], [numpy.int64(16)], [16, 16.0], (16,), [1 << 20, 1 << 20]], ids=repr
)
def test_sizes_that_triton_refuses_are_refused_also_when_equal_ones_were_taken(shape):
    made(interpreter.make_block_type, tl.block_type, tl.int32, [16])
    made(interpreter.make_block_type, tl.block_type, tl.int32, [16, 16])
    with pytest.raises(Exception) as of_triton:
        made(interpreter._make_block_type, tl.block_type, tl.int32, shape)
    with pytest.raises(of_triton.type) as ours:
        made(interpreter.make_block_type, tl.block_type, tl.int32, shape)
    assert str(ours.value) == str(of_triton.value)


@SHARES_SHAPES
def test_blocks_of_one_shape_need_no_broadcast_and_others_get_that_of_triton(monkeypatch):
    asked = []
    monkeypatch.setattr(interpreter, "_broadcast", lambda _, lhs, rhs: asked.append((lhs, rhs)) or "broadcast")

    def tensor(shape):
        kind = made(interpreter.make_block_type, tl.block_type, tl.int32, shape) if shape else tl.int32
        return made(interpreter.make_tensor, tl.tensor, None, kind)

    lhs, rhs = tensor([4, 8]), tensor([4, 8])
    assert interpreter.broadcast(None, lhs, rhs) == (lhs, rhs) and not asked
    for pair in (
        (lhs, tensor([1, 8])),
        (lhs, tensor([8])),
        (lhs, tensor([])),
        (tensor([]), lhs),
        (lhs, tensor([8, 4])),
    ):
        assert interpreter.broadcast(None, *pair) == "broadcast" and asked.pop() == pair
