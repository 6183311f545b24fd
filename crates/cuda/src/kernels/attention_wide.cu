// Items of more than 16 packed rows where there is wgmma (sm_90a) and heads are of 64 or 128: prompt chunks; and all shared items.
// The same work as attention_many, with the copies in a warpgroup of their own.
//
// A block has 128 threads that bring queries, keys and values into shared memory and two warpgroups of 64 rows each that
// multiply. They meet only at barriers in shared memory, so that the next unit's first keys are there before the last one
// is finished. Whole tiles come by bulk copies, a page at a time, which one warp asks for; the last tile of a unit, if it is
// not whole, is gathered by all, because what is not there must be zero. A warpgroup asks for the scores of the next tile before it adds the values of this one, and weighs those scores
// while the tensor cores are busy with the values.
//
// Keys and values lie in shared memory as wgmma wants them: blocks of 64 dimensions, rows of 128 bytes, chunks mixed with the row.

#if IS_WIDE

#define WIDE_KEYS 64 // of a tile
#define WIDE_TILE_BYTES (WIDE_KEYS * ROW_BYTES)
#define WIDE_ROWS 128
#define WIDE_STAGES (512 / HEAD_DIM)
#define WIDE_QUERY_BYTES (WIDE_ROWS * ROW_BYTES)

struct WideParams {
    TensorMap cache; // this layer as a matrix of rows; boxes of a page's rows, at most a tile's
    AttentionParams attention;
};

// Barriers, by number: a stage is full, a stage is empty, a buffer of queries is empty.
#define FULL 0
#define EMPTY WIDE_STAGES
#define QUERIES (2 * WIDE_STAGES)

// Where a block is in the plan: from the last item to the first, because the later ones of a prompt see more keys, and there
// and back over the blocks, so that none gets the longest of every round.
struct Walk {
    u32 round, row, num_rows, kv_head;
    AttentionItem item;
};

