// Products of quantised weights with 17 to 256 tokens where there is wgmma (sm_90a). The records are those of `packed.cu`; values
// become bf16 in registers, scaled, as they would be converted for a library, and are multiplied from there: `outputᵀ = weight ·
// inputᵀ`. So weights come from memory once, with their few bits.
//
// A block takes 128 rows (gated: 64 of the gate and the same of up) by all tokens. Two warpgroups multiply, 64 rows each. The third
// fetches: records by bulk copies, and activations through registers, because the columns of a record are in the order in which
// lanes take them. The blocks of a cluster share the columns, and each joins the sums of some tokens at the end.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define CONSUMERS 256
#define THREADS (CONSUMERS + 128)

__device__ constexpr u32 TILE_RECORDS = 8; // of a stage: tiles of 16 rows

template <u32 TOKENS_>
struct Wide {
    static constexpr u32 TOKENS = TOKENS_;
    static constexpr u32 STAGES = TOKENS == 256 ? 4 : 6; // `wide.rs` knows these numbers too
    static constexpr u32 INPUT_BYTES = TOKENS * 128;
    // The swizzle counts from multiples of 1024.
    static constexpr u32 STAGE_BYTES = INPUT_BYTES + (TILE_RECORDS * RECORD + 1023) / 1024 * 1024;
    static constexpr u32 OF_THREAD = TOKENS / 16;                            // 16 bytes of activations, a stage
    static constexpr u32 AHEAD = TOKENS == 64 ? 3 : TOKENS == 128 ? 2 : 1;   // stages that wait in registers
};

__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(read_once()) : "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ u32 cluster_size() {
    u32 size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ float4 read_of(u32 address, u32 rank) {
    float4 v;
    asm volatile("{\n.reg .b32 place;\nmapa.shared::cluster.u32 place, %4, %5;\nld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [place];\n}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address), "r"(rank) : "memory");
    return v;
}

__device__ __forceinline__ void multiply(float (&sums)[8][4], const u32 (&a)[4], u64 tokens) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
        "}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;\n}"
        : THIRTY_TWO(sums, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens)
        : "memory");
}

__device__ __forceinline__ void multiply(float (&sums)[16][4], const u32 (&a)[4], u64 tokens) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
        "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"
        "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, {%64,%65,%66,%67}, %68, p, 1, 1, 0;\n}"
        : THIRTY_TWO(sums, 0), THIRTY_TWO(sums, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens)
        : "memory");
}

__device__ __forceinline__ void multiply(float (&sums)[32][4], const u32 (&a)[4], u64 tokens) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
        "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"
        "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,"
        "%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,"
        "%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,"
        "%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
        "}, {%128,%129,%130,%131}, %132, p, 1, 1, 0;\n}"
        : THIRTY_TWO(sums, 0), THIRTY_TWO(sums, 8), THIRTY_TWO(sums, 16), THIRTY_TWO(sums, 24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens)
        : "memory");
}

// Which stages of 64 columns this block of a cluster takes.
struct Share {
    u32 first, count;
    __device__ __forceinline__ explicit Share(const ProductParams& p) {
        u32 all = p.cols / 64, size = cluster_size(), each = (all + size - 1) / size;
        first = min(cluster_rank() * each, all);
        count = min(each, all - first);
    }
};

// ---- The third warpgroup.

template <class W>
__device__ __forceinline__ void load_records(const ProductParams& p, u32 stages, u32 full, u32 stage, const u8* (&tiles)[TILE_RECORDS],
                                             u32 chunk) {
    u32 to = stages + stage * W::STAGE_BYTES + W::INPUT_BYTES, barrier = full + stage * 8;
    expect_bytes(barrier, TILE_RECORDS * RECORD);
#pragma unroll
    for (u32 i = 0; i < TILE_RECORDS; i++) copy_bulk(to + i * RECORD, tiles[i] + (u64)chunk * RECORD, RECORD, barrier);
}

