// What stands around the grouped products of many tokens: the choice of experts, the order of slots by expert, the copies of rows
// into that order, and the sum of what a token's experts gave.
//
// A slot is one expert of one token. Slots are sorted by expert, and the rows of each expert are filled up to whole tiles, so that a
// tile has one expert. How many tiles there are is known on the device alone.

KERNEL __launch_bounds__(128) choose_many(const RouteParams p) {
    __shared__ float keys[4][MAX_ROUTED];
    allow_next();
    wait_for_previous();
    u32 token = blockIdx.x * 4 + threadIdx.x / 32;
    if (token >= min(p.step->num_tokens, p.num_tokens)) return;
    choose_experts(p, token, keys[threadIdx.x / 32]);
}

struct SortParams {
    const StepHeader* step;
    const float* routing; // [tokens, 2 * slots]
    u32* num_tiles;
    u32* tiles;  // [max tiles]: the expert of each
    u32* places; // [tokens * slots]: the row of each slot
    u32 num_tokens, num_slots, num_experts, tile_rows;
};

__device__ constexpr u32 MAX_SORTED = 1024; // experts, and threads

// One block.
KERNEL __launch_bounds__(1024) sort_slots(const SortParams p) {
    __shared__ u32 counts[MAX_SORTED], sums[2][MAX_SORTED];
    allow_next();
    u32 thread = threadIdx.x;
    counts[thread] = 0;
    wait_for_previous();
    __syncthreads();
    u32 count = min(p.step->num_tokens, p.num_tokens) * p.num_slots;
    auto expert_of = [&](u32 slot) {
        u32 expert = (u32)p.routing[(u64)(slot / p.num_slots) * 2 * p.num_slots + slot % p.num_slots];
        return min(expert, p.num_experts - 1);
    };
    // The place among the expert's own rows first.
    for (u32 slot = thread; slot < count; slot += 1024) p.places[slot] = atomicAdd(&counts[expert_of(slot)], 1u);
    __syncthreads();
    u32 own = (counts[thread] + p.tile_rows - 1) / p.tile_rows, from = 0;
    sums[0][thread] = own;
    __syncthreads();
    for (u32 distance = 1; distance < MAX_SORTED; distance *= 2, from ^= 1) {
        sums[from ^ 1][thread] = sums[from][thread] + (thread >= distance ? sums[from][thread - distance] : 0);
        __syncthreads();
    }
    u32 first = sums[from][thread] - own;
    if (thread == MAX_SORTED - 1) *p.num_tiles = first + own;
    for (u32 i = 0; i < own; i++) p.tiles[first + i] = thread;
    __syncthreads();
    counts[thread] = first * p.tile_rows;
    __syncthreads();
    for (u32 slot = thread; slot < count; slot += 1024) p.places[slot] += counts[expert_of(slot)];
}

struct GatherParams {
    const StepHeader* step;
    const real* input;   // [tokens, cols]
    const float* norm;   // [cols] or null
    const u32* places;   // [tokens * slots]
    real* output;        // [rows, cols]
    u32 num_tokens, num_slots, cols;
    float eps;
};

// A block a token: its row, normed, to each of its slots.
KERNEL __launch_bounds__(256) gather_rows(const GatherParams p) {
    __shared__ float parts[8];
    allow_next();
    wait_for_previous();
    u32 token = blockIdx.x;
    if (token >= min(p.step->num_tokens, p.num_tokens)) return;
    const real* input = p.input + (u64)token * p.cols;
    float factor = 1.0f;
    if (p.norm) {
        float squares = 0.0f;
        for (u32 i = threadIdx.x * 8; i < p.cols; i += 256 * 8) {
            float x[8];
            unpack8(*reinterpret_cast<const Eight*>(input + i), x);
#pragma unroll
            for (int j = 0; j < 8; j++) squares = fmaf(x[j], x[j], squares);
        }
        squares = warp_sum(squares);
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = squares;
        __syncthreads();
        squares = 0.0f;
#pragma unroll
        for (int w = 0; w < 8; w++) squares += parts[w];
        factor = rsqrtf(squares / (float)p.cols + p.eps);
    }
    for (u32 i = threadIdx.x * 8; i < p.cols; i += 256 * 8) {
        Eight raw = *reinterpret_cast<const Eight*>(input + i);
        if (p.norm) {
            float x[8];
            unpack8(raw, x);
#pragma unroll
            for (int j = 0; j < 8; j++) x[j] *= factor * p.norm[i + j];
            raw = pack8(x);
        }
        for (u32 slot = 0; slot < p.num_slots; slot++)
            *reinterpret_cast<Eight*>(p.output + (u64)p.places[token * p.num_slots + slot] * p.cols + i) = raw;
    }
}

