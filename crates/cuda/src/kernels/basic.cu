// The kernels around the products: norms, rotary embedding with the KV write, gated activations, block moves.

// The sum over a block of 256 threads, given to all of them.
__device__ float block_sum(float x, float* shared) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += shared[i];
    __syncthreads();
    return sum;
}

struct NormParams {
    const StepHeader* step;
    const real* input;  // [rows, cols]
    const float* weight; // [cols], or null: the rows are only gathered
    const float* bias;   // [cols] or null
    real* output;        // [rows, cols]
    u32 cols;
    float eps;
    u32 is_layer_norm, accumulate;
    u32 gathers_logit_rows;
};

// One block a row. A row of up to KEPT * 2048 values stays in registers between the sums and the result, of a wider one the
// rest is read again. The weight does not depend on the kernel before and is fetched while that ends.
KERNEL __launch_bounds__(256) row_norm(const NormParams p) {
    constexpr u32 KEPT = 2;
    __shared__ float shared[8];
    allow_next();
    u32 row = blockIdx.x, chunks = p.cols / 8;
    u32 source = row;
    if (p.gathers_logit_rows) {
        if (row >= p.step->num_logit_rows) return;
        source = words(p.step, p.step->logit_rows)[row];
    } else if (row >= p.step->num_tokens) {
        return;
    }
    const Eight* in = reinterpret_cast<const Eight*>(p.input + (u64)source * p.cols);
    Eight* out = reinterpret_cast<Eight*>(p.output + (u64)row * p.cols);
    if (!p.weight) {
        wait_for_previous();
        for (u32 i = threadIdx.x; i < chunks; i += 256) out[i] = in[i];
        return;
    }
    const float4* weights = reinterpret_cast<const float4*>(p.weight);
    float4 kept_weights[KEPT][2];
#pragma unroll
    for (u32 k = 0; k < KEPT; k++) {
        u32 i = min(threadIdx.x + k * 256, chunks - 1);
        kept_weights[k][0] = weights[2 * i];
        kept_weights[k][1] = weights[2 * i + 1];
    }
    wait_for_previous();
    Eight kept[KEPT];
#pragma unroll
    for (u32 k = 0; k < KEPT; k++) {
        u32 i = threadIdx.x + k * 256;
        kept[k] = i < chunks ? in[i] : Eight{};
    }
    // Both moments are summed over the values that are there, kept or not.
    auto sum = [&](float mean, bool squared) {
        float total = 0.0f, v[8];
        auto add = [&](const Eight& raw) {
            unpack8(raw, v);
#pragma unroll
            for (int j = 0; j < 8; j++) total += squared ? (v[j] - mean) * (v[j] - mean) : v[j];
        };
#pragma unroll
        for (u32 k = 0; k < KEPT; k++)
            if (threadIdx.x + k * 256 < chunks) add(kept[k]);
        for (u32 i = threadIdx.x + KEPT * 256; i < chunks; i += 256) add(in[i]);
        return block_sum(total, shared);
    };
    float mean = p.is_layer_norm ? sum(0.0f, false) / (float)p.cols : 0.0f;
    float factor = rsqrtf(sum(mean, true) / (float)p.cols + p.eps);
    auto finish = [&](u32 i, const Eight& raw, const float4& low, const float4& high) {
        const float weight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        float v[8], old[8] = {};
        unpack8(raw, v);
        if (p.accumulate) unpack8(out[i], old);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = (v[j] - mean) * factor * weight[j] + old[j];
            if (p.bias) v[j] += p.bias[8 * i + j];
        }
        out[i] = pack8(v);
    };
#pragma unroll
    for (u32 k = 0; k < KEPT; k++) {
        u32 i = threadIdx.x + k * 256;
        if (i < chunks) finish(i, kept[k], kept_weights[k][0], kept_weights[k][1]);
    }
    for (u32 i = threadIdx.x + KEPT * 256; i < chunks; i += 256) finish(i, in[i], weights[2 * i], weights[2 * i + 1]);
}

