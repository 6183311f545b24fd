// What a cache of e4m3 adds to the two tensor-core kernels. Its numbers are exact in f16, so IS_F16 is set as well and all
// products are those of an f16 cache.
//
// A decode converts in registers: each key and value is multiplied once, and every byte of shared memory that is not written
// is won. A prompt's tile is read by eight warps, so it is converted once and written to shared memory as f16.

#if IS_FP8

// ---- Few rows. ldmatrix moves pairs of e4m3 where it moves one f16. Of a key a lane so gets four neighbouring dimensions
// instead of two and two; queries are loaded in the same order, which leaves the products the same.

// Keys 0..8 and 8..16 of a stage, 16 dimensions of chunk `c` and 16 of the next.
__device__ __forceinline__ void load_keys(u32 (&b)[2][4], u32 keys, u32 c) {
    u32 lane = threadIdx.x % 32, raw[4];
    load_matrices(raw, keys + swizzle_raw(lane / 8 % 2 * 8 + lane % 8, c + lane / 16));
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        b[i / 2][i % 2 * 2] = e4m3_to_f16(raw[i]);
        b[i / 2][i % 2 * 2 + 1] = e4m3_to_f16(raw[i] >> 16);
    }
}

// Adds 16 values. Transposed, a lane gets two dimensions of two keys: sums of the even dimensions of a chunk and of the odd ones
// are tiles of their own, `sums[2 * c]` and `sums[2 * c + 1]`.
__device__ __forceinline__ void add_values(float (&sums)[HEAD_DIM / 8][4], const float (&weights)[2][4], u32 values) {
    u32 lane = threadIdx.x % 32;
    const u32 a[4] = {pack(weights[0][0], weights[0][1]), pack(weights[0][2], weights[0][3]),
                      pack(weights[1][0], weights[1][1]), pack(weights[1][2], weights[1][3])};
#pragma unroll
    for (u32 c = 0; c < RAW_CHUNKS; c += 2) {
        u32 raw[4];
        load_matrices_transposed(raw, values + swizzle_raw(lane % 16, c + lane / 16));
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 low = __byte_perm(raw[2 * i], 0, 0x3120), high = __byte_perm(raw[2 * i + 1], 0, 0x3120);
            multiply_add(sums[2 * (c + i)], a, e4m3_to_f16(low), e4m3_to_f16(high));
            multiply_add(sums[2 * (c + i) + 1], a, e4m3_to_f16(low >> 16), e4m3_to_f16(high >> 16));
        }
    }
}

// ---- Many rows.

// The 16 numbers at `from` as f16: chunks 2 * c and 2 * c + 1 of a row, at `to[0]` and `to[1]`.
__device__ __forceinline__ void convert_chunk(u32 from, const u32 (&to)[2], bool odd_first) {
    u32 raw[4], wide[8];
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(raw[0]), "=r"(raw[1]), "=r"(raw[2]), "=r"(raw[3]) : "r"(from) : "memory");
#pragma unroll
    for (int i = 0; i < 4; i++) {
        wide[2 * i] = e4m3_to_f16(raw[i]);
        wide[2 * i + 1] = e4m3_to_f16(raw[i] >> 16);
    }
    // Neighbours that would meet in the same banks write their halves in different order.
#pragma unroll
    for (int i = 0; i < 2; i++) {
        bool odd = odd_first != (i == 1);
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(odd ? to[1] : to[0]), "r"(odd ? wide[4] : wide[0]),
                     "r"(odd ? wide[5] : wide[1]), "r"(odd ? wide[6] : wide[2]), "r"(odd ? wide[7] : wide[3]) : "memory");
    }
}

#endif
