"""Tokens sorted by expert in padded blocks, as vLLM's moe_align_block_size: any order within an expert."""

import torch
import triton
import triton.language as tl


class Model(torch.nn.Module):
    def forward(self, experts, count, block):
        flat, ids, owners = experts.flatten(), [], []
        for expert in range(count):
            own = torch.nonzero(flat == expert).flatten()
            blocks = -(-len(own) // block)
            ids += [own, own.new_full((blocks * block - len(own),), len(flat))]
            owners += [expert] * blocks
        used, room = torch.cat(ids), len(flat) + count * (block - 1)
        ids = torch.cat([used, used.new_full((room - len(used),), len(flat))])
        owners += [0] * (-(-room // block) - len(owners))
        return (
            ids.int(),
            torch.tensor(owners, device=flat.device).int(),
            torch.tensor([len(used)], device=flat.device).int(),
        )


def get_inputs(*, tokens=7, block=4):
    return [torch.randint(0, 3, (tokens, 2)).int(), 3, block]


def ends_of(experts, count, block):
    return (-(-experts.flatten().long().bincount(minlength=count) // block)).cumsum(0)


def expert_of_place(experts, count, block):
    places = torch.arange(experts.numel() + count * (block - 1), device=experts.device)
    return torch.bucketize(places // block, ends_of(experts, count, block), right=True)


def used_blocks(experts, count, block):
    room = experts.numel() + count * (block - 1)
    return torch.arange(-(-room // block), device=experts.device) < ends_of(experts, count, block)[-1]


COMPARE = {0: {"set": expert_of_place}, 1: {"valid": used_blocks}}
LAYOUTS = "contiguous"


@triton.jit
def align(experts, ids, owners, used, count, block, size, room, TOKENS: tl.constexpr, ROOM: tl.constexpr):
    expert, at, place = tl.program_id(0), tl.arange(0, TOKENS), tl.arange(0, ROOM)
    own = tl.load(experts + at, mask=at < size, other=-1)
    start = tl.zeros((), tl.int32)
    for other in range(expert):
        start += (tl.sum((own == other).to(tl.int32), 0) + block - 1) // block * block
    here = (own == expert).to(tl.int32)
    number = tl.sum(here, 0)
    end = start + (number + block - 1) // block * block
    tl.store(ids + start + number - tl.cumsum(here, 0), at, mask=own == expert)
    last = tl.where(expert == count - 1, room, end)
    tl.store(ids + place, size, mask=(place >= start + number) & (place < last))
    tl.store(owners + place, expert, mask=(place >= start // block) & (place < end // block))
    tl.store(used, end, mask=expert == count - 1)


def kernel_function(experts, count, block):
    size = experts.numel()
    room = size + count * (block - 1)
    lengths = room, triton.cdiv(room, block), 1
    ids, owners, used = (torch.empty(length, dtype=torch.int32, device=experts.device) for length in lengths)
    sizes = {"TOKENS": triton.next_power_of_2(size), "ROOM": triton.next_power_of_2(room)}
    align[(count,)](experts, ids, owners, used, count, block, size, room, **sizes)
    return ids, owners, used
