// Items of at most 16 packed rows: decodes. A unit of work is an item and a kv head; a persistent grid strides over the units
// of the uploaded plan, so that one captured launch fits any batch.
//
// All four warps of a block hold the same rows; warp w takes keys w * 16 .. + 16 of every 64 through a ring of its own and
// needs no other warp until the unit ends. Where units are many and short (`is_narrow`), a warp has units of its own instead and
// never waits for another. The ring runs on into the next unit, so that the memory never waits for the end of one. In a step of decodes the first keys are asked for before the kernel that writes the newest ones is done.
//
// What a sequence shares with others was read by the launch before: the block that has a query's own keys merges both.

#define FEW_STAGES ((HEAD_DIM > 128 ? 2 : (IS_SMALL ? 256 : 384) / HEAD_DIM) * (IS_FP8 ? 2 : 1))
#define FEW_STAGE_BYTES (2 * 16 * RAW_BYTES) // of one warp: 16 keys, 16 values
#define FEW_LANE_ROWS (32 / RAW_CHUNKS)      // rows that a warp copies at once

// What a warp loads next.
struct Feed {
    u32 unit, offset, end, kv_head;
    u32 old_end; // keys from here on are written by this step
    const u32* pages;
    u32 page[2]; // of the first and the second eight keys
};

struct FewPlan {
    PlanHeader header;
    const AttentionItem* items;
    const u32* positions;
    const u32* pages;
    u32 num_units, group;
    // Of this warp: units are so far apart, keys begin there and go on by so many.
    u32 stride, first_key, key_step;
};

__device__ __forceinline__ Seen sees_few(const AttentionParams& p, const FewPlan& plan, const AttentionItem& item) {
    u32 query = min(threadIdx.x % 32, item.num_queries - 1);
    Seen own = sees_range(p, item, plan.positions[item.query_start + query]);
    return item.num_queries == 1 ? own : join_lanes(own, true);
}

// What a block works on.
struct Unit {
    u32 number, kv_head, num_rows;
    AttentionItem item;
    Seen seen;
    // What the item's results are merged with where nobody else has a part of them: partials of shared items.
    bool merges;
    Joined joined;
    // Of a lane's two rows; null where there is none.
    const bf16* queries[2];
    u32 position[2];
    float slope[2];
};

// Goes to the first unit from `unit.number` on that is of this kernel. Reads nothing that the kernel before writes.
__device__ __forceinline__ void open_work(const AttentionParams& p, const FewPlan& plan, Unit& unit) {
    for (; unit.number < plan.num_units; unit.number += plan.stride) {
        unit.item = plan.items[unit.number / p.num_kv_heads];
        unit.kv_head = unit.number % p.num_kv_heads;
        unit.num_rows = unit.item.num_queries * plan.group;
        if (unit.num_rows > 16) continue;
        unit.seen = sees_few(p, plan, unit.item);
        unit.merges = false;
        if (unit.item.partial != NONE) {
            unit.joined = find_partials(p, plan.header, unit.item.partial);
            unit.merges = unit.joined.merge.num_own == 1;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 packed = threadIdx.x % 32 / 4 + 8 * h, own = min(packed, unit.num_rows - 1);
            u64 query = unit.item.query_start + own / plan.group;
            u32 head = unit.kv_head * plan.group + own % plan.group;
            unit.queries[h] = packed < unit.num_rows ? p.query + (query * p.num_heads + head) * HEAD_DIM : nullptr;
            unit.position[h] = plan.positions[query];
            unit.slope[h] = p.slopes ? p.slopes[head] : 0.0f;
        }
        return;
    }
}

__device__ __forceinline__ void find_pages(const AttentionParams& p, Feed& feed) {
    feed.page[0] = feed.pages[feed.offset >> p.block_shift];
    feed.page[1] = feed.pages[min(feed.offset + 8, feed.end - 1) >> p.block_shift];
}

// Goes to the first unit from `feed.unit` on that has keys for this warp.
__device__ __forceinline__ void open_unit(const AttentionParams& p, const FewPlan& plan, Feed& feed) {
    for (; feed.unit < plan.num_units; feed.unit += plan.stride) {
        const AttentionItem item = plan.items[feed.unit / p.num_kv_heads];
        if (item.num_queries * plan.group > 16) continue;
        Seen seen = sees_few(p, plan, item);
        feed.offset = (seen.begin & ~15u) + plan.first_key;
        feed.end = seen.end;
        if (feed.offset >= feed.end) continue;
        u32 new_start = item.kv_start + p.is_decode - 1, position = plan.positions[item.query_start];
        feed.old_end = position > new_start ? position - new_start : 0;
        feed.kv_head = feed.unit % p.num_kv_heads;
        feed.pages = plan.pages + item.pages_start;
        find_pages(p, feed);
        return;
    }
}

