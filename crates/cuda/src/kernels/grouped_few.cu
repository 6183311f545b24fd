// The grouped products of `grouped.cu` for tiles of few rows, as decodes have them, where the weights' way from memory binds: weights
// are the M side, up to 64 rows of activations the N side, as many as the tile has. So a tile of five rows moves little more than its
// weights. Gate and up take their rows from where the tokens lie, by number: nothing is copied into the order of experts.
//
// Four warps fetch stages of 64 columns into a ring, a warpgroup multiplies. Weights come by bulk copies; the rows of a tile, and no
// more of them than it has, are copied 16 bytes at a time: they go from the L2 to every block that has outputs of the tile, and what the
// multiprocessors get from there is what binds.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// `grouped.rs` knows these numbers too. A tile has 128 rows of weights: gate and up of 64 outputs, or 128 outputs.
__device__ constexpr u32 FEW_CONSUMERS = 128, FEW_FEEDERS = 128, FEW_STAGES = 8, FEW_TOKENS = 64, FEW_BOX_ROWS = 64, FEW_RESULT_ROWS = 16;
__device__ constexpr u32 FEW_BOX_BYTES = FEW_BOX_ROWS * 128, FEW_WEIGHT_BYTES = 2 * FEW_BOX_BYTES, FEW_TOKEN_BYTES = FEW_TOKENS * 128;
__device__ constexpr u32 FEW_STAGE_BYTES = FEW_WEIGHT_BYTES + FEW_TOKEN_BYTES;

struct FewParams {
    TensorMap weight;     // [experts * expert_rows, cols], boxes of 64 rows by 64 columns
    TensorMap output_map; // [rows, width], boxes of 16 rows by 64 columns
    const u32* num_tiles;
    const u32* tiles;     // the expert of each, and how many rows it has from bit 16 on
    const u32* sources;   // [rows], gate and up: which row of the input each is
    const bf16* input;    // [tokens or rows, cols]
    u32 width, expert_rows, cols;
    u32 num_chunks;       // of 64 columns
    u32 activation;
};

template <bool IS_GATED>
struct FewWalk {
    static constexpr u32 WIDTH = IS_GATED ? 64 : 128; // outputs of a tile
    u32 num_outputs, number, end, word, next; // the words of this tile and of the next one of this block

    __device__ __forceinline__ explicit FewWalk(const FewParams& p) {
        num_outputs = (p.width + WIDTH - 1) / WIDTH;
        number = blockIdx.x;
        end = __ldcg(p.num_tiles) * num_outputs;
        word = read(p, number);
        next = read(p, number + gridDim.x);
    }
    __device__ __forceinline__ u32 read(const FewParams& p, u32 at) const { return at < end ? __ldcg(p.tiles + at / num_outputs) : 0; }
    __device__ __forceinline__ bool is_over() const { return number >= end; }
    __device__ __forceinline__ void go_on(const FewParams& p) {
        number += gridDim.x;
        word = next;
        next = read(p, number + gridDim.x);
    }
    __device__ __forceinline__ u32 tile() const { return number / num_outputs; }
    __device__ __forceinline__ u32 expert() const { return word & 0xffff; }
    __device__ __forceinline__ u32 count() const { return word >> 16; }
    __device__ __forceinline__ u32 output() const { return number % num_outputs * WIDTH; }
};

// The weights of a stage, by one thread: a box of the gate and one of up, or two neighbours.
template <bool IS_GATED>
__device__ __forceinline__ void load_weights(const FewParams& p, const FewWalk<IS_GATED>& walk, u32 chunk, u32 to, u32 barrier, u64 policy) {
    u32 first = walk.expert() * p.expert_rows + walk.output();
    expect_bytes(barrier, FEW_WEIGHT_BYTES);
    load_box(to, &p.weight, chunk * 64, first, barrier, policy);
    load_box(to + FEW_BOX_BYTES, &p.weight, chunk * 64, first + (IS_GATED ? p.width : FEW_BOX_ROWS), barrier, policy);
}

