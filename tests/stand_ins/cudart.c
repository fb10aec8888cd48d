/* A stand-in for the CUDA runtime: it does nothing, and writes down what a launch hands over. */
#include <stdint.h>
#include <string.h>
typedef struct { unsigned x, y, z; } dim3;
enum { WORDS = 16 };
int launched, wanted; /* wanted: how many arguments of a kernel there are */
unsigned grid[3];
uint64_t stream, words[WORDS], first[WORDS], last[WORDS]; /* 8 bytes of each argument; the first and the last, whole */
unsigned former_grid[3]; /* of the launch before, as is its first argument */
uint64_t former_stream, former[WORDS];
static dim3 blocks;
static void* on;

static int noted(dim3 size, void* where, void** given) {
    memcpy(former_grid, grid, sizeof grid), memcpy(former, first, sizeof first), former_stream = stream;
    ++launched, grid[0] = size.x, grid[1] = size.y, grid[2] = size.z, stream = (uint64_t)where;
    for (int i = 0; i < wanted; ++i) memcpy(words + i, given[i], 8);
    memcpy(first, given[0], wanted == 1 ? 64 : 48);
    if (wanted) memcpy(last, given[wanted - 1], 40);
    return 0;
}
void** __cudaRegisterFatBinary(void* binary) { static void* handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void** handle) {}
void __cudaUnregisterFatBinary(void** handle) {}
char __cudaInitModule(void** handle) { return 1; }
int __cudaRegisterFunction() { return 0; }
unsigned __cudaPushCallConfiguration(dim3 size, dim3 threads, uint64_t bytes, void* where) { blocks = size, on = where; return 0; }
int __cudaPopCallConfiguration(dim3* size, dim3* threads, uint64_t* bytes, void** where) {
    *size = blocks, *threads = (dim3){1, 1, 1}, *bytes = 0, *where = on;
    return 0;
}
int __cudaGetKernel(void** kernel, const void* function) { *kernel = (void*)function; return 0; }
int __cudaLaunchKernel(void* f, dim3 size, dim3 threads, void** given, uint64_t bytes, void* where) { return noted(size, where, given); }
int cudaLaunchKernel(const void* f, dim3 size, dim3 threads, void** given, uint64_t bytes, void* where) { return noted(size, where, given); }
int cudaLaunchKernelExC(const unsigned* config, const void* f, void** given) {
    return noted((dim3){config[0], config[1], config[2]}, *(void**)(config + 8), given);
}
int cudaFuncSetAttribute() { return 0; }
int cudaGetDevice(int* device) { *device = 0; return 0; }
int cudaDeviceGetAttribute(int* value, int attribute, int device) { *value = 132; return 0; }
int cudaOccupancyMaxActiveClusters(int* clusters, const void* kernel, const void* config) { *clusters = 30; return 0; }
int cudaGetLastError() { return 0; }
int encoded; /* tensor maps */
uint64_t maps[64][4]; /* of each: address, columns, rows, pitch; in a ring */
static int encode(uint64_t* map, int type, unsigned rank, uint64_t address, const uint64_t* sizes, const uint64_t* strides) {
    memset(map, 0, 128), map[0] = address, map[1] = sizes[0], map[2] = sizes[1];
    uint64_t* kept = maps[encoded++ % 64];
    kept[0] = address, kept[1] = sizes[0], kept[2] = sizes[1], kept[3] = strides[0];
    return 0;
}
int cudaGetDriverEntryPointByVersion(const char* name, void** function) { *function = encode; return 0; }
