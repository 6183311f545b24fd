// What products with 17 to 256 tokens share where there is wgmma (sm_90a): `outputᵀ = weight · inputᵀ`, weights on the M side.
//
// A block takes 128 rows (gated: 64 of the gate and the same of up) by all tokens; two warpgroups multiply 64 rows each, and one
// thread of a ninth warp fetches stages of 128 bytes of columns into a ring. Blocks of a cluster take different columns of the same
// rows and join their sums at the end.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define CONSUMERS 256
#define FEW_THREADS (CONSUMERS + 32) // leave registers for two blocks
#define THREADS (CONSUMERS + 128)
#define AT_ONCE (GATED ? 1 : 3) // parts of other blocks that are on their way

struct WideProductParams {
    TensorMap input;  // [m, cols], boxes of TOKENS rows by 128 bytes
    TensorMap weight; // boxes of 128 rows by 128 bytes or a record, gated of 64 rows
    ProductParams product;
    const float* input_scales;  // [m], of e4m3
    const float* weight_scales; // [num_rows], gated twice as many
    const float* norm;          // [cols] or null: the input is normed on the way, where the kernel does that
    u32 chunks;                 // of 128 bytes of columns
    float eps;
};

// ---- A cluster.

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ u32 cluster_size() {
    u32 size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ float4 read_of(u32 address, u32 rank) {
    float4 v;
    asm volatile("{\n.reg .b32 place;\nmapa.shared::cluster.u32 place, %4, %5;\nld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [place];\n}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address), "r"(rank) : "memory");
    return v;
}

// Where this block stands: which rows, and which chunks of columns.
struct Place {
    u32 split, splits, tile, first, count;
    __device__ __forceinline__ explicit Place(const WideProductParams& p) {
        split = cluster_rank(), splits = cluster_size(), tile = blockIdx.x / splits;
        u32 each = (p.chunks + splits - 1) / splits;
        first = min(split * each, p.chunks), count = min(each, p.chunks - first);
    }
};

// ---- Copies.

// With a policy for the L2.
__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, u32 column, u32 row, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::
            "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy) : "memory");
}

// The ring: a stage has 128 bytes of columns of the tokens, then of the weights. The swizzle counts from multiples of 1024.
template <u32 TOKENS_, u32 WEIGHT_BYTES_, u32 STAGES_>
struct Wide {
    static constexpr u32 TOKENS = TOKENS_, STAGES = STAGES_, INPUT_BYTES = TOKENS * 128, WEIGHT_BYTES = WEIGHT_BYTES_;
    static constexpr u32 STAGE_BYTES = INPUT_BYTES + (WEIGHT_BYTES + 1023) / 1024 * 1024;
    u32 stages, full, empty;
};

// One thread's part: `load_weights(to, chunk, barrier)` asks for a chunk of the weights.
template <class W, u32 COLUMNS, class Load>
__device__ __forceinline__ void feed(const WideProductParams& p, const Place& place, const W& ring, Load load_weights) {
    auto weights = [&](u32 stage, u32 number) {
        expect_bytes(ring.full + stage * 8, W::INPUT_BYTES + W::WEIGHT_BYTES);
        load_weights(ring.stages + stage * W::STAGE_BYTES + W::INPUT_BYTES, place.first + number, ring.full + stage * 8);
    };
    auto tokens = [&](u32 stage, u32 number) {
        load_box(ring.stages + stage * W::STAGE_BYTES, &p.input, (place.first + number) * COLUMNS, 0, ring.full + stage * 8);
    };
    u32 early = min(W::STAGES, place.count);
    for (u32 i = 0; i < early; i++) weights(i, i);
    wait_for_previous();
    for (u32 i = 0; i < early; i++) tokens(i, i);
    u32 stage = 0, parity = 0;
    for (u32 i = early; i < place.count; i++) {
        wait_barrier(ring.empty + stage * 8, parity);
        weights(stage, i);
        tokens(stage, i);
        if (++stage == W::STAGES) stage = 0, parity ^= 1;
    }
}

// A warp has read a stage.
__device__ __forceinline__ void release(u32 empty, u32 stage) {
    if (threadIdx.x % 32 == 0) arrive(empty + stage * 8);
}

template <class W>
__device__ __forceinline__ void start(W& ring, u8* shared, u32 writers = 1) {
    ring.stages = (u32)__cvta_generic_to_shared(shared) + 1023 & ~1023u;
    ring.full = ring.stages + W::STAGES * W::STAGE_BYTES, ring.empty = ring.full + W::STAGES * 8;
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < W::STAGES; s++) {
            init_barrier(ring.full + s * 8, writers);
            init_barrier(ring.empty + s * 8, CONSUMERS / 32);
        }
        fence_async();
    }
    __syncthreads();
}

