// Products with the experts of a few tokens, in any format of weights that `product.cu` reads: a warp takes rows of an expert (gate
// and up: rows of each) for one token. Only the weights of chosen experts are read; those of two tokens with the same expert come
// from the L2 the second time. And the router of a few tokens: a warp takes a row.
//
// One request is a chain of small launches, so that what comes before the first weight of each counts: the products of experts choose
// for themselves where they can (`finds`), and what does not depend on the launch before is done while it runs.

struct ExpertParams {
    const StepHeader* step;
    const u8* weight; // of the experts from `first_expert` on
    u64 row_bytes;
    const real* input;    // [tokens, cols], or [tokens * slots, cols]
    const float* norm;    // [cols] or null, gated only
    const float* bias;    // [experts * rows] or null
    float* routing;       // [tokens, 2 * slots]
    real* output;         // [tokens * slots, num_rows], or [tokens, num_rows]
    u32 num_rows, cols, num_tokens, num_slots; // rows of an expert, or of its gate
    u32 first_expert, num_experts;             // those that `weight` has
    u32 activation, accumulate;
    u32 block_rows; // of the gate, that a block takes
    float eps;
    u32 finds;  // the experts, 128 at most, are found in the router's products, which were made two launches before the linear product
    RouteParams route;
};

// Experts of a token.
__device__ constexpr u32 MAX_SLOTS = 64;

__device__ __forceinline__ u32 rows_of_step(const StepHeader* step, u32 most) { return min(step->num_tokens, most); }

// A row of activations times the norm's weight, where there is one, into the block's memory; returns what the norm divides by,
// which sums are multiplied with at the end.
template <u32 THREADS>
__device__ __forceinline__ float stage_row(const real* input, const float* norm, float eps, u32 cols, float* staged) {
    __shared__ float parts[THREADS / 32];
    float squares = 0.0f;
    for (u32 i = threadIdx.x * 8; i < cols; i += THREADS * 8) {
        float x[8];
        unpack8(*reinterpret_cast<const Eight*>(input + i), x);
        if (norm) {
            const float4 low = *reinterpret_cast<const float4*>(norm + i), high = *reinterpret_cast<const float4*>(norm + i + 4);
            const float weight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int j = 0; j < 8; j++) {
                squares = fmaf(x[j], x[j], squares);
                x[j] *= weight[j];
            }
        }
        float4* to = reinterpret_cast<float4*>(staged + i);
        to[0] = make_float4(x[0], x[1], x[2], x[3]);
        to[1] = make_float4(x[4], x[5], x[6], x[7]);
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = squares;
    __syncthreads();
    if (!norm) return 1.0f;
    squares = 0.0f;
#pragma unroll
    for (u32 w = 0; w < THREADS / 32; w++) squares += parts[w];
    return rsqrtf(squares / (float)cols + eps);
}

extern __shared__ __align__(16) float staged[];

__device__ __forceinline__ void staged_8(u32 at, float (&x)[8]) {
    const float4 low = *reinterpret_cast<const float4*>(staged + at), high = *reinterpret_cast<const float4*>(staged + at + 4);
    x[0] = low.x; x[1] = low.y; x[2] = low.z; x[3] = low.w;
    x[4] = high.x; x[5] = high.y; x[6] = high.z; x[7] = high.w;
}

__device__ __forceinline__ float dot_8(const float (&a)[8], const float (&b)[8], float sum) {
#pragma unroll
    for (int j = 0; j < 8; j++) sum = fmaf(a[j], b[j], sum);
    return sum;
}

// The kernels of one token with a ring, which go beside those of gate and up.
#if (FORMAT == 1 || FORMAT == 2) && !defined(F32_ACTIVATIONS)
#define HAS_DEEP 1
#else
#define HAS_DEEP 0
#endif

// Blocks whose registers a multiprocessor has: Q5_K wants more. Three run beside one with a ring.
__device__ constexpr u32 GATED_BLOCKS = FORMAT == Q5_K ? 2 : HAS_DEEP ? 4 : 3, HEAD_BLOCKS = FORMAT == Q5_K ? 3 : 4;

