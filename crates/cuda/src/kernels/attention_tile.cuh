// What the two tensor-core attention kernels share, for one head size and type of cache: HEAD_DIM, IS_F16 (what is multiplied,
// else bf16) and IS_FP8 (what is stored, else the same) are defined by the caller. Scores and running maxima are kept in units of log2, so that a weight is one multiply-add and one exp2.
//
// The queries that share a kv head are packed into rows: row r of an item is query r / group, head r % group. A warp owns 16
// rows; a lane holds two of them, lane / 4 and 8 more, as mma.m16n8k16 wants it.

// attention_wide takes the place of attention_many.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && HEAD_DIM <= 128 && !IS_FP8
#define IS_WIDE 1
#else
#define IS_WIDE 0
#endif

#define CHUNKS (HEAD_DIM / 8) // 16-byte chunks of a row
#define ROW_BYTES (HEAD_DIM * 2)
#define RAW_BYTES (IS_FP8 ? HEAD_DIM : ROW_BYTES) // of a row as the cache stores it
#define RAW_CHUNKS (RAW_BYTES / 16)
#define LOG2E 1.44269504f

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Where chunk `c` of row `r` lies in a tile: the low three bits are mixed with the row, so that ldmatrix has no conflicts.
__device__ __forceinline__ u32 swizzle(u32 r, u32 c) { return r * ROW_BYTES + ((c ^ (r & 7)) << 4); }

// The same for rows as they are stored; those of 64 bytes lie two by two in what one access can take.
__device__ __forceinline__ u32 swizzle_raw(u32 r, u32 c) {
    u32 mix = RAW_CHUNKS < 8 ? r >> 1 & 3 : r & 7;
    return r * RAW_BYTES + ((c ^ mix) << 4);
}

// Bytes that are not there are zero, never what the memory holds.
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

// Two values of a query as they multiply with the cache.
__device__ __forceinline__ u32 convert_query(u32 raw) {
#if IS_F16
    return pack(low_bf16(raw), high_bf16(raw));
#else
    return raw;
#endif
}

// Offsets from the first key of an item: those that any of some rows sees, and those that all of them see.
struct Seen {
    u32 begin, end, all_begin, all_end;
};

__device__ __forceinline__ Seen sees_range(const AttentionParams& p, const AttentionItem& item, u32 position) {
    u32 first = p.window && position + 1 > p.window ? position + 1 - p.window : 0;
    u32 begin = first > item.kv_start ? first - item.kv_start : 0;
    u32 end = min(position >= item.kv_start ? position - item.kv_start + 1 : 0, item.kv_len);
    return {begin, end, begin, end};
}

// Over the queries of lanes that have one (`is_row`), the same for the whole warp.
__device__ __forceinline__ Seen join_lanes(const Seen& own, bool is_row) {
    return {__reduce_min_sync(NONE, is_row ? own.begin : NONE), __reduce_max_sync(NONE, is_row ? own.end : 0),
            __reduce_max_sync(NONE, is_row ? own.begin : 0), __reduce_min_sync(NONE, is_row ? own.end : NONE)};
}

// `apply_softcap` with fewer instructions, of which there is one set for each score.
__device__ __forceinline__ float soften_fast(float x, float cap) {
    return cap > 0.0f ? cap - __fdividef(2.0f * cap, 1.0f + exp2_approx(2.0f * LOG2E * __fdividef(x, cap))) : x;
}

// Bends and masks the products of queries and keys from `offset` on and finds the new maximum of both rows. What the scores
// are still to be multiplied with.
template <int TILES>
__device__ __forceinline__ float rank(
    const AttentionParams& p, const AttentionItem& item, float (&scores)[TILES][4], const u32 (&position)[2],
    const float (&slope)[2], const float (&max)[2], u32 offset, u32 end, bool is_masked, float (&highest)[2]) {
    float factor = p.scale * LOG2E;
    if (p.softcap > 0.0f || p.slopes) {
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 key = item.kv_start + offset + n * 8 + threadIdx.x % 4 * 2 + j % 2;
                float score = soften_fast(scores[n][j] * p.scale, p.softcap);
                scores[n][j] = score - slope[j / 2] * (float)((int)position[j / 2] - (int)key);
            }
        factor = LOG2E;
    }
    if (is_masked) {
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 at = offset + n * 8 + threadIdx.x % 4 * 2 + j % 2;
                if (at >= end || !sees(position[j / 2], item.kv_start + at, p.window)) scores[n][j] = NEG_INF;
            }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most = NEG_INF;
#pragma unroll
        for (int n = 0; n < TILES; n++) most = fmaxf(most, fmaxf(scores[n][2 * h], scores[n][2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(NONE, most, 1));
        most = fmaxf(most, __shfl_xor_sync(NONE, most, 2));
        highest[h] = fmaxf(max[h], most * factor);
    }
    return factor;
}

