"""Attention of draft tokens over a cache of latent vectors (multi-head latent attention, with the weights absorbed).

Each request has DRAFTS new tokens, whose latent vectors stand at the end of its cache already. All heads share the
cache: a key is a latent vector of 512 numbers with 64 of its position, and the value is the 512 of the key. Draft t of
a request with n keys sees the keys before n - DRAFTS + t + 1.
"""

import torch
from torch import nn

REQUESTS, DRAFTS, HEADS, LONGEST = 32, 4, 128, 8192
LATENT, POSITION = 512, 64
SCALE = 192**-0.5


class Model(nn.Module):
    def forward(self, q, cache, lengths):
        """q: (requests, drafts, heads, 576). cache: (requests, longest, 576), what lies behind a request's length is
        undefined. lengths: (requests), int32, from DRAFTS to longest. The result: (requests, drafts, heads, 512)."""
        out = torch.empty(*q.shape[:3], LATENT, dtype=q.dtype, device=q.device)
        drafts = q.shape[1]
        for request, length in enumerate(lengths.tolist()):
            keys = cache[request, :length]
            scores = torch.einsum("thd,kd->thk", q[request], keys).float() * SCALE
            seen = torch.ones(drafts, length, dtype=torch.bool, device=q.device).tril(length - drafts)
            weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1).to(q.dtype)
            out[request] = torch.einsum("thk,kd->thd", weights, keys[:, :LATENT])
        return out


def get_inputs(*, requests=REQUESTS, drafts=DRAFTS, heads=HEADS, longest=LONGEST):
    width = LATENT + POSITION
    return [
        torch.randn(requests, drafts, heads, width, dtype=torch.bfloat16),
        torch.randn(requests, longest, width, dtype=torch.bfloat16),
        torch.randint(longest // 4, longest + 1, (requests,), dtype=torch.int32),
    ]


def get_init_inputs():
    return []
