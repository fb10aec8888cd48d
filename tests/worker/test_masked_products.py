"""What masks spare of the FLOPs of attention (worker.masked_products)."""

import contextlib
import re
import resource
import textwrap
from pathlib import Path

import pytest
from kernelopt.worker import mask_numbers, masked_products, problem, work

TOKENS, KEYS, WIDTH, WIDE, HEADS = 40, 56, 8, 16, 6
CAUSAL = TOKENS * (TOKENS + 1) // 2
ALL = TOKENS * TOKENS
TEXT = """
import math, torch, torch.nn as nn, torch.nn.functional as F
INF = float("inf")
def attention(scores, v): return torch.softmax(scores, -1) @ v
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(64, 64, dtype=torch.bool).tril())
        self.register_buffer("bias", torch.full((64, 64), -INF).triu(1), persistent=False)
        self.plain = torch.ones(64, 64).triu(1)
        self.register_buffer("starts", torch.tensor([[row // 8 * 8 for row in range(40)]]).mT)
        self.weight = nn.Parameter(torch.full((40, 40), -INF).triu(1))
    def forward(self, q, k, v, mask):
        at = torch.arange(q.shape[2], device=q.device)
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
{body}
def get_inputs():
    return [torch.randn(2, 3, 40, 8), torch.randn(2, {key_heads}, {keys}, 8), torch.randn(2, {key_heads}, {keys}, 16), {mask}]
"""
LATER = "torch.ones(40, 40, dtype=torch.bool).triu(1)"


def written(tmp_path, body: str, keys: int = TOKENS, key_heads: int = 3, mask: str = LATER):
    path = tmp_path / "reference_file.py"
    path.write_text(TEXT.format(body=textwrap.indent(body, 8 * " "), keys=keys, key_heads=key_heads, mask=mask))
    return path


def counted(tmp_path, body: str, keys: int = TOKENS, key_heads: int = 3, mask: str = LATER, dtype: str | None = None):
    path = written(tmp_path, body, keys, key_heads, mask)
    return work.estimate(problem.Reference(path), "default", dtype, "cpu")


def pairs(tmp_path, body: str, **options) -> float:
    """The FLOPs that count in units of a query's with a key, over all heads."""
    return counted(tmp_path, body, **options).work.flops / (2 * HEADS * (WIDTH + WIDE))


