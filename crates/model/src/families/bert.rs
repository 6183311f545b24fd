//! Encoders: BERT, RoBERTa with its many languages, and Nomic's BERT, which rotates instead of learning positions and has a gate.

use baton_backend::{Activation, RopeStyle};

use super::{Family, Keys};
use crate::config::{Defaults, EncoderConfig, GgufReader, Pooling, config_error};
use crate::tensor_names::Role;
use crate::{Architecture, ModelConfig, ModelError, QkvLayout};

const DEFAULTS: Defaults = Defaults {
    max_position_embeddings: 512,
    norm_eps: 1e-12,
    hidden_act: "gelu",
    tied_embeddings: true,
    ..Defaults::LLAMA
};

pub(super) const FAMILY: Family = Family {
    architecture: Architecture::Bert,
    classes: &["BertModel", "BertForMaskedLM", "BertForSequenceClassification", "bert"],
    gguf: &["bert"],
    defaults: DEFAULTS,
    layers: "bert.encoder.layer.",
    optional_prefix: "bert.",
    names: &[
        (Role::TokenEmbedding, "bert.embeddings.word_embeddings"),
        (Role::PositionEmbedding, "bert.embeddings.position_embeddings"),
        (Role::TokenTypeEmbedding, "bert.embeddings.token_type_embeddings"),
        (Role::EmbedNorm, "bert.embeddings.LayerNorm"),
        (Role::AttnQ, "attention.self.query"),
        (Role::AttnK, "attention.self.key"),
        (Role::AttnV, "attention.self.value"),
        (Role::AttnOutput, "attention.output.dense"),
        (Role::PostAttnNorm, "attention.output.LayerNorm"),
        (Role::FfnUp, "intermediate.dense"),
        (Role::FfnDown, "output.dense"),
        (Role::PostFfnNorm, "output.LayerNorm"),
        (Role::Pooler, "bert.pooler.dense"),
        (Role::Classifier, "classifier"),
    ],
    gguf_names: GGUF_NAMES,
    adjust,
    adjust_gguf,
    examples: "all-MiniLM, BGE, E5, GTE (v1), MixedBread; rerankers: ms-marco-MiniLM, mxbai-rerank-v1",
    golden: &["bert", "bert-cls", "bert-reranker"],
    ..Family::LLAMA_LIKE
};

pub(super) const ROBERTA: Family = Family {
    architecture: Architecture::Roberta,
    classes: &[
        "RobertaModel",
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        "XLMRobertaModel",
        "XLMRobertaForMaskedLM",
        "XLMRobertaForSequenceClassification",
        "CamembertModel",
        "roberta",
        "xlm-roberta",
    ],
    gguf: &[],
    layers: "roberta.encoder.layer.",
    optional_prefix: "roberta.",
    names: &[
        (Role::TokenEmbedding, "roberta.embeddings.word_embeddings"),
        (Role::PositionEmbedding, "roberta.embeddings.position_embeddings"),
        (Role::TokenTypeEmbedding, "roberta.embeddings.token_type_embeddings"),
        (Role::EmbedNorm, "roberta.embeddings.LayerNorm"),
        (Role::AttnQ, "attention.self.query"),
        (Role::AttnK, "attention.self.key"),
        (Role::AttnV, "attention.self.value"),
        (Role::AttnOutput, "attention.output.dense"),
        (Role::PostAttnNorm, "attention.output.LayerNorm"),
        (Role::FfnUp, "intermediate.dense"),
        (Role::FfnDown, "output.dense"),
        (Role::PostFfnNorm, "output.LayerNorm"),
        (Role::Pooler, "classifier.dense"),
        (Role::Classifier, "classifier.out_proj"),
    ],
    adjust: adjust_roberta,
    examples: "all-distilroberta, multilingual E5, BGE-M3 (dense); rerankers: bge-reranker-v2-m3",
    golden: &["roberta", "roberta-reranker"],
    ..FAMILY
};

