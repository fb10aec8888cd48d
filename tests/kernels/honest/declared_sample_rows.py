"""An index drawn from each row of probabilities by its running sum and a number of Philox."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, probs, seed):
        return probs * 1.0


def get_inputs(*, rows=256, values=12):
    return [torch.softmax(torch.randn(1, values), -1).repeat(rows, 1), 17]


SAMPLES = {0: {"tvd": 0.04, "draws": 8_000}}
LAYOUTS = "contiguous"


@triton.jit
def sample(probs, out, seed, rows, values, ROWS: tl.constexpr, VALUES: tl.constexpr):
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, VALUES)
    inside = (row < rows)[:, None] & (at < values)[None, :]
    share = tl.load(probs + row[:, None] * values + at[None, :], mask=inside, other=0.0)
    number = tl.rand(seed, row)[:, None] * tl.sum(share, 1)[:, None]
    below = (tl.cumsum(share, 1) <= number) & inside
    tl.store(out + row, tl.minimum(tl.sum(below.to(tl.int32), 1), values - 1).to(tl.int64), mask=row < rows)


def kernel_function(probs, seed):
    rows, values = probs.shape
    out = torch.empty(rows, dtype=torch.int64, device=probs.device)
    # One block for all rows of a larger case compiled for more than a minute.
    sizes = {"ROWS": min(triton.next_power_of_2(rows), 256), "VALUES": triton.next_power_of_2(values)}
    sample[(triton.cdiv(rows, sizes["ROWS"]),)](probs, out, seed, rows, values, **sizes)
    return out
