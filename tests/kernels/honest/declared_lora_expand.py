"""A low-rank product of each request's adapter added to the output; -1 is none. As Punica does it."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, x, weights, output, adapters):
        for request, adapter in enumerate(adapters.tolist()):
            if adapter >= 0:
                output[request] += weights[adapter] @ x[request]


def get_inputs(*, requests=3, columns=20):
    adapters = torch.randint(0, 3, (requests,))
    adapters[1:2] = -1
    return [torch.randn(requests, 4), torch.randn(3, columns, 4), torch.randn(requests, columns), adapters]


MUTATES = ("output",)
LAYOUTS = "contiguous"


@triton.jit
def expand(x, weights, output, adapters, columns, RANK: tl.constexpr, BLOCK: tl.constexpr):
    request, adapter = tl.program_id(0), tl.load(adapters + tl.program_id(0))
    at, rank = tl.arange(0, BLOCK), tl.arange(0, RANK)
    inside = (at < columns) & (adapter + tl.zeros_like(at) >= 0)
    row = weights + (adapter * columns + at[:, None]) * RANK + rank[None, :]
    product = tl.sum(tl.load(row, mask=inside[:, None], other=0.0) * tl.load(x + request * RANK + rank)[None, :], 1)
    place = output + request * columns + at
    tl.store(place, tl.load(place, mask=inside, other=0.0) + product, mask=inside)


def kernel_function(x, weights, output, adapters):
    block = triton.next_power_of_2(output.shape[1])
    expand[(len(x),)](x, weights, output, adapters, output.shape[1], RANK=x.shape[1], BLOCK=block)