__device__ __forceinline__ bool walk_on(const AttentionParams& p, const PlanHeader& plan, Walk& walk) {
    walk.row += WIDE_ROWS;
    if (walk.row < walk.num_rows) return true;
    const Items items = items_of(p, plan);
    u32 num_units = items.count * p.num_kv_heads;
    while (walk.round * gridDim.x < num_units) {
        u32 place = walk.round * gridDim.x + (walk.round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        walk.round++;
        if (place >= num_units) continue;
        u32 unit = num_units - 1 - place;
        walk.item = items.first[unit / p.num_kv_heads];
        walk.num_rows = walk.item.num_queries * (p.num_heads / p.num_kv_heads);
        if (walk.num_rows <= 16 && !p.is_shared) continue;
        walk.kv_head = unit % p.num_kv_heads;
        walk.row = 0;
        return true;
    }
    return false;
}

// Which keys `count` rows from `first` on see; nothing where there are no such rows. The same for the whole warp.
__device__ __forceinline__ Seen rows_see(const AttentionParams& p, const Walk& walk, u32 first, u32 count) {
    u32 group = p.num_heads / p.num_kv_heads;
    u32 end = min(first + count, walk.num_rows);
    Seen seen = {NONE, 0, 0, NONE};
    if (first < end) {
        const u32* positions = words(p.step, p.step->positions) + walk.item.query_start;
        for (u32 query = first / group + threadIdx.x % 32; query <= (end - 1) / group; query += 32) {
            Seen own = sees_range(p, walk.item, positions[query]);
            seen = {min(seen.begin, own.begin), max(seen.end, own.end), max(seen.all_begin, own.begin),
                    min(seen.all_end, own.end)};
        }
    }
    return {__reduce_min_sync(NONE, seen.begin), __reduce_max_sync(NONE, seen.end), __reduce_max_sync(NONE, seen.all_begin),
            __reduce_min_sync(NONE, seen.all_end)};
}

__device__ __forceinline__ u32 wide_tile_at(u32 row, u32 chunk) {
    return chunk / 8 * (WIDE_KEYS * 128) + row * 128 + ((chunk % 8 ^ row % 8) << 4);
}

// ---- The copying warpgroup.

__device__ __forceinline__ void feed_queries(const AttentionParams& p, const Walk& walk, u32 to) {
    u32 group = p.num_heads / p.num_kv_heads, chunk = threadIdx.x % CHUNKS;
    for (u32 row = threadIdx.x / CHUNKS; row < WIDE_ROWS; row += 128 / CHUNKS) {
        u32 packed = min(walk.row + row, walk.num_rows - 1);
        u64 query = walk.item.query_start + packed / group, head = walk.kv_head * group + packed % group;
        copy_16(to + swizzle(row, chunk), p.query + (query * p.num_heads + head) * HEAD_DIM + chunk * 8, walk.row + row < walk.num_rows);
    }
}

__device__ __forceinline__ void feed_tile(const AttentionParams& p, const Walk& walk, u32 first, u32 end, u32 to) {
    const u16* cache = reinterpret_cast<const u16*>(p.cache);
    const u32* pages = words(p.step, p.step->pages) + walk.item.pages_start;
    u64 values_after = ((u64)p.num_kv_heads << p.block_shift) * HEAD_DIM;
    u32 chunk = threadIdx.x % CHUNKS;
    // Page numbers first, so that their latencies overlap.
    u64 at[WIDE_KEYS * CHUNKS / 128];
#pragma unroll
    for (u32 i = 0; i < WIDE_KEYS * CHUNKS / 128; i++) {
        u32 offset = min(first + threadIdx.x / CHUNKS + i * (128 / CHUNKS), end - 1);
        at[i] = cache_row(p, pages, offset, walk.kv_head) + chunk * 8;
    }
#pragma unroll
    for (u32 i = 0; i < WIDE_KEYS * CHUNKS / 128; i++) {
        u32 row = threadIdx.x / CHUNKS + i * (128 / CHUNKS), place = to + wide_tile_at(row, chunk);
        copy_16(place, cache + at[i], first + row < end);
        copy_16(place + WIDE_TILE_BYTES, cache + at[i] + values_after, first + row < end);
    }
}

// The same for a tile whose keys are all there, by one warp: each box is 64 dimensions of the rows of a page.
__device__ __forceinline__ void feed_whole_tile(const WideParams& w, const Walk& walk, u32 first, u32 to, u32 barrier) {
    const AttentionParams& p = w.attention;
    const u32* pages = words(p.step, p.step->pages) + walk.item.pages_start;
    u32 rows = min(1u << p.block_shift, WIDE_KEYS);
    constexpr u32 PARTS = HEAD_DIM / 64; // of a row
    for (u32 box = threadIdx.x; box < WIDE_KEYS / rows * 2 * PARTS; box += 32) {
        u32 part = box % PARTS, plane = box / PARTS % 2, key = box / PARTS / 2 * rows, offset = first + key;
        u32 page = pages[offset >> p.block_shift];
        u32 row = (((page * 2 + plane) * p.num_kv_heads + walk.kv_head) << p.block_shift) + (offset & ((1u << p.block_shift) - 1));
        load_box(to + plane * WIDE_TILE_BYTES + part * (WIDE_KEYS * 128) + key * 128, &w.cache, part * 64, row, barrier);
    }
}

// The first tiles of what is shared, while the kernel before still runs: no step writes keys that it shares. How many there are.
__device__ __forceinline__ u32 feed_early(
    const WideParams& w, const Walk& walk, u32 begin, u32 end, u32 barriers, u32 stages) {
    u32 count = begin < end ? min((end - begin) / WIDE_KEYS, WIDE_STAGES) : 0;
    if (threadIdx.x < 32)
        for (u32 i = 0; i < count; i++)
            feed_whole_tile(w, walk, begin + i * WIDE_KEYS, stages + i * 2 * WIDE_TILE_BYTES, barriers + (FULL + i) * 8);
    return count;
}

__device__ __forceinline__ void feed(const WideParams& w, const PlanHeader& plan, u32 barriers, u32 queries, u32 stages) {
    const AttentionParams& p = w.attention;
    Walk walk = {0, 0, 0, 0, {}};
    u32 count = 0, units = 0, early = 0;
    bool is_first = true;
    while (walk_on(p, plan, walk)) {
        Seen seen = rows_see(p, walk, walk.row, WIDE_ROWS);
        u32 begin = seen.begin / WIDE_KEYS * WIDE_KEYS;
        if (is_first && p.is_shared && p.is_decode) early = feed_early(w, walk, begin, seen.end, barriers, stages);
        if (is_first) wait_for_previous();
        is_first = false;
        if (begin >= seen.end) continue;
        wait_barrier(barriers + (QUERIES + units % 2) * 8, units / 2 % 2 ^ 1);
        feed_queries(p, walk, queries + units % 2 * WIDE_QUERY_BYTES);
        units++;
        for (u32 tile = begin; tile < seen.end; tile += WIDE_KEYS, count++) {
            u32 full = barriers + (FULL + count % WIDE_STAGES) * 8, to = stages + count % WIDE_STAGES * 2 * WIDE_TILE_BYTES;
            bool is_whole = tile + WIDE_KEYS <= seen.end;
            wait_barrier(barriers + (EMPTY + count % WIDE_STAGES) * 8, count / WIDE_STAGES % 2 ^ 1);
            if (!is_whole) feed_tile(p, walk, tile, seen.end, to);
            else if (threadIdx.x < 32 && count >= early) feed_whole_tile(w, walk, tile, to, full);
            // The queries, with the first tile, or the tile itself.
            asm volatile("cp.async.wait_all;" ::: "memory");
            if (!is_whole) fence_async();
            if (is_whole && threadIdx.x == 0) expect_bytes(full, 2 * WIDE_TILE_BYTES);
            else arrive(full);
        }
    }
    // A launch must not end before the one before it.
    if (is_first) wait_for_previous();
}

// ---- The multiplying warpgroups.

__device__ __forceinline__ u64 describe(u32 address) { return describe_matrix(address, WIDE_KEYS * 128); }

#if IS_F16
#define WGMMA_TYPES "f32.f16.f16"
#else
#define WGMMA_TYPES "f32.bf16.bf16"
#endif

// c (64 x 64) = or += a (64 x 16, in registers) times 64 keys of 16 dimensions.
__device__ __forceinline__ void multiply_keys(float (&c)[8][4], const u32 (&a)[4], u64 b, u32 adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16." WGMMA_TYPES " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;\n}"
        : THIRTY_TWO(c, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds)
        : "memory");
}

