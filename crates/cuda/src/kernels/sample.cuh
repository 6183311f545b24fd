// One token from each row of logits. `baton_backend::sampling` defines what must come out, to the last bit of the weights:
// probabilities are integers (2^40 for the most likely token), so that sums do not depend on who adds what.
//
// Three kernels. `sample_prepare` (many blocks per row) applies biases, penalties and the mask and finds each part's largest logit.
// `sample_choose` is then done at once for a greedy row. `sample_score` is launched for steps that want log-probabilities; it is
// compiled beside the others. With few rows several blocks share one: each takes a span of the vocabulary, and they meet
// after each pass (`Row`). There are never more blocks than fit the device at once, so that all of them arrive.
//
// Never a sort. With top-k or top-p one pass lists the best tokens: those that reach the n-th largest of 256 maxima of as many
// spans, of which there must be n at least. What is kept of a short list is found by comparing each with each. Where a
// list would be too long, or is too short for top-p, the cut is found by a radix search over the bits of the logits (four
// passes of 8 bits, counting tokens or adding weights), and two more passes draw in the order of the ids.

#define PARTS 32
#define THREADS 512
#define WARPS (THREADS / 32)
#define MAX_TOP 512
#define MAX_CANDIDATES 512
#define SPANS 256
#define RESULT_WORDS 5

struct SampleParams {
    const StepHeader* step;
    const float* logits; // [logit rows, vocab]
    float* adjusted;     // [samples, vocab]
    float* part_max;     // [samples, PARTS]
    u32* part_best;      // [samples, PARTS]
    u32* drawn;          // [samples], for the next step
    u32* results;        // [samples, RESULT_WORDS]: token, logprob, rank, number of top tokens, normaliser
    u32* top;            // [samples, MAX_TOP]: (token, logit)
    struct RowSync* row_syncs; // [samples]
    u64* bins;           // [shared rows, 3, 256]: of rows that have several blocks
    u32* spans;        // [candidate rows, SPANS]: the key of each one's largest logit
    uint2* candidates;       // [candidate rows, MAX_CANDIDATES]: token, logit
    u32 vocab, max_shared_rows, max_listed_rows;
};

// Where the blocks of a row leave what the others must know. Three of each, interleaved: when one is written, all blocks are done
// with the one before the last.
struct RowSync {
    u64 sums[3][PARTS];
    u32 counts[3][PARTS];
    u32 arrived, place, token, num_listed;
    u32 rounds; // of sample_choose, after which sample_score goes on
};

__device__ __forceinline__ float clean(float x) {
    return isnan(x) ? NEG_INF : fminf(__fadd_rn(x, 0.0f), 3.402823466e38f);
}

// Larger logits have larger keys.
__device__ __forceinline__ u32 key_of(float x) {
    u32 bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The host's exponential, operation by operation: nothing may be fused.
__device__ __forceinline__ float likelihood(float logit, float max, float temperature) {
    float x = __fdiv_rn(__fsub_rn(logit, max), temperature);
    bool is_visible = x > -28.0f;
    if (!is_visible) x = -28.0f;
    const float to_integer = 12582912.0f;
    float shifted = __fadd_rn(__fmul_rn(x, 1.44269504088896341f), to_integer);
    float n = __fsub_rn(shifted, to_integer);
    float r = __fsub_rn(__fsub_rn(x, __fmul_rn(n, 0.6933594f)), __fmul_rn(n, -2.1219444e-4f));
    float series = 1.0f / 5040.0f;
    series = __fadd_rn(__fmul_rn(series, r), 1.0f / 720.0f);
    series = __fadd_rn(__fmul_rn(series, r), 1.0f / 120.0f);
    series = __fadd_rn(__fmul_rn(series, r), 1.0f / 24.0f);
    series = __fadd_rn(__fmul_rn(series, r), 1.0f / 6.0f);
    series = __fadd_rn(__fmul_rn(series, r), 0.5f);
    series = __fadd_rn(__fmul_rn(series, r), 1.0f);
    series = __fadd_rn(__fmul_rn(series, r), 1.0f);
    u32 exponent = __float_as_uint(shifted) - __float_as_uint(to_integer) + 127;
    return is_visible ? __fmul_rn(series, __uint_as_float(exponent << 23)) : 0.0f;
}

__device__ __forceinline__ u64 fixed_point(float x) {
    const double to_integer = 4503599627370496.0, one = 1099511627776.0;
    return __double_as_longlong(__dadd_rn(__dmul_rn((double)x, one), to_integer)) - __double_as_longlong(to_integer);
}

// ---- What some blocks of THREADS threads do with a row.

struct Shared {
    u64 bins[256];
    u64 warps[WARPS];
    u32 warp_equals[WARPS];
    u64 value, total;
    u32 choice;
    u64 weights[MAX_CANDIDATES];
    u32 keys[MAX_CANDIDATES], ids[MAX_CANDIDATES];
};

__device__ __forceinline__ u64 warp_sum_u64(u64 x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(NONE, x, distance);
    return x;
}

// The sum of this lane's and those before it.
template <class T>
__device__ __forceinline__ T scan(T x) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        T other = __shfl_up_sync(NONE, x, distance);
        if (threadIdx.x % 32 >= distance) x += other;
    }
    return x;
}

