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

// Stages of the ring, of 64 columns of 16 rows, a warp. A DEEP ring is for blocks that have a multiprocessor for themselves and wait
// for attention: all of it is asked for at once.
__device__ constexpr u32 stages(int warps, bool deep) { return warps == 16 && !deep ? 2 : 3; }

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
    const float *q_norm, *k_norm; // [head_dim] or null: norms of heads, for the kernels that have them
    // A second product of the same rows, or none: what blocks from `first_blocks` on do.
    const u8* other_weight; // [other_rows, cols]
    void* other_output;     // [tokens, other_rows]
    u32 other_rows, first_blocks;
    float q_eps, k_eps;
};

// Weights wait in shared memory, in a ring of each warp's own, so that no barrier of the block is needed.
extern __shared__ __align__(128) u8 ring[];

template <u32 STAGES>
__device__ __forceinline__ u32 slot(u32 stage, u32 row, u32 chunk) {
    return (threadIdx.x / 32 * STAGES + stage) * 2048 + row * 128 + ((chunk ^ (row & 1) << 2) << 4);
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

// The same, and what rounding has taken off.
__device__ __forceinline__ void scale_exactly(u32& x, u32& y, u32& rest_x, u32& rest_y, const float* norm, float& squares) {
    const float4 weight = *reinterpret_cast<const float4*>(norm);
    float v[4] = {low_bf16(x), high_bf16(x), low_bf16(y), high_bf16(y)};
#pragma unroll
    for (int j = 0; j < 4; j++) squares = fmaf(v[j], v[j], squares);
    v[0] *= weight.x, v[1] *= weight.y, v[2] *= weight.z, v[3] *= weight.w;
    x = pack_bf16(v[0], v[1]);
    y = pack_bf16(v[2], v[3]);
    rest_x = pack_bf16(v[0] - low_bf16(x), v[1] - high_bf16(x));
    rest_y = pack_bf16(v[2] - low_bf16(y), v[3] - high_bf16(y));
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
// `meanwhile` is done when the kernel before is, before the products. IS_EXACT: normed inputs are not rounded to bf16.
template <int WARPS, bool NORMS, bool GATHERS, bool DEEP = false, bool IS_EXACT = false, typename Meanwhile>
__device__ __forceinline__ void multiply(const SkinnyParams& p, u32 all_rows, u32 first, u32 second, u32 last, float (&sums)[TILES][4],
                                         float (&squares)[TILES], Meanwhile meanwhile, u32 first_token = 0) {
    constexpr u32 STAGES = stages(WARPS, DEEP), AHEAD = DEEP ? STAGES : STAGES - 1;
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
                copy_16(ring_at + slot<STAGES>(stage, i * 4 + lane / 8, lane % 8), weight + rows[i] + ahead / VALUES);
        }
        asm volatile("cp.async.commit_group;");
    };
#pragma unroll
    for (u32 s = 0; s < AHEAD; s++) load(s, s * WARPS * UNIT);
    // Where a token's activations begin, in units of 8; tokens that are not there are zero.
    u32 tokens[TILES];
    u32 num_tokens = GATHERS ? p.step->num_logit_rows : p.step->num_tokens;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        u32 token = first_token + t * 8 + lane / 4;
        u32 row = GATHERS && token < num_tokens ? words(p.step, p.step->logit_rows)[token] : token;
        tokens[t] = token < num_tokens ? row * (p.cols / 8) : NONE;
    }
    wait_for_previous();
    meanwhile();
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
        asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
        __syncwarp();
        if (!DEEP) load(stage == 0 ? STAGES - 1 : stage - 1, done + AHEAD * WARPS * UNIT);
#if FP8 == 2
        float unit_sums[TILES][4] = {};
#endif
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 w0 = *reinterpret_cast<const uint4*>(ring + slot<STAGES>(stage, lane / 4, lane % 4 + half * 4));
            const uint4 w1 = *reinterpret_cast<const uint4*>(ring + slot<STAGES>(stage, 8 + lane / 4, lane % 4 + half * 4));