struct CombineParams {
    const StepHeader* step;
    const real* input;    // [rows, cols]
    const u32* places;    // [tokens * slots]
    const float* routing; // [tokens, 2 * slots]
    real* output;         // [tokens, cols]
    u32 num_tokens, num_slots, cols, accumulate;
};

// A block a token.
KERNEL __launch_bounds__(256) combine_rows(const CombineParams p) {
    allow_next();
    wait_for_previous();
    u32 token = blockIdx.x;
    if (token >= min(p.step->num_tokens, p.num_tokens)) return;
    const float* weights = p.routing + (u64)token * 2 * p.num_slots + p.num_slots;
    for (u32 i = threadIdx.x * 8; i < p.cols; i += 256 * 8) {
        float sum[8] = {}, x[8];
        for (u32 slot = 0; slot < p.num_slots; slot++) {
            unpack8(*reinterpret_cast<const Eight*>(p.input + (u64)p.places[token * p.num_slots + slot] * p.cols + i), x);
            float weight = weights[slot];
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] = fmaf(weight, x[j], sum[j]);
        }
        Eight* output = reinterpret_cast<Eight*>(p.output + (u64)token * p.cols + i);
        if (p.accumulate) {
            unpack8(*output, x);
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += x[j];
        }
        *output = pack8(sum);
    }
}

// ---- Latents.

struct LatentParams {
    const StepHeader* step;
    const real* latent; // [tokens, rank + rotary]
    const float* norm;  // [rank]
    const real* query;  // [tokens, heads * query_step]
    const float* inv_freq; // [rotary / 2]
    u8* cache;          // this layer: [blocks][K, V][1][block_size][rank + rotary]
    real* output;       // [tokens, heads * (rank + rotary)]
    u32 num_tokens, num_heads, rank, half_rotary, query_step, interleaved, block_shift, cache_type, lane;
    float eps, rope_scale;
};

// A block a token: its latent into the cache, and the rotated ends of its queries.
KERNEL __launch_bounds__(128) latent_kv(const LatentParams p) {
    __shared__ float parts[4];
    allow_next();
    wait_for_previous();
    u32 token = blockIdx.x, thread = threadIdx.x;
    if (token >= min(p.step->num_tokens, p.num_tokens)) return;
    u32 rotary = 2 * p.half_rotary, dim = p.rank + rotary;
    const real* latent = p.latent + (u64)token * dim;
    float squares = 0.0f;
    for (u32 i = thread; i < p.rank; i += 128) {
        float x = real_to_float(latent[i]);
        squares = fmaf(x, x, squares);
    }
    squares = warp_sum(squares);
    if (thread % 32 == 0) parts[thread / 32] = squares;
    __syncthreads();
    float factor = rsqrtf((parts[0] + parts[1] + parts[2] + parts[3]) / (float)p.rank + p.eps);
    u32 slot = lane_slots(p.step, p.lane)[token], offset = slot & ((1u << p.block_shift) - 1);
    u64 block = slot >> p.block_shift;
    u64 key = ((block * 2 << p.block_shift) + offset) * dim, value = (((block * 2 + 1) << p.block_shift) + offset) * dim;
    for (u32 i = thread; i < p.rank; i += 128) {
        float x = real_to_float(latent[i]) * factor * p.norm[i];
        store_cache(p.cache, key + i, x, p.cache_type);
        store_cache(p.cache, value + i, x, p.cache_type);
    }
    float position = (float)words(p.step, p.step->positions)[token];
    // Pairs of the key, then of every head.
    for (u32 i = thread; i < p.half_rotary * (p.num_heads + 1); i += 128) {
        u32 head = i / p.half_rotary, pair = i % p.half_rotary;
        u32 first = p.interleaved ? 2 * pair : pair, second = p.interleaved ? 2 * pair + 1 : pair + p.half_rotary;
        bool is_key = head == p.num_heads;
        const real* from = is_key ? latent + p.rank : p.query + ((u64)token * p.num_heads + head + 1) * p.query_step - rotary;
        float x = real_to_float(from[first]), y = real_to_float(from[second]), sin, cos;
        sin_cos(position * p.inv_freq[pair], &sin, &cos);
        float a = p.rope_scale * (x * cos - y * sin), b = p.rope_scale * (y * cos + x * sin);
        if (is_key) {
            store_cache(p.cache, key + p.rank + first, a, p.cache_type);
            store_cache(p.cache, key + p.rank + second, b, p.cache_type);
            store_cache(p.cache, value + p.rank + first, 0.0f, p.cache_type);
            store_cache(p.cache, value + p.rank + second, 0.0f, p.cache_type);
        } else {
            real* to = p.output + ((u64)token * p.num_heads + head) * dim + p.rank;
            to[first] = float_to_real(a);
            to[second] = float_to_real(b);
        }
    }
}
