// Products of tiles of rows with the expert of each where there is wgmma (sm_90a), bf16 weights: gate and up with their activation, or
// a plain product. Rows are sorted by expert and filled up to whole tiles (`experts.cu`); the kernels take as many tiles as the device
// says, so that one launch does whatever the routing is.
//
// It is `gated.cu` for one block at a time: a thread fetches stages of 64 columns into a ring, and two warpgroups multiply. Tiles of
// 128 rows are for prompts, where the tensor cores bind; those of 64 for the small matrices of heads.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define CONSUMERS 256 // threads that multiply
#define THREADS (CONSUMERS + 128)

// `grouped.rs` knows these numbers too. A tile has TOKENS rows and 256 rows of weights: gate and up of 128 outputs, or 256 outputs.
template <u32 TOKENS_, u32 STAGES_, bool IS_GATED_>
struct Shape {
    static constexpr u32 TOKENS = TOKENS_, STAGES = STAGES_;
    static constexpr bool IS_GATED = IS_GATED_;
    static constexpr u32 BOX = TOKENS == 128 ? 128 : 64;        // rows of weights that come together
    static constexpr u32 OUTPUTS = IS_GATED ? BOX : 2 * BOX;    // of a warpgroup
    static constexpr u32 WIDTH = IS_GATED ? 128 : 256;          // outputs of a tile
    static constexpr u32 TOKEN_BYTES = TOKENS * 128, BOX_BYTES = BOX * 128;
    static constexpr u32 STAGE_BYTES = TOKEN_BYTES + 256 * 128;
    static constexpr u32 RESULT_BYTES = OUTPUTS * 128; // of a warpgroup
};

struct GroupedParams {
    TensorMap input;      // [rows, cols], boxes of TOKENS rows by 64 columns
    TensorMap weight;     // [experts * expert_rows, cols], boxes of BOX rows by 64 columns
    TensorMap output_map; // [rows, width], boxes of 64 rows by 64 columns
    const u32* num_tiles;
    const u32* tiles;     // the expert of each, up to bit 16
    u32 width, expert_rows;
    // Products of heads: how many tiles each has, and how far its columns are from the next one's. 0 tiles: as `tiles` says.
    u32 tiles_of_head, num_heads, input_step, output_step;
    u32 num_chunks;       // of 64 columns
    u32 activation;
};

// With a policy for the L2.
__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, u32 column, u32 row, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::
            "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy) : "memory");
}

__device__ __forceinline__ void store_box(const TensorMap* map, u32 column, u32 row, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(column), "r"(row),
                 "r"(from) : "memory");
}

// The outputs of a tile of rows come one after the other.
template <class SHAPE>
struct Walk {
    u32 num_outputs, number, end;

    __device__ __forceinline__ explicit Walk(const GroupedParams& p) {
        num_outputs = (p.width + SHAPE::WIDTH - 1) / SHAPE::WIDTH;
        number = blockIdx.x;
        end = (p.tiles_of_head ? p.tiles_of_head * p.num_heads : __ldcg(p.num_tiles)) * num_outputs;
    }
    __device__ __forceinline__ bool is_over() const { return number >= end; }
    __device__ __forceinline__ void go_on() { number += gridDim.x; }
    __device__ __forceinline__ u32 tile() const { return number / num_outputs; }
    __device__ __forceinline__ u32 output() const { return number % num_outputs * SHAPE::WIDTH; }
};

struct Ring {
    u32 stages, full, empty;
};

