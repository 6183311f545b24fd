// Products of bf16 or e4m3 weights with at most 16 rows of activations (tokens), on tensor cores (mma.m16n8k16) and fused with what
// stands around them: the norm before, and after it the residual, the gated activation, or the rotary embedding with the write
// into the KV cache.
//
// A block makes 16 weight rows by all tokens; its 16 or 8 warps share the columns, 64 at a time, and join their sums at the
// end. Eight where 16 would make one round of blocks and a small part of a second.
// Weights are the M side, tokens the N side. Weights come in whole lines through shared memory. Loaded into registers, they
// were nearly as fast alone, but next to attention, which turns most of the first cache into shared memory, a step took 1.4 times as
// long. The first weights are asked for before the kernel that makes the activations is done.
//
// A lane takes 16 bytes of a weight row and the same columns of a token: which of them the tensor core takes for column 0, 1,
// ... of its tile does not matter, as long as both sides agree.
//
// The two halves of the 16 rows may lie anywhere: gate and up, or the two halves of a head that are rotated together, meet in
// one thread. The norm is split: activations are multiplied with its weight on the way in, and their squares, which every
// warp sees on its way, give the factor of the result.

// TILES of eight tokens are defined by the caller, and FP8: 0 for bf16 weights, 1 for e4m3 with a scale a row, 2 for e4m3 with scales
// of blocks of 128 by 128. e4m3 becomes bf16 on its way from shared memory to the tensor core, exactly: its bits in the place of
// those of a bf16 are the number times 2^-120, also below the smallest normal one. Activations are not rounded further.

// Columns that a warp takes at a time, 128 bytes of a row, and values in 16 bytes.
__device__ constexpr u32 UNIT = FP8 ? 128 : 64, VALUES = UNIT / 8;

// Stages of the ring, of 64 columns of 16 rows, a warp.
__device__ constexpr u32 stages(int warps) { return warps == 16 ? 2 : 3; }

struct SkinnyParams {
    const StepHeader* step;
    const u8* weight;   // [rows, cols]; behind e4m3 its scales, [rows] or of blocks
    const bf16* input;  // [tokens, cols]
    const float* norm;  // [cols], used by the kernels that norm
    const float* bias;  // [rows] or null
    void* output;       // [tokens, output_stride], bf16, or f32 for logits
    const float* inv_freq; // [head_dim / 2] or null: no rotation
    u8* cache;          // this layer: [blocks][K, V][kv_heads][block_size][head_dim]
    u32 num_rows, cols, num_tokens, output_stride;
    u32 accumulate, activation;
    u32 num_heads, num_kv_heads, head_dim, block_shift, cache_type, lane;
    float eps, softcap, rope_scale;
    u32 across;          // blocks of scales side by side
};

// Weights wait in shared memory, in a ring of each warp's own, so that no barrier of the block is needed.
extern __shared__ __align__(128) u8 ring[];

template <int WARPS>
__device__ __forceinline__ u32 slot(u32 stage, u32 row, u32 chunk) {
    return (threadIdx.x / 32 * stages(WARPS) + stage) * 2048 + row * 128 + ((chunk ^ (row & 1) << 2) << 4);
}

__device__ __forceinline__ void copy_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(read_once()));
}

__device__ __forceinline__ void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four values times the norm's weight; the squares are of what came in.
__device__ __forceinline__ void scale_inputs(u32& x, u32& y, const float* norm, float& squares) {
    const float4 weight = *reinterpret_cast<const float4*>(norm);
    const float v[4] = {low_bf16(x), high_bf16(x), low_bf16(y), high_bf16(y)};
#pragma unroll
    for (int j = 0; j < 4; j++) squares = fmaf(v[j], v[j], squares);
    x = pack_bf16(v[0] * weight.x, v[1] * weight.y);
    y = pack_bf16(v[2] * weight.z, v[3] * weight.w);
}

// Two e4m3 of a word, the low ones or the high ones.
template <bool HIGH>
__device__ __forceinline__ u32 two_bf16(u32 word) {
    u32 spread = __byte_perm(word, 0, HIGH ? 0x3424 : 0x1404), y;
    u32 bits = (spread & 0x80008000u) | (spread >> 4 & 0x07f007f0u);
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(bits), "r"(0x7b807b80u), "r"(0x80008000u));
    return y;
}

