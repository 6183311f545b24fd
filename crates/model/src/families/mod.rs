//! Model families as tables: which classes and GGUF architectures they are, what their files call things, and in what they differ
//! from a llama. One file for each; the decoder, the loader and the page `docs/models.md` read the tables.
//!
//! A family's `config.json` is read as a llama's after its keys were given llama's names; a GGUF file likewise, whose tensors say
//! much by being there. `adjust` and `adjust_gguf` then set what is different. Nothing here opens a file or names an op.

// All `adjust` functions have one type, whether or not they can fail.
#![allow(clippy::unnecessary_wraps)]

mod arcee;
mod baichuan;
mod bert;
mod bloom;
mod cohere;
mod ernie;
mod exaone;
mod falcon;
mod gemma;
mod glm;
mod gpt_bigcode;
mod gpt_oss;
mod gptj;
mod gptneox;
mod granite;
mod internlm;
mod keys;
mod mpt;
mod nemotron;
mod olmo;
mod opt;
mod page;
mod phi;
mod seed_oss;
mod smollm3;
mod stablelm;
mod starcoder2;

use baton_backend::RopeStyle;

pub(crate) use keys::Keys;
pub use page::models_page;

use crate::config::{Defaults, GgufReader};
use crate::tensor_names::Role;
use crate::{Architecture, ModelConfig, ModelError};

/// How a family differs from a llama. See the module.
#[derive(Debug)]
pub(crate) struct Family {
    pub(crate) architecture: Architecture,
    /// Classes of transformers, and `model_type`.
    pub(crate) classes: &'static [&'static str],
    /// `general.architecture` of GGUF files.
    pub(crate) gguf: &'static [&'static str],
    /// Keys of `config.json`, and what llama calls them.
    pub(crate) aliases: &'static [(&'static str, &'static str)],
    pub(crate) defaults: Defaults,
    /// Before the number of a layer.
    pub(crate) layers: &'static str,
    /// What tensors of Hugging Face's checkpoints begin with, or leave out.
    pub(crate) optional_prefix: &'static str,
    /// Where names differ from llama's.
    pub(crate) names: &'static [(Role, &'static str)],
    pub(crate) gguf_names: &'static [(Role, &'static str)],
    pub(crate) adjust: fn(&mut ModelConfig, &Keys) -> Result<(), ModelError>,
    pub(crate) adjust_gguf: fn(&mut ModelConfig, &GgufReader<'_>) -> Result<(), ModelError>,
    /// How q and k of GGUF files are rotated: converters permute them for some families.
    pub(crate) gguf_rope: RopeStyle,
    /// Well-known checkpoints, for people.
    pub(crate) examples: &'static str,
    /// Tiny models of it under `tests/data/golden`.
    pub(crate) golden: &'static [&'static str],
}

impl Family {
    /// What is not said is as in llama.
    pub(crate) const LLAMA_LIKE: Self = Self {
        architecture: Architecture::Llama,
        classes: &[],
        gguf: &[],
        aliases: &[],
        defaults: Defaults::LLAMA,
        layers: "model.layers.",
        optional_prefix: "",
        names: &[],
        gguf_names: &[],
        adjust: |_, _| Ok(()),
        adjust_gguf: |_, _| Ok(()),
        gguf_rope: RopeStyle::Half,
        examples: "",
        golden: &[],
    };

    /// Gives vectors or scores, and no tokens.
    pub(crate) fn is_encoder(&self) -> bool {
        matches!(self.architecture, Architecture::Bert | Architecture::Roberta | Architecture::NomicBert)
    }

    /// The name of a role, where it is not llama's.
    pub(crate) fn stem(&self, role: Role) -> Option<&'static str> {
        find(self.names, role)
    }

    pub(crate) fn gguf_stem(&self, role: Role) -> Option<&'static str> {
        find(self.gguf_names, role)
    }
}

