// Attention over latents of 512 + 64 on tensor cores (mma.m16n8k16): one key for all heads, whose first 512 values are the value as
// well, so that what is read for the scores is not read again. IS_F16 is what the cache holds, else bf16.
//
// A block takes 16 heads of one query and goes over its keys, 64 at a time, in shared memory. Each of its four warps makes the scores of
// 16 keys, and then a quarter of the columns of the result, for all 64: the sums of 16 rows by 512 columns would not fit the registers
// of one warp. Two blocks share a multiprocessor, so that one computes while the other waits for keys.

#define DIM 576
#define RANK 512
#define KEYS 64
#define LATENT_ROW (DIM * 2)
#define LATENT_CHUNKS (DIM / 8)
#define LOG2E 1.44269504f
#define LN2 0.69314718f

__device__ __forceinline__ u32 place(u32 row, u32 chunk) { return row * LATENT_ROW + ((chunk ^ (row & 7)) << 4); }

// Weights of 16 rows by 64 keys.
__device__ __forceinline__ u32 weight_place(u32 row, u32 chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

__device__ __forceinline__ void copy_16(u32 to, const void* from, bool is_there) {
    u32 bytes = is_there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if IS_F16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 pack(float low, float high) {
#if IS_F16
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
#else
    return pack_bf16(low, high);
#endif
}

__device__ __forceinline__ u32 convert_query(u32 raw) {
#if IS_F16
    return pack(low_bf16(raw), high_bf16(raw));
#else
    return raw;
#endif
}

struct LatentShared {
    __align__(128) u8 keys[KEYS * LATENT_ROW];
    u8 query[16 * LATENT_ROW];
    u8 weights[16 * 128];
    float most[4][16], sums[4][16];
};

// 16 rows of the query into shared memory.
__device__ __forceinline__ void load_query(const AttentionParams& p, LatentShared& s, u64 first) {
    u32 to = (u32)__cvta_generic_to_shared(s.query), row = threadIdx.x / 8, part = threadIdx.x % 8;
    const real* from = p.query + first + (u64)row * DIM + part * 8;
#pragma unroll
    for (u32 block = 0; block < DIM / 64; block++) {
#if IS_F16
        uint4 raw = *reinterpret_cast<const uint4*>(from + block * 64);
        raw = make_uint4(convert_query(raw.x), convert_query(raw.y), convert_query(raw.z), convert_query(raw.w));
        *reinterpret_cast<uint4*>(s.query + place(row, block * 8 + part)) = raw;
#else
        copy_16(to + place(row, block * 8 + part), from + block * 64, true);
#endif
    }
}

// Keys `offset..offset + KEYS` of an item; those from `end` on are zero. Eight lanes have 128 bytes of a row at a time.
__device__ __forceinline__ void load_keys(const AttentionParams& p, LatentShared& s, const u32* pages, u32 offset, u32 end) {
    u32 to = (u32)__cvta_generic_to_shared(s.keys), own = threadIdx.x / 8, part = threadIdx.x % 8;
    // Page numbers first, so that their latencies overlap.
    const u8* from[KEYS / 16];
#pragma unroll
    for (u32 i = 0; i < KEYS / 16; i++) from[i] = p.cache + 2 * (cache_row(p, pages, min(offset + own + 16 * i, end - 1), 0) + part * 8);
#pragma unroll
    for (u32 i = 0; i < KEYS / 16; i++)
#pragma unroll
        for (u32 block = 0; block < DIM / 64; block++)
            copy_16(to + place(own + 16 * i, block * 8 + part), from[i] + block * 128, offset + own + 16 * i < end);
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
}

// The products of the 16 rows with a warp's 16 keys.
__device__ __forceinline__ void score(LatentShared& s, float (&scores)[2][4]) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 query = (u32)__cvta_generic_to_shared(s.query), keys = (u32)__cvta_generic_to_shared(s.keys);
    float odd[2][4] = {};
#pragma unroll 6
    for (u32 k = 0; k < DIM / 16; k += 2) {
        u32 a[4], b[4], c[4], d[4];
        load_matrices(a, query + place(lane % 16, 2 * k + lane / 16));
        load_matrices(b, keys + place(warp * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
        load_matrices(c, query + place(lane % 16, 2 * k + 2 + lane / 16));
        load_matrices(d, keys + place(warp * 16 + lane / 16 * 8 + lane % 8, 2 * k + 2 + lane / 8 % 2));
        multiply_add(scores[0], a, b[0], b[1]);
        multiply_add(scores[1], a, b[2], b[3]);
        multiply_add(odd[0], c, d[0], d[1]);
        multiply_add(odd[1], c, d[2], d[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) scores[n][j] += odd[n][j];
}

// One query of an item and the heads from `head` on.
__device__ __forceinline__ void attend(const AttentionParams& p, LatentShared& s, const AttentionItem& item, const u32* pages, u32 number,
                                       u32 head) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = item.query_start + number;
    u32 position = words(p.step, p.step->positions)[row];
    u32 end = min(position >= item.kv_start ? position - item.kv_start + 1 : 0, item.kv_len);
    u32 first = p.window && position + 1 > p.window ? position + 1 - p.window : 0;
    u32 begin = first > item.kv_start ? first - item.kv_start : 0;
    u64 query_at = ((u64)row * p.num_heads + head) * DIM;
    float made[16][4] = {}, most[2] = {NEG_INF, NEG_INF}, total[2] = {};
    u32 weights = (u32)__cvta_generic_to_shared(s.weights), keys = (u32)__cvta_generic_to_shared(s.keys);
    load_query(p, s, query_at);
    for (u32 offset = begin / KEYS * KEYS; offset < end; offset += KEYS) {
        load_keys(p, s, pages, offset, end);
        __syncthreads();
        float scores[2][4] = {}, highest[2] = {NEG_INF, NEG_INF};
        score(s, scores);
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 key = offset + warp * 16 + n * 8 + lane % 4 * 2 + j % 2;
                float value = p.softcap > 0.0f ? apply_softcap(scores[n][j] * p.scale, p.softcap) : scores[n][j] * p.scale;
                scores[n][j] = key >= begin && key < end ? value * LOG2E : NEG_INF;
                highest[j / 2] = fmaxf(highest[j / 2], scores[n][j]);
            }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            highest[half] = fmaxf(highest[half], __shfl_xor_sync(NONE, highest[half], 1));
            highest[half] = fmaxf(highest[half], __shfl_xor_sync(NONE, highest[half], 2));
            if (lane % 4 == 0) s.most[warp][half * 8 + lane / 4] = highest[half];
        }
        __syncthreads();
        float factor[2], base[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 r = half * 8 + lane / 4;
            float higher = fmaxf(fmaxf(s.most[0][r], s.most[1][r]), fmaxf(s.most[2][r], s.most[3][r]));
            higher = fmaxf(higher, most[half]);
            base[half] = higher == NEG_INF ? 0.0f : higher;
            factor[half] = exp2_approx(most[half] - base[half]);
            most[half] = higher;
            total[half] *= factor[half];
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float x = exp2_approx(scores[n][2 * half] - base[half]), y = exp2_approx(scores[n][2 * half + 1] - base[half]);
                total[half] += x + y;
                u32 at = weight_place(half * 8 + lane / 4, warp * 2 + n) + lane % 4 * 4;
                *reinterpret_cast<u32*>(s.weights + at) = pack(x, y);
            }
        }
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) made[n][j] *= factor[j / 2];
        __syncthreads();
#pragma unroll
        for (u32 k = 0; k < KEYS / 16; k++) {
            u32 a[4];
            load_matrices(a, weights + weight_place(lane % 16, 2 * k + lane / 16));
#pragma unroll
            for (u32 n = 0; n < 16; n += 2) {
                u32 b[4];
                load_matrices_transposed(b, keys + place(k * 16 + lane % 16, warp * 16 + n + lane / 16));
                multiply_add(made[n], a, b[0], b[1]);
                multiply_add(made[n + 1], a, b[2], b[3]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        total[half] += __shfl_xor_sync(NONE, total[half], 1);
        total[half] += __shfl_xor_sync(NONE, total[half], 2);
        if (lane % 4 == 0) s.sums[warp][half * 8 + lane / 4] = total[half];
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 r = half * 8 + lane / 4;
        float sum = s.sums[0][r] + s.sums[1][r] + s.sums[2][r] + s.sums[3][r], factor = sum > 0.0f ? 1.0f / sum : 0.0f;
        u64 slot = ((u64)item.partial + number) * p.num_heads + head + r;
#pragma unroll
        for (u32 n = 0; n < 18; n++) {
            // The last two are columns without values: a warp has a quarter of them.
            u32 column = n < 16 ? warp * 128 + n * 8 + lane % 4 * 2 : RANK + warp * 16 + (n - 16) * 8 + lane % 4 * 2;
            float x = n < 16 ? made[n % 16][2 * half] * factor : 0.0f, y = n < 16 ? made[n % 16][2 * half + 1] * factor : 0.0f;
            if (item.partial == NONE) {
                *reinterpret_cast<u32*>(p.output + query_at + (u64)r * DIM + column) = pack_bf16(x, y);
            } else {
                *reinterpret_cast<float2*>(p.partials + slot * DIM + column) = make_float2(x, y);
            }
        }
        if (item.partial != NONE && warp == 0 && lane % 4 == 0)
            p.partial_lse[slot] = sum > 0.0f ? (most[half] + log2f(sum)) * LN2 : NEG_INF;
    }
    __syncthreads();
}

// Queries of an item are spread over the second dimension of the grid.
KERNEL __launch_bounds__(128, 2) attention_latent(const AttentionParams p) {
    extern __shared__ __align__(128) u8 shared[];
    LatentShared& s = *reinterpret_cast<LatentShared*>(shared);
    allow_next();
    wait_for_previous();
    const PlanHeader plan = p.step->plans[p.plan];
    const AttentionItem* items = reinterpret_cast<const AttentionItem*>(words(p.step, plan.items));
    u32 groups = p.num_heads / 16;
    for (u32 unit = blockIdx.x; unit < plan.num_items * groups; unit += gridDim.x) {
        const AttentionItem item = items[unit / groups];
        const u32* pages = words(p.step, p.step->pages) + item.pages_start;
        for (u32 i = blockIdx.y; i < item.num_queries; i += gridDim.y) attend(p, s, item, pages, i, unit % groups * 16);
    }
}
