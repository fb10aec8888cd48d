"""The shortcuts through Triton's interpreter do what its own functions do (worker.interpreter)."""

import inspect
from types import FunctionType

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
