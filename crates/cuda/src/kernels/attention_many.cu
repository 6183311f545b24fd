// Items of more than 16 packed rows: prompt chunks; and all shared items. A block of eight warps takes 128 rows, 16 a warp, over
// the same keys, which come through a ring of cp.async gathers with one barrier a tile.

#if !IS_WIDE
#define KEYS (HEAD_DIM > 128 ? 16 : HEAD_DIM == 128 ? 64 : 32) // of a tile
#define TILE_BYTES (KEYS * ROW_BYTES)
#define MANY_ROWS 128
#define KEEPS_QUERIES (HEAD_DIM == 128) // in registers, where there is room
#define MANY_STAGES (HEAD_DIM > 128 || IS_SMALL ? 2 : 3)
#define MANY_COPIES (KEYS * CHUNKS / 256) // of keys, and as many of values, a thread and tile
// A tile of e4m3 is converted on its way to where it is multiplied, which can be one place while the next is written or, to save
// room, one for all.
#if IS_FP8
#define MANY_PLACES (HEAD_DIM > 128 ? 1 : 2)
#define MANY_RAW_COPIES (2 * KEYS * RAW_CHUNKS / 256) // keys, then values
#endif
#define MANY_STAGE_BYTES (2 * KEYS * RAW_BYTES)

#if IS_FP8
// What a thread copies and then converts: chunk `i` of its own.
struct RawChunk {
    u32 number, is_value, row, chunk;
    __device__ __forceinline__ explicit RawChunk(u32 i) {
        number = threadIdx.x + i * 256;
        is_value = number / (KEYS * RAW_CHUNKS);
        row = number / RAW_CHUNKS % KEYS;
        chunk = number % RAW_CHUNKS;
    }
};

__device__ __forceinline__ void load_tile(
    const AttentionParams& p, const u32* pages, u32 kv_head, u32 first, u32 end, u32 to) {
    if (first < end) {
        u64 at[MANY_RAW_COPIES];
#pragma unroll
        for (u32 i = 0; i < MANY_RAW_COPIES; i++) {
            RawChunk raw(i);
            u32 plane_head = kv_head + raw.is_value * p.num_kv_heads;
            at[i] = cache_row(p, pages, min(first + raw.row, end - 1), plane_head) + raw.chunk * 16;
        }
#pragma unroll
        for (u32 i = 0; i < MANY_RAW_COPIES; i++) {
            RawChunk raw(i);
            copy_16(to + raw.number * 16, p.cache + at[i], first + raw.row < end);
        }
    }
    asm volatile("cp.async.commit_group;");
}

// A thread converts what it copied itself, so nobody has to be waited for.
__device__ __forceinline__ void convert_tile(u32 from, u32 keys_to) {
#pragma unroll
    for (u32 i = 0; i < MANY_RAW_COPIES; i++) {
        RawChunk raw(i);
        u32 tile = keys_to + raw.is_value * TILE_BYTES;
        const u32 to[2] = {tile + swizzle(raw.row, 2 * raw.chunk), tile + swizzle(raw.row, 2 * raw.chunk + 1)};
        convert_chunk(from + raw.number * 16, to, raw.chunk / 4 % 2 == 1);
    }
}
#else
// One stage: keys `first..first + KEYS` of the item. A stage behind `end` is an empty group, so that groups can be counted.
__device__ __forceinline__ void load_tile(
    const AttentionParams& p, const u32* pages, u32 kv_head, u32 first, u32 end, u32 keys_to) {
    const u16* cache = reinterpret_cast<const u16*>(p.cache);
    u64 values_after = ((u64)p.num_kv_heads << p.block_shift) * HEAD_DIM;
    u32 chunk = threadIdx.x % CHUNKS;
    if (first < end) {
        // Page numbers first, so that their latencies overlap.
        u64 at[MANY_COPIES];
#pragma unroll
        for (u32 i = 0; i < MANY_COPIES; i++) {
            u32 offset = min(first + threadIdx.x / CHUNKS + i * (256 / CHUNKS), end - 1);
            at[i] = cache_row(p, pages, offset, kv_head) + chunk * 8;
        }
#pragma unroll
        for (u32 i = 0; i < MANY_COPIES; i++) {
            u32 row = threadIdx.x / CHUNKS + i * (256 / CHUNKS);
            u32 to = keys_to + swizzle(row, chunk);
            copy_16(to, cache + at[i], first + row < end);
            copy_16(to + TILE_BYTES, cache + at[i] + values_after, first + row < end);
        }
    }
    asm volatile("cp.async.commit_group;");
}
#endif

