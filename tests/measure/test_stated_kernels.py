"""The examples of docs/declarations.md, kind by kind: a right kernel passes, and a wrong one does not. torch on the CPU
stands in for kernels here."""

import re

import pytest
from conftest import BUNDLE
from written_tasks import judge

PAGE = (BUNDLE / "docs" / "declarations.md").read_text()
EXAMPLES = dict(re.findall(r"^### ([^\n]+)\n\n```python\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE))

# How a kernel in the words of the reference becomes another right one, where the declaration is about that.
RIGHT = {
    "Sampling": (
        "return torch.softmax(logits, -1)",
        "generator = torch.Generator().manual_seed(seed)\n"
        "        return torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)[:, 0]",
    ),
    "Top-k and argmax with ties": (
        "return best.values, best.indices",
        "last = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices\n"
        "        return best.values, (scores.shape[-1] - 1 - last)[:, :4]",
    ),
    "Argmax of a product": (
        "return (x @ vocabulary.t()).argmax(-1)",
        "return len(vocabulary) - 1 - (x @ vocabulary.t()).flip(-1).argmax(-1)",
    ),
    "Routing of experts": ("experts.argsort(stable=True)", "(experts * 1000 - torch.arange(len(experts))).argsort()"),
    "Quantisation": ("x / scale", "x * (1 / scale) * (1 + 2**-14)"),
    "Padded batches": (
        "return torch.softmax(x, -1)",
        "return torch.where(real(x, lengths)[..., None], torch.softmax(x, -1), 7.0)",
    ),
    "Gated delta rule": ("state * torch.exp(gate[token])", "(state * torch.exp(gate[token])).half().float()"),
    "Contiguous inputs": (
        "torch.maximum(x, y)",
        "torch.maximum(*(t.as_strided(t.shape, (t.shape[1], 1)) for t in (x, y)))",
    ),
    "Backward pass": (
        "dx, dw = torch.autograd.grad(y, (x, weight), dy)",
        "normal = nn.functional.layer_norm(x, x.shape[-1:])\n"
        "            dw = (dy * normal).sum(0)\n"
        "            dx, = torch.autograd.grad(y, (x,), dy)",
    ),
}
# What makes the right one wrong.
WRONG = {
    "Addition and norm in place": ("residual.add_(x)", "residual = residual + x"),
    "Rotary embedding in place": (
        "query.unflatten(-1, (-1, head_size)), key",
        "query.unflatten(-1, (-1, head_size)), key.clone()",
    ),
    "Gradients over the inputs": ("logits.copy_(gradient)", "logits[:-1] = gradient[:-1]"),
    "Output as an argument": ("out.copy_(", "out[1:] = (lambda y: y[1:])("),
    "Optimiser step": ("momentum.mul_(0.99).add_(0.01 * gradient)", "pass"),
    "Write into a KV cache": ("real = slots >= 0", "real, slots = slots >= -1, slots.clamp(min=0)"),
    "Paged decode": (".flatten(0, 1)[:length]", ".flatten(0, 1)"),
    "Decode by offsets": ("indices[first:last]", "indices[first : max(first + 1, last)]"),
    "State update": ("states[slots] = new", "pass"),
    "Causal convolution": ("states[slot] = window[:, -3:]", "pass"),
    "Gated delta rule": ("(value[token] - key[token] @ state)", "(value[token] - 0.9 * key[token] @ state)"),
    "Low-rank adapters": ("output[request] +=", "output[request] ="),
    "Dropout with a seed": ("rand(seed,", "rand(seed + 1,"),
    "Sampling": ("manual_seed(seed)", "manual_seed(0)"),
    "Rejection sampling": (".long().cumprod(0)", ".long()"),
    "Gating into arguments": ("best.indices)", "best.indices - best.indices % 2)"),
    "Mixture of experts": ("range(len(inner))", "range(len(inner) - 1)"),
    "Top-k and argmax with ties": ("(scores.shape[-1] - 1 - last)", "(scores.shape[-1] - 1 - last).clamp(max=38)"),
    "Argmax of a product": ("len(vocabulary) - 1", "(len(vocabulary) - 1) // 2"),
    "Routing of experts": ("* 1000", "* 0"),
    "Quantisation": ("torch.round(x * (1 / scale) * (1 + 2**-14))", "(x / scale)"),
    "Ragged batches": ("x[first:last]", "x[first : max(first + 1, last)]"),
    "Sequences end to end": ("apart < window", "apart <= window"),
    "Merged attention states": ("torch.exp(s_b - largest)", "torch.exp(s_b.clamp(min=-9.0) - largest)"),
    "Padded batches": ("torch.where(real(x, lengths)", "torch.where(real(x, lengths - 1)"),
    "Contiguous inputs": (" * 2", " * 2.01"),
    "Backward pass": ("(dy * normal).sum(0)", "dy.sum(0)"),
}


def kernel_of(reference: str, *replaced: tuple[str, str]) -> str:
    """A kernel in the words of the reference, with these replacements."""
    text = reference.replace("class Model(", "class ModelNew(")
    for old, new in replaced:
        assert old in text, old
        text = text.replace(old, new)
    return text


def test_each_example_has_a_wrong_kernel():
    assert EXAMPLES.keys() == WRONG.keys() and RIGHT.keys() <= EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_the_page_is_judged_as_it_says(interpreter, tmp_path, name):
    reference = EXAMPLES[name]
    right = [RIGHT[name]] if name in RIGHT else []
    found = judge(interpreter, tmp_path, reference, kernel_of(reference, *right))
    assert found["status"] == "OK" and "at its own sizes alone" not in found["summary"], found["summary"]
    found = judge(interpreter, tmp_path, reference, kernel_of(reference, *right, WRONG[name]), only_these_shapes=True)
    assert found["status"] in ("WRONG_VALUES", "NONFINITE"), found["summary"]
    if name in RIGHT and name not in ("Sampling", "Backward pass"):  # what the declaration is for
        bare = re.sub(r"^(COMPARE|LAYOUTS) =", r"IGNORED =", reference, flags=re.MULTILINE)
        own = "LAYOUTS" not in reference
        found = judge(interpreter, tmp_path, bare, kernel_of(reference, *right), only_these_shapes=own)
        assert found["status"] == "WRONG_VALUES"


def test_a_tie_may_stand_where_the_reference_leaves_an_index_as_it_was(interpreter, tmp_path):
    reference = """import torch
from torch import nn


class Model(nn.Module):
    def forward(self, scores, out):
        out.copy_(scores.argmax(-1))


def get_inputs(*, rows=30, words=6):
    return [torch.randint(0, 3, (rows, words)).float(), torch.zeros(rows, dtype=torch.int32)]


MUTATES = ("out",)
COMPARE = {"out": {"ties": "scores"}}
"""
    last = ("scores.argmax(-1)", "scores.shape[-1] - 1 - scores.flip(-1).argmax(-1)")
    assert judge(interpreter, tmp_path, reference, kernel_of(reference, last))["status"] == "OK"
    least = ("scores.argmax(-1)", "scores.argmin(-1)")
    assert judge(interpreter, tmp_path, reference, kernel_of(reference, least))["status"] == "WRONG_VALUES"