MASKS = {
    "masked_fill": "attention(s.masked_fill(later, -INF), v)",
    "masked_fill, finite": "attention(s.masked_fill(later, -1e9), v)",
    "masked_fill, least": "attention(s.masked_fill(later, torch.finfo(s.dtype).min), v)",
    "masked_fill in place": "attention(s.masked_fill_(later, -INF), v)",
    "where": "attention(torch.where(later, -INF, s), v)",
    "where, least": "attention(torch.where(~later, s, torch.finfo(s.dtype).min), v)",
    "where, a tensor": "attention(torch.where(later, torch.tensor(-INF, device=q.device, dtype=s.dtype), s), v)",
    "where, a full tensor": "attention(torch.where(later, torch.full([], -1e9, device=q.device), s), v)",
    "added": "attention(s + torch.full((40, 40), -INF, device=q.device).triu(1), v)",
    "added in place": "s += torch.full((40, 40), -INF, device=q.device).triu(1)\nreturn attention(s, v)",
    "added, written in place": "m = torch.empty(40, 40, device=q.device).fill_(-INF).triu_(1)\nreturn attention(s + m, v)",
    "added, set": "m = torch.zeros(40, 40, device=q.device)\nm[later] = -INF\nreturn attention(m + s, v)",
    "added, rows set": (
        "m = torch.zeros(40, 40, device=q.device)\nfor row in range(40): m[row, row + 1 :] = -1e9\n"
        "return attention(s + m, v)"
    ),
    "subtracted": "attention(s - later * 1e10, v)",
    "multiplied and subtracted": "m = 1.0 * ~later\nreturn attention(s * m - 1e10 * (1 - m), v)",
    "added to a bias that inputs hold": "attention(s + (v[..., :1].mT + later * -1e9), v)",
    "ranges": "attention(s.masked_fill(~(at[:, None] >= at), -INF), v)",
    "tril": "attention(s.masked_fill(torch.tril(torch.ones(40, 40, device=q.device)) == 0, -INF), v)",
    "tril_indices": (
        "m = torch.full((40, 40), -INF, device=q.device)\nrow, key = torch.tril_indices(40, 40, device=q.device)\n"
        "m[row, key] = 0\nreturn attention(s + m, v)"
    ),
    "of all heads": "attention(s.masked_fill(later[None, None].expand(2, 3, 40, 40), -INF), v)",
    "of all heads, inverted": "attention(s.masked_fill(~~later[None, None].expand(2, 3, 40, 40), -INF), v)",
    "a buffer": "attention(s.masked_fill(~self.seen[:40, :40], -INF), v)",
    "a buffer that is added": "attention(s + self.bias[:40, :40], v)",
    "an attribute": "attention(s.masked_fill(self.plain[:40, :40].bool(), -INF), v)",
    "capped": "attention((torch.tanh(s / 50) * 50).masked_fill(later, -INF), v)",
    "scaled after": "attention(s.masked_fill(later, -INF) * 0.5, v)",
    "in fp32": "(torch.softmax(s.masked_fill(later, -INF), -1, dtype=torch.float32).to(v.dtype)) @ v",
    "by flat heads": "(torch.softmax(s.flatten(0, 1).masked_fill(later, -INF), -1) @ v.flatten(0, 1)).view(2, 3, 40, 16)",
    "keys first": "torch.softmax(s.mT.masked_fill(later.mT, -INF), -2).mT @ v",
    "einsum": (
        "s = torch.einsum('bhqd,bhkd->bqhk', q, k)\np = torch.softmax(s.masked_fill(later[:, None], -INF), -1)\n"
        "return torch.einsum('bqhk,bhkd->bqhd', p, v)"
    ),
    "masked again by inputs": "attention(s.masked_fill(later, -INF).masked_fill(mask, -INF), v)",
    "by hand": (
        "s = s.masked_fill(later, -INF)\ne = torch.exp(s - s.amax(-1, keepdim=True))\n"
        "return e / e.sum(-1, keepdim=True) @ v"
    ),
    "by hand, max": (
        "s = s + later * -1e9\ne = torch.exp(s - s.max(-1, keepdim=True).values)\n"
        "return (e / e.sum(-1, keepdim=True)) @ v"
    ),
    "with its log-sum": "s = s.masked_fill(later, -INF)\nreturn (s - s.logsumexp(-1, True)).exp() @ v, s.logsumexp(-1)",
    "added in a product": (
        "g = torch.baddbmm(self.bias[:40, :40], q.flatten(0, 1), k.flatten(0, 1).mT)\n"
        "return attention(g, v.flatten(0, 1)).view(2, 3, 40, 16)"
    ),
    "blocks, repeated": (
        "m = later[::8, ::8].repeat_interleave(8, 0).repeat_interleave(8, 1)\n"
        "return attention(s.masked_fill(m | later, -INF), v)"
    ),
    "row blocks": (
        "outs = []\nfor i in range(0, 40, 8):\n"
        "    m = at[i : i + 8, None] < at\n"
        "    outs.append(attention((q[:, :, i : i + 8] @ k.mT).masked_fill(m, -INF), v))\nreturn torch.cat(outs, 2)"
    ),
    "beside a sink": (
        "s = s.masked_fill(later, -INF)\nsink = q[..., :1].float()\n"
        "return torch.softmax(torch.cat([s, sink.to(s.dtype)], -1), -1)[..., :-1] @ v"
    ),
    "beside a sink, less the highest": (
        "s = torch.cat([v[..., :1], s + torch.full((40, 40), -INF, device=q.device).triu(1)], dim=-1)\n"
        "s = s - s.max(-1, keepdim=True).values\nreturn torch.softmax(s, -1)[..., 1:] @ v"
    ),
    "masked beside a sink": (
        "m = torch.zeros(40, 41, dtype=torch.bool, device=q.device)\nm[:, :40] = later\n"
        "s = torch.cat([s, v[..., :1]], -1).masked_fill(m, -INF)\nreturn torch.softmax(s, -1)[..., :40] @ v"
    ),
    "of keys side by side": (
        "both = torch.cat([q @ k[:, :, :24].mT, q @ k[:, :, 24:].mT], -1)\n"
        "return attention(both.masked_fill(later, -INF), v)"
    ),
    "torch's attention": "F.scaled_dot_product_attention(q, k, v, attn_mask=~later)",
    "torch's attention, added": "F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[:40, :40])",
    "torch's attention, of all heads": "F.scaled_dot_product_attention(q, k, v, attn_mask=~later[None, None])",
    "torch's attention, causal": "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
}