// By four warps: eight lanes have a row of 128 bytes at a time, every 16th of the tile.
template <bool IS_GATED>
__device__ __forceinline__ void feed_few(const FewParams& p, const Ring& ring) {
    constexpr u32 AHEAD = FEW_STAGES / 2; // stages whose rows are on their way
    u32 thread = threadIdx.x - FEW_CONSUMERS, lane = thread % 32, own = thread / 8, part = thread % 8;
    u32 stage = 0, parity = 1, oldest = 0, waiting = 0, ahead = 0;
    u64 policy = read_once();
    if (IS_GATED) wait_for_previous();
    FewWalk<IS_GATED> walk(p);
    if (!IS_GATED) {
        // The tiles are known since the gated product before: the first weights need not wait.
        ahead = walk.is_over() ? 0 : min(FEW_STAGES, p.num_chunks);
        if (thread == 0)
            for (u32 chunk = 0; chunk < ahead; chunk++)
                load_weights<IS_GATED>(p, walk, chunk, ring.stages + chunk * FEW_STAGE_BYTES, ring.full + chunk * 8, policy);
        wait_for_previous();
    }
    allow_next();
    auto announce = [&]() {
        fence_async();
        __syncwarp();
        if (lane == 0) arrive(ring.full + oldest * 8);
        oldest = oldest + 1 == FEW_STAGES ? 0 : oldest + 1;
    };
    for (; !walk.is_over(); walk.go_on(p)) {
        const bf16* rows[FEW_TOKENS / 16];
#pragma unroll
        for (u32 i = 0; i < FEW_TOKENS / 16; i++) {
            u32 row = walk.tile() * FEW_TOKENS + own + 16 * i;
            u32 source = own + 16 * i >= walk.count() ? 0 : IS_GATED ? __ldcg(p.sources + row) : row;
            rows[i] = p.input + (u64)source * p.cols + part * 8;
        }
        for (u32 chunk = 0; chunk < p.num_chunks; chunk++) {
            u32 to = ring.stages + stage * FEW_STAGE_BYTES;
            if (ahead > 0) {
                ahead--;
            } else {
                wait_barrier(ring.empty + stage * 8, parity);
                if (thread == 0) load_weights<IS_GATED>(p, walk, chunk, to, ring.full + stage * 8, policy);
                __syncwarp();
            }
            // What a row does not have is zero, as in the weights' boxes.
            u32 bytes = chunk * 64 + part * 8 < p.cols ? 16 : 0;
#pragma unroll
            for (u32 i = 0; i < FEW_TOKENS / 16; i++) {
                u32 row = own + 16 * i, place = to + FEW_WEIGHT_BYTES + row * 128 + ((part ^ row % 8) << 4);
                if (row < walk.count())
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(bytes ? rows[i] + chunk * 64 : rows[i]),
                                 "r"(bytes) : "memory");
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
            if (++stage == FEW_STAGES) stage = 0, parity ^= 1;
            if (++waiting < AHEAD) continue;
            waiting--;
            asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
            announce();
        }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    for (; waiting > 0; waiting--) announce();
}

// ---- Products: sums (64 rows of weights x TOKENS) = or += 16 columns of the weights times those of the tokens.

__device__ __forceinline__ void multiply(float (&sums)[2][4], u64 rows, u64 tokens, u32 adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, 0, 0;\n}"
        : FOUR(sums, 0), FOUR(sums, 1) : "l"(rows), "l"(tokens), "r"(adds) : "memory");
}

__device__ __forceinline__ void multiply(float (&sums)[4][4], u64 rows, u64 tokens, u32 adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1, 0, 0;\n}"
        : FOUR(sums, 0), FOUR(sums, 1), FOUR(sums, 2), FOUR(sums, 3) : "l"(rows), "l"(tokens), "r"(adds) : "memory");
}

__device__ __forceinline__ void multiply(float (&sums)[8][4], u64 rows, u64 tokens, u32 adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
        "}, %32, %33, p, 1, 1, 0, 0;\n}"
        : THIRTY_TWO(sums, 0) : "l"(rows), "l"(tokens), "r"(adds) : "memory");
}

__device__ __forceinline__ void store_transposed(u32 place, const u32 (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3]) : "memory");
}

// A warp has 16 outputs of 16 tokens at a time: lane i says where the outputs `i / 16 * 8..` of token `i % 16` go. A box of results is
// 16 tokens by 64 outputs.
template <bool IS_GATED, u32 KIND, u32 TILES>
__device__ __forceinline__ void stage_few(u32 results, const float (&first)[TILES][4], const float (&second)[TILES][4]) {
    u32 lane = threadIdx.x % 32, token = lane % 16, chunk = threadIdx.x / 32 % 4 * 2 + lane / 16;
    u32 place = results + token * 128 + ((chunk ^ token % 8) << 4);
#pragma unroll
    for (u32 i = 0; i < TILES; i += 2) {
        u32 words[4];
        // Tokens of 8, then outputs of 8.
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const float* x = first[i + j % 2] + j / 2 * 2;
            const float* y = second[i + j % 2] + j / 2 * 2;
            words[j] = IS_GATED ? pack_bf16(activate_fast<KIND>(x[0]) * y[0], activate_fast<KIND>(x[1]) * y[1]) : pack_bf16(x[0], x[1]);
        }
        store_transposed(place + i / 2 * 2048, words);
        if (!IS_GATED) {
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const float* y = second[i + j % 2] + j / 2 * 2;
                words[j] = pack_bf16(y[0], y[1]);
            }
            store_transposed(place + FEW_TOKEN_BYTES + i / 2 * 2048, words);
        }
    }
}

