// Log-probabilities and the most likely tokens: see sample.cuh.

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

// blockIdx.x is the part of the row, blockIdx.y the sample: as sample_choose had them.
KERNEL __launch_bounds__(THREADS, 2) sample_score(const SampleParams p) {
    __shared__ Shared s;
    allow_next();
    wait_for_previous();
    u32 number = blockIdx.y;
    if (number >= p.step->num_samples) return;
    const SampleRow sample = reinterpret_cast<const SampleRow*>(words(p.step, p.step->samples))[number];
    if (sample.forced == NONE && sample.num_logprobs == NONE) return;
    Row row = row_of(p, p.row_syncs[number].rounds);
    score(p, sample, row, p.row_syncs[number].token, s);
}