template <class W, bool GATED>
__device__ __forceinline__ void feed(const ProductParams& p, u32 stages, u32 full, u32 empty) {
    u32 thread = threadIdx.x - CONSUMERS, block = blockIdx.x / cluster_size(), num_tiles = (p.num_rows + 15) / 16;
    Share share(p);
    const u8* tiles[TILE_RECORDS];
#pragma unroll
    for (u32 i = 0; i < TILE_RECORDS; i++) {
        u32 tile = GATED ? block * 4 + i % 4 : block * TILE_RECORDS + i;
        tiles[i] = p.weight + (min(tile, num_tiles - 1) + (GATED && i >= 4 ? num_tiles : 0)) * p.tile_bytes + (u64)share.first * RECORD;
    }
    if (thread == 0)
        for (u32 i = 0; i < min(W::STAGES, share.count); i++) load_records<W>(p, stages, full, i, tiles, i);
    wait_for_previous();
    // A thread takes the same 16 bytes of every 16th token.
    u32 token = thread / 8, chunk = thread % 8;
    const bf16* inputs = p.input + share.first * 64 + chunk * 8;
    uint4 held[W::AHEAD][W::OF_THREAD];
    auto load = [&](uint4 (&to)[W::OF_THREAD], u32 number) {
        if (number >= share.count) return;
#pragma unroll
        for (u32 j = 0; j < W::OF_THREAD; j++)
            to[j] = *reinterpret_cast<const uint4*>(inputs + (u64)min(token + j * 16, p.m - 1) * p.cols + number * 64);
    };
#pragma unroll
    for (u32 a = 0; a < W::AHEAD; a++) load(held[a], a);
    u32 stage = 0, parity = 1;
    for (u32 first = 0; first < share.count; first += W::AHEAD) {
#pragma unroll
        for (u32 a = 0; a < W::AHEAD; a++) {
            u32 number = first + a;
            if (number >= share.count) break;
            if (number >= W::STAGES) {
                wait_barrier(empty + stage * 8, parity);
                if (thread == 0) load_records<W>(p, stages, full, stage, tiles, number);
            }
            // Two neighbours at a time go to where the tensor core looks for them.
#pragma unroll
            for (u32 j = 0; j < W::OF_THREAD; j++) {
                const u32 words[4] = {held[a][j].x, held[a][j].y, held[a][j].z, held[a][j].w};
                u32 row = token + j * 16, base = stages + stage * W::STAGE_BYTES + row * 128;
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    u32 place = BITS == 6 ? chunk / 2 * 2 + i % 2 : chunk / 4 * 4 + i;
                    u32 part = BITS == 6 ? chunk % 2 * 2 + i / 2 : chunk % 4;
                    asm volatile("st.shared.u32 [%0], %1;" ::"r"(base + ((place ^ row % 8) << 4) + part * 4), "r"(words[i]) : "memory");
                }
            }
            fence_async();
            arrive(full + stage * 8);
            load(held[a], number + W::AHEAD);
            if (++stage == W::STAGES) stage = 0, parity ^= 1;
        }
    }
}

// ---- The others.

// What is in these registers is there before the products that follow, and stays until those before are done.
__device__ __forceinline__ void keep(u32 (&a)[4][4]) {
#pragma unroll
    for (u32 k = 0; k < 4; k++) asm volatile("" : "+r"(a[k][0]), "+r"(a[k][1]), "+r"(a[k][2]), "+r"(a[k][3])::"memory");
}

// A lane's part of 16 rows by 64 columns, as bf16: four products of 16 columns.
__device__ __forceinline__ void dequantise(const u8* record, u32 (&a)[4][4]) {
#pragma unroll
    for (u32 group = 0; group < 2; group++) {
        Group columns;
        columns.load(record, group);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 pairs[4], above[4];
            columns.place(half, pairs);
            if (BITS == 8) columns.place_high(half, above);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                float scale, minimum;
                columns.scale(BITS == 6 ? i / 2 : 0, half, scale, minimum);
                if (!HAS_MINIMA) minimum = (BITS == 6 ? -160.0f : -2304.0f) * scale;
                float x = low_bf16(pairs[i]), y = high_bf16(pairs[i]);
                if (BITS == 8) x += low_bf16(above[i]), y += high_bf16(above[i]);
                a[group * 2 + i / 2][i % 2 * 2 + half] = pack_bf16(fmaf(scale, x, minimum), fmaf(scale, y, minimum));
            }
        }
    }
}

template <class W>
__device__ __forceinline__ void consume(const ProductParams& p, const u8* memory, u32 stages, u32 full, u32 empty,
                                        float (&sums)[W::TOKENS / 8][4]) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = Share(p).count, stage = 0, parity = 0, last = 0;
    u32 a[2][4][4];
    for (u32 first = 0; first < count; first += 2) {
#pragma unroll
        for (u32 b = 0; b < 2; b++) {
            if (first + b >= count) break;
            wait_barrier(full + stage * 8, parity);
            dequantise(memory + stage * W::STAGE_BYTES + W::INPUT_BYTES + warp * RECORD, a[b]);
            keep(a[b]);
            begin_products();
#pragma unroll
            for (u32 k = 0; k < 4; k++) multiply(sums, a[b][k], describe_matrix(stages + stage * W::STAGE_BYTES + k * 32, 16));
            commit_products();
            // The products before these are done, and with what they read.
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            keep(a[b ^ 1]);
            if (first + b > 0 && lane == 0) arrive(empty + last * 8);
            last = stage;
            if (++stage == W::STAGES) stage = 0, parity ^= 1;
        }
    }
    wait_products<0>(sums);
}