#pragma unroll
            for (int t = 0; t < TILES; t++) {
#if FP8 == 0
                if (IS_EXACT) {
                    uint4 rest[1];
                    const float* norm = p.norm + column + half * (4 * VALUES);
                    scale_exactly(x[t][half][0].x, x[t][half][0].y, rest[0].x, rest[0].y, norm, squares[t]);
                    scale_exactly(x[t][half][0].z, x[t][half][0].w, rest[0].z, rest[0].w, norm + 4, squares[t]);
                    multiply_chunk(sums[t], w0, w1, rest);
                } else
#endif
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
        if (DEEP) {
            __syncwarp();
            load(stage, done + AHEAD * WARPS * UNIT);
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
}

// What the warps of a block leave for each other.
template <int WARPS>
struct Parts {
    float4 sums[WARPS][TILES][32];
    float squares[WARPS][TILES * 8];
};

// Joins the sums of the warps, AT_ONCE of them asked for at a time. True for threads that hold results, of tile `thread / 32`.
template <int WARPS, bool NORMS, int AT_ONCE = WARPS>
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
#pragma unroll AT_ONCE
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
template <int WARPS, bool NORMS, bool DEEP>
__device__ __forceinline__ void linear(SkinnyParams p) {
    __shared__ Parts<WARPS> parts;
    __shared__ __align__(16) bf16 residual[TILES * 8][16];
    allow_next();
    u32 first = blockIdx.x * 16, row = threadIdx.x % 32 / 4;
#if FP8 == 0
    if (blockIdx.x >= p.first_blocks) {
        first -= p.first_blocks * 16;
        p.weight = p.other_weight;
        p.output = p.other_output;
        p.num_rows = p.output_stride = p.other_rows;
    }
#endif
    u32 at[2] = {first + row, first + 8 + row};
    float sums[TILES][4] = {}, squares[TILES] = {}, result[4];
    // What is added to comes with the last group of weights at the latest.
    auto meanwhile = [&]() {
        u32 token = threadIdx.x / 2, column = first + threadIdx.x % 2 * 8;
        if (!p.accumulate || token >= p.num_tokens || column >= p.num_rows) return;
        const bf16* from = reinterpret_cast<const bf16*>(p.output) + (u64)token * p.output_stride + column;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::
                     "r"((u32)__cvta_generic_to_shared(&residual[token][threadIdx.x % 2 * 8])), "l"(from) : "memory");
    };
    multiply<WARPS, NORMS, false, DEEP>(p, p.num_rows, first, first + 8, p.num_rows - 1, sums, squares, meanwhile);
    asm volatile("cp.async.wait_all;" ::: "memory");
    if (!join<WARPS, NORMS, 8>(p, parts, sums, squares, result)) return; // all of 16 at once would spill
    scale_rows(p, p.num_rows, min(at[0], p.num_rows - 1), min(at[1], p.num_rows - 1), result);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 token = token_of(j), column = at[j / 2];
        if (token >= p.num_tokens || column >= p.num_rows) continue;
        float value = result[j] + (p.bias ? p.bias[column] : 0.0f);
        if (p.accumulate) value += bf16_to_float(residual[token][j / 2 * 8 + row]);
        reinterpret_cast<bf16*>(p.output)[(u64)token * p.output_stride + column] = float_to_bf16(value);
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
    multiply<WARPS, NORMS, true>(p, p.num_rows, blockIdx.x * 16, blockIdx.x * 16 + 8, p.num_rows - 1, sums, squares, [] {});
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
    multiply<WARPS, NORMS, false>(p, 2 * p.num_rows, blockIdx.x * 8, p.num_rows + blockIdx.x * 8, NONE, sums, squares, [] {});
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
// the queries or into the cache. Where heads are normed, the blocks of a head are a cluster and give each other their squares.

// What a lane needs of its two tokens after the product, and what does not depend on the kernel before. In shared memory:
// registers are short. [lanes of the warps that hold results]
struct Places {
    float sin[TILES * 32][2], cos[TILES * 32][2];
    u32 slot[TILES * 32][2];
    float bias[TILES * 32][2], norm[TILES * 32][2]; // of the two dimensions
};

// `norm` is that of the head, or null.
__device__ __forceinline__ void find_places(const SkinnyParams& p, Places& places, u32 head, u32 d, const float* norm) {
    if (threadIdx.x >= TILES * 32) return;
    u32 half = p.head_dim / 2;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        places.bias[threadIdx.x][j] = p.bias ? p.bias[head * p.head_dim + j * half + d] : 0.0f;
        places.norm[threadIdx.x][j] = norm ? norm[j * half + d] : 1.0f;
    }
    const u32* positions = words(p.step, p.step->positions);
    const u32* slots = lane_slots(p.step, p.lane);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        u32 token = min(token_of(j), p.step->num_tokens - 1);
        places.slot[threadIdx.x][j] = slots[token];
        if (p.inv_freq && head < p.num_heads + p.num_kv_heads)
            sin_cos((float)positions[token] * p.inv_freq[d], &places.sin[threadIdx.x][j], &places.cos[threadIdx.x][j]);
    }
}

