"""A model as its user states it, in a file of Python:

    load()         the module
    inputs()       its arguments: a list or tuple of positional ones, or a dict of keywords
    workloads()    optional: {name: a function like inputs}; the first is the default where there is no inputs()
    loss(outputs)  optional, for training: a number to minimise
    advance(inputs, tokens)  optional, for a model with a cache: the inputs of the next step, after tokens (requests,)

The file is the user's own and is trusted. Files beside it can be imported.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from . import problem, state, tensor_trees
from .contract import ContractError, WrongModelFile
from .faults import describe

Tensors = dict[str, torch.Tensor]  # what a run leaves, by what it is
SEED = 0  # of the weights, the inputs and each run, so that runs differ by what was replaced alone


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call."""

    args: tuple
    kwargs: dict

    def tensors(self) -> list[torch.Tensor]:
        return tensor_trees.input_tensors([self.args, self.kwargs])

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Arguments":
        """The same with other tensors."""
        args, kwargs = tensor_trees.map_tensors((self.args, self.kwargs), function)
        return Arguments(args, kwargs)

    def floating(self, dtype: torch.dtype) -> "Arguments":
        """The same with floating tensors in another dtype."""
        return self.mapped(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    def copied(self) -> "Arguments":
        """The same in memory of their own, each tensor with its strides."""
        return self.mapped(lambda tensor: tensor_trees.copied(tensor.detach(), str(tensor.device)))


@dataclass(frozen=True)
class Habits:
    """What a run of a model does beside computing its outputs: it draws random numbers; it changes its buffers."""

    random: bool
    remembers: bool


class ModelFile:
    """The module of a file, on `device`, and the arguments of its workloads. training: it is in training mode, and runs
    keep what gradients need. phase: is told what is done with the model (context.Context.phase)."""

    def __init__(
        self, path: Path, device: str, training: bool = False, phase: Callable[[str], None] = lambda name: None
    ):
        self.name, self.device, self.training, self._told = path.name, device, training, phase
        self.phase(f"loading {self.name}")
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        with self._blamed("it"):
            self._file = problem.load_module(path)
        if not hasattr(self._file, "load"):
            raise WrongModelFile(f"{self.name} defines no load(), which returns the model")
        with self._seeded(), self._blamed("load()"):
            module = self._file.load()
        if not isinstance(module, torch.nn.Module):
            raise WrongModelFile(f"load() of {self.name} returns no torch.nn.Module but {module!r:.80}")
        self._refuse_compiled(module)
        self.module = module.to(device).train(training)
        self.workloads = self._workloads()
        self._habits: dict[str, Habits] = {}

    def phase(self, name: str) -> None:
        """Tell what is done with the model now."""
        self._doing = name
        self._told(name)

    def _workloads(self) -> dict[str, Callable]:
        makers = {"default": self._file.inputs} if hasattr(self._file, "inputs") else {}
        if hasattr(self._file, "workloads"):
            with self._blamed("workloads()"):
                makers |= self._file.workloads()
        if not makers or not all(map(callable, makers.values())):
            raise WrongModelFile(
                f"{self.name} must define inputs(), or workloads() that returns a dict of names to such functions"
            )
        return makers

    def _refuse_compiled(self, model: torch.nn.Module) -> None:
        """Its operators would be hidden, and its step would be taken for an eager one."""
        for path, one in model.named_modules():
            if type(one).__name__ == "OptimizedModule" or one._compiled_call_impl is not None:
                compiled = f"a model in which '{path}' is compiled" if path else "a compiled model"
                raise WrongModelFile(
                    f"load() of {self.name} returns {compiled}; return it as it is without torch.compile: the tools "
                    "compile it themselves"
                )

    def chosen(self, workload: str | None) -> str:
        """The name of a workload, the default one for None. Raises WrongModelFile for an unknown one."""
        name = workload or next(iter(self.workloads))
        if name not in self.workloads:
            known = ", ".join(self.workloads)
            raise WrongModelFile(f"{self.name} has no workload '{name}'; it has: {known}")
        return name

    def arguments(self, workload: str) -> Arguments:
        """Fresh arguments of a workload, the same each time."""
        return self._as_arguments(self.workloads[workload], f"what makes the inputs of workload '{workload}'")

    def _as_arguments(self, make: Callable, part: str) -> Arguments:
        with self._seeded(), self._blamed(part):
            made = make()
        if isinstance(made, dict):
            arguments = Arguments((), made)
        elif isinstance(made, list | tuple):
            arguments = Arguments(tuple(made), {})
        else:
            raise WrongModelFile(
                f"{self.name}: {part} returns a {type(made).__name__}; return a list of positional arguments, or a "
                "dict of keywords"
            )
        return arguments.mapped(lambda tensor: tensor.to(self.device))

    def run(self, module: torch.nn.Module, arguments: Arguments):
        """The outputs of a call that begins with the same seed each time."""
        torch.manual_seed(SEED)
        return self.call(module, arguments)

    def call(self, module: torch.nn.Module, arguments: Arguments):
        """The outputs of a call, with gradients only in training."""
        with torch.set_grad_enabled(self.training), self._blamed():
            return module(*arguments.args, **arguments.kwargs)

    def advanced(self, arguments: Arguments, tokens: torch.Tensor) -> Arguments:
        """The arguments of the next step of a language model: by advance() of the file, or else with tokens (requests,)
        at the end of the one input of tokens."""
        if hasattr(self._file, "advance"):
            given = arguments.kwargs or list(arguments.args)
            return self._as_arguments(lambda: self._file.advance(given, tokens), "advance()")
        whole = [one for one in arguments.tensors() if not one.is_floating_point() and one.ndim == 2]
        if len(whole) != 1:
            raise WrongModelFile(
                "--generate needs one 2-d input of whole numbers, the tokens, or advance(inputs, tokens) in "
                f"{self.name}"
            )
        longer = torch.cat([whole[0], tokens[:, None].to(whole[0].dtype)], 1)
        return arguments.mapped(lambda one: longer if one is whole[0] else one)

    def habits(self, workload: str) -> Habits:
        """What a run of the file's own module does."""
        if workload not in self._habits:
            arguments = self.arguments(workload)
            torch.manual_seed(SEED)
            seeded = random_state()
            with self.buffers_restored() as changed:
                self.call(self.module, arguments)
                drew = not state.all_identical(seeded, random_state())
            self._habits[workload] = Habits(drew, bool(changed))
        return self._habits[workload]

    def runs(self, workload: str) -> int:
        """How many runs of a model are compared."""
        return 2 if self.habits(workload).remembers else 1

    def left_by(self, module: torch.nn.Module, workload: str) -> Tensors:
        """What runs of a module like the file's own leave (`left`). The buffers then get their former contents."""
        with self.buffers_restored():
            return self.left(module, workload, self.arguments(workload), self.module)

    def left(self, module: torch.nn.Module, workload: str, arguments: Arguments, holder: torch.nn.Module) -> Tensors:
        """What a run leaves. A model that changes its buffers runs twice: what is wrong with a cache shows only once
        something is in it. holder: of the buffers."""
        made: Tensors = {}
        if self.runs(workload) == 2:
            made = {f"{name} of a first run": one for name, one in outputs_of(self.run(module, arguments)).items()}
        return made | left_of(self.run(module, arguments), arguments, holder)

    @contextlib.contextmanager
    def buffers_restored(self) -> Iterator[list[torch.Tensor]]:
        """What runs inside may change the model's buffers, or bind them to other tensors; they become what they were.
        It yields a list, which then holds those that were changed."""
        contents = [(tensor, tensor.clone()) for tensor in self.module.buffers()]
        bound = [(one._buffers, dict(one._buffers)) for one in self.module.modules() if isinstance(one._buffers, dict)]
        changed: list[torch.Tensor] = []
        try:
            yield changed
        finally:
            for buffers, before in bound:
                changed += [one for name, one in before.items() if buffers.get(name) is not one]
                buffers.clear()
                buffers.update(before)
            for tensor, before in contents:
                if not state.identical(tensor, before):
                    changed.append(tensor)
                    tensor.copy_(before)

    def loss(self, outputs) -> torch.Tensor:
        """What training minimises: loss() of the file, `.loss` of the outputs, or else the mean square of all floating
        outputs."""
        if hasattr(self._file, "loss"):
            with self._blamed("loss()"):
                return self._file.loss(outputs)
        if isinstance(own := getattr(outputs, "loss", None), torch.Tensor):
            return own
        floating = [tensor for tensor in tensor_trees.input_tensors([outputs]) if tensor.requires_grad]
        if not floating:
            raise WrongModelFile(f"no output of {self.name} needs gradients; define loss(outputs) there")
        return sum(tensor.float().square().mean() for tensor in floating)

    def backward(self, outputs) -> None:
        """The backward pass of the loss."""
        loss = self.loss(outputs)
        with self._blamed("the backward pass"):
            loss.backward()

    def submodule(self, path: str) -> torch.nn.Module:
        """The module at a dotted path, the model itself for "". Raises WrongModelFile, naming what is there."""
        try:
            return self.module.get_submodule(path)
        except AttributeError:
            raise WrongModelFile(f"the model has no module '{path}'; {self._near(path)}") from None

    def _near(self, path: str) -> str:
        """The names at the first place where a path leads nowhere."""
        parts = path.split(".")
        known = [".".join(parts[:count]) for count in range(len(parts))]
        last = next(at for at in reversed(known) if at in dict(self.module.named_modules()))
        names = ", ".join(name for name, _ in self.module.get_submodule(last).named_children()) or "none"
        return f"{f'modules in {last!r}' if last else 'its modules'}: {names}"

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        torch.manual_seed(SEED)
        with torch.device(self.device), torch.no_grad():
            yield

    @contextlib.contextmanager
    def _blamed(self, part: str | None = None) -> Iterator[None]:
        """Errors inside the block are told as the file's. part: of it; None for what is done with the model now."""
        try:
            yield
        except (ContractError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            failed = f"{self.name}: {part} failed" if part else f"{self.name} failed while {self._doing}"
            raise WrongModelFile(f"{failed}: {describe(error)['message']}") from error


def random_state() -> list[torch.Tensor]:
    """What random numbers follow from, on the CPU and on the GPU in use."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def set_random_state(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for one in states[1:]:
        torch.cuda.set_rng_state(one)


def left_of(outputs, arguments: Arguments, holder: torch.nn.Module) -> Tensors:
    """Copies of the outputs of a call, of its inputs as it left them, and of the buffers of `holder`."""
    inputs = {f"input {number} afterwards": one for number, one in enumerate(arguments.tensors())}
    buffers = {buffer_key(name): one for name, one in holder.named_buffers()}
    return outputs_of(outputs) | {name: one.detach().clone() for name, one in (inputs | buffers).items()}


def buffer_key(name: str) -> str:
    return f"buffer {name} afterwards"


def outputs_of(outputs) -> Tensors:
    """Copies of the tensors in a result."""
    return {f"output {at}": one.detach().clone() for at, one in enumerate(tensor_trees.input_tensors([outputs]))}