def body(text: str) -> str:
    """Its scores are s, where it names them."""
    scores = re.search(r"\bs\b", text)
    text = text if "return" in text else f"return {text}"
    return f"s = q @ k.mT / 3\n{text}" if scores and "einsum" not in text else text


@pytest.mark.parametrize("text", MASKS.values(), ids=MASKS)
def test_a_mask_that_inputs_do_not_decide_spares_products(tmp_path, text):
    assert pairs(tmp_path, body(text)) == CAUSAL


@pytest.mark.parametrize(
    "form", ["masked_fill", "where, a tensor", "in fp32", "torch's attention", "a buffer that is added"]
)
def test_it_does_so_in_16_bits(tmp_path, form):
    assert pairs(tmp_path, body(MASKS[form]), dtype="bf16") == CAUSAL


OTHER_SHAPES = {  # body, options, pairs
    "window": (
        "m = (at[:, None] >= at) & (at[:, None] - at < 5)\nreturn attention(s.masked_fill(~m, -INF), v)",
        {},
        40 * 5 - 10,
    ),
    "offset": (
        "m = torch.ones(40, 56, dtype=torch.bool, device=q.device).tril(16)\nreturn attention(s.masked_fill(~m, -INF), v)",
        {"keys": 56},
        40 * 16 + CAUSAL,
    ),
    "blocks, in a buffer of written numbers": (
        "attention(s.masked_fill((self.starts > at) | later, -INF), v)",
        {},
        5 * 8 * 9 // 2,
    ),
    "fewer keys": (
        "attention(s.masked_fill(at[:, None] < torch.arange(24, device=q.device), -INF), v)",
        {"keys": 24},
        24 * 25 // 2 + 16 * 24,
    ),
    "groups, repeated": (
        "k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)\n"
        "return attention((q @ k.mT).masked_fill(later, -INF), v)",
        {"key_heads": 1},
        CAUSAL,
    ),
    "groups, broadcast": (
        "g = q.view(2, 1, 3, 40, 8) @ k[:, :, None].mT\n"
        "return attention(g.masked_fill(later, -INF), v[:, :, None]).view(2, 3, 40, 16)",
        {"key_heads": 1},
        CAUSAL,
    ),
    "groups, folded into rows": (  # masked scores and others meet in a row of the reshape, so only later products spare
        "g = (q.reshape(2, 1, 120, 8) @ k.mT).view(2, 3, 40, 40).masked_fill(later, -INF)\nreturn attention(g, v)",
        {"key_heads": 1},
        CAUSAL,
    ),
    "groups of torch's attention": (
        "F.scaled_dot_product_attention(q, k, v, attn_mask=~later, enable_gqa=True)",
        {"key_heads": 1},
        CAUSAL,
    ),
    "two attentions": (
        "x = attention(s.masked_fill(later, -INF), v)\n"
        "return attention((x[..., :8] @ k.mT).masked_fill(at[:, None] < at - 3, -INF), x)",
        {},
        CAUSAL + CAUSAL + 3 * 40 - 6,
    ),
    "a mask, and none": (
        "attention(s.masked_fill(later, -INF), v) + attention(q @ k.mT, v)",
        {},
        CAUSAL + ALL,
    ),
    "every second head": (
        "m = later & (torch.arange(2, device=q.device)[:, None, None, None] == 0)\n"
        "return attention(s.masked_fill(m, -INF), v)",
        {},
        (CAUSAL + ALL) / 2,
    ),
    "tiles, finite": (
        "outs = []\n"
        "for i in range(0, 40, 8):\n"
        "    m, l, o = (torch.full((2, 3, 8, n), x, device=q.device) for n, x in ((1, -INF), (1, 0.0), (16, 0.0)))\n"
        "    for j in range(0, 40, 8):\n"
        "        t = (q[:, :, i : i + 8] @ k[:, :, j : j + 8].mT).masked_fill(at[i : i + 8, None] < at[j : j + 8], -1e9)\n"
        "        n = torch.maximum(m, t.amax(-1, keepdim=True))\n"
        "        p, a, m = (t - n).exp(), (m - n).exp(), n\n"
        "        l, o = l * a + p.sum(-1, keepdim=True), o * a + p @ v[:, :, j : j + 8]\n"
        "    outs.append(o / l)\n"
        "return torch.cat(outs, 2)",
        {},
        CAUSAL,
    ),
    "rows without keys": ("attention(s.masked_fill(at[:, None] < 10, -INF), v)", {}, 30 * 40),
    "rows without keys, finite": ("attention(s.masked_fill(at[:, None] < 10, -1e9), v)", {}, ALL),
}