// A block takes `block_rows` rows of the gate of one slot, and the same of up; each of its eight warps one after the other, as one
// line of loads.
__device__ __forceinline__ void gated_rows(const ExpertParams& p) {
    constexpr u32 AHEAD = FORMAT == 0 ? 2 : 4; // f32 is twice as large
    __shared__ float own[2 * MAX_SLOTS];
    u32 token = blockIdx.x / p.num_slots, slot = blockIdx.x % p.num_slots, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool is_there = token < rows_of_step(p.step, p.num_tokens);
    float factor = 1.0f;
    // A router that leaves the choice to this kernel starts it when its own input, the same, is there.
    if (p.finds && is_there) factor = stage_row<256>(p.input + (u64)token * p.cols, p.norm, p.eps, p.cols, staged);
    wait_for_previous();
    allow_next();
    if (!is_there) return;
    u32 number;
    if (p.finds) {
        __shared__ float keys[MAX_ROUTED];
        if (warp == 0) choose_of<4>(p.route, token, keys, own);
        __syncthreads();
        number = (u32)own[slot];
        // Once for whoever else looks.
        if (slot == 0 && blockIdx.y == 0 && threadIdx.x < 2 * p.num_slots)
            p.routing[(u64)token * 2 * p.num_slots + threadIdx.x] = own[threadIdx.x];
    } else {
        number = (u32)p.routing[(u64)token * 2 * p.num_slots + slot];
    }
    u32 expert = number - p.first_expert;
    if (expert >= p.num_experts) return;
    u32 end = min((blockIdx.y + 1) * p.block_rows, p.num_rows);
    const u8* gate = p.weight + (u64)expert * 2 * p.num_rows * p.row_bytes;
    const u8* up = gate + (u64)p.num_rows * p.row_bytes;
    Chunk chunks[AHEAD][2];
    u32 next_row = blockIdx.y * p.block_rows + warp, next_at = lane * 8;
    u32 row = next_row, at = next_at;
    auto load = [&](Chunk (&chunk)[2]) {
        if (next_row < end && next_at < p.cols) {
            chunk[0].load(gate + (u64)next_row * p.row_bytes, next_at);
            chunk[1].load(up + (u64)next_row * p.row_bytes, next_at);
        }
        next_at += 256;
        if (next_at - lane * 8 >= p.cols) next_at = lane * 8, next_row += 8;
    };
#pragma unroll
    for (u32 a = 0; a < AHEAD; a++) load(chunks[a]);
    if (!p.finds) factor = stage_row<256>(p.input + (u64)token * p.cols, p.norm, p.eps, p.cols, staged);
    float sum[2] = {};
    while (row < end) {
#pragma unroll
        for (u32 a = 0; a < AHEAD; a++) {
            if (row >= end) break;
            if (at < p.cols) {
                float x[8], weight[8];
                staged_8(at, x);
                chunks[a][0].decode(weight);
                sum[0] = dot_8(weight, x, sum[0]);
                chunks[a][1].decode(weight);
                sum[1] = dot_8(weight, x, sum[1]);
            }
            load(chunks[a]);
            at += 256;
            if (at - lane * 8 < p.cols) continue;
            u64 of_bias = (u64)number * 2 * p.num_rows + row;
            float g = warp_sum(sum[0]) * factor, u = warp_sum(sum[1]) * factor;
            if (lane == 0) {
                if (p.bias) g += p.bias[of_bias], u += p.bias[of_bias + p.num_rows];
                p.output[(u64)blockIdx.x * p.num_rows + row] = float_to_real(activate_gate(p.activation, g, u));
            }
            sum[0] = sum[1] = 0.0f;
            at = lane * 8;
            row += 8;
        }
    }
}

KERNEL __launch_bounds__(256, GATED_BLOCKS) expert_gated(const ExpertParams p) { gated_rows(p); }

