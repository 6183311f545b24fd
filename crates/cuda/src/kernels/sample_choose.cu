// The tokens themselves: see sample.cuh.

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
        u32* meeting = reinterpret_cast<u32*>(p.row_syncs + sample);
        for (u32 i = threadIdx.x; i < sizeof(RowSync) / 4; i += 256) meeting[i] = 0;
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
            p.spans[sample * SPANS + blockIdx.x * 8 + threadIdx.x / 32] = key_of(max);
        shared_max[threadIdx.x / 32] = max;
        shared_best[threadIdx.x / 32] = best;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int i = 1; i < 8; i++) keep_better(max, best, shared_max[i], shared_best[i]);
    p.part_max[sample * PARTS + blockIdx.x] = max;
    p.part_best[sample * PARTS + blockIdx.x] = best;
}

enum Outcome { MINE, OTHERS, UNKNOWN };

// Draws from a list of the best tokens, if all that is kept is in it; by the first block.
__device__ Outcome draw_listed(
    const float* logits, Row& row, const Scale& scale, const SampleRow& sample, const SampleParams& p, Shared& s) {
    u32 number = blockIdx.y, thread = threadIdx.x;
    bool has_top_k = sample.top_k > 0 && sample.top_k < p.vocab;
    u32 rank = has_top_k ? sample.top_k : SPANS * 11 / 16;
    if (rank > SPANS * 3 / 4 || number >= p.max_listed_rows || (!has_top_k && sample.top_p >= 1.0f)) return UNKNOWN;
    // The threshold: so many are as good.
    if (thread < SPANS) s.keys[thread] = p.spans[number * SPANS + thread];
    __syncthreads();
    if (thread < SPANS) {
        u32 own = s.keys[thread], better = 0;
        for (u32 i = 0; i < SPANS; i++) better += s.keys[i] > own || (s.keys[i] == own && i < thread);
        if (better == rank - 1) s.choice = own;
    }
    __syncthreads();
    u32 threshold = s.choice;
    u64 total = 0;
    uint2* candidates = p.candidates + number * MAX_CANDIDATES;
    row.for_all(logits, [&](u32 id, float logit) {
        if (!has_top_k) total += scale.weight(logit);
        if (key_of(logit) < threshold || logit == NEG_INF) return;
        u32 place = atomicAdd(&row.meeting->num_listed, 1);
        if (place < MAX_CANDIDATES) candidates[place] = make_uint2(id, __float_as_uint(logit));
    });
    if (!has_top_k) total = block_sum_u64(total, s);
    u32 count = 0;
    row.tell(total, count);
    total = warp_sum_u64(total);
    count = __ldcg(&row.meeting->num_listed);
    if (count > MAX_CANDIDATES) return UNKNOWN;
    // Each block looks at the list, so that all come to the same end.
    u64 weight = 0, better_weight = 0;
    u32 key = 0, id = NONE, better = 0;
    if (thread < count) {
        uint2 entry = __ldcg(candidates + thread);
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

// blockIdx.x is the part of the row, blockIdx.y the sample.
KERNEL __launch_bounds__(THREADS, 2) sample_choose(const SampleParams p) {
    __shared__ Shared s;
    allow_next();
    wait_for_previous();
    u32 number = blockIdx.y;
    if (number >= p.step->num_samples) return;
    const SampleRow sample = reinterpret_cast<const SampleRow*>(words(p.step, p.step->samples))[number];
    Row row = row_of(p, 0);
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
        row.meeting->rounds = row.round;
    }
}
