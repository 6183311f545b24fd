//! GraphSAGE and GCN from safetensors, with the names that PyTorch Geometric gives them.
//!
//! Layers are found by what they hold: `lin_l` (and `lin_r`) is a `SAGEConv`, with `lin` beside them one that projects its
//! neighbours first; `lin.weight` with `bias` alone is a `GCNConv`. What the tensors do not say (the aggregation, what stands
//! between the layers) is in `config.json`, under the names of PyTorch Geometric's arguments.
//!
//! A layer becomes one or two stages. A stage writes one row for each node; what it reads are rows of earlier stages.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use baton_backend::graph::Reduce;
use baton_backend::{SharedBytes, Tensor, WeightFormat};
use baton_model::{Safetensors, WeightSource};
use serde::Deserialize;

use crate::GraphError;

const MAX_CONFIG_BYTES: u64 = 1 << 20;
const MAX_LAYERS: usize = 64;
const MAX_WIDTH: usize = 1 << 16;

/// How neighbours become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Aggregation {
    #[default]
    Mean,
    Max,
}

impl From<Aggregation> for Reduce {
    fn from(aggregation: Aggregation) -> Self {
        match aggregation {
            Aggregation::Mean => Self::Mean,
            Aggregation::Max => Self::Max,
        }
    }
}

/// What is between the layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BetweenLayers {
    #[default]
    Relu,
    None,
}

/// What the tensors do not say. Unknown fields are left alone: a checkpoint may carry more than we need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct GraphModelConfig {
    /// Of all `SAGEConv`s.
    pub aggr: Aggregation,
    /// Each `SAGEConv` divides its rows by their Euclidean norm.
    pub normalize: bool,
    /// After every layer but the last.
    pub act: BetweenLayers,
    /// The embeddings are divided by their Euclidean norm.
    pub normalize_output: bool,
}

/// Which rows a stage reads: 0 are the features, `n` those that stage `n - 1` wrote.
pub type Level = usize;

/// One op for every node.
#[derive(Clone, Debug)]
pub struct Stage {
    /// The layer it belongs to, counted from the features.
    pub layer: usize,
    pub neighbours: Option<(Level, Reduce)>,
    pub own: Option<Level>,
    pub weight: Tensor, // [out, neighbours + own]
    pub bias: Option<Vec<f32>>,
    pub relu: bool,
    pub normalize: bool,
}

impl Stage {
    /// Width of the rows that it writes.
    pub fn width(&self) -> usize {
        self.weight.rows()
    }

    pub(crate) fn reads_neighbour_features(&self) -> bool {
        matches!(self.neighbours, Some((0, _)))
    }

    pub(crate) fn reads_features(&self) -> bool {
        self.own == Some(0) || self.reads_neighbour_features()
    }

    /// GCN reads the node's own row among those of its neighbours.
    pub(crate) fn reads_own_features_by_loop(&self) -> bool {
        matches!(self.neighbours, Some((0, Reduce::Gcn)))
    }
}

/// A network, ready to be loaded onto a device.
#[derive(Clone, Debug)]
pub struct GraphModel {
    name: String,
    num_features: usize,
    num_layers: usize,
    stages: Vec<Stage>,
}

/// The tensors of a layer.
#[derive(Debug, Default)]
struct Layer {
    lin_l: Option<Tensor>,
    lin_l_bias: Option<Tensor>,
    lin_r: Option<Tensor>,
    lin: Option<Tensor>,
    lin_bias: Option<Tensor>,
    bias: Option<Tensor>,
}

impl Layer {
    fn slot(&mut self, suffix: &str) -> &mut Option<Tensor> {
        match suffix {
            "lin_l.weight" => &mut self.lin_l,
            "lin_l.bias" => &mut self.lin_l_bias,
            "lin_r.weight" => &mut self.lin_r,
            "lin.weight" => &mut self.lin,
            "lin.bias" => &mut self.lin_bias,
            _ => &mut self.bias,
        }
    }
}

const SUFFIXES: [&str; 6] = ["lin_l.weight", "lin_l.bias", "lin_r.weight", "lin.weight", "lin.bias", "bias"];

impl GraphModel {
    /// A `.safetensors` file with a `config.json` beside it, or a directory with both. `config` overrides the file.
    pub fn open(path: &Path, config: Option<GraphModelConfig>) -> Result<Self, GraphError> {
        let (weights, directory) = if path.is_dir() {
            let weights = Safetensors::open_directory(path)?;
            let weights = weights.ok_or_else(|| GraphError::model(path, "no .safetensors file is in it"))?;
            (weights, path.to_owned())
        } else {
            let parent = path.parent().map(Path::to_owned).unwrap_or_default();
            (Safetensors::open_files(&[path.to_owned()])?, parent)
        };
        let config = match config {
            Some(config) => config,
            None => read_config(&directory.join("config.json"))?,
        };
        Self::from_weights(path, &weights, config)
    }

