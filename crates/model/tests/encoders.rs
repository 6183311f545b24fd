//! Every golden encoder (`tests/data/golden`, made with PyTorch) on every backend: texts alone and in one step give the vectors and
//! scores of transformers.

use std::path::Path;

use baton_backend::{Backend, ReferenceBackend, StepInput, StepOutput};
use baton_cpu::{CpuBackend, CpuOptions, Isa};
use baton_model::{Encoder, LoadFormat, ModelFiles};
use serde_json::Value;

const TOLERANCE: f32 = 5e-5;
const MAX_TOKENS: usize = 128;

fn numbers<T>(value: &Value, number: impl Fn(&Value) -> T) -> Vec<Vec<T>> {
    let list = |value: &Value| value.as_array().expect("a list").iter().map(&number).collect();
    value.as_array().expect("lists").iter().map(list).collect()
}

fn backends() -> Vec<(String, Box<dyn Backend>)> {
    let reference: Box<dyn Backend> = Box::new(ReferenceBackend::new());
    let mut backends = vec![("reference".to_owned(), reference)];
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let options = CpuOptions { threads: Some(1), isa: Some(isa), ..CpuOptions::default() };
        backends.push((isa.to_string(), Box::new(CpuBackend::new(options).expect("the CPU is a CPU"))));
    }
    backends
}

fn check(model: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden").join(model);
    let folder = if path.is_dir() { path.clone() } else { path.parent().expect("a folder").to_owned() };
    let text = std::fs::read_to_string(folder.join("encoder.json")).expect("encoder.json");
    let golden: Value = serde_json::from_str(&text).expect("JSON");
    let texts = numbers(&golden["texts"], |id| id.as_u64().expect("an id") as u32);
    let results = numbers(&golden["results"], |x| x.as_f64().expect("a number") as f32);
    for (name, mut backend) in backends() {
        let files = ModelFiles::open(&path, LoadFormat::Auto).expect("the model opens");
        let weights = files.weights().expect("weights");
        let encoder = Encoder::load(files.config(), &*weights, &mut *backend, MAX_TOKENS, &mut |_| ())
            .expect("it loads");
        let program = backend.compile(encoder.program()).expect("the program is valid");
        let mut run = |which: &[usize]| {
            let mut input = StepInput::default();
            for &text in which {
                encoder.add(&texts[text], &mut input);
            }
            backend.submit(&input, program).expect("the step starts");
            backend.collect(&mut StepOutput::default()).expect("the step ends");
            let rows = backend.read_buffer(encoder.hidden_buffer(), input.num_tokens()).expect("rows");
            let width = rows.len() / input.num_tokens();
            let mut first = 0;
            for &text in which {
                let end = first + texts[text].len();
                let got = encoder.pool(&rows[first * width..end * width]);
                assert_eq!(got.len(), encoder.output_size());
                assert_eq!(got.len(), results[text].len());
                let largest = results[text].iter().fold(0.0_f32, |most, x| most.max(x.abs()));
                for (got, expected) in got.iter().zip(&results[text]) {
                    let error = (got - expected).abs() / largest;
                    assert!(
                        error <= TOLERANCE,
                        "{model} on {name}: text {text} of {which:?}: {got} is not {expected}"
                    );
                }
                first = end;
            }
        };
        (0..texts.len()).for_each(|text| run(&[text]));
        let all: Vec<usize> = (0..texts.len()).rev().collect();
        run(&all);
        run(&[1, 0, 1, 2]);
    }
}

macro_rules! encoders {
    ($($test:ident: $model:literal,)*) => { $(#[test] fn $test() { check($model); })* };
}

encoders! {
    bert: "bert",
    bert_gguf: "bert/model.gguf",
    bert_cls: "bert-cls",
    bert_reranker: "bert-reranker",
    roberta: "roberta",
    roberta_reranker: "roberta-reranker",
    nomic: "nomic",
    nomic_gguf: "nomic/model.gguf",
}
