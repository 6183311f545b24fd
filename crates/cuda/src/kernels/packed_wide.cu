// Products of quantised weights with 17 to 256 tokens where there is wgmma (sm_90a). The records are those of `packed.cu`; values
// become bf16 in registers, scaled, and are multiplied from there, so that weights come from memory once, with their few bits.
//
// Two instructions for a pair of values after it was placed into mantissas: the excess and the middle of the range are taken off,
// which is exact, and scale and what is left of the minimum are applied, rounded to bf16 once.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ constexpr u32 TILE_RECORDS = 8; // of a block: tiles of 16 rows

// `wide.rs` knows the stages too. Gated, half of the sums need space beside them.
template <u32 TOKENS, bool GATED>
using PackedWide = Wide<TOKENS, TILE_RECORDS * RECORD,
                        TOKENS == 256 ? (GATED && BITS == 8 ? 3 : 4) : TOKENS == 128 ? 6 : BITS == 4 ? 7 : GATED && BITS == 8 ? 5 : 6>;

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

// What is in these registers is there before the products that follow, and stays until those before are done.
__device__ __forceinline__ void keep(u32 (&a)[4][4]) {
#pragma unroll
    for (u32 k = 0; k < 4; k++) asm volatile("" : "+r"(a[k][0]), "+r"(a[k][1]), "+r"(a[k][2]), "+r"(a[k][3])::"memory");
}

__device__ __forceinline__ u32 add_pairs(u32 a, u32 b) {
    u32 y;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b, u32 c) {
    u32 y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}

// A lane's part of 16 rows by 64 columns, as bf16: four products of 16 columns.
__device__ __forceinline__ void dequantise(const u8* record, u32 (&a)[4][4]) {
    // Pairs of bf16: minus the excess and the middle.
    constexpr u32 LESS = BITS == 4 ? 0xc308c308u : BITS == 5 ? 0xc310c310u : BITS == 6 ? 0xc320c320u : 0xc510c510u;
    constexpr float MIDDLE = BITS == 4 ? 8.0f : 16.0f;
#pragma unroll
    for (u32 group = 0; group < 2; group++) {
        Group columns;
        columns.load(record, group);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 pairs[4], above[4], scale[2], minimum = 0x80008000u;
            columns.place(half, pairs);
            if (BITS == 8) columns.place_high(half, above);
            if (HAS_MINIMA) {
                float of = f16_to_float((u16)columns.scales[half]);
                float less = fmaf(MIDDLE, of, f16_to_float((u16)(columns.scales[half] >> 16)));
                scale[0] = scale[1] = pack_bf16(of, of), minimum = pack_bf16(less, less);
            } else {
#pragma unroll
                for (u32 part = 0; part < 2; part++) {
                    float of = f16_to_float((u16)(columns.scales[BITS == 6 ? part : 0] >> 16 * half));
                    scale[part] = pack_bf16(of, of);
                }
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32 value = BITS == 8 ? add_pairs(pairs[i], add_pairs(above[i], LESS)) : add_pairs(pairs[i], LESS);
                a[group * 2 + i / 2][i % 2 * 2 + half] = multiply_pairs(value, scale[i / 2], minimum);
            }
        }
    }
}

// While the products of a stage run, the values of the next one are made.
template <class W>
__device__ __forceinline__ void consume(u32 count, const W& ring, const u8* memory, u32& stage, u32& parity, float (&sums)[W::TOKENS / 8][4]) {
    u32 a[2][4][4];
    const u8* record = memory + W::INPUT_BYTES + threadIdx.x / 32 * RECORD;
    const u64 tokens = describe_matrix(ring.stages, 16);
    wait_barrier(ring.full + stage * 8, parity);
    dequantise(record + stage * W::STAGE_BYTES, a[0]);
    for (u32 first = 0; first < count; first += 2) {
#pragma unroll
        for (u32 b = 0; b < 2; b++) {
            if (first + b >= count) break;
            u32 now = stage;
            if (++stage == W::STAGES) stage = 0, parity ^= 1;
            keep(a[b]);
            begin_products();
#pragma unroll
            for (u32 k = 0; k < 4; k++) multiply(sums, a[b][k], tokens + now * (W::STAGE_BYTES / 16) + k * 2);
            commit_products();
            if (first + b + 1 < count) {
                wait_barrier(ring.full + stage * 8, parity);
                dequantise(record + stage * W::STAGE_BYTES, a[b ^ 1]);
                keep(a[b ^ 1]);
            }
            wait_products<0>(sums);
            release(ring.empty, now);
        }
    }
}

