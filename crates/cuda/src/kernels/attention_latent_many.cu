// The attention of `attention_latent.cu` for items of several queries where there is wgmma (sm_90a): prompts. 16 heads of four queries
// are 64 rows, which read each key once.
//
// A warpgroup brings queries and tiles of 64 keys into shared memory. Two multiply: each makes the scores of half of a tile's keys, and
// then, with the weights of all of them, half of the columns of the result, because no warpgroup could hold 64 rows by 512 columns.
// The scores of the next tile are asked for together with the sums of this one, so that the tensor cores have work while they wait.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define KEYS 64 // of a tile

#define MANY_QUERIES 4
#define MANY_ROWS 64
#define BLOCK_BYTES (64 * 128) // 64 rows by 64 columns
#define TILE_BYTES (DIM / 64 * BLOCK_BYTES)

struct LatentManyParams {
    AttentionParams attention;
    u32 tiles_of_item; // of four queries, at most
};

struct LatentManyShared {
    float most[2][MANY_ROWS], sums[2][MANY_ROWS];
    u64 full[2], empty[2], query_full, query_empty;
};

// The keys that rows of some queries see, counted from the first key of their item.
struct LatentRange {
    u32 begin, end;
};

__device__ __forceinline__ LatentRange latent_range(const AttentionParams& p, const AttentionItem& item, u32 number) {
    u32 position = words(p.step, p.step->positions)[item.query_start + number];
    u32 first = p.window && position + 1 > p.window ? position + 1 - p.window : 0;
    return {first > item.kv_start ? first - item.kv_start : 0, min(position >= item.kv_start ? position - item.kv_start + 1 : 0, item.kv_len)};
}

// 64 rows of an item and the tiles of keys that they see. Later ones, which see most, come first.
struct LatentWalk {
    u32 next, count, group, groups, first, num_queries, begin, end;
    AttentionItem item;

    __device__ __forceinline__ bool go_on(const LatentManyParams& m, const AttentionItem* items) {
        for (; next < count; next += gridDim.x) {
            u32 unit = count - 1 - next;
            group = unit % groups;
            item = items[unit / groups / m.tiles_of_item];
            first = unit / groups % m.tiles_of_item * MANY_QUERIES;
            if (first >= item.num_queries) continue;
            num_queries = min(item.num_queries - first, MANY_QUERIES);
            begin = NONE, end = 0;
            for (u32 i = 0; i < num_queries; i++) {
                LatentRange own = latent_range(m.attention, item, first + i);
                begin = min(begin, own.begin), end = max(end, own.end);
            }
            begin = begin / KEYS * KEYS;
            next += gridDim.x;
            return true;
        }
        return false;
    }
};

__device__ __forceinline__ LatentWalk start_walk(const LatentManyParams& m, const PlanHeader& plan) {
    LatentWalk walk;
    walk.groups = m.attention.num_heads / 16;
    walk.next = blockIdx.x, walk.count = plan.num_items * m.tiles_of_item * walk.groups;
    return walk;
}

// ---- The copying warpgroup: eight lanes have 128 bytes of a row at a time.

__device__ __forceinline__ void feed_latents(const LatentManyParams& m, const PlanHeader& plan, LatentManyShared& s, u32 query, u32 tiles) {
    const AttentionParams& p = m.attention;
    const AttentionItem* items = reinterpret_cast<const AttentionItem*>(words(p.step, plan.items));
    u32 own = threadIdx.x / 8, part = threadIdx.x % 8, units = 0, number = 0;
    u32 full = (u32)__cvta_generic_to_shared(s.full), empty = (u32)__cvta_generic_to_shared(s.empty);
    auto place = [&](u32 base, u32 row, u32 block) { return base + block * BLOCK_BYTES + row * 128 + ((part ^ row % 8) << 4); };
    LatentWalk walk = start_walk(m, plan);
    while (walk.go_on(m, items)) {
        if (walk.begin >= walk.end) continue;
        const u32* pages = words(p.step, p.step->pages) + walk.item.pages_start;
        wait_barrier((u32)__cvta_generic_to_shared(&s.query_empty), units++ % 2 ^ 1);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 row = own + 16 * i;
            bool is_there = row / 16 < walk.num_queries;
            u64 at = (u64)(walk.item.query_start + walk.first + (is_there ? row / 16 : 0)) * p.num_heads + walk.group * 16 + row % 16;
            const real* from = p.query + at * DIM + part * 8;
#pragma unroll
            for (u32 block = 0; block < DIM / 64; block++) {
#if IS_F16
                uint4 raw = *reinterpret_cast<const uint4*>(from + block * 64);
                raw = make_uint4(convert_query(raw.x), convert_query(raw.y), convert_query(raw.z), convert_query(raw.w));
                asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(place(query, row, block)), "r"(raw.x), "r"(raw.y), "r"(raw.z),
                             "r"(raw.w) : "memory");
#else
                copy_16(place(query, row, block), from + block * 64, is_there);
#endif
            }
        }
        for (u32 tile = walk.begin; tile < walk.end; tile += KEYS, number++) {
            u32 stage = number % 2;
            wait_barrier(empty + stage * 8, number / 2 % 2 ^ 1);
            // Page numbers first, so that their latencies overlap.
            const u8* from[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) from[i] = p.cache + 2 * (cache_row(p, pages, min(tile + own + 16 * i, walk.end - 1), 0) + part * 8);
#pragma unroll
            for (u32 i = 0; i < 4; i++)
#pragma unroll
                for (u32 block = 0; block < DIM / 64; block++)
                    copy_16(place(tiles + stage * TILE_BYTES, own + 16 * i, block), from[i] + block * 128, tile + own + 16 * i < walk.end);
            asm volatile("cp.async.wait_all;" ::: "memory");
            fence_async();
            if (tile == walk.begin) arrive((u32)__cvta_generic_to_shared(&s.query_full));
            arrive(full + stage * 8);
        }
    }
}

