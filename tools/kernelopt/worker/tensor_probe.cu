// The bare tensor operations of a problem: as many matrix instructions as it has, on random operands that stay in shared
// memory, and nothing else. With OTHER, four more warps do the problem's other arithmetic beside them.
//
// One block per multiprocessor, all of them alike. A block multiplies one panel again and again: A of 128 rows, B of 256
// (wgmma) or 128 (mma.sync) rows, each row 128 bytes of k. After TILE panels it starts a new sum, as after a tile.
// tensor_probe.py compiles this file with: INSTRUCTION (PTX), WGMMA (0, 1), INTEGER (sums are int32), TRANSPOSABLE
// (wgmma has flags that transpose operands), OTHER (0, 1).
// The first dimension of `out` is the block, the second the multiplying thread; the two values are the sum of the
// thread's results of the last tile, and the sum of its first result over all tiles. `clocks` gets the cycles and the
// nanoseconds that block 0 took: NVML's clock is a sample, which may lie beside the kernel.

typedef unsigned int u32;
typedef unsigned long long u64;
#if INTEGER
typedef int Sum;
#define REGISTER(x) "+r"(x)
#else
typedef float Sum;
#define REGISTER(x) "+f"(x)
#endif

constexpr int ROW = 128;  // bytes of k in a row of a panel
constexpr int TILE = 32;  // panels of a sum
constexpr int MULTIPLIERS = 256, OTHERS = OTHER ? 128 : 0;  // threads
constexpr int CHAINS = 16;  // independent sums of a thread with other arithmetic
#if WGMMA
constexpr int ROWS_A = 128, ROWS_B = 256;
#else
constexpr int ROWS_A = 256, ROWS_B = 128;
#endif

__device__ __forceinline__ u32 shared_address(const void *pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Copy the panels from global memory; 16 bytes `chunk` of a row lie at `chunk ^ row % 8` (the 128-byte swizzle).
__device__ __forceinline__ void fill(unsigned char *shared, const uint4 *panels) {
    for (int i = threadIdx.x; i < (ROWS_A + ROWS_B) * (ROW / 16); i += blockDim.x) {
        int row = i / 8, chunk = i % 8;
        *reinterpret_cast<uint4 *>(shared + row * ROW + ((chunk ^ (row % 8)) * 16)) = panels[i];
    }
}

#if WGMMA
constexpr int SUMS = 128;  // registers of a thread: 64 rows x 256 columns over 128 threads

#define TEN(t) "%" t "0,%" t "1,%" t "2,%" t "3,%" t "4,%" t "5,%" t "6,%" t "7,%" t "8,%" t "9,"
#define ALL                                                                                                             \
    TEN("") TEN("1") TEN("2") TEN("3") TEN("4") TEN("5") TEN("6") TEN("7") TEN("8") TEN("9") TEN("10") TEN("11")          \
    "%120,%121,%122,%123,%124,%125,%126,%127"
#define EIGHT(d, i)                                                                                                     \
    REGISTER(d[i]), REGISTER(d[i + 1]), REGISTER(d[i + 2]), REGISTER(d[i + 3]), REGISTER(d[i + 4]), REGISTER(d[i + 5]), \
        REGISTER(d[i + 6]), REGISTER(d[i + 7])
#define SUMS_OF(d)                                                                                                      \
    EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24), EIGHT(d, 32), EIGHT(d, 40), EIGHT(d, 48), EIGHT(d, 56),       \
        EIGHT(d, 64), EIGHT(d, 72), EIGHT(d, 80), EIGHT(d, 88), EIGHT(d, 96), EIGHT(d, 104), EIGHT(d, 112), EIGHT(d, 120)
#if INTEGER
#define SIGNS ""
#elif TRANSPOSABLE
#define SIGNS ", 1, 1, 0, 0"  // of A and B; both K-major
#else
#define SIGNS ", 1, 1"
#endif

