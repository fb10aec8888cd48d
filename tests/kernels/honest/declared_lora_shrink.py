"""Products of segments with adapters of several ranks; columns beyond a rank are never written. As in SGLang."""

import itertools

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, x, weights, offsets, adapters, ranks):
        y, ends = x.new_zeros(len(x), weights.shape[1]), offsets.tolist()
        for number, (first, last) in enumerate(itertools.pairwise(ends)):
            adapter = int(adapters[number])
            rank = int(ranks[adapter])
            y[first:last, :rank] = x[first:last] @ weights[adapter, :rank].t()
        return y


def get_inputs(*, segments=4, columns=12):
    lengths = torch.randint(0, 4, (segments,))
    lengths[-1] = 3
    offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    adapters = torch.arange(1, segments + 1) % 3
    adapters[-1] = 2
    x = torch.randn(int(offsets[-1]), columns)
    return [x, torch.randn(3, 4, columns), offsets, adapters, torch.tensor([0, 2, 4])]


def written(x, offsets, adapters, ranks):
    rank = ranks[adapters].repeat_interleave(offsets.diff().long())
    return torch.arange(4, device=x.device)[None] < rank[:, None]


COMPARE = {0: {"valid": written}}
LAYOUTS = "contiguous"


@triton.jit
def shrink(x, weights, offsets, adapters, ranks, y, columns, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    number, at, of = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, RANKS)
    adapter = tl.load(adapters + number)
    rank = tl.load(ranks + adapter)
    both = (of < rank)[:, None] & (at < columns)[None, :]
    own = tl.load(weights + (adapter * RANKS + of[:, None]) * columns + at[None, :], mask=both, other=0.0)
    for token in range(tl.load(offsets + number), tl.load(offsets + number + 1)):
        row = tl.load(x + token * columns + at, mask=at < columns, other=0.0)
        tl.store(y + token * RANKS + of, tl.sum(own * row[None, :], 1), mask=of < rank)


def kernel_function(x, weights, offsets, adapters, ranks):
    most, columns = weights.shape[1:]
    y = torch.empty(len(x), most, dtype=x.dtype, device=x.device)
    sizes = {"RANKS": most, "BLOCK": triton.next_power_of_2(columns)}
    shrink[(len(adapters),)](x, weights, offsets, adapters, ranks, y, columns, **sizes)
    return y
