// What is done with weights as their file has them: the embedding lookup, and for formats that are not packed (`packed.cu`) the
// conversion to what activations are, for large products, and products with a few rows of activations: one warp a weight row, which is read
// once and multiplied with all the activation rows. Those that are packed are packed here.
//
// FORMAT is defined by the caller, and PACKED_BITS, 0 if it is not packed; the numbers are those of `WeightFormat`. A lane takes
// 8 consecutive values at a time (`Chunk`), two chunks in flight: on an H200 more were slower, not faster.

enum { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL };
// 22 is e4m3, whose scales lie beside it: it is only converted here, products are those of `skinny.cu` and of libraries.

#if FORMAT == 1 || FORMAT == 2
struct Chunk {
    uint4 raw;
    __device__ __forceinline__ void load(const u8* row, u32 i) {
        // Weights are read once a step: leave the caches to the activations.
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w) : "l"(row + 2 * (u64)i));
    }
    __device__ __forceinline__ void decode(float (&v)[8]) const {
#if FORMAT == 2
        unpack_bf16(raw, v);
#else
        u32 w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            v[2 * j] = f16_to_float((u16)w[j]);
            v[2 * j + 1] = f16_to_float((u16)(w[j] >> 16));
        }
#endif
    }
};
#elif FORMAT == 22
struct Chunk {
    uint2 raw;
    __device__ __forceinline__ void load(const u8* row, u32 i) { raw = *reinterpret_cast<const uint2*>(row + i); }
    __device__ __forceinline__ void decode(float (&v)[8]) const {
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = e4m3_to_float((u8)((j < 4 ? raw.x : raw.y) >> j % 4 * 8));
    }
};
#elif FORMAT == 0
struct Chunk {
    float4 a, b;
    __device__ __forceinline__ void load(const u8* row, u32 i) {
        a = *reinterpret_cast<const float4*>(row + 4 * (u64)i);
        b = *reinterpret_cast<const float4*>(row + 4 * (u64)i + 16);
    }
    __device__ __forceinline__ void decode(float (&v)[8]) const {
        v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w;
        v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
    }
};
#else
__device__ __forceinline__ float f16_at(const u8* p) { return f16_to_float((u16)(p[0] | p[1] << 8)); }

// The block formats are decoded from where they lie. Eight consecutive values never leave a sub-block.
struct Chunk {
    const u8* block;
    u32 at; // index within the block
    __device__ __forceinline__ void load(const u8* row, u32 i) {
        block = row + (u64)(i / BLOCK_LEN) * BLOCK_BYTES;
        at = i % BLOCK_LEN;
    }
    __device__ __forceinline__ void decode(float (&v)[8]) const {
#if FORMAT == 3 || FORMAT == 4 || FORMAT == 5 || FORMAT == 6 || FORMAT == 13
        // 32 values: low nibbles of 16 bytes, then the high ones.
        float d = f16_at(block);
#if FORMAT == 4 || FORMAT == 6
        float m = f16_at(block + 2);
#endif
#if FORMAT == 5 || FORMAT == 6
        const u8* fifth = block + (FORMAT == 5 ? 2 : 4);
        u32 high = fifth[0] | fifth[1] << 8 | fifth[2] << 16 | (u32)fifth[3] << 24;
#endif
        const u8* q = block + (BLOCK_BYTES - 16) + at % 16;
        u32 shift = at >= 16 ? 4 : 0;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            int nibble = q[j] >> shift & 15;
#if FORMAT == 3
            v[j] = d * (float)(nibble - 8);
#elif FORMAT == 4
            v[j] = d * (float)nibble + m;
#elif FORMAT == 5
            v[j] = d * (float)((nibble | (int)(high >> (at + j) & 1) << 4) - 16);
#elif FORMAT == 6
            v[j] = d * (float)(nibble | (int)(high >> (at + j) & 1) << 4) + m;
#else
            // The table of IQ4_NL as two words of eight bytes.
            const u64 low = 0xf6eaddcfbfad9881ull, up = 0x7159453526190d01ull;
            v[j] = d * (float)(signed char)(u8)((nibble < 8 ? low : up) >> 8 * (nibble & 7));
#endif
        }
#elif FORMAT == 7
        float d = f16_at(block);
#pragma unroll
        for (u32 j = 0; j < 8; j++) v[j] = d * (float)(signed char)block[2 + at + j];
#elif FORMAT == 8
        float d = f16_at(block + 80), m = f16_at(block + 82);
        u8 sub = block[at / 16];
        const u8* q = block + 16 + at / 128 * 32 + at % 32;
        u32 shift = 2 * (at % 128 / 32);
#pragma unroll
        for (u32 j = 0; j < 8; j++) v[j] = d * (float)(sub & 15) * (float)(q[j] >> shift & 3) - m * (float)(sub >> 4);
#elif FORMAT == 9
        u32 s = at / 16;
        int scale = (block[96 + s % 8] >> (4 * (s / 8)) & 15) | (block[104 + s % 4] >> (2 * (s / 4)) & 3) << 4;
        float d = f16_at(block + 108) * (float)(scale - 32);
        const u8* q = block + 32 + at / 128 * 32 + at % 32;
        u32 shift = 2 * (at % 128 / 32);
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            int high = block[at % 32 + j] >> (at / 32) & 1;
            v[j] = d * (float)((q[j] >> shift & 3) - (high ? 0 : 4));
        }
