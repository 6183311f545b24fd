// Items of at most 16 packed rows: decodes. A unit of work is an item and a kv head; a persistent grid strides over the units
// of the uploaded plan, so that one captured launch fits any batch.
//
// All four warps of a block hold the same rows; warp w takes keys w * 16 .. + 16 of every 64 through a ring of its own and
// needs no other warp until the unit ends. The ring runs on into the next unit, so that the memory never waits for the end of
// one. In a step of decodes the first keys are asked for before the kernel that writes the newest ones is done.
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
    for (; unit.number < plan.num_units; unit.number += gridDim.x) {
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
    for (; feed.unit < plan.num_units; feed.unit += gridDim.x) {
        const AttentionItem item = plan.items[feed.unit / p.num_kv_heads];
        if (item.num_queries * plan.group > 16) continue;
        Seen seen = sees_few(p, plan, item);
        feed.offset = (seen.begin & ~15u) + threadIdx.x / 32 * 16;
        feed.end = seen.end;
        if (feed.offset >= feed.end) continue;
        feed.old_end = item.num_queries == 1 ? plan.positions[item.query_start] - item.kv_start : 0;
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
        feed.offset += 64;
        if (feed.offset < feed.end) {
            find_pages(p, feed);
        } else {
            feed.unit += gridDim.x;
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

// Two columns of a row: sums of values, with the weights' total and the maximum (in units of log2) that they are relative to.
struct Pair {
    float max, total, low, high;
};

// Adds what shared items found, of which the lanes of a warp know the slots. All lanes have the same row.
__device__ __forceinline__ void merge_shared(const AttentionParams& p, const Joined& joined, u32 head, u32 d, Pair& pair) {
    u32 count = joined.merge.count - 1; // the last one is our own
    for (u32 first = 0; first < count; first += 4) {
        float lse[4], highest = pair.max;
        float2 part[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 at = min(first + i, count - 1);
            u64 slot = (u64)(first < 32 ? __shfl_sync(NONE, joined.slot, at) : joined.slots[at]) * p.num_heads + head;
            lse[i] = load_uncached(p.partial_lse + slot) * LOG2E;
            if (first + i >= count) lse[i] = NEG_INF;
            part[i] = __ldcg(reinterpret_cast<const float2*>(p.partials + slot * HEAD_DIM + d));
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) highest = fmaxf(highest, lse[i]);
        float old = pair.max == NEG_INF ? 0.0f : exp2_approx(pair.max - highest);
        pair = {highest, pair.total * old, pair.low * old, pair.high * old};
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float weight = lse[i] == NEG_INF ? 0.0f : exp2_approx(lse[i] - highest);
            pair.total += weight;
            pair.low += weight * part[i].x;
            pair.high += weight * part[i].y;
        }
    }
}

// Joins what the four warps found and stores it: eight rows at a time through `region`, [4][8][HEAD_DIM].
__device__ __forceinline__ void join_warps(
    const AttentionParams& p, const FewPlan& plan, const Unit& unit, Rows& rows, float* region, float (*maxima)[16],
    float (*totals)[16]) {
    u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const AttentionItem& item = unit.item;
    u32 kv_head = unit.kv_head, num_rows = unit.num_rows;
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
            Pair pair = {NEG_INF, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int w = 0; w < 4; w++) pair.max = fmaxf(pair.max, maxima[w][packed]);
#pragma unroll
            for (int w = 0; w < 4; w++) {
                float weight = maxima[w][packed] == NEG_INF ? 0.0f : exp2_approx(maxima[w][packed] - pair.max);
                const float* at = region + (w * 8 + row) * HEAD_DIM + (d / 8 ^ row) * 8 + d % 8;
                pair.total += weight * totals[w][packed];
                pair.low += weight * at[0];
                pair.high += weight * at[1];
            }
            if (unit.merges) {
                Joined joined = unit.joined;
                if (item.num_queries > 1) joined = find_partials(p, plan.header, item.partial + packed / plan.group);
                merge_shared(p, joined, kv_head * plan.group + packed % plan.group, d, pair);
            }
            float factor = pair.total > 0.0f ? 1.0f / pair.total : 0.0f;
            AttentionItem target = item;
            if (unit.merges) target.partial = NONE;
            store_pair(p, target, kv_head, packed, d, pair.low * factor, pair.high * factor);
            if (d == 0) store_lse(p, target, kv_head, packed, pair.max, pair.total);
        }
    }
    __syncthreads();
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
                          items.count * p.num_kv_heads, p.num_heads / p.num_kv_heads};
    // The first block waits in any case, so that the launch does not end before the one before it.
    if (blockIdx.x > 0 && blockIdx.x >= plan.num_units) return;
    Feed feed;
    feed.unit = blockIdx.x;
    open_unit(p, plan, feed);
    u32 fed = 0;
    if (p.is_decode)
        for (; fed < FEW_STAGES - 1 && feed.unit < plan.num_units && feed.offset + 16 <= feed.old_end; fed++)
            feed_stage(p, plan, feed, ring + fed * FEW_STAGE_BYTES);
    Unit unit;
    unit.number = blockIdx.x;
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
        for (u32 offset = (seen.begin & ~15u) + warp * 16; offset < seen.end; offset += 64) {
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
        join_warps(p, plan, unit, rows, region, maxima, totals);
        if (!unit.merges) arrive<128>(p, header, item, unit.kv_head, is_last);
        unit.number += gridDim.x;
        open_work(p, plan, unit);
    }
    asm volatile("cp.async.wait_group 0;");
}