// Rows of a token that a block takes.
__device__ constexpr u32 LINEAR_ROWS = 4;

// A block takes four rows of one token for all its slots: an item is a row of a slot, and the items go around the warps.
KERNEL __launch_bounds__(256, 4) expert_linear(const ExpertParams p) {
    constexpr u32 AHEAD = FORMAT == 0 ? 3 : 6;
    __shared__ float parts[LINEAR_ROWS * MAX_SLOTS], own[2 * MAX_SLOTS];
    u32 token = blockIdx.x, first = blockIdx.y * LINEAR_ROWS, lane = threadIdx.x % 32;
    if (token >= rows_of_step(p.step, p.num_tokens)) {
        wait_for_previous();
        return;
    }
    if (p.finds) {
        __shared__ float keys[MAX_ROUTED];
        if (threadIdx.x < 32) choose_of<4>(p.route, token, keys, own);
    } else {
        wait_for_previous();
        if (threadIdx.x < 2 * p.num_slots) own[threadIdx.x] = p.routing[(u64)token * 2 * p.num_slots + threadIdx.x];
    }
    __syncthreads();
    u32 rows = min(LINEAR_ROWS, p.num_rows - first), count = rows * p.num_slots;
    const real* input = p.input + (u64)token * p.num_slots * p.cols;
    // Items are numbered by row and then by slot.
    u32 next = threadIdx.x / 32, next_at = lane * 8;
    u32 item = next, at = next_at;
    const u8* weight_row = nullptr;
    auto find = [&]() {
        if (next >= count) return;
        u32 expert = (u32)own[next % p.num_slots] - p.first_expert;
        u64 row = (u64)expert * p.num_rows + first + next / p.num_slots;
        weight_row = expert < p.num_experts ? p.weight + row * p.row_bytes : nullptr;
    };
    find();
    auto load = [&](Chunk& chunk) {
        if (next >= count) return;
        if (weight_row && next_at < p.cols) chunk.load(weight_row, next_at);
        next_at += 256;
        if (next_at - lane * 8 < p.cols) return;
        next_at = lane * 8;
        next += 8;
        find();
    };
    Chunk chunks[AHEAD];
#pragma unroll
    for (u32 a = 0; a < AHEAD; a++) load(chunks[a]);
    if (p.finds) wait_for_previous();
    allow_next();
    float sum = 0.0f;
    while (item < count) {
#pragma unroll
        for (u32 a = 0; a < AHEAD; a++) {
            if (item >= count) break;
            u32 slot = item % p.num_slots, expert = (u32)own[slot];
            bool is_here = expert - p.first_expert < p.num_experts;
            if (is_here && at < p.cols) {
                float weight[8], x[8];
                unpack8(*reinterpret_cast<const Eight*>(input + (u64)slot * p.cols + at), x);
                chunks[a].decode(weight);
                sum = dot_8(weight, x, sum);
            }
            load(chunks[a]);
            at += 256;
            if (at - lane * 8 < p.cols) continue;
            sum = warp_sum(sum);
            u32 of_bias = expert * p.num_rows + first + item / p.num_slots;
            if (lane == 0) parts[item] = is_here ? own[p.num_slots + slot] * (sum + (p.bias ? p.bias[of_bias] : 0.0f)) : 0.0f;
            sum = 0.0f;
            at = lane * 8;
            item += 8;
        }
    }
    __syncthreads();
    if (threadIdx.x >= rows) return;
    float total = 0.0f;
    for (u32 slot = 0; slot < p.num_slots; slot++) total += parts[threadIdx.x * p.num_slots + slot];
    real* output = p.output + (u64)token * p.num_rows + first + threadIdx.x;
    *output = float_to_real(p.accumulate ? real_to_float(*output) + total : total);
}

