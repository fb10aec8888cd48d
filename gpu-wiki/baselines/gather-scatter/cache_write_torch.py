"""Rows written to slots of a cache in place, -1 for none, by torch.

Arguments: cache (slots, width), x (tokens, width), slots (tokens)
"""


def kernel_function(cache, x, slots):
    real = slots >= 0
    cache[slots[real]] = x[real]
    return cache