#elif FORMAT == 10 || FORMAT == 11
        float d = f16_at(block), m = f16_at(block + 2);
        const u8* scales = block + 4;
        u32 s = at / 32;
        u32 scale, minimum;
        if (s < 4) {
            scale = scales[s] & 63;
            minimum = scales[s + 4] & 63;
        } else {
            scale = (scales[s + 4] & 15) | (scales[s - 4] >> 2 & 48);
            minimum = scales[s + 4] >> 4 | (scales[s] >> 2 & 48);
        }
        const u8* q = block + (FORMAT == 10 ? 16 : 48) + at / 64 * 32 + at % 32;
        u32 shift = at % 64 >= 32 ? 4 : 0;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            u32 value = q[j] >> shift & 15;
#if FORMAT == 11
            value |= (block[16 + at % 32 + j] >> (at / 32) & 1) << 4;
#endif
            v[j] = d * (float)scale * (float)value - m * (float)minimum;
        }
#elif FORMAT == 12
        float d = f16_at(block + 208) * (float)(signed char)block[192 + at / 16];
        const u8* low = block + at / 128 * 64 + at % 64;
        const u8* high = block + 128 + at / 128 * 32 + at % 32;
        u32 low_shift = at % 128 >= 64 ? 4 : 0, high_shift = 2 * (at % 128 / 32);
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            int q = (low[j] >> low_shift & 15) | (high[j] >> high_shift & 3) << 4;
            v[j] = d * (float)(q - 32);
        }
#endif
    }
};
#endif

#ifndef EXPERTS // which need no more

// One block a token.
KERNEL __launch_bounds__(128) embed(const EmbedParams p) {
    allow_next();
    wait_for_previous();
    u32 number;
    if (!embedded_row(p, number)) return;
    const u8* row = p.weight + (u64)number * p.unit_bytes;
    for (u32 i = threadIdx.x * 8; i < p.cols; i += 128 * 8) {
        Chunk chunk;
        float v[8];
        chunk.load(row, i);
        chunk.decode(v);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] *= p.scale;
        Eight* out = reinterpret_cast<Eight*>(p.output + (u64)blockIdx.x * p.cols + i);
        if (p.adds_positions) {
            float before[8];
            unpack8(*out, before);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] += before[j];
        }
        *out = pack8(v);
    }
}

#if PACKED_BITS == 0
struct ConvertParams {
    const u8* weight;
    u64 row_bytes;
    real* output; // [num_rows, cols]
    u32 num_rows, cols;
    u32 first_row, across; // of e4m3: the number of the first row; blocks of 128 by 128 side by side, or 0: scales of rows
    const float* scales;
};

