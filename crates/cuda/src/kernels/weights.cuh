// What `product.cu` and `packed.cu` share: the records of packed weights, and the lookup of embeddings.

// Records of 16 rows by 64 columns: four bits of every value, from HIGH_BITS on the bits above, then the scales.
__device__ constexpr u32 HIGH_BITS = 512;
__device__ constexpr u32 record_bytes(u32 bits) { return 128 * bits + (bits == 8 ? 64 : 128); }
__device__ constexpr u32 scales_start(u32 bits) { return 128 * bits; }

struct EmbedParams {
    const StepHeader* step;
    const u32* drawn; // tokens of the step before, for rows that name a sample instead of a token
    const u8* weight;
    u64 unit_bytes;   // of a row, or of a packed tile of 16
    real* output;     // [tokens, cols]
    u32 first_row, num_rows, cols; // which tokens this part of the weight holds
    float scale;
    u32 adds_positions; // rows are looked up by position and added to the output; never in packed weights
};

// The row of this block's token; false if there is no such token, or this part does not have it. The top bit of a token id says
// that it is the number of a sample of the step before.
__device__ __forceinline__ bool embedded_row(const EmbedParams& p, u32& row) {
    if (blockIdx.x >= p.step->num_tokens) return false;
    u32 token = words(p.step, p.adds_positions ? p.step->positions : p.step->token_ids)[blockIdx.x];
    if (token >> 31) token = p.drawn[token & 0x7fffffffu];
    row = token - p.first_row;
    return token >= p.first_row && row < p.num_rows;
}

