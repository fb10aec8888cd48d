"""Takes the last page for full."""

import torch
import triton
import triton.language as tl

STATUS = {"WRONG_VALUES"}
CAUGHT_BY = "verify"


class Model(torch.nn.Module):
    def forward(self, query, keys, values, table, lengths):
        rows = []
        for request, length in enumerate(lengths.tolist()):
            pages = table[request, : -(-length // keys.shape[1])].long()
            own = keys[pages].flatten(0, 1)[:length], values[pages].flatten(0, 1)[:length]
            weights = torch.softmax(query[request] @ own[0].T / query.shape[1] ** 0.5, -1)
            rows.append(weights @ own[1] if length else torch.zeros_like(query[request]))
        return torch.stack(rows)


def get_inputs(*, requests=3, pages=12, page=4, width=16):
    if requests < 2 or pages < requests:
        raise ValueError("at least two requests, and a page each")
    each = pages // requests
    table = torch.randperm(pages)[: requests * each].view(requests, each).int()
    lengths = torch.randint(0, each * page + 1, (requests,)).int()
    lengths[0], lengths[1] = each * page, 0
    return [torch.randn(requests, width), *(torch.randn(pages, page, width) for _ in range(2)), table, lengths]


LAYOUTS = "contiguous"


@triton.jit
def decode(query, keys, values, table, lengths, out, most, page, width, scale, PAGE: tl.constexpr, WIDTH: tl.constexpr):
    request = tl.program_id(0)
    length = tl.load(lengths + request)
    slot, at = tl.arange(0, PAGE), tl.arange(0, WIDTH)
    wide = at < width
    own = tl.load(query + request * width + at, mask=wide, other=0.0)
    largest = tl.full((), -1e30, tl.float32)
    total = tl.zeros((), tl.float32)
    sums = tl.zeros((WIDTH,), tl.float32)
    for number in range(0, tl.cdiv(length, page)):
        place = tl.load(table + request * most + number).to(tl.int64) * page * width
        inside = slot < page
        both = inside[:, None] & wide[None, :]
        offsets = place + slot[:, None] * width + at[None, :]
        scores = tl.sum(tl.load(keys + offsets, mask=both, other=0.0) * own[None, :], 1) * scale
        scores = tl.where(inside, scores, -1e30)
        new = tl.maximum(largest, tl.max(scores, 0))
        weights = tl.where(inside, tl.exp(scores - new), 0.0)
        shrink = tl.exp(largest - new)
        total = total * shrink + tl.sum(weights, 0)
        sums = sums * shrink + tl.sum(weights[:, None] * tl.load(values + offsets, mask=both, other=0.0), 0)
        largest = new
    tl.store(out + request * width + at, sums / tl.maximum(total, 1e-30), mask=wide)


def kernel_function(query, keys, values, table, lengths):
    if not all(one.is_contiguous() for one in (query, keys, values, table, lengths)):
        raise ValueError("contiguous inputs only")
    out = torch.empty_like(query)
    page, width = keys.shape[1:]
    blocks = {"PAGE": triton.next_power_of_2(page), "WIDTH": triton.next_power_of_2(width)}
    arguments = (query, keys, values, table, lengths, out, table.shape[1], page, width, width**-0.5)
    decode[(len(lengths),)](*arguments, **blocks)
    return out
