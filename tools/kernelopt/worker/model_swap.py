"""A kernel in place of modules of a model, as an operator of torch.library: torch.compile, torch.export and autograd
work on. This file stands alone: put_back.py leaves a copy beside kernel.py and reference.py, for use without the tools.

    import model_swap
    model = model_swap.into(model, "layers.*.mlp")
    model = model_swap.into(model, "layers.*.mlp", where="x.shape[1] == 1")  # the original elsewhere

The operator gets the inputs of the kernel and the parameters and buffers of the module that it stands in for. What it
returns without computing (its fake implementation) comes from the reference. Gradients come from the reference too,
computed again in the backward pass.
"""

import ast
import builtins
import contextlib
import copy
import fnmatch
import functools
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
TYPES = {bool: "bool", int: "SymInt", float: "float", str: "str"}
NAMESPACE = "kernelopt"
MOST_TENSORS = 62  # torch takes 64 arguments, of which the backward pass needs two
NOT_TAKEN = ("forward", "_compiled_call_impl")  # of a module's attributes: they would be called in place of the kernel


class NotReplaced(Exception):
    """The kernel cannot stand in for the module; the message says why."""


class WrongCall(NotReplaced):
    """No module has that path, or the condition is none."""


def into(model: torch.nn.Module, at: str, folder: Path = HERE, where: str | None = None) -> torch.nn.Module:
    """The model with the kernel of `folder` in place of all modules whose paths fit `at`, where * stands for one part
    of a path. where: the calls that the kernel takes, a condition in the names of the module's arguments; the original
    module takes the others. The model itself is changed, but for the path ""."""
    operator = Operator(folder / "kernel.py", folder / "reference.py")
    for path, made in replacements(model, at, operator, where).items():
        if not path:
            return made
        owner, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(owner), leaf, made)
    return model


def replacements(
    model: torch.nn.Module, at: str, operator: "Operator", where: str | None = None
) -> dict[str, "Replacement"]:
    """What stands in for the modules that fit a pattern, by path: one for each module, wherever it stands."""
    originals = {path: model.get_submodule(path) for path in paths(model, at)}
    made = {original: Replacement(original, operator, where) for original in dict.fromkeys(originals.values())}
    return {path: made[original] for path, original in originals.items()}


def paths(model: torch.nn.Module, at: str) -> list[str]:
    """The paths of modules that fit a pattern, all paths of a module that stands at several. WrongCall when there is
    none, naming what is there."""
    every = list(model.named_modules(remove_duplicate=False))
    fitting = {module for name, module in every if fits(name.split("."), at.split("."))}
    if not fitting:
        raise WrongCall(f"the model has no module '{at}'; {near(at.split('.'), [name for name, _ in every if name])}")
    return [name for name, module in every if module in fitting]


def fits(path: list[str], pattern: list[str]) -> bool:
    """Do the parts of a path fit those of a pattern?"""
    return len(path) == len(pattern) and all(map(fnmatch.fnmatchcase, path, pattern))


def near(pattern: list[str], names: list[str]) -> str:
    """The modules at the first place where a pattern leads nowhere. names: paths of all modules."""
    paths = [name.split(".") for name in names]
    depth = max(at for at in range(len(pattern)) if not at or any(fits(path[:at], pattern[:at]) for path in paths))
    inside = [path[depth] for path in paths if len(path) > depth and fits(path[:depth], pattern[:depth])]
    place = f"modules in '{'.'.join(pattern[:depth])}'" if depth else "its modules"
    return f"{place}: {', '.join(dict.fromkeys(inside)) or 'none'}"


def load_file(path: Path):
    """A file of Python as a module of its own."""
    name = f"{path.stem}_of_{path.parent.name}_{len(sys.modules)}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def free_name() -> str:
    """A name that no operator has, from another copy of this file either."""
    return next(name for at in itertools.count() if not hasattr(getattr(torch.ops, NAMESPACE), name := f"cut_{at}"))


