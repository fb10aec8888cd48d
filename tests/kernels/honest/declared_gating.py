"""The weights and indices of the best experts, into arguments; ties may go either way. As vLLM's topk_softmax."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, weights, indices, gates):
        best = torch.softmax(gates.float(), -1).topk(weights.shape[1])
        weights.copy_(best.values)
        indices.copy_(best.indices)


def get_inputs(*, tokens=4, experts=12):
    if experts < 3:
        raise ValueError("fewer experts than are chosen")
    gates = torch.randint(-3, 3, (tokens, experts)).half()
    return [torch.empty(tokens, 3), torch.empty(tokens, 3, dtype=torch.int32), gates]


MUTATES = ("weights", "indices")
COMPARE = {"indices": {"ties": "gates"}}
LAYOUTS = "contiguous"


@triton.jit
def choose(weights, indices, gates, count, chosen, BLOCK: tl.constexpr):
    token, at = tl.program_id(0), tl.arange(0, BLOCK)
    gate = tl.load(gates + token * count + at, mask=at < count, other=-float("inf")).to(tl.float32)
    weight = tl.exp(gate - tl.max(gate, 0))
    left = tl.where(at < count, weight / tl.sum(weight, 0), -1.0)
    for number in range(chosen):
        best = tl.max(left, 0)
        index = tl.max(tl.where(left == best, at, 0), 0)
        tl.store(weights + token * chosen + number, best)
        tl.store(indices + token * chosen + number, index)
        left = tl.where(at == index, -1.0, left)


def kernel_function(weights, indices, gates):
    (tokens, count), chosen = gates.shape, weights.shape[1]
    choose[(tokens,)](weights, indices, gates, count, chosen, BLOCK=triton.next_power_of_2(count))