__device__ __forceinline__ u64 descriptor(u32 address) {  // 128-byte swizzle, 1024 bytes from 8 rows to the next 8
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

__device__ __forceinline__ void multiply(Sum (&d)[SUMS], u64 a, u64 b, int add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %130, 0;\n" INSTRUCTION " {" ALL "}, %128, %129, p" SIGNS ";}\n"
                 : SUMS_OF(d)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ __forceinline__ void settle(Sum (&d)[SUMS]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;\n" : SUMS_OF(d)::"memory");
}

// One panel: four instructions, each takes 32 bytes of k.
__device__ __forceinline__ void panel(Sum (&d)[SUMS], u64 a, u64 b, int add) {
    asm volatile("wgmma.fence.sync.aligned;\n" : SUMS_OF(d)::"memory");
#pragma unroll
    for (int step = 0; step < ROW / 32; step++) multiply(d, a + step * (32 >> 4), b + step * (32 >> 4), add || step);
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;\n" ::: "memory");
}

struct Operands {
    u64 a, b;
    __device__ Operands(u32 shared) {
        a = descriptor(shared + (threadIdx.x / 128) * 64 * ROW), b = descriptor(shared + ROWS_A * ROW);
    }
};

__device__ __forceinline__ void one_panel(Sum (&d)[SUMS], const Operands &from, int add) {
    panel(d, from.a, from.b, add);
}
#else
constexpr int SUMS = 128;  // a warp: 64 rows x 64 columns, as 4 x 8 products of 16 x 8

__device__ __forceinline__ void load4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ __forceinline__ void multiply(Sum *d, const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(INSTRUCTION " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : REGISTER(d[0]), REGISTER(d[1]), REGISTER(d[2]), REGISTER(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void settle(Sum (&)[SUMS]) {}

// Eight warps, 4 x 2: each has 64 rows of A and 64 of B.
struct Operands {
    u32 a, b, row_a, row_b, half_a, half_b;
    __device__ Operands(u32 shared) {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        row_a = lane % 16, half_a = lane / 16;  // tiles of ldmatrix: rows 0-7, rows 8-15, then the same of the next 16 bytes
        row_b = lane % 8 + lane / 16 * 8, half_b = lane / 8 % 2;  // rows 0-7, its next 16 bytes, then rows 8-15
        a = shared + (warp / 2) * 64 * ROW;
        b = shared + (ROWS_A + (warp % 2) * 64) * ROW;
    }
};

__device__ __forceinline__ u32 at(u32 base, u32 row, u32 chunk) {
    return base + row * ROW + ((chunk ^ (row % 8)) * 16);
}

__device__ __forceinline__ void one_panel(Sum (&d)[SUMS], const Operands &from, int add) {
    if (!add) {
#pragma unroll
        for (int i = 0; i < SUMS; i++) d[i] = 0;
    }
#pragma unroll
    for (int step = 0; step < ROW / 32; step++) {
        u32 a[4][4], b[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            load4(a[i], at(from.a, 16 * i + from.row_a, 2 * step + from.half_a));
            load4(b[i], at(from.b, 16 * i + from.row_b, 2 * step + from.half_b));
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) multiply(d + (8 * i + j) * 4, a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
}
#endif

__device__ __forceinline__ void products(unsigned char *shared, int panels, Sum *out) {
    Sum d[SUMS];
    Operands from(shared_address(shared));
    Sum first = 0, last = 0;
#pragma unroll
    for (int i = 0; i < SUMS; i++) d[i] = 0;
    for (int done = 0; done < panels; done += TILE) {
        int end = panels - done < TILE ? panels - done : TILE;
#pragma unroll 1
        for (int i = 0; i < end; i++) one_panel(d, from, i);
        settle(d);
        first += d[0];
    }
#pragma unroll
    for (int i = 0; i < SUMS; i++) last += d[i];
    Sum *mine = out + (blockIdx.x * MULTIPLIERS + threadIdx.x) * 2;
    mine[0] = last, mine[1] = first;
}

// `fmas` multiply-adds and `exps` powers of two in fp32 a thread, on random values. Their sum is written, so that all of
// them have to be done.
__device__ __forceinline__ void other_arithmetic(const unsigned char *shared, int fmas, int exps, float *rest) {
    float sums[CHAINS], scale = 1.0f - (threadIdx.x % 32) * 0.0009765625f, total = 0;
#pragma unroll
    for (int i = 0; i < CHAINS; i++)
        sums[i] = (float)*(reinterpret_cast<const unsigned short *>(shared) + threadIdx.x * CHAINS + i) * 1e-5f;
    float values[CHAINS];
#pragma unroll
    for (int i = 0; i < CHAINS; i++) values[i] = sums[i] - 0.3f;
#pragma unroll 1
    for (int done = 0; done < fmas; done += CHAINS) {
#pragma unroll
        for (int i = 0; i < CHAINS; i++) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(sums[i]) : "f"(scale), "f"(values[i]));
    }
#pragma unroll 1
    for (int done = 0; done < exps; done += CHAINS) {
#pragma unroll
        for (int i = 0; i < CHAINS; i++) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(values[i]));
    }
#pragma unroll
    for (int i = 0; i < CHAINS; i++) total += sums[i] + values[i];
    rest[blockIdx.x * 128 + threadIdx.x - MULTIPLIERS] = total;
}

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + OTHERS, 1)
    tensor_ceiling(const uint4 *panels, Sum *out, float *rest, u64 *clocks, int count, int fmas, int exps) {
    extern __shared__ __align__(1024) unsigned char shared[];
    u64 cycles = clock64(), start = nanoseconds();
    fill(shared, panels);
#if WGMMA
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
    __syncthreads();
    if (threadIdx.x < MULTIPLIERS)
        products(shared, count, out);
    else
        other_arithmetic(shared, fmas, exps, rest);
    if (blockIdx.x == 0 && threadIdx.x == 0) clocks[0] = clock64() - cycles, clocks[1] = nanoseconds() - start;
}
