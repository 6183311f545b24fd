// Products of e4m3 weights with up to eight tokens of bf16 and with 17 to 128 tokens of e4m3 where there is wgmma (sm_90a), with a
// scale for each row of both sides, which multiply the sums at the end. A library divides the columns of such products between few
// blocks only, so that with few tokens most of the device waits.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ void multiply(float (&sums)[8][4], u64 rows, u64 tokens) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
        "}, %32, %33, p, 1, 1;\n}"
        : THIRTY_TWO(sums, 0)
        : "l"(rows), "l"(tokens)
        : "memory");
}

__device__ __forceinline__ void multiply(float (&sums)[16][4], u64 rows, u64 tokens) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
        "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"
        "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, %64, %65, p, 1, 1;\n}"
        : THIRTY_TWO(sums, 0), THIRTY_TWO(sums, 8)
        : "l"(rows), "l"(tokens)
        : "memory");
}

// `wide.rs` knows the stages too.
template <u32 TOKENS>
using Fp8Wide = Wide<TOKENS, 128 * 128, TOKENS == 64 ? 4 : 6>;

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

template <u32 TOKENS>
__device__ __forceinline__ void wide(const WideProductParams& p) {
    extern __shared__ u8 shared[];
    Fp8Wide<TOKENS> ring;
    Place place(p);
    start(ring, shared);
    allow_next();
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS)
            feed<Fp8Wide<TOKENS>, 128>(p, place, ring, [&](u32 to, u32 chunk, u32 barrier) {
                load_box(to, &p.weight, chunk * 128, place.tile * 128, barrier, read_once());
            });
        __syncwarp();
        stay(place);
    } else {
        float sums[TOKENS / 8][4] = {};
        wait_for_previous();
        consume(place, ring, sums);
        auto scale = [&](u32 row, u32 token, float(&result)[4], float(&)[4]) {
            u32 lane = threadIdx.x % 32;
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                result[j] *= p.weight_scales[min(row + j / 2 * 8 + lane / 4, p.product.num_rows - 1)] *
                             p.input_scales[min(token + lane % 4 * 2 + j % 2, p.product.m - 1)];
        };
        join<TOKENS, false>(p, place, ring.stages, sums, scale);
    }
}

// ---- One to eight tokens of bf16. A warpgroup makes e4m3 of them on the way, two for each: the nearest one, and a sixteenth of the
// nearest one to 16 times what is left, as if they were 16 tokens. That is as exact as bf16. A token has a scale for each chunk of
// columns, so the sums of a chunk are joined in f32, and nothing waits for a look at all of its values. With a norm, its weight is
// multiplied on the way too, and the squares give the factor of the result.

#define CONVERTERS 128

using Fp8Few = Wide<16, 128 * 128, 6>;

__device__ __forceinline__ void multiply(float (&sums)[2][4], u64 rows, u64 tokens, u32 adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\nwgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7}, "
        "%8, %9, p, 1, 1;\n}"
        : FOUR(sums, 0), FOUR(sums, 1)
        : "l"(rows), "l"(tokens), "r"(adds)
        : "memory");
}

__device__ __forceinline__ u32 two_e4m3(float low, float high) {
    u16 y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    return y;
}

// Eight values of a token to where the tensor core looks for them. Returns the scale of the chunk.
__device__ __forceinline__ float convert(const float (&v)[8], u32 to, u32 token, u32 piece) {
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) largest = fmaxf(largest, fabsf(v[j]));
#pragma unroll
    for (u32 distance = 8; distance > 0; distance /= 2) largest = fmaxf(largest, __shfl_xor_sync(NONE, largest, distance));
    // Powers of two: the largest value becomes 128 to 256.
    u32 exponent = max(__float_as_uint(largest) >> 23, 8u);
    float inverse = __uint_as_float((261 - exponent) << 23);
    u32 high[4], low[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float x = v[2 * j] * inverse, y = v[2 * j + 1] * inverse;
        high[j] = two_e4m3(x, y);
        u32 back = e4m3_to_f16(high[j]);
        low[j] = two_e4m3((x - f16_to_float((u16)back)) * 16.0f, (y - f16_to_float((u16)(back >> 16))) * 16.0f);
    }
    u32 at = to + token * 128 + ((piece / 2 ^ token) << 4) + piece % 2 * 8;
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(high[0] | high[1] << 16), "r"(high[2] | high[3] << 16) : "memory");
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at + 1024), "r"(low[0] | low[1] << 16), "r"(low[2] | low[3] << 16) : "memory");
    return __uint_as_float((exponent - 7) << 23);
}

