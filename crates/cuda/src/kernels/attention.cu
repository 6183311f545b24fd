// Attention on tensor cores (mma.sync) for one head size and a 16-bit cache: HEAD_DIM and IS_F16 are defined by the caller.
//
// A unit of work is an item and a kv head; a persistent grid strides over the units of the uploaded plan, so that one
// captured launch fits any batch. The queries that share a kv head are packed into rows: row r of an item is query
// r / group, head r % group. A block of four warps takes its rows either side by side (many rows: each warp 16 of 64, all
// warps over the same keys) or on top of each other (few rows: all warps the same 16, each a quarter of the keys, joined at
// the end). Keys and values come through a ring of STAGES tiles of cp.async gathers, one barrier a tile.

#define KEYS 64                          // keys of a tile
#define CHUNKS (HEAD_DIM / 8)            // 16-byte chunks of a row
#define ROW_BYTES (HEAD_DIM * 2)
#define TILE_BYTES (KEYS * ROW_BYTES)
#define STAGES (HEAD_DIM > 128 ? 2 : 3)
#define COPIES (KEYS * CHUNKS / 128)      // of keys, and as many of values, a thread and tile

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Where chunk `c` of row `r` lies in a tile: the low three bits are mixed with the row, so that ldmatrix has no conflicts.
__device__ __forceinline__ u32 swizzle(u32 r, u32 c) { return r * ROW_BYTES + ((c ^ (r & 7)) << 4); }

__device__ __forceinline__ void copy_16(u32 to, const void* from, bool is_there) {
    u32 bytes = is_there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
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

// The queries of a tile as they multiply with the cache.
__device__ __forceinline__ uint4 convert_query(uint4 raw) {
#if IS_F16
    float v[8];
    unpack_bf16(raw, v);
    return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
#else
    return raw;
#endif
}

// One stage: keys `first..first + KEYS` of the item; those from `end` on are zero, never what the memory holds. A stage
// that would lie behind `end` is an empty group, so that groups can be counted.
__device__ __forceinline__ void load_stage(
    const AttentionParams& p, const u32* pages, u32 kv_head, u32 first, u32 end, u32 keys_to) {
    const u16* cache = reinterpret_cast<const u16*>(p.cache);
    u64 values_after = ((u64)p.num_kv_heads << p.block_shift) * HEAD_DIM;
    u32 chunk = threadIdx.x % CHUNKS;
    if (first < end) {
        // Page numbers first, several at a time, so that their latencies overlap.
        constexpr u32 BATCH = COPIES < 8 ? COPIES : 8;
#pragma unroll
        for (u32 batch = 0; batch < COPIES; batch += BATCH) {
            u64 at[BATCH];
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                u32 offset = min(first + threadIdx.x / CHUNKS + (batch + i) * (128 / CHUNKS), end - 1);
                at[i] = cache_row(p, pages, offset, kv_head) + chunk * 8;
            }
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                u32 row = threadIdx.x / CHUNKS + (batch + i) * (128 / CHUNKS);
                u32 to = keys_to + swizzle(row, chunk);
                copy_16(to, cache + at[i], first + row < end);
                copy_16(to + TILE_BYTES, cache + at[i] + values_after, first + row < end);
            }
        }
    }
    asm volatile("cp.async.commit_group;");
}

__device__ __forceinline__ void see_range(
    const AttentionParams& p, const AttentionItem& item, u32 position, u32& low, u32& high) {
    u32 first = p.window && position + 1 > p.window ? position + 1 - p.window : 0;
    low = first > item.kv_start ? first - item.kv_start : 0;
    high = position >= item.kv_start ? position - item.kv_start + 1 : 0;
}

