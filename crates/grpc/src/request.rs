//! From a `GenerateRequest` to the fields that all generating APIs share. Zero is protobuf's "not said".

use baton_serve::PlainRequest;
use baton_serve::types::common::{KvTransferParams, LogitBias, SamplingFields, Stop};
use baton_serve::types::prompt::Prompt;
use baton_serve::types::structured::{StructuredFields, StructuredOutputs};
use tonic::Status;
use vllm_proto::candidate_tokens::Select;
use vllm_proto::decoding_parameters::StructuredOutput;
use vllm_proto::generate_request::Prompt as ProtoPrompt;
use vllm_proto::{
    CandidateTokens, DecodingParameters, GenerateRequest, KvCacheParameters, RandomSampling, ResponseOptions,
    StoppingCriteria,
};

use crate::structs;

/// vLLM's default for this API.
const DEFAULT_MAX_TOKENS: u32 = 20;
/// Of media in a `GenerateRequest`.
const MEDIA_FIELD: u64 = 14;
const MAX_REQUEST_ID_BYTES: usize = 1024;

/// What an answer is to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub prompt_token_ids: bool,
    pub prompt_logprobs: bool,
    pub prompt_candidates: bool,
    pub text: bool,
    pub token_ids: bool,
    pub logprobs: bool,
    pub candidates: bool,
}

fn invalid(message: impl Into<String>) -> Status {
    Status::invalid_argument(message)
}