// ---- Results.

// 8 by 8 values of 16 bits, rows by columns, become columns by rows.
__device__ __forceinline__ u32 transpose(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Results of a warp: 16 rows from `row` on by 8 tokens from `token` on, as the tensor cores leave them. Rows and strides are even.
template <bool GATED>
__device__ __forceinline__ void finish(const ProductParams& p, u32 row, u32 token, const float (&sums)[4], const float (&ups)[4]) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 own = min(row + half * 8 + lane / 4, p.num_rows - 1);
        float bias = p.bias ? p.bias[own] : 0.0f, v[2] = {sums[half * 2] + bias, sums[half * 2 + 1] + bias};
        if (GATED) {
            float up = p.bias ? p.bias[p.num_rows + own] : 0.0f;
#pragma unroll
            for (u32 j = 0; j < 2; j++) v[j] = activate_gate(p.activation, v[j], ups[half * 2 + j] + up);
        }
        if (!GATED && p.is_f32) {
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                u32 to = token + lane % 4 * 2 + j;
                if (to < p.m && row + half * 8 + lane / 4 < p.num_rows)
                    reinterpret_cast<float*>(p.output)[(u64)to * p.output_stride + own] = apply_softcap(v[j], p.softcap);
            }
            continue;
        }
        // Of these a lane has two rows of one token.
        u32 to = token + lane / 4, first = row + half * 8 + lane % 4 * 2;
        bool is_there = to < p.m && first < p.num_rows;
        u32* output = reinterpret_cast<u32*>(reinterpret_cast<bf16*>(p.output) + (u64)to * p.output_stride + first);
        if (!GATED && p.accumulate) {
            u32 old = transpose(is_there ? *output : 0);
            v[0] += low_bf16(old), v[1] += high_bf16(old);
        }
        u32 word = transpose(pack_bf16(v[0], v[1]));
        if (is_there) *output = word;
    }
}

// All that is in a block's memory for others is there, or all of them have read it.
__device__ __forceinline__ void meet(const Place& place) {
    if (place.splits > 1) sync_cluster();
    else __syncthreads();
}

// The threads that multiply join the sums of the splits, each of which finishes some tokens.
template <u32 TOKENS, bool GATED, class Scale>
__device__ __forceinline__ void join(const WideProductParams& p, const Place& place, u32 memory, const float (&sums)[TOKENS / 8][4],
                                     Scale scale) {
    u32 thread = threadIdx.x, warp = thread / 32;
    // All stages have been read: their memory takes the sums.
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
    auto at = [&](u32 i, u32 of) { return memory + (i * CONSUMERS + of) * 16; };
#pragma unroll
    for (u32 i = 0; i < TOKENS / 8; i++)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at(i, thread)), "f"(sums[i][0]), "f"(sums[i][1]),
                     "f"(sums[i][2]), "f"(sums[i][3]) : "memory");
    meet(place);
    // Gated, two warps share the rows of one.
    u32 of = GATED ? thread % 128 : thread, row = place.tile * (GATED ? 64 : 128) + of / 32 * 16;
    u32 first = GATED ? place.split * 2 + warp / 4 : place.split, step = GATED ? place.splits * 2 : place.splits;
    u32 end = min(TOKENS, p.product.m + 7) / 8;
#pragma unroll 1
    for (u32 i = first; i < end; i += step) {
        float result[4] = {}, ups[4] = {};
#pragma unroll 1
        for (u32 first = 0; first < place.splits; first += AT_ONCE) {
            float4 parts[AT_ONCE], up_parts[AT_ONCE];
#pragma unroll
            for (u32 s = 0; s < AT_ONCE; s++) {
                if (first + s >= place.splits) break;
                parts[s] = read_of(at(i, of), first + s);
                if (GATED) up_parts[s] = read_of(at(i, of + 128), first + s);
            }
#pragma unroll
            for (u32 s = 0; s < AT_ONCE; s++) {
                if (first + s >= place.splits) break;
                result[0] += parts[s].x, result[1] += parts[s].y, result[2] += parts[s].z, result[3] += parts[s].w;
                if (GATED) ups[0] += up_parts[s].x, ups[1] += up_parts[s].y, ups[2] += up_parts[s].z, ups[3] += up_parts[s].w;
            }
        }
        scale(row, i * 8, result, ups);
        finish<GATED>(p.product, row, i * 8, result, ups);
    }
    meet(place);
}

// The others meet them.
__device__ __forceinline__ void stay(const Place& place) {
    meet(place);
    meet(place);
}

#endif
