// What only sm_90a has and several kernels need: barriers in shared memory, bulk copies of boxes of a matrix, and products of
// tiles that lie in shared memory (wgmma).

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// ---- Barriers, by their address in shared memory.

__device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra READY;\n"
        "bra AGAIN;\nREADY:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// ---- Bulk copies of boxes of a matrix, of 64 columns, whose bytes a barrier counts.

struct __align__(64) TensorMap {
    u64 words[16];
};

// Arrives, and says how many bytes are still to come.
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, u32 column, u32 row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
                 "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

// Orders what this thread has written to shared memory before what the tensor cores or a bulk copy do there.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Products.

// A matrix in shared memory, 128-byte swizzle: eight rows of 128 bytes are 1024 bytes. `leading` is the distance of blocks of 64
// columns, which only matters where the matrix is transposed on the way.
__device__ __forceinline__ u64 describe_matrix(u32 address, u32 leading) {
    return (u64)(address >> 4) | (u64)(leading >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// Registers of sums, as operands.
#define FOUR(x, i) "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3])
#define THIRTY_TWO(x, i) \
    FOUR(x, i), FOUR(x, i + 1), FOUR(x, i + 2), FOUR(x, i + 3), FOUR(x, i + 4), FOUR(x, i + 5), FOUR(x, i + 6), FOUR(x, i + 7)

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// All products are done but for the last `LEFT` groups; what they made must not be read earlier.
template <int LEFT, int N>
__device__ __forceinline__ void wait_products(float (&made)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(made[i][0]), "+f"(made[i][1]), "+f"(made[i][2]), "+f"(made[i][3])::"memory");
}

#endif