// ---- The multiplying warpgroups.

#if IS_F16
#define LATENT_TYPES "f32.f16.f16"
#else
#define LATENT_TYPES "f32.bf16.bf16"
#endif

// c (64 x 32) = or += 16 columns of 64 queries times those of 32 keys.
__device__ __forceinline__ void multiply_latents(float (&c)[4][4], u64 a, u64 b, u32 adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16." LATENT_TYPES " {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1, 0, 0;\n}"
        : FOUR(c, 0), FOUR(c, 1), FOUR(c, 2), FOUR(c, 3) : "l"(a), "l"(b), "r"(adds) : "memory");
}

// c (64 x 256) += 16 weights of 64 rows times 256 columns of 16 keys, transposed on the way.
__device__ __forceinline__ void add_latents(float (&c)[32][4], u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16." LATENT_TYPES " {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
        "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"
        "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,"
        "%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,"
        "%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,"
        "%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
        "}, %128, %129, 1, 1, 1, 0, 1;"
        : THIRTY_TWO(c, 0), THIRTY_TWO(c, 8), THIRTY_TWO(c, 16), THIRTY_TWO(c, 24) : "l"(a), "l"(b) : "memory");
}

__device__ __forceinline__ void meet_multipliers() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// The running softmax of a lane's two rows, in units of log2. `half` is the warpgroup's, `row` the lane's first one.
struct LatentSoftmax {
    LatentRange range[2];
    float most[2], total[2], factor[2];

    // Scores of keys from `offset` on become weights, in shared memory; what the sums so far are multiplied with is `factor`.
    __device__ __forceinline__ void weigh(const AttentionParams& p, LatentManyShared& s, float (&scores)[4][4], u32 offset, u32 half, u32 row,
                                          u8* weights) {
        u32 lane = threadIdx.x % 32;
        float highest[2] = {NEG_INF, NEG_INF};
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 key = offset + half * 32 + n * 8 + lane % 4 * 2 + j % 2;
                float value = p.softcap > 0.0f ? apply_softcap(scores[n][j] * p.scale, p.softcap) : scores[n][j] * p.scale;
                scores[n][j] = key >= range[j / 2].begin && key < range[j / 2].end ? value * LOG2E : NEG_INF;
                highest[j / 2] = fmaxf(highest[j / 2], scores[n][j]);
            }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            highest[h] = fmaxf(highest[h], __shfl_xor_sync(NONE, highest[h], 1));
            highest[h] = fmaxf(highest[h], __shfl_xor_sync(NONE, highest[h], 2));
            if (lane % 4 == 0) s.most[half][row + 8 * h] = highest[h];
        }
        meet_multipliers();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float higher = fmaxf(most[h], fmaxf(highest[h], s.most[half ^ 1][row + 8 * h]));
            // A row that has seen nothing yet must not compute infinity minus infinity.
            float base = higher == NEG_INF ? 0.0f : higher;
            factor[h] = exp2_approx(most[h] - base);
            most[h] = higher;
            total[h] *= factor[h];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                float x = exp2_approx(scores[n][2 * h] - base), y = exp2_approx(scores[n][2 * h + 1] - base);
                total[h] += x + y;
                u32 r = row + 8 * h, chunk = half * 4 + n;
                *reinterpret_cast<u32*>(weights + r * 128 + ((chunk ^ r % 8) << 4) + lane % 4 * 4) = pack(x, y);
            }
        }
    }
};

__device__ __forceinline__ void store_latents(const AttentionParams& p, const LatentWalk& walk, LatentManyShared& s, LatentSoftmax& softmax,
                                              const float (&made)[32][4], u32 half, u32 row) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        softmax.total[h] += __shfl_xor_sync(NONE, softmax.total[h], 1);
        softmax.total[h] += __shfl_xor_sync(NONE, softmax.total[h], 2);
        if (lane % 4 == 0) s.sums[half][row + 8 * h] = softmax.total[h];
    }
    meet_multipliers();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 r = row + 8 * h, number = walk.first + r / 16, head = walk.group * 16 + r % 16;
        if (r / 16 >= walk.num_queries) continue;
        float sum = s.sums[0][r] + s.sums[1][r], factor = sum > 0.0f ? 1.0f / sum : 0.0f;
        u64 at = ((u64)(walk.item.query_start + number) * p.num_heads + head) * DIM;
        u64 slot = ((u64)walk.item.partial + number) * p.num_heads + head;
        auto put = [&](u32 column, float x, float y) {
            if (walk.item.partial == NONE) *reinterpret_cast<u32*>(p.output + at + column) = pack_bf16(x, y);
            else *reinterpret_cast<float2*>(p.partials + slot * DIM + column) = make_float2(x, y);
        };