// The running softmax of a lane's two rows.
struct Rows {
    u32 position[2];
    float slope[2];
    float max[2], total[2];
    float sums[HEAD_DIM / 8][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
        max[0] = max[1] = NEG_INF;
        total[0] = total[1] = 0.0f;
    }

    // The products of queries and keys from `offset` on become weights; the sums so far shrink to the new maximum.
    template <int TILES>
    __device__ __forceinline__ void weigh(
        const AttentionParams& p, const AttentionItem& item, float (&scores)[TILES][4], u32 offset, u32 end, bool is_masked) {
        float highest[2];
        float factor = rank<TILES>(p, item, scores, position, slope, max, offset, end, is_masked, highest);
        // After the first tiles the maximum seldom moves.
        if (__any_sync(NONE, highest[0] > max[0] || highest[1] > max[1])) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float old = highest[h] == NEG_INF ? 1.0f : exp2_approx(max[h] - highest[h]);
                max[h] = highest[h];
                total[h] *= old;
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 8; i++) {
                    sums[i][2 * h] *= old;
                    sums[i][2 * h + 1] *= old;
                }
            }
        }
        // A row that has seen nothing yet must not compute infinity minus infinity.
        float base[2] = {max[0] == NEG_INF ? 0.0f : max[0], max[1] == NEG_INF ? 0.0f : max[1]};
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                scores[n][j] = exp2_approx(fmaf(scores[n][j], factor, -base[j / 2]));
                total[j / 2] += scores[n][j];
            }
    }

    // Adds the values at `values` (16 rows for each two tiles of weights).
    template <int TILES>
    __device__ __forceinline__ void add(const float (&weights)[TILES][4], u32 values) {
        u32 lane = threadIdx.x % 32;
#pragma unroll
        for (u32 k = 0; k < TILES / 2; k++) {
            const u32 a[4] = {pack(weights[2 * k][0], weights[2 * k][1]), pack(weights[2 * k][2], weights[2 * k][3]),
                              pack(weights[2 * k + 1][0], weights[2 * k + 1][1]),
                              pack(weights[2 * k + 1][2], weights[2 * k + 1][3])};
#pragma unroll
            for (u32 d = 0; d < HEAD_DIM / 16; d++) {
                u32 b[4];
                load_matrices_transposed(b, values + swizzle(k * 16 + lane % 16, 2 * d + lane / 16));
                multiply_add(sums[2 * d], a, b[0], b[1]);
                multiply_add(sums[2 * d + 1], a, b[2], b[3]);
            }
        }
    }

    // The totals of a row are spread over four lanes until here.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            total[h] += __shfl_xor_sync(NONE, total[h], 1);
            total[h] += __shfl_xor_sync(NONE, total[h], 2);
        }
    }
};

// The items of a launch.
struct Items {
    const AttentionItem* first;
    u32 count;
};

__device__ __forceinline__ Items items_of(const AttentionParams& p, const PlanHeader& plan) {
    const AttentionItem* items = reinterpret_cast<const AttentionItem*>(words(p.step, plan.items));
    if (p.is_shared) return {items, plan.num_shared};
    return {items + plan.num_shared, plan.num_items - plan.num_shared};
}

// What a packed row of an item is multiplied with when it is stored.
__device__ __forceinline__ float row_factor(
    const AttentionParams& p, const AttentionItem& item, u32 kv_head, u32 packed, float max, float total) {
#if HEAD_DIM <= 128 // `ops.rs` refuses sinks with larger heads
    u32 group = p.num_heads / p.num_kv_heads;
    total = with_sink(p, kv_head * group + packed % group, item.partial == NONE, max, total);
#endif
    return total > 0.0f ? 1.0f / total : 0.0f;
}

// Two neighbouring values of a packed row of an item: to the output, or to the item's partial slot.
__device__ __forceinline__ void store_pair(
    const AttentionParams& p, const AttentionItem& item, u32 kv_head, u32 packed, u32 d, float low, float high) {
    u32 group = p.num_heads / p.num_kv_heads;
    u32 query = packed / group, head = kv_head * group + packed % group;
    if (item.partial == NONE) {
        u64 at = ((u64)(item.query_start + query) * p.num_heads + head) * HEAD_DIM + d;
        *reinterpret_cast<u32*>(p.output + at) = pack_bf16(low, high);
    } else {
        u64 slot = ((u64)item.partial + query) * p.num_heads + head;
        *reinterpret_cast<float2*>(p.partials + slot * HEAD_DIM + d) = make_float2(low, high);
    }
}

__device__ __forceinline__ void store_lse(
    const AttentionParams& p, const AttentionItem& item, u32 kv_head, u32 packed, float max, float total) {
    if (item.partial == NONE) return;
    u32 group = p.num_heads / p.num_kv_heads;
    u64 slot = ((u64)item.partial + packed / group) * p.num_heads + kv_head * group + packed % group;
    p.partial_lse[slot] = total > 0.0f ? max / LOG2E + logf(total) : NEG_INF;
}

