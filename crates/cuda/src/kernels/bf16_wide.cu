// Products of bf16 weights with 9 to 48 tokens where there is wgmma (sm_90a). The weights' way from memory is what takes the time: a
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

__device__ __forceinline__ void multiply(float (&sums)[6][4], u64 rows, u64 tokens) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23}, %24, %25, p, 1, 1, 0, 0;\n}"
        : FOUR(sums, 0), FOUR(sums, 1), FOUR(sums, 2), FOUR(sums, 3), FOUR(sums, 4), FOUR(sums, 5)
        : "l"(rows), "l"(tokens)
        : "memory");
}

// `wide.rs` knows the stages too.
template <u32 TOKENS>
using Bf16Wide = Wide<TOKENS, 128 * 128, TOKENS == 16 ? 6 : 5>;

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

template <u32 TOKENS, bool GATED>
__device__ __forceinline__ void wide(const WideProductParams& p) {
    using W = Bf16Wide<TOKENS>;
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

#define BF16_WIDE(TOKENS)                                                                                                                     \
    KERNEL __launch_bounds__(FEW_THREADS, 2) wide_##TOKENS(const __grid_constant__ WideProductParams p) { wide<TOKENS, false>(p); }           \
    KERNEL __launch_bounds__(FEW_THREADS, 2) gated_wide_##TOKENS(const __grid_constant__ WideProductParams p) { wide<TOKENS, true>(p); }

BF16_WIDE(16)
BF16_WIDE(32)
BF16_WIDE(48)

#endif