#pragma unroll
        for (u32 n = 0; n < 32; n++) put(half * 256 + n * 8 + lane % 4 * 2, made[n][2 * h] * factor, made[n][2 * h + 1] * factor);
        // Columns without values.
#pragma unroll
        for (u32 n = 0; n < 4; n++) put(RANK + half * 32 + n * 8 + lane % 4 * 2, 0.0f, 0.0f);
        if (walk.item.partial != NONE && half == 0 && lane % 4 == 0)
            p.partial_lse[slot] = sum > 0.0f ? (softmax.most[h] + log2f(sum)) * LN2 : NEG_INF;
    }
}

__device__ __forceinline__ void multiply_latents_of(const LatentManyParams& m, const PlanHeader& plan, LatentManyShared& s, u32 query,
                                                    u32 tiles, u8* weights) {
    const AttentionParams& p = m.attention;
    const AttentionItem* items = reinterpret_cast<const AttentionItem*>(words(p.step, plan.items));
    u32 thread = threadIdx.x - 128, half = thread / 128, lane = thread % 32, row = thread / 32 % 4 * 16 + lane / 4, units = 0, number = 0;
    u32 full = (u32)__cvta_generic_to_shared(s.full), empty = (u32)__cvta_generic_to_shared(s.empty);
    u32 weights_at = (u32)__cvta_generic_to_shared(weights);
    LatentWalk walk = start_walk(m, plan);
    while (walk.go_on(m, items)) {
        LatentSoftmax softmax;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            softmax.range[h] = latent_range(p, walk.item, walk.first + min((row + 8 * h) / 16, walk.num_queries - 1));
            softmax.most[h] = NEG_INF, softmax.total[h] = 0.0f;
        }
        float made[32][4] = {}, scores[4][4];
        auto ask_scores = [&](u32 tile) {
            u32 keys = tiles + tile % 2 * TILE_BYTES + half * (32 * 128);
            wait_barrier(full + tile % 2 * 8, tile / 2 % 2);
            begin_products();
#pragma unroll
            for (u32 k = 0; k < DIM / 16; k++) {
                u32 at = k / 4 * BLOCK_BYTES + k % 4 * 32;
                multiply_latents(scores, describe_matrix(query + at, 16), describe_matrix(keys + at, 16), k > 0);
            }
            commit_products();
        };
        if (walk.begin < walk.end) {
            wait_barrier((u32)__cvta_generic_to_shared(&s.query_full), units++ % 2);
            ask_scores(number);
            wait_products<0>(scores);
        }
        for (u32 tile = walk.begin; tile < walk.end; tile += KEYS, number++) {
            softmax.weigh(p, s, scores, tile, half, row, weights);
#pragma unroll
            for (int n = 0; n < 32; n++)
#pragma unroll
                for (int j = 0; j < 4; j++) made[n][j] *= softmax.factor[j / 2];
            fence_async();
            meet_multipliers();
            bool has_next = tile + KEYS < walk.end;
            if (has_next) ask_scores(number + 1);
            begin_products();
#pragma unroll
            for (u32 k = 0; k < KEYS / 16; k++)
                add_latents(made, describe_matrix(weights_at + k * 32, 16),
                            describe_matrix(tiles + number % 2 * TILE_BYTES + half * (4 * BLOCK_BYTES) + k * 2048, BLOCK_BYTES));
            commit_products();
            wait_products<0>(made);
            wait_products<0>(scores);
            if (lane == 0) arrive(empty + number % 2 * 8);
            if (!has_next && lane == 0) arrive((u32)__cvta_generic_to_shared(&s.query_empty));
        }
        store_latents(p, walk, s, softmax, made, half, row);
    }
}

KERNEL __launch_bounds__(384, 1) attention_latent_many(const __grid_constant__ LatentManyParams m) {
    // Queries, two tiles of keys, weights.
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ LatentManyShared s;
    u32 query = (u32)__cvta_generic_to_shared(shared), tiles = query + TILE_BYTES;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 2; i++) {
            init_barrier((u32)__cvta_generic_to_shared(s.full + i), 128);
            init_barrier((u32)__cvta_generic_to_shared(s.empty + i), 8);
        }
        init_barrier((u32)__cvta_generic_to_shared(&s.query_full), 128);
        init_barrier((u32)__cvta_generic_to_shared(&s.query_empty), 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    allow_next();
    wait_for_previous();
    const PlanHeader plan = m.attention.step->plans[m.attention.plan];
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
        feed_latents(m, plan, s, query, tiles);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
        multiply_latents_of(m, plan, s, query, tiles, shared + 3 * TILE_BYTES);
    }
}

#endif