struct QuantizeParams {
    const StepHeader* step;
    const real* input;   // [tokens, cols]
    const float* weight; // of a norm, or null
    const float* bias;   // or null
    u8* output;          // [tokens, cols], e4m3
    float* scales;       // [tokens]
    u32 cols;
    float eps;
    u32 is_layer_norm;
};

__device__ __forceinline__ float block_max(float x, float* shared) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(NONE, x, distance));
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++) x = fmaxf(x, shared[i]);
    return x;
}

// Gives all chunks of a row to a lambda: those that are kept, then those that are read again each time.
// Written out: an index that is not known when it is compiled would put `kept` into memory.
#define KEPT_CHUNK(use, k) if (threadIdx.x + k * 256 < chunks) use(threadIdx.x + k * 256, kept[k])
#define EACH_CHUNK(use)                                                                \
    do {                                                                               \
        KEPT_CHUNK(use, 0);                                                            \
        KEPT_CHUNK(use, 1);                                                            \
        KEPT_CHUNK(use, 2);                                                            \
        KEPT_CHUNK(use, 3);                                                            \
        for (u32 i = threadIdx.x + KEPT * 256; i < chunks; i += 256) use(i, in[i]);    \
    } while (0)

// One block a row: normed, if there is a norm, and rounded to e4m3 such that its largest value is 448.
KERNEL __launch_bounds__(256) quantize_rows(const QuantizeParams p) {
    __shared__ float shared[8];
    allow_next();
    wait_for_previous();
    u32 row = blockIdx.x, chunks = p.cols / 8;
    if (row >= p.step->num_tokens) return;
    const Eight* in = reinterpret_cast<const Eight*>(p.input + (u64)row * p.cols);
    constexpr u32 KEPT = 4;
    Eight kept[KEPT];
#pragma unroll
    for (u32 k = 0; k < KEPT; k++) {
        u32 i = threadIdx.x + k * 256;
        kept[k] = i < chunks ? in[i] : Eight{};
    }
    float mean = 0.0f, factor = 1.0f;
    if (p.weight) {
        float total = 0.0f;
        if (p.is_layer_norm) {
            auto add = [&](u32, const Eight& raw) {
                float v[8];
                unpack8(raw, v);
#pragma unroll
                for (int j = 0; j < 8; j++) total += v[j];
            };
            EACH_CHUNK(add);
            mean = block_sum(total, shared) / (float)p.cols;
            total = 0.0f;
        }
        auto add_squares = [&](u32, const Eight& raw) {
            float v[8];
            unpack8(raw, v);
#pragma unroll
            for (int j = 0; j < 8; j++) total += (v[j] - mean) * (v[j] - mean);
        };
        EACH_CHUNK(add_squares);
        factor = rsqrtf(block_sum(total, shared) / (float)p.cols + p.eps);
    }
    auto values = [&](u32 i, const Eight& raw, float(&v)[8]) {
        unpack8(raw, v);
        if (!p.weight) return;
        const float4* weights = reinterpret_cast<const float4*>(p.weight);
        const float4 low = weights[2 * i], high = weights[2 * i + 1];
        const float weight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = (v[j] - mean) * factor * weight[j] + (p.bias ? p.bias[8 * i + j] : 0.0f);
    };
    float largest = 0.0f;
    auto look = [&](u32 i, const Eight& raw) {
        float v[8];
        values(i, raw, v);
#pragma unroll
        for (int j = 0; j < 8; j++) largest = fmaxf(largest, fabsf(v[j]));
    };
    EACH_CHUNK(look);
    largest = fmaxf(block_max(largest, shared), 1e-20f);
    float inverse = 448.0f / largest;
    if (threadIdx.x == 0) p.scales[row] = largest / 448.0f;
    auto store = [&](u32 i, const Eight& raw) {
        float v[8];
        u8 codes[8];
        values(i, raw, v);
#pragma unroll
        for (int j = 0; j < 8; j++) codes[j] = float_to_e4m3(v[j] * inverse);
        uint2 packed;
        packed.x = codes[0] | codes[1] << 8 | codes[2] << 16 | (u32)codes[3] << 24;
        packed.y = codes[4] | codes[5] << 8 | codes[6] << 16 | (u32)codes[7] << 24;
        *reinterpret_cast<uint2*>(p.output + (u64)row * p.cols + 8 * i) = packed;
    };
    EACH_CHUNK(store);
}