// sums += 16 bytes of two weight rows times the same columns of a token.
__device__ __forceinline__ void multiply_chunk(float (&sums)[4], const uint4& w0, const uint4& w1, const uint4 (&x)[VALUES / 8]) {
#if FP8
    const u32 a[4] = {w0.x, w0.y, w0.z, w0.w}, b[4] = {w1.x, w1.y, w1.z, w1.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint4& inputs = x[i / 2];
        multiply_add(sums, two_bf16<false>(a[i]), two_bf16<false>(b[i]), two_bf16<true>(a[i]), two_bf16<true>(b[i]),
                     i % 2 ? inputs.z : inputs.x, i % 2 ? inputs.w : inputs.y);
    }
#else
    multiply_add(sums, w0.x, w1.x, w0.y, w1.y, x[0].x, x[0].y);
    multiply_add(sums, w0.z, w1.z, w0.w, w1.w, x[0].z, x[0].w);
#endif
}

// A lane's part of the sums: rows lane / 4 of `first` and of `second`, tokens 2 * (lane % 4) and the next, of each tile.
template <int WARPS, bool NORMS, bool GATHERS>
__device__ __forceinline__ void multiply(
    const SkinnyParams& p, u32 all_rows, u32 first, u32 second, u32 last, float (&sums)[TILES][4], float (&squares)[TILES]) {
    constexpr u32 STAGES = stages(WARPS);
    u32 lane = threadIdx.x % 32, start = threadIdx.x / 32 * UNIT, column = start + lane % 4 * VALUES;
    u32 ring_at = (u32)__cvta_generic_to_shared(ring);
    // Eight lanes ask for 128 bytes of a row: whole lines. In units of 16 bytes.
    const uint4* weight = reinterpret_cast<const uint4*>(p.weight) + start / VALUES + lane % 8;
    u64 rows[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        rows[i] = (u64)min((i < 2 ? first : second) + i % 2 * 4 + lane / 8, last) * (p.cols / VALUES);
    auto load = [&](u32 stage, u32 ahead) {
        if (start + ahead < p.cols) {
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                copy_16(ring_at + slot<WARPS>(stage, i * 4 + lane / 8, lane % 8), weight + rows[i] + ahead / VALUES);
        }
        asm volatile("cp.async.commit_group;");
    };
#pragma unroll
    for (u32 s = 0; s < STAGES - 1; s++) load(s, s * WARPS * UNIT);
    // Where a token's activations begin, in units of 8; tokens that are not there are zero.
    u32 tokens[TILES];
    u32 num_tokens = GATHERS ? p.step->num_logit_rows : p.step->num_tokens;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        u32 token = t * 8 + lane / 4;
        u32 row = GATHERS && token < num_tokens ? words(p.step, p.step->logit_rows)[token] : token;
        tokens[t] = token < num_tokens ? row * (p.cols / 8) : NONE;
    }
    wait_for_previous();
    const uint4* inputs = reinterpret_cast<const uint4*>(p.input);
    u32 stage = 0;
    for (u32 done = 0; start + done < p.cols; done += WARPS * UNIT, column += WARPS * UNIT) {
        uint4 x[TILES][2][VALUES / 8];
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int i = 0; i < VALUES / 8; i++)
                    x[t][half][i] =
                        tokens[t] != NONE ? inputs[tokens[t] + column / 8 + half * (VALUES / 2) + i] : make_uint4(0, 0, 0, 0);
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncwarp();
        load(stage == 0 ? STAGES - 1 : stage - 1, done + (STAGES - 1) * WARPS * UNIT);
#if FP8 == 2
        float unit_sums[TILES][4] = {};
#endif
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 w0 = *reinterpret_cast<const uint4*>(ring + slot<WARPS>(stage, lane / 4, lane % 4 + half * 4));
            const uint4 w1 = *reinterpret_cast<const uint4*>(ring + slot<WARPS>(stage, 8 + lane / 4, lane % 4 + half * 4));
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                if (NORMS) {
#pragma unroll
                    for (int i = 0; i < VALUES / 8; i++) {
                        const float* norm = p.norm + column + half * (4 * VALUES) + i * 8;
                        scale_inputs(x[t][half][i].x, x[t][half][i].y, norm, squares[t]);
                        scale_inputs(x[t][half][i].z, x[t][half][i].w, norm + 4, squares[t]);
                    }
                }
#if FP8 == 2
                multiply_chunk(unit_sums[t], w0, w1, x[t][half]);
#else
                multiply_chunk(sums[t], w0, w1, x[t][half]);
#endif
            }
        }
#if FP8 == 2
        {
            // A unit lies in one block of columns, and each half of the rows in one of rows.
            const float* scales = reinterpret_cast<const float*>(p.weight + (u64)all_rows * p.cols) + (start + done) / 128;
            const float scale[2] = {scales[min(first, last) / 128 * p.across], scales[min(second, last) / 128 * p.across]};
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int j = 0; j < 4; j++) sums[t][j] = fmaf(scale[j / 2], unit_sums[t][j], sums[t][j]);
        }
