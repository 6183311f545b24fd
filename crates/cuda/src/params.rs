//! The arguments of the kernels, field by field as the `.cu` files declare them.

/// On the device; 0 is null.
pub(crate) type Address = u64;

#[repr(C)]
pub(crate) struct NormParams {
    pub(crate) step: Address,
    pub(crate) input: Address,
    pub(crate) weight: Address,
    pub(crate) bias: Address,
    pub(crate) output: Address,
    pub(crate) cols: u32,
    pub(crate) eps: f32,
    pub(crate) is_layer_norm: u32,
    pub(crate) accumulate: u32,
    pub(crate) gathers_logit_rows: u32,
}

#[repr(C)]
pub(crate) struct QuantizeParams {
    pub(crate) step: Address,
    pub(crate) input: Address,
    pub(crate) weight: Address,
    pub(crate) bias: Address,
    pub(crate) output: Address,
    pub(crate) scales: Address,
    pub(crate) cols: u32,
    pub(crate) eps: f32,
    pub(crate) is_layer_norm: u32,
}

#[repr(C)]
pub(crate) struct OrderParams {
    pub(crate) step: Address,
    pub(crate) input: Address,
    pub(crate) columns: Address,
    pub(crate) output: Address,
    pub(crate) cols: u32,
}

#[repr(C)]
pub(crate) struct RopeParams {
    pub(crate) step: Address,
    pub(crate) projected: Address,
    pub(crate) bias: Address,
    pub(crate) q_norm: Address,
    pub(crate) k_norm: Address,
    pub(crate) inv_freq: Address,
    pub(crate) query: Address,
    pub(crate) cache: Address,
    pub(crate) num_heads: u32,
    pub(crate) num_kv_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) half_rotary: u32,
    pub(crate) interleaved: u32,
    pub(crate) block_shift: u32,
    pub(crate) cache_type: u32,
    pub(crate) lane: u32,
    pub(crate) q_eps: f32,
    pub(crate) k_eps: f32,
    pub(crate) rope_scale: f32,
}

#[repr(C)]
pub(crate) struct HeadNormParams {
    pub(crate) step: Address,
    pub(crate) projected: Address,
    pub(crate) bias: Address,
    pub(crate) q_weight: Address,
    pub(crate) q_bias: Address,
    pub(crate) k_weight: Address,
    pub(crate) k_bias: Address,
    pub(crate) num_heads: u32,
    pub(crate) num_kv_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) span: u32,
    pub(crate) q_is_layer_norm: u32,
    pub(crate) k_is_layer_norm: u32,
    pub(crate) q_eps: f32,
    pub(crate) k_eps: f32,
}

#[repr(C)]
pub(crate) struct EncoderParams {
    pub(crate) step: Address,
    pub(crate) qkv: Address,
    pub(crate) inv_freq: Address,
    pub(crate) output: Address,
    pub(crate) num_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) half_rotary: u32,
    pub(crate) interleaved: u32,
    pub(crate) scale: f32,
    pub(crate) rope_scale: f32,
}

#[repr(C)]
pub(crate) struct LogitBiasParams {
    pub(crate) values: Address,
    pub(crate) bias: Address,
    pub(crate) count: u64,
    pub(crate) width: u32,
}

#[repr(C)]
pub(crate) struct ActivateParams {
    pub(crate) projected: Address,
    pub(crate) bias: Address,
    pub(crate) output: Address,
    pub(crate) rows: u32,
    pub(crate) width: u32,
    pub(crate) activation: u32,
}

#[repr(C)]
pub(crate) struct ActivateRowsParams {
    pub(crate) values: Address,
    pub(crate) count: u64,
    pub(crate) activation: u32,
}

#[repr(C)]
pub(crate) struct BiasParams {
    pub(crate) values: Address,
    pub(crate) bias: Address,
    pub(crate) rows: u32,
    pub(crate) width: u32,
}