fn find(names: &[(Role, &'static str)], role: Role) -> Option<&'static str> {
    names.iter().find(|(other, _)| *other == role).map(|(_, stem)| *stem)
}

pub(crate) static FAMILIES: &[&Family] = &[
    &arcee::FAMILY,
    &baichuan::FAMILY,
    &bert::FAMILY,
    &bert::ROBERTA,
    &bert::NOMIC,
    &bloom::FAMILY,
    &cohere::FAMILY,
    &cohere::SECOND,
    &ernie::FAMILY,
    &exaone::FAMILY,
    &exaone::FOURTH,
    &falcon::FAMILY,
    &falcon::NEW,
    &gemma::FIRST,
    &gemma::SECOND,
    &glm::FAMILY,
    &glm::FOURTH,
    &gpt_bigcode::FAMILY,
    &gpt_oss::FAMILY,
    &gptj::FAMILY,
    &gptneox::FAMILY,
    &granite::FAMILY,
    &granite::MIXTURE,
    &internlm::FAMILY,
    &mpt::FAMILY,
    &nemotron::FAMILY,
    &olmo::SECOND,
    &olmo::MIXTURE,
    &opt::FAMILY,
    &phi::SECOND,
    &phi::THIRD,
    &seed_oss::FAMILY,
    &smollm3::FAMILY,
    &stablelm::FAMILY,
    &starcoder2::FAMILY,
];

/// The table of an architecture; none for those that `config` reads by itself.
pub(crate) fn of(architecture: Architecture) -> Option<&'static Family> {
    FAMILIES.iter().copied().find(|family| family.architecture == architecture)
}

pub(crate) fn by_class(class: &str) -> Option<&'static Family> {
    FAMILIES.iter().copied().find(|family| family.classes.contains(&class))
}

pub(crate) fn by_gguf(name: &str) -> Option<&'static Family> {
    FAMILIES.iter().copied().find(|family| family.gguf.contains(&name))
}

/// The slopes of ALiBi: a geometric sequence for a power of two of heads, and every second one of twice as many for the rest.
pub(crate) fn alibi_slopes(num_heads: usize, largest_bias: f64) -> Vec<f32> {
    let power = num_heads.next_power_of_two();
    let slope = |number: usize| (-largest_bias * number as f64 / power as f64).exp2() as f32;
    if power == num_heads {
        return (1..=num_heads).map(slope).collect();
    }
    let (even, odd) = ((2..=power).step_by(2), (1..=power).step_by(2));
    even.chain(odd).take(num_heads).map(slope).collect()
}

impl ModelConfig {
    /// Positions are not rotated.
    pub(crate) fn without_rope(&mut self) {
        self.ropes.clear();
        self.layers.iter_mut().for_each(|layer| layer.rope = None);
    }

    /// A parallel layer with one norm for both halves.
    pub(crate) fn set_parallel_with_one_norm(&mut self) {
        self.parallel_residual = true;
        self.shared_norm = true;
    }

    pub(crate) fn set_all_biases(&mut self, biased: bool) {
        self.qkv_bias = biased;
        self.attention_output_bias = biased;
        self.mlp_bias = biased;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_of_any_number_of_heads() {
        assert_eq!(alibi_slopes(4, 8.0), [0.25, 0.0625, 0.015625, 0.00390625]);
        let twelve = alibi_slopes(12, 8.0);
        assert_eq!(twelve[..8], [1, 2, 3, 4, 5, 6, 7, 8].map(|power| 0.5_f32.powi(power)));
        assert!((twelve[8] - 0.5_f32.sqrt()).abs() < 1e-7);
        assert_eq!(twelve.len(), 12);
    }

    #[test]
    fn a_name_belongs_to_one_family() {
        for (number, family) in FAMILIES.iter().enumerate() {
            for other in &FAMILIES[..number] {
                assert_ne!(other.architecture, family.architecture);
                assert!(family.classes.iter().all(|class| !other.classes.contains(class)), "{family:?}");
                assert!(family.gguf.iter().all(|name| !other.gguf.contains(name)), "{family:?}");
            }
            assert!(!family.examples.is_empty(), "{family:?}");
        }
    }
}
