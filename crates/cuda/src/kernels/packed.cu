// Products of quantised weights with some rows of activations (tokens), on tensor cores (mma.m16n8k16). BITS of a weight and
// TILES of eight tokens that a block takes are defined by the caller; where there are more tokens, neighbouring blocks take the
// next ones, out of the L2.
//
// Weights are packed when they are loaded (`pack` in `product.cu`), into records of 16 rows by 64 columns, one behind the other
// along a row: first four bits of every value, in the order in which the lanes of a warp want them, then the bits above,
// then the scales (and minima, of 4 and 5 bits) of each 32 columns, of 6 bits those of each 16.
//
// A value of up to seven bits becomes a bf16 by placing it into the mantissa of 128: the product is then that of (128 + q), exact,
// and the excess is 128 times the sum of the activations, which is a product with ones. Values of eight bits are two nibbles, of
// which the high one goes into the mantissa of 2048. So nothing is rounded but the activations, and scales are applied in f32.
// Of 6 and 8 bits zero is 32 and 128: the excess is 160, and 2048 + 128 + 128.
//
// The warps of a block share the columns of ROW_TILES of 16 rows, gate and up interleaved, and join their sums at the end. Records
// and the activations come through shared memory, in a ring of each warp's own: on their way from the L2 they would
// keep a warp waiting.

// Bytes of the activations in a stage of the ring: of 64 columns.
__device__ constexpr u32 INPUTS = TILES * 8 * 128;
// Stages of the ring: so many that as many blocks fit a multiprocessor as its registers allow.
__device__ constexpr u32 stages(int row_tiles) { return TILES == 1 && (row_tiles == 1 || BITS == 4) ? 4 : 3; }

extern __shared__ __align__(128) u8 ring[];

__device__ __forceinline__ void copy_weight(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(read_once()));
}

// Zeros if it is not there.
__device__ __forceinline__ void copy_input(u32 to, const void* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0));
}

__device__ __forceinline__ void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Where 16 bytes of activations are in a stage, such that those of eight tokens are in different banks.
__device__ __forceinline__ u32 input_slot(u32 token, u32 chunk) { return token * 128 + ((chunk ^ token % 8) << 4); }

// The activations of eight tokens by 32 columns, as the tensor core takes them: pairs of columns, eight further each.
__device__ __forceinline__ uint4 inputs_in(u32 inputs, u32 token, u32 group) {
    u32 lane = threadIdx.x % 32, from = inputs + input_slot(token + lane % 8, group * 4 + lane / 8);
    uint4 x;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from) : "memory");
    return x;
}

// sums += scale * (values x inputs) + minimum * (ones x inputs), for 32 columns of some tiles of rows. Without minima the tensor core
// takes the excess off itself.
template <int ROW_TILES>
__device__ __forceinline__ void use_group(const u8* stage, u32 group, float (&sums)[TILES][ROW_TILES][4]) {
    // Pairs of bf16: one, or minus the excess.
    constexpr u32 ONES = HAS_MINIMA ? 0x3f803f80u : BITS == 6 ? 0xc320c320u : 0xc510c510u;
    constexpr int PARTS = BITS == 6 ? 2 : 1;
    u32 w[ROW_TILES][2][4], above[ROW_TILES][2][4];
    float scale[ROW_TILES][PARTS][2], minimum[ROW_TILES][PARTS][2];
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
        Group columns;
        columns.load(stage + r * RECORD, group);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            columns.place(half, w[r][half]);
            if (BITS == 8) columns.place_high(half, above[r][half]);
#pragma unroll
            for (int part = 0; part < PARTS; part++)
                columns.scale(part, half, scale[r][part][half], minimum[r][part][half]);
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        const uint4 x = inputs_in((u32)__cvta_generic_to_shared(stage) + ROW_TILES * RECORD, t * 8, group);
        float totals[PARTS][4] = {};
        multiply_add(totals[0], ONES, ONES, ONES, ONES, x.x, x.y);
        multiply_add(totals[PARTS - 1], ONES, ONES, ONES, ONES, x.z, x.w);
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            const u32(&a)[4] = w[r][0], (&b)[4] = w[r][1];
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                float product[4];
#pragma unroll
                for (int j = 0; j < 4; j++) product[j] = HAS_MINIMA ? 0.0f : totals[part][j];
                if (PARTS == 1 || part == 0) multiply_add(product, a[0], b[0], a[1], b[1], x.x, x.y);
                if (PARTS == 1 || part == 1) multiply_add(product, a[2], b[2], a[3], b[3], x.z, x.w);
                if (BITS == 8) {
                    const u32(&c)[4] = above[r][0], (&d)[4] = above[r][1];
                    multiply_add(product, c[0], d[0], c[1], d[1], x.x, x.y);
                    multiply_add(product, c[2], d[2], c[3], d[3], x.z, x.w);
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float& sum = sums[t][r][j];
                    if (HAS_MINIMA) sum = fmaf(minimum[r][part][j / 2], totals[part][j % 2], sum);
                    sum = fmaf(scale[r][part][j / 2], product[j], sum);
                }
            }
        }
    }
}