KERNEL __launch_bounds__(128) convert(const ConvertParams p) {
    allow_next();
    wait_for_previous();
    const u8* row = p.weight + blockIdx.x * p.row_bytes;
    for (u32 i = threadIdx.x * 8; i < p.cols; i += 128 * 8) {
        Chunk chunk;
        float v[8];
        chunk.load(row, i);
        chunk.decode(v);
#if FORMAT == 22
        u32 number = p.first_row + blockIdx.x;
        float scale = p.scales[p.across ? number / 128 * p.across + i / 128 : number];
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] *= scale;
#endif
        *reinterpret_cast<Eight*>(p.output + (u64)blockIdx.x * p.cols + i) = pack8(v);
    }
}

#if (FORMAT != 1 || defined(F32_ACTIVATIONS)) && FORMAT != 22 // f16 else becomes bf16
struct ProductParams {
    const u8* weight; // [num_rows, cols] in this format
    u64 row_bytes;
    const real* input; // [m, cols]
    const float* bias; // [num_rows] or null
    void* output;      // [m, output_stride], activations or f32
    u32 num_rows, cols, m, output_stride;
    u32 accumulate, is_f32;
    float softcap;     // 0 is none
    u32 activation;    // gated only
};

// The dot products of weight rows at `row` and (GATED) `row + num_rows` with M activation rows, in all lanes.
template <int M, int WEIGHTS>
__device__ __forceinline__ void dot(const ProductParams& p, const u8* (&rows)[WEIGHTS], float (&sum)[WEIGHTS][M]) {
    u32 lane = threadIdx.x % 32;
    const real* inputs[M];
#pragma unroll
    for (int m = 0; m < M; m++) inputs[m] = p.input + (u64)min((u32)m, p.m - 1) * p.cols;
    constexpr int AHEAD = 2 / WEIGHTS;
    // The weights of the first round do not depend on the kernel before.
    Chunk chunks[AHEAD][WEIGHTS];
    u32 i = lane * 8;
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
#pragma unroll
        for (int w = 0; w < WEIGHTS; w++)
            if (i + a * 256 < p.cols) chunks[a][w].load(rows[w], i + a * 256);
    wait_for_previous();
    while (i < p.cols) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (i + a * 256 >= p.cols) break;
            float weight[WEIGHTS][8];
#pragma unroll
            for (int w = 0; w < WEIGHTS; w++) chunks[a][w].decode(weight[w]);
#pragma unroll
            for (int m = 0; m < M; m++) {
                float x[8];
                unpack8(*reinterpret_cast<const Eight*>(inputs[m] + i + a * 256), x);
#pragma unroll
                for (int w = 0; w < WEIGHTS; w++)
#pragma unroll
                    for (int j = 0; j < 8; j++) sum[w][m] = fmaf(weight[w][j], x[j], sum[w][m]);
            }
        }
        i += AHEAD * 256;
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
#pragma unroll
            for (int w = 0; w < WEIGHTS; w++)
                if (i + a * 256 < p.cols) chunks[a][w].load(rows[w], i + a * 256);
    }
#pragma unroll
    for (int w = 0; w < WEIGHTS; w++)
#pragma unroll
        for (int m = 0; m < M; m++) sum[w][m] = warp_sum(sum[w][m]);
}

template <int M>
__device__ __forceinline__ void product(const ProductParams& p) {
    allow_next();
    u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= p.num_rows) return;
    float sum[1][M] = {};
    const u8* rows[1] = {p.weight + row * p.row_bytes};
    dot<M, 1>(p, rows, sum);
    if (threadIdx.x % 32 != 0) return;
    float bias = p.bias ? p.bias[row] : 0.0f;
#pragma unroll
    for (int m = 0; m < M; m++) {
        if (m >= p.m) break;
        u64 at = (u64)m * p.output_stride + row;
        float result = sum[0][m] + bias;
        if (p.is_f32) {
            reinterpret_cast<float*>(p.output)[at] = apply_softcap(result, p.softcap);
        } else {
            real* output = reinterpret_cast<real*>(p.output);
            output[at] = float_to_real(p.accumulate ? real_to_float(output[at]) + result : result);
        }
    }
}