HIGHEST = {
    "amax": "s - s.amax(-1, keepdim=True)",
    "max": "s - s.max(-1, keepdim=True).values",
    "max, without its dimension": "s - s.max(3).values[..., None]",
    "added": "s + -s.amax([-1], keepdim=True)",
    "log-sum": "s - s.logsumexp(-1, keepdim=True)",
    "a highest one so far": "s - torch.maximum(torch.tensor(-INF, device=q.device), s.amax(-1, keepdim=True))",
}
LEVEL = {  # mask of scores, pairs
    "filled": ("s.masked_fill(at[:, None] < 10, -1e9)", ALL),
    "added": ("s + torch.where(at[:, None] < 10, -3e4, 0)", ALL),
    "and some of another mask": ("s.masked_fill(at[:, None] < 10, -1e9).masked_fill(later, -INF)", CAUSAL),
    "without numbers": ("s.masked_fill(at[:, None] < 10, -INF)", 30 * 40),
}


@pytest.mark.parametrize(("mask", "expected"), LEVEL.values(), ids=LEVEL)
@pytest.mark.parametrize("less", HIGHEST.values(), ids=HIGHEST)
def test_rows_without_keys_where_softmax_is_written_out(tmp_path, less, mask, expected):
    """It takes their mean, as softmax does: exp(-1e9 + 1e9) is 1."""
    by_hand = f"s = {mask}\ne = ({less}).exp()\nreturn e / e.sum(-1, keepdim=True) @ v"
    assert pairs(tmp_path, body(by_hand)) == expected


@pytest.mark.parametrize(("mask", "expected"), LEVEL.values(), ids=LEVEL)
def test_rows_without_keys_in_softmax(tmp_path, mask, expected):
    assert pairs(tmp_path, body(f"return attention({mask}, v)")) == expected


@pytest.mark.parametrize(("text", "options", "expected"), OTHER_SHAPES.values(), ids=OTHER_SHAPES)
def test_masks_of_other_shapes(tmp_path, text, options, expected):
    assert pairs(tmp_path, body(text), **options) == expected