// c (64 x HEAD_DIM) += a (64 x 16) times 16 values, whose dimensions are the columns: transposed on the way.
__device__ __forceinline__ void multiply_values(float (&c)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16." WGMMA_TYPES " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
        : THIRTY_TWO(c, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
        : "memory");
}
__device__ __forceinline__ void multiply_values(float (&c)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16." WGMMA_TYPES " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"
        "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
        : THIRTY_TWO(c, 0), THIRTY_TWO(c, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
        : "memory");
}

__device__ __forceinline__ void ask_scores(float (&scores)[8][4], const u32 (&queries)[HEAD_DIM / 16][4], u32 keys) {
#pragma unroll
    for (u32 k = 0; k < HEAD_DIM / 16; k++)
        multiply_keys(scores, queries[k], describe(keys + k / 4 * (WIDE_KEYS * 128) + k % 4 * 32), k > 0);
    commit_products();
}

__device__ __forceinline__ void ask_sums(float (&sums)[HEAD_DIM / 8][4], const u32 (&weights)[4][4], u32 values) {
#pragma unroll
    for (u32 k = 0; k < 4; k++) multiply_values(sums, weights[k], describe(values + k * 2048));
    commit_products();
}

// The running softmax of a lane's two rows, in units of log2.
struct Softmax {
    u32 position[2];
    float slope[2], max[2], total[2];
    float shrink[2]; // what sums so far are to be multiplied with

