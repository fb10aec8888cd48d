import torch
import torch.nn as nn

CHUNK = 64
COMPARE = {0: {"rms": 0.01}}


class Model(nn.Module):
    """Kimi delta attention, forward: a state of 128 x 128 a head, S = 0 at first, and for each token t

        S = diag(exp(g[t])) S;  S += beta[t] k[t] (v[t] - k[t]^T S)^T;  o[t] = S^T q[t] / sqrt(128)

    The gates g are logarithms, one a channel of k. Computed in chunks of 64 tokens, which is the same."""

    def forward(self, q, k, v, g, beta):
        wide = torch.promote_types(q.dtype, torch.float32)
        parts = [x.to(wide).transpose(1, 2) for x in (q, k, v, g, beta[..., None])]
        parts[0] = parts[0] * q.shape[-1] ** -0.5
        state = torch.zeros(*parts[1].shape[:2], k.shape[-1], v.shape[-1], dtype=wide, device=k.device)
        outputs = []
        for first in range(0, q.shape[1], CHUNK):
            output, state = self.step(*(part[:, :, first : first + CHUNK] for part in parts), state)
            outputs.append(output)
        return torch.cat(outputs, 2).transpose(1, 2).to(v.dtype).contiguous()

    def step(self, q, k, v, g, beta, state):
        """One chunk: its outputs, and the state after it."""
        sums = g.cumsum(2)
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)[..., None]
        decay = (sums[:, :, :, None] - sums[:, :, None]).masked_fill(later, -torch.inf).exp()
        own = (decay * k[:, :, :, None] * k[:, :, None]).sum(-1).tril(-1) * beta
        seen = (decay * q[:, :, :, None] * k[:, :, None]).sum(-1)
        one = torch.eye(q.shape[2], dtype=q.dtype, device=q.device)
        change = beta * (v - (k * sums.exp()) @ state)
        change = torch.linalg.solve_triangular(one + own, change, upper=False, unitriangular=True)
        output = (q * sums.exp()) @ state + seen @ change
        last = sums[:, :, -1:]
        return output, last.exp().mT * state + (k * (last - sums).exp()).mT @ change


def get_inputs(*, batch=2, tokens=2048, heads=8):
    q, k = (nn.functional.normalize(torch.randn(batch, tokens, heads, 128), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(batch, tokens, heads, 128, dtype=torch.bfloat16)
    g = -5 * torch.sigmoid(2 * torch.randn(batch, tokens, heads, 128) - 4)  # from -5 to 0, as the models bound it
    beta = torch.sigmoid(torch.randn(batch, tokens, heads)).bfloat16()
    return [q, k, v, g, beta]


def get_workloads():
    return {
        "short": {"tokens": 1024},
        "long": {"batch": 1, "tokens": 4096},
        "thin": {"batch": 1, "heads": 4},
    }


def get_init_inputs():
    return []