WHOLE = {
    "none": "attention(s, v)",
    "torch's attention": "F.scaled_dot_product_attention(q, k, v)",
    "an input": "attention(s.masked_fill(mask, -INF), v)",
    "an input that is added": "F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype) * -1e9)",
    "a mask and an input": "attention(s.masked_fill(later & mask, -INF), v)",
    "values of an input": "attention(s.masked_fill(v[:, :, None, :, 0] > 0, -INF), v)",
    "lengths of an input": "attention(s.masked_fill(at >= mask.sum(), -INF), v)",
    "a parameter": "attention(s + self.weight, v)",
    "written over": "m = later.clone()\nm[0] = mask[0]\nm.copy_(mask)\nreturn attention(s.masked_fill(m, -INF), v)",
    "zeros of ReLU": "torch.relu(s) @ v",
    "zeros by a mask": "s.masked_fill(later, 0) @ v",
    "tril": "torch.tril(s) @ v",
    "a slight bias": "attention(s + later * -5, v)",
    "halved": "attention(torch.where(later, s * 0.5, s), v)",
    "capped after": "attention(torch.tanh(s.masked_fill(later, -INF)), v)",
    "returned": "s.masked_fill(later, -INF), s.masked_fill(later, 0) @ v",
    "summed": "s.masked_fill(later, -INF).sum(), attention(s, v)",
    "a sum that leaves the mask out": (
        "m = torch.full((40, 40), -INF, device=q.device)\n"
        "g = torch.baddbmm(m, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0)\n"
        "return attention(g, v.flatten(0, 1))"
    ),
    "two that leave nothing": "e = s.exp()\nreturn s, e @ v",
    "its result": "attention(s, v).masked_fill(at[:, None] > 20, 0)",
    "beside one without a mask": (
        "p = torch.softmax(torch.cat([s.masked_fill(later, -INF), s], -1), -1)\nreturn (p[..., :40] + p[..., 40:]) @ v"
    ),
    "beside a sink, then taken apart": ("s = torch.cat([s, v[..., :1]], -1)[..., :-1]\nreturn s, attention(s, v)"),
    "random": "attention(s.masked_fill(torch.rand(40, 40, device=q.device) > 0.5, -INF), v)",
}


@pytest.mark.parametrize("text", WHOLE.values(), ids=WHOLE)
def test_what_is_not_masked_counts_whole(tmp_path, text):
    found = counted(tmp_path, body(text))
    assert found.work.flops == 2 * HEADS * (WIDTH + WIDE) * ALL and not found.spared_pct


def test_scores_that_are_used_without_their_mask_too_count_whole(tmp_path):
    part = (WIDTH * ALL + WIDE * CAUSAL) / (WIDTH + WIDE)
    assert pairs(tmp_path, body("return attention(s.masked_fill(later, -INF), v), s")) == pytest.approx(part)
    both = "return attention(s.masked_fill(later, -INF), v) + attention(s.masked_fill(later.mT, -INF), v)"
    expected = (WIDTH * ALL + 2 * WIDE * CAUSAL) / (WIDTH + WIDE)
    assert pairs(tmp_path, body(both)) == pytest.approx(expected)
    turned = "return attention(s.masked_fill(later, -INF), v) + attention(s.mT.masked_fill(later, -INF), v)"
    assert pairs(tmp_path, body(turned)) == pytest.approx(expected)
    over = "p = attention(s.masked_fill(later, -INF), v)\ns[..., 0] = v[..., 0]\nreturn p, s"
    assert pairs(tmp_path, body(over)) == pytest.approx(part)
    viewed = "p = attention(s.masked_fill(later, -INF), v)\ns.view(-1).mul_(2)\nreturn p, s"
    assert pairs(tmp_path, body(viewed)) == pytest.approx(part)
    before = "t = s.view(-1)\ns += 1\nreturn attention(s.masked_fill(later, -INF), v), t"
    assert pairs(tmp_path, body(before)) == pytest.approx(part)


def test_a_mask_that_is_too_large_to_be_computed_counts_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(masked_products, "LARGEST", 40 * 40 - 1)
    assert pairs(tmp_path, body(MASKS["masked_fill"])) == ALL
    assert pairs(tmp_path, body(MASKS["ranges"])) == ALL
    assert pairs(tmp_path, body(MASKS["torch's attention, causal"])) == CAUSAL


MADE_IN_STEPS = {  # body, pairs
    "two triangles": ("m = torch.ones(40, 40, device=q.device)\nm = m.triu(3) + m.tril(-6) > 0", 302),
    "many steps": ("m = at[:, None] < at\nfor i in range(40): m = m | (at[:, None] + i == at + 30)", 45),
    "what it is made of is written later": ("a = at.clone()\nm = a[:, None] < a\na += 5\na[3] = 2", CAUSAL),
    "what is written was made for it": (
        "a = torch.zeros(40, 40, device=q.device)\nm, n = a == 1, a\na[:20] = 1\nm = m | (n == 0)",
        20 * 40,
    ),
    "a view of what was made": ("m = torch.ones(64, 64, device=q.device).tril()[None, None, :40, :40] == 0", CAUSAL),
    "a new one like another": ("m = torch.zeros_like(torch.full_like(later, 3)).logical_not().triu(1)", CAUSAL),
}


