"""How a file can break the problem contract (see problem.py), and what this bundle cannot handle."""


class ContractError(Exception):
    """A file does not fulfil the contract."""


class UnknownWorkload(ContractError):
    """The reference has no workload of that name."""


class TooLargeToInterpret(ContractError):
    """The inputs hold more elements than the CPU interpreter gets through."""


class CastOfQuantised(ContractError):
    """The task's dtype would cast 8-bit data, or the scales beside it."""


class UnsupportedInput(ContractError):
    """The reference is sound, but this bundle cannot handle its inputs."""


class InvalidDeclaration(UnsupportedInput):
    """The reference declares something that cannot be, or leaves out what it must declare."""


class WrongModelFile(ContractError):
    """The file of a model (model_file.py) lacks something, fails, or has no part of that name."""


class NotCut(ContractError):
    """A part of a model cannot be cut out, or put back, as it is."""


class NotFollowed(NotCut):
    """torch.export does not get through a part of a model."""


def unstorable(kind: str) -> ContractError:
    return ContractError(
        f"get_inputs or get_init_inputs gives a {kind}, which cannot be stored; give tensors, numbers, strings, "
        "dtypes, None, and lists, dicts, named tuples and dataclasses of them"
    )