struct OrderParams {
    const StepHeader* step;
    const real* input;  // [rows, cols]
    const u32* columns; // [cols]
    real* output;       // [rows, cols]
    u32 cols;
};

// The columns of a row in the order of a weight's.
KERNEL __launch_bounds__(256) order_columns(const OrderParams p) {
    allow_next();
    wait_for_previous();
    u64 start = (u64)blockIdx.x * p.cols;
    for (u32 i = threadIdx.x; i < p.cols; i += 256) p.output[start + i] = p.input[start + p.columns[i]];
}

struct RopeParams {
    const StepHeader* step;
    const real* projected;   // [tokens, (heads + 2 kv_heads) * head_dim]
    const float* bias;       // as wide as a row of projected, or null
    const float* q_norm;     // [head_dim] or null
    const float* k_norm;     // [head_dim] or null
    const float* inv_freq;   // [rotary_dim / 2] or null
    real* query;             // [tokens, heads * head_dim]
    u8* cache;               // this layer: [blocks][K, V][kv_heads][block_size][head_dim]
    u32 num_heads, num_kv_heads, head_dim, half_rotary;
    u32 interleaved, block_shift, cache_type; // as `store_cache` numbers them
    u32 lane;                                 // whose slots
    float q_eps, k_eps, rope_scale;
};

// One warp a head of q, k or v; four warps a block; blockIdx.x is the token.
KERNEL __launch_bounds__(128) rope_and_cache(const RopeParams p) {
    __shared__ float heads[4][256];
    __shared__ float sines[4][128], cosines[4][128];
    allow_next();
    u32 token = blockIdx.x;
    u32 head = blockIdx.y * 4 + threadIdx.x / 32;
    u32 lane = threadIdx.x % 32;
    if (token >= p.step->num_tokens || head >= p.num_heads + 2 * p.num_kv_heads) return;
    float* values = heads[threadIdx.x / 32];
    float *sine = sines[threadIdx.x / 32], *cosine = cosines[threadIdx.x / 32];
    u64 width = (u64)(p.num_heads + 2 * p.num_kv_heads) * p.head_dim;
    const real* in = p.projected + token * width + (u64)head * p.head_dim;
    bool is_query = head < p.num_heads;
    bool is_value = head >= p.num_heads + p.num_kv_heads;
    // The angles do not depend on the kernel before.
    if (p.inv_freq && !is_value) {
        float position = (float)words(p.step, p.step->positions)[token];
        for (u32 i = lane; i < p.half_rotary; i += 32) sin_cos(position * p.inv_freq[i], &sine[i], &cosine[i]);
    }
    wait_for_previous();
    float squares = 0.0f;
    for (u32 i = lane; i < p.head_dim; i += 32) {
        float x = real_to_float(in[i]);
        if (p.bias) x += p.bias[head * p.head_dim + i];
        values[i] = x;
        squares += x * x;
    }
    const float* weight = is_value ? nullptr : is_query ? p.q_norm : p.k_norm;
    if (weight) {
        float factor = rsqrtf(warp_sum(squares) / (float)p.head_dim + (is_query ? p.q_eps : p.k_eps));
        for (u32 i = lane; i < p.head_dim; i += 32) values[i] *= factor * weight[i];
    }
    __syncwarp();
    if (p.inv_freq && !is_value) {
        for (u32 i = lane; i < p.half_rotary; i += 32) {
            float sin = sine[i] * p.rope_scale, cos = cosine[i] * p.rope_scale;
            u32 first = p.interleaved ? 2 * i : i;
            u32 second = p.interleaved ? 2 * i + 1 : i + p.half_rotary;
            float x = values[first], y = values[second];
            values[first] = x * cos - y * sin;
            values[second] = y * cos + x * sin;
        }
        __syncwarp();
    }
    if (is_query) {
        real* out = p.query + ((u64)token * p.num_heads + head) * p.head_dim;
        for (u32 i = lane; i < p.head_dim; i += 32) out[i] = float_to_real(values[i]);
        return;
    }
    u32 slot = lane_slots(p.step, p.lane)[token];
    u64 block = slot >> p.block_shift;
    u32 offset = slot & ((1u << p.block_shift) - 1);
    u32 plane_head = head - p.num_heads; // k heads, then v heads
    u64 start = (((block * 2 * p.num_kv_heads + plane_head) << p.block_shift) + offset) * p.head_dim;
    for (u32 i = lane; i < p.head_dim; i += 32) store_cache(p.cache, start + i, values[i], p.cache_type);
}

