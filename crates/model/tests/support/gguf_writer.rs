//! Writes small GGUF files for tests: right ones, and with the raw parts open for making them wrong. It shares no code
//! with the reader.

/// A GGUF file in the making. Fields are public so that a test can make them lie.
#[derive(Clone, Debug)]
pub struct GgufWriter {
    pub version: u32,
    pub alignment: usize,
    pub metadata: Vec<Vec<u8>>,
    pub tensors: Vec<TensorEntry>,
    pub data: Vec<u8>,
    pub tensor_count: Option<u64>,
    pub metadata_count: Option<u64>,
}

#[derive(Clone, Debug)]
pub struct TensorEntry {
    pub name: String,
    pub dims: Vec<u64>,
    pub type_id: u32,
    pub offset: u64,
}

impl Default for GgufWriter {
    fn default() -> Self {
        Self {
            version: 3,
            alignment: 32,
            metadata: Vec::new(),
            tensors: Vec::new(),
            data: Vec::new(),
            tensor_count: None,
            metadata_count: None,
        }
    }
}

pub fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

#[allow(dead_code)]
impl GgufWriter {
    /// Adds an entry from its type and the bytes of its value.
    pub fn raw(mut self, key: &str, type_id: u32, value: &[u8]) -> Self {
        let mut entry = string(key);
        entry.extend_from_slice(&type_id.to_le_bytes());
        entry.extend_from_slice(value);
        self.metadata.push(entry);
        self
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    pub fn u16(self, key: &str, value: u16) -> Self {
        self.raw(key, 2, &value.to_le_bytes())
    }

    pub fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, 6, &value.to_le_bytes())
    }

    pub fn bool(self, key: &str, value: bool) -> Self {
        self.raw(key, 7, &[u8::from(value)])
    }

    pub fn str(self, key: &str, value: &str) -> Self {
        self.raw(key, 8, &string(value))
    }

    /// An array from its element type, count and bytes.
    pub fn array(self, key: &str, element_type: u32, count: u64, elements: &[u8]) -> Self {
        let mut value = element_type.to_le_bytes().to_vec();
        value.extend_from_slice(&count.to_le_bytes());
        value.extend_from_slice(elements);
        self.raw(key, 9, &value)
    }

    pub fn strings(self, key: &str, values: &[&str]) -> Self {
        let elements: Vec<u8> = values.iter().flat_map(|value| string(value)).collect();
        self.array(key, 8, values.len() as u64, &elements)
    }

    pub fn i32s(self, key: &str, values: &[i32]) -> Self {
        let elements: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.array(key, 5, values.len() as u64, &elements)
    }

    pub fn f32s(self, key: &str, values: &[f32]) -> Self {
        let elements: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.array(key, 6, values.len() as u64, &elements)
    }

    pub fn bools(self, key: &str, values: &[bool]) -> Self {
        let elements: Vec<u8> = values.iter().map(|&value| u8::from(value)).collect();
        self.array(key, 7, values.len() as u64, &elements)
    }

    /// Adds a tensor and its bytes, aligned.
    pub fn tensor(mut self, name: &str, dims: &[u64], type_id: u32, bytes: &[u8]) -> Self {
        self.data.resize(self.data.len().next_multiple_of(self.alignment), 0);
        let offset = self.data.len() as u64;
        self.tensors.push(TensorEntry { name: name.to_owned(), dims: dims.to_vec(), type_id, offset });
        self.data.extend_from_slice(bytes);
        self
    }

    pub fn f32_tensor(self, name: &str, dims: &[u64], values: &[f32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(name, dims, 0, &bytes)
    }

    pub fn finish(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend_from_slice(&self.version.to_le_bytes());
        bytes.extend_from_slice(&self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&self.metadata_count.unwrap_or(self.metadata.len() as u64).to_le_bytes());
        for entry in &self.metadata {
            bytes.extend_from_slice(entry);
        }
        for tensor in &self.tensors {
            bytes.extend_from_slice(&string(&tensor.name));
            bytes.extend_from_slice(&(tensor.dims.len() as u32).to_le_bytes());
            for dim in &tensor.dims {
                bytes.extend_from_slice(&dim.to_le_bytes());
            }
            bytes.extend_from_slice(&tensor.type_id.to_le_bytes());
            bytes.extend_from_slice(&tensor.offset.to_le_bytes());
        }
        if !self.tensors.is_empty() {
            bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
        }
        bytes.extend_from_slice(&self.data);
        bytes
    }
}

/// The metadata that a llama-like architecture needs: 2 layers, hidden 8, 4 heads of 2, 2 KV heads.
#[allow(dead_code)]
pub fn tiny(architecture: &str) -> GgufWriter {
    let key = |name: &str| format!("{architecture}.{name}");
    GgufWriter::default()
        .str("general.architecture", architecture)
        .u32(&key("block_count"), 2)
        .u32(&key("context_length"), 64)
        .u32(&key("embedding_length"), 8)
        .u32(&key("feed_forward_length"), 16)
        .u32(&key("attention.head_count"), 4)
        .u32(&key("attention.head_count_kv"), 2)
        .f32(&key("attention.layer_norm_rms_epsilon"), 1e-5)
        .str("tokenizer.ggml.model", "gpt2")
        .strings("tokenizer.ggml.tokens", &["<unk>", "a", "b", "<|im_end|>", "</s>"])
        .i32s("tokenizer.ggml.token_type", &[2, 1, 1, 3, 3])
        .strings("tokenizer.ggml.merges", &["a b"])
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eos_token_id", 4)
        .str("tokenizer.chat_template", "{{ messages }}")
}
