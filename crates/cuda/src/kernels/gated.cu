// Gate and up of eight tokens and more where there is wgmma (sm_90a), bf16 weights, or e4m3 on both sides where FP8 is 1, with a scale
// for each token and each row of the weight, which multiply the sums at the end:
// `output = activation(input · gateᵀ) * (input · upᵀ)`. A library's product would write both halves to memory for another
// kernel to read.
//
// In a block one thread fetches stages of 64 columns into a ring (bulk copies), and two warpgroups multiply, each 64 tokens by
// some outputs, with gate and up side by side in the sums of one thread. They wait for stages on their own, so that one
// computes activations while the other has the tensor cores. Weights do not depend on the kernel before, so that the first stages
// are asked for while it ends.
//
// Many tokens: two blocks of a cluster take 256 tokens by `WIDTH` outputs at a time, 128 tokens each, 64 a warpgroup, and
// each fetches gate or up for both. Clusters go through groups of tokens, and in a group through the outputs, so that the
// group's input stays in the L2. There are two widths, because with few tokens it matters how many rounds the tiles take.
//
// Few tokens: a block takes all of up to 128, or of up to 64, by 128 outputs. The weights' way from memory is what takes the time.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Columns of a stage: 128 bytes.
#define COLUMNS (FP8 ? 128 : 64)
#if FP8
#define PRODUCT_KIND "k32.f32.e4m3.e4m3 {"
#define PRODUCT_FLAGS ", p, 1, 1;\n}"
#else
#define PRODUCT_KIND "k16.f32.bf16.bf16 {"
#define PRODUCT_FLAGS ", p, 1, 1, 0, 0;\n}"
#endif
#define CONSUMERS 256 // threads that multiply

// `gated.rs` knows these numbers too.
template <u32 CLUSTER_, u32 WIDTH_, u32 TOKENS_, u32 STAGES_>
struct Shape {
    static constexpr u32 CLUSTER = CLUSTER_, WIDTH = WIDTH_, STAGES = STAGES_;
    static constexpr u32 TOKENS = TOKENS_; // of a block
    static constexpr u32 OUTPUTS = TOKENS == 128 ? WIDTH : WIDTH / 2; // of a warpgroup
};

struct GatedParams {
    TensorMap input;      // boxes of TOKENS rows by COLUMNS columns
    TensorMap weight;     // boxes of OUTPUTS rows by COLUMNS columns
    TensorMap output_map; // boxes of 64 rows by 64 columns
    bf16* output;
    u32 width, num_tokens;
    u32 num_chunks; // of COLUMNS columns
    u32 group;      // token tiles of a group
    u32 activation;
    const float* input_scales;  // [num_tokens], of e4m3
    const float* weight_scales; // [2 * width]
};

// ---- A cluster.

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives at the same barrier of another block.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 rank) {
    asm volatile("{\n.reg .b32 place;\nmapa.shared::cluster.u32 place, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [place];\n}" ::
                 "r"(barrier), "r"(rank) : "memory");
}

// ---- Copies.

// With a policy for the L2.
__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, u32 column, u32 row, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::
            "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy) : "memory");
}

// For both blocks of a cluster, to the same place in each.
__device__ __forceinline__ void load_shared_box(u32 to, const TensorMap* map, u32 column, u32 row, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5, %6;" ::
            "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((u16)3), "l"(policy) : "memory");
}

__device__ __forceinline__ void store_box(const TensorMap* map, u32 column, u32 row, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(column), "r"(row),
                 "r"(from) : "memory");
}

// ---- The walk of a cluster over the tiles.

struct Tile {
    u32 token, output; // the first ones of the cluster
};

template <class SHAPE>
struct Walk {
    u32 num_tokens, num_outputs, number, end; // the first two in tiles

    __device__ __forceinline__ explicit Walk(const GatedParams& p) {
        num_tokens = (p.num_tokens + SHAPE::CLUSTER * SHAPE::TOKENS - 1) / (SHAPE::CLUSTER * SHAPE::TOKENS);
        num_outputs = p.width / SHAPE::WIDTH;
        number = blockIdx.x / SHAPE::CLUSTER;
        end = num_tokens * num_outputs;
    }
    __device__ __forceinline__ bool is_over() const { return number >= end; }
    __device__ __forceinline__ void go_on() { number += gridDim.x / SHAPE::CLUSTER; }
    __device__ __forceinline__ Tile tile(u32 group) const {
        u32 first = number / (group * num_outputs) * group, size = min(group, num_tokens - first);
        u32 rest = number - first * num_outputs;
        return {(first + rest % size) * SHAPE::CLUSTER * SHAPE::TOKENS, rest / size * SHAPE::WIDTH};
    }
};