// A warp has two tokens, 16 lanes each. With few tokens several take turns at the chunks: `group` is the first one of this warp.
template <bool NORMS>
__device__ __forceinline__ void convert_tokens(const WideProductParams& p, const Place& place, const Fp8Few& ring, u32 scales, float* squares,
                                               u32 warp, u32 group, u32 groups) {
    constexpr u32 AHEAD = 3;
    u32 lane = threadIdx.x % 32, token = warp * 2 + lane / 16, piece = lane % 16;
    u32 row = min(token, p.product.m - 1), start = place.first * 128 + piece * 8;
    uint4 held[AHEAD];
    float4 norms[AHEAD][2];
    auto load = [&](u32 slot, u32 number) {
        if (number >= place.count) return;
        held[slot] = *reinterpret_cast<const uint4*>(p.product.input + (u64)row * p.product.cols + start + number * 128);
        if (!NORMS) return;
        const float4* norm = reinterpret_cast<const float4*>(p.norm + start + number * 128);
        norms[slot][0] = norm[0], norms[slot][1] = norm[1];
    };
#pragma unroll
    for (u32 a = 0; a < AHEAD; a++) load(a, group + a * groups);
    float total = 0.0f;
    u32 stage = group, parity = 1;
    for (u32 first = group; first < place.count; first += AHEAD * groups) {
#pragma unroll
        for (u32 a = 0; a < AHEAD; a++) {
            u32 number = first + a * groups;
            if (number >= place.count) break;
            float v[8];
            unpack_bf16(held[a], v);
            if (NORMS) {
                const float weight[8] = {norms[a][0].x, norms[a][0].y, norms[a][0].z, norms[a][0].w,
                                         norms[a][1].x, norms[a][1].y, norms[a][1].z, norms[a][1].w};
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    total = fmaf(v[j], v[j], total);
                    v[j] *= weight[j];
                }
            }
            load(a, number + AHEAD * groups);
            if (number >= Fp8Few::STAGES) wait_barrier(ring.empty + stage * 8, parity);
            float scale = convert(v, ring.stages + stage * Fp8Few::STAGE_BYTES, token, piece);
            if (piece == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(scales + (stage * 8 + token) * 4), "f"(scale) : "memory");
            fence_async();
            __syncwarp();
            if (lane == 0) arrive(ring.full + stage * 8);
            stage += groups;
            if (stage >= Fp8Few::STAGES) stage -= Fp8Few::STAGES, parity ^= 1;
        }
    }
    if (NORMS) {
#pragma unroll
        for (u32 distance = 8; distance > 0; distance /= 2) total += __shfl_xor_sync(NONE, total, distance);
        if (piece == 0) squares[group * 8 + token] = total;
    }
}

template <bool GATED>
__device__ __forceinline__ void feed_few(const WideProductParams& p, const Place& place, const Fp8Few& ring) {
    u32 first = place.tile * (GATED ? 64 : 128), stage = 0, parity = 1;
    for (u32 i = 0; i < place.count; i++) {
        if (i >= Fp8Few::STAGES) wait_barrier(ring.empty + stage * 8, parity);
        u32 to = ring.stages + stage * Fp8Few::STAGE_BYTES + Fp8Few::INPUT_BYTES, column = (place.first + i) * 128;
        expect_bytes(ring.full + stage * 8, Fp8Few::WEIGHT_BYTES);
        load_box(to, &p.weight, column, first, ring.full + stage * 8, read_once());
        if (GATED) load_box(to + 64 * 128, &p.weight, column, p.product.num_rows + first, ring.full + stage * 8, read_once());
        if (++stage == Fp8Few::STAGES) stage = 0, parity ^= 1;
    }
}

