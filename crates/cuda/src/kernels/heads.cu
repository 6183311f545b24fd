// Norms of queries and keys that are not those of one head with a shared weight, and the bias of a head. Few models have them, so
// these are kernels of their own between a product and what follows it.

struct HeadNormParams {
    const StepHeader* step;
    real* projected;           // [tokens, (heads + 2 kv_heads) * head_dim], changed in place
    const float* bias;         // as wide as a row of projected, or null
    const float *q_weight, *q_bias; // null where there is none
    const float *k_weight, *k_bias;
    u32 num_heads, num_kv_heads, head_dim;
    u32 span; // 0: heads with a shared weight, 1: heads with a weight of their own, 2: all heads together
    u32 q_is_layer_norm, k_is_layer_norm;
    float q_eps, k_eps;
};

// One block for a segment (a head, or all of q, k or v) of a token. Adds the bias of the projection as well.
KERNEL __launch_bounds__(256) norm_heads(const HeadNormParams p) {
    __shared__ float shared[8];
    allow_next();
    u32 token = blockIdx.x, segment = blockIdx.y;
    if (token >= p.step->num_tokens) return;
    u32 heads = p.num_heads + 2 * p.num_kv_heads;
    u32 first, count; // heads of the segment
    if (p.span == 2) {
        first = segment == 0 ? 0 : segment == 1 ? p.num_heads : p.num_heads + p.num_kv_heads;
        count = segment == 0 ? p.num_heads : p.num_kv_heads;
    } else {
        first = segment;
        count = 1;
    }
    bool is_query = first < p.num_heads, is_value = first >= p.num_heads + p.num_kv_heads;
    u32 start = first * p.head_dim, length = count * p.head_dim;
    const float* weight = is_value ? nullptr : is_query ? p.q_weight : p.k_weight;
    const float* shift = is_value ? nullptr : is_query ? p.q_bias : p.k_bias;
    bool centred = is_query ? p.q_is_layer_norm : p.k_is_layer_norm;
    float eps = is_query ? p.q_eps : p.k_eps;
    // Of the weight: none for a shared one, else the place among the heads of q or k.
    u32 offset = p.span == 0 ? 0 : start - (is_query ? 0 : p.num_heads * p.head_dim);
    wait_for_previous();
    real* row = p.projected + (u64)token * heads * p.head_dim + start;
    auto value = [&](u32 i) { return real_to_float(row[i]) + (p.bias ? p.bias[start + i] : 0.0f); };
    float mean = 0.0f, factor = 1.0f;
    if (weight) {
        if (centred) {
            float sum = 0.0f;
            for (u32 i = threadIdx.x; i < length; i += 256) sum += value(i);
            mean = block_sum(sum, shared) / (float)length;
        }
        float squares = 0.0f;
        for (u32 i = threadIdx.x; i < length; i += 256) {
            float x = value(i) - mean;
            squares += x * x;
        }
        factor = rsqrtf(block_sum(squares, shared) / (float)length + eps);
    }
    for (u32 i = threadIdx.x; i < length; i += 256) {
        float x = value(i);
        if (weight) x = (x - mean) * factor * weight[offset + i];
        if (shift) x += shift[offset + i];
        row[i] = float_to_real(x);
    }
}

struct LogitBiasParams {
    float* values;     // [rows, width]
    const float* bias; // [width]
    u64 count;         // rows * width
    u32 width;
};

KERNEL __launch_bounds__(256) add_logit_bias(const LogitBiasParams p) {
    allow_next();
    wait_for_previous();
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < p.count; i += (u64)gridDim.x * 256)
        p.values[i] += p.bias[i % p.width];
}