// ---- The ring.

// A stage has the tokens, then gate and up of the first warpgroup's outputs, then those of the second's if they differ.
template <class SHAPE>
struct Ring {
    static constexpr u32 TOKEN_BYTES = SHAPE::TOKENS * 128, BOX_BYTES = SHAPE::OUTPUTS * 128;
    static constexpr u32 STAGE_BYTES = TOKEN_BYTES + 2 * SHAPE::WIDTH * 128;
    u32 rank, stages, full, empty;
    u64 policy; // of weights

    __device__ __forceinline__ void load_weights(const GatedParams& p, u32 stage, u32 chunk, u32 output) const {
        u32 to = stages + stage * STAGE_BYTES + TOKEN_BYTES, barrier = full + stage * 8;
        expect_bytes(barrier, STAGE_BYTES);
        if constexpr (SHAPE::CLUSTER == 2) {
            load_shared_box(to + rank * BOX_BYTES, &p.weight, chunk * COLUMNS, output + rank * p.width, barrier, policy);
        } else {
#pragma unroll
            for (u32 box = 0; box < 2 * SHAPE::WIDTH / SHAPE::OUTPUTS; box++)
                load_box(to + box * BOX_BYTES, &p.weight, chunk * COLUMNS, output + box / 2 * SHAPE::OUTPUTS + box % 2 * p.width, barrier,
                         policy);
        }
    }
    __device__ __forceinline__ void load_tokens(const GatedParams& p, u32 stage, u32 chunk, u32 token) const {
        load_box(stages + stage * STAGE_BYTES, &p.input, chunk * COLUMNS, token + rank * SHAPE::TOKENS, full + stage * 8);
    }
};

template <class SHAPE>
__device__ __forceinline__ void feed(const GatedParams& p, const Ring<SHAPE>& ring) {
    Walk<SHAPE> walk(p);
    Tile tile = walk.tile(p.group);
    u32 early = walk.is_over() ? 0 : min(SHAPE::STAGES, p.num_chunks);
    for (u32 i = 0; i < early; i++) ring.load_weights(p, i, i, tile.output);
    wait_for_previous();
    for (u32 i = 0; i < early; i++) ring.load_tokens(p, i, i, tile.token);
    u32 stage = early % SHAPE::STAGES, parity = early == SHAPE::STAGES ? 0 : 1, chunk = early;
    for (; !walk.is_over(); walk.go_on(), chunk = 0) {
        tile = walk.tile(p.group);
        for (; chunk < p.num_chunks; chunk++) {
            wait_barrier(ring.empty + stage * 8, parity);
            ring.load_weights(p, stage, chunk, tile.output);
            ring.load_tokens(p, stage, chunk, tile.token);
            if (++stage == SHAPE::STAGES) stage = 0, parity ^= 1;
        }
    }
}

// ---- Products: sums (64 tokens x 256, 224 or 128 rows) = or += 16 columns of the tokens times those of the rows.

__device__ __forceinline__ void multiply(float (&sums)[32][4], u64 tokens, u64 rows, u32 adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256" PRODUCT_KIND
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
        "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"
        "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,"
        "%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,"
        "%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,"
        "%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
        "}, %128, %129" PRODUCT_FLAGS
        : THIRTY_TWO(sums, 0), THIRTY_TWO(sums, 8), THIRTY_TWO(sums, 16), THIRTY_TWO(sums, 24)
        : "l"(tokens), "l"(rows), "r"(adds)
        : "memory");
}

__device__ __forceinline__ void multiply(float (&sums)[28][4], u64 tokens, u64 rows, u32 adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %114, 0;\nwgmma.mma_async.sync.aligned.m64n224" PRODUCT_KIND
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
        "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"
        "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,"
        "%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,"
        "%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,"
        "%110,%111"
        "}, %112, %113" PRODUCT_FLAGS
        : THIRTY_TWO(sums, 0), THIRTY_TWO(sums, 8), THIRTY_TWO(sums, 16), FOUR(sums, 24), FOUR(sums, 25), FOUR(sums, 26), FOUR(sums, 27)
        : "l"(tokens), "l"(rows), "r"(adds)
        : "memory");
}