// Asks for the next 16 keys and values. With nothing left the group is empty, so that groups can be counted.
__device__ __forceinline__ void feed_stage(const AttentionParams& p, const FewPlan& plan, Feed& feed, u32 stage) {
    if (feed.unit < plan.num_units) {
        u64 values_after = ((u64)p.num_kv_heads << p.block_shift) * RAW_BYTES;
        u32 lane = threadIdx.x % 32, chunk = lane % RAW_CHUNKS, in_block = (1u << p.block_shift) - 1;
        u64 starts[2];
#pragma unroll
        for (int half = 0; half < 2; half++)
            starts[half] = ((u64)feed.page[half] * 2 * p.num_kv_heads + feed.kv_head) << p.block_shift;
#pragma unroll
        for (u32 i = 0; i < 16 / FEW_LANE_ROWS; i++) {
            u32 row = lane / RAW_CHUNKS + i * FEW_LANE_ROWS;
            u64 start = i * FEW_LANE_ROWS < 8 ? starts[0] : starts[1];
            const u8* from = p.cache + (start + ((feed.offset + row) & in_block)) * RAW_BYTES + chunk * 16;
            bool is_there = feed.offset + row < feed.end;
            copy_16(stage + swizzle_raw(row, chunk), from, is_there);
            copy_16(stage + 16 * RAW_BYTES + swizzle_raw(row, chunk), from + values_after, is_there);
        }
        feed.offset += plan.key_step;
        if (feed.offset < feed.end) {
            find_pages(p, feed);
        } else {
            feed.unit += plan.stride;
            open_unit(p, plan, feed);
        }
    }
    asm volatile("cp.async.commit_group;");
}

// Rows lane / 4 and 8 more of a tile of queries, 16 dimensions from 16 * k on, in the order of a key's.
__device__ __forceinline__ void load_query(u32 (&a)[4], const bf16* (&rows)[2], u32 k) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const bf16* row = rows[j % 2];
        u32 at = IS_FP8 ? threadIdx.x % 4 * 4 + j / 2 * 2 : threadIdx.x % 4 * 2 + j / 2 * 8;
        a[j] = row ? convert_query(*reinterpret_cast<const u32*>(row + k * 16 + at)) : 0;
    }
}

// Joins what the four warps found and stores it: eight rows at a time through `region`, [4][8][HEAD_DIM].
__device__ __forceinline__ void join_warps(
    const AttentionParams& p, const AttentionItem& item, u32 kv_head, u32 num_rows, Rows& rows, float* region,
    float (*maxima)[16], float (*totals)[16]) {
    u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    if (lane % 4 == 0) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            maxima[warp][lane / 4 + 8 * h] = rows.max[h];
            totals[warp][lane / 4 + 8 * h] = rows.total[h];
        }
    }
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        if (h * 8 >= num_rows) break;
        if (h > 0) __syncthreads();
        // Groups of eight columns are mixed with the row against bank conflicts.
        float* own = region + (warp * 8 + lane / 4) * HEAD_DIM;
#if IS_FP8
        // A lane has four columns of each sixteen, even ones and odd ones in turn.
#pragma unroll
        for (u32 i = 0; i < HEAD_DIM / 8; i += 2)
            *reinterpret_cast<float4*>(own + ((i + lane % 4 / 2) ^ (lane / 4)) * 8 + lane % 2 * 4) = make_float4(
                rows.sums[i][2 * h], rows.sums[i + 1][2 * h], rows.sums[i][2 * h + 1], rows.sums[i + 1][2 * h + 1]);
#else
#pragma unroll
        for (u32 i = 0; i < HEAD_DIM / 8; i++)
            *reinterpret_cast<float2*>(own + (i ^ (lane / 4)) * 8 + lane % 4 * 2) =
                make_float2(rows.sums[i][2 * h], rows.sums[i][2 * h + 1]);
#endif
        __syncthreads();
        for (u32 i = thread; i < 8 * (HEAD_DIM / 2); i += 128) {
            u32 row = i / (HEAD_DIM / 2), d = i % (HEAD_DIM / 2) * 2, packed = h * 8 + row;
            if (packed >= num_rows) break;
            float highest = NEG_INF;
#pragma unroll
            for (int w = 0; w < 4; w++) highest = fmaxf(highest, maxima[w][packed]);
            float total = 0.0f, low = 0.0f, high = 0.0f;
#pragma unroll
            for (int w = 0; w < 4; w++) {
                float weight = maxima[w][packed] == NEG_INF ? 0.0f : exp2_approx(maxima[w][packed] - highest);
                const float* at = region + (w * 8 + row) * HEAD_DIM + (d / 8 ^ row) * 8 + d % 8;
                total += weight * totals[w][packed];
                low += weight * at[0];
                high += weight * at[1];
            }
            float factor = row_factor(p, item, kv_head, packed, highest, total);
            store_pair(p, item, kv_head, packed, d, low * factor, high * factor);
            if (d == 0) store_lse(p, item, kv_head, packed, highest, total);
        }
    }
    __syncthreads();
}

