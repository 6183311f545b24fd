// One token from each row of logits. `baton_backend::sampling` defines what must come out, to the last bit of the weights:
// probabilities are integers (2^40 for the most likely token), so that sums do not depend on who adds what.
//
// Two kernels. `sample_prepare` (many blocks a row) applies biases, penalties and the mask and finds each part's largest logit.
// `sample_choose` is then done at once for a greedy row. With few rows several blocks share one: each takes a stretch of the
// vocabulary, and they meet after each pass (`Row`). There are never more blocks than fit the device at once, so that all of
// them arrive.
//
// Never a sort. With top-k or top-p one pass lists the best tokens: those that reach the n-th largest of 256 maxima of as many
// stretches, of which there must be n at least. What is kept of a short list is found by comparing each with each. Where a
// list would be too long, or is too short for top-p, the cut is found by a radix search over the bits of the logits (four
// passes of 8 bits, counting tokens or adding weights), and two more passes draw in the order of the ids.

#define PARTS 32
#define THREADS 512
#define WARPS (THREADS / 32)
#define MAX_TOP 512
#define MAX_LISTED 512
#define STRETCHES 256
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
    struct Meeting* meetings; // [samples]
    u64* bins;           // [shared rows, 3, 256]: of rows that have several blocks
    u32* stretches;      // [listed rows, STRETCHES]: the key of each one's largest logit
    uint2* listed;       // [listed rows, MAX_LISTED]: token, logit
    u32 vocab, max_shared_rows, max_listed_rows;
};

// Where the blocks of a row leave what the others must know. Three of each, in turns: when one is written, all blocks are done
// with the one before the last.
struct Meeting {
    u64 sums[3][PARTS];
    u32 counts[3][PARTS];
    u32 arrived, place, token, num_listed;
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

__device__ u64 random_bits(const SampleRow& row) {
    u32 c[4] = {row.counter_low, row.counter_high, 0, 0};
    u32 k0 = row.seed_low, k1 = row.seed_high;
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u32 high0 = __umulhi(0xD2511F53u, c[0]), low0 = 0xD2511F53u * c[0];
        u32 high1 = __umulhi(0xCD9E8D57u, c[2]), low1 = 0xCD9E8D57u * c[2];
        c[0] = high1 ^ c[1] ^ k0;
        c[1] = low1;
        c[2] = high0 ^ c[3] ^ k1;
        c[3] = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (u64)c[0] | (u64)c[1] << 32;
}

__device__ __forceinline__ bool changes_logits(const SampleRow& row) {
    bool penalises = row.repetition_penalty != 1.0f || row.presence_penalty != 0.0f || row.frequency_penalty != 0.0f;
    return row.bias_start != row.bias_end || row.mask_start != row.mask_end || (penalises && row.history_start != row.history_end);
}

// Whether a row's mask (one bit a token, none at all allows every token) lets a token be drawn.
__device__ __forceinline__ bool is_allowed(const SampleParams& p, const SampleRow& row, u32 token) {
    if (row.mask_start == row.mask_end) return true;
    u32 word = row.mask_start + token / 32;
    return word < row.mask_end && (words(p.step, p.step->masks)[word] >> (token % 32) & 1);
}

// The better of two: the larger logit, of equals the lower id.
__device__ __forceinline__ void keep_better(float& max, u32& best, float other, u32 other_best) {
    if (other > max || (other == max && other_best < best)) {
        max = other;
        best = other_best;
    }
}

__device__ __forceinline__ void warp_best(float& max, u32& best) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        float other = __shfl_xor_sync(NONE, max, distance);
        u32 other_best = __shfl_xor_sync(NONE, best, distance);
        keep_better(max, best, other, other_best);
    }
}

