// Attention over latents of 512 + 64 on tensor cores (mma.m16n8k16): one key for all heads, whose first 512 values are the value as
// well, so that what is read for the scores is not read again. IS_F16 is what the cache holds, else bf16.
//
// A block takes 16 heads of one query and goes over its keys, 32 at a time, in shared memory. Each of its four warps makes a quarter of
// their scores, 16 keys by half of the columns, and then a quarter of the columns of the result, for all keys: the sums of 16 rows by
// 512 columns would not fit the registers of one warp. The next keys come meanwhile, and two blocks share a multiprocessor.

#define DIM 576
#define RANK 512
#define LATENT_ROW (DIM * 2)
#define LATENT_CHUNKS (DIM / 8)
#define LOG2E 1.44269504f
#define LN2 0.69314718f

__device__ __forceinline__ u32 place(u32 row, u32 chunk) { return row * LATENT_ROW + ((chunk ^ (row & 7)) << 4); }

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

// Keys of a step: while one half of the buffer is computed with, the other comes.
#define HALF 32

struct LatentShared {
    __align__(128) u8 keys[2 * HALF * LATENT_ROW];
    u8 query[16 * LATENT_ROW];
    float4 partial[4][2][32]; // sums of each warp: tiles of eight keys, as its lanes have them
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

// Keys `offset..offset + HALF` of an item, into the half that they alternate with; those from `end` on are zero. Eight lanes have 128
// bytes of a row at a time.
__device__ __forceinline__ void load_keys(const AttentionParams& p, LatentShared& s, const u32* pages, u32 offset, u32 end) {
    u32 first = offset / HALF % 2 * HALF + threadIdx.x / 8, own = threadIdx.x / 8, part = threadIdx.x % 8;
    u32 to = (u32)__cvta_generic_to_shared(s.keys);
    // Page numbers first, so that their latencies overlap.
    const u8* from[HALF / 16];
#pragma unroll
    for (u32 i = 0; i < HALF / 16; i++) from[i] = p.cache + 2 * (cache_row(p, pages, min(offset + own + 16 * i, end - 1), 0) + part * 8);
#pragma unroll
    for (u32 i = 0; i < HALF / 16; i++)
#pragma unroll
        for (u32 block = 0; block < DIM / 64; block++)
            copy_16(to + place(first + 16 * i, block * 8 + part), from[i] + block * 128, offset + own + 16 * i < end);
}

// The products of the 16 rows with 16 of the keys over half of the columns: the part of a warp.
__device__ __forceinline__ void score(LatentShared& s, u32 half, float (&scores)[2][4]) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = warp / 2 * (DIM / 32);
    u32 query = (u32)__cvta_generic_to_shared(s.query), keys = (u32)__cvta_generic_to_shared(s.keys);
    u32 key = half * HALF + warp % 2 * 16 + lane / 16 * 8 + lane % 8;
    float odd[2][4] = {};
#pragma unroll
    for (u32 i = 0; i < DIM / 32; i += 2) {
        u32 a[4], b[4], c[4], d[4], k = first + i;
        load_matrices(a, query + place(lane % 16, 2 * k + lane / 16));
        load_matrices(b, keys + place(key, 2 * k + lane / 8 % 2));
        load_matrices(c, query + place(lane % 16, 2 * k + 2 + lane / 16));
        load_matrices(d, keys + place(key, 2 * k + 2 + lane / 8 % 2));
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

// What a query sees of an item.
struct SeenKeys {
    u32 begin, end;
    u32 old_end; // keys from here on are written by this step
};

__device__ __forceinline__ SeenKeys find_range(const AttentionParams& p, const AttentionItem& item, u32 number) {
    u32 position = words(p.step, p.step->positions)[item.query_start + number];
    u32 first = p.window && position + 1 > p.window ? position + 1 - p.window : 0;
    SeenKeys range;
    range.begin = first > item.kv_start ? first - item.kv_start : 0;
    range.end = min(position >= item.kv_start ? position - item.kv_start + 1 : 0, item.kv_len);
    range.old_end = p.is_decode && item.num_queries == 1 && position >= item.kv_start ? position - item.kv_start : 0;
    return range;
}

// The first keys that a query needs.
__device__ __forceinline__ u32 first_keys(const SeenKeys& range) { return range.begin / HALF * HALF; }

// One query of an item and the heads from `head` on. `is_fed`: its first keys were asked for.
__device__ __forceinline__ void attend(const AttentionParams& p, LatentShared& s, const AttentionItem& item, const u32* pages, u32 number,
                                       u32 head, const SeenKeys& range, bool is_fed) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = item.query_start + number;
    u64 query_at = ((u64)row * p.num_heads + head) * DIM;
    float made[16][4] = {}, most[2] = {NEG_INF, NEG_INF}, total[2] = {};
    u32 keys = (u32)__cvta_generic_to_shared(s.keys);
    if (!is_fed && first_keys(range) < range.end) load_keys(p, s, pages, first_keys(range), range.end);
    load_query(p, s, query_at);
    asm volatile("cp.async.commit_group;");
    for (u32 offset = first_keys(range); offset < range.end; offset += HALF) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        // These keys are there, and all warps are done with those before.
        __syncthreads();
        if (offset + HALF < range.end) load_keys(p, s, pages, offset + HALF, range.end);
        asm volatile("cp.async.commit_group;");
        u32 half = offset / HALF % 2;
        float own[2][4] = {}, scores[4][4], highest[2] = {NEG_INF, NEG_INF};
        score(s, half, own);
#pragma unroll
        for (int n = 0; n < 2; n++) s.partial[warp][n][lane] = make_float4(own[n][0], own[n][1], own[n][2], own[n][3]);
        __syncthreads();
        // Every warp weighs all keys: their weights are operands where they are made.
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float4 x = s.partial[n / 2][n % 2][lane], y = s.partial[2 + n / 2][n % 2][lane];
            const float sums[4] = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 key = offset + n * 8 + lane % 4 * 2 + j % 2;
                float value = p.softcap > 0.0f ? apply_softcap(sums[j] * p.scale, p.softcap) : sums[j] * p.scale;
                scores[n][j] = key >= range.begin && key < range.end ? value * LOG2E : NEG_INF;
                highest[j / 2] = fmaxf(highest[j / 2], scores[n][j]);
            }
        }
        float factor[2], base[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            highest[h] = fmaxf(highest[h], __shfl_xor_sync(NONE, highest[h], 1));
            highest[h] = fmaxf(highest[h], __shfl_xor_sync(NONE, highest[h], 2));
            float higher = fmaxf(highest[h], most[h]);
            base[h] = higher == NEG_INF ? 0.0f : higher;
            factor[h] = exp2_approx(most[h] - base[h]);
            most[h] = higher;
            total[h] *= factor[h];
        }
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                scores[n][j] = exp2_approx(scores[n][j] - base[j / 2]);
                total[j / 2] += scores[n][j];
            }
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) made[n][j] *= factor[j / 2];
#pragma unroll
        for (u32 k = 0; k < HALF / 16; k++) {
            const u32 a[4] = {pack(scores[2 * k][0], scores[2 * k][1]), pack(scores[2 * k][2], scores[2 * k][3]),
                              pack(scores[2 * k + 1][0], scores[2 * k + 1][1]), pack(scores[2 * k + 1][2], scores[2 * k + 1][3])};
#pragma unroll
            for (u32 n = 0; n < 16; n += 2) {
                u32 b[4];
                load_matrices_transposed(b, keys + place(half * HALF + k * 16 + lane % 16, warp * 16 + n + lane / 16));
                multiply_add(made[n], a, b[0], b[1]);
                multiply_add(made[n + 1], a, b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        total[half] += __shfl_xor_sync(NONE, total[half], 1);
        total[half] += __shfl_xor_sync(NONE, total[half], 2);
        u32 r = half * 8 + lane / 4;
        float sum = total[half], factor = sum > 0.0f ? 1.0f / sum : 0.0f;
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
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
}

// Queries of an item are spread over the second dimension of the grid. In a recorded step of decodes the first keys, which are old, are
// asked for before the kernel that writes the newest ones is done.
KERNEL __launch_bounds__(128, 2) attention_latent(const AttentionParams p) {
    extern __shared__ __align__(128) u8 shared[];
    LatentShared& s = *reinterpret_cast<LatentShared*>(shared);
    allow_next();
    const PlanHeader plan = p.step->plans[p.plan];
    const AttentionItem* items = reinterpret_cast<const AttentionItem*>(words(p.step, plan.items));
    u32 groups = p.num_heads / 16, num_units = plan.num_items * groups;
    bool is_fed = false;
    if (blockIdx.x < num_units) {
        const AttentionItem item = items[blockIdx.x / groups];
        SeenKeys range = find_range(p, item, 0);
        is_fed = blockIdx.y == 0 && first_keys(range) + HALF <= range.old_end && first_keys(range) < range.end;
        if (is_fed) load_keys(p, s, words(p.step, p.step->pages) + item.pages_start, first_keys(range), range.end);
    }
    wait_for_previous();
    for (u32 unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
        const AttentionItem item = items[unit / groups];
        const u32* pages = words(p.step, p.step->pages) + item.pages_start;
        for (u32 i = blockIdx.y; i < item.num_queries; i += gridDim.y, is_fed = false)
            attend(p, s, item, pages, i, unit % groups * 16, find_range(p, item, i), is_fed);
        is_fed = false;
    }
}

// Joins the partial results of a query and head: a block each, four columns a thread and four results at a time. (What all results have
// beyond RANK is zero.)
KERNEL __launch_bounds__(128) merge_latents(const AttentionParams p) {
    allow_next();
    const PlanHeader& plan = p.step->plans[p.plan];
    const AttentionMerge* merges = reinterpret_cast<const AttentionMerge*>(words(p.step, plan.merges));
    u32 units = plan.num_merges * p.num_heads, column = threadIdx.x * 4;
    wait_for_previous();
    for (u32 unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const AttentionMerge merge = merges[unit / p.num_heads];
        u32 head = unit % p.num_heads;
        const u32* slots = words(p.step, plan.merge_slots) + merge.first;
        float most = NEG_INF, total = 0.0f, sum[4] = {};
        for (u32 first = 0; first < merge.count; first += 4) {
            float lse[4], highest = most;
            float4 part[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u64 slot = (u64)slots[min(first + i, merge.count - 1)] * p.num_heads + head;
                lse[i] = first + i < merge.count ? __ldcg(p.partial_lse + slot) * LOG2E : NEG_INF;
                part[i] = __ldcg(reinterpret_cast<const float4*>(p.partials + slot * DIM + column));
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++) highest = fmaxf(highest, lse[i]);
            float old = most == NEG_INF ? 0.0f : exp2_approx(most - highest);
            most = highest;
            total *= old;
#pragma unroll
            for (u32 j = 0; j < 4; j++) sum[j] *= old;
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                float weight = lse[i] == NEG_INF ? 0.0f : exp2_approx(lse[i] - most);
                total += weight;
                sum[0] = fmaf(weight, part[i].x, sum[0]);
                sum[1] = fmaf(weight, part[i].y, sum[1]);
                sum[2] = fmaf(weight, part[i].z, sum[2]);
                sum[3] = fmaf(weight, part[i].w, sum[3]);
            }
        }
        float factor = total > 0.0f ? 1.0f / total : 0.0f;
        real* output = p.output + ((u64)merge.query * p.num_heads + head) * DIM;
        *reinterpret_cast<uint2*>(output + column) = make_uint2(pack_bf16(sum[0] * factor, sum[1] * factor), pack_bf16(sum[2] * factor, sum[3] * factor));
        if (threadIdx.x < (DIM - RANK) / 4) *reinterpret_cast<uint2*>(output + RANK + column) = make_uint2(0, 0);
    }
}
