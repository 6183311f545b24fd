// The choice of a token's experts from a router's products, by one warp, and the order of slots by expert, by one block.
//
// A slot is one expert of one token. Slots are sorted by expert, and the rows of each expert are filled up to whole tiles, so that a
// tile has one expert. How many tiles there are is known on the device alone.

struct SortParams {
    const StepHeader* step;
    const float* routing; // [tokens, 2 * slots]
    u32* num_tiles;
    u32* tiles;   // [max tiles]: the expert of each, and from bit 16 on how many rows it has
    u32* places;  // [tokens * slots]: the row of each slot
    u32* sources; // [rows]: the token of each
    u32 num_tokens, num_slots, num_experts, tile_rows;
};

struct RouteParams {
    const StepHeader* step;
    const u8* weight; // [rows, cols], for kernels that multiply
    u64 row_bytes;
    const real* input; // [tokens, cols]
    const float* norm; // [cols] or null
    const float* bias; // [rows] or null
    const float* selection_bias; // [experts] or null
    float* products;   // [tokens, rows]
    u32* arrivals;     // [1 + tokens]: blocks that are done, of all tokens and of each; 0 between launches
    real* normed;      // [tokens, cols] or null: the rows after the norm
    float* routing;    // [tokens, 2 * (top_k + num_shared)]: numbers of experts, then weights
    u32 num_tokens, num_rows, cols, num_experts, top_k, num_shared, has_shared_gate;
    u32 is_sigmoid, normalizes;
    u32 num_groups, chosen_groups, sums_two; // 0 groups: all experts are looked at
    float eps, scale;
    u32 finish;        // what a router of few tokens ends with: one of the three below
    SortParams sort;   // for FINISH_SORTED
};

// The experts of each token are chosen; those of all tokens are chosen and sorted; or what reads them chooses.
enum { FINISH_CHOSEN, FINISH_SORTED, FINISH_PRODUCTS };

// Experts that a lane looks at, at most: one in 32.
__device__ constexpr u32 MAX_OF_LANE = 16;
__device__ constexpr u32 MAX_ROUTED = 32 * MAX_OF_LANE;
__device__ constexpr u32 MAX_GROUPS = 32;

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

// Bits that are ordered as the numbers are.
__device__ __forceinline__ u32 ordered(float x) {
    u32 bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// An expert that may be chosen; 0 as its key: one that may not.
struct Candidate {
    u32 key, number;
    float score;
};

__device__ __forceinline__ void put_in_order(Candidate& first, Candidate& second) {
    if (second.key < first.key || (second.key == first.key && second.number > first.number)) return;
    Candidate other = first;
    first = second;
    second = other;
}

// By the router's products with a token, in memory that other blocks write or in the block's own. `keys` is the warp's own memory, of
// MAX_ROUTED values, which only groups need; `routing` is the token's. OF_LANE experts a lane are enough for all. Of two experts with
// the same key the one with the lower number is taken.
template <u32 OF_LANE, bool IS_SHARED>
__device__ __forceinline__ void choose_by(const RouteParams& p, const float* products, float* keys, float* routing) {
    u32 lane = threadIdx.x % 32, slots = p.top_k + p.num_shared;
    auto product = [&](u32 i) { return IS_SHARED ? products[i] : __ldcg(products + i); };
    float scores[OF_LANE];
    float most = NEG_INF;
#pragma unroll
    for (u32 i = 0; i < OF_LANE; i++) {
        u32 expert = i * 32 + lane;
        scores[i] = expert < p.num_experts ? product(expert) + (p.bias ? p.bias[expert] : 0.0f) : NEG_INF;
        most = fmaxf(most, scores[i]);
    }
    if (p.is_sigmoid) {
#pragma unroll
        for (u32 i = 0; i < OF_LANE; i++) scores[i] = sigmoid(scores[i]);
    } else {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) most = fmaxf(most, __shfl_xor_sync(NONE, most, distance));
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < OF_LANE; i++) {
            scores[i] = __expf(scores[i] - most);
            sum += i * 32 + lane < p.num_experts ? scores[i] : 0.0f;
        }
        sum = 1.0f / warp_sum(sum);
#pragma unroll
        for (u32 i = 0; i < OF_LANE; i++) scores[i] *= sum;
    }
    float values[OF_LANE];
    u32 open = 0; // bit i: the lane's i-th expert may be chosen