// Blocks of a head, at most: a cluster.
__device__ constexpr u32 HEAD_BLOCKS = 8;

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void arrive_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The sums of `squares` over all blocks of a head, by the warps that hold results: [0] and [1] of a lane's tokens.
__device__ __forceinline__ void sum_over_head(float (&squares)[2], float (*of_blocks)[TILES * 8], u32 rank, u32 blocks) {
    u32 lane = threadIdx.x % 32, token = threadIdx.x / 32 * 8 + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) squares[j] += __shfl_xor_sync(NONE, squares[j], distance);
    // Eight lanes with the same tokens: one for each block.
    if (lane / 4 < blocks) {
        u32 own = (u32)__cvta_generic_to_shared(&of_blocks[rank][token]);
        asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nst.shared::cluster.v2.f32 [there], {%2, %3};\n}" ::
                     "r"(own), "r"(lane / 4), "f"(squares[0]), "f"(squares[1]) : "memory");
    }
    arrive_cluster();
    wait_cluster();
    squares[0] = squares[1] = 0.0f;
    for (u32 block = 0; block < blocks; block++) {
        squares[0] += of_blocks[block][token];
        squares[1] += of_blocks[block][token + 1];
    }
}
#endif

template <int WARPS, bool NORMS, bool NORMS_HEADS>
__device__ __forceinline__ void qkv(const SkinnyParams& p) {
    __shared__ Parts<WARPS> parts;
    __shared__ Places places;
    allow_next();
#if __CUDA_ARCH__ >= 900
    if (NORMS_HEADS) arrive_cluster();
#endif
    u32 half = p.head_dim / 2, head = blockIdx.x / (half / 8), rank = blockIdx.x % (half / 8);
    u32 d = rank * 8 + threadIdx.x % 32 / 4;
    u32 first = head * p.head_dim + rank * 8;
    float sums[TILES][4] = {}, squares[TILES] = {}, result[4];
    bool is_query = head < p.num_heads, is_value = head >= p.num_heads + p.num_kv_heads;
    const float* norm = !NORMS_HEADS || is_value ? nullptr : is_query ? p.q_norm : p.k_norm;
    find_places(p, places, head, d, norm);
    multiply<WARPS, NORMS, false>(p, p.num_rows, first, first + half, NONE, sums, squares, [] {});
#if __CUDA_ARCH__ >= 900
    // The other blocks have started: their memory may be written.
    if (NORMS_HEADS) wait_cluster();
#endif
    if (!join<WARPS, NORMS>(p, parts, sums, squares, result)) return;
    scale_rows(p, p.num_rows, head * p.head_dim + d, head * p.head_dim + half + d, result);
#pragma unroll
    for (int j = 0; j < 4; j++) result[j] += places.bias[threadIdx.x][j / 2];
#if __CUDA_ARCH__ >= 900
    if (NORMS_HEADS && norm) {
        __shared__ float of_blocks[HEAD_BLOCKS][TILES * 8];
        float of_head[2] = {result[0] * result[0] + result[2] * result[2], result[1] * result[1] + result[3] * result[3]};
        sum_over_head(of_head, of_blocks, rank, half / 8);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float factor = rsqrtf(of_head[j] / (float)p.head_dim + (is_query ? p.q_eps : p.k_eps));
            result[j] *= factor * places.norm[threadIdx.x][0];
            result[2 + j] *= factor * places.norm[threadIdx.x][1];
        }
    }
