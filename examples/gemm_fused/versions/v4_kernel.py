"""v4: two neighbouring blocks share their weight tile, in CuTe DSL.

The same roles as v3 (a producer warp, two consumer warpgroups, residual in and output out in place), but blocks come in clusters of two that work on
neighbouring row tiles of the same columns: each fetches half of the weight tile and TMA delivers it to both (multicast), so a step brings 32 KB from L2 into
each multiprocessor instead of 48. A stage goes back to the producers when the consumers of both blocks have released it.
What TMA cannot address takes v0's masked Triton kernel.
"""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
import torch
import torch.nn as nn
import triton
import triton.language as tl
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_ptr
from cutlass.cutlass_dsl import T, dsl_user_op

BM, BN, BK = 128, 256, 64   # tile of a block; 64 halves are one 128-byte swizzled row
SLICE = 64                  # the epilogue works on 64x64 slices, one warpgroup each
THREADS = 384               # a producer warpgroup and two consumer warpgroups
STAGES = 4                  # of the operand ring, 48 KB each
SLOTS = 2                   # residual slices a warpgroup holds, 8 KB each
CLUSTER = 2                 # neighbouring blocks that share a weight tile
GROUP = 8                   # rows of cluster tiles walked together, so that the tiles in flight share operands in L2


@triton.jit
def gelu_tanh(x):
    # x * sigmoid(2u) is the tanh form of GELU with one exponential; u = sqrt(2/pi) * (x + 0.044715 x^3)
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(2.0 * u)


