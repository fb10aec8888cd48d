"""The least work of each module in a step, with its submodules and without: FLOPs, and the bytes that come in and go
out. Tensors that are made inside and used nowhere else count nothing: a fused kernel need not write them."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..hardware.work import ModuleWork
from . import blank, tensor_trees, traffic, work
from .model_file import Arguments, ModelFile
from .traffic import place, spanned_bytes


@dataclass(frozen=True)
class Account:
    """What an operation counts for: a call of a module, by path and number."""

    path: str
    number: int
    whole: bool


class Inside:
    """Which calls of which modules run now, the innermost last."""

    def __init__(self):
        self._stack: list[tuple[str, int]] = [("", 0)]
        self._calls: dict[str, int] = defaultdict(int)

    def enter(self, path: str) -> None:
        self._stack.append((path, self._calls[path]))
        self._calls[path] += 1

    def leave(self) -> None:
        self._stack.pop()

    def accounts(self) -> frozenset[Account]:
        """The innermost module's own, and those of all modules around."""
        whole = (Account(*call, whole=True) for call in self._stack)
        return frozenset([Account(*self._stack[-1], whole=False), *whole])


@contextlib.contextmanager
def watched(module: torch.nn.Module, enter: Callable[[str, str], None], leave: Callable[[], None]) -> Iterator[None]:
    """Inside, `enter(path, class)` and `leave()` are called around each call of a submodule. A scripted one cannot be
    watched."""
    hooks = []
    for path, one in module.named_modules():
        if path and not isinstance(one, torch.jit.ScriptModule):
            name = type(one).__name__
            hooks.append(one.register_forward_pre_hook(lambda *_, path=path, name=name: enter(path, name)))
            hooks.append(one.register_forward_hook(lambda *_: leave(), always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class WorkLog(TorchDispatchMode):
    """Sees each operation, and which modules it is part of. It keeps all tensors, so they must be blank."""

    def __init__(self, inside: Inside, state: list[torch.Tensor]):
        super().__init__()
        self._inside = inside
        self._flops_of = work.product_registry()
        self._state = {place(tensor) for tensor in state}
        self._flops: dict[Account, dict[str, int]] = defaultdict(lambda: defaultdict(int))  # by dtype
        self._bytes: dict[Account, dict[str, int]] = defaultdict(lambda: defaultdict(int))  # by dtype
        self._reads: dict[Account, dict[int, dict]] = defaultdict(lambda: defaultdict(dict))  # by place and part of it
        self._writes: dict[Account, dict[int, int]] = defaultdict(dict)  # by place
        self._makers: dict[int, frozenset[Account]] = {}  # by place
        self._kept: list[torch.Tensor] = []
        self.attention_in: str | None = None  # the dtype of attention that is being called

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        self._kept += (made := tensor_trees.input_tensors([result]))
        if not (function.is_view or function.namespace != "aten" or function._overloadpacket in traffic.ASKING):
            given = tensor_trees.input_tensors([list(args), list(kwargs.values())])
            self._count_flops(function, args, kwargs, result, given)
            self._count_bytes(function, given, made)
        return result

    def add_flops(self, count: int, dtype: str) -> None:
        for account in self._inside.accounts():
            self._flops[account][dtype] += count

    def _count_flops(self, function, args, kwargs, result, given: list[torch.Tensor]) -> None:
        operation = function._overloadpacket
        if operation in self._flops_of:
            first = 1 if operation in work.ADDED_FIRST else 0
            names = [work.number_name(tensor.dtype) or "fp32" for tensor in given[first : first + 2]]
            dtype = self.attention_in or work.widest(names)  # torch's plain attention computes in fp32
            self.add_flops(int(self._flops_of[operation](*args, **kwargs, out_val=result)), dtype)

    def _count_bytes(self, function, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        operation, accounts = function._overloadpacket, self._inside.accounts()
        over, writing = function._schema.is_mutable, operation in traffic.WRITING
        for at, tensor in enumerate(given):
            if at == 0 and over and writing:
                continue  # it is written, and not read
            picks = at == 0 and (operation in traffic.PICKING or operation in traffic.SUMMING_ROWS)
            self._read(accounts, tensor, made[0] if picks and made else tensor, picks)
        if over and given:
            self._write(accounts, given[0], spanned_bytes(given[-1] if writing else given[0]))
        for tensor in made:
            if all(place(tensor) != place(one) for one in given):
                self._makers[place(tensor)] = accounts
                for account in accounts:
                    self._bytes[account].setdefault(tensor_trees.dominant_dtype([tensor]), 0)

    def _read(self, accounts: frozenset, tensor: torch.Tensor, part: torch.Tensor, picks: bool) -> None:
        at, size = place(tensor), spanned_bytes(part)
        makers = self._makers.get(at, frozenset())
        for account in accounts - makers:
            parts = self._reads[account][at]
            parts[len(parts) if picks else traffic.extent(tensor)] = size
        for account in accounts:
            self._bytes[account][tensor_trees.dominant_dtype([tensor])] += size
        self._go_out(makers - accounts, tensor)

    def _go_out(self, makers: frozenset, tensor: torch.Tensor) -> None:
        """What these made is used elsewhere."""
        whole = tensor.untyped_storage().nbytes()
        for account in makers:
            self._writes[account][place(tensor)] = min(whole, self._writes[account].get(place(tensor), 0) + whole)

    def _write(self, accounts: frozenset, tensor: torch.Tensor, size: int) -> None:
        for account in accounts - self._makers.get(place(tensor), frozenset()):
            self._writes[account][place(tensor)] = size

    def calls(self, outputs: list[torch.Tensor]) -> list[ModuleWork]:
        """The work of each call, in the order of the first operation. outputs: of the model."""
        for tensor in outputs:
            self._go_out(self._makers.get(place(tensor), frozenset()), tensor)
        return [self._of(account) for account in sorted(self._bytes, key=lambda one: (one.path, one.number, one.whole))]

    def _of(self, account: Account) -> ModuleWork:
        sums = {at: sum(parts.values()) for at, parts in self._reads[account].items()}
        from_state = sum(size for at, size in sums.items() if at in self._state)
        flops, sizes = self._flops[account], self._bytes[account]
        return ModuleWork(
            path=account.path,
            whole=account.whole,
            flops=sum(flops.values()),
            bytes_state=from_state,
            bytes_in=sum(sums.values()) - from_state,
            bytes_out=sum(self._writes[account].values()),
            dtype=max(flops or sizes, key=(flops or sizes).get),
        )


class Spared(torch.overrides.TorchFunctionMode):
    """Counts attention in the dtype that it is called with, less the FLOPs that a causal mask spares."""

    def __init__(self, log: WorkLog):
        super().__init__()
        self._log = log

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is not torch.nn.functional.scaled_dot_product_attention:
            return function(*args, **kwargs)
        dtype = work.number_name(args[0].dtype if args else kwargs["query"].dtype) or "fp32"
        self._log.add_flops(-work.CausalAttention.spared_by(*args, **kwargs), dtype)
        self._log.attention_in = dtype
        try:
            return function(*args, **kwargs)
        finally:
            self._log.attention_in = None


def of_step(file: ModelFile, workload: str) -> list[ModuleWork] | None:
    """The work of a forward pass, run on blank tensors; None where the model needs the contents of tensors."""
    arguments = file.arguments(workload)
    for run in (on_meta, on_fake):
        try:
            return run(file, arguments)
        except Exception:
            continue
    return None


def on_meta(file: ModelFile, arguments: Arguments) -> list[ModuleWork]:
    both = [*file.module.named_parameters(), *file.module.named_buffers()]
    state = {name: tensor.detach().to("meta") for name, tensor in both}
    given = arguments.mapped(lambda tensor: tensor.to("meta"))
    with blank.without_compilers(), torch.device("meta"):
        return logged(
            file,
            [*state.values()],
            lambda: torch.func.functional_call(file.module, state, given.args, given.kwargs),
        )


def on_fake(file: ModelFile, arguments: Arguments) -> list[ModuleWork]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = arguments.mapped(mode.from_tensor)
        state = [*file.module.parameters(), *file.module.buffers()]
        return logged(file, state, lambda: file.module(*given.args, **given.kwargs))


def logged(file: ModelFile, state: list[torch.Tensor], run: Callable) -> list[ModuleWork]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inside = Inside()
    log = WorkLog(inside, state)
    plain = torch.backends.mkldnn.flags(enabled=False)
    watching = watched(file.module, lambda path, _: inside.enter(path), inside.leave)
    with torch.no_grad(), watching, sdpa_kernel(SDPBackend.MATH), plain, Spared(log), log:
        outputs = tensor_trees.input_tensors([run()])
    return log.calls(outputs)