#endif
#pragma unroll
    for (int j = 0; j < 2; j++) {
        u32 token = token_of(j);
        if (token >= p.step->num_tokens) continue;
        float x = result[j], y = result[2 + j];
        if (p.inv_freq && !is_value) {
            float sin = places.sin[threadIdx.x][j], cos = places.cos[threadIdx.x][j], old = x;
            x = p.rope_scale * (old * cos - y * sin);
            y = p.rope_scale * (y * cos + old * sin);
        }
        if (is_query) {
            bf16* query = reinterpret_cast<bf16*>(p.output) + ((u64)token * p.num_heads + head) * p.head_dim;
            query[d] = float_to_bf16(x);
            query[half + d] = float_to_bf16(y);
        } else {
            u32 slot = places.slot[threadIdx.x][j], offset = slot & ((1u << p.block_shift) - 1), plane_head = head - p.num_heads;
            u64 block = slot >> p.block_shift;
            u64 start = (((block * 2 * p.num_kv_heads + plane_head) << p.block_shift) + offset) * p.head_dim;
            store_cache(p.cache, start + d, x, p.cache_type);
            store_cache(p.cache, start + half + d, y, p.cache_type);
        }
    }
}

#ifndef ROUTER // which has kernels of its own
#if TILES == 1 && __CUDA_ARCH__ < 1000 && FP8 != 2
#define BLOCKS 2
#else
#define BLOCKS 1 // more would spill
#endif
#define SKINNY(NAME, WARPS, ...) \
    KERNEL __launch_bounds__(WARPS * 32, BLOCKS * 16 / WARPS) NAME##_##WARPS(const SkinnyParams p) { __VA_ARGS__<WARPS, false>(p); } \
    KERNEL __launch_bounds__(WARPS * 32, BLOCKS * 16 / WARPS) normed_##NAME##_##WARPS(const SkinnyParams p) { __VA_ARGS__<WARPS, true>(p); }

template <int WARPS, bool NORMS>
__device__ __forceinline__ void plain_linear(const SkinnyParams& p) { linear<WARPS, NORMS, false>(p); }
template <int WARPS, bool NORMS>
__device__ __forceinline__ void deep_linear(const SkinnyParams& p) { linear<WARPS, NORMS, true>(p); }
template <int WARPS, bool NORMS>
__device__ __forceinline__ void plain_qkv(const SkinnyParams& p) { qkv<WARPS, NORMS, false>(p); }
template <int WARPS, bool NORMS>
__device__ __forceinline__ void head_normed_qkv(const SkinnyParams& p) { qkv<WARPS, NORMS, true>(p); }

SKINNY(linear, 16, plain_linear)
SKINNY(deep_linear, 16, deep_linear)
SKINNY(logits, 16, logits)
SKINNY(gated, 16, gated)
SKINNY(qkv, 16, plain_qkv)
SKINNY(qkv, 8, plain_qkv)
SKINNY(head_normed_qkv, 8, head_normed_qkv)
#endif
