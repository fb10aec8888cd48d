"""FlexAttention over the pages where they lie: the table is the block mask's list of key blocks, a page a block. The
mask is made once for each table, as an engine makes it once for all layers of a step."""

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

attend = torch.compile(flex_attention, dynamic=False)
_masks = {}


def block_mask(table, lengths, pages, page):
    """Key block i of request b is page table[b, i]; `number` leads back from a page to its place in the request."""
    requests, columns = table.shape
    counts = ((lengths + page - 1) // page).int()
    indices = torch.zeros((requests, 1, 1, pages), dtype=torch.int32, device=table.device)
    indices[:, 0, 0, :columns] = table
    number = torch.full((requests, pages), -1, dtype=torch.int32, device=table.device)
    places = torch.arange(columns, dtype=torch.int32, device=table.device).expand(requests, columns)
    used = places < counts[:, None]
    row = torch.arange(requests, device=table.device)[:, None].expand(requests, columns)
    number[row[used], table[used].long()] = places[used]

    def counts_token(b, h, q, kv):
        place = number[b, kv // page]
        return (place >= 0) & (place * page + kv % page < lengths[b])

    return BlockMask.from_kv_blocks(
        counts[:, None, None],
        indices,
        BLOCK_SIZE=(128, page),
        mask_mod=counts_token,
        seq_lengths=(1, pages * page),
    )


def kernel_function(query, cache, table, lengths):
    pages, page, kv_heads, both = cache.shape
    key = table.data_ptr(), lengths.data_ptr(), pages
    if key not in _masks:
        _masks[key] = block_mask(table, lengths, pages, page)
    flat = cache.view(1, pages * page, kv_heads, both).transpose(1, 2)
    keys, values = flat.chunk(2, -1)
    return attend(query[:, :, None], keys, values, block_mask=_masks[key], enable_gqa=True)[:, :, 0]