/// Refuses a request with media by its bytes: an empty item takes two of them, and a hundred times that once it is decoded.
pub fn check_message(message: &[u8]) -> Result<(), Status> {
    let mut rest = message;
    while !rest.is_empty() {
        let broken = || invalid("the message is no GenerateRequest");
        let tag = varint(&mut rest).ok_or_else(broken)?;
        if tag >> 3 == MEDIA_FIELD {
            return Err(Status::unimplemented("media: models take text and token ids only"));
        }
        let len = match tag & 7 {
            0 => varint(&mut rest).map(|_| 0),
            1 => Some(8),
            2 => varint(&mut rest),
            5 => Some(4),
            _ => None,
        };
        rest = len.and_then(|len| rest.get(usize::try_from(len).ok()?..)).ok_or_else(broken)?;
    }
    Ok(())
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// The request in the words of the other APIs, and what its answer is to hold.
pub fn convert(request: GenerateRequest, streams: bool) -> Result<(PlainRequest, Wanted), Status> {
    if !request.media.is_empty() {
        return Err(Status::unimplemented("media: models take text and token ids only"));
    }
    if !request.lora_name.is_empty() {
        return Err(Status::unimplemented("lora_name: adapters are not supported"));
    }
    if request.request_id.len() > MAX_REQUEST_ID_BYTES {
        return Err(invalid(format!("request_id may have {MAX_REQUEST_ID_BYTES} bytes")));
    }
    let prompt = match request.prompt {
        Some(ProtoPrompt::Text(text)) => Prompt::Text(text),
        Some(ProtoPrompt::TokenIds(tokens)) => Prompt::Tokens(tokens.ids),
        None => return Err(invalid("prompt is missing: give text or token_ids")),
    };
    let mut fields = SamplingFields {
        model: said(request.model),
        temperature: request.temperature,
        priority: Some(request.priority),
        truncate_prompt_tokens: said(i64::from(request.truncate_prompt_tokens)),
        stream: Some(streams),
        ..SamplingFields::default()
    };
    sampling(&mut fields, request.sampling.unwrap_or_default(), streams)?;
    stopping(&mut fields, request.stopping.unwrap_or_default());
    let structured = decoding(&mut fields, request.decoding.unwrap_or_default())?;
    let bypass_cache = cache(&mut fields, request.kv.unwrap_or_default())?;
    let options = request.response.unwrap_or_default();
    fields.skip_special_tokens = options.skip_special_tokens;
    let (wanted, logprobs) = wanted(&mut fields, &options)?;
    Ok((PlainRequest { prompt, fields, structured, logprobs, bypass_cache }, wanted))
}

/// A value that is not protobuf's default.
fn said<T: Default + PartialEq>(value: T) -> Option<T> {
    (value != T::default()).then_some(value)
}

fn sampling(fields: &mut SamplingFields, sampling: RandomSampling, streams: bool) -> Result<(), Status> {
    if sampling.num_sequences > 1 && !streams {
        return Err(invalid("num_sequences: one answer holds one sequence, use GenerateStream for several"));
    }
    fields.n = said(sampling.num_sequences);
    fields.top_k = said(i64::from(sampling.top_k));
    fields.top_p = said(sampling.top_p);
    fields.min_p = said(sampling.min_p);
    fields.seed = sampling.seed;
    Ok(())
}

fn stopping(fields: &mut SamplingFields, stopping: StoppingCriteria) {
    fields.max_tokens = Some(said(stopping.max_new_tokens).unwrap_or(DEFAULT_MAX_TOKENS));
    fields.min_tokens = Some(stopping.min_new_tokens);
    fields.stop_token_ids = Some(stopping.stop_token_ids);
    fields.stop = Some(Stop::Many(stopping.stop_strings));
    fields.include_stop_str_in_output = Some(stopping.include_stop_strings);
    fields.ignore_eos = Some(stopping.ignore_eos);
}

fn decoding(fields: &mut SamplingFields, decoding: DecodingParameters) -> Result<StructuredFields, Status> {
    fields.presence_penalty = said(decoding.presence_penalty);
    fields.frequency_penalty = said(decoding.frequency_penalty);
    fields.repetition_penalty = said(decoding.repetition_penalty);
    fields.allowed_token_ids = said(decoding.allowed_token_ids);
    let biases = decoding.logit_bias.into_iter().map(|(token, bias)| (token.to_string(), bias));
    fields.logit_bias = said(biases.collect()).map(LogitBias::Map);
    let mut outputs = StructuredOutputs::default();
    match decoding.structured_output {
        None | Some(StructuredOutput::JsonObject(false)) => return Ok(StructuredFields::default()),
        Some(StructuredOutput::JsonObject(true)) => outputs.json_object = Some(true),
        Some(StructuredOutput::Json(schema)) => outputs.json = Some(serde_json::Value::String(schema)),
        Some(StructuredOutput::Regex(regex)) => outputs.regex = Some(regex),
        Some(StructuredOutput::Choice(choice)) => outputs.choice = Some(choice.choices),
        Some(StructuredOutput::Grammar(grammar)) => outputs.grammar = Some(grammar),
        Some(StructuredOutput::StructuralTag(_)) => {
            return Err(Status::unimplemented("structural_tag: use json, regex, choice or grammar"));
        }
    }
    Ok(StructuredFields { structured_outputs: Some(outputs), ..StructuredFields::default() })
}

/// True where the prefix cache is not to be read.
fn cache(fields: &mut SamplingFields, kv: KvCacheParameters) -> Result<bool, Status> {
    fields.cache_salt = said(kv.cache_salt);
    if let Some(params) = kv.kv_transfer_params {
        let wrong = || invalid("kv_transfer_params is no object of JSON that vLLM's connectors send");
        let params = structs::to_json(params).ok_or_else(wrong)?;
        fields.kv_transfer_params =
            Some(serde_json::from_value::<KvTransferParams>(params).map_err(|_| wrong())?);
    }
    Ok(kv.bypass_prefix_cache)
}

/// What the answer holds, and how many alternatives of its tokens are needed for that.
fn wanted(fields: &mut SamplingFields, options: &ResponseOptions) -> Result<(Wanted, Option<u32>), Status> {
    let prompt_top = candidates("prompt_candidates", options.prompt_candidates.as_ref())?;
    let output_top = candidates("output_candidates", options.output_candidates.as_ref())?;
    fields.prompt_logprobs = prompt_top.or(options.prompt_logprobs.then_some(0));
    let wanted = Wanted {
        prompt_token_ids: options.prompt_token_ids,
        prompt_logprobs: fields.prompt_logprobs.is_some(),
        prompt_candidates: prompt_top.is_some(),
        text: options.output_text.unwrap_or(true),
        token_ids: options.output_token_ids,
        logprobs: options.output_logprobs || output_top.is_some(),
        candidates: output_top.is_some(),
    };
    Ok((wanted, output_top.or(options.output_logprobs.then_some(0))))
}

fn candidates(name: &str, asked: Option<&CandidateTokens>) -> Result<Option<u32>, Status> {
    match asked.and_then(|asked| asked.select.as_ref()) {
        None | Some(Select::All(false)) => Ok(None),
        Some(Select::TopN(count)) => Ok(Some(*count)),
        Some(Select::TokenIds(_) | Select::All(true)) => {
            Err(Status::unimplemented(format!("{name}: only top_n is supported")))
        }
    }
}

#[cfg(test)]
mod tests {
    use prost_types::Struct;
    use tonic::Code;
    use vllm_proto::{MediaItem, TokenIds};

    use super::*;

    fn tokens() -> GenerateRequest {
        GenerateRequest {
            prompt: Some(ProtoPrompt::TokenIds(TokenIds { ids: vec![1, 2] })),
            ..GenerateRequest::default()
        }
    }

    #[test]
    fn what_is_not_said_is_left_to_the_model() {
        let (request, wanted) = convert(tokens(), true).unwrap();
        assert_eq!(request.prompt, Prompt::Tokens(vec![1, 2]));
        let fields = request.fields;
        assert_eq!((fields.temperature, fields.top_p, fields.top_k, fields.n), (None, None, None, None));
        assert_eq!((fields.max_tokens, fields.cache_salt, request.logprobs), (Some(20), None, None));
        assert!(wanted.text && !wanted.token_ids && !wanted.logprobs);
    }

    #[test]
    fn parameters_of_a_transfer_are_read() {
        let params =
            serde_json::json!({"do_remote_prefill": true, "remote_host": "h", "remote_port": "8998"});
        let kv = KvCacheParameters {
            kv_transfer_params: Some(structs::from_json(&params)),
            ..KvCacheParameters::default()
        };
        let (request, _) = convert(GenerateRequest { kv: Some(kv), ..tokens() }, true).unwrap();
        assert_eq!(request.fields.kv_transfer_params.unwrap().remote().as_deref(), Some("h:8998"));
        let wrong = KvCacheParameters {
            kv_transfer_params: Some(structs::from_json(&serde_json::json!({"do_remote_prefill": "maybe"}))),
            ..KvCacheParameters::default()
        };
        let refused = convert(GenerateRequest { kv: Some(wrong), ..tokens() }, true).unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(structs::to_json(Struct::default()).is_some());
    }

    #[test]
    fn what_cannot_be_done_is_refused() {
        let code = |request| convert(request, false).map(|_| ()).unwrap_err().code();
        assert_eq!(code(GenerateRequest::default()), Code::InvalidArgument);
        assert_eq!(code(GenerateRequest { lora_name: "l".into(), ..tokens() }), Code::Unimplemented);
        let several = RandomSampling { num_sequences: 2, ..RandomSampling::default() };
        assert_eq!(code(GenerateRequest { sampling: Some(several), ..tokens() }), Code::InvalidArgument);
        let all = CandidateTokens { select: Some(Select::All(true)) };
        let options = ResponseOptions { output_candidates: Some(all), ..ResponseOptions::default() };
        assert_eq!(code(GenerateRequest { response: Some(options), ..tokens() }), Code::Unimplemented);
    }

    #[test]
    fn media_are_found_in_the_bytes() {
        use prost::Message;
        assert!(check_message(&tokens().encode_to_vec()).is_ok());
        let with = GenerateRequest { media: vec![MediaItem::default()], ..tokens() }.encode_to_vec();
        assert_eq!(check_message(&with).unwrap_err().code(), Code::Unimplemented);
        for broken in [&with[..1], b"\x0b\x0c", &[0xff; 11]] {
            assert_eq!(check_message(broken).unwrap_err().code(), Code::InvalidArgument);
        }
    }
}