pub(super) const NOMIC: Family = Family {
    architecture: Architecture::NomicBert,
    classes: &["NomicBertModel", "nomic_bert"],
    gguf: &["nomic-bert"],
    aliases: &[("activation_function", "nomic_activation"), ("n_positions", "max_position_embeddings")],
    defaults: Defaults { max_position_embeddings: 8192, hidden_act: "silu", rope_theta: 1000.0, ..DEFAULTS },
    layers: "encoder.layers.",
    optional_prefix: "",
    names: &[
        (Role::TokenEmbedding, "embeddings.word_embeddings"),
        (Role::TokenTypeEmbedding, "embeddings.token_type_embeddings"),
        (Role::EmbedNorm, "emb_ln"),
        (Role::AttnQkv, "attn.Wqkv"),
        (Role::AttnOutput, "attn.out_proj"),
        (Role::PostAttnNorm, "norm1"),
        (Role::FfnUp, "mlp.fc11"),
        (Role::FfnGate, "mlp.fc12"),
        (Role::FfnDown, "mlp.fc2"),
        (Role::PostFfnNorm, "norm2"),
    ],
    adjust: adjust_nomic,
    adjust_gguf: adjust_nomic_gguf,
    examples: "nomic-embed-text v1, v1.5",
    golden: &["nomic"],
    ..FAMILY
};

const GGUF_NAMES: &[(Role, &str)] = &[
    (Role::TokenTypeEmbedding, "token_types"),
    (Role::PostAttnNorm, "attn_output_norm"),
    (Role::PostFfnNorm, "layer_output_norm"),
    (Role::Pooler, "cls"),
    (Role::Classifier, "cls.output"),
];

fn set_encoder(config: &mut ModelConfig) {
    config.layer_norm = true;
    config.pre_norms = false;
    config.post_norms = true;
    config.embed_norm = true;
    // There is no head over the vocabulary.
    config.tied_embeddings = true;
}

fn adjust(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    if let Some(kind) = keys.text("position_embedding_type").filter(|kind| *kind != "absolute") {
        return Err(config_error(format!("position_embedding_type {kind:?} is not supported")));
    }
    keys.refuse_unless("is_decoder", false)?;
    set_encoder(config);
    config.without_rope();
    config.learned_positions = true;
    config.gated_mlp = false;
    config.set_all_biases(true);
    let is_classifier = keys.class().ends_with("ForSequenceClassification");
    config.encoder = Some(EncoderConfig {
        num_token_types: keys.size("type_vocab_size")?.unwrap_or(2),
        num_labels: is_classifier.then(|| keys.num_labels()).transpose()?,
        applies_sigmoid: is_classifier && keys.num_labels()? == 1 && !keys.has_identity_activation(),
        ..EncoderConfig::default()
    });
    Ok(())
}

fn adjust_roberta(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    adjust(config, keys)?;
    // The first rows are for padding.
    config.position_offset = keys.size("pad_token_id")?.unwrap_or(1).saturating_add(1);
    config.max_model_len = config.max_model_len.saturating_sub(config.position_offset);
    if let Some(encoder) = &mut config.encoder {
        encoder.double_separator = true;
    }
    Ok(())
}

fn adjust_nomic(config: &mut ModelConfig, keys: &Keys) -> Result<(), ModelError> {
    keys.refuse_unless("prenorm", false)?;
    keys.refuse_unless("use_rms_norm", false)?;
    for bias in ["qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"] {
        keys.refuse_unless(bias, false)?;
    }
    set_encoder(config);
    config.activation = Activation::Silu;
    config.qkv_layout = QkvLayout::Concatenated;
    // Beyond what it was trained on, positions would have to be stretched.
    if let Some(trained) = keys.size("max_trained_positions")? {
        config.max_model_len = config.max_model_len.min(trained.max(1));
    }
    config.encoder = Some(EncoderConfig {
        num_token_types: keys.size("type_vocab_size")?.unwrap_or(2),
        ..EncoderConfig::default()
    });
    Ok(())
}

fn encoder_of(file: &GgufReader<'_>) -> Result<EncoderConfig, ModelError> {
    let pooling = match file.integer("pooling_type")? {
        Some(2) => Pooling::Cls,
        Some(3) => Pooling::Last,
        _ => Pooling::Mean,
    };
    let num_token_types = file.rows("token_types.weight");
    Ok(EncoderConfig { pooling, normalize: true, num_token_types, ..EncoderConfig::default() })
}

fn adjust_gguf(config: &mut ModelConfig, file: &GgufReader<'_>) -> Result<(), ModelError> {
    set_encoder(config);
    config.norm_bias = true;
    config.without_rope();
    config.activation = Activation::Gelu;
    config.encoder = Some(encoder_of(file)?);
    Ok(())
}

fn adjust_nomic_gguf(config: &mut ModelConfig, file: &GgufReader<'_>) -> Result<(), ModelError> {
    set_encoder(config);
    config.norm_bias = true;
    config.rope_style = RopeStyle::Half;
    config.encoder = Some(encoder_of(file)?);
    Ok(())
}
