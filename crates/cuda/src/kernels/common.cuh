// What all kernels share: number types without any header, the layout of the uploaded step, and warp reductions.
//
// NVRTC is given this text in front of each kernel file, so nothing here needs an include path on the machine it runs on.
// Activations are bf16 and travel as their 16 bits, or f32 where F32_ACTIVATIONS is defined; every sum is f32.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef u16 bf16;

#define NONE 0xffffffffu
#define NEG_INF (-__int_as_float(0x7f800000))
#define KERNEL extern "C" __global__ void

// ---- The step, as `step.rs` packs it: words of 32 bits, arrays at the word offsets that the header names.

struct PlanHeader {
    u32 num_items, items, num_merges, merges, merge_slots;
    u32 slot_merges; // for each partial slot the merge that it belongs to
    u32 num_shared;  // of the items, the first ones: read by several sequences, and done before the others
    u32 is_narrow;   // the other items are many, short, and whole: a warp each is enough for them
};

struct StepHeader {
    u32 num_tokens, num_logit_rows, num_samples;
    u32 token_ids, positions, slots, pages, logit_rows, samples, history, biases;
    u32 copies, masks, reserved[3];
    PlanHeader plans[16];
};

struct AttentionItem {
    u32 query_start, num_queries, pages_start, kv_start, kv_len, partial;
};

struct AttentionMerge {
    u32 query, first, count;
    u32 num_own; // of the partials, the last ones: not of shared items
};

struct SampleRow {
    u32 logit_row, forced;
    float temperature;
    u32 top_k;
    float top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
    u32 history_start, history_end, bias_start, bias_end, num_logprobs;
    u32 seed_low, seed_high, counter_low, counter_high;
    u32 mask_start, mask_end;
};

__device__ __forceinline__ const u32* words(const StepHeader* step, u32 offset) {
    return reinterpret_cast<const u32*>(step) + offset;
}

// Where the tokens of a step are written in one lane of the cache.
__device__ __forceinline__ const u32* lane_slots(const StepHeader* step, u32 lane) {
    return words(step, step->slots) + (u64)lane * step->num_tokens;
}

// ---- Programmatic dependent launch: a kernel may start while the one before it drains, but reads nothing of its results
// before `wait_for_previous`. Every kernel waits, so that a kernel is never more than one ahead.

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void allow_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- The L2.

// For lines that are read once in a step, as most weights are: they make room first.
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ u64 read_often() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// ---- Numbers.

__device__ __forceinline__ float bf16_to_float(bf16 x) { return __uint_as_float((u32)x << 16); }

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ bf16 float_to_bf16(float x) { return (bf16)pack_bf16(x, 0.0f); }

