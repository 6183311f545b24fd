// What the attention kernels share: their parameters, which keys a query sees, and how scores are bent.

struct AttentionParams {
    const StepHeader* step;
    const real* query;   // [tokens, heads * head_dim]
    const u8* cache;     // this layer: [blocks][K, V][kv_heads][block_size][head_dim]
    const float* slopes; // [heads] or null
    const float* sinks;  // the same
    real* output;        // [tokens, heads * head_dim]
    float* partials;     // [slots, heads, head_dim], each divided by its own sum
    float* partial_lse;  // [slots, heads], the logarithm of that sum; minus infinity if no key was seen
    u32* arrivals;       // [merges, kv_heads], how many own partials of a merge are there; 0 between launches
    u32 plan, window;    // 0 is no window
    u32 num_heads, num_kv_heads, head_dim, block_shift, cache_type;
    float scale, softcap;
    u32 is_decode;       // not 0: the step writes no key that another sequence reads; 1 more than the keys before a query that it may write
    u32 is_shared;       // the launch is for shared items, else for all others
};

__device__ __forceinline__ bool sees(u32 position, u32 key, u32 window) {
    return key <= position && (window == 0 || position - key < window);
}

// What the sum of a head's weights is divided by, where `total` of them are relative to `max` (in units of log2). A sink is the score
// of a key that every query sees and whose value is nothing: it counts once a query, so not in partial results.
__device__ __forceinline__ float with_sink(const AttentionParams& p, u32 head, bool is_whole, float max, float total) {
    return p.sinks && is_whole && total > 0.0f ? total + exp2_approx(1.44269504f * p.sinks[head] - max) : total;
}

__device__ __forceinline__ u64 cache_row(const AttentionParams& p, const u32* pages, u32 offset, u32 plane_head) {
    u64 page = pages[offset >> p.block_shift];
    u64 row = ((page * 2 * p.num_kv_heads + plane_head) << p.block_shift) + (offset & ((1u << p.block_shift) - 1));
    return row * p.head_dim;
}