__device__ u64 block_sum_u64(u64 x, Shared& s) {
    x = warp_sum_u64(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.warps[threadIdx.x / 32] = x;
    __syncthreads();
    u64 sum = 0;
    for (int i = 0; i < WARPS; i++) sum += s.warps[i];
    return sum;
}

// The blocks of a row: this one's span of the vocabulary, and where they meet.
struct Row {
    RowSync* meeting;
    u64 (*bins)[256]; // [3], interleaved as well: what was read in the round before is cleared for the next
    u32 start, end, block, num_blocks, round;

    // All blocks have come here.
    __device__ void meet() {
        if (num_blocks > 1 && threadIdx.x < 256) bins[(round + 1) % 3][threadIdx.x] = 0;
        round++;
        __syncthreads();
        if (num_blocks == 1) return;
        if (threadIdx.x == 0) {
            u32 arrived;
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(&meeting->arrived) : "memory");
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(&meeting->arrived) : "memory");
            } while (arrived < round * num_blocks);
        }
        __syncthreads();
    }

    // Calls `visit(id, logit)` for this block's tokens, in no order. Several are asked for at once. The calls are not unrolled, or
    // there would be too much to compile: instead the values move up.
    template <class Visit>
    __device__ __forceinline__ void for_all(const float* logits, Visit visit) const {
        constexpr int AHEAD = 8;
        for (u32 first = start + threadIdx.x; first < end; first += AHEAD * THREADS) {
            float values[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
                values[j] = first + j * THREADS < end ? __ldcg(logits + first + j * THREADS) : 0.0f;
#pragma unroll 1
            for (u32 id = first; id < min(first + AHEAD * THREADS, end); id += THREADS) {
                visit(id, clean(values[0]));
#pragma unroll
                for (int j = 1; j < AHEAD; j++) values[j - 1] = values[j];
            }
        }
    }

    // Tells the others a sum and a count of this block. Each lane gets those of one block.
    __device__ void tell(u64& sum, u32& count) {
        u32 turn = round % 3, lane = threadIdx.x % 32;
        if (threadIdx.x == 0) {
            meeting->sums[turn][block] = sum;
            meeting->counts[turn][block] = count;
        }
        meet();
        sum = lane < num_blocks ? __ldcg(&meeting->sums[turn][lane]) : 0;
        count = lane < num_blocks ? __ldcg(&meeting->counts[turn][lane]) : 0;
    }
};

// Of the sample blockIdx.y, whose part blockIdx.x this block takes.
__device__ __forceinline__ Row row_of(const SampleParams& p, u32 round) {
    u32 number = blockIdx.y, share = ((p.vocab + gridDim.x - 1) / gridDim.x + 31) / 32 * 32;
    u32 start = min(blockIdx.x * share, p.vocab);
    auto bins = reinterpret_cast<u64(*)[256]>(p.bins + (gridDim.x > 1 ? number * 3 * 256 : 0));
    return {p.row_syncs + number, bins, start, min(start + share, p.vocab), blockIdx.x, gridDim.x, round};
}

// A set of the most likely tokens: those with a larger key, and the first `equals` (by id) of those with this one.
struct Cut {
    u32 key;
    u32 equals;
};

// How tokens count in the search for a cut: 1 each, or their weight; only within an earlier cut.
struct Scale {
    float max, temperature, min_p;
    bool by_weight;
    Cut within;
    __device__ __forceinline__ u64 weight(float logit) const {
        float x = likelihood(logit, max, temperature);
        return fixed_point(x >= min_p ? x : 0.0f);
    }
    __device__ __forceinline__ u64 weight_of_key(u32 key) const {
        return weight(__uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key));
    }
};

// The bin in which the sum from the largest one down reaches `needed`, or the lowest, and the sum of those above it. By the
// first warp; `share` of the sum of all is needed if it is not 0.
__device__ void find_bin(u64 above, u64 needed, float share, Shared& s) {
    u32 lane = threadIdx.x;
    u64 own = 0;
#pragma unroll
    for (u32 i = 0; i < 8; i++) own += s.bins[255 - lane * 8 - i];
    u64 inclusive = scan(own);
    u64 total = __shfl_sync(NONE, inclusive, 31);
    if (share != 0.0f) needed = max((u64)ceil(__dmul_rn((double)share, (double)total)), (u64)1);
    u32 ballot = __ballot_sync(NONE, above + inclusive >= needed);
    u32 found = ballot ? __ffs(ballot) - 1 : 31;
    if (lane == found) {
        u64 sum = above + inclusive - own;
        u32 bin = 255 - lane * 8, last = bin - 7;
        while (bin > last && sum + s.bins[bin] < needed) sum += s.bins[bin--];
        s.choice = bin;
        s.value = sum;
    }
    if (lane == 0) s.total = needed;
}

