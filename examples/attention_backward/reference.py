import torch
import torch.nn as nn

ROWS = 1024  # of queries at a time; the keys after them are left out


class Model(nn.Module):
    """Backward pass of causal attention from what the forward pass saved: q, k, v and out (batch, heads, length, width)
    and lse (batch, heads, length), the log-sum-exp of each row of q k^T / sqrt(width). Returns dq, dk and dv."""

    def forward(self, q, k, v, out, lse, dout):
        wide = torch.promote_types(q.dtype, torch.float32)
        dtype, scale = q.dtype, q.shape[-1] ** -0.5
        q, k, v, out, lse, dout = (one.to(wide) for one in (q, k, v, out, lse, dout))
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for start in range(0, q.shape[2], ROWS):
            rows, keys = slice(start, start + ROWS), slice(0, start + ROWS)
            p = weights(q[:, :, rows], k[:, :, keys], start, lse[:, :, rows, None])
            dv[:, :, keys] += p.mT @ dout[:, :, rows]
            delta = (dout[:, :, rows] * out[:, :, rows]).sum(-1, keepdim=True)
            ds = p * (dout[:, :, rows] @ v[:, :, keys].mT - delta) * scale
            dq[:, :, rows] = ds @ k[:, :, keys]
            dk[:, :, keys] += ds.mT @ q[:, :, rows]
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def scores(q, k, start):
    """Scaled scores of queries from `start` on; -inf for later keys."""
    query = torch.arange(start, start + q.shape[2], device=q.device)
    later = torch.arange(k.shape[2], device=q.device) > query[:, None]
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(later, -torch.inf)


def weights(q, k, start, lse):
    return (scores(q, k, start) - lse).exp()


def attention(q, k, v):
    """The forward pass: out, lse."""
    outputs, sums = [], []
    for start in range(0, q.shape[2], ROWS):
        keys = slice(0, start + ROWS)
        of_rows = scores(q[:, :, start : start + ROWS], k[:, :, keys], start)
        sums.append(of_rows.logsumexp(-1))
        outputs.append((of_rows - sums[-1][..., None]).exp() @ v[:, :, keys])
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def get_inputs(*, batch=1, heads=16, length=16384, width=128):
    """dout grows with the root of the position, so that the gradients of all rows are of one size, and all count."""
    q, k, v, dout = (torch.randn(batch, heads, length, width).bfloat16() for _ in range(4))
    out, lse = attention(q.float(), k.float(), v.float())
    return [q, k, v, out.bfloat16(), lse, dout * torch.arange(1, length + 1).sqrt().bfloat16()[:, None]]


def get_init_inputs():
    return []


def get_workloads():
    return {
        "narrow": {"width": 64},
        "odd": {"batch": 2, "heads": 8, "length": 3967},
    }


COMPARE = {0: {"rms": 0.01}, 1: {"rms": 0.01}, 2: {"rms": 0.01}}