#endif
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
}

// What the warps of a block leave for each other.
template <int WARPS>
struct Parts {
    float4 sums[WARPS][TILES][32];
    float squares[WARPS][TILES * 8];
};

// Joins the sums of the warps. True for threads that hold results, of tile `thread / 32`.
template <int WARPS, bool NORMS>
__device__ __forceinline__ bool join(
    const SkinnyParams& p, Parts<WARPS>& parts, const float (&sums)[TILES][4], float (&squares)[TILES], float (&result)[4]) {
    u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        parts.sums[warp][t][lane] = make_float4(sums[t][0], sums[t][1], sums[t][2], sums[t][3]);
        if (NORMS) {
            squares[t] += __shfl_xor_sync(NONE, squares[t], 1);
            squares[t] += __shfl_xor_sync(NONE, squares[t], 2);
            if (lane % 4 == 0) parts.squares[warp][t * 8 + lane / 4] = squares[t];
        }
    }
    __syncthreads();
    if (warp >= TILES) return false;
#pragma unroll
    for (int j = 0; j < 4; j++) result[j] = 0.0f;
    float total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        float4 part = parts.sums[w][warp][lane];
        result[0] += part.x;
        result[1] += part.y;
        result[2] += part.z;
        result[3] += part.w;
        if (NORMS) {
            total[0] += parts.squares[w][warp * 8 + lane % 4 * 2];
            total[1] += parts.squares[w][warp * 8 + lane % 4 * 2 + 1];
        }
    }
    if (NORMS) {
        float factor[2] = {rsqrtf(total[0] / (float)p.cols + p.eps), rsqrtf(total[1] / (float)p.cols + p.eps)};
#pragma unroll
        for (int j = 0; j < 4; j++) result[j] *= factor[j % 2];
    }
    return true;
}

// Of two rows; results are of the first and of the second interleaved by two.
__device__ __forceinline__ void scale_rows(const SkinnyParams& p, u32 rows, u32 first, u32 second, float (&result)[4]) {
    if (FP8 != 1) return;
    const float* scales = reinterpret_cast<const float*>(p.weight + (u64)rows * p.cols);
    const float scale[2] = {scales[first], scales[second]};
#pragma unroll
    for (int j = 0; j < 4; j++) result[j] *= scale[j / 2];
}

__device__ __forceinline__ u32 token_of(int j) { return threadIdx.x / 32 * 8 + threadIdx.x % 4 * 2 + j % 2; }

// 16 consecutive rows: a plain product, or one that is added to the residual stream.
template <int WARPS, bool NORMS>
__device__ __forceinline__ void linear(const SkinnyParams& p) {
    __shared__ Parts<WARPS> parts;
    allow_next();
    u32 row = threadIdx.x % 32 / 4;
    u32 at[2] = {blockIdx.x * 16 + row, blockIdx.x * 16 + 8 + row};
    float sums[TILES][4] = {}, squares[TILES] = {}, result[4];
    multiply<WARPS, NORMS, false>(p, p.num_rows, blockIdx.x * 16, blockIdx.x * 16 + 8, p.num_rows - 1, sums, squares);
    if (!join<WARPS, NORMS>(p, parts, sums, squares, result)) return;
    scale_rows(p, p.num_rows, min(at[0], p.num_rows - 1), min(at[1], p.num_rows - 1), result);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 token = token_of(j), column = at[j / 2];
        if (token >= p.num_tokens || column >= p.num_rows) continue;
        bf16* output = reinterpret_cast<bf16*>(p.output) + (u64)token * p.output_stride + column;
        float value = result[j] + (p.bias ? p.bias[column] : 0.0f);
        *output = float_to_bf16(p.accumulate ? bf16_to_float(*output) + value : value);
    }
}

// The same for the rows of the step whose logits are wanted, in f32.
template <int WARPS, bool NORMS>
__device__ __forceinline__ void logits(const SkinnyParams& p) {
    __shared__ Parts<WARPS> parts;
    allow_next();
    u32 row = threadIdx.x % 32 / 4;
    u32 at[2] = {blockIdx.x * 16 + row, blockIdx.x * 16 + 8 + row};
    float sums[TILES][4] = {}, squares[TILES] = {}, result[4];
    multiply<WARPS, NORMS, true>(p, p.num_rows, blockIdx.x * 16, blockIdx.x * 16 + 8, p.num_rows - 1, sums, squares);
    if (!join<WARPS, NORMS>(p, parts, sums, squares, result)) return;
    scale_rows(p, p.num_rows, min(at[0], p.num_rows - 1), min(at[1], p.num_rows - 1), result);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 token = token_of(j), column = at[j / 2];
        if (token >= p.num_tokens || column >= p.num_rows) continue;
        reinterpret_cast<float*>(p.output)[(u64)token * p.output_stride + column] = apply_softcap(result[j], p.softcap);
    }
}