#if HAS_DEEP
// The same for one token: a block takes 16 rows, for each of 1, 2, 4 or 8 slots, and a warp always rows of the same slot, whose input it
// keeps. There is a block for a multiprocessor, beside those of gate and up, and its ring is full before they are done.
__device__ constexpr u32 DEEP_ROWS = 16, DEEP_CHUNKS = 12; // of 512 bytes: the ring of a warp

// Sums of four values over a warp: lanes 0, 16, 8 and 24 have them in this order.
__device__ __forceinline__ float four_sums(const float (&x)[4]) {
    bool high = threadIdx.x & 16, second = threadIdx.x & 8;
    float a = (high ? x[1] : x[0]) + __shfl_xor_sync(NONE, high ? x[0] : x[1], 16);
    float b = (high ? x[3] : x[2]) + __shfl_xor_sync(NONE, high ? x[2] : x[3], 16);
    float sum = (second ? b : a) + __shfl_xor_sync(NONE, second ? a : b, 8);
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2) sum += __shfl_xor_sync(NONE, sum, distance);
    return sum;
}

template <u32 CHUNKS>
__device__ __forceinline__ void deep_linear(const ExpertParams& p) {
    constexpr u32 DEPTH = DEEP_CHUNKS / CHUNKS; // rows on their way
    __shared__ float parts[DEEP_ROWS * 8], own[2 * MAX_SLOTS];
    u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32, first = blockIdx.x * DEEP_ROWS;
    if (rows_of_step(p.step, p.num_tokens) == 0) {
        wait_for_previous();
        return;
    }
    if (p.finds) {
        __shared__ float keys[MAX_ROUTED];
        if (warp == 0) choose_of<4>(p.route, 0, keys, own);
    } else {
        wait_for_previous();
        if (thread < 2 * p.num_slots) own[thread] = p.routing[thread];
    }
    __syncthreads();
    u32 slot = warp % p.num_slots, rows_apart = 8 / p.num_slots, row = warp / p.num_slots, count = DEEP_ROWS / rows_apart;
    u32 expert = min((u32)own[slot], p.num_experts - 1);
    const u8* weight = p.weight + ((u64)expert * p.num_rows + first + row) * p.row_bytes + lane * 16;
    u32 ring = (u32)__cvta_generic_to_shared(staged) + warp * DEEP_CHUNKS * 512 + lane * 16;
    auto load = [&](u32 number, u32 stage) {
        if (number < count && first + row + number * rows_apart < p.num_rows) {
#pragma unroll
            for (u32 c = 0; c < CHUNKS; c++)
                if (c * 256 + lane * 8 < p.cols)
                    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(ring + (stage * CHUNKS + c) * 512),
                                 "l"(weight + (u64)(number * rows_apart) * p.row_bytes + c * 512), "l"(read_once()) : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll
    for (u32 s = 0; s < DEPTH; s++) load(s, s);
    if (p.finds) wait_for_previous();
    allow_next();
    const real* input = p.input + (u64)slot * p.cols + lane * 8;
    Eight x[CHUNKS];
#pragma unroll
    for (u32 c = 0; c < CHUNKS; c++) x[c] = c * 256 + lane * 8 < p.cols ? *reinterpret_cast<const Eight*>(input + c * 256) : Eight{};
    // What is added to, before it is needed.
    real* output = p.output + first + min(thread, p.num_rows - 1 - first);
    float before = p.accumulate && thread < DEEP_ROWS ? real_to_float(*output) : 0.0f;
    u32 stage = 0;
    for (u32 number = 0; number < count; number += 4) {
        float sums[4] = {};
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
            if (number + i < count) {
#pragma unroll
                for (u32 c = 0; c < CHUNKS; c++) {
                    if (c * 256 + lane * 8 >= p.cols) break;
                    Chunk chunk;
                    float w[8], v[8];
                    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(chunk.raw.x), "=r"(chunk.raw.y), "=r"(chunk.raw.z), "=r"(chunk.raw.w)
                                 : "r"(ring + (stage * CHUNKS + c) * 512) : "memory");
                    chunk.decode(w);
                    unpack8(x[c], v);
                    sums[i] = dot_8(w, v, sums[i]);
                }
            }
            load(number + i + DEPTH, stage);
            stage = stage + 1 == DEPTH ? 0 : stage + 1;
        }
        float sum = four_sums(sums);
        u32 i = (lane & 16 ? 1 : 0) + (lane & 8 ? 2 : 0);
        if (lane % 8 == 0 && number + i < count) parts[(row + (number + i) * rows_apart) * p.num_slots + slot] = own[p.num_slots + slot] * sum;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    if (thread >= min(DEEP_ROWS, p.num_rows - first)) return;
    float total = 0.0f;
    for (u32 s = 0; s < p.num_slots; s++) total += parts[thread * p.num_slots + s];
    *output = float_to_real(before + total);
}

#define DEEP(CHUNKS) \
    KERNEL __launch_bounds__(256, 4) expert_linear_deep_##CHUNKS(const ExpertParams p) { deep_linear<CHUNKS>(p); }
DEEP(1)
DEEP(2)
DEEP(3)
DEEP(4)

// The same as `expert_gated`, with enough shared memory set aside that a block of these fits beside it.
KERNEL __launch_bounds__(256, GATED_BLOCKS) expert_gated_beside(const ExpertParams p) { gated_rows(p); }
#endif

// Sums of a row of weights with one of activations, in all lanes. The first weights are loaded by `start`, which may come before
// what the activations wait for.
struct DotRow {
    static constexpr u32 AHEAD = 8;
    Chunk chunks[AHEAD];
    __device__ __forceinline__ void start(const u8* row, u32 cols) {
#pragma unroll
        for (u32 a = 0; a < AHEAD; a++)
            if (threadIdx.x % 32 * 8 + a * 256 < cols) chunks[a].load(row, threadIdx.x % 32 * 8 + a * 256);
    }
    template <typename Input>
    __device__ __forceinline__ float finish(const u8* row, u32 cols, Input input) {
        float sum = 0.0f;
        for (u32 i = threadIdx.x % 32 * 8; i < cols; i += AHEAD * 256) {
#pragma unroll
            for (u32 a = 0; a < AHEAD; a++) {
                u32 at = i + a * 256;
                if (at < cols) {
                    float x[8], weight[8];
                    input(at, x);
                    chunks[a].decode(weight);
                    sum = dot_8(weight, x, sum);
                }
                if (at + AHEAD * 256 < cols) chunks[a].load(row, at + AHEAD * 256);
            }
        }
        return warp_sum(sum);
    }
};

// A block takes four rows of the router for one token. The last block of a token chooses, the last that has chosen sorts.
KERNEL __launch_bounds__(128, 4) route_few(const RouteParams p) {
    __shared__ float keys[MAX_ROUTED];
    __shared__ u32 counts[MAX_SORTED], sums[4];
    u32 row = blockIdx.x * 4 + threadIdx.x / 32, token = blockIdx.y;
    const u8* weight = p.weight + min(row, p.num_rows - 1) * p.row_bytes;
    DotRow dot;
    dot.start(weight, p.cols);
    wait_for_previous();
    // Only now: the next kernel may read the input before it waits.
    allow_next();
    u32 num_tokens = rows_of_step(p.step, p.num_tokens);
    if (token >= num_tokens) return;
    float factor = stage_row<128>(p.input + (u64)token * p.cols, p.norm, p.eps, p.cols, staged);
    float sum = dot.finish(weight, p.cols, [](u32 at, float (&x)[8]) { staged_8(at, x); }) * factor;
    if (row < p.num_rows && threadIdx.x % 32 == 0) p.products[(u64)token * p.num_rows + row] = sum;
    if (p.normed && blockIdx.x == 0) {
        for (u32 i = threadIdx.x * 8; i < p.cols; i += 128 * 8) {
            float x[8];
            staged_8(i, x);
#pragma unroll
            for (int j = 0; j < 8; j++) x[j] *= factor;
            *reinterpret_cast<Eight*>(p.normed + (u64)token * p.cols + i) = pack8(x);
        }
    }
    if (p.finish == FINISH_PRODUCTS) return;
    if (!is_last_of(p.arrivals + 1 + token, gridDim.x)) return;
    if (threadIdx.x < 32) choose_experts(p, token, keys, routing_of(p, token));
    if (p.finish == FINISH_SORTED && is_last_of(p.arrivals, num_tokens)) sort_block<128>(p.sort, counts, sums, ChosenExperts{p.sort});
}

struct HeadParams {
    const StepHeader* step;
    const u8* weight; // [heads][num_rows, cols]
    u64 row_bytes;
    const real* input; // [tokens, heads * input_step]
    real* output;      // [tokens, heads * output_step]
    u32 num_rows, cols, num_tokens, num_heads, input_step, output_step;
    // Where the input is what attention has left in parts, of the plan's merges: as `attention.cuh` has them, or null.
    const float* partials;
    const float* partial_lse;
    u32 plan, has_latent; // the latents of the same tokens are written by further blocks
    LatentParams latent;
};

// A block takes four rows of one head for one token.
KERNEL __launch_bounds__(128, 4) head_linear(const HeadParams p) {
    allow_next();
    u32 row = blockIdx.y * 4 + threadIdx.x / 32, token = blockIdx.x / p.num_heads, head = blockIdx.x % p.num_heads;
    const u8* weight = p.weight + ((u64)head * p.num_rows + min(row, p.num_rows - 1)) * p.row_bytes;
    DotRow dot;
    dot.start(weight, p.cols);
    wait_for_previous();
    if (row >= p.num_rows || token >= rows_of_step(p.step, p.num_tokens)) return;
    const real* input = p.input + ((u64)token * p.num_heads + head) * p.input_step;
    float sum = dot.finish(weight, p.cols, [&](u32 at, float (&x)[8]) { unpack8(*reinterpret_cast<const Eight*>(input + at), x); });
    if (threadIdx.x % 32 == 0) p.output[((u64)token * p.num_heads + head) * p.output_step + row] = float_to_real(sum);
}

// What a head of a query saw: its partial results joined, four columns a thread.
__device__ __forceinline__ void join_parts(const HeadParams& p, const AttentionMerge& merge, u32 head, float* joined) {
    const u32* slots = words(p.step, p.step->plans[p.plan].merge_slots) + merge.first;
    u32 column = threadIdx.x * 4;
    if (column >= p.cols) return;
    float most = NEG_INF, total = 0.0f, sum[4] = {};
    for (u32 first = 0; first < merge.count; first += 4) {
        float lse[4], highest = most;
        float4 part[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u64 slot = (u64)slots[min(first + i, merge.count - 1)] * p.num_heads + head;
            lse[i] = first + i < merge.count ? __ldcg(p.partial_lse + slot) : NEG_INF;
            part[i] = __ldcg(reinterpret_cast<const float4*>(p.partials + slot * p.input_step + column));
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) highest = fmaxf(highest, lse[i]);
        float old = most == NEG_INF ? 0.0f : __expf(most - highest);
        most = highest;
        total *= old;
#pragma unroll
        for (u32 j = 0; j < 4; j++) sum[j] *= old;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float weight = lse[i] == NEG_INF ? 0.0f : __expf(lse[i] - most);
            total += weight;
            sum[0] = fmaf(weight, part[i].x, sum[0]);
            sum[1] = fmaf(weight, part[i].y, sum[1]);
            sum[2] = fmaf(weight, part[i].z, sum[2]);
            sum[3] = fmaf(weight, part[i].w, sum[3]);
        }
    }
    float factor = total > 0.0f ? 1.0f / total : 0.0f;
    *reinterpret_cast<float4*>(joined + column) = make_float4(sum[0] * factor, sum[1] * factor, sum[2] * factor, sum[3] * factor);
}