__device__ __forceinline__ float f16_to_float(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

__device__ __forceinline__ u16 float_to_f16(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// e4m3: one sign, four bits of exponent, three of mantissa. To the nearest, ties to even; what is too large becomes the
// largest, 448.
__device__ __forceinline__ u8 float_to_e4m3(float x) {
#if __CUDA_ARCH__ >= 890
    u16 y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(0.0f), "f"(x));
    return (u8)y;
#else
    u32 sign = __float_as_uint(x) >> 24 & 0x80;
    if (x != x) return (u8)(sign | 0x7f);
    float magnitude = fminf(fabsf(x), 448.0f);
    // Below 2^-6 the spacing stays 2^-9: adding 2^14 leaves just those bits.
    if (magnitude < 0.015625f) return (u8)(sign | (__float_as_uint(magnitude + 16384.0f) & 15));
    u32 bits = __float_as_uint(magnitude);
    bits += 0x7ffff + (bits >> 20 & 1);
    return (u8)(sign | ((bits >> 20) - (120 << 3)));
#endif
}

// Two e4m3 in the low 16 bits, exactly, as two f16.
__device__ __forceinline__ u32 e4m3_to_f16(u32 pair) {
    u32 y;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"((u16)pair));
#else
    // The bits in place of those of an f16 are the number times 2^-8, also below the smallest normal one. A NaN becomes 480.
    u32 spread = __byte_perm(pair, 0, 0x1404);
    u32 bits = (spread & 0x80008000u) | (spread >> 1 & 0x3f803f80u);
    asm("mul.f16x2 %0, %1, %2;" : "=r"(y) : "r"(bits), "r"(0x5c005c00u));
#endif
    return y;
}

__device__ __forceinline__ float e4m3_to_float(u8 x) { return f16_to_float((u16)e4m3_to_f16(x)); }

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two bf16 in a word, low one first.
__device__ __forceinline__ float low_bf16(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_bf16(u32 x) { return __uint_as_float(x & 0xffff0000u); }

// Eight values from 16 bytes of bf16.
__device__ __forceinline__ void unpack_bf16(const uint4& raw, float (&v)[8]) {
    v[0] = low_bf16(raw.x); v[1] = high_bf16(raw.x);
    v[2] = low_bf16(raw.y); v[3] = high_bf16(raw.y);
    v[4] = low_bf16(raw.z); v[5] = high_bf16(raw.z);
    v[6] = low_bf16(raw.w); v[7] = high_bf16(raw.w);
}

__device__ __forceinline__ uint4 pack8_bf16(const float (&v)[8]) {
    return make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}

// An activation, and eight neighbours.
#ifdef F32_ACTIVATIONS
typedef float real;
struct __align__(16) Eight {
    float4 low, high;
};

__device__ __forceinline__ float real_to_float(real x) { return x; }
__device__ __forceinline__ real float_to_real(float x) { return x; }

__device__ __forceinline__ void unpack8(const Eight& raw, float (&v)[8]) {
    v[0] = raw.low.x; v[1] = raw.low.y; v[2] = raw.low.z; v[3] = raw.low.w;
    v[4] = raw.high.x; v[5] = raw.high.y; v[6] = raw.high.z; v[7] = raw.high.w;
}

__device__ __forceinline__ Eight pack8(const float (&v)[8]) {
    return {make_float4(v[0], v[1], v[2], v[3]), make_float4(v[4], v[5], v[6], v[7])};
}
#else
typedef bf16 real;
typedef uint4 Eight;

__device__ __forceinline__ float real_to_float(real x) { return bf16_to_float(x); }
__device__ __forceinline__ real float_to_real(float x) { return float_to_bf16(x); }
__device__ __forceinline__ void unpack8(const Eight& raw, float (&v)[8]) { unpack_bf16(raw, v); }
__device__ __forceinline__ Eight pack8(const float (&v)[8]) { return pack8_bf16(v); }
#endif

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(NONE, x, distance);
    return x;
}

__device__ __forceinline__ float apply_softcap(float x, float cap) { return cap > 0.0f ? cap * tanhf(x / cap) : x; }

__device__ __forceinline__ float activate(u32 kind, float x) {
    if (kind == 0) return x / (1.0f + exp2_approx(-1.44269504f * x));
    if (kind == 1) return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    if (kind == 2) return 0.5f * x * (1.0f + erff(0.70710678f * x));
    float positive = fmaxf(x, 0.0f);
    return kind == 3 ? positive : positive * positive;
}

// What a gate lets through. Of gpt-oss's (5) both are bounded.
__device__ __forceinline__ float activate_gate(u32 kind, float gate, float up) {
    if (kind != 5) return activate(kind, gate) * up;
    gate = fminf(gate, 7.0f);
    up = fminf(fmaxf(up, -7.0f), 7.0f);
    return gate / (1.0f + exp2_approx(-1.44269504f * 1.702f * gate)) * (up + 1.0f);
}

// ---- What a projection to queries, keys and values ends with.

// Types: 0 f32, 1 f16, 2 bf16, 3 e4m3.
__device__ __forceinline__ void store_cache(u8* cache, u64 index, float x, u32 type) {
    if (type == 0) reinterpret_cast<float*>(cache)[index] = x;
    else if (type == 1) reinterpret_cast<u16*>(cache)[index] = float_to_f16(x);
    else if (type == 2) reinterpret_cast<u16*>(cache)[index] = float_to_bf16(x);
    else cache[index] = float_to_e4m3(x);
}

// Eight neighbours, from a multiple of eight on.
__device__ __forceinline__ void store_cache_8(u8* cache, u64 index, const float (&x)[8], u32 type) {
    if (type == 2) {
        *reinterpret_cast<uint4*>(cache + index * 2) = pack8_bf16(x);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) store_cache(cache, index + j, x[j], type);
}

// sin and cos of an angle that may be many turns. The turns are taken off in double, where that is exact enough, so that
// the fast instructions (which are good near 0 only) can do the rest, without the local memory that sincosf would use.
__device__ __forceinline__ void sin_cos(float angle, float* sin, float* cos) {
    double turns = rint((double)angle * 0.15915494309189535);
    float rest = (float)fma(turns, -6.283185307179586, (double)angle);
    *sin = __sinf(rest);
    *cos = __cosf(rest);
}
