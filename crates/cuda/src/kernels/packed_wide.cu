// Products of quantised weights with 17 to 256 tokens where there is wgmma (sm_90a). The records are those of `packed.cu`; values
// become bf16 in registers, scaled, and are multiplied from there, so that weights come from memory once, with their few bits.
//
// Two instructions for a pair of values after it was placed into mantissas: the excess and the middle of the range are taken off,
// which is exact, and scale and what is left of the minimum are applied, rounded to bf16 once.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ constexpr u32 TILE_RECORDS = 8; // of a block: tiles of 16 rows

// `wide.rs` knows the stages too.
template <u32 TOKENS>
using PackedWide = Wide<TOKENS, TILE_RECORDS * RECORD, TOKENS == 256 ? 4 : TOKENS == 128 ? 6 : BITS == 8 ? 6 : 7>;

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
__device__ __forceinline__ void consume(const Place& place, const W& ring, const u8* memory, float (&sums)[W::TOKENS / 8][4]) {
    u32 stage = 0, parity = 0;
    u32 a[2][4][4];
    const u8* record = memory + W::INPUT_BYTES + threadIdx.x / 32 * RECORD;
    const u64 tokens = describe_matrix(ring.stages, 16);
    if (place.count > 0) {
        wait_barrier(ring.full, 0);
        dequantise(record, a[0]);
    }
    for (u32 first = 0; first < place.count; first += 2) {
#pragma unroll
        for (u32 b = 0; b < 2; b++) {
            if (first + b >= place.count) break;
            u32 now = stage;
            if (++stage == W::STAGES) stage = 0, parity ^= 1;
            keep(a[b]);
            begin_products();
#pragma unroll
            for (u32 k = 0; k < 4; k++) multiply(sums, a[b][k], tokens + now * (W::STAGE_BYTES / 16) + k * 2);
            commit_products();
            if (first + b + 1 < place.count) {
                wait_barrier(ring.full + stage * 8, parity);
                dequantise(record + stage * W::STAGE_BYTES, a[b ^ 1]);
                keep(a[b ^ 1]);
            }
            wait_products<0>(sums);
            release(ring.empty, now);
        }
    }
}

template <u32 TOKENS, bool GATED>
__device__ __forceinline__ void wide(const WideProductParams& p) {
    extern __shared__ u8 shared[];
    PackedWide<TOKENS> ring;
    Place place(p);
    start(ring, shared);
    allow_next();
    if (threadIdx.x >= CONSUMERS) {
        if (TOKENS > 64) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == CONSUMERS) {
            u32 num_tiles = (p.product.num_rows + 15) / 16;
            feed<PackedWide<TOKENS>, 64>(p, place, ring, [&](u32 to, u32 chunk, u32 barrier) {
                if (GATED) {
                    load_box(to, &p.weight, chunk * (RECORD / 8), place.tile * 4, barrier, read_once());
                    load_box(to + 4 * RECORD, &p.weight, chunk * (RECORD / 8), num_tiles + place.tile * 4, barrier, read_once());
                } else {
                    load_box(to, &p.weight, chunk * (RECORD / 8), place.tile * TILE_RECORDS, barrier, read_once());
                }
            });
        }
        __syncwarp();
        stay(place);
    } else {
        if (TOKENS > 64) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        float sums[TOKENS / 8][4] = {};
        wait_for_previous();
        consume(place, ring, shared + (ring.stages - (u32)__cvta_generic_to_shared(shared)), sums);
        join<TOKENS, GATED>(p, place, ring.stages, sums, [](u32, u32, float(&)[4], float(&)[4]) {});
    }
}

#if IS_GATED
KERNEL __launch_bounds__(FEW_THREADS, 2) wide_64(const __grid_constant__ WideProductParams p) { wide<64, true>(p); }
KERNEL __launch_bounds__(THREADS, 1) wide_128(const __grid_constant__ WideProductParams p) { wide<128, true>(p); }
KERNEL __launch_bounds__(THREADS, 1) wide_256(const __grid_constant__ WideProductParams p) { wide<256, true>(p); }
#else
KERNEL __launch_bounds__(FEW_THREADS, 2) wide_64(const __grid_constant__ WideProductParams p) { wide<64, false>(p); }
KERNEL __launch_bounds__(THREADS, 1) wide_128(const __grid_constant__ WideProductParams p) { wide<128, false>(p); }
KERNEL __launch_bounds__(THREADS, 1) wide_256(const __grid_constant__ WideProductParams p) { wide<256, false>(p); }
#endif

#endif