// Columns that `join_parts` takes.
__device__ constexpr u32 MAX_JOINED = 512;

// The same for rows of up to LANES * CHUNKS * 8 columns: eight loads a lane, all asked for before the wait. A warp has neighbouring
// rows, LANES of it one at a time. Further rows of blocks write the latents.
template <u32 LANES, u32 CHUNKS>
__device__ __forceinline__ void head_rows(const HeadParams& p) {
    constexpr u32 AT_ONCE = 32 / LANES, TURNS = 8 / CHUNKS, WARP_ROWS = AT_ONCE * TURNS;
    __shared__ __align__(16) float joined[MAX_JOINED];
    allow_next();
    u32 token = blockIdx.x / p.num_heads, head = blockIdx.x % p.num_heads, num_blocks = (p.num_rows + 4 * WARP_ROWS - 1) / (4 * WARP_ROWS);
    if (blockIdx.y >= num_blocks) {
        if (head < 1 + (p.num_heads + LATENT_HEADS - 1) / LATENT_HEADS) write_latent(p.latent, token, head);
        else wait_for_previous();
        return;
    }
    u32 lane = threadIdx.x % LANES, first = (blockIdx.y * 4 + threadIdx.x / 32) * WARP_ROWS + threadIdx.x % 32 / LANES;
    Chunk chunks[TURNS][CHUNKS];
#pragma unroll
    for (u32 turn = 0; turn < TURNS; turn++) {
        const u8* weight = p.weight + ((u64)head * p.num_rows + min(first + turn * AT_ONCE, p.num_rows - 1)) * p.row_bytes;
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++)
            if ((c * LANES + lane) * 8 < p.cols) chunks[turn][c].load(weight, (c * LANES + lane) * 8);
    }
    bool is_there = token < rows_of_step(p.step, p.num_tokens);
    AttentionMerge merge;
    merge.count = 0;
    if (p.partials && is_there) {
        const PlanHeader& plan = p.step->plans[p.plan];
        const AttentionMerge* merges = reinterpret_cast<const AttentionMerge*>(words(p.step, plan.merges));
        for (u32 i = 0; i < plan.num_merges; i++)
            if (merges[i].query == token) merge = merges[i];
    }
    wait_for_previous();
    if (!is_there) return;
    const real* input = p.input + ((u64)token * p.num_heads + head) * p.input_step;
    if (merge.count > 0) {
        join_parts(p, merge, head, joined);
        __syncthreads();
    }
    float sums[TURNS] = {};