@pytest.mark.parametrize("piece", [300, 1 << 18])
@pytest.mark.parametrize(("text", "expected"), MADE_IN_STEPS.values(), ids=MADE_IN_STEPS)
def test_masks_are_made_piece_by_piece(tmp_path, monkeypatch, text, expected, piece):
    for module in (mask_numbers, masked_products):
        monkeypatch.setattr(module, "PIECE", piece)
    assert pairs(tmp_path, f"s = q @ k.mT\n{text}\nreturn attention(s.masked_fill(m, -INF), v)") == expected


IN_PIECES = [
    "where, least",
    "added, set",
    "tril",
    "tril_indices",
    "blocks, repeated",
    "keys first",
    "torch's attention",
]


@pytest.mark.parametrize("form", IN_PIECES)
def test_all_forms_are_followed_piece_by_piece(tmp_path, monkeypatch, form):
    for module in (mask_numbers, masked_products):
        monkeypatch.setattr(module, "PIECE", 64)
    assert pairs(tmp_path, body(MASKS[form])) == CAUSAL


DISTANCES = "d = (at[:, None] - at).abs()\n"
MANY_NUMBERS = {  # body, pairs
    "distances, and a mask": (f"{DISTANCES}s = s - d * 0.1 + self.bias[:40, :40]", CAUSAL),
    "low distances": (f"{DISTANCES}s = s + (later * -1e9 - d * 100.0)", CAUSAL),
    "low ones that are still low": ("s = (s + torch.where(later, -2e4 - at * 1.0, -at * 1.0)) * 0.9", CAUSAL),
    "low ones that are no more": ("s = (s + torch.where(later, -2e4 - at * 1.0, -at * 1.0)) * 0.4", ALL),
    "many masks": ("for i in range(12): s = s.masked_fill((at[:, None] + at) % 13 == i, -1e9 - i)", 123),
}


@pytest.mark.parametrize(("text", "expected"), MANY_NUMBERS.values(), ids=MANY_NUMBERS)
def test_masks_of_many_numbers(tmp_path, text, expected):
    assert pairs(tmp_path, f"s = q @ k.mT\n{text}\nreturn attention(s, v)") == expected


def test_more_different_numbers_than_codes_count_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(mask_numbers, "MOST", 3)
    masked = "s = s.masked_fill(at[:, None] < 10, -1e9).masked_fill(later, -INF)\n"
    assert pairs(tmp_path, body(f"{masked}return attention(s, v)")) == ALL
    rows = "s = s.masked_fill(at[:, None] < at, -1e9).masked_fill(at[:, None] < 10, -1e9)\n"
    monkeypatch.setattr(mask_numbers, "MOST", 5)
    assert pairs(tmp_path, body(f"{rows}return attention(s, v)")) == ALL
    assert pairs(tmp_path, body(f"{rows}e = (s - s.amax(-1, True)).exp()\nreturn e / e.sum(-1, True) @ v")) == ALL


@contextlib.contextmanager
def memory(megabytes: int):
    """Inside, this process gets no more than so much beside what it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (megabytes << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


MASK_OF_8192 = {
    "triu": "m = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)\ns = s.masked_fill(m, -math.inf)",
    "added": "s = s + torch.full((n, n), -math.inf, device=q.device).triu(1)",
    "by hand": "e = torch.where(at[:, None] - at >= 0, s, -1e9)\ns = (e - e.amax(-1, True)).clamp(max=0)",
}
LAYERS = "for layer in range(5): s = torch.softmax(s.masked_fill(at[:, None] < at, -math.inf), -1) @ v @ k.mT"


@pytest.mark.parametrize(
    ("mask", "masks", "layers"),
    [*((mask, 1, 1) for mask in MASK_OF_8192.values()), (f"{LAYERS}\n{MASK_OF_8192['triu']}", 2, 6)],
    ids=[*MASK_OF_8192, "made anew in each layer"],
)
def test_a_mask_takes_a_few_bytes_an_element(tmp_path, mask, masks, layers):
    counted(tmp_path, body(MASKS["masked_fill"]))  # all that is loaded at the first count
    path = tmp_path / "large.py"
    path.write_text(f"""
