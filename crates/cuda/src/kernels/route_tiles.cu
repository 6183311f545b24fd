// The router of more than a few tokens as one launch: norm, products, choice and order of slots.
//
// A block makes 16 rows of the router by 8 or 16 tokens (`skinny.cu`, TILES), and the blocks of all rows are a cluster. Each gets the
// products of some of the tokens from the others, chooses for these, and writes their normed rows, which the experts read. Of one
// cluster the first block sorts, which has been given the choices; of several it is the last block that has chosen.
//
// What is chosen must not depend on how many tokens there are: inputs are not rounded, as they are not for fewer tokens.

#if __CUDA_ARCH__ >= 900

__device__ constexpr u32 ROUTE_WARPS = 16, ROUTE_TOKENS = TILES * 8, ROUTE_SLOTS = 64;

struct RouteTilesParams {
    SkinnyParams product;
    RouteParams route;
    u32 cluster; // blocks
};

template <typename T>
__device__ __forceinline__ void store_in_cluster(T* own, u32 block, u32 bits) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nst.shared::cluster.u32 [there], %2;\n}" ::
                 "r"((u32)__cvta_generic_to_shared(own)), "r"(block), "r"(bits) : "memory");
}

KERNEL __launch_bounds__(ROUTE_WARPS * 32, 1) route_tiles(const RouteTilesParams p) {
    __shared__ Parts<ROUTE_WARPS> parts;
    // Of the block's own tokens: the products of all rows, and what is chosen.
    __shared__ float products[ROUTE_TOKENS * 16 + 128], chosen[ROUTE_WARPS][2 * ROUTE_SLOTS];
    __shared__ float keys[ROUTE_WARPS][128];
    __shared__ u32 experts[ROUTE_TOKENS * ROUTE_SLOTS], counts[MAX_SORTED], sums_of_warps[ROUTE_WARPS];
    const SkinnyParams& q = p.product;
    const RouteParams& route = p.route;
    allow_next();
    arrive_cluster();
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, blocks = p.cluster, rank = blockIdx.x % blocks;
    u32 first_token = blockIdx.x / blocks * ROUTE_TOKENS, num_tokens = min(q.step->num_tokens, q.num_tokens);
    float sums[TILES][4] = {}, squares[TILES] = {}, result[4];
    multiply<ROUTE_WARPS, true, false, false, true>(q, q.num_rows, rank * 16, rank * 16 + 8, q.num_rows - 1, sums, squares, [] {}, first_token);
    wait_cluster(); // the others have started
    if (join<ROUTE_WARPS, true>(q, parts, sums, squares, result)) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 token = token_of(j), row = rank * 16 + j / 2 * 8 + lane / 4;
            store_in_cluster(&products[token / blocks * blocks * 16 + row], token % blocks, __float_as_uint(result[j]));
        }
    }
    __syncthreads();
    arrive_cluster();
    wait_cluster();
    // A warp for each of the block's tokens; the others write rows.
    u32 own = (ROUTE_TOKENS - rank + blocks - 1) / blocks, slots = route.top_k + route.num_shared;
    u32 token = rank + warp * blocks;
    bool is_one = gridDim.x == blocks;
    if (warp < own && first_token + token < num_tokens) {
        choose_by<4, true>(route, products + warp * blocks * 16, keys[warp], chosen[warp]);
        __syncwarp();
        float* routing = routing_of(route, first_token + token);
        for (u32 i = lane; i < 2 * slots; i += 32) {
            routing[i] = chosen[warp][i];
            if (is_one && i < slots) store_in_cluster(&experts[token * slots + i], 0, (u32)chosen[warp][i]);
        }
    }
    u32 writers = own < ROUTE_WARPS ? ROUTE_WARPS - own : ROUTE_WARPS, writer = own < ROUTE_WARPS ? warp - own : warp;
    if (writer < writers) {
        u32 pieces = (q.cols + 255) / 256;
        for (u32 i = writer; i < own * pieces; i += writers) {
            u32 token = rank + i / pieces * blocks, column = i % pieces * 256 + lane * 8;
            if (first_token + token >= num_tokens || column >= q.cols) continue;
            float total = 0.0f, x[8];
#pragma unroll
            for (u32 w = 0; w < ROUTE_WARPS; w++) total += parts.squares[w][token];
            float factor = rsqrtf(total / (float)q.cols + q.eps);
            u64 at = (u64)(first_token + token) * q.cols + column;
            unpack_bf16(*reinterpret_cast<const uint4*>(q.input + at), x);
            const float4 low = *reinterpret_cast<const float4*>(q.norm + column), high = *reinterpret_cast<const float4*>(q.norm + column + 4);
            const float weight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int j = 0; j < 8; j++) x[j] *= factor * weight[j];
            *reinterpret_cast<uint4*>(route.normed + at) = pack8_bf16(x);
        }
    }
    if (is_one) {
        __syncthreads();
        arrive_cluster();
        wait_cluster();
        if (rank == 0 && route.finish == FINISH_SORTED)
            sort_block<ROUTE_WARPS * 32>(route.sort, counts, sums_of_warps, [&](u32 slot) { return experts[slot]; });
    } else if (route.finish == FINISH_SORTED && is_last_of(route.arrivals, gridDim.x)) {
        sort_block<ROUTE_WARPS * 32>(route.sort, counts, sums_of_warps, ChosenExperts{route.sort});
    }
}

#endif