// Two neighbouring columns of a lane's rows, of pair `i` of HEAD_DIM / 8.
#if IS_FP8
// A lane has four columns of each sixteen, even ones and odd ones in turn: pairs 2 * c and 2 * c + 1 are neighbours.
__device__ __forceinline__ u32 column_of(u32 i) { return i / 2 * 16 + threadIdx.x % 4 * 4 + i % 2 * 2; }
#define LOW_OF(sums, i, h) sums[i & ~1u][2 * h + i % 2]
#define HIGH_OF(sums, i, h) sums[i | 1u][2 * h + i % 2]
#else
__device__ __forceinline__ u32 column_of(u32 i) { return i * 8 + threadIdx.x % 4 * 2; }
#define LOW_OF(sums, i, h) sums[i][2 * h]
#define HIGH_OF(sums, i, h) sums[i][2 * h + 1]
#endif

#define MERGE_AHEAD (HEAD_DIM > 128 ? 1 : HEAD_DIM > 64 ? 2 : 4) // partials whose latencies overlap

// Adds what shared items found to the rows of a warp: of the partials those of its `share`, of `shares` together. All lanes.
__device__ __forceinline__ void merge_shared(
    const AttentionParams& p, const FewPlan& plan, const Unit& unit, u32 share, u32 shares, Rows& rows) {
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        if (h * 8 >= unit.num_rows) break;
        u32 own = min(h * 8 + threadIdx.x % 32 / 4, unit.num_rows - 1), head = unit.kv_head * plan.group + own % plan.group;
        Joined joined = unit.joined;
        bool is_one = unit.item.num_queries == 1;
        if (!is_one) joined = find_merge(p, plan.header, unit.item.partial + own / plan.group);
        u32 count = joined.merge.count - 1; // the last one is our own
        for (u32 first = share; first < count; first += MERGE_AHEAD * shares) {
            float weight[MERGE_AHEAD], highest = rows.max[h];
            const float* parts[MERGE_AHEAD];
#pragma unroll
            for (u32 j = 0; j < MERGE_AHEAD; j++) {
                u32 at = min(first + j * shares, count - 1);
                u32 known = __shfl_sync(NONE, joined.slot, at % 32);
                u64 slot = (u64)(is_one && at < 32 ? known : joined.slots[at]) * p.num_heads + head;
                weight[j] = load_uncached(p.partial_lse + slot) * LOG2E;
                if (first + j * shares >= count) weight[j] = NEG_INF;
                parts[j] = p.partials + slot * HEAD_DIM;
                highest = fmaxf(highest, weight[j]);
            }
            float old = rows.max[h] == NEG_INF ? 0.0f : exp2_approx(rows.max[h] - highest);
            rows.max[h] = highest;
            rows.total[h] *= old;
#pragma unroll
            for (u32 j = 0; j < MERGE_AHEAD; j++) {
                weight[j] = weight[j] == NEG_INF ? 0.0f : exp2_approx(weight[j] - highest);
                rows.total[h] += weight[j];
            }
#pragma unroll
            for (u32 i = 0; i < HEAD_DIM / 8; i++) {
                float& low = LOW_OF(rows.sums, i, h);
                float& high = HIGH_OF(rows.sums, i, h);
                low *= old;
                high *= old;
#pragma unroll
                for (u32 j = 0; j < MERGE_AHEAD; j++) {
                    float2 part = __ldcg(reinterpret_cast<const float2*>(parts[j] + column_of(i)));
                    low += weight[j] * part.x;
                    high += weight[j] * part.y;
                }
            }
        }
    }
}

// Stores what a warp found that has the unit for itself.
__device__ __forceinline__ void store_unit(
    const AttentionParams& p, const AttentionItem& item, u32 kv_head, u32 num_rows, const Rows& rows) {
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        u32 packed = h * 8 + threadIdx.x % 32 / 4;
        if (packed >= num_rows) continue;
        float factor = row_factor(p, item, kv_head, packed, rows.max[h], rows.total[h]);
#pragma unroll
        for (u32 i = 0; i < HEAD_DIM / 8; i++)
            store_pair(p, item, kv_head, packed, column_of(i), LOW_OF(rows.sums, i, h) * factor,
                       HIGH_OF(rows.sums, i, h) * factor);
    }
}