__device__ __forceinline__ void load_queries(
    const AttentionParams& p, const AttentionItem& item, u32 kv_head, u32 first_row, u32 num_rows, u8* shared) {
    u32 group = p.num_heads / p.num_kv_heads;
    for (u32 i = threadIdx.x; i < MANY_ROWS * CHUNKS; i += 256) {
        u32 row = i / CHUNKS, chunk = i % CHUNKS, packed = first_row + row;
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (packed < num_rows) {
            u64 query = item.query_start + packed / group, head = kv_head * group + packed % group;
            raw = reinterpret_cast<const uint4*>(p.query + (query * p.num_heads + head) * HEAD_DIM)[chunk];
        }
        *reinterpret_cast<uint4*>(shared + swizzle(row, chunk)) = make_uint4(
            convert_query(raw.x), convert_query(raw.y), convert_query(raw.z), convert_query(raw.w));
    }
}

__device__ __forceinline__ void attend(
    const AttentionParams& p, const AttentionItem& item, u32 kv_head, u32 first_row, u8* shared, u32* range) {
    u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    u32 group = p.num_heads / p.num_kv_heads, num_rows = item.num_queries * group;
    const u32* positions = words(p.step, p.step->positions) + item.query_start;
    const u32* pages = words(p.step, p.step->pages) + item.pages_start;
    u32 queries_at = shared_address(shared) + warp * 16 * ROW_BYTES;
    u32 tiles = shared_address(shared) + MANY_ROWS * ROW_BYTES;
#if IS_FP8
    u32 stages = tiles + MANY_PLACES * 2 * TILE_BYTES, place = 0;
#else
    u32 stages = tiles;
#endif

    // Which keys the rows of this warp see, of four warps that multiply together, and of the block.
    u32 own_row = first_row + warp * 16 + lane % 16;
    Seen seen = join_lanes(sees_range(p, item, positions[min(own_row, num_rows - 1) / group]), own_row < num_rows);
    if (thread < 2) { range[2 * thread] = NONE; range[2 * thread + 1] = 0; }
    __syncthreads();
    u32 quarter = warp / 4 * 2;
    if (lane == 0) {
        atomicMin(&range[quarter], seen.begin);
        atomicMax(&range[quarter + 1], seen.end);
    }
    load_queries(p, item, kv_head, first_row, num_rows, shared);
    __syncthreads();
    u32 begin = min(range[0], range[2]) / KEYS * KEYS, end = max(range[1], range[3]);
    u32 own_begin = range[quarter], own_end = range[quarter + 1];
#pragma unroll
    for (u32 s = 0; s < MANY_STAGES - 1; s++)
        load_tile(p, pages, kv_head, begin + s * KEYS, end, stages + s * MANY_STAGE_BYTES);

    Rows rows;
    rows.clear();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 packed = min(first_row + warp * 16 + lane / 4 + 8 * h, num_rows - 1);
        rows.position[h] = positions[packed / group];
        rows.slope[h] = p.slopes ? p.slopes[kv_head * group + packed % group] : 0.0f;
    }
#if KEEPS_QUERIES
    u32 queries[HEAD_DIM / 16][4];
#pragma unroll
    for (u32 k = 0; k < HEAD_DIM / 16; k++) load_matrices(queries[k], queries_at + swizzle(lane % 16, 2 * k + lane / 16));
