"""A product for blocks of sorted tokens, each block of one expert; padding tokens are left out. As in vLLM."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, x, experts, ids, owners, chosen):
        block = len(ids) // len(owners)
        y = x.new_zeros(len(x) * chosen, experts.shape[1])
        for number, owner in enumerate(owners.tolist()):
            own = ids[number * block : (number + 1) * block].long()
            own = own[own < len(y)]
            y[own] = x[own // chosen] @ experts[owner].t()
        return y


def get_inputs(*, tokens=5, columns=20):
    ids, owners = [], []
    owner_of = torch.randint(0, 3, (2 * tokens,))
    for owner in range(3):
        own = torch.nonzero(owner_of == owner).flatten()
        ids += [own, torch.full((-len(own) % 4,), 2 * tokens)]
        owners += [owner] * (-(-len(own) // 4))
    return [torch.randn(tokens, 12), torch.randn(3, columns, 12), torch.cat(ids).int(), torch.tensor(owners).int(), 2]


LAYOUTS = "contiguous"


@triton.jit
def product(x, experts, ids, owners, y, size, chosen, width, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    number, row, at = tl.program_id(0), tl.arange(0, ROWS), tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + at
    token = tl.load(ids + number * ROWS + row).to(tl.int64)
    real, inside, wide = token < size, column < columns, at < width
    owner = tl.load(owners + number).to(tl.int64)
    left = x + (token // chosen)[:, None] * width + at[None, :]
    right = experts + (owner * columns + column)[:, None] * width + at[None, :]
    a = tl.load(left, mask=real[:, None] & wide[None, :], other=0.0)
    b = tl.load(right, mask=inside[:, None] & wide[None, :], other=0.0)
    place = y + token[:, None] * columns + column[None, :]
    tl.store(place, tl.sum(a[:, None, :] * b[None, :, :], 2), mask=real[:, None] & inside[None, :])


def kernel_function(x, experts, ids, owners, chosen):
    columns, width = experts.shape[1:]
    y = torch.empty(len(x) * chosen, columns, dtype=x.dtype, device=x.device)
    grid, sizes = (len(owners), triton.cdiv(columns, 16)), {"ROWS": len(ids) // len(owners), "BLOCK": 16}
    product[grid](x, experts, ids, owners, y, len(y), chosen, width, columns, **sizes)
    return y
