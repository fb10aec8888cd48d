import torch
import torch.nn as nn

CHUNK = 64
COMPARE = {0: {"rms": 0.01}, 1: {"rms": 0.01}}


class Model(nn.Module):
    """Gated delta rule, forward, for sequences end to end: S = states[n] of 128 x 128 a head, and for each token t of
    sequence n, which begins at cu_seqlens[n],

        S = exp(g[t]) S;  S += beta[t] k[t] (v[t] - k[t]^T S)^T;  o[t] = S^T q[t] / sqrt(128)

    Returns o, and S after each sequence. Computed in chunks of 64 tokens, which is the same."""

    def forward(self, q, k, v, g, beta, states, cu_seqlens):
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k, u, g, beta = (x.to(wide).transpose(0, 1) for x in (q, k, v, g[..., None], beta[..., None]))
        parts, ends = (q * q.shape[-1] ** -0.5, k, u, g, beta), cu_seqlens.tolist()
        outputs, after = [], []
        for number, state in enumerate(states.to(wide)):
            for start in range(ends[number], ends[number + 1], CHUNK):
                stop = min(start + CHUNK, ends[number + 1])
                output, state = self.step(*(part[:, start:stop] for part in parts), state)
                outputs.append(output.transpose(0, 1))
            after.append(state)
        return torch.cat(outputs).to(v.dtype), torch.stack(after).to(states.dtype)

    def step(self, q, k, v, g, beta, state):
        """One chunk: its outputs, and the state after it."""
        sums = g.cumsum(1)
        later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
        decay = (sums - sums.mT).masked_fill(later, -torch.inf).exp()
        own = (k @ k.mT * decay).tril(-1) * beta
        one = torch.eye(q.shape[1], dtype=q.dtype, device=q.device)
        change = beta * (v - (k * sums.exp()) @ state)
        change = torch.linalg.solve_triangular(one + own, change, upper=False, unitriangular=True)
        output = (q * sums.exp()) @ state + (q @ k.mT * decay) @ change
        last = sums[:, -1:]
        return output, last.exp() * state + (k * (last - sums).exp()).mT @ change


def get_inputs(*, sequences=8, tokens=8192, heads=16):
    """Lengths grow: the first sequence has tokens / sequences^2, each next one twice as many more."""
    q, k = (nn.functional.normalize(torch.randn(tokens, heads, 128), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(tokens, heads, 128, dtype=torch.bfloat16)
    g = nn.functional.logsigmoid(2 * torch.randn(tokens, heads) + 3)
    beta = torch.sigmoid(torch.randn(tokens, heads)).bfloat16()
    states = torch.randn(sequences, heads, 128, 128) / 8
    return [q, k, v, g, beta, states, torch.arange(sequences + 1) ** 2 * tokens // sequences**2]


def get_workloads():
    return {"one": {"sequences": 1, "tokens": 4096, "heads": 8}, "many": {"sequences": 40}}


def get_init_inputs():
    return []