// All products of a tile with TILES times eight tokens, by a warpgroup.
template <bool IS_GATED, u32 TILES>
__device__ __forceinline__ void consume_few(const FewParams& p, const FewWalk<IS_GATED>& walk, const Ring& ring, u32 results, u32& stage,
                                            u32& parity) {
    u32 lane = threadIdx.x % 32, last = 0;
    float first[TILES][4], second[TILES][4];
    auto release = [&](u32 stage) {
        if (lane == 0) arrive(ring.empty + stage * 8);
    };
    for (u32 chunk = 0; chunk < p.num_chunks; chunk++) {
        u32 rows = ring.stages + stage * FEW_STAGE_BYTES, tokens = rows + FEW_WEIGHT_BYTES;
        wait_barrier(ring.full + stage * 8, parity);
        begin_products();
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            multiply(first, describe_matrix(rows + k * 32, 16), describe_matrix(tokens + k * 32, 16), chunk + k > 0);
            multiply(second, describe_matrix(rows + FEW_BOX_BYTES + k * 32, 16), describe_matrix(tokens + k * 32, 16), chunk + k > 0);
        }
        commit_products();
        // The products before these are done.
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (chunk > 0) release(last);
        last = stage;
        if (++stage == FEW_STAGES) stage = 0, parity ^= 1;
    }
    wait_products<0>(first);
    wait_products<0>(second);
    release(last);
    bool leads = threadIdx.x == 0;
    auto meet = [] { asm volatile("bar.sync 1, 128;" ::: "memory"); };
    if (leads) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    meet();
    if (!IS_GATED || p.activation == 0) stage_few<IS_GATED, 0, TILES>(results, first, second);
    else if (p.activation == 1) stage_few<IS_GATED, 1, TILES>(results, first, second);
    else stage_few<IS_GATED, 2, TILES>(results, first, second);
    fence_async();
    meet();
    if (!leads) return;
    // What lies beyond the outputs of an expert is not written.
    u32 output = walk.output(), row = walk.tile() * FEW_TOKENS;
    for (u32 i = 0; i < walk.count(); i += FEW_RESULT_ROWS) {
#pragma unroll
        for (u32 box = 0; box < (IS_GATED ? 1 : 2); box++)
            if (output + box * 64 < p.width) store_box(&p.output_map, output + box * 64, row + i, results + box * FEW_TOKEN_BYTES + i * 128);
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <bool IS_GATED>
__device__ __forceinline__ void grouped_few(const FewParams& p) {
    extern __shared__ u8 shared[];
    Ring ring;
    // The swizzle counts from multiples of 1024.
    ring.stages = (u32)__cvta_generic_to_shared(shared) + 1023 & ~1023u;
    u32 results = ring.stages + FEW_STAGES * FEW_STAGE_BYTES;
    ring.full = results + (IS_GATED ? 1 : 2) * FEW_TOKEN_BYTES;
    ring.empty = ring.full + FEW_STAGES * 8;
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < FEW_STAGES; s++) {
            // The weights, and the rows that each of the four warps copies.
            init_barrier(ring.full + s * 8, 1 + FEW_FEEDERS / 32);
            init_barrier(ring.empty + s * 8, FEW_CONSUMERS / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_async();
    }
    __syncthreads();
    if (threadIdx.x >= FEW_CONSUMERS) {
        feed_few<IS_GATED>(p, ring);
        return;
    }
    wait_for_previous();
    u32 stage = 0, parity = 0;
    for (FewWalk<IS_GATED> walk(p); !walk.is_over(); walk.go_on(p)) {
        if (walk.count() <= 16) consume_few<IS_GATED, 2>(p, walk, ring, results, stage, parity);
        else if (walk.count() <= 32) consume_few<IS_GATED, 4>(p, walk, ring, results, stage, parity);
        else consume_few<IS_GATED, 8>(p, walk, ring, results, stage, parity);
    }
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

KERNEL __launch_bounds__(FEW_CONSUMERS + FEW_FEEDERS, 1) grouped_few_gated(const __grid_constant__ FewParams p) { grouped_few<true>(p); }
KERNEL __launch_bounds__(FEW_CONSUMERS + FEW_FEEDERS, 1) grouped_few_plain(const __grid_constant__ FewParams p) { grouped_few<false>(p); }

#endif