__device__ __forceinline__ float load_uncached(const float* p) {
    float value;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(p));
    return value;
}

// The partials of a query: a warp's lanes hold the slots of the first 32.
struct Joined {
    AttentionMerge merge;
    const u32* slots;
    u32 slot;
};

__device__ __forceinline__ Joined find_merge(const AttentionParams& p, const PlanHeader& plan, u32 slot) {
    Joined found;
    u32 number = words(p.step, plan.slot_merges)[slot];
    found.merge = reinterpret_cast<const AttentionMerge*>(words(p.step, plan.merges))[number];
    found.slots = words(p.step, plan.merge_slots) + found.merge.first;
    found.slot = 0;
    return found;
}

// The same, and the slots.
__device__ __forceinline__ Joined find_partials(const AttentionParams& p, const PlanHeader& plan, u32 slot) {
    Joined found = find_merge(p, plan, slot);
    found.slot = found.slots[min(threadIdx.x % 32, found.merge.count - 1)];
    return found;
}

// One warp joins all partials of a query and head, four at a time, so that one wait is enough for four.
__device__ __forceinline__ void merge_head(const AttentionParams& p, const Joined& joined, u32 head) {
    u32 lane = threadIdx.x % 32, count = joined.merge.count;
    float max = NEG_INF, total = 0.0f, sum[HEAD_DIM / 32] = {};
    for (u32 first = 0; first < count; first += 4) {
        float lse[4], part[4][HEAD_DIM / 32], highest = max;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 at = min(first + i, count - 1);
            u64 slot = (u64)(first < 32 ? __shfl_sync(NONE, joined.slot, at) : joined.slots[at]) * p.num_heads + head;
            lse[i] = load_uncached(p.partial_lse + slot);
            if (first + i >= count) lse[i] = NEG_INF;
#pragma unroll
            for (u32 j = 0; j < HEAD_DIM / 32; j++) part[i][j] = load_uncached(p.partials + slot * HEAD_DIM + lane + 32 * j);
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) highest = fmaxf(highest, lse[i]);
        float old = max == NEG_INF ? 0.0f : exp2_approx(LOG2E * (max - highest));
        max = highest;
        total *= old;
#pragma unroll
        for (u32 j = 0; j < HEAD_DIM / 32; j++) sum[j] *= old;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float weight = lse[i] == NEG_INF ? 0.0f : exp2_approx(LOG2E * (lse[i] - max));
            total += weight;
#pragma unroll
            for (u32 j = 0; j < HEAD_DIM / 32; j++) sum[j] += weight * part[i][j];
        }
    }
    total = with_sink(p, head, true, LOG2E * max, total);
    float factor = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
    for (u32 j = 0; j < HEAD_DIM / 32; j++)
        p.output[((u64)joined.merge.query * p.num_heads + head) * HEAD_DIM + lane + 32 * j] = float_to_bf16(sum[j] * factor);
}

template <int THREADS, int FIRST>
__device__ __forceinline__ void meet() {
    if (FIRST == 0) __syncthreads();
    else asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// Called by a whole block that has stored the partials of an item of one sequence and kv head. Whoever brings a query's last
// partial merges them with those of shared items, which are there before, so that no other kernel has to. Where not the whole
// block does, its `THREADS` from `FIRST` on do.
template <int THREADS, int FIRST = 0>
__device__ __forceinline__ void arrive(
    const AttentionParams& p, const PlanHeader& plan, const AttentionItem& item, u32 kv_head, u8* is_last) {
    if (item.partial == NONE) return;
    u32 thread = threadIdx.x - FIRST, group = p.num_heads / p.num_kv_heads;
    for (u32 first = 0; first < item.num_queries; first += THREADS) {
        u32 count = min(item.num_queries - first, (u32)THREADS);
        // All that does not depend on the others, before it is known who is last.
        u32 number = 0, expected = 0, pair = thread / 32;
        if (thread < count) {
            number = words(p.step, plan.slot_merges)[item.partial + first + thread];
            expected = reinterpret_cast<const AttentionMerge*>(words(p.step, plan.merges))[number].num_own;
        }
        Joined joined;
        if (pair < count * group) joined = find_partials(p, plan, item.partial + first + pair / group);
        meet<THREADS, FIRST>();
        if (thread < count) {
            // After what the whole block stored, and before what it reads now.
            u32* arrived = p.arrivals + (u64)number * p.num_kv_heads + kv_head;
            u32 before;
            asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
            bool last = before + 1 == expected;
            if (last) *arrived = 0;
            is_last[thread] = last;
        }
        meet<THREADS, FIRST>();
        for (bool is_first = true; pair < count * group; pair += THREADS / 32, is_first = false) {
            if (!is_last[pair / group]) continue;
            if (!is_first) joined = find_partials(p, plan, item.partial + first + pair / group);
            merge_head(p, joined, kv_head * group + pair % group);
        }
        meet<THREADS, FIRST>();
    }
}