#pragma unroll
    for (u32 i = 0; i < OF_LANE; i++) {
        u32 expert = i * 32 + lane;
        bool is_there = expert < p.num_experts;
        open |= (u32)is_there << i;
        values[i] = is_there ? scores[i] + (p.selection_bias ? p.selection_bias[expert] : 0.0f) : 0.0f;
    }
    if (p.num_groups > 0) {
#pragma unroll
        for (u32 i = 0; i < OF_LANE; i++)
            if (open >> i & 1) keys[i * 32 + lane] = values[i];
        __syncwarp();
        // A lane a group.
        u32 size = p.num_experts / p.num_groups;
        float best = NEG_INF, second = NEG_INF;
        if (lane < p.num_groups) {
            for (u32 j = 0; j < size; j++) {
                float key = keys[lane * size + j];
                if (key > best) second = best, best = key;
                else if (key > second) second = key;
            }
            if (p.sums_two && size > 1) best += second;
        }
        u32 better = 0;
        for (u32 other = 0; other < p.num_groups; other++) {
            float theirs = __shfl_sync(NONE, best, other);
            better += theirs > best || (theirs == best && other < lane);
        }
        u32 chosen = __ballot_sync(NONE, lane < p.num_groups && better < p.chosen_groups);
#pragma unroll
        for (u32 i = 0; i < OF_LANE; i++)
            if ((open >> i & 1) && !(chosen >> (i * 32 + lane) / size & 1)) open &= ~(1u << i);
    }
    float total = 0.0f, own_score = 0.0f;
    u32 own_number = 0; // lane i keeps the i-th chosen
    if constexpr (OF_LANE == 4) {
        // A lane's own in order first, so that a turn is short: the largest of the first ones is taken.
        Candidate own[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) own[i] = {open >> i & 1 ? ordered(values[i]) : 0, i * 32 + lane, scores[i]};
        put_in_order(own[0], own[1]);
        put_in_order(own[2], own[3]);
        put_in_order(own[0], own[2]);
        put_in_order(own[1], own[3]);
        put_in_order(own[1], own[2]);
        for (u32 slot = 0; slot < p.top_k; slot++) {
            u32 most_of_all = __reduce_max_sync(NONE, own[0].key), lanes = __ballot_sync(NONE, own[0].key == most_of_all);
            u32 winner = __ffs(lanes) - 1;
            if (lanes & lanes - 1) winner = __reduce_min_sync(NONE, own[0].key == most_of_all ? own[0].number : NONE) % 32;
            u32 number = __shfl_sync(NONE, own[0].number, winner);
            float score = __shfl_sync(NONE, own[0].score, winner);
            total += score;
            if (lane == slot) own_number = number, own_score = score;
            if (lane == winner) own[0] = own[1], own[1] = own[2], own[2] = own[3], own[3].key = 0;
        }
    } else {
        for (u32 slot = 0; slot < p.top_k; slot++) {
            u32 best = 0, number = NONE;
            float score = 0.0f;
#pragma unroll
            for (u32 i = 0; i < OF_LANE; i++) {
                u32 key = ordered(values[i]);
                if ((open >> i & 1) && (number == NONE || key > best)) best = key, number = i * 32 + lane, score = scores[i];
            }
            u32 most_of_all = __reduce_max_sync(NONE, best);
            u32 winner = __reduce_min_sync(NONE, best == most_of_all ? number : NONE);
            if (winner == NONE) winner = 0; // there are always enough
            if (winner % 32 == lane) open &= ~(1u << winner / 32);
            score = __shfl_sync(NONE, score, winner % 32);
            total += score;
            if (lane == slot) own_number = winner, own_score = score;
        }
    }
    if (lane < p.top_k) {
        routing[lane] = (float)own_number;
        routing[slots + lane] = own_score * (p.normalizes ? p.scale / total : p.scale);
    }
    for (u32 slot = p.top_k + lane; slot < slots; slot += 32) {
        routing[slot] = (float)(p.num_experts + slot - p.top_k);
        float gate = p.has_shared_gate ? product(p.num_experts) + (p.bias ? p.bias[p.num_experts] : 0.0f) : 0.0f;
        routing[slots + slot] = p.has_shared_gate ? sigmoid(gate) : 1.0f;
    }
}