    // Products of queries and keys become weights. True if sums must shrink.
    __device__ __forceinline__ bool weigh(
        const AttentionParams& p, const AttentionItem& item, float (&scores)[8][4], u32 offset, u32 end, bool is_masked) {
        float highest[2];
        float factor = rank<8>(p, item, scores, position, slope, max, offset, end, is_masked, highest);
        bool moves = __any_sync(NONE, highest[0] > max[0] || highest[1] > max[1]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            shrink[h] = highest[h] == NEG_INF ? 1.0f : exp2_approx(max[h] - highest[h]);
            max[h] = highest[h];
            total[h] *= shrink[h];
            // A row that has seen nothing yet must not compute infinity minus infinity.
            float base = max[h] == NEG_INF ? 0.0f : max[h];
#pragma unroll
            for (int n = 0; n < 8; n++) {
                scores[n][2 * h] = exp2_approx(fmaf(scores[n][2 * h], factor, -base));
                scores[n][2 * h + 1] = exp2_approx(fmaf(scores[n][2 * h + 1], factor, -base));
                total[h] += scores[n][2 * h] + scores[n][2 * h + 1];
            }
        }
        return moves;
    }
};

__device__ __forceinline__ void pack_weights(u32 (&weights)[4][4], const float (&scores)[8][4]) {
#pragma unroll
    for (u32 k = 0; k < 4; k++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) weights[k][j] = pack(scores[2 * k + j / 2][j % 2 * 2], scores[2 * k + j / 2][j % 2 * 2 + 1]);
}

// The keys of a unit that `own` rows see, tiles `begin..end`, for one warpgroup. `count` numbers the tiles of the block.
__device__ __forceinline__ void attend_wide(
    const AttentionParams& p, const Walk& walk, const Seen& own, u32 begin, u32 end, u32& count, u32 barriers, u32 stages,
    const u32 (&queries)[HEAD_DIM / 16][4], Softmax& softmax, float (&sums)[HEAD_DIM / 8][4]) {
    bool leads = threadIdx.x % 32 == 0;
    auto keys_of = [&](u32 tile) { return stages + tile % WIDE_STAGES * 2 * WIDE_TILE_BYTES; };
    auto await = [&](u32 tile) { wait_barrier(barriers + (FULL + tile % WIDE_STAGES) * 8, tile / WIDE_STAGES % 2); };
    auto release = [&](u32 tile) {
        __syncwarp();
        if (leads) arrive(barriers + (EMPTY + tile % WIDE_STAGES) * 8);
    };
    auto is_masked = [&](u32 tile) { return tile < own.all_begin || tile + WIDE_KEYS > own.all_end; };
    u32 tile = begin;
    for (; tile < end && (tile + WIDE_KEYS <= own.begin || tile >= own.end); tile += WIDE_KEYS, count++) {
        await(count);
        release(count);
    }
    if (tile >= end) return;
    float scores[8][4];
    u32 weights[4][4];
    await(count);
    begin_products();
    ask_scores(scores, queries, keys_of(count));
    wait_products<0>(scores);
    softmax.weigh(p, walk.item, scores, tile, end, is_masked(tile));
    pack_weights(weights, scores);
    for (tile += WIDE_KEYS, count++; tile < end && tile < own.end; tile += WIDE_KEYS, count++) {
        await(count);
        begin_products();
        ask_scores(scores, queries, keys_of(count));
        ask_sums(sums, weights, keys_of(count - 1) + WIDE_TILE_BYTES);
        wait_products<1>(scores);
        bool moves = softmax.weigh(p, walk.item, scores, tile, end, is_masked(tile));
        wait_products<0>(sums);
        release(count - 1);
        if (moves) {
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sums[i][j] *= softmax.shrink[j / 2];
        }
        pack_weights(weights, scores);
    }
    begin_products();
    ask_sums(sums, weights, keys_of(count - 1) + WIDE_TILE_BYTES);
    wait_products<0>(sums);
    release(count - 1);
    for (; tile < end; tile += WIDE_KEYS, count++) {
        await(count);
        release(count);
    }
}