// A lane's part of the sums: rows lane / 4 and lane / 4 + 8 of each tile of rows, tokens 2 * (lane % 4) and the next of each tile
// of tokens.
template <int WARPS, int ROW_TILES>
__device__ __forceinline__ void multiply(
    const ProductParams& p, u32 first_token, const u8* (&tiles)[ROW_TILES], float (&sums)[TILES][ROW_TILES][4]) {
    constexpr u32 STAGES = stages(ROW_TILES), STAGE = ROW_TILES * RECORD + INPUTS, CHUNKS = RECORD / 16;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_own = ((p.cols + 63) / 64 + WARPS - 1 - warp) / WARPS;
    u8* own = ring + warp * STAGES * STAGE;
    u32 own_at = (u32)__cvta_generic_to_shared(own);
    // What is asked for next, by this lane: its chunks of 16 bytes of each record, and (eight lanes per token) of the activations.
    const u8* weights[ROW_TILES];
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) weights[r] = tiles[r] + warp * RECORD + lane * 16;
    u32 column = warp * 64 + lane % 8 * 8, token = first_token + lane / 8;
    const bf16* inputs = p.input + (u64)token * p.cols + column;
    auto load_weights = [&](u32 stage) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
            for (u32 start = 0; start < CHUNKS; start += 32)
                if (start + 32 <= CHUNKS || start + lane < CHUNKS)
                    copy_weight(own_at + stage + r * RECORD + (start + lane) * 16, weights[r] + start * 16);
            weights[r] += WARPS * RECORD;
        }
    };
    auto load_inputs = [&](u32 stage) {
#pragma unroll
        for (u32 start = 0; start < TILES * 8; start += 4)
            if (token + start < p.m) {
                u32 to = own_at + stage + ROW_TILES * RECORD + input_slot(start + lane / 8, lane % 8);
                copy_input(to, inputs + start * p.cols, column < p.cols);
            }
        column += WARPS * 64;
        inputs += WARPS * 64;
    };
#pragma unroll
    for (u32 s = 0; s < STAGES - 1; s++)
        if (s < num_own) load_weights(s * STAGE);
    wait_for_previous();
#pragma unroll
    for (u32 s = 0; s < STAGES - 1; s++) {
        if (s < num_own) load_inputs(s * STAGE);
        asm volatile("cp.async.commit_group;");
    }
    // Once around the ring at a time, so that its addresses are known.
#pragma unroll 1
    for (u32 i = 0; i < num_own; i += STAGES)
#pragma unroll
        for (u32 s = 0; s < STAGES; s++) {
            if (i + s >= num_own) break;
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
            __syncwarp();
            if (i + s + STAGES - 1 < num_own) {
                load_weights((s + STAGES - 1) % STAGES * STAGE);
                load_inputs((s + STAGES - 1) % STAGES * STAGE);
            }
            asm volatile("cp.async.commit_group;");
#pragma unroll
            for (u32 group = 0; group < 2; group++) use_group<ROW_TILES>(own + s * STAGE, group, sums);
        }
}