class Operator:
    """The operator of a kernel and its reference. inputs: names of the arguments of the kernel. state: names of the
    parameters and buffers of Model. mutated: those of both that are written to. workload: of the model, in which the
    reference was cut out."""

    def __init__(self, kernel: Path, reference: Path, name: str | None = None):
        self._kernel = load_file(kernel)
        self._reference = load_file(reference)
        self._init = list(getattr(self._reference, "get_init_inputs", list)())
        with torch.device("meta"), torch.no_grad():
            self._blank = self._reference.Model(*self._init)
        self.inputs = [*inspect.signature(self._reference.Model.forward).parameters][1:]
        self.state = [name for name, _ in held(self._blank)]
        cut = getattr(self._reference, "CUT", {})
        self.workload = cut.get("workload")
        mutates = getattr(self._reference, "MUTATES", ())
        self.mutated = [one if isinstance(one, str) else self.inputs[one] for one in mutates]
        self.mutated += cut.get("changes", [])
        self.constants = cut.get("constants", [])  # of the state: tensors that no module holds
        self.classes = cut.get("classes", {})
        self._call = getattr(self._reference, "call", None)
        self._bound: dict[tuple, tuple] = {}
        types, self._results = self._signature()
        self._name = name or free_name()
        self.op = self._defined(types)

    def __deepcopy__(self, memo) -> "Operator":
        """Copies of a model share it: it holds no state of theirs."""
        return self

    def check_shape(self, name: str, own: torch.Tensor) -> None:
        """NotReplaced unless a module's parameter or buffer is as large as that of Model."""
        wanted = find(self._blank, name).shape
        if own.shape != wanted:
            raise NotReplaced(
                f"'{name}' is {tuple(own.shape)} in a module that --at takes in, and {tuple(wanted)} in Model: the "
                "kernel is for one size; name with --at only the modules that have it"
            )

    def call(self, module: torch.nn.Module, *args, **kwargs):
        """A call of a module, with the operator in it."""
        state = [find(module, name) for name in self.state]
        if self._call:
            return self._call(lambda *inputs: self.apply(*inputs, *state), module, *args, **kwargs)
        return self.apply(*args, *kwargs.values(), *state)

    def apply(self, *arguments):
        """The operator, or the kernel itself where nobody has to know the operator: that spares some ten microseconds
        of the host."""
        observed = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or any(map(traced, arguments))
        return self.op(*arguments) if observed else self._run(*arguments)

    def _signature(self) -> tuple[list[str], int]:
        """(types of the inputs, number of results), from a call on blank inputs, or on real ones where it needs their
        values."""
        try:
            with torch.device("meta"), torch.no_grad():
                inputs = self._reference.get_inputs()
                results = tensors(self._blank(*inputs))
        except Exception:
            with torch.no_grad():
                inputs = self._reference.get_inputs()
                results = tensors(self._reference.Model(*self._init)(*inputs))
        odd = [one for one in inputs if not isinstance(one, torch.Tensor) and type(one) not in TYPES]
        if odd:
            raise NotReplaced(f"an input is a {type(odd[0]).__name__}; an operator takes tensors and numbers")
        return ["Tensor" if isinstance(one, torch.Tensor) else TYPES[type(one)] for one in inputs], len(results)

    def _defined(self, types: list[str]):
        """The operator, with its schema, its fake implementation and, where it changes nothing, its gradient."""
        names = [*self.inputs[: len(types)], *self.state]
        if len(names) > MOST_TENSORS:
            raise NotReplaced(
                f"the kernel takes {len(names)} tensors, parameters and buffers included, and an operator takes "
                f"{MOST_TENSORS} at most; cut a part inside it"
            )
        kinds = [*types, *["Tensor"] * len(self.state)]
        for at, name in enumerate(names):
            if name in self.mutated:
                kinds[at] = f"Tensor(a{at}!)"
        safe = [argument_name(name) for name in names]
        given = ", ".join(f"{kind} {name}" for kind, name in zip(kinds, safe, strict=True))
        returned = "Tensor" if self._results == 1 else f"({', '.join(['Tensor'] * self._results)})"
        schema = f"({given}) -> {returned}"
        if not self.mutated:
            return self._plain(schema, given)
        mutates = {argument_name(name) for name in self.mutated}
        op = torch.library.custom_op(f"{NAMESPACE}::{self._name}", self._run, mutates_args=mutates, schema=schema)
        op.register_fake(self._fake)
        return op

    def _plain(self, schema: str, given: str):
        """An operator that changes nothing. custom_op would take twice as long to call."""
        self._library = library = torch.library.Library(NAMESPACE, "FRAGMENT")
        library.define(self._name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            library.impl(self._name, self._run, device)
        known = f"{NAMESPACE}::{self._name}"
        torch.library.register_fake(known, self._fake, lib=library)
        if self._results:
            self._gradient = self._defined_gradient(given)
            torch.library.register_autograd(known, self._backward, setup_context=self._keep, lib=library)
        return getattr(getattr(torch.ops, NAMESPACE), self._name).default

    def _run(self, *arguments):
        """The kernel's results, each in memory of its own."""
        inputs, state = self._parts(arguments)
        with torch.no_grad():
            results = tensors(self._kernel_with(state)(*inputs))
        return returned(apart(results, [*inputs, *state]))

    def _fake(self, *arguments):
        """What the reference returns without computing. It gets copies of what it changes."""
        with torch.no_grad(), inner_sizes_dropped() as results:
            results += apart(self._computed(self._blank, arguments), arguments)
        return returned(results)

    def _computed(self, model: torch.nn.Module, arguments) -> list[torch.Tensor]:
        """The results of the reference."""
        inputs, state = self._parts(arguments)
        changed = set(self.mutated)
        inputs = [one.clone() if name in changed else one for name, one in zip(self.inputs, inputs, strict=False)]
        own = {name: one.clone() if name in changed else one for name, one in zip(self.state, state, strict=True)}
        return tensors(torch.func.functional_call(model, own, tuple(inputs)))

    def _parts(self, arguments) -> tuple[list, list]:
        """(inputs, state)"""
        count = len(arguments) - len(self.state)
        return list(arguments[:count]), list(arguments[count:])

    def _kernel_with(self, state: list[torch.Tensor]) -> Callable:
        """The kernel that holds these parameters and buffers, in their own memory where its names are theirs. One that
        packs them is made anew once they have changed."""
        if not hasattr(self._kernel, "ModelNew"):
            return self._kernel.kernel_function
        key = tuple(one.data_ptr() for one in state)
        made, versions = self._bound.get(key, (None, None))
        if made is None or (versions is not None and versions != [one._version for one in state]):
            made = self._with_state(state)
            shares = set(key) <= {one.data_ptr() for _, one in held(made)}
            self._bound[key] = made, None if shares else [one._version for one in state]
        return made

    def _with_state(self, state: list[torch.Tensor]) -> torch.nn.Module:
        device = state[0].device if state else None
        with random_numbers_kept(), torch.device(device) if device else torch.no_grad(), torch.no_grad():
            made = self._kernel.ModelNew(*self._init)
        own = {name: one.detach() for name, one in zip(self.state, state, strict=True)}  # not the model's own objects
        loaded = made.load_state_dict(own, strict=False, assign=True)
        if loaded.unexpected_keys:
            raise NotReplaced(f"ModelNew lacks parameters of Model: {', '.join(loaded.unexpected_keys)}")
        return made.train(False).requires_grad_(False)

    def _defined_gradient(self, given: str):
        """An operator for the backward pass: the gradients that are needed, from the reference computed again."""
        schema = f"({given}, Tensor[] grads, bool[] needed) -> Tensor[]"
        op = torch.library.custom_op(
            f"{NAMESPACE}::{self._name}_backward", self._gradients, mutates_args=(), schema=schema
        )

        def fake(*arguments):
            *inputs, _, needed = arguments
            return [one.new_empty(one.shape) for one in itertools.compress(inputs, needed)]

        op.register_fake(fake)
        return op

    def _gradients(self, *arguments) -> list[torch.Tensor]:
        """The gradients of the arguments that need one. torch.func differentiates inside of an operator too, where
        autograd is off."""
        *inputs, grads, needed = arguments

        def results(*wanted):
            given = iter(wanted)
            mixed = [next(given) if one_needed else one for one, one_needed in zip(inputs, needed, strict=True)]
            return tuple(one for one in self._computed(self.real, mixed) if one.is_floating_point())

        wanted = list(itertools.compress(inputs, needed))
        floating = tuple(grad for grad in grads if grad.is_floating_point())
        return [one.contiguous() for one in torch.func.vjp(results, *wanted)[1](floating)]

    @functools.cached_property
    def real(self) -> torch.nn.Module:
        """The reference with contents, for its constants."""
        with random_numbers_kept():
            return self._reference.Model(*self._init)

    def _keep(self, ctx, inputs, output) -> None:
        ctx.numbers = [None if isinstance(one, torch.Tensor) else one for one in inputs]
        ctx.save_for_backward(*(one for one in inputs if isinstance(one, torch.Tensor)))

    def _backward(self, ctx, *grads):
        saved = iter(ctx.saved_tensors)
        arguments = [next(saved) if number is None else number for number in ctx.numbers]
        needed = list(ctx.needs_input_grad)
        given = [grad for grad in grads if grad is not None]  # none of whole numbers
        made = iter(self._gradient(*arguments, given, needed))
        return tuple(next(made) if wanted else None for wanted in needed)


class StandIn(torch.nn.Module):
    """A module in place of another one. It is of that one's class too, and holds its attributes, parameters, buffers
    and submodules, so that the model may ask for them, and the names in its state stay as they are. classes: of
    results, as CUT names them."""

    def __init__(self, original: torch.nn.Module, classes: dict[str, str]):
        torch.nn.Module.__init__(self)
        with contextlib.suppress(TypeError):  # of another layout in memory
            object.__setattr__(self, "__class__", both(type(self), type(original)))
        own = {name: one for name, one in vars(original).items() if name not in NOT_TAKEN}
        self.__dict__.update({name: one for name, one in own.items() if name not in self.__dict__})
        for members in ("_parameters", "_buffers", "_modules"):
            getattr(self, members).update(getattr(original, members))
        self._non_persistent_buffers_set = set(original._non_persistent_buffers_set)
        self.training = original.training
        self._result_classes = {name: own_class(original, name, home) for name, home in classes.items()}


@functools.cache
def both(stand_in: type, original: type) -> type:
    """The class of what stands in for a module of a class; the stand-in's own where that allows no subclass."""
    try:
        return type(f"{stand_in.__name__}_of_{original.__name__}", (stand_in, original), {})
    except Exception:
        return stand_in


def own_class(module: torch.nn.Module, name: str, home: str) -> type:
    """A class by the name that it has where the module's class is defined, or else in the file `home`."""
    for kind in type(module).__mro__:
        if found := getattr(sys.modules.get(kind.__module__), name, None):
            return found
    return getattr(importlib.import_module(home), name)


class Replacement(StandIn):
    """An operator in place of a module. where: the calls that it takes; the original takes the others."""

    def __init__(self, original: torch.nn.Module, operator: Operator, where: str | None = None):
        super().__init__(original, operator.classes)
        self._operator = operator
        self._where = where and condition(where, original)
        self._others = [sharing(original, self)] if where else []  # a list, which hides it from the model's state
        for name in operator.constants:
            device = next((one.device for _, one in held(self)), None)
            self.register_buffer(name, find(operator.real, name).to(device), persistent=False)
        for name in operator.state:
            try:
                operator.check_shape(name, find(self, name))
            except AttributeError:
                own = ", ".join(known for known, _ in held(self)) or "none"
                raise NotReplaced(f"the module lacks '{name}', which Model has; its own are: {own}") from None

    def fits(self, *args, **kwargs) -> bool:
        """Does the kernel take this call?"""
        return self._where is None or self._where(*args, **kwargs)

    def forward(self, *args, **kwargs):
        if self.fits(*args, **kwargs):
            return self._operator.call(self, *args, **kwargs)
        return self._others[0](*args, **kwargs)

    def train(self, mode: bool = True):
        for one in self._others:
            one.training = mode
        return super().train(mode)


def sharing(original: torch.nn.Module, owner: torch.nn.Module) -> torch.nn.Module:
    """A copy of a module that has its parameters, buffers and submodules from another one, whatever becomes of them."""
    one = copy.copy(original)
    for members in ("_parameters", "_buffers", "_modules"):
        one.__dict__[members] = getattr(owner, members)
    return one


def condition(text: str, module: torch.nn.Module) -> Callable[..., bool]:
    """A function of a module's arguments from an expression in their names. torch.compile makes a guard of it.
    WrongCall where it is no expression, or has other names."""
    signature = inspect.signature(module.forward)
    try:
        names = {node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)}
    except SyntaxError:
        raise WrongCall(f"'{text}' is no expression of Python, such as x.shape[1] == 1") from None
    if unknown := sorted(names - {*signature.parameters, *vars(builtins), "torch"}):
        known = ", ".join(signature.parameters)
        raise WrongCall(f"'{text}' names '{unknown[0]}', and the module's arguments are: {known}")
    blank = [
        one.replace(annotation=one.empty, default=one.default if one.default is one.empty else None)
        for one in signature.parameters.values()
    ]
    given = str(signature.replace(parameters=blank, return_annotation=signature.empty))[1:-1]
    made = eval(f"lambda {given}: bool({text})", {"torch": torch})
    defaults = {one.name: one.default for one in signature.parameters.values() if one.default is not one.empty}
    keyword = {one.name for one in signature.parameters.values() if one.kind == one.KEYWORD_ONLY}
    made.__defaults__ = tuple(value for name, value in defaults.items() if name not in keyword)
    made.__kwdefaults__ = {name: value for name, value in defaults.items() if name in keyword}
    return made