// The same where heads of 64, 128 or 256 are rotated whole, half against half, or not at all: one block a token, which turns each
// angle once, and a thread for eight dimensions of the first half of a head with the same of the second.
KERNEL __launch_bounds__(256) rope_whole_heads(const RopeParams p) {
    __shared__ float sines[128], cosines[128];
    allow_next();
    u32 token = blockIdx.x, half = p.head_dim / 2, lanes = half / 8;
    if (token >= p.step->num_tokens) return;
    // The angles do not depend on the kernel before.
    if (p.inv_freq && threadIdx.x < half) {
        float sin, cos;
        sin_cos((float)words(p.step, p.step->positions)[token] * p.inv_freq[threadIdx.x], &sin, &cos);
        sines[threadIdx.x] = sin * p.rope_scale;
        cosines[threadIdx.x] = cos * p.rope_scale;
    }
    u32 slot = lane_slots(p.step, p.lane)[token];
    __syncthreads();
    wait_for_previous();
    u32 num_heads = p.num_heads + 2 * p.num_kv_heads;
    const real* in = p.projected + (u64)token * num_heads * p.head_dim;
    for (u32 i = threadIdx.x; i < num_heads * lanes; i += 256) {
        u32 head = i / lanes, d = i % lanes * 8, at = head * p.head_dim + d;
        float x[8], y[8];
        unpack8(*reinterpret_cast<const Eight*>(in + at), x);
        unpack8(*reinterpret_cast<const Eight*>(in + at + half), y);
        bool is_query = head < p.num_heads, is_value = head >= p.num_heads + p.num_kv_heads;
        if (p.bias) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                x[j] += p.bias[at + j];
                y[j] += p.bias[at + half + j];
            }
        }
        const float* weight = is_value ? nullptr : is_query ? p.q_norm : p.k_norm;
        if (weight) {
            float squares = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) squares += x[j] * x[j] + y[j] * y[j];
            // The lanes of a head are neighbours, and all of them are here.
            u32 mask = ((1u << lanes) - 1) << (threadIdx.x % 32 / lanes * lanes);
            for (u32 distance = lanes / 2; distance > 0; distance /= 2) squares += __shfl_xor_sync(mask, squares, distance);
            float factor = rsqrtf(squares / (float)p.head_dim + (is_query ? p.q_eps : p.k_eps));
#pragma unroll
            for (int j = 0; j < 8; j++) {
                x[j] *= factor * weight[d + j];
                y[j] *= factor * weight[d + half + j];
            }
        }
        if (p.inv_freq && !is_value) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float sin = sines[d + j], cos = cosines[d + j], old = x[j];
                x[j] = old * cos - y[j] * sin;
                y[j] = y[j] * cos + old * sin;
            }
        }
        if (is_query) {
            real* out = p.query + ((u64)token * p.num_heads + head) * p.head_dim + d;
            *reinterpret_cast<Eight*>(out) = pack8(x);
            *reinterpret_cast<Eight*>(out + half) = pack8(y);
        } else {
            u64 block = slot >> p.block_shift;
            u32 offset = slot & ((1u << p.block_shift) - 1), plane_head = head - p.num_heads;
            u64 start = (((block * 2 * p.num_kv_heads + plane_head) << p.block_shift) + offset) * p.head_dim + d;
            store_cache_8(p.cache, start, x, p.cache_type);
            store_cache_8(p.cache, start + half, y, p.cache_type);
        }
    }
}