@triton.jit
def linear_gelu_masked(x_ptr, w_ptr, b_ptr, r_ptr, o_ptr, M, N, K, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    pid_m = tl.program_id(0).to(tl.int64)
    pid_n = tl.program_id(1).to(tl.int64)
    rm = pid_m * BM + tl.arange(0, BM)
    rn = pid_n * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(x_ptr + rm[:, None] * K + (k + rk)[None, :], mask=(rm[:, None] < M) & ((k + rk)[None, :] < K), other=0.0)
        w = tl.load(w_ptr + rn[None, :] * K + (k + rk)[:, None], mask=(rn[None, :] < N) & ((k + rk)[:, None] < K), other=0.0)
        acc = tl.dot(x, w, acc)
    if HAS_BIAS:
        acc += tl.load(b_ptr + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    at = rm[:, None] * N + rn[None, :]
    out = gelu_tanh(acc) + tl.load(r_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(o_ptr + at, out.to(o_ptr.dtype.element_ty), mask=mask)


@dsl_user_op
def tanh_fast(x: Float32, *, loc=None, ip=None) -> Float32:
    # one instruction; its error (2^-11) is below half a bf16 step of what it scales
    return Float32(llvm.inline_asm(T.f32(), [Float32(x).ir_value(loc=loc, ip=ip)], "tanh.approx.f32 $0, $1;", "=f,f", has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT))


@cute.kernel
def gemm(tma_x: cute.CopyAtom, mX: cute.Tensor, tma_w: cute.CopyAtom, mW: cute.Tensor, tma_r: cute.CopyAtom, mR: cute.Tensor, tma_o: cute.CopyAtom, mO: cute.Tensor,
         mB: cute.Tensor, has_bias: cutlass.Constexpr, tiled_mma: cute.TiledMma, slice_mma: cute.TiledMma, a_layout: cute.ComposedLayout, b_layout: cute.ComposedLayout, e_layout: cute.ComposedLayout,
         M: Int32, N: Int32, K: Int32, stages: cutlass.Constexpr, slots: cutlass.Constexpr, cluster: cutlass.Constexpr, group: cutlass.Constexpr):
    dtype = mB.element_type
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

    smem = cutlass.utils.SmemAllocator()
    sA = smem.allocate_tensor(dtype, a_layout.outer, 1024, a_layout.inner)
    sB = smem.allocate_tensor(dtype, b_layout.outer, 1024, b_layout.inner)
    sE = smem.allocate_tensor(dtype, e_layout.outer, 1024, e_layout.inner)
    full = smem.allocate_array(Int64, stages)
    empty = smem.allocate_array(Int64, stages)
    ready = smem.allocate_array(Int64, 2 * slots)
    sBias = smem.allocate_tensor(Float32, cute.make_layout((BN, 2)), 16)

    if tid == 0:
        for s in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_init(full + s, 1)
            cute.arch.mbarrier_init(empty + s, 8 * cluster)      # one arrival per consumer warp of every block that shares the weight tile
        for s in cutlass.range_constexpr(2 * slots):
            cute.arch.mbarrier_init(ready + s, 1)
    cute.arch.mbarrier_init_fence()
    if cutlass.const_expr(cluster > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()

    gX = cute.local_tile(mX, (BM, BK), (None, None))
    gW = cute.local_tile(mW, (BN, BK), (None, None))
    gR = cute.local_tile(mR, (SLICE, SLICE), (None, None))
    gO = cute.local_tile(mO, (SLICE, SLICE), (None, None))
    one = cute.make_layout(1)
    tXs, tXg = cpasync.tma_partition(tma_x, 0, one, cute.group_modes(sA, 0, 2), cute.group_modes(gX, 0, 2))
    tWs, tWg = cpasync.tma_partition(tma_w, rank if cutlass.const_expr(cluster > 1) else 0, cute.make_layout(cluster), cute.group_modes(sB, 0, 2), cute.group_modes(gW, 0, 2))
    tRs, tRg = cpasync.tma_partition(tma_r, 0, one, cute.group_modes(sE, 0, 2), cute.group_modes(gR, 0, 2))
    tOs, tOg = cpasync.tma_partition(tma_o, 0, one, cute.group_modes(sE, 0, 2), cute.group_modes(gO, 0, 2))

    kt = cute.ceil_div(K, BK)
    tiles_m = cute.ceil_div(M, BM * cluster)
    tiles_n = cute.ceil_div(N, BN)
    tiles = tiles_m * tiles_n
    per = group * tiles_n

    if warp < 4:
        cute.arch.warpgroup_reg_dealloc(40)
        if warp == 0:
            s = Int32(0)
            phase = Int32(1)                                             # a fresh ring is empty
            for tile in cutlass.range(bid // cluster, tiles, blocks // cluster, unroll=1):
                first = tile // per * group
                rows = cutlass.min(tiles_m - first, group)
                tm = (first + (tile % per) % rows) * cluster + rank
                tn = (tile % per) // rows
                for k in cutlass.range(kt, unroll=1):
                    cute.arch.mbarrier_wait(empty + s, phase)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + s, (BM + BN) * BK * 2)
                    cute.copy(tma_x, tXg[(None, tm, k)], tXs[(None, s)], tma_bar_ptr=full + s)
                    if cutlass.const_expr(cluster > 1):
                        cute.copy(tma_w, tWg[(None, tn, k)], tWs[(None, s)], tma_bar_ptr=full + s, mcast_mask=cutlass.Int16(2 ** cluster - 1))
                    else:
                        cute.copy(tma_w, tWg[(None, tn, k)], tWs[(None, s)], tma_bar_ptr=full + s)
                    s += 1
                    if s == stages:
                        s = Int32(0)
                        phase ^= 1
    else:
        cute.arch.warpgroup_reg_alloc(232)
        c = cute.arch.make_warp_uniform(warp // 4 - 1)
        t = tid % 128
        lane = tid % 32
        thr = tiled_mma.get_slice(tid - 128)
        part = slice_mma.get_slice(t)
        tA = tiled_mma.make_fragment_A(thr.partition_A(sA))
        tB = tiled_mma.make_fragment_B(thr.partition_B(sB))
        acc = cute.make_rmem_tensor(thr.partition_shape_C((BM, BN)), Float32)
        tE = part.partition_C(sE)                                       # this thread's elements of every slice, in the order of its accumulators
        old = cute.make_rmem_tensor(tE[(None, None, None, 0)].shape, dtype)
        coord = part.partition_C(cute.make_identity_tensor((SLICE, SLICE)))
        count = cute.size(old)
        s = Int32(0)
        phase = Int32(0)
        turn = Int32(0)
        for tile in cutlass.range(bid // cluster, tiles, blocks // cluster, unroll=1):
            first = tile // per * group
            rows = cutlass.min(tiles_m - first, group)
            tm = (first + (tile % per) % rows) * cluster + rank
            tn = (tile % per) // rows
            rm = tm * 2 + c                                              # this warpgroup's block of 64 rows
            prev = Int32(0)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
            for k in cutlass.range(kt, unroll=1):
                cute.arch.mbarrier_wait(full + s, phase)
                warpgroup.fence()
                for kk in cutlass.range_constexpr(BK // 16):
                    cute.gemm(tiled_mma, acc, tA[(None, None, kk, s)], tB[(None, None, kk, s)], acc)
                    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                if k == 0:                                               # in the shadow of the first products: ask for the first residual slices, stage the bias
                    if warp % 4 == 0:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                        for j in cutlass.range_constexpr(slots):
                            at = c * slots + j
                            with cute.arch.elect_one():
                                cute.arch.mbarrier_arrive_and_expect_tx(ready + at, SLICE * SLICE * 2)
                            cute.copy(tma_r, tRg[(None, rm, tn * (BN // SLICE) + j)], tRs[(None, at)], tma_bar_ptr=ready + at)
                    if cutlass.const_expr(has_bias):
                        for i in cutlass.range_constexpr(2):
                            col = t + 128 * i
                            value = Float32(0.0)
                            if tn * BN + col < N:
                                value = mB[tn * BN + col].to(Float32)
                            sBias[col, c] = value
                else:                                                    # one group of products stays in flight while the stage before it goes back, to both blocks
                    warpgroup.wait_group(1)
                    if lane < cluster:
                        cute.arch.mbarrier_arrive(empty + prev, lane)
                prev = s
                s += 1
                if s == stages:
                    s = Int32(0)
                    phase ^= 1
            warpgroup.wait_group(0)
            if lane < cluster:
                cute.arch.mbarrier_arrive(empty + prev, lane)
            cute.arch.barrier(barrier_id=1 + c, number_of_threads=128)
            for j in cutlass.range_constexpr(BN // SLICE):
                at = c * slots + j % slots
                cute.arch.mbarrier_wait(ready + at, (turn & 1) if cutlass.const_expr(slots == 4) else j // slots)
                here = tE[(None, None, None, at)]
                cute.autovec_copy(here, old)
                for i in cutlass.range_constexpr(count):
                    v = acc[j * count + i]
                    if cutlass.const_expr(has_bias):
                        v += sBias[j * SLICE + coord[i][1], c]
                    u = v * (v * v * (0.7978845608 * 0.044715) + 0.7978845608)
                    h = 0.5 * v
                    old[i] = (h + h * tanh_fast(u) + old[i].to(Float32)).to(dtype)
                cute.autovec_copy(old, here)
                cute.arch.fence_proxy(cute.arch.ProxyKind.async_shared, space=cute.arch.SharedSpace.shared_cta)
                cute.arch.barrier(barrier_id=1 + c, number_of_threads=128)
                if warp % 4 == 0:
                    cute.copy(tma_o, tOs[(None, at)], tOg[(None, rm, tn * (BN // SLICE) + j)])
                    cute.arch.cp_async_bulk_commit_group()
                    if cutlass.const_expr(j + slots < BN // SLICE):
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(ready + at, SLICE * SLICE * 2)
                        cute.copy(tma_r, tRg[(None, rm, tn * (BN // SLICE) + j + slots)], tRs[(None, at)], tma_bar_ptr=ready + at)
            turn += 1
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    if cutlass.const_expr(cluster > 1):      # no block leaves while its neighbour may still write into its shared memory or arrive on its barriers
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


@cute.jit
def launch(x: cute.Pointer, w: cute.Pointer, b: cute.Pointer, r: cute.Pointer, o: cute.Pointer, M: Int32, N: Int32, K: Int32, sms: Int32, stream: cuda.CUstream,
           has_bias: cutlass.Constexpr, stages: cutlass.Constexpr, slots: cutlass.Constexpr, cluster: cutlass.Constexpr, group: cutlass.Constexpr):
    dtype = x.value_type
    k8 = cute.assume(K, divby=8)
    n8 = cute.assume(N, divby=8)
    mX = cute.make_tensor(x, cute.make_layout((M, K), stride=(k8, 1)))
    mW = cute.make_tensor(w, cute.make_layout((N, K), stride=(k8, 1)))
    mR = cute.make_tensor(r, cute.make_layout((M, N), stride=(n8, 1)))
    mO = cute.make_tensor(o, cute.make_layout((M, N), stride=(n8, 1)))
    mB = cute.make_tensor(b, cute.make_layout(N))
    row = cutlass.utils.LayoutEnum.ROW_MAJOR
    major = warpgroup.OperandMajorMode.K
    tiled_mma = sm90.make_trivial_tiled_mma(dtype, dtype, major, major, Float32, (2, 1, 1), (64, BN))
    # never multiplies: its layout says which elements of a 64x64 slice a thread owns
    slice_mma = sm90.make_trivial_tiled_mma(dtype, dtype, major, major, Float32, (1, 1, 1), (64, SLICE))
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    a_layout = cute.tile_to_shape(atom, (BM, BK, stages), order=(0, 1, 2))
    b_layout = cute.tile_to_shape(atom, (BN, BK, stages), order=(0, 1, 2))
    e_layout = cute.tile_to_shape(atom, (SLICE, SLICE, 2 * slots), order=(0, 1, 2))
    load = cpasync.CopyBulkTensorTileG2SOp()
    load_w = cpasync.CopyBulkTensorTileG2SMulticastOp() if cluster > 1 else load
    tma_x, tX = cpasync.make_tiled_tma_atom(load, mX, cute.slice_(a_layout, (None, None, 0)), (BM, BK))
    tma_w, tW = cpasync.make_tiled_tma_atom(load_w, mW, cute.slice_(b_layout, (None, None, 0)), (BN, BK), num_multicast=cluster)
    tma_r, tR = cpasync.make_tiled_tma_atom(load, mR, cute.slice_(e_layout, (None, None, 0)), (SLICE, SLICE))
    tma_o, tO = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mO, cute.slice_(e_layout, (None, None, 0)), (SLICE, SLICE))
    tiles = cute.ceil_div(M, BM * cluster) * cute.ceil_div(N, BN)
    grid = cutlass.min(tiles, sms // cluster) * cluster
    gemm(tma_x, tX, tma_w, tW, tma_r, tR, tma_o, tO, mB, has_bias, tiled_mma, slice_mma, a_layout, b_layout, e_layout, M, N, K, stages, slots, cluster, group).launch(
        grid=(grid, 1, 1), block=(THREADS, 1, 1), cluster=(cluster, 1, 1), stream=stream, min_blocks_per_mp=1)


def checked(x, weight, bias, residual):
    """The operands contiguous, x as a matrix, and a new output; ValueError for what the kernels do not compute."""
    K, N = weight.shape[1], weight.shape[0]
    if x.dim() < 1 or x.shape[-1] != K or tuple(residual.shape) != (*x.shape[:-1], N):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and residual {tuple(residual.shape)} do not fit together")
    tensors = [weight, residual] + ([] if bias is None else [bias])
    if x.dtype not in (torch.bfloat16, torch.float16) or any(t.dtype != x.dtype or t.device != x.device for t in tensors):
        raise ValueError("x, weight, bias and residual must share one device and one dtype, bfloat16 or float16")
    out = torch.empty(residual.shape, dtype=x.dtype, device=x.device)
    M = out.numel() // max(N, 1)
    if max(M, N, K) >= 2**30 or N > 65535 * 128:
        raise ValueError("a side of the product is too long")
    return x.reshape(M, K).contiguous(), weight.contiguous(), None if bias is None else bias.contiguous(), residual.contiguous(), out


def launch_masked(x, weight, bias, residual, out):
    (M, K), N = x.shape, weight.shape[0]
    linear_gelu_masked[(triton.cdiv(M, 128), triton.cdiv(N, 128))](x, weight, bias, residual, out, M, N, K, bias is not None, 128, 128, 64, num_warps=8, num_stages=3)


def tma_can_address(*tensors):
    """TMA needs a base and a row pitch that are multiples of 16 bytes."""
    return all(t.shape[-1] > 0 and t.shape[-1] * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0 for t in tensors)


compiled = {}   # by dtype and presence of a bias; sizes are run-time arguments


def launch_cluster(x, weight, bias, residual, out):
    (M, K), N = x.shape, weight.shape[0]
    dtype = BFloat16 if x.dtype == torch.bfloat16 else Float16
    operands = ((x, 16), (weight, 16), (x if bias is None else bias, 2), (residual, 16), (out, 16))
    pointers = [make_ptr(dtype, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=align) for tensor, align in operands]
    count = torch.cuda.get_device_properties(x.device).multi_processor_count
    arguments = (*pointers, M, N, K, count, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
    key = (x.dtype, bias is None)
    if key not in compiled:
        compiled[key] = cute.compile(launch, *arguments, bias is not None, STAGES, SLOTS, CLUSTER, GROUP)
    compiled[key](*arguments)


def linear_gelu(x, weight, bias, residual):
    x, weight, bias, residual, out = checked(x, weight, bias, residual)
    if out.numel():
        with torch.cuda.device_of(out):
            run = launch_cluster if tma_can_address(x, weight, residual) else launch_masked
            run(x, weight, bias, residual, out)
    return out


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x, residual):
        return linear_gelu(x, self.linear.weight, self.linear.bias, residual)