template <int WARPS, int ROW_TILES, bool GATED>
__device__ __forceinline__ void product(const ProductParams& p) {
    allow_next();
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 rounds = (p.m + TILES * 8 - 1) / (TILES * 8), first_token = blockIdx.x % rounds * TILES * 8;
    u32 block = blockIdx.x / rounds, num_tiles = (p.num_rows + 15) / 16;
    const u8* tiles[ROW_TILES];
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
        u32 tile = GATED ? block : block * ROW_TILES + r;
        tiles[r] = p.weight + (min(tile, num_tiles - 1) + (GATED && r == 1 ? num_tiles : 0)) * p.tile_bytes;
    }
    float sums[TILES][ROW_TILES][4] = {};
    multiply<WARPS, ROW_TILES>(p, first_token, tiles, sums);
    // All that was asked for is there, so that the ring can be used for something else.
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    auto parts = reinterpret_cast<float4(*)[TILES][ROW_TILES][32]>(ring);
    __syncthreads();
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
            parts[warp][t][r][lane] = make_float4(sums[t][r][0], sums[t][r][1], sums[t][r][2], sums[t][r][3]);
    __syncthreads();
    auto join = [&](u32 r, u32 t, float(&result)[4]) {
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) {
            float4 part = parts[w][t][r][lane];
            result[0] += part.x;
            result[1] += part.y;
            result[2] += part.z;
            result[3] += part.w;
        }
    };
    // A warp takes a tile of rows, or a gate and up, by a tile of tokens.
    constexpr u32 RESULTS = GATED ? 1 : ROW_TILES;
    if (warp < RESULTS * TILES) {
        u32 r = warp / TILES, t = warp % TILES;
        float result[4] = {}, up[4] = {};
        join(r, t, result);
        if (GATED) join(1, t, up);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 token = first_token + t * 8 + lane % 4 * 2 + j % 2, row = (block * RESULTS + r) * 16 + j / 2 * 8 + lane / 4;
            if (token >= p.m || row >= p.num_rows) continue;
            float value = result[j] + (p.bias ? p.bias[row] : 0.0f);
            u64 at = (u64)token * p.output_stride + row;
            bf16* output = reinterpret_cast<bf16*>(p.output);
            if (GATED) {
                float times = up[j] + (p.bias ? p.bias[p.num_rows + row] : 0.0f);
                output[at] = float_to_bf16(activate_gate(p.activation, value, times));
            } else if (p.is_f32) {
                reinterpret_cast<float*>(p.output)[at] = apply_softcap(value, p.softcap);
            } else {
                output[at] = float_to_bf16(p.accumulate ? bf16_to_float(output[at]) + value : value);
            }
        }
    }
}

// Warps and tiles of rows, and how many blocks fit a multiprocessor without spilling registers.
#define PRODUCT(NAME, BLOCKS, WARPS, ROW_TILES, GATED) \
    KERNEL __launch_bounds__(WARPS * 32, BLOCKS) NAME(const ProductParams p) { product<WARPS, ROW_TILES, GATED>(p); }

#if !IS_GATED
PRODUCT(packed_product, (TILES == 1 && BITS < 8 ? 3 : 2), 8, 2, false)
// For few rows: of smaller blocks there are more.
PRODUCT(packed_narrow, 2, (TILES == 1 ? 12 : 8), 1, false)
#else
PRODUCT(packed_gated, (TILES == 1 && BITS < 8 ? 3 : 2), 8, 2, true)
#endif

#if TILES == 1 && IS_GATED
// Eight neighbours of a row, from column `chunk` * 8 on: two of each of four lanes.
__device__ __forceinline__ void decode(const u8* tile, u32 row, u32 chunk, float (&v)[8]) {
    const u8* record = tile + (u64)(chunk / 8) * RECORD;
    u32 in_record = chunk / 4 % 2, pair = chunk % 4, half = row / 8 % 2;
    const u8* scales = record + SCALES + in_record * (BITS == 8 ? 32 : 64) + row % 8 * (BITS == 8 ? 4 : 8);
    float scale, minimum = 0.0f;
    if (HAS_MINIMA) {
        u32 both = *reinterpret_cast<const u32*>(scales + half * 4);
        scale = f16_to_float((u16)both), minimum = f16_to_float((u16)(both >> 16));
    } else {
        scale = f16_to_float(*reinterpret_cast<const u16*>(scales + (BITS == 6 ? pair / 2 * 4 : 0) + half * 2));
    }
#pragma unroll
    for (u32 part = 0; part < 4; part++) {
        u32 lane = row % 8 * 4 + part;
        u32 low = *reinterpret_cast<const u32*>(record + in_record * 256 + lane * 8 + half * 4) >> 4 * pair;
        u32 high = BITS == 5   ? record[HIGH + in_record * 64 + lane * 2 + half] >> pair
                   : BITS == 6 ? *reinterpret_cast<const u16*>(record + HIGH + in_record * 128 + lane * 4 + half * 2) >> 2 * pair
                   : BITS == 8 ? *reinterpret_cast<const u32*>(record + HIGH + in_record * 256 + lane * 8 + half * 4) >> 4 * pair
                               : 0;
#pragma unroll
        for (u32 second = 0; second < 2; second++) {
            u32 q = low >> 16 * second & 15;
            if (BITS == 5) q |= (high >> 4 * second & 1) << 4;
            if (BITS == 6) q |= (high >> 8 * second & 3) << 4;
            if (BITS == 8) q |= (high >> 16 * second & 15) << 4;
            v[part * 2 + second] = HAS_MINIMA ? fmaf(scale, (float)q, minimum) : scale * ((float)q - (BITS == 6 ? 32.0f : 128.0f));
        }
    }
}