struct ActivateParams {
    const real* projected; // [rows, 2 * width]: gate, then up
    const float* bias;     // [2 * width] or null
    real* output;          // [rows, width]
    u32 rows, width, activation;
};

KERNEL __launch_bounds__(256) gated_activation(const ActivateParams p) {
    allow_next();
    wait_for_previous();
    u64 count = (u64)p.rows * p.width / 8;
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < count; i += (u64)gridDim.x * 256) {
        u32 row = (u32)(i / (p.width / 8)), col = (u32)(i % (p.width / 8)) * 8;
        const real* in = p.projected + (u64)row * 2 * p.width + col;
        float gate[8], up[8];
        unpack8(*reinterpret_cast<const Eight*>(in), gate);
        unpack8(*reinterpret_cast<const Eight*>(in + p.width), up);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (p.bias) {
                gate[j] += p.bias[col + j];
                up[j] += p.bias[p.width + col + j];
            }
            gate[j] = activate_gate(p.activation, gate[j], up[j]);
        }
        *reinterpret_cast<Eight*>(p.output + (u64)row * p.width + col) = pack8(gate);
    }
}

struct ActivateRowsParams {
    real* values;
    u64 count; // a multiple of 8
    u32 activation;
};

// In place, for products without a gate.
KERNEL __launch_bounds__(256) activate_rows(const ActivateRowsParams p) {
    allow_next();
    wait_for_previous();
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < p.count / 8; i += (u64)gridDim.x * 256) {
        Eight* at = reinterpret_cast<Eight*>(p.values + 8 * i);
        float v[8];
        unpack8(*at, v);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = activate(p.activation, v[j]);
        *at = pack8(v);
    }
}

struct BiasParams {
    real* values;      // [rows, width]
    const float* bias; // [width]
    u32 rows, width;
};

KERNEL __launch_bounds__(256) add_bias(const BiasParams p) {
    allow_next();
    wait_for_previous();
    u64 count = (u64)p.rows * p.width;
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < count; i += (u64)gridDim.x * 256)
        p.values[i] = float_to_real(real_to_float(p.values[i]) + p.bias[i % p.width]);
}

struct SoftcapParams {
    float* values;
    u64 count;
    float cap;
};

KERNEL __launch_bounds__(256) softcap(const SoftcapParams p) {
    allow_next();
    wait_for_previous();
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < p.count; i += (u64)gridDim.x * 256)
        p.values[i] = apply_softcap(p.values[i], p.cap);
}

struct KeepParams {
    const StepHeader* step;
    uint4* values; // [rows, row_units]
    u32 row_units;
};

// The rows whose logits are wanted move to the front. A thread has the same columns of all rows and reads some before it writes
// any: a row goes to the place of one that is not needed any more, because it comes before it.
KERNEL __launch_bounds__(128) keep_rows(const KeepParams p) {
    constexpr u32 AT_ONCE = 8;
    allow_next();
    u32 unit = blockIdx.x * 128 + threadIdx.x, count = p.step->num_logit_rows;
    const u32* rows = words(p.step, p.step->logit_rows);
    wait_for_previous();
    if (unit >= p.row_units) return;
    for (u32 first = 0; first < count; first += AT_ONCE) {
        uint4 kept[AT_ONCE];
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++) kept[j] = p.values[(u64)rows[min(first + j, count - 1)] * p.row_units + unit];
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++)
            if (first + j < count) p.values[(u64)(first + j) * p.row_units + unit] = kept[j];
    }
}

struct MoveParams {
    const uint4* from;
    uint4* to;
    const u32* pairs; // (from, to)
    u32 count, block_units;
};

