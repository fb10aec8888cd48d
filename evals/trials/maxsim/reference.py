"""Late interaction (ColBERT): for each query and document, the sum over the query's tokens of the largest product with
any of the document's tokens that is no padding."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, q: torch.Tensor, d: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """q: (queries, tokens, 128). d: (documents, tokens, 128). lengths: tokens of each document, at least one.
        Scores (queries, documents) in float32."""
        queries, documents = q.shape[0], d.shape[0]
        scores = torch.empty(queries, documents, dtype=torch.float32, device=q.device)
        padding = torch.arange(d.shape[1], device=d.device)[None, :] >= lengths[:, None]
        for number in range(queries):
            products = torch.einsum("ik,djk->dij", q[number], d).float()
            products = products.masked_fill(padding[:, None, :], float("-inf"))
            scores[number] = products.amax(-1).sum(-1)
        return scores


def get_inputs(queries: int = 64, query_tokens: int = 32, documents: int = 2048, tokens: int = 256):
    q = torch.nn.functional.normalize(torch.randn(queries, query_tokens, 128), dim=-1).bfloat16()
    d = torch.nn.functional.normalize(torch.randn(documents, tokens, 128), dim=-1).bfloat16()
    lengths = torch.randint(tokens // 2, tokens + 1, (documents,), dtype=torch.int32)
    return [q, d, lengths]