// ROW_WARPS warps side by side over rows, KEY_WARPS over keys; together four.
template <int ROW_WARPS, int KEY_WARPS>
__device__ __forceinline__ void attend(
    const AttentionParams& p, const AttentionItem& item, u32 kv_head, u32 first_row, u8* shared, u32* range) {
    constexpr u32 ROWS = ROW_WARPS * 16;
    constexpr u32 WARP_KEYS = KEYS / KEY_WARPS;
    constexpr u32 SCORE_TILES = WARP_KEYS / 8;
    u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    u32 row_warp = warp % ROW_WARPS, key_warp = warp / ROW_WARPS;
    u32 group = p.num_heads / p.num_kv_heads;
    u32 num_rows = item.num_queries * group;
    const u32* positions = words(p.step, p.step->positions);
    u32 queries = shared_address(shared);
    u32 stages = queries + ROWS * ROW_BYTES;

    const u32* pages = words(p.step, p.step->pages) + item.pages_start;

    // Which keys any row of this tile sees: offsets from the start of the item. A lone query needs no vote.
    u32 low, high;
    if (item.num_queries == 1) {
        see_range(p, item, positions[item.query_start], low, high);
    } else {
        if (thread == 0) { range[0] = NONE; range[1] = 0; }
        __syncthreads();
        if (thread < ROWS && first_row + thread < num_rows) {
            see_range(p, item, positions[item.query_start + (first_row + thread) / group], low, high);
            atomicMin(&range[0], low);
            atomicMax(&range[1], high);
        }
        __syncthreads();
        low = range[0];
        high = range[1];
    }
    u32 begin = low / KEYS * KEYS, end = min(high, item.kv_len);
#pragma unroll
    for (u32 s = 0; s < STAGES - 1; s++)
        load_stage(p, pages, kv_head, begin + s * KEYS, end, stages + s * 2 * TILE_BYTES);
    for (u32 i = thread; i < ROWS * CHUNKS; i += 128) {
        u32 row = i / CHUNKS, chunk = i % CHUNKS, packed = first_row + row;
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (packed < num_rows) {
            u64 query = item.query_start + packed / group, head = kv_head * group + packed % group;
            raw = convert_query(reinterpret_cast<const uint4*>(p.query + (query * p.num_heads + head) * HEAD_DIM)[chunk]);
        }
        *reinterpret_cast<uint4*>(shared + swizzle(row, chunk)) = raw;
    }

    // This lane's two rows.
    u32 positions_of[2];
    float slopes_of[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 packed = min(first_row + row_warp * 16 + lane / 4 + 8 * h, num_rows - 1);
        positions_of[h] = positions[item.query_start + packed / group];
        slopes_of[h] = p.slopes ? p.slopes[kv_head * group + packed % group] : 0.0f;
    }
    float sums[HEAD_DIM / 8][4];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
    float max[2] = {NEG_INF, NEG_INF}, total[2] = {0.0f, 0.0f};

    u32 stage = 0;
    for (u32 tile = begin; tile < end; tile += KEYS) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
        // Also: everybody is done with the stage that is loaded next, and the queries are there.
        __syncthreads();
        u32 next = (stage + STAGES - 1) % STAGES;
        load_stage(p, pages, kv_head, tile + (STAGES - 1) * KEYS, end, stages + next * 2 * TILE_BYTES);
        u32 keys = stages + stage * 2 * TILE_BYTES, values = keys + TILE_BYTES;

        float scores[SCORE_TILES][4];
#pragma unroll
        for (int i = 0; i < SCORE_TILES; i++) scores[i][0] = scores[i][1] = scores[i][2] = scores[i][3] = 0.0f;
#pragma unroll
        for (u32 k = 0; k < HEAD_DIM / 16; k++) {
            u32 a[4];
            load_matrices(a, queries + swizzle(row_warp * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
            for (u32 n = 0; n < SCORE_TILES / 2; n++) {
                u32 b[4];
                u32 key = key_warp * WARP_KEYS + n * 16 + lane / 16 * 8 + lane % 8;
                load_matrices(b, keys + swizzle(key, 2 * k + lane / 8 % 2));
                multiply_add(scores[2 * n], a, b[0], b[1]);
                multiply_add(scores[2 * n + 1], a, b[2], b[3]);
            }
        }

        // Bend, mask, and keep the running maximum and sum of each row.
        float highest[2] = {max[0], max[1]};
#pragma unroll
        for (u32 n = 0; n < SCORE_TILES; n++)
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 h = j / 2;
                u32 offset = tile + key_warp * WARP_KEYS + n * 8 + lane % 4 * 2 + j % 2;
                u32 key = item.kv_start + offset;
                float score = scores[n][j] * p.scale;
                if (p.softcap > 0.0f) score = soften(score, p.softcap);
                if (p.slopes) score -= slopes_of[h] * (float)((int)positions_of[h] - (int)key);
                bool is_seen = offset < end && sees(positions_of[h], key, p.window);
                scores[n][j] = is_seen ? score : NEG_INF;
                highest[h] = fmaxf(highest[h], scores[n][j]);
            }
        float base[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            highest[h] = fmaxf(highest[h], __shfl_xor_sync(NONE, highest[h], 1));
            highest[h] = fmaxf(highest[h], __shfl_xor_sync(NONE, highest[h], 2));
            // A row that has seen nothing yet must not compute infinity minus infinity.
            base[h] = highest[h] == NEG_INF ? 0.0f : highest[h] * 1.44269504f;
            float old = exp2_approx(max[h] * 1.44269504f - base[h]);
            max[h] = highest[h];
            total[h] *= old;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; i++) {
                sums[i][2 * h] *= old;
                sums[i][2 * h + 1] *= old;
            }
        }
#pragma unroll
        for (u32 n = 0; n < SCORE_TILES; n++)
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                scores[n][j] = exp2_approx(scores[n][j] * 1.44269504f - base[j / 2]);
                total[j / 2] += scores[n][j];
            }

#pragma unroll
        for (u32 k = 0; k < SCORE_TILES / 2; k++) {
            u32 a[4] = {pack(scores[2 * k][0], scores[2 * k][1]), pack(scores[2 * k][2], scores[2 * k][3]),
                        pack(scores[2 * k + 1][0], scores[2 * k + 1][1]), pack(scores[2 * k + 1][2], scores[2 * k + 1][3])};
#pragma unroll
            for (u32 d = 0; d < HEAD_DIM / 16; d++) {
                u32 b[4];
                u32 key = key_warp * WARP_KEYS + k * 16 + lane % 16;
                load_matrices_transposed(b, values + swizzle(key, 2 * d + lane / 16));
                multiply_add(sums[2 * d], a, b[0], b[1]);
                multiply_add(sums[2 * d + 1], a, b[2], b[3]);
            }
        }
        stage = (stage + 1) % STAGES;
    }
    asm volatile("cp.async.wait_group 0;");
