"""torch.topk in a CUDA graph: captured once for each input, then replayed."""

import torch

_graphs = {}


def kernel_function(x, k):
    key = x.data_ptr(), tuple(x.shape), k
    if key not in _graphs:
        torch.topk(x, k)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            best = torch.topk(x, k)
        _graphs[key] = graph, best
    graph, best = _graphs[key]
    graph.replay()
    return best.values, best.indices
