// Attention in both directions within the sequences of a step, without a cache. The slots of a step say at which row a token's
// sequence begins.

struct EncoderParams {
    const StepHeader* step;
    real* qkv;             // [tokens, 3 * heads * head_dim]
    const float* inv_freq; // [rotary_dim / 2] or null
    real* output;          // [tokens, heads * head_dim]
    u32 num_heads, head_dim, half_rotary, interleaved;
    float scale, rope_scale;
};

// Rotates q and k in place, one block a token.
KERNEL __launch_bounds__(128) rotate_rows(const EncoderParams p) {
    allow_next();
    u32 token = blockIdx.x;
    if (token >= p.step->num_tokens) return;
    float position = (float)words(p.step, p.step->positions)[token];
    wait_for_previous();
    u32 width = p.num_heads * p.head_dim, pairs = 2 * p.num_heads * p.half_rotary;
    for (u32 n = threadIdx.x; n < pairs; n += 128) {
        u32 head = n / p.half_rotary, i = n % p.half_rotary;
        float sin, cos;
        sin_cos(position * p.inv_freq[i], &sin, &cos);
        sin *= p.rope_scale;
        cos *= p.rope_scale;
        real* x = p.qkv + (u64)token * 3 * width + head * p.head_dim;
        u32 first = p.interleaved ? 2 * i : i, second = p.interleaved ? 2 * i + 1 : i + p.half_rotary;
        float a = real_to_float(x[first]), b = real_to_float(x[second]);
        x[first] = float_to_real(a * cos - b * sin);
        x[second] = float_to_real(b * cos + a * sin);
    }
}

// One warp for a head of a query; a lane scores one of 32 keys at a time, then owns some dimensions of the result.
KERNEL __launch_bounds__(128) encoder_attention(const EncoderParams p) {
    __shared__ float queries[4][256];
    allow_next();
    u32 token = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 head = blockIdx.y * 4 + warp;
    u32 num_tokens = p.step->num_tokens;
    if (token >= num_tokens || head >= p.num_heads) return;
    const u32* starts = lane_slots(p.step, 0);
    u32 start = starts[token];
    wait_for_previous();
    u32 width = p.num_heads * p.head_dim;
    u64 stride = 3 * (u64)width;
    const real* row = p.qkv + token * stride + head * p.head_dim;
    float* query = queries[warp];
    for (u32 i = lane; i < p.head_dim; i += 32) query[i] = real_to_float(row[i]) * p.scale;
    __syncwarp();
    float result[8] = {}; // of dimensions lane, lane + 32, …
    float most = NEG_INF, sum = 0.0f;
    for (u32 first = start; first < num_tokens; first += 32) {
        u32 key_row = first + lane;
        bool is_seen = key_row < num_tokens && starts[key_row] == start;
        u32 seen = __ballot_sync(NONE, is_seen);
        if (!seen) break;
        float score = NEG_INF;
        if (is_seen) {
            const real* key = p.qkv + key_row * stride + width + head * p.head_dim;
            score = 0.0f;
            for (u32 i = 0; i < p.head_dim; i++) score += query[i] * real_to_float(key[i]);
        }
        float largest = score;
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(NONE, largest, distance));
        largest = fmaxf(largest, most);
        float factor = most == NEG_INF ? 0.0f : exp2_approx(1.44269504f * (most - largest));
        float weight = is_seen ? exp2_approx(1.44269504f * (score - largest)) : 0.0f;
        most = largest;
        sum = sum * factor + warp_sum(weight);
#pragma unroll
        for (int k = 0; k < 8; k++) result[k] *= factor;
        // The rows of a sequence follow each other, so those that are seen are the first ones.
        u32 count = __popc(seen);
        for (u32 j = 0; j < count; j++) {
            float w = __shfl_sync(NONE, weight, j);
            const real* value = p.qkv + (first + j) * stride + 2 * width + head * p.head_dim;
#pragma unroll
            for (int k = 0; k < 8; k++)
                if (lane + 32 * k < p.head_dim) result[k] += w * real_to_float(value[lane + 32 * k]);
        }
    }
    real* out = p.output + (u64)token * width + head * p.head_dim;
#pragma unroll
    for (int k = 0; k < 8; k++)
        if (lane + 32 * k < p.head_dim) out[lane + 32 * k] = float_to_real(result[k] / sum);
}
