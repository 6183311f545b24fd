// Attention over latents: what comes into the cache, and the ends of queries.

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

// Heads whose queries a part rotates.
__device__ constexpr u32 LATENT_HEADS = 4;

// By a block of 128 threads. The first part of a token norms its latent and brings it into the cache, the others rotate the ends of
// its queries.
__device__ __forceinline__ void write_latent(const LatentParams& p, u32 token, u32 part) {
    __shared__ float parts[4];
    u32 thread = threadIdx.x;
    if (token >= min(p.step->num_tokens, p.num_tokens)) {
        wait_for_previous();
        return;
    }
    u32 rotary = 2 * p.half_rotary, dim = p.rank + rotary;
    const real* latent = p.latent + (u64)token * dim;
    float position = (float)words(p.step, p.step->positions)[token];
    bool is_key = part == 0;
    u32 first_head = is_key ? p.num_heads : (part - 1) * LATENT_HEADS, heads = is_key ? 1 : min(LATENT_HEADS, p.num_heads - first_head);
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