import math, torch, torch.nn as nn
class Model(nn.Module):
    def forward(self, q, k, v):
        n = q.shape[1]
        at, s = torch.arange(n, device=q.device), q @ k.mT
{textwrap.indent(mask, 8 * " ")}
        return torch.softmax(s, -1) @ v
def get_inputs(): return [torch.randn(2, 8192, 8) for _ in range(3)]
""")
    with memory((8192**2 >> 20) * masks + 400):  # of address space, of which each new thread takes some
        found = work.estimate(problem.Reference(path), "default", None, "cpu").work
    assert found.flops == layers * 2 * 2 * (8 + 8) * (8192 * 8193 // 2)


@pytest.mark.parametrize("form", ["masked_fill", "a buffer", "torch's attention", "by hand"])
@pytest.mark.parametrize(
    "looks",
    ["n = int(mask.sum()) * 0", "n = mask.long().tolist()", "F.one_hot(mask.long()) + torch.arange(2).to('cpu')"],
)
def test_references_that_look_at_values(tmp_path, form, looks):
    assert pairs(tmp_path, f"{looks}\n{body(MASKS[form])}") == CAUSAL


def test_it_is_said(tmp_path, run_here):
    path = written(tmp_path, body(MASKS["masked_fill"]))
    done = run_here("estimate_work.py", "--reference", path)
    assert "; masks or symmetric results spare 48.8 % of the products' FLOPs, which are not counted" in done.stdout
    assert "spare" not in run_here("estimate_work.py", "--reference", path, "--flops", 7).stdout


JOINED = {  # what cat makes of it changes nothing of the attention beside it
    "into memory": "o = torch.empty(2, 3, 40, 17)\ntorch.cat([s[..., :1].masked_fill(at[:, None] > 3, -INF), v], -1, out=o)",
    "nothing before": "o = torch.cat([torch.zeros(2, 3, 0, 16), v], 2)",
    "nothing before numbers": "o = torch.cat([torch.zeros(0), q.flatten()])",
    "whole numbers": "o = torch.cat([at[:, None].expand(2, 3, 40, 1), v], -1)",
    "whole numbers of the inputs": "o = torch.cat([torch.ones(2, 3, 40, 1), q.long()], -1)",
    "fp8": "o = torch.cat([torch.zeros(2, 3, 40, 8).to(torch.float8_e4m3fn), q.to(torch.float8_e4m3fn)], -1)",
}


@pytest.mark.parametrize("text", JOINED.values(), ids=JOINED)
def test_cat_of_anything_is_counted(tmp_path, text):
    used = CAUSAL + TOKENS * ("s[" in text)  # its first column without a mask
    found = pairs(tmp_path, body(f"{text}\nreturn attention(s.masked_fill(later, -INF), v), o"))
    assert found == pytest.approx((WIDTH * used + WIDE * CAUSAL) / (WIDTH + WIDE))


def test_flags_of_the_inputs_that_cat_lays_beside_numbers_are_no_zeros(tmp_path):
    found = counted(tmp_path, "return torch.cat([torch.ones(2, 3, 40, 1), q > 0], -1) @ v[..., :9, :]")
    assert found.work.flops == 2 * HEADS * TOKENS * 9 * WIDE and not found.spared_pct


@pytest.mark.parametrize("part", ["[1].detach()", "[:1].detach()", "[0, 1:2].data", "[1]"])
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_parts_of_what_cat_made_need_all_of_it(tmp_path, part, mode):
    text = f"with torch.{mode}():\n    c = torch.cat([s, s], 0){part}\n    c = c.masked_fill(later, -INF).softmax(-1)\nreturn c"
    assert counted(tmp_path, body(text)).work.flops == 2 * HEADS * WIDTH * ALL