// `num_rows` is that of the gate; the up rows follow.
template <int M>
__device__ __forceinline__ void gated(const ProductParams& p) {
    allow_next();
    u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= p.num_rows) return;
    float sum[2][M] = {};
    const u8* rows[2] = {p.weight + row * p.row_bytes, p.weight + (u64)(row + p.num_rows) * p.row_bytes};
    dot<M, 2>(p, rows, sum);
    if (threadIdx.x % 32 != 0) return;
    float gate_bias = p.bias ? p.bias[row] : 0.0f, up_bias = p.bias ? p.bias[p.num_rows + row] : 0.0f;
#pragma unroll
    for (int m = 0; m < M; m++) {
        if (m >= p.m) break;
        float result = activate_gate(p.activation, sum[0][m] + gate_bias, sum[1][m] + up_bias);
        reinterpret_cast<real*>(p.output)[(u64)m * p.output_stride + row] = float_to_real(result);
    }
}

// Blocks that fit a multiprocessor without spilling registers.
#ifdef F32_ACTIVATIONS
constexpr int BLOCKS = 3;
#else
constexpr int BLOCKS = 4;
#endif

KERNEL __launch_bounds__(128) product_1(const ProductParams p) { product<1>(p); }
KERNEL __launch_bounds__(128, 8) product_2(const ProductParams p) { product<2>(p); }
KERNEL __launch_bounds__(128, BLOCKS) product_4(const ProductParams p) { product<4>(p); }
KERNEL __launch_bounds__(128, BLOCKS) product_8(const ProductParams p) { product<8>(p); }
KERNEL __launch_bounds__(128) gated_1(const ProductParams p) { gated<1>(p); }
KERNEL __launch_bounds__(128) gated_2(const ProductParams p) { gated<2>(p); }
KERNEL __launch_bounds__(128, BLOCKS) gated_4(const ProductParams p) { gated<4>(p); }
KERNEL __launch_bounds__(128, BLOCKS) gated_8(const ProductParams p) { gated<8>(p); }
#endif
#else
// The integer at a column of a row, from 0 on.
__device__ __forceinline__ u32 quantum(const u8* row, u32 column) {
    const u8* block = row + (u64)(column / BLOCK_LEN) * BLOCK_BYTES;
    u32 at = column % BLOCK_LEN;
#if FORMAT == 7
    return block[2 + at] ^ 128;
#elif FORMAT == 10 || FORMAT == 11
    u32 q = block[(FORMAT == 10 ? 16 : 48) + at / 64 * 32 + at % 32] >> (at % 64 >= 32 ? 4 : 0) & 15;
    return FORMAT == 11 ? q | (block[16 + at % 32] >> (at / 32) & 1) << 4 : q;
#elif FORMAT == 12
    u32 low = block[at / 128 * 64 + at % 64] >> (at % 128 >= 64 ? 4 : 0) & 15;
    return low | (block[128 + at / 128 * 32 + at % 32] >> 2 * (at % 128 / 32) & 3) << 4;
#else
    u32 q = block[BLOCK_BYTES - 16 + at % 16] >> (at >= 16 ? 4 : 0) & 15;
    const u8* fifth = block + (FORMAT == 5 ? 2 : 4);
    return FORMAT == 5 || FORMAT == 6 ? q | (fifth[at / 8] >> at % 8 & 1) << 4 : q;
#endif
}