// One block a token.
KERNEL __launch_bounds__(128) packed_embed(const EmbedParams p) {
    allow_next();
    wait_for_previous();
    u32 row;
    if (!embedded_row(p, row)) return;
    for (u32 i = threadIdx.x; i < p.cols / 8; i += 128) {
        float v[8];
        decode(p.weight + row / 16 * p.unit_bytes, row % 16, i, v);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] *= p.scale;
        reinterpret_cast<uint4*>(p.output + (u64)blockIdx.x * p.cols)[i] = pack8_bf16(v);
    }
}

struct ConvertParams {
    const u8* weight; // from a whole tile on
    u64 tile_bytes;
    bf16* output; // [num_rows, cols]
    u32 num_rows, cols;
};

// Groups of 32 columns that a block converts, of a tile of 16 rows; `products.rs` knows how many columns these are.
constexpr u32 CONVERT_GROUPS = 32;

// Four lanes have four words each, and get the first ones, second ones, ... of all.
__device__ __forceinline__ uint4 exchange(const u32 (&w)[4]) {
    bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    u32 a = __shfl_xor_sync(NONE, odd ? w[0] : w[1], 1), b = __shfl_xor_sync(NONE, odd ? w[2] : w[3], 1);
    const u32 x[4] = {odd ? a : w[0], odd ? w[1] : a, odd ? b : w[2], odd ? w[3] : b};
    u32 c = __shfl_xor_sync(NONE, high ? x[0] : x[2], 2), d = __shfl_xor_sync(NONE, high ? x[1] : x[3], 2);
    return high ? make_uint4(c, d, x[2], x[3]) : make_uint4(x[0], x[1], c, d);
}

KERNEL __launch_bounds__(256) packed_convert(const ConvertParams p) {
    allow_next();
    wait_for_previous();
    const u8* tile = p.weight + blockIdx.x * p.tile_bytes;
    u32 lane = threadIdx.x % 32, rows = min(16u, p.num_rows - blockIdx.x * 16);
    u32 first = blockIdx.y * CONVERT_GROUPS, end = min(first + CONVERT_GROUPS, p.cols / 32);
#pragma unroll 2
    for (u32 group = first + threadIdx.x / 32; group < end; group += 8) {
        Group columns;
        columns.load(tile + (u64)(group / 2) * RECORD, group % 2);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 pairs[4], above[4];
            columns.place(half, pairs);
            if (BITS == 8) columns.place_high(half, above);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                float scale, minimum;
                columns.scale(BITS == 6 ? i / 2 : 0, half, scale, minimum);
                if (!HAS_MINIMA) minimum = (BITS == 6 ? -160.0f : -2304.0f) * scale;
                float x = low_bf16(pairs[i]), y = high_bf16(pairs[i]);
                if (BITS == 8) x += low_bf16(above[i]), y += high_bf16(above[i]);
                pairs[i] = pack_bf16(fmaf(scale, x, minimum), fmaf(scale, y, minimum));
            }
            const uint4 eight = exchange(pairs);
            u32 row = half * 8 + lane / 4;
            bf16* to = p.output + (u64)(blockIdx.x * 16 + row) * p.cols + group * 32 + lane % 4 * 8;
            if (row < rows) *reinterpret_cast<uint4*>(to) = eight;
        }
    }
}
#endif