#pragma unroll
    for (int h = 0; h < 2; h++) {
        total[h] += __shfl_xor_sync(NONE, total[h], 1);
        total[h] += __shfl_xor_sync(NONE, total[h], 2);
    }

    // Through shared memory to the output: [KEY_WARPS][ROWS][HEAD_DIM] sums, then maxima and totals.
    float* all_sums = reinterpret_cast<float*>(shared);
    float* all_max = all_sums + KEY_WARPS * ROWS * HEAD_DIM;
    float* all_total = all_max + KEY_WARPS * ROWS;
    __syncthreads();
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        u32 row = key_warp * ROWS + row_warp * 16 + lane / 4 + 8 * h;
#pragma unroll
        for (u32 i = 0; i < HEAD_DIM / 8; i++)
            *reinterpret_cast<float2*>(all_sums + row * HEAD_DIM + i * 8 + lane % 4 * 2) =
                make_float2(sums[i][2 * h], sums[i][2 * h + 1]);
        if (lane % 4 == 0) {
            all_max[row] = max[h];
            all_total[row] = total[h];
        }
    }
    __syncthreads();
    for (u32 i = thread; i < ROWS * (HEAD_DIM / 2); i += 128) {
        u32 row = i / (HEAD_DIM / 2), d = i % (HEAD_DIM / 2) * 2, packed = first_row + row;
        if (packed >= num_rows) break;
        float highest = NEG_INF;
#pragma unroll
        for (int w = 0; w < KEY_WARPS; w++) highest = fmaxf(highest, all_max[w * ROWS + row]);
        float sum = 0.0f, low = 0.0f, high = 0.0f;
#pragma unroll
        for (int w = 0; w < KEY_WARPS; w++) {
            float their_max = all_max[w * ROWS + row];
            float weight = their_max == NEG_INF ? 0.0f : exp2_approx((their_max - highest) * 1.44269504f);
            sum += weight * all_total[w * ROWS + row];
            low += weight * all_sums[(w * ROWS + row) * HEAD_DIM + d];
            high += weight * all_sums[(w * ROWS + row) * HEAD_DIM + d + 1];
        }
        float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
        u32 query = packed / group, head = kv_head * group + packed % group;
        if (item.partial == NONE) {
            u64 at = ((u64)(item.query_start + query) * p.num_heads + head) * HEAD_DIM + d;
            *reinterpret_cast<u32*>(p.output + at) = pack_bf16(low * factor, high * factor);
        } else {
            u64 slot = ((u64)item.partial + query) * p.num_heads + head;
            *reinterpret_cast<float2*>(p.partials + slot * HEAD_DIM + d) = make_float2(low * factor, high * factor);
            if (d == 0) p.partial_lse[slot] = sum > 0.0f ? highest + logf(sum) : NEG_INF;
        }
    }
    __syncthreads();
}

// Items of at most 16 packed rows: decodes.
KERNEL __launch_bounds__(128, 2) attention_few(const AttentionParams p) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u32 range[2];
    allow_next();
    wait_for_previous();
    const PlanHeader plan = p.step->plans[p.plan];
    const AttentionItem* items = reinterpret_cast<const AttentionItem*>(words(p.step, plan.items));
    u32 group = p.num_heads / p.num_kv_heads;
    for (u32 unit = blockIdx.x; unit < plan.num_items * p.num_kv_heads; unit += gridDim.x) {
        const AttentionItem item = items[unit / p.num_kv_heads];
        if (item.num_queries * group > 16) continue;
        attend<1, 4>(p, item, unit % p.num_kv_heads, 0, shared, range);
    }
}

// The others: prompt chunks and shared prefixes.
KERNEL __launch_bounds__(128, 2) attention_many(const AttentionParams p) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u32 range[2];
    allow_next();
    wait_for_previous();
    const PlanHeader plan = p.step->plans[p.plan];
    const AttentionItem* items = reinterpret_cast<const AttentionItem*>(words(p.step, plan.items));
    u32 group = p.num_heads / p.num_kv_heads;
    for (u32 unit = blockIdx.x; unit < plan.num_items * p.num_kv_heads; unit += gridDim.x) {
        const AttentionItem item = items[unit / p.num_kv_heads];
        u32 num_rows = item.num_queries * group;
        if (num_rows <= 16) continue;
        // Of the widest heads all warps share the rows, or the scores would not fit the registers.
        constexpr int ROW_WARPS = HEAD_DIM > 128 ? 1 : 4;
        for (u32 row = 0; row < num_rows; row += 16 * ROW_WARPS)
            attend<ROW_WARPS, 4 / ROW_WARPS>(p, item, unit % p.num_kv_heads, row, shared, range);
    }
}