#pragma unroll
    for (u32 c = 0; c < CHUNKS; c++) {
        u32 at = (c * LANES + lane) * 8;
        if (at >= p.cols) continue;
        float x[8], weight[8];
        if (merge.count > 0) {
#pragma unroll
            for (u32 j = 0; j < 8; j++) x[j] = joined[at + j];
        } else {
            unpack8(*reinterpret_cast<const Eight*>(input + at), x);
        }
#pragma unroll
        for (u32 turn = 0; turn < TURNS; turn++) {
            chunks[turn][c].decode(weight);
            sums[turn] = dot_8(weight, x, sums[turn]);
        }
    }
#pragma unroll
    for (u32 turn = 0; turn < TURNS; turn++) {
#pragma unroll
        for (u32 distance = LANES / 2; distance > 0; distance /= 2) sums[turn] += __shfl_xor_sync(NONE, sums[turn], distance);
        u32 row = first + turn * AT_ONCE;
        if (lane == 0 && row < p.num_rows) p.output[((u64)token * p.num_heads + head) * p.output_step + row] = float_to_real(sums[turn]);
    }
}

KERNEL __launch_bounds__(128, HEAD_BLOCKS) head_rows_128(const HeadParams p) { head_rows<16, 1>(p); }
KERNEL __launch_bounds__(128, HEAD_BLOCKS) head_rows_256(const HeadParams p) { head_rows<32, 1>(p); }
KERNEL __launch_bounds__(128, HEAD_BLOCKS) head_rows_512(const HeadParams p) { head_rows<32, 2>(p); }