// Lanes with the same bin add up first: most logits have the same first bits. Amounts have at most 41 bits.
__device__ __forceinline__ void add_to_bin(u64* bins, u32 bin, u64 amount) {
    u32 peers = __match_any_sync(__activemask(), bin);
    u64 sum = 0;
#pragma unroll
    for (int shift = 28; shift >= 0; shift -= 14)
        sum = (sum << 14) + __reduce_add_sync(peers, (u32)(amount >> shift) & (shift == 28 ? NONE : 0x3fffu));
    if (threadIdx.x % 32 == __ffs(peers) - 1) atomicAdd(bins + bin, sum);
}

// The smallest set of best tokens whose count or weight reaches `needed`, or a share of all (at least one, at most what there
// is). Tokens equal to the earlier cut's key have equal weights, so that it is enough to know how many of them count.
__device__ Cut find_cut(const float* logits, Row& row, const Scale& scale, u64 needed, float share, Shared& s) {
    u32 prefix = 0, mask = 0;
    u64 above = 0; // of larger keys
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        if (threadIdx.x < 256) s.bins[threadIdx.x] = 0;
        __syncthreads();
        row.for_all(logits, [&](u32, float logit) {
            u32 key = key_of(logit);
            if ((key & mask) != prefix || key < scale.within.key) return;
            // Equals of the earlier cut are added once, below.
            if (key == scale.within.key && scale.within.equals != NONE) return;
            u64 amount = scale.by_weight ? scale.weight(logit) : 1;
            if (amount) add_to_bin(s.bins, key >> shift & 255, amount);
        });
        __syncthreads();
        if (row.num_blocks > 1) {
            u64* bins = row.bins[row.round % 3];
            if (threadIdx.x < 256 && s.bins[threadIdx.x]) atomicAdd(bins + threadIdx.x, s.bins[threadIdx.x]);
            row.meet();
            if (threadIdx.x < 256) s.bins[threadIdx.x] = __ldcg(bins + threadIdx.x);
            __syncthreads();
        }
        if (threadIdx.x < 32) {
            u32 tie = scale.within.key;
            if (threadIdx.x == 0 && scale.within.equals != NONE && (tie & mask) == prefix)
                s.bins[tie >> shift & 255] += (scale.by_weight ? scale.weight_of_key(tie) : 1) * scale.within.equals;
            __syncwarp();
            find_bin(above, needed, shift == 24 ? share : 0.0f, s);
        }
        __syncthreads();
        above = s.value;
        needed = s.total;
        prefix |= s.choice << shift;
        mask |= 255u << shift;
    }
    u64 each = scale.by_weight ? scale.weight_of_key(prefix) : 1;
    u64 missing = needed > above ? needed - above : 0;
    u64 equals = each > 0 ? (missing + each - 1) / each : 1;
    Cut cut = {prefix, (u32)min(max(equals, (u64)1), (u64)0x7fffffff)};
    __syncthreads();
    return cut;
}

// Calls `visit(id, logit, is_kept)` for this warp's share of the block's tokens, 32 ids at a time in their order, until one says
// that it is enough. `equals_before` counts the cut's equals in front of this warp.
template <class Visit>
__device__ __forceinline__ void for_kept(const float* logits, const Row& row, Cut cut, u32 equals_before, Visit visit) {
    constexpr int AHEAD = 4;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 share = ((row.end - row.start + WARPS - 1) / WARPS + 31) / 32 * 32;
    u32 start = row.start + warp * share, end = min(start + share, row.end);
    for (u32 first = start; first < end; first += 32 * AHEAD) {
        float values[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            u32 id = first + j * 32 + lane;
            values[j] = id < end ? clean(__ldcg(logits + id)) : NEG_INF;
        }
#pragma unroll 1
        for (u32 id = first + lane; id < first + lane + 32 * AHEAD; id += 32) {
            float logit = values[0];
            u32 key = key_of(logit);
            bool is_equal = id < end && key == cut.key;
            u32 ballot = __ballot_sync(NONE, is_equal);
            u32 place = equals_before + __popc(ballot & ((1u << lane) - 1));
            bool is_kept = id < end && (key > cut.key || (is_equal && place < cut.equals));
            equals_before += __popc(ballot);
            if (visit(id, logit, is_kept)) return;
#pragma unroll
            for (int j = 1; j < AHEAD; j++) values[j - 1] = values[j];
        }
    }
}

// How many equals of the cut stand in front of each warp's share, in s.warp_equals; `before` in front of the block.
__device__ void count_equals(const float* logits, const Row& row, Cut cut, u32 before, Shared& s) {
    u32 count = 0;
    if (cut.key != 0)
        for_kept(logits, row, cut, 0, [&](u32 id, float logit, bool) {
            count += __popc(__ballot_sync(NONE, id < row.end && key_of(logit) == cut.key));
            return false;
        });
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.warp_equals[threadIdx.x / 32] = count;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 0; i < WARPS; i++) {
            u32 own = s.warp_equals[i];
            s.warp_equals[i] = before;
            before += own;
        }
    }
    __syncthreads();
}
