// Products with the experts of a few tokens, in any format of weights that `product.cu` reads: a warp takes a row of an expert (gate
// and up: a row of each) for one token. Only the weights of chosen experts are read; those of two tokens with the same expert come
// from the L2 the second time. And the router of a few tokens: a warp takes a row, and the last block of a token chooses.

struct ExpertParams {
    const StepHeader* step;
    const u8* weight; // of the experts from `first_expert` on
    u64 row_bytes;
    const real* input;    // [tokens, cols], or [tokens * slots, cols]
    const float* norm;    // [cols] or null, gated only
    const float* bias;    // [experts * rows] or null
    const float* routing; // [tokens, 2 * slots]
    real* output;         // [tokens * slots, num_rows], or [tokens, num_rows]
    u32 num_rows, cols, num_tokens, num_slots; // rows of an expert, or of its gate
    u32 first_expert, num_experts;             // those that `weight` has
    u32 activation, accumulate;
    float eps;
};

__device__ __forceinline__ u32 rows_of_step(const StepHeader* step, u32 most) { return min(step->num_tokens, most); }

// Sums of WEIGHTS rows with one row of activations, in all lanes; with the norm of the activations where there is one.
template <int WEIGHTS>
__device__ __forceinline__ void dot_row(const u8* (&rows)[WEIGHTS], const real* input, const float* norm, float eps, u32 cols,
                                        float (&sum)[WEIGHTS]) {
    constexpr int AHEAD = 2;
    float squares = 0.0f;
    Chunk chunks[AHEAD][WEIGHTS];
    u32 i = threadIdx.x % 32 * 8;
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
#pragma unroll
        for (int w = 0; w < WEIGHTS; w++)
            if (i + a * 256 < cols) chunks[a][w].load(rows[w], i + a * 256);
    while (i < cols) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            u32 at = i + a * 256;
            if (at >= cols) break;
            float x[8], weight[8];
            unpack8(*reinterpret_cast<const Eight*>(input + at), x);
            if (norm) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    squares = fmaf(x[j], x[j], squares);
                    x[j] *= norm[at + j];
                }
            }
#pragma unroll
            for (int w = 0; w < WEIGHTS; w++) {
                chunks[a][w].decode(weight);
                if (at + AHEAD * 256 < cols) chunks[a][w].load(rows[w], at + AHEAD * 256);
#pragma unroll
                for (int j = 0; j < 8; j++) sum[w] = fmaf(weight[j], x[j], sum[w]);
            }
        }
        i += AHEAD * 256;
    }
    float factor = norm ? rsqrtf(warp_sum(squares) / (float)cols + eps) : 1.0f;
#pragma unroll
    for (int w = 0; w < WEIGHTS; w++) sum[w] = warp_sum(sum[w]) * factor;
}

// A block takes four rows of one slot.
KERNEL __launch_bounds__(128, 4) expert_gated(const ExpertParams p) {
    allow_next();
    u32 row = blockIdx.y * 4 + threadIdx.x / 32, token = blockIdx.x / p.num_slots, slot = blockIdx.x % p.num_slots;
    wait_for_previous();
    if (row >= p.num_rows || token >= rows_of_step(p.step, p.num_tokens)) return;
    u32 number = (u32)p.routing[(u64)token * 2 * p.num_slots + slot], expert = number - p.first_expert;
    if (expert >= p.num_experts) return;
    u64 first = (u64)expert * 2 * p.num_rows + row;
    const u8* rows[2] = {p.weight + first * p.row_bytes, p.weight + (first + p.num_rows) * p.row_bytes};
    float sum[2] = {};
    dot_row<2>(rows, p.input + (u64)token * p.cols, p.norm, p.eps, p.cols, sum);
    if (threadIdx.x % 32 != 0) return;
    u64 at = (u64)number * 2 * p.num_rows + row;
    float gate = sum[0] + (p.bias ? p.bias[at] : 0.0f), up = sum[1] + (p.bias ? p.bias[at + p.num_rows] : 0.0f);
    p.output[(u64)blockIdx.x * p.num_rows + row] = float_to_real(activate(p.activation, gate) * up);
}

