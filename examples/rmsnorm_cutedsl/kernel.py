"""RMSNorm over dim 1 in CuTe DSL: one read, 16-byte accesses; the factor of a position is worked out once."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
import torch.nn as nn
from cutlass.cute.runtime import make_ptr

TYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, torch.float32: cutlass.Float32}
THREADS = 256  # of the kernel with one position a thread
LANES, GROUPS = 32, 8  # a block: so many vectors of 8 positions, and so many threads that share the channels of a vector
MOST = 16  # channels of one thread


@cute.kernel
def normalise_vectors(x: cute.Tensor, y: cute.Tensor, eps: cutlass.Float32, LANES: cutlass.Constexpr, GROUPS: cutlass.Constexpr):
    """A thread holds 16 bytes (8 positions) of every GROUPS-th channel in registers between the one read and the write."""
    width, channels, vectors = cute.size(x, mode=[0]), cute.size(x, mode=[2]), cute.size(x, mode=[1])
    thread, _, _ = cute.arch.thread_idx()
    tile, image, _ = cute.arch.block_idx()
    lane, group = thread % LANES, thread // LANES
    vector = tile * LANES + lane
    source = cutlass.min(vector, vectors - 1)  # the threads past the end read the last vector and store nothing
    per_thread = cutlass.const_expr(channels // GROUPS)
    values = cute.make_rmem_tensor((width, per_thread), x.element_type)
    for step in cutlass.range_constexpr(per_thread):
        cute.autovec_copy(x[None, source, step * GROUPS + group, image], values[None, step])
    squares = cute.make_rmem_tensor((width,), cutlass.Float32)
    squares.fill(0.0)
    for step in cutlass.range_constexpr(per_thread):
        value = values[None, step].load().to(cutlass.Float32)
        squares.store(squares.load() + value * value)
    factors = cute.make_rmem_tensor((width,), cutlass.Float32)
    # the groups' sums of one position are added by one thread, which hands the factor back
    memory = cutlass.utils.SmemAllocator()
    sums = memory.allocate_tensor(cutlass.Float32, cute.make_layout((LANES * width, GROUPS)), 16)
    shared_factors = memory.allocate_tensor(cutlass.Float32, cute.make_layout((LANES * width,)), 16)
    cute.autovec_copy(squares, cute.local_tile(sums[None, group], (width,), (lane,)))
    cute.arch.sync_threads()
    for part in cutlass.range_constexpr(cutlass.const_expr((width + GROUPS - 1) // GROUPS)):
        position = part * LANES * GROUPS + thread
        if position < LANES * width:
            total = sums[position, 0]
            for other in cutlass.range_constexpr(1, GROUPS):
                total += sums[position, other]
            shared_factors[position] = cute.math.rsqrt(total * (1.0 / channels) + eps, fastmath=True)
    cute.arch.sync_threads()
    cute.autovec_copy(cute.local_tile(shared_factors, (width,), (lane,)), factors)
    if vector < vectors:
        for step in cutlass.range_constexpr(per_thread):
            result = cute.make_rmem_tensor((width,), x.element_type)
            result.store((values[None, step].load().to(cutlass.Float32) * factors.load()).to(x.element_type))
            cute.autovec_copy(result, y[None, vector, step * GROUPS + group, image])


@cute.jit
def launch_vectors(x: cute.Pointer, y: cute.Pointer, images: cutlass.Int32, vectors: cutlass.Int32, eps: cutlass.Float32, stream: cuda.CUstream, CHANNELS: cutlass.Constexpr, WIDTH: cutlass.Constexpr):
    row = cute.assume(vectors.to(cutlass.Int64) * WIDTH, divby=WIDTH)  # so that 16-byte accesses are known to be aligned
    layout = cute.make_layout((WIDTH, vectors, CHANNELS, images), stride=(1, WIDTH, row, row * CHANNELS))
    normalise_vectors(cute.make_tensor(x, layout), cute.make_tensor(y, layout), eps, LANES, GROUPS).launch(
        grid=(cute.ceil_div(vectors, LANES), images, 1), block=(LANES * GROUPS, 1, 1), stream=stream)


@cute.kernel
def normalise_positions(x: cute.Tensor, y: cute.Tensor, tiles: cutlass.Int32, eps: cutlass.Float32):
    """One position a thread; one pass over the channels for the squares, one for the results."""
    positions, channels = cute.size(x, mode=[0]), cute.size(x, mode=[1])
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    image, position = block // tiles, block % tiles * THREADS + thread
    if position < positions:
        squares = cutlass.Float32(0.0)
        for channel in cutlass.range(channels):
            value = x[position, channel, image].to(cutlass.Float32)
            squares += value * value
        factor = cute.math.rsqrt(squares / channels + eps, fastmath=True)
        for channel in cutlass.range(channels):
            y[position, channel, image] = (x[position, channel, image].to(cutlass.Float32) * factor).to(x.element_type)


@cute.jit
def launch_positions(x: cute.Pointer, y: cute.Pointer, images: cutlass.Int32, channels: cutlass.Int32, positions: cutlass.Int32, eps: cutlass.Float32, stream: cuda.CUstream):
    row = positions.to(cutlass.Int64)
    layout = cute.make_layout((positions, channels, images), stride=(1, row, row * channels))
    tiles = cute.ceil_div(positions, THREADS)
    normalise_positions(cute.make_tensor(x, layout), cute.make_tensor(y, layout), tiles, eps).launch(
        grid=(tiles * images, 1, 1), block=(THREADS, 1, 1), stream=stream)


compiled = {}  # by the type of the values, and for the vectors by the number of channels


def run(x, y, images, channels, positions, eps):
    width = 16 // x.element_size()
    vectors = images <= 65535 and positions % width == 0 and channels % GROUPS == 0 and channels <= MOST * GROUPS and x.data_ptr() % 16 == 0 and y.data_ptr() % 16 == 0
    align = 16 if vectors else x.element_size()
    pointers = [make_ptr(TYPES[t.dtype], t.data_ptr(), cute.AddressSpace.gmem, assumed_align=align) for t in (x, y)]
    stream = cuda.CUstream(torch.cuda.current_stream(x.device).cuda_stream)
    if vectors:
        key, launch, constants = (x.dtype, channels), launch_vectors, (channels, width)
        arguments = (*pointers, images, positions // width, eps, stream)
    else:
        key, launch, constants = x.dtype, launch_positions, ()
        arguments = (*pointers, images, channels, positions, eps, stream)
    if key not in compiled:
        compiled[key] = cute.compile(launch, *arguments, *constants)
    compiled[key](*arguments)


class ModelNew(nn.Module):
    def __init__(self, num_features, eps=1e-5):
        super().__init__()
        self.num_features = num_features
        self.eps = eps

    def forward(self, x):
        if x.ndim < 2 or x.dtype not in TYPES or not x.is_cuda:
            raise ValueError(f"expected x on a GPU, of one of {set(TYPES)}, with two dimensions or more, not {x.dtype} {tuple(x.shape)}")
        y = torch.empty_like(x)
        if x.numel() == 0:
            return y
        source = x.contiguous()
        target = y if y.is_contiguous() else torch.empty_like(source)
        images, channels = x.shape[:2]
        positions = x.numel() // (images * channels)
        if positions >= 2**31 or x.numel() >= 2**38:
            raise ValueError(f"more positions or blocks than fit 32 bits: {tuple(x.shape)}")
        run(source, target, images, channels, positions, self.eps)
        return y if target is y else y.copy_(target)