    /// From weights that are open already. `path` is only named.
    pub fn from_weights(
        path: &Path,
        weights: &Safetensors,
        config: GraphModelConfig,
    ) -> Result<Self, GraphError> {
        let layers = group_layers(path, weights)?;
        let last = layers.len() - 1;
        let mut model =
            Self { name: name_of(path), num_features: 0, num_layers: layers.len(), stages: Vec::new() };
        for (number, (name, layer)) in layers.into_iter().enumerate() {
            let wrong = |what: String| GraphError::model(path, format!("layer {name}: {what}"));
            model.add_layer(number, layer, &config, number == last).map_err(wrong)?;
        }
        Ok(model)
    }

    /// From stages made elsewhere, one for each layer.
    pub(crate) fn from_stages(
        name: &str,
        num_features: usize,
        stages: Vec<Stage>,
    ) -> Result<Self, GraphError> {
        if stages.is_empty() || num_features == 0 {
            return Err(GraphError::model(Path::new(name), "it has no layers"));
        }
        Ok(Self { name: name.to_owned(), num_features, num_layers: stages.len(), stages })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn num_features(&self) -> usize {
        self.num_features
    }

    pub fn num_layers(&self) -> usize {
        self.num_layers
    }

    /// Width of the embeddings.
    pub fn num_outputs(&self) -> usize {
        self.stages.last().map_or(0, Stage::width)
    }

    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    /// Width of the rows of a level.
    pub fn width(&self, level: Level) -> usize {
        level.checked_sub(1).map_or(self.num_features, |stage| self.stages[stage].width())
    }

    pub(crate) fn uses_gcn(&self) -> bool {
        self.stages.iter().any(|stage| matches!(stage.neighbours, Some((_, Reduce::Gcn))))
    }

    #[allow(clippy::trivially_copy_pass_by_ref)]
    fn add_layer(
        &mut self,
        number: usize,
        layer: Layer,
        config: &GraphModelConfig,
        is_last: bool,
    ) -> Result<(), String> {
        let input = self.stages.len();
        let inputs = layer.lin_l.as_ref().filter(|_| layer.lin.is_none()).or(layer.lin.as_ref());
        let inputs = inputs.map(Tensor::cols).ok_or("it has neither lin_l.weight nor lin.weight")?;
        if number == 0 {
            self.num_features = inputs;
        }
        let width = self.width(input);
        let relu = !is_last && config.act == BetweenLayers::Relu;
        let normalize_output = is_last && config.normalize_output;
        let Some(lin_l) = layer.lin_l else {
            let lin = layer.lin.ok_or("it has neither lin_l.weight nor lin.weight")?;
            if layer.lin_r.is_some() || layer.lin_bias.is_some() {
                return Err(
                    "it has a lin and a lin_r or a lin.bias, but no lin_l: neither SAGEConv nor GCNConv"
                        .into(),
                );
            }
            let stage = Stage {
                layer: number,
                neighbours: Some((input, Reduce::Gcn)),
                own: None,
                bias: vector(layer.bias.as_ref(), lin.rows(), "bias")?,
                weight: lin,
                relu,
                normalize: normalize_output,
            };
            return self.add_stage(stage, width);
        };
        if layer.bias.is_some() {
            return Err("it has lin_l.weight and a bias of its own: not a SAGEConv".into());
        }
        let mut neighbours = input;
        if let Some(lin) = layer.lin {
            // `project=True`: the neighbours' rows go through a linear and a ReLU first, once for each node.
            let bias = vector(layer.lin_bias.as_ref(), lin.rows(), "lin.bias")?;
            let stage = Stage {
                layer: number,
                neighbours: None,
                own: Some(input),
                weight: lin,
                bias,
                relu: true,
                normalize: false,
            };
            self.add_stage(stage, width)?;
            neighbours = self.stages.len();
        }
        let reduce = config.aggr.into();
        let bias = vector(layer.lin_l_bias.as_ref(), lin_l.rows(), "lin_l.bias")?;
        let has_own = layer.lin_r.is_some();
        let cols = self.width(neighbours) + if has_own { width } else { 0 };
        if lin_l.cols() != self.width(neighbours) {
            return Err(format!(
                "lin_l.weight takes {} columns, it gets {}",
                lin_l.cols(),
                self.width(neighbours)
            ));
        }
        let weight = match layer.lin_r {
            Some(lin_r) => beside(&lin_l, &lin_r)?,
            None => lin_l,
        };
        let stage = Stage {
            layer: number,
            neighbours: Some((neighbours, reduce)),
            own: has_own.then_some(input),
            weight,
            bias,
            relu,
            normalize: config.normalize || normalize_output,
        };
        self.add_stage(stage, cols)
    }

    fn add_stage(&mut self, stage: Stage, inputs: usize) -> Result<(), String> {
        let (rows, cols) = (stage.weight.rows(), stage.weight.cols());
        if cols != inputs {
            return Err(format!("its weight takes {cols} columns, but the layer before gives {inputs}"));
        }
        if rows == 0 || cols == 0 || rows > MAX_WIDTH || cols > 2 * MAX_WIDTH {
            return Err(format!("a weight of {rows} x {cols} is not between 1 and {MAX_WIDTH} wide"));
        }
        self.stages.push(stage);
        Ok(())
    }
}

fn name_of(path: &Path) -> String {
    let stem = if path.is_dir() { path.file_name() } else { path.file_stem() };
    stem.map_or_else(|| "graph".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn read_config(path: &PathBuf) -> Result<GraphModelConfig, GraphError> {
    let file = |what: String| GraphError::File { path: path.clone(), what };
    match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(GraphModelConfig::default()),
        Err(error) => return Err(file(format!("cannot be read: {error}"))),
        Ok(metadata) if metadata.len() > MAX_CONFIG_BYTES => {
            return Err(file(format!("is larger than {MAX_CONFIG_BYTES} bytes")));
        }
        Ok(_) => {}
    }
    let text = std::fs::read(path).map_err(|error| file(format!("cannot be read: {error}")))?;
    serde_json::from_slice(&text).map_err(|error| file(format!("is no configuration: {error}")))
}

/// The layers in the order of the numbers in their names.
fn group_layers(path: &Path, weights: &Safetensors) -> Result<Vec<(String, Layer)>, GraphError> {
    let mut layers: BTreeMap<(u64, String), Layer> = BTreeMap::new();
    for name in weights.names() {
        let suffix = SUFFIXES.into_iter().find(|suffix| {
            name.strip_suffix(suffix).is_some_and(|layer| layer.is_empty() || layer.ends_with('.'))
        });
        let Some(suffix) = suffix else {
            let what = format!(
                "tensor {name:?} belongs to no SAGEConv or GCNConv: norms, jumping knowledge and edge weights are not supported"
            );
            return Err(GraphError::model(path, what));
        };
        let layer = name[..name.len() - suffix.len()].trim_end_matches('.');
        let digits: String = layer.chars().rev().take_while(char::is_ascii_digit).collect();
        let number = digits.chars().rev().collect::<String>().parse().unwrap_or(0);
        let tensor = weights.tensor(&name)?;
        *layers.entry((number, layer.to_owned())).or_default().slot(suffix) = tensor;
    }
    if layers.is_empty() || layers.len() > MAX_LAYERS {
        let what = format!("it has {} layers; 1 to {MAX_LAYERS} are supported", layers.len());
        return Err(GraphError::model(path, what));
    }
    let mut numbers: Vec<u64> = layers.keys().map(|(number, _)| *number).collect();
    numbers.dedup();
    if numbers.len() != layers.len() {
        let names: Vec<&str> = layers.keys().map(|(_, name)| name.as_str()).collect();
        let what = format!("the order of its layers is not clear from their names: {}", names.join(", "));
        return Err(GraphError::model(path, what));
    }
    Ok(layers.into_iter().map(|((_, name), layer)| (name, layer)).collect())
}

fn floats(tensor: &Tensor, what: &str) -> Result<Vec<f32>, String> {
    let tensor = tensor.to_f32().map_err(|error| format!("{what}: {error}"))?;
    Ok(tensor.bytes().as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect())
}

fn vector(tensor: Option<&Tensor>, len: usize, what: &str) -> Result<Option<Vec<f32>>, String> {
    let Some(tensor) = tensor else { return Ok(None) };
    let values = floats(tensor, what)?;
    if values.len() != len {
        return Err(format!("{what} has {} values, but the weight has {len} rows", values.len()));
    }
    Ok(Some(values))
}

/// `[left | right]`.
fn beside(left: &Tensor, right: &Tensor) -> Result<Tensor, String> {
    if left.rows() != right.rows() {
        return Err(format!("lin_l has {} rows and lin_r {}", left.rows(), right.rows()));
    }
    let is_float = matches!(left.format(), WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16);
    let (left, right) = if left.format() == right.format() && is_float {
        (left.clone(), right.clone())
    } else {
        let open = |tensor: &Tensor| tensor.to_f32().map_err(|error| error.to_string());
        (open(left)?, open(right)?)
    };
    let mut bytes = Vec::with_capacity(left.num_bytes() + right.num_bytes());
    for row in 0..left.rows() {
        bytes.extend_from_slice(left.row(row));
        bytes.extend_from_slice(right.row(row));
    }
    let cols = left.cols() + right.cols();
    Tensor::new(left.format(), left.rows(), cols, SharedBytes::from_vec(bytes))
        .map_err(|error| error.to_string())
}
