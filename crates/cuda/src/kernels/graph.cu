// Layers of graph networks: rows of neighbours reduced into the input of a product, and the end of a layer.
//
// A block of threads is a target; a thread has every blockDim-th column and goes through the neighbours in their order, so
// that each sum has one order however the work is cut.

struct GraphRows {
    const void* start;
    const unsigned* pages;  // null: node n is row n
    unsigned long long num_rows;
    unsigned num_pages;
    unsigned shift;
    unsigned cols;
    unsigned is_bf16;
};

static __device__ __forceinline__ float graph_open(unsigned short bits) {
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

static __device__ __forceinline__ unsigned short graph_round(float value) {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<unsigned short>((bits >> 16) | 0x40u);
    return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// The row of a node; of one that has none, the first: the host has checked the nodes, this only keeps reads inside.
static __device__ __forceinline__ unsigned long long graph_row(const GraphRows& rows, unsigned node) {
    unsigned long long row = node;
    if (rows.pages != nullptr) {
        const unsigned page = node >> rows.shift;
        if (page >= rows.num_pages) return 0;
        row = (static_cast<unsigned long long>(rows.pages[page]) << rows.shift) + (node & ((1u << rows.shift) - 1u));
    }
    return row < rows.num_rows ? row : 0;
}

template <bool IS_BF16>
static __device__ __forceinline__ float graph_value(const GraphRows& rows, unsigned long long row, unsigned col) {
    const unsigned long long at = row * rows.cols + col;
    return IS_BF16 ? graph_open(static_cast<const unsigned short*>(rows.start)[at])
                   : static_cast<const float*>(rows.start)[at];
}

static __device__ __forceinline__ float graph_read(const GraphRows& rows, unsigned long long row, unsigned col) {
    const unsigned long long at = row * rows.cols + col;
    return rows.is_bf16 ? graph_open(static_cast<const unsigned short*>(rows.start)[at])
                        : static_cast<const float*>(rows.start)[at];
}

struct ReduceParams {
    GraphRows neighbours;           // cols 0: none
    GraphRows own;                  // cols 0: none
    const unsigned* targets;   // [targets]
    const unsigned* offsets;   // [targets + 1]
    const unsigned* sources;
    const unsigned* degrees;   // [targets], or null
    const float* scales;       // of each node, or null
    float* accumulators;       // [.., accumulator_cols], or null
    float* output;             // [targets, neighbours.cols + own.cols]
    unsigned accumulator_cols;
    unsigned first_row;
    unsigned kind;             // 0 mean, 1 max, 2 GCN
    unsigned begins;
    unsigned ends;
    unsigned padding;
};

// Rows that are asked for before the first of them is added: a node may have very many neighbours, and one thread block.
constexpr unsigned GRAPH_AHEAD = 4;

template <unsigned KIND>
static __device__ __forceinline__ float graph_join(float sum, float value, float scale) {
    if (KIND == 0) return __fadd_rn(sum, value);
    if (KIND == 1) return sum > value ? sum : value;
    return __fmaf_rn(scale, value, sum);
}

// One column of a node's neighbours, joined in their order.
template <unsigned KIND, bool IS_BF16>
static __device__ __forceinline__ float graph_column(const ReduceParams& p, unsigned first, unsigned last, unsigned col, float sum) {
    unsigned edge = first;
    for (; edge + GRAPH_AHEAD <= last; edge += GRAPH_AHEAD) {
        float values[GRAPH_AHEAD], scales[GRAPH_AHEAD];
#pragma unroll
        for (unsigned i = 0; i < GRAPH_AHEAD; i++) {
            const unsigned source = p.sources[edge + i];
            values[i] = graph_value<IS_BF16>(p.neighbours, graph_row(p.neighbours, source), col);
            scales[i] = KIND == 2 ? p.scales[source] : 0.0f;
        }
#pragma unroll
        for (unsigned i = 0; i < GRAPH_AHEAD; i++) sum = graph_join<KIND>(sum, values[i], scales[i]);
    }
    for (; edge < last; edge++) {
        const unsigned source = p.sources[edge];
        const float value = graph_value<IS_BF16>(p.neighbours, graph_row(p.neighbours, source), col);
        sum = graph_join<KIND>(sum, value, KIND == 2 ? p.scales[source] : 0.0f);
    }
    return sum;
}

template <bool IS_BF16>
static __device__ __forceinline__ float graph_sum(const ReduceParams& p, unsigned first, unsigned last, unsigned col, float sum) {
    if (p.kind == 0) return graph_column<0, IS_BF16>(p, first, last, col, sum);
    if (p.kind == 1) return graph_column<1, IS_BF16>(p, first, last, col, sum);
    return graph_column<2, IS_BF16>(p, first, last, col, sum);
}

extern "C" __global__ void __launch_bounds__(128) graph_reduce(const ReduceParams p) {
    wait_for_previous();
    const unsigned target = blockIdx.x;
    const unsigned node = p.targets[target];
    const unsigned width = p.neighbours.cols + p.own.cols;
    float* out = p.output + static_cast<unsigned long long>(target) * width;
    if (p.neighbours.cols > 0) {
        const unsigned first = p.offsets[target], last = p.offsets[target + 1];
        const unsigned degree = p.degrees != nullptr ? p.degrees[target] : last - first;
        for (unsigned col = threadIdx.x; col < p.neighbours.cols; col += blockDim.x) {
            float* kept = p.accumulators == nullptr ? nullptr
                : p.accumulators + static_cast<unsigned long long>(p.first_row + target) * p.accumulator_cols + col;
            float sum = p.kind == 1 ? NEG_INF : 0.0f;
            if (kept != nullptr && !p.begins) sum = *kept;
            sum = p.neighbours.is_bf16 ? graph_sum<true>(p, first, last, col, sum)
                                       : graph_sum<false>(p, first, last, col, sum);
            if (!p.ends) {
                *kept = sum;
                continue;
            }
            if (p.kind == 0) sum = degree > 1 ? __fdiv_rn(sum, static_cast<float>(degree)) : sum;
            else if (p.kind == 1) sum = degree == 0 ? 0.0f : sum;
            else {
                const float scale = p.scales[node];
                sum = scale * __fmaf_rn(scale, graph_read(p.neighbours, graph_row(p.neighbours, node), col), sum);
            }
            out[col] = sum;
        }
        if (!p.ends) return;
    }
    if (p.own.cols > 0) {
        const unsigned long long row = graph_row(p.own, node);
        for (unsigned col = threadIdx.x; col < p.own.cols; col += blockDim.x) {
            out[p.neighbours.cols + col] = graph_read(p.own, row, col);
        }
    }
}

struct FinishParams {
    const float* values;       // [targets, cols]
    const float* bias;         // [cols], or null
    const unsigned* targets;   // [targets]
    GraphRows output;
    unsigned relu;
    unsigned normalize;
};

extern "C" __global__ void __launch_bounds__(128) graph_finish(const FinishParams p) {
    __shared__ float parts[4];
    wait_for_previous();
    const unsigned target = blockIdx.x;
    const unsigned cols = p.output.cols;
    const float* values = p.values + static_cast<unsigned long long>(target) * cols;
    float norm = 1.0f;
    if (p.normalize) {
        float squares = 0.0f;
        for (unsigned col = threadIdx.x; col < cols; col += blockDim.x) {
            const float value = values[col] + (p.bias != nullptr ? p.bias[col] : 0.0f);
            squares = __fmaf_rn(value, value, squares);
        }
        for (int lane = 16; lane > 0; lane /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, lane);
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = squares;
        __syncthreads();
        norm = fmaxf(__fsqrt_rn(parts[0] + parts[1] + parts[2] + parts[3]), 1e-12f);
    }
    const unsigned long long row = graph_row(p.output, p.targets[target]);
    for (unsigned col = threadIdx.x; col < cols; col += blockDim.x) {
        float value = values[col] + (p.bias != nullptr ? p.bias[col] : 0.0f);
        if (p.normalize) value = __fdiv_rn(value, norm);
        if (p.relu && value < 0.0f) value = 0.0f;
        const unsigned long long at = row * cols + col;
        void* start = const_cast<void*>(p.output.start);
        if (p.output.is_bf16) static_cast<unsigned short*>(start)[at] = graph_round(value);
        else static_cast<float*>(start)[at] = value;
    }
}

struct GatherParams {
    GraphRows rows;
    const unsigned* nodes;
    float* output;             // [nodes, cols]
};

extern "C" __global__ void __launch_bounds__(128) graph_gather(const GatherParams p) {
    wait_for_previous();
    const unsigned long long row = graph_row(p.rows, p.nodes[blockIdx.x]);
    float* out = p.output + static_cast<unsigned long long>(blockIdx.x) * p.rows.cols;
    for (unsigned col = threadIdx.x; col < p.rows.cols; col += blockDim.x) out[col] = graph_read(p.rows, row, col);
}

struct UploadParams {
    const void* staged;        // [count, row_bytes], in the table's own precision
    const unsigned* rows;      // [count]
    void* table;
    unsigned row_bytes;
    unsigned padding;
};

extern "C" __global__ void __launch_bounds__(128) graph_upload(const UploadParams p) {
    wait_for_previous();
    const unsigned long long from = static_cast<unsigned long long>(blockIdx.x) * p.row_bytes;
    const unsigned long long to = static_cast<unsigned long long>(p.rows[blockIdx.x]) * p.row_bytes;
    for (unsigned byte = 2 * threadIdx.x; byte < p.row_bytes; byte += 2 * blockDim.x) {
        *reinterpret_cast<unsigned short*>(static_cast<char*>(p.table) + to + byte) =
            *reinterpret_cast<const unsigned short*>(static_cast<const char*>(p.staged) + from + byte);
    }
}
