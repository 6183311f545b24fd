// What `packed.cu` and `packed_wide.cu` share: the values of a record as a lane wants them.

__device__ constexpr u32 HIGH = HIGH_BITS, RECORD = record_bytes(BITS), SCALES = scales_start(BITS);
__device__ constexpr bool HAS_MINIMA = BITS <= 5;

// (bits & mask) | other, as one instruction.
__device__ __forceinline__ u32 take(u32 bits, u32 mask, u32 other) {
    u32 y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(bits), "r"(mask), "r"(other));
    return y;
}

// What a lane takes of 32 columns of a record: of two rows, lane / 4 and the one eight further. Each word of `low` is eight values
// of a row, such that shifts of four bits bring the next pair of neighbours to the low ends of its halves.
struct Group {
    u32 low[2], high[2];
    u32 scales[2]; // 6 and 8 bits: two in a word, of the two rows; else scale and minimum

    __device__ __forceinline__ void load(const u8* record, u32 group) {
        u32 lane = threadIdx.x % 32, row = lane / 4;
        uint2 words = *reinterpret_cast<const uint2*>(record + group * 256 + lane * 8);
        low[0] = words.x, low[1] = words.y;
        if (BITS == 5) {
            // Four bits of first neighbours, four of second ones, in a byte.
            u32 bytes = *reinterpret_cast<const u16*>(record + HIGH + group * 64 + lane * 2);
            high[0] = (bytes & 255) * 0x1001, high[1] = (bytes >> 8) * 0x1001;
        }
        if (BITS == 6) {
            u32 both = *reinterpret_cast<const u32*>(record + HIGH + group * 128 + lane * 4);
            high[0] = __byte_perm(both, 0, 0x4140), high[1] = __byte_perm(both, 0, 0x4342);
        }
        if (BITS == 8) {
            words = *reinterpret_cast<const uint2*>(record + HIGH + group * 256 + lane * 8);
            high[0] = words.x, high[1] = words.y;
        }
        if (BITS == 8) {
            scales[0] = *reinterpret_cast<const u32*>(record + SCALES + group * 32 + row * 4);
        } else {
            words = *reinterpret_cast<const uint2*>(record + SCALES + group * 64 + row * 8);
            scales[0] = words.x, scales[1] = words.y;
        }
    }

    // The values of one row as bf16, each more than it is by what it was placed into.
    __device__ __forceinline__ void place(u32 half, u32 (&pairs)[4]) const {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            pairs[i] = take(low[half] >> 4 * i, 0x000f000fu, 0x43004300u);
            if (BITS == 5) pairs[i] = take(high[half] << (4 - i), 0x00100010u, pairs[i]);
            if (BITS == 6) pairs[i] = take(i <= 2 ? high[half] << (4 - 2 * i) : high[half] >> 2, 0x00300030u, pairs[i]);
        }
    }

    // The high nibbles of eight bits.
    __device__ __forceinline__ void place_high(u32 half, u32 (&pairs)[4]) const {
#pragma unroll
        for (u32 i = 0; i < 4; i++) pairs[i] = take(high[half] >> 4 * i, 0x000f000fu, 0x45004500u);
    }

    // The scale of a row, and what the sum of its activations is multiplied with; `part` is a half of the group, of 6 bits.
    __device__ __forceinline__ void scale(u32 part, u32 half, float& scale, float& minimum) const {
        if (HAS_MINIMA) {
            scale = f16_to_float((u16)scales[half]);
            minimum = fmaf(-128.0f, scale, f16_to_float((u16)(scales[half] >> 16)));
        } else {
            scale = f16_to_float((u16)(scales[part] >> 16 * half));
        }
    }
};

