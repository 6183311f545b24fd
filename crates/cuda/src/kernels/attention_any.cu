// Attention for every head size and cache type, one warp a query and head: what the tensor-core kernels do not cover, and
// what they are compared with. Also the merge of partial results, which all kernels share.

__device__ __forceinline__ float load_cache(const u8* cache, u64 index, u32 type) {
    if (type == 0) return reinterpret_cast<const float*>(cache)[index];
    if (type == 3) return e4m3_to_float(cache[index]);
    u16 raw = reinterpret_cast<const u16*>(cache)[index];
    return type == 1 ? f16_to_float(raw) : bf16_to_float(raw);
}

// Heads of up to 32 * WIDTH.
template <u32 WIDTH>
__device__ __forceinline__ void attend_any(const AttentionParams& p) {
    allow_next();
    wait_for_previous();
    const PlanHeader plan = p.step->plans[p.plan];
    const AttentionItem* items = reinterpret_cast<const AttentionItem*>(words(p.step, plan.items));
    const u32* positions = words(p.step, p.step->positions);
    u32 lane = threadIdx.x % 32;
    u32 group = p.num_heads / p.num_kv_heads;
    for (u32 unit = blockIdx.x; unit < plan.num_items * p.num_heads; unit += gridDim.x) {
        const AttentionItem item = items[unit / p.num_heads];
        u32 head = unit % p.num_heads, kv_head = head / group;
        const u32* pages = words(p.step, p.step->pages) + item.pages_start;
        float slope = p.slopes ? p.slopes[head] : 0.0f;
        for (u32 i = threadIdx.x / 32; i < item.num_queries; i += 4) {
            u32 row = item.query_start + i;
            u32 position = positions[row];
            u64 query_at = ((u64)row * p.num_heads + head) * p.head_dim;
            float query[WIDTH], sum[WIDTH];
#pragma unroll
            for (u32 j = 0; j < WIDTH; j++) {
                u32 d = lane + 32 * j;
                query[j] = d < p.head_dim ? real_to_float(p.query[query_at + d]) : 0.0f;
                sum[j] = 0.0f;
            }
            float max = NEG_INF, total = 0.0f;
            for (u32 k = 0; k < item.kv_len; k++) {
                u32 key = item.kv_start + k;
                if (!sees(position, key, p.window)) continue;
                u64 key_at = cache_row(p, pages, k, kv_head);
                float dot = 0.0f;
#pragma unroll
                for (u32 j = 0; j < WIDTH; j++) {
                    u32 d = lane + 32 * j;
                    if (d < p.head_dim) dot += query[j] * load_cache(p.cache, key_at + d, p.cache_type);
                }
                float score = apply_softcap(p.scale * warp_sum(dot), p.softcap) - slope * (float)(position - key);
                float higher = fmaxf(max, score);
                float old = exp2_approx(1.44269504f * (max - higher));
                float weight = exp2_approx(1.44269504f * (score - higher));
                max = higher;
                total = total * old + weight;
                u64 value_at = cache_row(p, pages, k, p.num_kv_heads + kv_head);
#pragma unroll
                for (u32 j = 0; j < WIDTH; j++) {
                    u32 d = lane + 32 * j;
                    if (d < p.head_dim) sum[j] = sum[j] * old + weight * load_cache(p.cache, value_at + d, p.cache_type);
                }
            }
            float all = with_sink(p, head, item.partial == NONE, 1.44269504f * max, total);
            float factor = all > 0.0f ? 1.0f / all : 0.0f;
            u64 slot = ((u64)item.partial + i) * p.num_heads + head;
#pragma unroll
            for (u32 j = 0; j < WIDTH; j++) {
                u32 d = lane + 32 * j;
                if (d >= p.head_dim) continue;
                if (item.partial == NONE) p.output[query_at + d] = float_to_real(sum[j] * factor);
                else p.partials[slot * p.head_dim + d] = sum[j] * factor;
            }
            if (item.partial != NONE && lane == 0) p.partial_lse[slot] = total > 0.0f ? max + logf(total) : NEG_INF;
        }
    }
}

// One warp a merged query and head: a sum of the partials, weighted by exp(lse - max lse).
template <u32 WIDTH>
__device__ __forceinline__ void merge_any(const AttentionParams& p) {
    allow_next();
    wait_for_previous();
    const PlanHeader plan = p.step->plans[p.plan];
    const AttentionMerge* merges = reinterpret_cast<const AttentionMerge*>(words(p.step, plan.merges));
    u32 lane = threadIdx.x % 32;
    u32 count = plan.num_merges * p.num_heads;
    for (u32 unit = blockIdx.x * 4 + threadIdx.x / 32; unit < count; unit += gridDim.x * 4) {
        const AttentionMerge merge = merges[unit / p.num_heads];
        u32 head = unit % p.num_heads;
        const u32* slots = words(p.step, plan.merge_slots) + merge.first;
        float max = NEG_INF;
        for (u32 i = 0; i < merge.count; i++) max = fmaxf(max, p.partial_lse[(u64)slots[i] * p.num_heads + head]);
        float total = 0.0f, sum[WIDTH] = {};
        for (u32 i = 0; i < merge.count; i++) {
            u64 slot = (u64)slots[i] * p.num_heads + head;
            float lse = p.partial_lse[slot];
            if (lse == NEG_INF) continue;
            float weight = exp2_approx(1.44269504f * (lse - max));
            total += weight;
#pragma unroll
            for (u32 j = 0; j < WIDTH; j++) {
                u32 d = lane + 32 * j;
                if (d < p.head_dim) sum[j] += weight * p.partials[slot * p.head_dim + d];
            }
        }
        total = with_sink(p, head, true, 1.44269504f * max, total);
        float factor = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
        for (u32 j = 0; j < WIDTH; j++) {
            u32 d = lane + 32 * j;
            if (d < p.head_dim)
                p.output[((u64)merge.query * p.num_heads + head) * p.head_dim + d] = float_to_real(sum[j] * factor);
        }
    }
}

KERNEL __launch_bounds__(128, 4) attention_any(const AttentionParams p) { attend_any<8>(p); }
KERNEL __launch_bounds__(128) merge_partials(const AttentionParams p) { merge_any<8>(p); }
// Latents of 512 + 64.
KERNEL __launch_bounds__(128, 4) attention_large(const AttentionParams p) { attend_any<18>(p); }
KERNEL __launch_bounds__(128) merge_large(const AttentionParams p) { merge_any<18>(p); }