// A block takes four rows of one token; a warp goes over the slots of its token, a chunk of 256 columns after the other.
KERNEL __launch_bounds__(128, 4) expert_linear(const ExpertParams p) {
    constexpr u32 AHEAD = 4;
    allow_next();
    u32 row = blockIdx.y * 4 + threadIdx.x / 32, token = blockIdx.x, lane = threadIdx.x % 32;
    wait_for_previous();
    if (row >= p.num_rows || token >= rows_of_step(p.step, p.num_tokens)) return;
    const float* routing = p.routing + (u64)token * 2 * p.num_slots;
    const real* input = p.input + (u64)token * p.num_slots * p.cols;
    u32 of_slot = (p.cols + 255) / 256, count = of_slot * p.num_slots;
    float sum = 0.0f;
    Chunk chunks[AHEAD];
    auto load = [&](Chunk& chunk, u32 number) {
        u32 slot = number / of_slot, at = number % of_slot * 256 + lane * 8;
        u32 expert = (u32)routing[slot] - p.first_expert;
        if (expert < p.num_experts && at < p.cols) chunk.load(p.weight + ((u64)expert * p.num_rows + row) * p.row_bytes, at);
    };
#pragma unroll
    for (u32 a = 0; a < AHEAD; a++)
        if (a < count) load(chunks[a], a);
    for (u32 first = 0; first < count; first += AHEAD) {
#pragma unroll
        for (u32 a = 0; a < AHEAD; a++) {
            u32 number = first + a;
            if (number >= count) break;
            u32 slot = number / of_slot, at = number % of_slot * 256 + lane * 8, expert = (u32)routing[slot] - p.first_expert;
            bool is_here = expert < p.num_experts && at < p.cols;
            float weight[8] = {}, x[8] = {}, part = 0.0f;
            if (is_here) {
                chunks[a].decode(weight);
                unpack8(*reinterpret_cast<const Eight*>(input + (u64)slot * p.cols + at), x);
            }
            if (number + AHEAD < count) load(chunks[a], number + AHEAD);
#pragma unroll
            for (int j = 0; j < 8; j++) part = fmaf(weight[j], x[j], part);
            sum = fmaf(routing[p.num_slots + slot], part, sum);
        }
    }
    if (p.bias)
        for (u32 slot = lane; slot < p.num_slots; slot += 32) {
            u32 number = (u32)routing[slot];
            if (number - p.first_expert < p.num_experts)
                sum = fmaf(routing[p.num_slots + slot], p.bias[(u64)number * p.num_rows + row], sum);
        }
    sum = warp_sum(sum);
    if (lane != 0) return;
    real* output = p.output + (u64)token * p.num_rows + row;
    *output = float_to_real(p.accumulate ? real_to_float(*output) + sum : sum);
}

// A block takes four rows of the router for one token.
KERNEL __launch_bounds__(128, 4) route_few(const RouteParams p) {
    __shared__ float keys[MAX_ROUTED];
    __shared__ u32 is_last;
    allow_next();
    u32 row = blockIdx.x * 4 + threadIdx.x / 32, token = blockIdx.y;
    wait_for_previous();
    if (token >= rows_of_step(p.step, p.num_tokens)) return;
    if (row < p.num_rows) {
        const u8* rows[1] = {p.weight + row * p.row_bytes};
        float sum[1] = {};
        dot_row<1>(rows, p.input + (u64)token * p.cols, p.norm, p.eps, p.cols, sum);
        if (threadIdx.x % 32 == 0) p.products[(u64)token * p.num_rows + row] = sum[0];
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(p.arrivals + token, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last || threadIdx.x >= 32) return;
    if (threadIdx.x == 0) p.arrivals[token] = 0;
    __threadfence();
    choose_experts(p, token, keys);
}

struct HeadParams {
    const StepHeader* step;
    const u8* weight; // [heads][num_rows, cols]
    u64 row_bytes;
    const real* input; // [tokens, heads * input_step]
    real* output;      // [tokens, heads * output_step]
    u32 num_rows, cols, num_tokens, num_heads, input_step, output_step;
};

// A block takes four rows of one head for one token.
KERNEL __launch_bounds__(128, 4) head_linear(const HeadParams p) {
    allow_next();
    u32 row = blockIdx.y * 4 + threadIdx.x / 32, token = blockIdx.x / p.num_heads, head = blockIdx.x % p.num_heads;
    wait_for_previous();
    if (row >= p.num_rows || token >= rows_of_step(p.step, p.num_tokens)) return;
    const u8* rows[1] = {p.weight + ((u64)head * p.num_rows + row) * p.row_bytes};
    float sum[1] = {};
    dot_row<1>(rows, p.input + ((u64)token * p.num_heads + head) * p.input_step, nullptr, 0.0f, p.cols, sum);
    if (threadIdx.x % 32 == 0) p.output[((u64)token * p.num_heads + head) * p.output_step + row] = float_to_real(sum[0]);
}