// Tiles times chunks of columns, in a row, are divided equally between the blocks, wherever that cuts a tile. Who has a part of a tile
// writes its sums to memory. The blocks that end with the tile wait for all of its parts, and each joins them for some tokens; who goes
// on to the next tile has come first and waits for nobody. All blocks are on the device at once.
struct Stream {
    u64 total;
    u32 chunks;
    __device__ __forceinline__ explicit Stream(const WideProductParams& p, bool gated) {
        chunks = p.chunks;
        total = (u64)((p.product.num_rows + (gated ? 63 : 127)) / (gated ? 64 : 128)) * chunks;
    }
    __device__ __forceinline__ u32 start_of(u32 block) const { return (u32)(total * block / gridDim.x); }
    __device__ __forceinline__ u32 block_of(u32 unit) const { return (u32)((((u64)unit + 1) * gridDim.x - 1) / total); }
};

__device__ __forceinline__ float* part_of(const WideProductParams& p, u32 slot, u32 tokens, u32 i, u32 thread) {
    return p.parts + (((u64)slot * (tokens / 8) + i) * CONSUMERS + thread) * 4;
}

__device__ __forceinline__ void meet_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// The sums of a part of a tile, and the results of the tile if this block ends with it. Each block has three places for sums.
template <u32 TOKENS, bool GATED>
__device__ __forceinline__ void join_parts(const WideProductParams& p, const Stream& stream, u32 tile, u32 end, const float (&sums)[TOKENS / 8][4]) {
    u32 thread = threadIdx.x, warp = thread / 32, groups = (min(TOKENS, p.product.m) + 7) / 8;
    u32 tile_start = tile * stream.chunks, tile_end = tile_start + stream.chunks;
    u32 first_block = stream.block_of(tile_start), last_block = stream.block_of(tile_end - 1);
    bool is_whole = first_block == last_block, ends = end == stream.start_of(blockIdx.x + 1);
    u32 slot = blockIdx.x * 3 + (is_whole ? 2 : ends ? 1 : 0);
#pragma unroll
    for (u32 i = 0; i < TOKENS / 8; i++)
        if (i < groups) __stcg(reinterpret_cast<float4*>(part_of(p, slot, TOKENS, i, thread)), make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]));
    meet_consumers();
    u32* arrived = p.arrivals + tile;
    u32 parts = last_block - first_block + 1;
    // Those that end with the tile.
    u32 joining = is_whole ? 1 : parts - (stream.start_of(last_block + 1) > tile_end ? 1 : 0);
    if (!is_whole) {
        if (thread == 0) asm volatile("fence.acq_rel.gpu;\nred.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
        if (!ends) return;
        if (thread == 0) {
            u32 count;
            do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(arrived) : "memory");
            while (count < parts);
        }
        meet_consumers();
    }
    u32 own = is_whole ? 0 : blockIdx.x - first_block;
    u32 of = GATED ? thread % 128 : thread, row = tile * (GATED ? 64 : 128) + of / 32 * 16;
    u32 first = GATED ? own * 2 + warp / 4 : own, step = GATED ? joining * 2 : joining;
    // So many loads on their way that their latencies overlap: of some groups of tokens, of two blocks.
    constexpr u32 AHEAD = !GATED ? 4 : TOKENS == 64 ? 1 : 2, HALVES = GATED ? 2 : 1;
#pragma unroll 1
    for (u32 i = first; i < groups; i += AHEAD * step) {
        float results[AHEAD][2][4] = {};
#pragma unroll 1
        for (u32 block = first_block; block <= last_block; block += 2) {
            float4 parts[2][AHEAD][HALVES];
#pragma unroll
            for (u32 b = 0; b < 2; b++) {
                u32 from = min(block + b, last_block);
                u32 place = from * 3 + (is_whole ? 2 : stream.start_of(from + 1) <= tile_end ? 1 : 0);
#pragma unroll
                for (u32 a = 0; a < AHEAD; a++)
#pragma unroll
                    for (u32 half = 0; half < HALVES; half++)
                        parts[b][a][half] =
                            __ldcg(reinterpret_cast<const float4*>(part_of(p, place, TOKENS, min(i + a * step, groups - 1), of + 128 * half)));
            }
#pragma unroll
            for (u32 b = 0; b < 2; b++) {
                if (block + b > last_block) break;
#pragma unroll
                for (u32 a = 0; a < AHEAD; a++)
#pragma unroll
                    for (u32 half = 0; half < HALVES; half++) {
                        results[a][half][0] += parts[b][a][half].x, results[a][half][1] += parts[b][a][half].y;
                        results[a][half][2] += parts[b][a][half].z, results[a][half][3] += parts[b][a][half].w;
                    }
            }
        }
#pragma unroll
        for (u32 a = 0; a < AHEAD; a++)
            if (i + a * step < groups) finish<GATED>(p.product, row, (i + a * step) * 8, results[a][0], results[a][1]);
    }
    meet_consumers();
    if (is_whole || thread != 0) return;
    // Whoever is the last to have read leaves it as it was.
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
    if (before + 1 == parts + joining) *arrived = 0;
}

