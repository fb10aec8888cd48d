"""The text of the function that an exported kernel is called by. Pure."""

from ..session.interface import TENSOR
from .artefact import Export

TORCH_DTYPES = {"fp64": "torch.float64", "fp32": "torch.float32", "fp16": "torch.float16", "bf16": "torch.bfloat16"}

MODEL = '''
@functools.cache
def exported_model(device):
    """The model on a device, made once."""
    return ModelNew({constructor}).to({place})
'''
BIND = '''
def exported_bind(model, weights):
    """Put the weights in the place of the model's own, without a copy."""
    for name, tensor in weights.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        slots = module._parameters if leaf in module._parameters else module._buffers
        slots[leaf] = tensor
'''
ENTRY = '''
@torch.no_grad()
def {name}({arguments}):
    """The kernel, called as it was judged: without gradients."""
{body}
'''


def imports(export: Export) -> str:
    """The imports of the function's text."""
    return "import functools\n\nimport torch\n" if export.is_model else "import torch\n"


def text(export: Export, name: str, before: list[str], result: str) -> str:
    """The function `name`, which takes the inputs and then the weights. before: its first lines. result: what it
    returns, with @ for the call of the kernel."""
    own = text_of_call(export)
    lines = [*before, *own[:-1], f"return {result.replace('@', own[-1])}"]
    body = "\n".join(f"    {line}" for line in lines)
    arguments = ", ".join([*export.inputs, *export.weights.values()])
    entry = ENTRY.format(name=name, arguments=arguments, body=body)
    return "\n".join([*helpers(export), entry])


def helpers(export: Export) -> list[str]:
    if not export.is_model:
        return []
    place = f"device, {TORCH_DTYPES[export.dtype]}" if export.dtype else "device"
    made = MODEL.format(constructor=", ".join(export.interface.constructor), place=place)
    return [made, BIND] if export.weights else [made]


def text_of_call(export: Export) -> list[str]:
    """The lines that call the kernel; the last one is the call itself."""
    inputs = ", ".join(export.inputs)
    if not export.is_model:
        return [f"kernel_function({inputs})"]
    lines = [f"exported = exported_model({tensor_of(export)}.device)"]
    if export.weights:
        pairs = ", ".join(f'"{name}": {argument}' for name, argument in export.weights.items())
        lines.append(f"exported_bind(exported, {{{pairs}}})")
    return [*lines, f"exported({inputs})"]


def tensor_of(export: Export) -> str:
    """An argument that is a tensor."""
    pairs = zip(export.inputs, export.interface.kinds, strict=True)
    tensors = [name for name, kind in pairs if kind == TENSOR]
    return [*tensors, *export.weights.values()][0]