__device__ __forceinline__ void consume_few(const Place& place, const Fp8Few& ring, u32 scales, float (&sums)[1][4]) {
    u32 stage = 0, parity = 0, lane = threadIdx.x % 32, half = threadIdx.x / 128;
    for (u32 number = 0; number < place.count; number++) {
        u32 tokens = ring.stages + stage * Fp8Few::STAGE_BYTES, rows = tokens + Fp8Few::INPUT_BYTES + half * (64 * 128);
        float parts[2][4], scale[2];
        wait_barrier(ring.full + stage * 8, parity);
        begin_products();
#pragma unroll
        for (u32 k = 0; k < 4; k++) multiply(parts, describe_matrix(rows + k * 32, 16), describe_matrix(tokens + k * 32, 16), k > 0);
        commit_products();
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(scale[0]), "=f"(scale[1]) : "r"(scales + (stage * 8 + lane % 4 * 2) * 4) : "memory");
        wait_products<0>(parts);
        release(ring.empty, stage);
#pragma unroll
        for (u32 j = 0; j < 4; j++) sums[0][j] = fmaf(scale[j % 2], fmaf(parts[1][j], 0.0625f, parts[0][j]), sums[0][j]);
        if (++stage == Fp8Few::STAGES) stage = 0, parity ^= 1;
    }
}

template <bool NORMS, bool GATED>
__device__ __forceinline__ void few(const WideProductParams& p) {
    extern __shared__ u8 shared[];
    __shared__ float squares[4 * 8];
    Fp8Few ring;
    Place place(p);
    u32 warps = (p.product.m + 1) / 2, groups = 4 / warps; // that convert
    start(ring, shared, 1 + warps);
    u32 scales = ring.empty + Fp8Few::STAGES * 8;
    allow_next();
    if (threadIdx.x >= CONSUMERS) {
        u32 warp = (threadIdx.x - CONSUMERS) / 32;
        if (warp == CONVERTERS / 32) {
            if (threadIdx.x % 32 == 0) feed_few<GATED>(p, place, ring);
        } else if (warp < warps * groups) {
            wait_for_previous();
            convert_tokens<NORMS>(p, place, ring, scales, squares, warp % warps, warp / warps, groups);
        }
        __syncwarp();
        stay(place);
    } else {
        float sums[1][4] = {};
        wait_for_previous();
        consume_few(place, ring, scales, sums);
        auto scale = [&](u32 row, u32, float(&result)[4], float(&ups)[4]) {
            u32 lane = threadIdx.x % 32;
            float factors[2] = {1.0f, 1.0f};
#pragma unroll
            for (u32 j = 0; j < 2 && NORMS; j++) {
                float total = 0.0f;
                for (u32 group = 0; group < groups; group++) total += squares[group * 8 + lane % 4 * 2 + j];
                factors[j] = rsqrtf(total / (float)p.product.cols + p.eps);
            }
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 own = min(row + j / 2 * 8 + lane / 4, p.product.num_rows - 1);
                result[j] *= factors[j % 2] * p.weight_scales[own];
                if (GATED) ups[j] *= factors[j % 2] * p.weight_scales[p.product.num_rows + own];
            }
        };
        join<8, GATED>(p, place, ring.stages, sums, scale);
    }
}

#define SOME_THREADS (CONSUMERS + CONVERTERS + 32)
KERNEL __launch_bounds__(SOME_THREADS, 2) few_linear(const __grid_constant__ WideProductParams p) { few<false, false>(p); }
KERNEL __launch_bounds__(SOME_THREADS, 2) few_gated(const __grid_constant__ WideProductParams p) { few<false, true>(p); }
KERNEL __launch_bounds__(SOME_THREADS, 2) few_normed_linear(const __grid_constant__ WideProductParams p) { few<true, false>(p); }
KERNEL __launch_bounds__(SOME_THREADS, 2) few_normed_gated(const __grid_constant__ WideProductParams p) { few<true, true>(p); }

KERNEL __launch_bounds__(FEW_THREADS, 2) wide_64(const __grid_constant__ WideProductParams p) { wide<64>(p); }
KERNEL __launch_bounds__(FEW_THREADS, 1) wide_128(const __grid_constant__ WideProductParams p) { wide<128>(p); }

#endif