// blockIdx.x is the part of the vocabulary, blockIdx.y the sample.
KERNEL __launch_bounds__(256) sample_prepare(const SampleParams p) {
    __shared__ float shared_max[8];
    __shared__ u32 shared_best[8];
    allow_next();
    wait_for_previous();
    u32 sample = blockIdx.y;
    if (sample >= p.step->num_samples) return;
    const SampleRow row = reinterpret_cast<const SampleRow*>(words(p.step, p.step->samples))[sample];
    bool is_greedy = row.temperature <= 0.0f && row.forced == NONE && row.num_logprobs == NONE;
    if (blockIdx.x == 0 && !is_greedy) {
        u32* meeting = reinterpret_cast<u32*>(p.meetings + sample);
        for (u32 i = threadIdx.x; i < sizeof(Meeting) / 4; i += 256) meeting[i] = 0;
        if (gridDim.y <= p.max_shared_rows)
            for (u32 i = threadIdx.x; i < 3 * 256; i += 256) p.bins[sample * 3 * 256 + i] = 0;
    }
    const float* logits = p.logits + (u64)row.logit_row * p.vocab;
    u32 length = (p.vocab + PARTS - 1) / PARTS;
    u32 start = blockIdx.x * length, end = min(start + length, p.vocab);
    if (changes_logits(row)) {
        float* adjusted = p.adjusted + (u64)sample * p.vocab;
        for (u32 i = start + threadIdx.x; i < end; i += 256) adjusted[i] = logits[i];
        __syncthreads();
        // A token may be biased twice, so each id has one thread, which keeps the order of the list.
        const u32* biases = words(p.step, p.step->biases);
        for (u32 i = row.bias_start; i < row.bias_end; i++) {
            u32 token = biases[2 * i];
            if (token >= start && token < end && token % 256 == threadIdx.x)
                adjusted[token] += __uint_as_float(biases[2 * i + 1]);
        }
        __syncthreads();
        const u32* history = words(p.step, p.step->history);
        for (u32 i = row.history_start + threadIdx.x; i < row.history_end; i += 256) {
            u32 token = history[2 * i], count = history[2 * i + 1] & 0x7fffffffu;
            if (token < start || token >= end) continue;
            float x = adjusted[token];
            // The top bit says that the token is in the prompt.
            if (history[2 * i + 1] != 0)
                x = x > 0.0f ? __fdiv_rn(x, row.repetition_penalty) : __fmul_rn(x, row.repetition_penalty);
            x = __fsub_rn(x, __fmul_rn(row.frequency_penalty, (float)count));
            if (count > 0) x = __fsub_rn(x, row.presence_penalty);
            adjusted[token] = x;
        }
        __syncthreads();
        for (u32 i = start + threadIdx.x; i < end; i += 256)
            if (!is_allowed(p, row, i)) adjusted[i] = NEG_INF;
        __syncthreads();
        logits = adjusted;
    }
    float max = NEG_INF;
    u32 best = NONE;
    // Where every logit is minus infinity, the lowest allowed token wins.
    for (u32 i = start + threadIdx.x; i < end; i += 256)
        if (is_allowed(p, row, i)) keep_better(max, best, clean(logits[i]), i);
    warp_best(max, best);
    if (threadIdx.x % 32 == 0) {
        if (sample < p.max_listed_rows && !is_greedy)
            p.stretches[sample * STRETCHES + blockIdx.x * 8 + threadIdx.x / 32] = key_of(max);
        shared_max[threadIdx.x / 32] = max;
        shared_best[threadIdx.x / 32] = best;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int i = 1; i < 8; i++) keep_better(max, best, shared_max[i], shared_best[i]);
    p.part_max[sample * PARTS + blockIdx.x] = max;
    p.part_best[sample * PARTS + blockIdx.x] = best;
}

// ---- The rest is some blocks of THREADS threads a row.