// A whole tile of gate and up, half of the tokens at a time: a thread has the sums of gate or of up, and needs both.
template <u32 TOKENS>
__device__ __forceinline__ void join_halves(const WideProductParams& p, u32 tile, u32 memory, const float (&sums)[TOKENS / 8][4]) {
    constexpr u32 HALF = TOKENS / 16;
    u32 thread = threadIdx.x, row = tile * 64 + thread % 128 / 32 * 16;
    auto at = [&](u32 i, u32 of) { return memory + (i * CONSUMERS + of) * 16; };
    auto load = [](u32 from, float(&to)[4]) {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3]) : "r"(from) : "memory");
    };
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        // What was there has been read.
        meet_consumers();
#pragma unroll
        for (u32 i = 0; i < HALF; i++)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at(i, thread)), "f"(sums[half * HALF + i][0]),
                         "f"(sums[half * HALF + i][1]), "f"(sums[half * HALF + i][2]), "f"(sums[half * HALF + i][3]) : "memory");
        meet_consumers();
#pragma unroll 1
        for (u32 i = thread / 128; i < HALF && (half * HALF + i) * 8 < p.product.m; i += 2) {
            float gate[4], up[4];
            load(at(i, thread % 128), gate);
            load(at(i, thread % 128 + 128), up);
            finish<true>(p.product, row, (half * HALF + i) * 8, gate, up);
        }
    }
}

template <u32 TOKENS, bool GATED>
__device__ __forceinline__ void stream_tiles(const WideProductParams& p) {
    extern __shared__ u8 shared[];
    using W = PackedWide<TOKENS, GATED>;
    W ring;
    Stream stream(p, GATED);
    u32 begin = stream.start_of(blockIdx.x), end = stream.start_of(blockIdx.x + 1);
    start(ring, shared);
    allow_next();
    if (threadIdx.x >= CONSUMERS) {
        if (TOKENS > 64) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == CONSUMERS) {
            u32 num_tiles = (p.product.num_rows + 15) / 16;
            // The units of a block are one range of chunks.
            Place place(begin, end - begin);
            feed<W, 64>(
                p, place, ring,
                [&](u32 to, u32 unit, u32 barrier) {
                    u32 tile = unit / stream.chunks, chunk = unit % stream.chunks;
                    if (GATED) {
                        load_box(to, &p.weight, chunk * (RECORD / 8), tile * 4, barrier, read_once());
                        load_box(to + 4 * RECORD, &p.weight, chunk * (RECORD / 8), num_tiles + tile * 4, barrier, read_once());
                    } else {
                        load_box(to, &p.weight, chunk * (RECORD / 8), tile * TILE_RECORDS, barrier, read_once());
                    }
                },
                stream.chunks);
        }
    } else {
        if (TOKENS > 64) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        u32 stage = 0, parity = 0;
        const u8* memory = shared + (ring.stages - (u32)__cvta_generic_to_shared(shared));
        wait_for_previous();
        for (u32 at = begin; at < end;) {
            u32 tile = at / stream.chunks, count = min((tile + 1) * stream.chunks, end) - at;
            float sums[TOKENS / 8][4] = {};
            consume(count, ring, memory, stage, parity, sums);
            at += count;
            if (GATED && count == stream.chunks) join_halves<TOKENS>(p, tile, ring.empty + (W::STAGES * 8 + 15 & ~15u), sums);
            else join_parts<TOKENS, GATED>(p, stream, tile, at, sums);
        }
    }
}

#define PACKED_WIDE(GATED)                                                                                                                    \
    KERNEL __launch_bounds__(FEW_THREADS, 2) wide_64(const __grid_constant__ WideProductParams p) { stream_tiles<64, GATED>(p); }             \
    KERNEL __launch_bounds__(THREADS, 1) wide_128(const __grid_constant__ WideProductParams p) { stream_tiles<128, GATED>(p); }               \
    KERNEL __launch_bounds__(THREADS, 1) wide_256(const __grid_constant__ WideProductParams p) { stream_tiles<256, GATED>(p); }

#if IS_GATED
PACKED_WIDE(true)
#else
PACKED_WIDE(false)
#endif

#endif
