// What stands around the grouped products of many tokens: the choice of experts, the order of slots by expert, the copies of rows
// into that order where tiles are large, and the sum of what a token's experts gave.

KERNEL __launch_bounds__(128) choose_many(const RouteParams p) {
    __shared__ float keys[4][MAX_ROUTED];
    __shared__ u32 counts[MAX_SORTED], sums[4];
    allow_next();
    wait_for_previous();
    u32 token = blockIdx.x * 4 + threadIdx.x / 32;
    if (token < min(p.step->num_tokens, p.num_tokens)) choose_experts(p, token, keys[threadIdx.x / 32], routing_of(p, token));
    if (p.finish == FINISH_SORTED && is_last_of(p.arrivals, gridDim.x)) sort_block<128>(p.sort, counts, sums);
}

// One block.
KERNEL __launch_bounds__(1024, 1) sort_slots(const SortParams p) {
    __shared__ u32 counts[MAX_SORTED], sums[32];
    allow_next();
    wait_for_previous();
    sort_block<1024>(p, counts, sums);
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

// Heads whose queries a block rotates.
__device__ constexpr u32 LATENT_HEADS = 4;

// The first block of a token norms its latent and brings it into the cache, the others rotate the ends of its queries.
KERNEL __launch_bounds__(128) latent_kv(const LatentParams p) {
    __shared__ float parts[4];
    allow_next();
    u32 token = blockIdx.x, thread = threadIdx.x;
    if (token >= min(p.step->num_tokens, p.num_tokens)) {
        wait_for_previous();
        return;
    }
    u32 rotary = 2 * p.half_rotary, dim = p.rank + rotary;
    const real* latent = p.latent + (u64)token * dim;
    float position = (float)words(p.step, p.step->positions)[token];
    bool is_key = blockIdx.y == 0;
    u32 first_head = is_key ? p.num_heads : (blockIdx.y - 1) * LATENT_HEADS, heads = is_key ? 1 : min(LATENT_HEADS, p.num_heads - first_head);
    u32 slot = lane_slots(p.step, p.lane)[token], offset = slot & ((1u << p.block_shift) - 1);
    u64 block = slot >> p.block_shift;
    u64 key = ((block * 2 << p.block_shift) + offset) * dim, value = (((block * 2 + 1) << p.block_shift) + offset) * dim;
    // The angles do not depend on the kernel before.
    float sin = 0.0f, cos = 0.0f;
    if (thread < p.half_rotary * heads) sin_cos(position * p.inv_freq[thread % p.half_rotary], &sin, &cos);
    wait_for_previous();
    for (u32 i = thread; i < p.half_rotary * heads; i += 128) {
        u32 head = first_head + i / p.half_rotary, pair = i % p.half_rotary;
        u32 first = p.interleaved ? 2 * pair : pair, second = p.interleaved ? 2 * pair + 1 : pair + p.half_rotary;
        const real* from = is_key ? latent + p.rank : p.query + ((u64)token * p.num_heads + head + 1) * p.query_step - rotary;
        float x = real_to_float(from[first]), y = real_to_float(from[second]);
        if (i != thread) sin_cos(position * p.inv_freq[pair], &sin, &cos);
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
    if (!is_key) return;
    float squares = 0.0f;
    for (u32 i = thread; i < p.rank; i += 128) {
        float x = real_to_float(latent[i]);
        squares = fmaf(x, x, squares);
    }
    squares = warp_sum(squares);
    if (thread % 32 == 0) parts[thread / 32] = squares;
    __syncthreads();
    float factor = rsqrtf((parts[0] + parts[1] + parts[2] + parts[3]) / (float)p.rank + p.eps);
    for (u32 i = thread; i < p.rank; i += 128) {
        float x = real_to_float(latent[i]) * factor * p.norm[i];
        store_cache(p.cache, key + i, x, p.cache_type);
        store_cache(p.cache, value + i, x, p.cache_type);
    }
}