#[repr(C)]
pub(crate) struct SoftcapParams {
    pub(crate) values: Address,
    pub(crate) count: u64,
    pub(crate) cap: f32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ProductParams {
    pub(crate) weight: Address,
    pub(crate) unit_bytes: u64,
    pub(crate) input: Address,
    pub(crate) bias: Address,
    pub(crate) output: Address,
    pub(crate) num_rows: u32,
    pub(crate) cols: u32,
    pub(crate) m: u32,
    pub(crate) output_stride: u32,
    pub(crate) accumulate: u32,
    pub(crate) is_f32: u32,
    pub(crate) softcap: f32,
    pub(crate) activation: u32,
}

/// Of `wide.cuh`.
#[repr(C)]
pub(crate) struct WideProductParams {
    pub(crate) input: TensorMap,
    pub(crate) weight: TensorMap,
    pub(crate) product: ProductParams,
    pub(crate) input_scales: Address,
    pub(crate) weight_scales: Address,
    pub(crate) norm: Address,
    pub(crate) chunks: u32,
    pub(crate) eps: f32,
}

#[repr(C)]
pub(crate) struct EmbedParams {
    pub(crate) step: Address,
    pub(crate) drawn: Address,
    pub(crate) weight: Address,
    pub(crate) unit_bytes: u64,
    pub(crate) output: Address,
    pub(crate) first_row: u32,
    pub(crate) num_rows: u32,
    pub(crate) cols: u32,
    pub(crate) scale: f32,
    pub(crate) adds_positions: u32,
}

#[repr(C)]
pub(crate) struct PackParams {
    pub(crate) source: Address,
    pub(crate) row_bytes: u64,
    pub(crate) target: Address,
    pub(crate) tile_bytes: u64,
    pub(crate) first_row: u32,
    pub(crate) num_rows: u32,
    pub(crate) cols: u32,
}

#[repr(C)]
pub(crate) struct ConvertParams {
    pub(crate) weight: Address,
    pub(crate) unit_bytes: u64,
    pub(crate) output: Address,
    pub(crate) num_rows: u32,
    pub(crate) cols: u32,
    /// Of e4m3 only; the kernels of other formats do not have these.
    pub(crate) first_row: u32,
    pub(crate) across: u32,
    pub(crate) scales: Address,
}

#[repr(C)]
pub(crate) struct LatentManyParams {
    pub(crate) attention: AttentionParams,
    pub(crate) tiles_of_item: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct AttentionParams {
    pub(crate) step: Address,
    pub(crate) query: Address,
    pub(crate) cache: Address,
    pub(crate) slopes: Address,
    pub(crate) sinks: Address,
    pub(crate) output: Address,
    pub(crate) partials: Address,
    pub(crate) partial_lse: Address,
    pub(crate) arrivals: Address,
    pub(crate) plan: u32,
    pub(crate) window: u32,
    pub(crate) num_heads: u32,
    pub(crate) num_kv_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) block_shift: u32,
    pub(crate) cache_type: u32,
    pub(crate) scale: f32,
    pub(crate) softcap: f32,
    pub(crate) is_decode: u32,
    pub(crate) is_shared: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct SkinnyParams {
    pub(crate) step: Address,
    pub(crate) weight: Address,
    pub(crate) input: Address,
    pub(crate) norm: Address,
    pub(crate) bias: Address,
    pub(crate) output: Address,
    pub(crate) inv_freq: Address,
    pub(crate) cache: Address,
    pub(crate) num_rows: u32,
    pub(crate) cols: u32,
    pub(crate) num_tokens: u32,
    pub(crate) output_stride: u32,
    pub(crate) accumulate: u32,
    pub(crate) activation: u32,
    pub(crate) num_heads: u32,
    pub(crate) num_kv_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) block_shift: u32,
    pub(crate) cache_type: u32,
    pub(crate) lane: u32,
    pub(crate) eps: f32,
    pub(crate) softcap: f32,
    pub(crate) rope_scale: f32,
    pub(crate) across: u32,
    pub(crate) q_norm: Address,
    pub(crate) k_norm: Address,
    pub(crate) other_weight: Address,
    pub(crate) other_output: Address,
    pub(crate) other_rows: u32,
    pub(crate) first_blocks: u32,
    pub(crate) q_eps: f32,
    pub(crate) k_eps: f32,
}

/// What a bulk copy knows about a matrix; opaque.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct TensorMap(pub(crate) [u64; 16]);

#[repr(C)]
pub(crate) struct WideParams {
    pub(crate) cache: TensorMap,
    pub(crate) attention: AttentionParams,
}

#[repr(C)]
pub(crate) struct GatedParams {
    pub(crate) input: TensorMap,
    pub(crate) weight: TensorMap,
    pub(crate) output_map: TensorMap,
    pub(crate) output: Address,
    pub(crate) width: u32,
    pub(crate) num_tokens: u32,
    pub(crate) num_chunks: u32,
    pub(crate) group: u32,
    pub(crate) activation: u32,
    pub(crate) input_scales: Address,
    pub(crate) weight_scales: Address,
}

#[repr(C)]
pub(crate) struct KeepParams {
    pub(crate) step: Address,
    pub(crate) values: Address,
    pub(crate) row_units: u32,
}

#[repr(C)]
pub(crate) struct MoveParams {
    pub(crate) from: Address,
    pub(crate) to: Address,
    pub(crate) pairs: Address,
    pub(crate) count: u32,
    pub(crate) block_units: u32,
}

#[repr(C)]
pub(crate) struct FillParams {
    pub(crate) output: Address,
    pub(crate) count: u64,
    pub(crate) seed: u64,
    pub(crate) step: f32,
    pub(crate) largest: f32,
    pub(crate) format: u32,
}

#[repr(C)]
pub(crate) struct FillBytesParams {
    pub(crate) output: Address,
    pub(crate) first: u64,
    pub(crate) count: u64,
    pub(crate) seed: u64,
    pub(crate) block_bytes: u32,
    pub(crate) header_bytes: u32,
    pub(crate) mask: u32,
    pub(crate) reserved: u32,
    pub(crate) header: [u8; 16],
}

#[repr(C)]
pub(crate) struct ReadParams {
    pub(crate) from: Address,
    pub(crate) count: u64,
    pub(crate) sink: Address,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct SampleParams {
    pub(crate) step: Address,
    pub(crate) logits: Address,
    pub(crate) adjusted: Address,
    pub(crate) part_max: Address,
    pub(crate) part_best: Address,
    pub(crate) drawn: Address,
    pub(crate) results: Address,
    pub(crate) top: Address,
    pub(crate) row_syncs: Address,
    pub(crate) bins: Address,
    pub(crate) spans: Address,
    pub(crate) candidates: Address,
    pub(crate) vocab: u32,
    pub(crate) max_shared_rows: u32,
    pub(crate) max_listed_rows: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct RouteParams {
    pub(crate) step: Address,
    pub(crate) weight: Address,
    pub(crate) row_bytes: u64,
    pub(crate) input: Address,
    pub(crate) norm: Address,
    pub(crate) bias: Address,
    pub(crate) selection_bias: Address,
    pub(crate) products: Address,
    pub(crate) arrivals: Address,
    pub(crate) normed: Address,
    pub(crate) routing: Address,
    pub(crate) num_tokens: u32,
    pub(crate) num_rows: u32,
    pub(crate) cols: u32,
    pub(crate) num_experts: u32,
    pub(crate) top_k: u32,
    pub(crate) num_shared: u32,
    pub(crate) has_shared_gate: u32,
    pub(crate) is_sigmoid: u32,
    pub(crate) normalizes: u32,
    pub(crate) num_groups: u32,
    pub(crate) chosen_groups: u32,
    pub(crate) sums_two: u32,
    pub(crate) eps: f32,
    pub(crate) scale: f32,
    pub(crate) finish: u32,
    pub(crate) sort: SortParams,
}

#[repr(C)]
pub(crate) struct RouteTilesParams {
    pub(crate) product: SkinnyParams,
    pub(crate) route: RouteParams,
    pub(crate) cluster: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ExpertParams {
    pub(crate) step: Address,
    pub(crate) weight: Address,
    pub(crate) row_bytes: u64,
    pub(crate) input: Address,
    pub(crate) norm: Address,
    pub(crate) bias: Address,
    pub(crate) routing: Address,
    pub(crate) output: Address,
    pub(crate) num_rows: u32,
    pub(crate) cols: u32,
    pub(crate) num_tokens: u32,
    pub(crate) num_slots: u32,
    pub(crate) first_expert: u32,
    pub(crate) num_experts: u32,
    pub(crate) activation: u32,
    pub(crate) accumulate: u32,
    pub(crate) block_rows: u32,
    pub(crate) eps: f32,
    pub(crate) finds: u32,
    pub(crate) route: RouteParams,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct SortParams {
    pub(crate) step: Address,
    pub(crate) routing: Address,
    pub(crate) num_tiles: Address,
    pub(crate) tiles: Address,
    pub(crate) places: Address,
    pub(crate) sources: Address,
    pub(crate) num_tokens: u32,
    pub(crate) num_slots: u32,
    pub(crate) num_experts: u32,
    pub(crate) tile_rows: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct GatherParams {
    pub(crate) step: Address,
    pub(crate) input: Address,
    pub(crate) norm: Address,
    pub(crate) places: Address,
    pub(crate) output: Address,
    pub(crate) num_tokens: u32,
    pub(crate) num_slots: u32,
    pub(crate) cols: u32,
    pub(crate) eps: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CombineParams {
    pub(crate) step: Address,
    pub(crate) input: Address,
    pub(crate) places: Address,
    pub(crate) routing: Address,
    pub(crate) output: Address,
    pub(crate) num_tokens: u32,
    pub(crate) num_slots: u32,
    pub(crate) cols: u32,
    pub(crate) accumulate: u32,
}

#[repr(C)]
pub(crate) struct GroupedParams {
    pub(crate) input: TensorMap,
    pub(crate) weight: TensorMap,
    pub(crate) output_map: TensorMap,
    pub(crate) num_tiles: Address,
    pub(crate) tiles: Address,
    pub(crate) width: u32,
    pub(crate) expert_rows: u32,
    pub(crate) tiles_of_head: u32,
    pub(crate) num_heads: u32,
    pub(crate) input_step: u32,
    pub(crate) output_step: u32,
    pub(crate) num_chunks: u32,
    pub(crate) activation: u32,
}

#[repr(C)]
pub(crate) struct FewParams {
    pub(crate) weight: TensorMap,
    pub(crate) output_map: TensorMap,
    pub(crate) num_tiles: Address,
    pub(crate) tiles: Address,
    pub(crate) sources: Address,
    pub(crate) input: Address,
    pub(crate) width: u32,
    pub(crate) expert_rows: u32,
    pub(crate) cols: u32,
    pub(crate) num_chunks: u32,
    pub(crate) activation: u32,
}

#[repr(C)]
pub(crate) struct HeadParams {
    pub(crate) step: Address,
    pub(crate) weight: Address,
    pub(crate) row_bytes: u64,
    pub(crate) input: Address,
    pub(crate) output: Address,
    pub(crate) num_rows: u32,
    pub(crate) cols: u32,
    pub(crate) num_tokens: u32,
    pub(crate) num_heads: u32,
    pub(crate) input_step: u32,
    pub(crate) output_step: u32,
    pub(crate) partials: Address,
    pub(crate) partial_lse: Address,
    pub(crate) plan: u32,
    pub(crate) has_latent: u32,
    pub(crate) latent: LatentParams,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LatentParams {
    pub(crate) step: Address,
    pub(crate) latent: Address,
    pub(crate) norm: Address,
    pub(crate) query: Address,
    pub(crate) inv_freq: Address,
    pub(crate) cache: Address,
    pub(crate) output: Address,
    pub(crate) num_tokens: u32,
    pub(crate) num_heads: u32,
    pub(crate) rank: u32,
    pub(crate) half_rotary: u32,
    pub(crate) query_step: u32,
    pub(crate) interleaved: u32,
    pub(crate) block_shift: u32,
    pub(crate) cache_type: u32,
    pub(crate) lane: u32,
    pub(crate) eps: f32,
    pub(crate) rope_scale: f32,
}