// Whole blocks of one layer; either side may be pinned host memory.
KERNEL __launch_bounds__(256) move_blocks(const MoveParams p) {
    allow_next();
    wait_for_previous();
    // Several at once, because a swap has few threads and a long way.
    constexpr u32 AT_ONCE = 4;
    u64 total = (u64)p.count * p.block_units, stride = (u64)gridDim.x * 256;
    for (u64 first = (u64)blockIdx.x * 256 + threadIdx.x; first < total; first += AT_ONCE * stride) {
        uint4 units[AT_ONCE];
        u64 to[AT_ONCE];
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++) {
            u64 i = min(first + j * stride, total - 1);
            u32 pair = (u32)(i / p.block_units), unit = (u32)(i % p.block_units);
            units[j] = p.from[(u64)p.pairs[2 * pair] * p.block_units + unit];
            to[j] = (u64)p.pairs[2 * pair + 1] * p.block_units + unit;
        }
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++)
            if (first + j * stride < total) p.to[to[j]] = units[j];
    }
}

struct FillParams {
    u16* output; // f32 if the format says so
    u64 count, seed;
    float step, largest;
    u32 format; // 0 f32, 1 f16, 2 bf16
};

// Random weights, bit for bit as the host makes them: eight values from each number of a splitmix64 sequence.
KERNEL __launch_bounds__(256) fill_random(const FillParams p) {
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i * 8 < p.count; i += (u64)gridDim.x * 256) {
        u64 random = p.seed + (i + 1) * 0x9e3779b97f4a7c15ull;
        random = (random ^ random >> 30) * 0xbf58476d1ce4e5b9ull;
        random = (random ^ random >> 27) * 0x94d049bb133111ebull;
        random ^= random >> 31;
        for (u32 j = 0; j < 8 && i * 8 + j < p.count; j++) {
            float value = __fsub_rn(__fmul_rn((float)(u8)(random >> 8 * j), p.step), p.largest);
            store_cache(reinterpret_cast<u8*>(p.output), i * 8 + j, value, p.format);
        }
    }
}

struct FillBytesParams {
    u8* output;
    u64 first, count; // bytes before these in the sequence; a multiple of eight
    u64 seed;
    u32 block_bytes, header_bytes, mask, reserved;
    u64 header_low, header_high; // sixteen bytes
};

// Random bytes of a block format, as the host makes them: the first ones of each block are given.
KERNEL __launch_bounds__(256) fill_bytes(const FillBytesParams p) {
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i * 8 < p.count; i += (u64)gridDim.x * 256) {
        u64 random = p.seed + (p.first / 8 + i + 1) * 0x9e3779b97f4a7c15ull;
        random = (random ^ random >> 30) * 0xbf58476d1ce4e5b9ull;
        random = (random ^ random >> 27) * 0x94d049bb133111ebull;
        random ^= random >> 31;
        for (u32 j = 0; j < 8 && i * 8 + j < p.count; j++) {
            u32 at = (u32)((p.first + i * 8 + j) % p.block_bytes);
            p.output[i * 8 + j] = at < p.header_bytes ? (u8)((at < 8 ? p.header_low : p.header_high) >> 8 * (at % 8))
                                                       : (u8)(random >> 8 * j) & (u8)p.mask;
        }
    }
}

struct ReadParams {
    const uint4* from;
    u64 count;
    u32* sink;
};

// Reads everything once and keeps nothing: how fast the memory is.
KERNEL __launch_bounds__(512) read_memory(const ReadParams p) {
    constexpr u32 AHEAD = 8;
    u64 stride = (u64)gridDim.x * 512;
    u32 mixed = 0;
    for (u64 first = (u64)blockIdx.x * 512 + threadIdx.x; first < p.count; first += AHEAD * stride) {
        uint4 units[AHEAD];
#pragma unroll
        for (u32 j = 0; j < AHEAD; j++) units[j] = p.from[min(first + j * stride, p.count - 1)];
#pragma unroll
        for (u32 j = 0; j < AHEAD; j++) mixed ^= units[j].x ^ units[j].y ^ units[j].z ^ units[j].w;
    }
    // Hardly ever, but the compiler does not know.
    if (mixed == 0x12345678u) *p.sink = mixed;
}