template <class SHAPE>
__device__ __forceinline__ void feed(const GroupedParams& p, const Ring& ring) {
    u32 stage = 0, parity = 1, ahead = 0;
    u64 policy = SHAPE::TOKENS == 64 ? read_once() : read_often();
    auto load_weights = [&](u32 chunk, u32 first, u32 to, u32 barrier) {
        expect_bytes(barrier, SHAPE::STAGE_BYTES);
#pragma unroll
        for (u32 box = 0; box < 256 / SHAPE::BOX; box++) {
            u32 at = SHAPE::IS_GATED ? box / 2 * SHAPE::BOX + box % 2 * p.width : box * SHAPE::BOX;
            load_box(to + SHAPE::TOKEN_BYTES + box * SHAPE::BOX_BYTES, &p.weight, chunk * 64, first + at, barrier, policy);
        }
    };
    if (p.tiles_of_head) {
        // All is known but the input: the first weights need not wait, nor what comes next.
        allow_next();
        Walk<SHAPE> walk(p);
        u32 first = walk.tile() / p.tiles_of_head * p.expert_rows + walk.output();
        ahead = walk.is_over() ? 0 : min(SHAPE::STAGES, p.num_chunks);
        for (u32 chunk = 0; chunk < ahead; chunk++)
            load_weights(chunk, first, ring.stages + chunk * SHAPE::STAGE_BYTES, ring.full + chunk * 8);
    }
    // How many tiles there are is of the kernel before.
    wait_for_previous();
    for (Walk<SHAPE> walk(p); !walk.is_over(); walk.go_on()) {
        u32 head = p.tiles_of_head ? walk.tile() / p.tiles_of_head : 0, column = head * p.input_step;
        u32 row = (walk.tile() - head * p.tiles_of_head) * SHAPE::TOKENS;
        u32 expert = p.tiles_of_head ? head : __ldcg(p.tiles + walk.tile()) & 0xffff, first = expert * p.expert_rows + walk.output();
        for (u32 chunk = 0; chunk < p.num_chunks; chunk++) {
            u32 to = ring.stages + stage * SHAPE::STAGE_BYTES, barrier = ring.full + stage * 8;
            if (ahead > 0) {
                ahead--;
            } else {
                wait_barrier(ring.empty + stage * 8, parity);
                load_weights(chunk, first, to, barrier);
            }
            load_box(to, &p.input, column + chunk * 64, row, barrier);
            if (++stage == SHAPE::STAGES) stage = 0, parity ^= 1;
        }
    }
}

// ---- Products: sums (64 tokens x 256 or 128 rows) = or += 16 columns of the tokens times those of the rows.

__device__ __forceinline__ void multiply(float (&sums)[32][4], u64 tokens, u64 rows, u32 adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
        "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"
        "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,"
        "%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,"
        "%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,"
        "%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
        "}, %128, %129, p, 1, 1, 0, 0;\n}"
        : THIRTY_TWO(sums, 0), THIRTY_TWO(sums, 8), THIRTY_TWO(sums, 16), THIRTY_TWO(sums, 24)
        : "l"(tokens), "l"(rows), "r"(adds)
        : "memory");
}

__device__ __forceinline__ void multiply(float (&sums)[16][4], u64 tokens, u64 rows, u32 adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
        "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"
        "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, %64, %65, p, 1, 1, 0, 0;\n}"
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


__device__ __forceinline__ void store_matrix(u32 place, const u32 (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3]) : "memory");
}

// A warp has 16 rows by 16 outputs at a time, as the tensor cores leave them.
template <u32 KIND, u32 OUTPUTS>
__device__ __forceinline__ void stage_gated(u32 results, const float (&sums)[OUTPUTS / 4][4]) {
    constexpr u32 UP = OUTPUTS / 8;
    u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (u32 i = 0; i < UP; i += 2) {
        u32 words[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const float* gate = sums[i + j / 2] + j % 2 * 2;
            const float* up = sums[UP + i + j / 2] + j % 2 * 2;
            words[j] = pack_bf16(activate_fast<KIND>(gate[0]) * up[0], activate_fast<KIND>(gate[1]) * up[1]);
        }
        store_matrix(result_place(results, row, i + lane / 16), words);
    }
}

template <u32 OUTPUTS>
__device__ __forceinline__ void stage_plain(u32 results, const float (&sums)[OUTPUTS / 8][4]) {
    u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (u32 i = 0; i < OUTPUTS / 8; i += 2) {
        u32 words[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const float* pair = sums[i + j / 2] + j % 2 * 2;
            words[j] = pack_bf16(pair[0], pair[1]);
        }
        store_matrix(result_place(results, row, i + lane / 16), words);
    }
}