KERNEL __launch_bounds__(128, HEAD_DIM > 128 ? 1 : 2) attention_few(const AttentionParams p) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ float maxima[4][16], totals[4][16];
    __shared__ u8 is_last[128];
    allow_next();
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 ring = shared_address(shared) + warp * FEW_STAGES * FEW_STAGE_BYTES;
    float* region = reinterpret_cast<float*>(shared + 4 * FEW_STAGES * FEW_STAGE_BYTES);
    const PlanHeader header = p.step->plans[p.plan];
    const Items items = items_of(p, header);
    const FewPlan plan = {header, items.first, words(p.step, p.step->positions), words(p.step, p.step->pages),
                          items.count * p.num_kv_heads, p.num_heads / p.num_kv_heads,
                          gridDim.x * (header.is_narrow ? 4 : 1), header.is_narrow ? 0 : warp * 16, header.is_narrow ? 16u : 64u};
    // The first block waits in any case, so that the launch does not end before the one before it.
    if (blockIdx.x > 0 && blockIdx.x >= plan.num_units) return;
    u32 first_unit = header.is_narrow ? warp * gridDim.x + blockIdx.x : blockIdx.x;
    Feed feed;
    feed.unit = first_unit;
    open_unit(p, plan, feed);
    u32 fed = 0;
    if (p.is_decode)
        for (; fed < FEW_STAGES - 1 && feed.unit < plan.num_units && feed.offset + 16 <= feed.old_end; fed++)
            feed_stage(p, plan, feed, ring + fed * FEW_STAGE_BYTES);
    Unit unit;
    unit.number = first_unit;
    open_work(p, plan, unit);
    wait_for_previous();
    for (; fed < FEW_STAGES - 1; fed++) feed_stage(p, plan, feed, ring + fed * FEW_STAGE_BYTES);

    u32 stage = 0;
    while (unit.number < plan.num_units) {
        const AttentionItem item = unit.item;
        const Seen seen = unit.seen;
        Rows rows;
        rows.clear();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            rows.position[h] = unit.position[h];
            rows.slope[h] = unit.slope[h];
        }
#if HEAD_DIM <= 128
        u32 queries[HEAD_DIM / 16][4];
#pragma unroll
        for (u32 k = 0; k < HEAD_DIM / 16; k++) load_query(queries[k], unit.queries, k);
#endif
        for (u32 offset = (seen.begin & ~15u) + plan.first_key; offset < seen.end; offset += plan.key_step) {
            asm volatile("cp.async.wait_group %0;" ::"n"(FEW_STAGES - 2));
            __syncwarp();
            u32 next = stage == 0 ? FEW_STAGES - 1 : stage - 1;
            feed_stage(p, plan, feed, ring + next * FEW_STAGE_BYTES);
            u32 keys = ring + stage * FEW_STAGE_BYTES;
            float scores[2][4] = {};
#if IS_FP8
            u32 both[2][4];
#endif
#pragma unroll
            for (u32 k = 0; k < HEAD_DIM / 16; k++) {
#if IS_FP8
                if (k % 2 == 0) load_keys(both, keys, k);
                const u32(&b)[4] = both[k % 2];
#else
                u32 b[4];
                load_matrices(b, keys + swizzle(lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#endif
#if HEAD_DIM <= 128
                const u32(&a)[4] = queries[k];
#else
                u32 a[4];
                load_query(a, unit.queries, k);
#endif
                multiply_add(scores[0], a, b[0], b[1]);
                multiply_add(scores[1], a, b[2], b[3]);
            }
            bool is_masked = offset < seen.all_begin || offset + 16 > seen.all_end;
            rows.weigh<2>(p, item, scores, offset, seen.end, is_masked);
#if IS_FP8
            add_values(rows.sums, scores, keys + 16 * RAW_BYTES);
#else
            rows.add<2>(scores, keys + 16 * ROW_BYTES);
#endif
            stage = stage + 1 == FEW_STAGES ? 0 : stage + 1;
        }
        rows.finish();
        AttentionItem target = item;
        if (unit.merges) {
            merge_shared(p, plan, unit, header.is_narrow ? 0 : warp, header.is_narrow ? 1 : 4, rows);
            target.partial = NONE;
        }
        if (header.is_narrow) {
            store_unit(p, target, unit.kv_head, unit.num_rows, rows);
        } else {
            join_warps(p, target, unit.kv_head, unit.num_rows, rows, region, maxima, totals);
            arrive<128>(p, header, target, unit.kv_head, is_last);
        }
        unit.number += plan.stride;
        open_work(p, plan, unit);
    }
    asm volatile("cp.async.wait_group 0;");
}
