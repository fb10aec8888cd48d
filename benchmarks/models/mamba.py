"""A stack of Mamba-like blocks in bf16. The selective scan is a loop over the tokens in plain PyTorch, as the paper's
equations read."""

import torch
import torch.nn as nn
import torch.nn.functional as functional
from sizes import size

WIDTH, INNER, STATES, RANK = size(1024, 32), size(2048, 48), size(16, 4), size(64, 8)
LAYERS, REQUESTS, TOKENS = 2, size(4, 2), size(256, 9)
TAPS = 4  # of the convolution


class Scan(nn.Module):
    """state[t] = exp(delta[t] a) state[t - 1] + delta[t] b[t] u[t];  y[t] = c[t] state[t] + d u[t]"""

    def __init__(self):
        super().__init__()
        self.log_a = nn.Parameter(torch.arange(1, STATES + 1).float().log().repeat(INNER, 1))
        self.d = nn.Parameter(torch.ones(INNER))

    def forward(self, u, delta, b, c):
        a = -torch.exp(self.log_a.float())
        u_wide, delta_wide, b_wide, c_wide = (one.float() for one in (u, delta, b, c))
        decay = torch.exp(delta_wide[..., None] * a)
        added = delta_wide[..., None] * b_wide[:, :, None] * u_wide[..., None]
        state = torch.zeros_like(decay[:, 0])
        outputs = []
        for token in range(u.shape[1]):
            state = decay[:, token] * state + added[:, token]
            outputs.append((state * c_wide[:, token, None]).sum(-1))
        return (torch.stack(outputs, 1) + u_wide * self.d).to(u.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 2 * INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)
        self.convolution = nn.Conv1d(INNER, INNER, TAPS, groups=INNER, padding=TAPS - 1)
        self.parts, self.delta = nn.Linear(INNER, RANK + 2 * STATES, bias=False), nn.Linear(RANK, INNER)
        self.scan = Scan()

    def forward(self, x):
        u, gate = self.into(self.norm(x)).chunk(2, -1)
        u = functional.silu(self.convolution(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        low, b, c = self.parts(u).split([RANK, STATES, STATES], -1)
        y = self.scan(u, functional.softplus(self.delta(low)), b, c)
        return x + self.out(y * functional.silu(gate))


class Mamba(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def load():
    return Mamba().to(torch.bfloat16)


def inputs():
    return [torch.randn(REQUESTS, TOKENS, WIDTH, dtype=torch.bfloat16)]
