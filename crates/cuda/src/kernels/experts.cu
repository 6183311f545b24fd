// What stands around the grouped products of many tokens: the choice of experts, the order of slots by expert, the copies of rows
// into that order where tiles are large, and the sum of what a token's experts gave.

KERNEL __launch_bounds__(128) choose_many(const RouteParams p) {
    __shared__ float keys[4][MAX_ROUTED];
    __shared__ u32 counts[MAX_SORTED], sums[4];
    allow_next();
    wait_for_previous();
    u32 token = blockIdx.x * 4 + threadIdx.x / 32;
    if (token < min(p.step->num_tokens, p.num_tokens)) choose_experts(p, token, keys[threadIdx.x / 32], routing_of(p, token));
    if (p.finish == FINISH_SORTED && is_last_of(p.arrivals, gridDim.x)) sort_block<128>(p.sort, counts, sums, ChosenExperts{p.sort});
}

// One block.
KERNEL __launch_bounds__(1024, 1) sort_slots(const SortParams p) {
    __shared__ u32 counts[MAX_SORTED], sums[32];
    allow_next();
    wait_for_previous();
    sort_block<1024>(p, counts, sums, ChosenExperts{p});
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

// The first block of a token norms its latent and brings it into the cache, the others rotate the ends of its queries.
KERNEL __launch_bounds__(128) latent_kv(const LatentParams p) {
    allow_next();
    write_latent(p, blockIdx.x, blockIdx.y);
}
