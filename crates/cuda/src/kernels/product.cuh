// What products of packed weights, and of some tokens, are told.

struct ProductParams {
    const u8* weight;  // records, where it is packed
    u64 tile_bytes;    // of 16 rows
    const bf16* input; // [m, cols]
    const float* bias; // [num_rows] or null
    void* output;      // [m, output_stride], bf16 or f32
    u32 num_rows, cols, m, output_stride;
    u32 accumulate, is_f32;
    float softcap;     // 0 is none
    u32 activation;    // gated only
};