def traced(argument) -> bool:
    """Does anybody follow what is done with this argument: autograd, torch.func, or a tensor of another type?"""
    if not isinstance(argument, torch.Tensor):
        return isinstance(argument, torch.SymInt)
    plain = type(argument) in (torch.Tensor, torch.nn.Parameter)
    wrapped = not plain or torch._C._functorch.is_functorch_wrapped_tensor(argument)
    return wrapped or (argument.requires_grad and torch.is_grad_enabled())


def held(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers, by name."""
    both = itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    )
    return list(both)


def find(module: torch.nn.Module, name: str) -> torch.Tensor:
    """A parameter or buffer by its dotted name."""
    for part in name.split("."):
        module = getattr(module, part)
    return module


def argument_name(name: str) -> str:
    """ "up.weight" as an argument of an operator."""
    return f"state_{name.replace('.', '_')}" if "." in name or name in ("self", "from", "in", "out") else name


def tensors(value) -> list[torch.Tensor]:
    """The tensors of a result in order, those of a dict by key."""
    if isinstance(value, dict):
        value = [item for _, item in sorted(value.items(), key=lambda pair: repr(pair[0]))]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors(item)]
    return [] if value is None else [value]


def returned(results: list[torch.Tensor]):
    """None, one result, or a tuple, as the schema says."""
    return None if not results else results[0] if len(results) == 1 else tuple(results)


def apart(results: list[torch.Tensor], arguments) -> list[torch.Tensor]:
    """The results, each in memory of its own: an operator must not return memory of its arguments, nor one piece of
    memory twice."""
    taken = {place(one) for one in arguments if isinstance(one, torch.Tensor)}
    made = []
    for result in results:
        made.append(result.clone() if place(result) in taken else result)
        taken.add(place(made[-1]))
    return made


def random_numbers_kept():
    """What is made inside, in the middle of a step, leaves the model's dropout as it is. While a CUDA graph is captured
    nobody may ask for a GPU's random numbers."""
    on_gpu = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
    return torch.random.fork_rng([torch.cuda.current_device()] if on_gpu else [])


@contextlib.contextmanager
def inner_sizes_dropped() -> Iterator[list[torch.Tensor]]:
    """For a fake implementation: sizes that depend on the contents of tensors, and that none of the results which the
    block puts into the list has, are nobody's business outside of it."""
    results: list[torch.Tensor] = []
    mode = torch._guards.detect_fake_mode()
    pending = getattr(mode and mode.shape_env, "pending_fresh_unbacked_symbols", [])
    before = list(pending)
    yield results
    sizes = (size.node.expr for one in results for size in one.shape if isinstance(size, torch.SymInt))
    used = {*before, *itertools.chain.from_iterable(size.free_symbols for size in sizes)}
    pending[:] = [symbol for symbol in pending if symbol in used]


def place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