__device__ __forceinline__ void multiply(float (&sums)[16][4], u64 tokens, u64 rows, u32 adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128" PRODUCT_KIND
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
        "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"
        "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, %64, %65" PRODUCT_FLAGS
        : THIRTY_TWO(sums, 0), THIRTY_TWO(sums, 8)
        : "l"(tokens), "l"(rows), "r"(adds)
        : "memory");
}

template <u32 KIND>
__device__ __forceinline__ float activate_fast(float x) {
    if (KIND > 0) return activate(KIND, x);
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + exp2_approx(-1.44269504f * x)));
    return x * y;
}

// Where 16 bytes of a result wait: boxes of 64 tokens by 64 outputs, as bulk copies want them.
__device__ __forceinline__ u32 result_place(u32 results, u32 row, u32 chunk) {
    return results + chunk / 8 * (64 * 128) + row * 128 + ((chunk % 8 ^ row % 8) << 4);
}

// A warp has 16 tokens by 16 outputs at a time, as the tensor cores leave them.
template <u32 KIND, u32 OUTPUTS>
__device__ __forceinline__ void stage_results(const GatedParams& p, u32 token, u32 output, u32 results, const float (&sums)[OUTPUTS / 4][4]) {
    constexpr u32 UP = OUTPUTS / 8;
    u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#if FP8
    // Of the two tokens that a thread has, and then of two outputs at a time.
    u32 first = token + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const float tokens[2] = {p.input_scales[min(first, p.num_tokens - 1)], p.input_scales[min(first + 8, p.num_tokens - 1)]};
    const float* outputs = p.weight_scales + output + lane % 4 * 2;
#endif
#pragma unroll
    for (u32 i = 0; i < UP; i += 2) {
        u32 words[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const float* gate = sums[i + j / 2] + j % 2 * 2;
            const float* up = sums[UP + i + j / 2] + j % 2 * 2;
#if FP8
            const float2 of_gate = *reinterpret_cast<const float2*>(outputs + (i + j / 2) * 8);
            const float2 of_up = *reinterpret_cast<const float2*>(outputs + p.width + (i + j / 2) * 8);
            const float scale = tokens[j % 2];
            words[j] = pack_bf16(activate_fast<KIND>(gate[0] * (scale * of_gate.x)) * (up[0] * (scale * of_up.x)),
                                 activate_fast<KIND>(gate[1] * (scale * of_gate.y)) * (up[1] * (scale * of_up.y)));
            continue;
#endif
            words[j] = pack_bf16(activate_fast<KIND>(gate[0]) * up[0], activate_fast<KIND>(gate[1]) * up[1]);
        }
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(result_place(results, row, i + lane / 16)),
                     "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
    }
}

// The results of a warpgroup. It meets twice: when the results before have been read, and when these are there. One thread sends
// whole boxes; where the last box is not whole, all threads write what there is.
template <u32 OUTPUTS>
__device__ __forceinline__ void finish(const GatedParams& p, u32 token, u32 output, u32 results, const float (&sums)[OUTPUTS / 4][4]) {
    constexpr u32 CHUNKS = OUTPUTS / 8; // of 16 bytes
    bool leads = threadIdx.x % 128 == 0;
    auto meet = [] { asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory"); };
    if (leads) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    meet();
    if (p.activation == 0) stage_results<0, OUTPUTS>(p, token, output, results, sums);
    else if (p.activation == 1) stage_results<1, OUTPUTS>(p, token, output, results, sums);
    else stage_results<2, OUTPUTS>(p, token, output, results, sums);
    fence_async();
    meet();
    if constexpr (OUTPUTS % 64 == 0) {
        if (!leads) return;
#pragma unroll
        for (u32 column = 0; column < OUTPUTS; column += 64) store_box(&p.output_map, output + column, token, results + column * 128);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    } else {
#pragma unroll
        for (u32 i = threadIdx.x % 128; i < 64 * CHUNKS; i += 128) {
            u32 row = i / CHUNKS, chunk = i % CHUNKS;
            uint4 words;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                         : "r"(result_place(results, row, chunk)) : "memory");
            if (token + row < p.num_tokens)
                *reinterpret_cast<uint4*>(p.output + (u64)(token + row) * p.width + output + chunk * 8) = words;
        }
    }
}

