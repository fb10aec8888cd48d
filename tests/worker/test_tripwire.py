"""What a candidate may not replace (worker.tripwire)."""

import contextlib
import gc
import secrets
import signal
import sys
import time
from types import ModuleType

import pytest
import torch
from kernelopt.worker import accuracy, tripwire
from kernelopt.worker.faults import CheatError


def other_code(monkeypatch) -> None:
    monkeypatch.setattr(accuracy.compare, "__code__", (lambda *_: {}).__code__)


REPLACED = {
    "a function": lambda patch: patch.setattr(time, "perf_counter", lambda: 0.0),
    "its code": other_code,
    "its defaults": lambda patch: patch.setattr(accuracy.compare, "__defaults__", ()),
    "a function of torch": lambda patch: patch.setattr(torch, "matmul", torch.mul),
    "the code of a bound method": lambda patch: patch.setattr(
        secrets.choice.__func__, "__code__", (lambda self, some: some[0]).__code__
    ),
    "a method": lambda patch: patch.setattr(torch.Tensor, "__repr__", lambda _: ""),
    "an inherited method": lambda patch: patch.setattr(torch.Tensor, "__eq__", lambda *_: True, raising=False),
    "a class": lambda patch: patch.setattr(torch.cuda, "Event", type("Event", (), {})),
    "a module": lambda patch: patch.setitem(sys.modules, accuracy.__name__, ModuleType(accuracy.__name__)),
    "all modules": lambda patch: patch.setattr(sys, "modules", dict(sys.modules)),
}


@pytest.mark.parametrize("replace", REPLACED.values(), ids=REPLACED)
def test_what_is_replaced_is_seen_and_nothing_else(monkeypatch, replace):
    snapshot = tripwire.Snapshot()
    snapshot.check()
    monkeypatch.setattr(torch, "of_another_module", 1, raising=False)
    monkeypatch.setattr(time, "of_another_module", 1, raising=False)
    snapshot.check()
    with monkeypatch.context() as patch, pytest.raises(CheatError, match="was replaced"):
        replace(patch)
        snapshot.check()
    snapshot.check()


LEFT = {
    "a hook of all modules": lambda ends: ends.callback(
        torch.nn.modules.module.register_module_forward_hook(lambda *_: None).remove
    ),
    "a signal handler": lambda ends: ends.callback(
        signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, lambda *_: None)
    ),
    "a callback of the garbage collector": lambda ends: ends.callback(
        gc.callbacks.remove, gc.callbacks.append(print) or print
    ),
    "a mode of torch": lambda ends: ends.enter_context(torch.device("cpu")),
}


class SameAsAll:
    def __eq__(self, other):
        return True

    __hash__ = object.__hash__

    def __call__(self, *_):
        pass


def test_a_handler_that_calls_itself_equal_to_any_other_is_seen():
    snapshot, before = tripwire.Snapshot(), signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        signal.signal(signal.SIGUSR1, SameAsAll())
        with pytest.raises(CheatError, match="left a signal handler behind"):
            snapshot.check()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_behind_is_named(name):
    snapshot = tripwire.Snapshot()
    with contextlib.ExitStack() as ends:
        LEFT[name](ends)
        with pytest.raises(CheatError, match=f"the kernel left {name} behind"):
            snapshot.check()
    snapshot.check()


def test_callbacks_of_a_load_are_taken_out_of_the_collectors_own_list(monkeypatch):
    calls, snapshot = [], tripwire.Snapshot()
    before = list(gc.callbacks)
    gc.callbacks.append(lambda *_: calls.append(1))
    monkeypatch.setattr(gc, "callbacks", [])
    with pytest.raises(CheatError, match="left a callback of the garbage collector behind"):
        snapshot.check()
    snapshot.take_out_callbacks()
    snapshot.check()
    monkeypatch.undo()
    calls.clear()
    gc.collect()
    assert gc.callbacks == before and not calls