// What the integers there are multiplied with, and what is added then: for 6 and 8 bits nothing, their zero is known.
__device__ __forceinline__ void scales(const u8* row, u32 column, float* scale, float* minimum) {
    const u8* block = row + (u64)(column / BLOCK_LEN) * BLOCK_BYTES;
    *minimum = 0.0f;
#if FORMAT == 10 || FORMAT == 11
    const u8* packed = block + 4;
    u32 s = column % BLOCK_LEN / 32;
    u32 times = s < 4 ? packed[s] & 63 : (packed[s + 4] & 15) | (packed[s - 4] >> 2 & 48);
    u32 less = s < 4 ? packed[s + 4] & 63 : packed[s + 4] >> 4 | (packed[s] >> 2 & 48);
    *scale = f16_at(block) * (float)times;
    *minimum = -f16_at(block + 2) * (float)less;
#elif FORMAT == 12
    *scale = f16_at(block + 208) * (float)(signed char)block[192 + column % BLOCK_LEN / 16];
#else
    *scale = f16_at(block);
    if (FORMAT == 3) *minimum = -8.0f * *scale;
    if (FORMAT == 5) *minimum = -16.0f * *scale;
    if (FORMAT == 4 || FORMAT == 6) *minimum = f16_at(block + 2);
#endif
}

__device__ __forceinline__ u16 nearest_f16(float x) { return float_to_f16(fminf(fmaxf(x, -65504.0f), 65504.0f)); }

struct PackParams {
    const u8* source; // [num_rows, cols] in this format
    u64 row_bytes;
    u8* target;       // tiles of 16 rows of records, as in `packed.cu`
    u64 tile_bytes;
    u32 first_row, num_rows, cols; // where in the target the source begins
};

// One block a row; a thread makes the eight values that a lane takes at a time.
KERNEL __launch_bounds__(128) pack(const PackParams p) {
    constexpr u32 BITS = PACKED_BITS, HIGH = HIGH_BITS, RECORD = record_bytes(BITS), SCALES = scales_start(BITS);
    allow_next();
    wait_for_previous();
    const u8* source = p.source + blockIdx.x * p.row_bytes;
    u32 row = p.first_row + blockIdx.x, half = row / 8 % 2;
    u8* tile = p.target + row / 16 * p.tile_bytes;
    // Whole records: beyond the last column all is zero.
    for (u32 i = threadIdx.x; i < (p.cols + 63) / 64 * 8; i += 128) {
        u32 group = i / 4, part = i % 4, in_record = group % 2, lane = row % 8 * 4 + part, low = 0, high = 0;
        u8* record = tile + (u64)(group / 2) * RECORD;
        bool is_there = group * 32 < p.cols;
        for (u32 j = 0; j < 8; j++) {
            u32 column = group * 32 + j / 2 * 8 + part * 2 + j % 2;
            u32 q = is_there ? quantum(source, column) : 0;
            u32 pair = j / 2, second = j % 2;
            low |= (q & 15) << 4 * (pair + 4 * second);
            if (BITS == 5) high |= (q >> 4) << (pair + 4 * second);
            if (BITS == 6) high |= (q >> 4) << (2 * pair + 8 * second);
            if (BITS == 8) high |= (q >> 4) << 4 * (pair + 4 * second);
        }
        *reinterpret_cast<u32*>(record + in_record * 256 + lane * 8 + half * 4) = low;
        if (BITS == 5) record[HIGH + in_record * 64 + lane * 2 + half] = (u8)high;
        if (BITS == 6) *reinterpret_cast<u16*>(record + HIGH + in_record * 128 + lane * 4 + half * 2) = (u16)high;
        if (BITS == 8) *reinterpret_cast<u32*>(record + HIGH + in_record * 256 + lane * 8 + half * 4) = high;
        if (part != 0) continue;
        u8* to = record + SCALES + in_record * (BITS == 8 ? 32 : 64) + row % 8 * (BITS == 8 ? 4 : 8);
        for (u32 of = 0; of < (BITS == 6 ? 2 : 1); of++) {
            float scale = 0.0f, minimum = 0.0f;
            if (is_there) scales(source, group * 32 + of * 16, &scale, &minimum);
            if (BITS <= 5) *reinterpret_cast<u32*>(to + half * 4) = nearest_f16(scale) | (u32)nearest_f16(minimum) << 16;
            else *reinterpret_cast<u16*>(to + of * 4 + half * 2) = nearest_f16(scale);
        }
    }
}
#endif

#endif