template <class SHAPE>
__device__ __forceinline__ void consume(const GatedParams& p, const Ring<SHAPE>& ring, u32 results) {
    constexpr bool SPLITS_TOKENS = SHAPE::TOKENS == 128;
    u32 half = threadIdx.x / 128, lane = threadIdx.x % 32, stage = 0, parity = 0;
    auto release = [&](u32 stage) {
        if (SHAPE::CLUSTER > 1 && lane < SHAPE::CLUSTER) arrive_at(ring.empty + stage * 8, lane);
        if (SHAPE::CLUSTER == 1 && lane == 0) arrive(ring.empty + stage * 8);
    };
    for (Walk<SHAPE> walk(p); !walk.is_over(); walk.go_on()) {
        float sums[SHAPE::OUTPUTS / 4][4];
        u32 last = 0;
        for (u32 chunk = 0; chunk < p.num_chunks; chunk++) {
            u32 tokens = ring.stages + stage * Ring<SHAPE>::STAGE_BYTES, rows = tokens + Ring<SHAPE>::TOKEN_BYTES;
            if (SPLITS_TOKENS) tokens += half * (64 * 128);
            else rows += half * (2 * Ring<SHAPE>::BOX_BYTES);
            wait_barrier(ring.full + stage * 8, parity);
            begin_products();
#pragma unroll
            for (u32 k = 0; k < 4; k++)
                multiply(sums, describe_matrix(tokens + k * 32, 16), describe_matrix(rows + k * 32, 16), chunk + k > 0);
            commit_products();
            // The products before these are done.
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (chunk > 0) release(last);
            last = stage;
            if (++stage == SHAPE::STAGES) stage = 0, parity ^= 1;
        }
        wait_products<0>(sums);
        release(last);
        Tile tile = walk.tile(p.group);
        u32 token = tile.token + ring.rank * SHAPE::TOKENS + (SPLITS_TOKENS ? half * 64 : 0);
        u32 output = tile.output + (SPLITS_TOKENS ? 0 : half * SHAPE::OUTPUTS);
        finish<SHAPE::OUTPUTS>(p, token, output, results + half * ((SHAPE::OUTPUTS + 63) / 64 * (64 * 128)), sums);
    }
    if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

template <class SHAPE>
__device__ __forceinline__ void gated(const GatedParams& p) {
    extern __shared__ u8 shared[];
    Ring<SHAPE> ring;
    ring.rank = SHAPE::CLUSTER > 1 ? cluster_rank() : 0;
    ring.policy = p.num_tokens <= SHAPE::CLUSTER * SHAPE::TOKENS ? read_once() : read_often();
    // The swizzle counts from multiples of 1024.
    ring.stages = (u32)__cvta_generic_to_shared(shared) + 1023 & ~1023u;
    u32 results = ring.stages + SHAPE::STAGES * Ring<SHAPE>::STAGE_BYTES;
    ring.full = results + 2 * ((SHAPE::OUTPUTS + 63) / 64 * (64 * 128));
    ring.empty = ring.full + SHAPE::STAGES * 8;
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < SHAPE::STAGES; s++) {
            init_barrier(ring.full + s * 8, 1);
            init_barrier(ring.empty + s * 8, SHAPE::CLUSTER * CONSUMERS / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_async();
    }
    if (SHAPE::CLUSTER > 1) sync_cluster();
    else __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == CONSUMERS) feed<SHAPE>(p, ring);
        allow_next();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        wait_for_previous();
        consume<SHAPE>(p, ring, results);
    }
    // A block's barriers are there until the other one has arrived at them.
    __syncwarp();
    if (SHAPE::CLUSTER > 1) sync_cluster();
}

#define THREADS (CONSUMERS + 128)

KERNEL __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) gated_many_128(const __grid_constant__ GatedParams p) {
    gated<Shape<2, 128, 128, 4>>(p);
}
KERNEL __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) gated_many_112(const __grid_constant__ GatedParams p) {
    gated<Shape<2, 112, 128, 4>>(p);
}
KERNEL __launch_bounds__(THREADS, 1) gated_few_128(const __grid_constant__ GatedParams p) { gated<Shape<1, 128, 128, 4>>(p); }
KERNEL __launch_bounds__(THREADS, 1) gated_few_64(const __grid_constant__ GatedParams p) { gated<Shape<1, 128, 64, 5>>(p); }

#endif