#endif
    u32 stage = 0;
    for (u32 tile = begin; tile < end; tile += KEYS) {
        asm volatile("cp.async.wait_group %0;" ::"n"(MANY_STAGES - 2) : "memory");
#if IS_FP8
        u32 keys = tiles + place * 2 * TILE_BYTES;
        if (MANY_PLACES == 1) __syncthreads();
        convert_tile(stages + stage * MANY_STAGE_BYTES, keys);
        place = (place + 1) % MANY_PLACES;
#else
        u32 keys = stages + stage * MANY_STAGE_BYTES;
#endif
        // Also: everybody is done with the stage that is loaded next, or with the place that is written next.
        __syncthreads();
        u32 next = stage == 0 ? MANY_STAGES - 1 : stage - 1;
        load_tile(p, pages, kv_head, tile + (MANY_STAGES - 1) * KEYS, end, stages + next * MANY_STAGE_BYTES);
        stage = stage + 1 == MANY_STAGES ? 0 : stage + 1;
        if (tile >= own_end || tile + KEYS <= own_begin) continue;
        float scores[KEYS / 8][4];
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) scores[i][0] = scores[i][1] = scores[i][2] = scores[i][3] = 0.0f;
#pragma unroll
        for (u32 k = 0; k < HEAD_DIM / 16; k++) {
#if KEEPS_QUERIES
            const u32(&a)[4] = queries[k];
#else
            u32 a[4];
            load_matrices(a, queries_at + swizzle(lane % 16, 2 * k + lane / 16));
#endif
#pragma unroll
            for (u32 n = 0; n < KEYS / 16; n++) {
                u32 b[4];
                load_matrices(b, keys + swizzle(n * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
                multiply_add(scores[2 * n], a, b[0], b[1]);
                multiply_add(scores[2 * n + 1], a, b[2], b[3]);
            }
        }
        bool is_masked = tile < seen.all_begin || tile + KEYS > seen.all_end;
        rows.weigh<KEYS / 8>(p, item, scores, tile, end, is_masked);
        rows.add<KEYS / 8>(scores, keys + TILE_BYTES);
    }
    asm volatile("cp.async.wait_group 0;");
    rows.finish();
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        u32 packed = first_row + warp * 16 + lane / 4 + 8 * h;
        if (packed >= num_rows) continue;
        float factor = row_factor(p, item, kv_head, packed, rows.max[h], rows.total[h]);
#pragma unroll
        for (u32 i = 0; i < HEAD_DIM / 8; i++)
            store_pair(p, item, kv_head, packed, i * 8 + lane % 4 * 2, rows.sums[i][2 * h] * factor,
                       rows.sums[i][2 * h + 1] * factor);
        if (lane % 4 == 0) store_lse(p, item, kv_head, packed, rows.max[h], rows.total[h]);
    }
    __syncthreads();
}

// With small heads two blocks fit, where half the registers are enough.
#if HEAD_DIM > 64 || __CUDA_ARCH__ != 900
#define MANY_BLOCKS 1
#else
#define MANY_BLOCKS 2
#endif

KERNEL __launch_bounds__(256, MANY_BLOCKS) attention_many(const AttentionParams p) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ u32 range[4];
    __shared__ u8 is_last[256];
    allow_next();
    const PlanHeader plan = p.step->plans[p.plan];
    const Items items = items_of(p, plan);
    u32 group = p.num_heads / p.num_kv_heads;
    wait_for_previous();
    // From the last item to the first, because the later ones of a prompt see more keys, and there and back over the blocks,
    // so that none gets the longest of every round.
    u32 num_units = items.count * p.num_kv_heads;
    for (u32 round = 0; round * gridDim.x < num_units; round++) {
        u32 place = round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        if (place >= num_units) continue;
        u32 unit = num_units - 1 - place;
        const AttentionItem item = items.first[unit / p.num_kv_heads];
        u32 num_rows = item.num_queries * group;
        if (num_rows <= 16 && !p.is_shared) continue;
        for (u32 row = 0; row < num_rows; row += MANY_ROWS) attend(p, item, unit % p.num_kv_heads, row, shared, range);
        if (!p.is_shared) arrive<256>(p, plan, item, unit % p.num_kv_heads, is_last);
    }
}
#endif