// Eight rows of the gate and the same of up; `num_rows` is that of the gate.
template <int WARPS, bool NORMS>
__device__ __forceinline__ void gated(const SkinnyParams& p) {
    __shared__ Parts<WARPS> parts;
    allow_next();
    u32 column = blockIdx.x * 8 + threadIdx.x % 32 / 4;
    float sums[TILES][4] = {}, squares[TILES] = {}, result[4];
    multiply<WARPS, NORMS, false>(p, 2 * p.num_rows, blockIdx.x * 8, p.num_rows + blockIdx.x * 8, NONE, sums, squares);
    if (!join<WARPS, NORMS>(p, parts, sums, squares, result)) return;
    scale_rows(p, 2 * p.num_rows, column, p.num_rows + column, result);
    float gate_bias = p.bias ? p.bias[column] : 0.0f, up_bias = p.bias ? p.bias[p.num_rows + column] : 0.0f;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        u32 token = token_of(j);
        if (token >= p.num_tokens) continue;
        float value = activate_gate(p.activation, result[j] + gate_bias, result[2 + j] + up_bias);
        reinterpret_cast<bf16*>(p.output)[(u64)token * p.output_stride + column] = float_to_bf16(value);
    }
}

// Eight dimensions of the first half of a head and the same of the second: rotated together if they are of q or k, then to
// the queries or into the cache.
template <int WARPS, bool NORMS>
__device__ __forceinline__ void qkv(const SkinnyParams& p) {
    __shared__ Parts<WARPS> parts;
    allow_next();
    u32 half = p.head_dim / 2, head = blockIdx.x / (half / 8);
    u32 d = blockIdx.x % (half / 8) * 8 + threadIdx.x % 32 / 4;
    u32 first = head * p.head_dim + blockIdx.x % (half / 8) * 8;
    float sums[TILES][4] = {}, squares[TILES] = {}, result[4];
    multiply<WARPS, NORMS, false>(p, p.num_rows, first, first + half, NONE, sums, squares);
    if (!join<WARPS, NORMS>(p, parts, sums, squares, result)) return;
    scale_rows(p, p.num_rows, head * p.head_dim + d, head * p.head_dim + half + d, result);
    bool is_value = head >= p.num_heads + p.num_kv_heads;
    const u32* positions = words(p.step, p.step->positions);
    const u32* slots = lane_slots(p.step, p.lane);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        u32 token = token_of(j);
        if (token >= p.step->num_tokens) continue;
        float x = result[j], y = result[2 + j];
        if (p.bias) {
            x += p.bias[head * p.head_dim + d];
            y += p.bias[head * p.head_dim + half + d];
        }
        if (p.inv_freq && !is_value) {
            float sin, cos, old = x;
            sin_cos((float)positions[token] * p.inv_freq[d], &sin, &cos);
            x = p.rope_scale * (old * cos - y * sin);
            y = p.rope_scale * (y * cos + old * sin);
        }
        if (head < p.num_heads) {
            bf16* query = reinterpret_cast<bf16*>(p.output) + ((u64)token * p.num_heads + head) * p.head_dim;
            query[d] = float_to_bf16(x);
            query[half + d] = float_to_bf16(y);
        } else {
            u64 block = slots[token] >> p.block_shift;
            u32 offset = slots[token] & ((1u << p.block_shift) - 1), plane_head = head - p.num_heads;
            u64 start = (((block * 2 * p.num_kv_heads + plane_head) << p.block_shift) + offset) * p.head_dim;
            store_cache(p.cache, start + d, x, p.cache_type);
            store_cache(p.cache, start + half + d, y, p.cache_type);
        }
    }
}

#if TILES == 1 && __CUDA_ARCH__ < 1000 && FP8 != 2
#define BLOCKS 2
#else
#define BLOCKS 1 // more would spill
#endif
#define SKINNY(NAME, WARPS) \
    KERNEL __launch_bounds__(WARPS * 32, BLOCKS * 16 / WARPS) NAME##_##WARPS(const SkinnyParams p) { NAME<WARPS, false>(p); } \
    KERNEL __launch_bounds__(WARPS * 32, BLOCKS * 16 / WARPS) normed_##NAME##_##WARPS(const SkinnyParams p) { NAME<WARPS, true>(p); }

SKINNY(linear, 16)
SKINNY(logits, 16)
SKINNY(gated, 16)
SKINNY(qkv, 16)
SKINNY(qkv, 8)