__device__ __forceinline__ void store_rows(
    const AttentionParams& p, const Walk& walk, u32 first, Softmax& softmax, const float (&sums)[HEAD_DIM / 8][4]) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        float total = softmax.total[h];
        total += __shfl_xor_sync(NONE, total, 1);
        total += __shfl_xor_sync(NONE, total, 2);
        u32 packed = first + lane / 4 + 8 * h;
        if (packed >= walk.num_rows) continue;
        float factor = row_factor(p, walk.item, walk.kv_head, packed, softmax.max[h], total);
#pragma unroll
        for (u32 i = 0; i < HEAD_DIM / 8; i++)
            store_pair(p, walk.item, walk.kv_head, packed, i * 8 + lane % 4 * 2, sums[i][2 * h] * factor, sums[i][2 * h + 1] * factor);
        if (lane % 4 == 0) store_lse(p, walk.item, walk.kv_head, packed, softmax.max[h], total);
    }
}

__device__ __forceinline__ void multiply_units(
    const AttentionParams& p, const PlanHeader& plan, u32 barriers, u32 queries_at, u32 stages, u8* is_last) {
    Walk walk = {0, 0, 0, 0, {}};
    u32 count = 0, units = 0, lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, group = p.num_heads / p.num_kv_heads;
    bool is_first = true;
    while (walk_on(p, plan, walk)) {
        Seen seen = rows_see(p, walk, walk.row, WIDE_ROWS);
        Seen own = rows_see(p, walk, walk.row + warp / 4 * 64, 64);
        u32 begin = seen.begin / WIDE_KEYS * WIDE_KEYS;
        const u32* positions = words(p.step, p.step->positions) + walk.item.query_start;
        Softmax softmax;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 packed = min(walk.row + warp * 16 + lane / 4 + 8 * h, walk.num_rows - 1);
            softmax.position[h] = positions[packed / group];
            softmax.slope[h] = p.slopes ? p.slopes[walk.kv_head * group + packed % group] : 0.0f;
            softmax.max[h] = NEG_INF;
            softmax.total[h] = 0.0f;
        }
        // Results are stored where kernels before may still read.
        if (is_first) wait_for_previous();
        is_first = false;
        float sums[HEAD_DIM / 8][4];
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
        if (begin < seen.end) {
            // The queries came with the first tile.
            wait_barrier(barriers + (FULL + count % WIDE_STAGES) * 8, count / WIDE_STAGES % 2);
            u32 queries[HEAD_DIM / 16][4];
            u32 from = queries_at + units % 2 * WIDE_QUERY_BYTES + warp * 16 * ROW_BYTES;
#pragma unroll
            for (u32 k = 0; k < HEAD_DIM / 16; k++) {
                load_matrices(queries[k], from + swizzle(lane % 16, 2 * k + lane / 16));
#pragma unroll
                for (int j = 0; j < 4; j++) queries[k][j] = convert_query(queries[k][j]);
            }
            arrive(barriers + (QUERIES + units % 2) * 8);
            units++;
            attend_wide(p, walk, own, begin, seen.end, count, barriers, stages, queries, softmax, sums);
        }
        store_rows(p, walk, walk.row + warp * 16, softmax, sums);
        if (!p.is_shared && walk.row + WIDE_ROWS >= walk.num_rows) arrive<256, 128>(p, plan, walk.item, walk.kv_head, is_last);
    }
}

KERNEL __launch_bounds__(384, 1) attention_wide(const __grid_constant__ WideParams w) {
    const AttentionParams& p = w.attention;
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ __align__(8) u64 barrier_words[2 * WIDE_STAGES + 2];
    __shared__ u8 is_last[256];
    u32 barriers = shared_address(barrier_words), queries = shared_address(shared), stages = queries + 2 * WIDE_QUERY_BYTES;
    allow_next();
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < WIDE_STAGES; i++) {
            init_barrier(barriers + (FULL + i) * 8, 128);
            init_barrier(barriers + (EMPTY + i) * 8, 8);
        }
        for (u32 i = 0; i < 2; i++) init_barrier(barriers + (QUERIES + i) * 8, 256);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const PlanHeader plan = p.step->plans[p.plan];
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        feed(w, plan, barriers, queries, stages);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        multiply_units(p, plan, barriers, queries, stages, is_last);
    }
}
#endif
