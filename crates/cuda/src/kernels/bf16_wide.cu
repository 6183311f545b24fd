// Products of bf16 weights with 9 to 64 tokens where there is wgmma (sm_90a). The weights' way from memory is what takes the time: a
// library divides such products between too few blocks, or sums their parts in a launch of its own, and its kernels do not
// fetch weights while the one before ends.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ void multiply(float (&sums)[2][4], u64 rows, u64 tokens) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, 0, 0;\n}"
        : FOUR(sums, 0), FOUR(sums, 1) : "l"(rows), "l"(tokens) : "memory");
}

__device__ __forceinline__ void multiply(float (&sums)[4][4], u64 rows, u64 tokens) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1, 0, 0;\n}"
        : FOUR(sums, 0), FOUR(sums, 1), FOUR(sums, 2), FOUR(sums, 3) : "l"(rows), "l"(tokens) : "memory");
}

__device__ __forceinline__ void multiply(float (&sums)[8][4], u64 rows, u64 tokens) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
        "}, %32, %33, p, 1, 1, 0, 0;\n}"
        : THIRTY_TWO(sums, 0) : "l"(rows), "l"(tokens) : "memory");
}

// `wide.rs` knows the stages too.
template <u32 TOKENS, u32 BLOCKS>
using Bf16Wide = Wide<TOKENS, 128 * 128, BLOCKS == 3 ? (TOKENS == 64 ? 3 : TOKENS == 32 ? 3 : 4) : (TOKENS == 64 ? 4 : TOKENS == 32 ? 5 : 6)>;

template <class W>
__device__ __forceinline__ void consume(const Place& place, const W& ring, float (&sums)[W::TOKENS / 8][4]) {
    u32 stage = 0, parity = 0, last = 0, half = threadIdx.x / 128;
    for (u32 number = 0; number < place.count; number++) {
        u32 tokens = ring.stages + stage * W::STAGE_BYTES, rows = tokens + W::INPUT_BYTES + half * (64 * 128);
        wait_barrier(ring.full + stage * 8, parity);
        begin_products();
#pragma unroll
        for (u32 k = 0; k < 4; k++) multiply(sums, describe_matrix(rows + k * 32, 16), describe_matrix(tokens + k * 32, 16));
        commit_products();
        // The products before these are done.
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (number > 0) release(ring.empty, last);
        last = stage;
        if (++stage == W::STAGES) stage = 0, parity ^= 1;
    }
    wait_products<0>(sums);
}

template <u32 TOKENS, u32 BLOCKS, bool GATED>
__device__ __forceinline__ void wide(const WideProductParams& p) {
    using W = Bf16Wide<TOKENS, BLOCKS>;
    extern __shared__ u8 shared[];
    W ring;
    Place place(p);
    start(ring, shared);
    allow_next();
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS)
            feed<W, 64>(p, place, ring, [&](u32 to, u32 chunk, u32 barrier) {
                if (GATED) {
                    load_box(to, &p.weight, chunk * 64, place.tile * 64, barrier, read_once());
                    load_box(to + 64 * 128, &p.weight, chunk * 64, p.product.num_rows + place.tile * 64, barrier, read_once());
                } else {
                    load_box(to, &p.weight, chunk * 64, place.tile * 128, barrier, read_once());
                }
            });
        __syncwarp();
        stay(place);
    } else {
        float sums[TOKENS / 8][4] = {};
        wait_for_previous();
        consume(place, ring, sums);
        join<TOKENS, GATED>(p, place, ring.stages, sums, [](u32, u32, float(&)[4], float(&)[4]) {});
    }
}

#define BF16_WIDE(TOKENS, BLOCKS)                                                                                                             \
    KERNEL __launch_bounds__(FEW_THREADS, BLOCKS) plain_##TOKENS##_##BLOCKS(const __grid_constant__ WideProductParams p) {                    \
        wide<TOKENS, BLOCKS, false>(p);                                                                                                       \
    }                                                                                                                                         \
    KERNEL __launch_bounds__(FEW_THREADS, BLOCKS) gated_##TOKENS##_##BLOCKS(const __grid_constant__ WideProductParams p) {                    \
        wide<TOKENS, BLOCKS, true>(p);                                                                                                        \
    }

BF16_WIDE(16, 2)
BF16_WIDE(32, 2)
BF16_WIDE(64, 2)
BF16_WIDE(16, 3)
BF16_WIDE(32, 3)
BF16_WIDE(64, 3)

#endif
