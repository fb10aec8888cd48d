"""Rejection sampling of drafted tokens with given random numbers; what comes after a rejection stays -1. As in vLLM."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, out, ends, drafted, ratios, numbers, recovered, bonus):
        first = 0
        for request, last in enumerate(ends.tolist()):
            for place in range(first, last):
                accepted = bool(ratios[place] >= numbers[place])
                out[request, place - first] = drafted[place] if accepted else recovered[place]
                if not accepted:
                    break
            else:
                out[request, last - first] = bonus[request]
            first = last


def get_inputs(*, requests=6, longest=2):
    ends = torch.randint(0, longest + 1, (requests,)).cumsum(0).int()
    count = int(ends[-1])
    out = torch.full((requests, longest + 1), -1)
    drafted, recovered = torch.randint(0, 99, (2, count))
    return [
        out,
        ends,
        drafted,
        1.5 * torch.rand(count),
        torch.rand(count),
        recovered,
        torch.randint(0, 99, (requests,)),
    ]


MUTATES = ("out",)
LAYOUTS = "contiguous"


@triton.jit
def reject(out, ends, drafted, ratios, numbers, recovered, bonus, width):
    request = tl.program_id(0)
    first, last = tl.load(ends + request - 1, mask=request > 0, other=0), tl.load(ends + request)
    still = request >= 0
    for place in range(first, last):
        accepted = tl.load(ratios + place) >= tl.load(numbers + place)
        token = tl.where(accepted, tl.load(drafted + place), tl.load(recovered + place))
        tl.store(out + request * width + place - first, token, mask=still)
        still = still & accepted
    tl.store(out + request * width + last - first, tl.load(bonus + request), mask=still)


def kernel_function(out, ends, drafted, ratios, numbers, recovered, bonus):
    reject[(len(ends),)](out, ends, drafted, ratios, numbers, recovered, bonus, out.shape[1])