template <u32 OF_LANE>
__device__ __forceinline__ void choose_of(const RouteParams& p, u32 token, float* keys, float* routing) {
    choose_by<OF_LANE, false>(p, p.products + (u64)token * p.num_rows, keys, routing);
}

__device__ __forceinline__ void choose_experts(const RouteParams& p, u32 token, float* keys, float* routing) {
    if (p.num_experts <= 128) choose_of<4>(p, token, keys, routing);
    else choose_of<MAX_OF_LANE>(p, token, keys, routing);
}

__device__ __forceinline__ float* routing_of(const RouteParams& p, u32 token) {
    return p.routing + (u64)token * 2 * (p.top_k + p.num_shared);
}

__device__ constexpr u32 MAX_SORTED = 1024; // experts

// The expert of a slot, as other blocks have chosen it.
struct ChosenExperts {
    const SortParams& p;
    __device__ __forceinline__ u32 operator()(u32 slot) const {
        return (u32)__ldcg(p.routing + (u64)(slot / p.num_slots) * 2 * p.num_slots + slot % p.num_slots);
    }
};

// `counts` has MAX_SORTED values, `sums` one for each warp; `chosen` gives the expert of a slot.
template <u32 THREADS, typename Chosen>
__device__ __forceinline__ void sort_block(const SortParams& p, u32* counts, u32* sums, Chosen chosen) {
    constexpr u32 OF_THREAD = MAX_SORTED / THREADS;
    constexpr u32 KEPT = 4;
    u32 thread = threadIdx.x, lane = thread % 32, count = min(p.step->num_tokens, p.num_tokens) * p.num_slots;
    for (u32 i = thread; i < MAX_SORTED; i += THREADS) counts[i] = 0;
    __syncthreads();
    auto expert_of = [&](u32 slot) { return min((u32)chosen(slot), p.num_experts - 1); };
    // The place among the expert's own rows first. Of few slots everything stays in registers.
    u32 experts[KEPT], ranks[KEPT];
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) experts[i] = thread + i * THREADS < count ? expert_of(thread + i * THREADS) : NONE;
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) ranks[i] = experts[i] != NONE ? atomicAdd(&counts[experts[i]], 1u) : 0;
    for (u32 slot = thread + KEPT * THREADS; slot < count; slot += THREADS) p.places[slot] = atomicAdd(&counts[expert_of(slot)], 1u);
    __syncthreads();
    // Tiles of the experts before: of this thread's, then of all warps.
    u32 rows[OF_THREAD], tiles = 0;
#pragma unroll
    for (u32 i = 0; i < OF_THREAD; i++) {
        rows[i] = counts[thread * OF_THREAD + i];
        tiles += (rows[i] + p.tile_rows - 1) / p.tile_rows;
    }
    u32 last = tiles;
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        u32 other = __shfl_up_sync(NONE, last, distance);
        if (lane >= distance) last += other;
    }
    if (lane == 31) sums[thread / 32] = last;
    __syncthreads();
    for (u32 warp = 0; warp < thread / 32; warp++) last += sums[warp];
    u32 first = last - tiles;
    if (thread == THREADS - 1) *p.num_tiles = last;
#pragma unroll
    for (u32 i = 0; i < OF_THREAD; i++) {
        u32 expert = thread * OF_THREAD + i;
        counts[expert] = first * p.tile_rows;
        for (u32 done = 0; done < rows[i]; done += p.tile_rows) p.tiles[first++] = expert | min(rows[i] - done, p.tile_rows) << 16;
    }
    __syncthreads();
    auto put = [&](u32 slot, u32 place) {
        p.places[slot] = place;
        p.sources[place] = slot / p.num_slots;
    };
#pragma unroll
    for (u32 i = 0; i < KEPT; i++)
        if (experts[i] != NONE) put(thread + i * THREADS, ranks[i] + counts[experts[i]]);
    for (u32 slot = thread + KEPT * THREADS; slot < count; slot += THREADS) put(slot, p.places[slot] + counts[expert_of(slot)]);
}

// True in the last of `count` blocks that come here, which sees what the others wrote before. The counter is 0 again then.
__device__ __forceinline__ bool is_last_of(u32* counter, u32 count) {
    __shared__ u32 is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(counter, 1u) == count - 1;
    __syncthreads();
    if (!is_last) return false;
    if (threadIdx.x == 0) *counter = 0;
    __threadfence();
    return true;
}