template <class SHAPE>
__device__ __forceinline__ void finish(const GroupedParams& p, u32 row, u32 output, u32 start, u32 results, const float (&sums)[SHAPE::BOX / 4][4]) {
    bool leads = threadIdx.x % 128 == 0;
    auto meet = [] { asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory"); };
    if (leads) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    meet();
    if constexpr (SHAPE::IS_GATED) {
        if (p.activation == 0) stage_gated<0, SHAPE::OUTPUTS>(results, sums);
        else if (p.activation == 1) stage_gated<1, SHAPE::OUTPUTS>(results, sums);
        else stage_gated<2, SHAPE::OUTPUTS>(results, sums);
    } else {
        stage_plain<SHAPE::OUTPUTS>(results, sums);
    }
    fence_async();
    meet();
    if (!leads) return;
    // What lies beyond the outputs of an expert is not written.
#pragma unroll
    for (u32 column = 0; column < SHAPE::OUTPUTS; column += 64)
        if (output + column < p.width) store_box(&p.output_map, start + output + column, row, results + column * 128);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <class SHAPE>
__device__ __forceinline__ void consume(const GroupedParams& p, const Ring& ring, u32 results) {
    constexpr bool SPLITS_TOKENS = SHAPE::TOKENS == 128;
    u32 half = threadIdx.x / 128, lane = threadIdx.x % 32, stage = 0, parity = 0;
    auto release = [&](u32 stage) {
        if (lane == 0) arrive(ring.empty + stage * 8);
    };
    for (Walk<SHAPE> walk(p); !walk.is_over(); walk.go_on()) {
        float sums[SHAPE::BOX / 4][4];
        u32 last = 0;
        for (u32 chunk = 0; chunk < p.num_chunks; chunk++) {
            u32 tokens = ring.stages + stage * SHAPE::STAGE_BYTES, rows = tokens + SHAPE::TOKEN_BYTES;
            if (SPLITS_TOKENS) tokens += half * (64 * 128);
            else rows += half * (2 * SHAPE::BOX_BYTES);
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
        u32 head = p.tiles_of_head ? walk.tile() / p.tiles_of_head : 0;
        u32 row = (walk.tile() - head * p.tiles_of_head) * SHAPE::TOKENS + (SPLITS_TOKENS ? half * 64 : 0);
        u32 output = walk.output() + (SPLITS_TOKENS ? 0 : half * SHAPE::OUTPUTS);
        finish<SHAPE>(p, row, output, head * p.output_step, results + half * SHAPE::RESULT_BYTES, sums);
    }
    if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

template <class SHAPE>
__device__ __forceinline__ void grouped(const GroupedParams& p) {
    extern __shared__ u8 shared[];
    Ring ring;
    // The swizzle counts from multiples of 1024.
    ring.stages = (u32)__cvta_generic_to_shared(shared) + 1023 & ~1023u;
    u32 results = ring.stages + SHAPE::STAGES * SHAPE::STAGE_BYTES;
    ring.full = results + 2 * SHAPE::RESULT_BYTES;
    ring.empty = ring.full + SHAPE::STAGES * 8;
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < SHAPE::STAGES; s++) {
            init_barrier(ring.full + s * 8, 1);
            init_barrier(ring.empty + s * 8, CONSUMERS / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_async();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == CONSUMERS) feed<SHAPE>(p, ring);
        else wait_for_previous();
        allow_next();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        wait_for_previous();
        consume<SHAPE>(p, ring, results);
    }
}

KERNEL __launch_bounds__(THREADS, 1) grouped_gated_128(const __grid_constant__ GroupedParams p) { grouped<Shape<128, 4, true>>(p); }
KERNEL __launch_bounds__(THREADS, 1) grouped_plain_128(const __grid_constant__ GroupedParams p) { grouped<Shape<128, 3, false>>(p); }
KERNEL __launch_bounds__(THREADS, 1) grouped_plain_64(const __grid_constant__ GroupedParams p) { grouped<Shape<64, 4, false>>(p); }

#endif
