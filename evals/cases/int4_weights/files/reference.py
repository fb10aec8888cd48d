"""A product with weights of 4 bits: eight of one column in a 32-bit word, a scale and a zero for GROUP rows."""

import torch
import torch.nn as nn

GROUP = 64


class Model(nn.Module):
    def forward(self, x, packed, scales, zeros):
        """x: (m, k). packed: (k / 8, n), row 8 i + j of the weights in bits 4 j of row i. scales, zeros:
        (k / GROUP, n). Result: x @ ((weights - zeros) * scales), (m, n)."""
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
        weights = ((packed[:, None, :] >> shifts[None, :, None]) & 15).flatten(0, 1).to(x.dtype)
        spread = [part.repeat_interleave(GROUP, 0) for part in (zeros, scales)]
        return x @ ((weights - spread[0]) * spread[1])


def made(m: int, k: int, n: int):
    packed = torch.randint(-(2**31), 2**31, (k // 8, n), dtype=torch.int64).to(torch.int32)
    scales = (0.5 + torch.rand(k // GROUP, n)).to(torch.float16) * k**-0.5 / 4
    zeros = torch.randint(4, 12, (k // GROUP, n)).to(torch.float16)
    return [torch.randn(m, k, dtype=torch.float16), packed, scales, zeros]


def get_inputs():
    return made(32, 4096, 14336)


def get_init_inputs():
    return []


def get_workloads():
    return {"small": lambda: made(5, 128, 40), "odd": lambda: made(17, 192, 72)}


LAYOUTS = "contiguous"
