"""Modules that are hard to cut out, in one model: views, writes in place, buffers, several results, sizes that matter."""

import itertools

import torch
import torch.nn as nn

ROWS, WIDTH = 5, 4


class WriteCache(nn.Module):
    def forward(self, cache, keys, slots):
        cache[slots] = keys


class AddNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH).bfloat16())

    def forward(self, x, residual):
        residual.add_(x)
        wide = residual.float()
        wide.mul_(torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6))
        return wide.to(x.dtype) * self.weight, residual


class Views(nn.Module):
    def forward(self, x):
        first, second = x.chunk(2, -1)
        first.mul_(2)
        flat = x.view(-1)
        flat += 1
        positive = torch.relu(second)
        return {"turned": x.transpose(0, 1), "rest": [positive, positive.t(), 3], "nothing": None}


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("mask", torch.ones(9, 9, dtype=torch.bool).tril(), persistent=False)
        self.table = torch.randn(100)

    def forward(self, x):
        self.seen.add_(x.mean(0))
        rows = x.shape[0]
        return torch.where(self.mask[:rows, :rows], x @ x.t(), 0.0) + self.table[:1], self.seen * 2


class Top(nn.Module):
    def forward(self, x):
        values, places = torch.topk(x, 2, -1)
        return torch.softmax(values.float(), -1), places


class OddRows(nn.Module):
    def forward(self, x):
        return (x + 1 if x.shape[0] % 2 else x) * 2


class Count(nn.Module):
    def forward(self, x):
        return x[: int((x > 0).sum())]


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Alias(nn.Module):
    def forward(self, x, same):
        same.add_(1)
        return x * 2


class Exported(nn.Module):
    """It takes another way while it is traced."""

    def forward(self, x):
        return x * (3 if torch.compiler.is_compiling() else 2)


class Counting(nn.Module):
    """It remembers how often it was called."""

    def __init__(self):
        super().__init__()
        self.calls = itertools.count(1)

    def forward(self, x):
        return x * next(self.calls)


class Opaque(nn.Module):
    def forward(self, x, tool):
        return x + tool.shift


class Tool:
    shift = 1.0


class Unused(nn.Module):
    def forward(self, x):
        return x


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.cache, self.norm, self.views, self.state, self.top = WriteCache(), AddNorm(), Views(), Buffers(), Top()
        self.odd, self.count, self.noise, self.alias, self.opaque = OddRows(), Count(), Noise(), Alias(), Opaque()
        self.exported, self.unused = Exported(), Unused()
        self.register_buffer("memory", torch.randn(9, WIDTH))

    def forward(self, x, slots):
        self.cache(self.memory, x[:2], slots=slots)
        normed, residual = self.norm(x.bfloat16(), 2 * x.bfloat16())
        views, copy = self.views(x.clone()), x.clone()
        alias = self.alias(copy, copy.view(-1))
        several = *self.state(x), *self.top(x), self.odd(x), alias, self.opaque(x, Tool()), self.exported(x)
        some = self.count(x.view(-1)).sum() + 0 * self.noise(x).sum()
        return normed, residual, views["turned"].clone(), views["rest"][1], several, some


def load():
    return Parts()


def inputs():
    return [torch.randn(ROWS, WIDTH), torch.tensor([1, 7])]


def workloads():
    return {"six": lambda: [torch.randn(6, WIDTH), torch.tensor([1, 7])]}