// Results of one thread: rows `row` and eight further, tokens `token` and the next.
template <bool GATED>
__device__ __forceinline__ void finish(const ProductParams& p, u32 row, u32 token, const float (&sums)[4], const float (&ups)[4]) {
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        u32 at_row = row + j / 2 * 8, at_token = token + j % 2;
        if (at_row >= p.num_rows || at_token >= p.m) continue;
        float value = sums[j] + (p.bias ? p.bias[at_row] : 0.0f);
        u64 at = (u64)at_token * p.output_stride + at_row;
        bf16* output = reinterpret_cast<bf16*>(p.output);
        if (GATED) {
            float up = ups[j] + (p.bias ? p.bias[p.num_rows + at_row] : 0.0f);
            output[at] = float_to_bf16(activate(p.activation, value) * up);
        } else if (p.is_f32) {
            reinterpret_cast<float*>(p.output)[at] = apply_softcap(value, p.softcap);
        } else {
            output[at] = float_to_bf16(p.accumulate ? bf16_to_float(output[at]) + value : value);
        }
    }
}

template <u32 TOKENS, bool GATED>
__device__ __forceinline__ void wide(const ProductParams& p) {
    using W = Wide<TOKENS>;
    extern __shared__ __align__(1024) u8 shared[];
    u32 start = (u32)__cvta_generic_to_shared(shared), stages = start + 1023 & ~1023u;
    u8* memory = shared + (stages - start);
    u32 full = stages + W::STAGES * W::STAGE_BYTES, empty = full + W::STAGES * 8;
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < W::STAGES; s++) {
            init_barrier(full + s * 8, 128 + 1);
            init_barrier(empty + s * 8, CONSUMERS / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_async();
    }
    __syncthreads();
    allow_next();
    bool feeds = threadIdx.x >= CONSUMERS;
    float sums[TOKENS / 8][4] = {};
    if (feeds) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
        feed<W, GATED>(p, stages, full, empty);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
        wait_for_previous();
        consume<W>(p, memory, stages, full, empty, sums);
    }
    // All stages have been read: their memory takes the sums.
    __syncthreads();
    u32 thread = threadIdx.x, lane = thread % 32, size = cluster_size(), rank = cluster_rank();
    u32 block = blockIdx.x / size, row = block * (GATED ? 64 : 128) + (GATED ? thread % 128 : thread) / 32 * 16 + lane / 4;
    auto part = reinterpret_cast<float4*>(memory);
    bool shares = GATED || size > 1;
    if (!feeds && shares && (!GATED || size > 1 || thread >= 128))
#pragma unroll
        for (u32 i = 0; i < TOKENS / 8; i++) part[i * CONSUMERS + thread] = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
    if (size > 1) sync_cluster();
    else if (GATED) __syncthreads();
    if (!feeds && (!GATED || thread < 128)) {
#pragma unroll
        for (u32 i = 0; i < TOKENS / 8; i++) {
            if (i % size != rank) continue;
            float ups[4] = {};
            auto add = [&](float (&to)[4], u32 from, u32 of) {
                float4 v = of == rank ? part[i * CONSUMERS + from] : read_of(stages + (i * CONSUMERS + from) * 16, of);
                to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w;
            };
            for (u32 other = 0; other < size; other++) {
                if (other != rank) add(sums[i], thread, other);
                if (GATED) add(ups, thread + 128, other);
            }
            finish<GATED>(p, row, i * 8 + lane % 4 * 2, sums[i], ups);
        }
    }
    // A block's memory is there until the others have read it.
    if (size > 1) sync_cluster();
}

#if IS_GATED
KERNEL __launch_bounds__(THREADS, 1) wide_gated_64(const ProductParams p) { wide<64, true>(p); }
KERNEL __launch_bounds__(THREADS, 1) wide_gated_128(const ProductParams p) { wide<128, true>(p); }
KERNEL __launch_bounds__(THREADS, 1) wide_gated_256(const ProductParams p) { wide<256, true>(p); }
#else
KERNEL __launch_bounds__(THREADS, 1) wide_product_64(const ProductParams p) { wide<64, false>(p); }
KERNEL __launch_bounds__(THREADS, 1) wide_product_128(const ProductParams p) { wide<128, false>(p); }
KERNEL __launch_bounds__(THREADS, 1) wide_product_256(const ProductParams p) { wide<256, false>(p); }
#endif

#endif