struct Shared {
    u64 bins[256];
    u64 warps[WARPS];
    u32 warp_equals[WARPS];
    u64 value, total;
    u32 choice;
    u64 weights[MAX_LISTED];
    u32 keys[MAX_LISTED], ids[MAX_LISTED];
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

// The blocks of a row: this one's stretch of the vocabulary, and where they meet.
struct Row {
    Meeting* meeting;
    u64 (*bins)[256]; // [3], in turns as well: what was read in the round before is cleared for the next
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

enum Outcome { MINE, OTHERS, UNKNOWN };

// Draws from a list of the best tokens, if all that is kept is in it; by the first block.
__device__ Outcome draw_listed(
    const float* logits, Row& row, const Scale& scale, const SampleRow& sample, const SampleParams& p, Shared& s) {
    u32 number = blockIdx.y, thread = threadIdx.x;
    bool has_top_k = sample.top_k > 0 && sample.top_k < p.vocab;
    u32 rank = has_top_k ? sample.top_k : STRETCHES * 11 / 16;
    if (rank > STRETCHES * 3 / 4 || number >= p.max_listed_rows || (!has_top_k && sample.top_p >= 1.0f)) return UNKNOWN;
    // The threshold: so many are as good.
    if (thread < STRETCHES) s.keys[thread] = p.stretches[number * STRETCHES + thread];
    __syncthreads();
    if (thread < STRETCHES) {
        u32 own = s.keys[thread], better = 0;
        for (u32 i = 0; i < STRETCHES; i++) better += s.keys[i] > own || (s.keys[i] == own && i < thread);
        if (better == rank - 1) s.choice = own;
    }
    __syncthreads();
    u32 threshold = s.choice;
    u64 total = 0;
    uint2* listed = p.listed + number * MAX_LISTED;
    row.for_all(logits, [&](u32 id, float logit) {
        if (!has_top_k) total += scale.weight(logit);
        if (key_of(logit) < threshold || logit == NEG_INF) return;
        u32 place = atomicAdd(&row.meeting->num_listed, 1);
        if (place < MAX_LISTED) listed[place] = make_uint2(id, __float_as_uint(logit));
    });
    if (!has_top_k) total = block_sum_u64(total, s);
    u32 count = 0;
    row.tell(total, count);
    total = warp_sum_u64(total);
    count = __ldcg(&row.meeting->num_listed);
    if (count > MAX_LISTED) return UNKNOWN;
    // Each block looks at the list, so that all come to the same end.
    u64 weight = 0, better_weight = 0;
    u32 key = 0, id = NONE, better = 0;
    if (thread < count) {
        uint2 entry = __ldcg(listed + thread);
        id = entry.x;
        key = key_of(__uint_as_float(entry.y));
        weight = scale.weight(__uint_as_float(entry.y));
    }
    s.keys[thread] = key;
    s.ids[thread] = id;
    s.weights[thread] = weight;
    __syncthreads();
    if (thread < count)
        for (u32 i = 0; i < count; i++)
            if (s.keys[i] > key || (s.keys[i] == key && s.ids[i] < id)) {
                better++;
                better_weight += s.weights[i];
            }
    bool is_kept = thread < count && (!has_top_k || better < sample.top_k);
    u64 here = block_sum_u64(is_kept ? weight : 0, s);
    if (has_top_k) total = here;
    if (sample.top_p < 1.0f) {
        u64 needed = max((u64)ceil(__dmul_rn((double)sample.top_p, (double)total)), (u64)1);
        if (here < needed) return UNKNOWN;
        is_kept = is_kept && better_weight < needed;
        here = block_sum_u64(is_kept ? weight : 0, s);
    }
    if (row.block != 0) return OTHERS;
    u64 target = __umul64hi(random_bits(sample), here), before = 0;
    __syncthreads();
    if (!is_kept) s.weights[thread] = 0;
    __syncthreads();
    if (is_kept) {
        for (u32 i = 0; i < count; i++) before += s.ids[i] < id ? s.weights[i] : 0;
        if (before <= target && target < before + weight) s.choice = id;
    }
    __syncthreads();
    return MINE;
}

// True for the block that has drawn the token, which is then in s.choice.
__device__ bool draw(const float* logits, Row& row, float highest, const SampleRow& sample, const SampleParams& p, Shared& s) {
    Scale scale = {highest, sample.temperature, fminf(sample.min_p, 1.0f), false, {0, NONE}};
    Outcome outcome = draw_listed(logits, row, scale, sample, p, s);
    if (outcome != UNKNOWN) return outcome == MINE;
    Cut cut = {0, NONE}; // everything
    // First top-k, then top-p within it: in one place, or there would be twice as much to compile.
#pragma unroll 1
    for (int by_weight = 0; by_weight < 2; by_weight++) {
        scale.by_weight = by_weight;
        scale.within = cut;
        float share = by_weight ? fmaxf(sample.top_p, 1e-38f) : 0.0f;
        bool is_cut = by_weight ? sample.top_p < 1.0f : sample.top_k > 0 && sample.top_k < p.vocab;
        if (is_cut) cut = find_cut(logits, row, scale, by_weight ? 1 : sample.top_k, share, s);
    }
    // What each block has: the weights of larger keys, and how many equals.
    u64 larger = 0, num_equals = 0;
    row.for_all(logits, [&](u32, float logit) {
        u32 key = key_of(logit);
        if (key > cut.key) larger += scale.weight(logit);
        num_equals += key == cut.key;
    });
    larger = block_sum_u64(larger, s);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = (u32)block_sum_u64(num_equals, s);
    row.tell(larger, count);
    // In each lane of one block: how many equals stand in front of it, what it keeps, and what all keep up to it.
    u32 equals_before = scan(count) - count;
    u32 kept = cut.equals > equals_before ? min(count, cut.equals - equals_before) : 0;
    u64 own = larger + scale.weight_of_key(cut.key) * kept, up_to = scan(own);
    u64 total = __shfl_sync(NONE, up_to, 31), before = __shfl_sync(NONE, up_to - own, row.block);
    own = __shfl_sync(NONE, own, row.block);
    equals_before = __shfl_sync(NONE, equals_before, row.block);
    u64 target = __umul64hi(random_bits(sample), total);
    if (target < before || target >= before + own) return false;
    count_equals(logits, row, cut, equals_before, s);
    equals_before = s.warp_equals[warp];
    u64 sum = 0;
    for_kept(logits, row, cut, equals_before, [&](u32, float logit, bool is_kept) {
        if (is_kept) sum += scale.weight(logit);
        return false;
    });
    block_sum_u64(sum, s);
    for (u32 i = 0; i < warp; i++) before += s.warps[i];
    if (before <= target && target < before + s.warps[warp]) {
        u64 running = before;
        for_kept(logits, row, cut, equals_before, [&](u32 id, float logit, bool is_kept) {
            u64 weight = is_kept ? scale.weight(logit) : 0;
            u64 inclusive = scan(weight);
            u32 ballot = __ballot_sync(NONE, running + inclusive > target);
            if (ballot) {
                if (lane == __ffs(ballot) - 1) s.choice = id;
                return true;
            }
            running += __shfl_sync(NONE, inclusive, 31);
            return false;
        });
    }
    __syncthreads();
    return true;
}

// The log-probability and rank of `token`, and the most likely tokens in no order, all from the raw logits.
__device__ void score(const SampleParams& p, const SampleRow& sample, Row& row, u32 token, Shared& s) {
    const float* logits = p.logits + (u64)sample.logit_row * p.vocab;
    u64 sum = 0, better = 0, equals = 0;
    u32 key = 0;
    row.for_all(logits, [&](u32, float logit) { key = max(key, key_of(logit)); });
    key = __reduce_max_sync(NONE, key);
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.warps[threadIdx.x / 32] = key;
    __syncthreads();
    for (int i = 0; i < WARPS; i++) key = max(key, (u32)s.warps[i]);
    row.tell(sum, key);
    key = __reduce_max_sync(NONE, key);
    float highest = __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
    float own = token < p.vocab ? clean(logits[token]) : NEG_INF;
    sum = 0;
    row.for_all(logits, [&](u32, float logit) {
        if (highest != NEG_INF) sum += fixed_point(likelihood(logit, highest, 1.0f));
        better += logit > own;
    });
    sum = block_sum_u64(sum, s);
    u32 number = (u32)block_sum_u64(better, s);
    row.tell(sum, number);
    sum = warp_sum_u64(sum);
    better = __reduce_add_sync(NONE, number);
    float normalizer = highest;
    if (highest != NEG_INF) normalizer = (float)((double)highest + log((double)sum / 1099511627776.0));
    u32 count = sample.num_logprobs == NONE ? 0 : min(min(sample.num_logprobs, (u32)MAX_TOP), p.vocab);
    if (row.block == 0 && threadIdx.x == 0) {
        u32* result = p.results + RESULT_WORDS * blockIdx.y;
        result[1] = __float_as_uint(own == NEG_INF ? own : own - normalizer);
        result[2] = 1 + (u32)better;
        result[3] = count;
        result[4] = __float_as_uint(normalizer);
    }
    if (count == 0) return;
    Scale scale = {highest, 1.0f, 0.0f, false, {0, NONE}};
    Cut cut = find_cut(logits, row, scale, count, 0.0f, s);
    row.for_all(logits, [&](u32, float logit) { equals += key_of(logit) == cut.key; });
    number = (u32)block_sum_u64(equals, s);
    row.tell(sum, number);
    count_equals(logits, row, cut, __shfl_sync(NONE, scan(number) - number, row.block), s);
    u32* top = p.top + (u64)blockIdx.y * MAX_TOP * 2;
    for_kept(logits, row, cut, s.warp_equals[threadIdx.x / 32], [&](u32 id, float logit, bool is_kept) {
        if (is_kept) {
            u32 place = atomicAdd(&row.meeting->place, 1);
            if (place < count) {
                top[2 * place] = id;
                top[2 * place + 1] = __float_as_uint(logit);
            }
        }
        return false;
    });
}

// blockIdx.x is the part of the row, blockIdx.y the sample.
KERNEL __launch_bounds__(THREADS, 2) sample_choose(const SampleParams p) {
    __shared__ Shared s;
    allow_next();
    wait_for_previous();
    u32 number = blockIdx.y;
    if (number >= p.step->num_samples) return;
    const SampleRow sample = reinterpret_cast<const SampleRow*>(words(p.step, p.step->samples))[number];
    u32 share = ((p.vocab + gridDim.x - 1) / gridDim.x + 31) / 32 * 32;
    u32 start = min(blockIdx.x * share, p.vocab);
    auto bins = reinterpret_cast<u64(*)[256]>(p.bins + (gridDim.x > 1 ? number * 3 * 256 : 0));
    Row row = {p.meetings + number, bins, start, min(start + share, p.vocab), blockIdx.x, gridDim.x, 0};
    bool scores = sample.forced != NONE || sample.num_logprobs != NONE;
    u32 token = sample.forced;
    bool is_known = blockIdx.x == 0;
    if (token == NONE) {
        float max = p.part_max[number * PARTS + threadIdx.x % 32];
        u32 best = p.part_best[number * PARTS + threadIdx.x % 32];
        warp_best(max, best);
        token = best == NONE ? 0 : best;
        if (sample.temperature > 0.0f && max != NEG_INF) {
            const float* logits =
                changes_logits(sample) ? p.adjusted + (u64)number * p.vocab : p.logits + (u64)sample.logit_row * p.vocab;
            is_known = draw(logits, row, max, sample, p, s);
            token = s.choice;
        }
    }
    // By the one block that knows it.
    if (is_known && threadIdx.x == 0) {
        p.drawn[number] = token;
        u32* result = p.results + RESULT_WORDS * number;
        result[0] = token;
        result[1] = result[2] = result[3] = result[4] = 0;
        row.meeting->token = token;
    }
    if (!scores) return;
    row.meet();
    score(p, sample, row, __ldcg(&row.meeting->token), s);
}
