//! vLLM's gRPC services of the real binary with the default model, driven as Dynamo's sidecar drives them: discovery, streams whose
//! counts add up, aborts, hand-over of KV, keys and limits.

mod common;

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use common::Baton;
use common::worker::{Worker, free_port, prompt};
use serde_json::json;
use tonic::transport::Channel;
use tonic::{Code, Request, Streaming};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use vllm_proto::candidate_tokens::Select;
use vllm_proto::control_client::ControlClient;
use vllm_proto::decoding_parameters::{StringChoices, StructuredOutput};
use vllm_proto::finish_info::{FinishReason, StopReason};
use vllm_proto::generate_request::Prompt;
use vllm_proto::inference_client::InferenceClient;
use vllm_proto::{
    AbortRequest, CandidateTokens, DecodingParameters, FinishInfo, GenerateRequest, GenerateResponse,
    GetKvEventSourcesRequest, GetModelInfoRequest, GetServerInfoRequest, KvCacheParameters, LoadLoraRequest,
    MediaItem, RandomSampling, ResponseOptions, StoppingCriteria, TokenIds,
};

fn on_runtime<T>(work: impl Future<Output = T>) -> T {
    // Connections have a thread of their own, so that a test may wait for the server.
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(1).enable_all().build().expect("a runtime");
    runtime.block_on(work)
}

async fn connect(port: &str) -> Channel {
    let endpoint = Channel::from_shared(format!("http://127.0.0.1:{port}")).expect("an address");
    endpoint.connect().await.expect("the server listens")
}

fn text(prompt: &str, max_new_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        prompt: Some(Prompt::Text(prompt.to_owned())),
        temperature: Some(0.0),
        stopping: Some(StoppingCriteria { max_new_tokens, ignore_eos: true, ..StoppingCriteria::default() }),
        response: Some(ResponseOptions { output_token_ids: true, ..ResponseOptions::default() }),
        ..GenerateRequest::default()
    }
}

/// What came of a sequence, checked as the sidecar checks it.
#[derive(Default)]
struct Read {
    text: String,
    token_ids: Vec<u32>,
    num_prompt_tokens: u32,
    end: Option<FinishInfo>,
}

async fn read(mut stream: Streaming<GenerateResponse>) -> Read {
    let mut all = Read::default();
    while let Some(response) = stream.message().await.expect("a response") {
        if let Some(info) = response.prompt_info {
            assert!(all.token_ids.is_empty(), "the prompt is told of first");
            all.num_prompt_tokens = info.num_prompt_tokens;
        }
        let output = response.outputs.expect("an output");
        assert!(all.end.is_none(), "nothing comes after the end");
        assert_eq!((output.index, output.num_tokens as usize), (0, output.token_ids.len()));
        all.text.push_str(&output.text);
        all.token_ids.extend(output.token_ids);
        all.end = output.finish_info;
    }
    let end = all.end.as_ref().expect("an end");
    assert_eq!(end.num_output_tokens as usize, all.token_ids.len());
    all
}

#[test]
fn a_sidecar_finds_what_it_needs() {
    let (baton, port, events) = (Baton::new(), free_port(), free_port());
    let config = json!({"enable_kv_cache_events": true, "endpoint": format!("tcp://127.0.0.1:{events}"), "topic": "kv"});
    let flags =
        ["--grpc-port", &port, "--kv-events-config", &config.to_string(), "--served-model-name", "smollm2"];
    let server = Worker::start(&baton, &flags);
    on_runtime(async {
        let channel = connect(&port).await;
        let mut health = HealthClient::new(channel.clone());
        for service in ["", "vllm.Inference", "vllm.Control"] {
            let answer = health.check(HealthCheckRequest { service: service.to_owned() }).await.unwrap();
            assert_eq!(answer.into_inner().status(), ServingStatus::Serving, "{service}");
        }
        let unknown = health.check(HealthCheckRequest { service: "other".to_owned() }).await.unwrap_err();
        assert_eq!(unknown.code(), Code::NotFound);
        let mut control = ControlClient::new(channel.clone());
        let info = control.get_server_info(GetServerInfoRequest {}).await.unwrap().into_inner();
        assert_eq!((info.api_version.as_str(), info.max_model_len), ("vllm", 2048));
        assert!(info.kv_block_size > 0 && info.total_kv_blocks > 0 && info.max_running_requests > 0);
        assert_eq!(info.parallelism.unwrap().data_parallel_size, 1);
        let model = control.get_model_info(GetModelInfoRequest {}).await.unwrap().into_inner();
        assert_eq!(model.served_model_name, "smollm2");
        assert!(model.supports_token_ids_input && model.supports_text_input && !model.model_id.is_empty());
        let sources =
            control.get_kv_event_sources(GetKvEventSourcesRequest {}).await.unwrap().into_inner().sources;
        assert_eq!(sources.len(), 1);
        assert_eq!((sources[0].transport.as_str(), sources[0].topic.as_str()), ("zmq", "kv"));
        assert_eq!(
            (&sources[0].endpoint, sources[0].data_parallel_rank),
            (&format!("tcp://127.0.0.1:{events}"), Some(0))
        );
        let refused = control.load_lora(LoadLoraRequest::default()).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unimplemented);

        // The same tokens as over HTTP, in a stream and in one piece.
        let prompt = "The baton is passed from";
        let http = server.post(&json!({
            "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": true, "return_token_ids": true
        }));
        let http_ids: Vec<u32> = serde_json::from_value(http["choices"][0]["token_ids"].clone()).unwrap();
        let mut inference = InferenceClient::new(channel);
        let streamed = read(inference.generate_stream(text(prompt, 12)).await.unwrap().into_inner()).await;
        assert_eq!(streamed.token_ids, http_ids);
        assert_eq!(json!(streamed.text), http["choices"][0]["text"]);
        assert_eq!(json!(streamed.num_prompt_tokens), http["usage"]["prompt_tokens"]);
        assert_eq!(streamed.end.unwrap().finish_reason(), FinishReason::Length);
        let whole = inference.generate(text(prompt, 12)).await.unwrap().into_inner().outputs.unwrap();
        assert_eq!((whole.token_ids, json!(whole.text)), (http_ids, http["choices"][0]["text"].clone()));
        what_is_asked_for_is_given(&mut inference).await;
        what_is_wrong_is_refused(&mut inference).await;
    });
    server.until("baton:kv_blocks_used", |used| used == 0.0);
}

async fn what_is_asked_for_is_given(inference: &mut InferenceClient<Channel>) {
    // Log-probabilities: lists as long as the tokens, and the token itself is not among its alternatives.
    let top = Some(CandidateTokens { select: Some(Select::TopN(3)) });
    let response = ResponseOptions {
        output_token_ids: true,
        output_logprobs: true,
        output_candidates: top.clone(),
        prompt_token_ids: true,
        prompt_logprobs: true,
        prompt_candidates: top,
        ..ResponseOptions::default()
    };
    let asked = GenerateRequest { response: Some(response), ..text("One, two, three,", 4) };
    let answer = inference.generate(asked).await.unwrap().into_inner();
    let (info, output) = (answer.prompt_info.unwrap(), answer.outputs.unwrap());
    let count = info.num_prompt_tokens as usize;
    assert_eq!((info.token_ids.len(), info.logprobs.len(), info.ranks.len()), (count, count, count));
    assert_eq!(info.candidate_tokens.len(), count);
    assert_eq!((output.logprobs.len(), output.ranks.len(), output.candidate_tokens.len()), (4, 4, 4));
    for (token, others) in output.token_ids.iter().zip(&output.candidate_tokens) {
        assert!((2..=3).contains(&others.tokens.len()));
        assert!(others.tokens.iter().all(|other| other.id != *token && other.logprob <= 0.0));
    }
    // One of two words.
    let choices = StringChoices { choices: vec!["yes".to_owned(), "no".to_owned()] };
    let decoding = DecodingParameters {
        structured_output: Some(StructuredOutput::Choice(choices)),
        ..DecodingParameters::default()
    };
    let mut asked = GenerateRequest { decoding: Some(decoding), ..text("Is the sky blue?", 8) };
    asked.stopping.as_mut().unwrap().ignore_eos = false;
    let answer = inference.generate(asked).await.unwrap().into_inner().outputs.unwrap();
    assert!(["yes", "no"].contains(&answer.text.as_str()), "{answer:?}");
    let end = answer.finish_info.unwrap();
    assert_eq!(end.finish_reason(), FinishReason::Stop);
    assert!(matches!(end.stop_reason, Some(StopReason::EosTokenId(_))), "{end:?}");
    // A text that ends the answer.
    let mut asked = text("1 2 3 4 5 6 7 8 9 10 11 12 13 14", 40);
    asked.stopping.as_mut().unwrap().stop_strings = vec!["20".to_owned()];
    let end = inference.generate(asked).await.unwrap().into_inner().outputs.unwrap().finish_info.unwrap();
    assert_eq!(end.stop_reason, Some(StopReason::StopString("20".to_owned())));
    // Several sequences in one stream.
    let sampling = RandomSampling { num_sequences: 3, ..RandomSampling::default() };
    let asked = GenerateRequest { sampling: Some(sampling), temperature: Some(1.0), ..text("Once", 5) };
    let mut stream = inference.generate_stream(asked).await.unwrap().into_inner();
    let mut counts = [0; 3];
    while let Some(response) = stream.message().await.unwrap() {
        let output = response.outputs.unwrap();
        counts[output.index as usize] += output.num_tokens;
    }
    assert_eq!(counts, [5; 3]);
}

async fn what_is_wrong_is_refused(inference: &mut InferenceClient<Channel>) {
    let tokens = |ids| GenerateRequest { prompt: Some(Prompt::TokenIds(TokenIds { ids })), ..text("", 4) };
    let sampling = Some(RandomSampling { top_p: 7.0, ..RandomSampling::default() });
    let refusals = [
        (GenerateRequest { prompt: None, ..text("", 4) }, Code::InvalidArgument),
        (tokens(Vec::new()), Code::InvalidArgument),
        (tokens(vec![u32::MAX]), Code::InvalidArgument),
        (tokens(vec![5; 3000]), Code::InvalidArgument),
        (GenerateRequest { sampling, ..text("a", 4) }, Code::InvalidArgument),
        (GenerateRequest { model: "other".to_owned(), ..text("a", 4) }, Code::NotFound),
        (GenerateRequest { lora_name: "l".to_owned(), ..text("a", 4) }, Code::Unimplemented),
        (GenerateRequest { media: vec![MediaItem::default(); 100_000], ..text("a", 4) }, Code::Unimplemented),
        // More than a message may have.
        (text(&"a".repeat(5 << 20), 4), Code::ResourceExhausted),
    ];
    for (number, (request, code)) in refusals.into_iter().enumerate() {
        let refused = inference.generate_stream(request).await.map(|_| ()).unwrap_err();
        assert_eq!(refused.code(), code, "{number}: {refused}");
        assert!(!refused.message().is_empty());
    }
    let answer = inference.generate(text("Still there?", 2)).await.expect("and it still answers");
    assert_eq!(answer.into_inner().outputs.unwrap().num_tokens, 2);
}

#[test]
fn who_goes_away_or_aborts_frees_all() {
    let (baton, port) = (Baton::new(), free_port());
    let server = Worker::start(&baton, &["--grpc-port", &port, "--api-key", "one", "--api-key", "two"]);
    let keyed = |key: &str, request: GenerateRequest| {
        let mut request = Request::new(request);
        request.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
        request
    };
    let all_is_free = || server.until("baton:kv_blocks_used", |used| used == 0.0);
    on_runtime(async {
        let channel = connect(&port).await;
        let mut inference = InferenceClient::new(channel.clone());
        let refused = inference.generate(text("a", 1)).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated);
        let refused = inference.generate(keyed("three", text("a", 1))).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated);
        let answer = HealthClient::new(channel.clone()).check(HealthCheckRequest::default()).await;
        assert!(answer.is_ok(), "probes need no key");

        // A client that drops its stream.
        let long = GenerateRequest { request_id: "long".to_owned(), ..text("Once upon a time", 1900) };
        let mut stream = inference.generate_stream(keyed("one", long.clone())).await.unwrap().into_inner();
        stream.message().await.unwrap().expect("a token");
        drop(stream);
        all_is_free();

        // The same name again, twice at a time.
        let stream = inference.generate_stream(keyed("one", long.clone())).await.unwrap().into_inner();
        let refused = inference.generate_stream(keyed("one", long.clone())).await.map(|_| ()).unwrap_err();
        assert_eq!(refused.code(), Code::AlreadyExists);
        // Nobody aborts what came with another key.
        let mut control = ControlClient::new(channel);
        for key in ["two", "one"] {
            let mut abort =
                Request::new(AbortRequest { request_ids: vec!["long".to_owned(), "none".to_owned()] });
            abort.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
            control.abort(abort).await.unwrap();
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        let read = read(stream).await;
        assert_eq!(read.end.unwrap().finish_reason(), FinishReason::Aborted);
        assert!(read.token_ids.len() > 1 && read.token_ids.len() < 1900, "{}", read.token_ids.len());
    });
    all_is_free();
}

/// Frames of HTTP/2, by hand: what no client library would send.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let len = (payload.len() as u32).to_be_bytes();
    [&len[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A call that is sent as its head and these pieces of its body.
fn raw_call(body: &[u8], ends: bool) -> Vec<u8> {
    let [data, headers_kind, settings, end_stream, end_headers] = [0, 1, 4, 1, 4];
    let headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/vllm.Inference/Generate"),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    let mut block = Vec::new();
    for (name, value) in headers {
        // A literal that is not indexed.
        block.push(0);
        for text in [name, value] {
            block.push(text.len() as u8);
            block.extend_from_slice(text.as_bytes());
        }
    }
    let flags = if ends { end_stream } else { 0 };
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(),
        &frame(settings, 0, 0, &[]),
        &frame(headers_kind, end_headers, 1, &block),
        &frame(data, flags, 1, body),
    ]
    .concat()
}

/// Whether a frame of headers, which is an answer or its end, comes on the first stream.
fn is_answered(mut stream: TcpStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut head = [0; 9];
    while stream.read_exact(&mut head).is_ok() {
        let len = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        if stream.read_exact(&mut vec![0; len]).is_err() {
            return false;
        }
        if head[3] == 1 && head[5..] == 1_u32.to_be_bytes() {
            return true;
        }
    }
    false
}

#[test]
fn strangers_and_slow_clients_harm_nobody() {
    let (baton, port) = (Baton::new(), free_port());
    let server =
        Worker::start(&baton, &["--grpc-port", &port, "--max-connections", "8", "--read-timeout", "1"]);
    let send = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).expect("it listens");
        // It may have hung up before all is written.
        let _ = stream.write_all(bytes);
        stream
    };
    // Connections that say nothing, or only begin to, take no place from others.
    let silent: Vec<TcpStream> =
        (0..100).map(|number| send(if number % 2 == 0 { b"" } else { b"PRI * HT" })).collect();
    let noise: Vec<u8> =
        (0..1_u32 << 16).map(|byte| (byte.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let greeted_noise = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(), &noise].concat();
    for shout in [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".as_slice(), &noise, &greeted_noise] {
        let mut stream = send(shout);
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut answer = Vec::new();
        let ended = stream.read_to_end(&mut answer);
        assert!(ended.is_ok() || ended.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset));
        assert!(answer.len() < 256, "{answer:?}");
    }
    // Bodies that claim four gigabytes, are compressed, no message at all, or never end.
    let message = frame_of_message(&[0xff; 20]);
    let claims = [&[0, 255, 255, 255, 255, 1, 2][..], &[1, 0, 0, 0, 2, 1, 2], &[0, 0], &message];
    for (number, body) in claims.into_iter().enumerate() {
        assert!(is_answered(send(&raw_call(body, true))), "body {number}");
    }
    assert!(is_answered(send(&raw_call(&[0, 0, 0, 0, 9, 1], false))), "a body that does not go on");
    on_runtime(async {
        let mut reading = InferenceClient::new(connect(&port).await);
        // Who does not read is not waited for.
        let mut slow = InferenceClient::new(connect(&port).await);
        let unread = slow.generate_stream(text("Once upon a time", 1900)).await.unwrap().into_inner();
        for _ in 0..3 {
            let answer = reading.generate(text("Still there?", 4)).await.expect("others are served");
            assert_eq!(answer.into_inner().outputs.unwrap().num_tokens, 4);
        }
        drop(unread);
        // More connections than there may be.
        let mut places = Vec::new();
        for _ in 0..6 {
            let mut health = HealthClient::new(connect(&port).await);
            health.check(HealthCheckRequest::default()).await.expect("a place");
            places.push(health);
        }
        let endpoint = Channel::from_shared(format!("http://127.0.0.1:{port}")).expect("an address");
        let one_too_many = async {
            let channel = endpoint.connect().await.ok()?;
            HealthClient::new(channel).check(HealthCheckRequest::default()).await.ok()
        };
        let answered = tokio::time::timeout(Duration::from_secs(30), one_too_many).await;
        assert!(answered.expect("it is told at once").is_none());
        drop(places);
        let answer = reading.generate(text("And now?", 2)).await.expect("those that were there go on");
        assert_eq!(answer.into_inner().outputs.unwrap().num_tokens, 2);
    });
    drop(silent);
    server.until("baton:kv_blocks_used", |used| used == 0.0);
}

/// A message as gRPC frames it.
fn frame_of_message(bytes: &[u8]) -> Vec<u8> {
    [&[0], &(bytes.len() as u32).to_be_bytes()[..], bytes].concat()
}

/// Prefill and decode over gRPC, as the sidecar hands the parameters on.
#[test]
fn kv_is_handed_over() {
    let (baton, transfer) = (Baton::new(), free_port());
    let (first_port, second_port) = (free_port(), free_port());
    let workers = format!("127.0.0.1:{transfer}");
    let first = ["--kv-role", "prefill", "--kv-transfer-port", &transfer, "--grpc-port", &first_port];
    let second = ["--kv-role", "decode", "--kv-prefill-workers", &workers, "--grpc-port", &second_port];
    let dtype = ["--dtype", "float32"];
    let first = Worker::start(&baton, &[&first[..], &dtype].concat());
    let second = Worker::start(&baton, &[&second[..], &dtype].concat());
    let asked = text(&prompt(60), 12);
    on_runtime(async {
        let mut prefill = InferenceClient::new(connect(&first_port).await);
        let mut decode = InferenceClient::new(connect(&second_port).await);
        let with = |params: &serde_json::Value| {
            let fields = params.as_object().unwrap().iter().map(|(name, value)| {
                let kind = match value {
                    serde_json::Value::Bool(value) => prost_types::value::Kind::BoolValue(*value),
                    other => prost_types::value::Kind::StringValue(other.as_str().unwrap().to_owned()),
                };
                (name.clone(), prost_types::Value { kind: Some(kind) })
            });
            let params = prost_types::Struct { fields: fields.collect() };
            KvCacheParameters { kv_transfer_params: Some(params), ..KvCacheParameters::default() }
        };
        let mut leg = GenerateRequest { kv: Some(with(&json!({"do_remote_decode": true}))), ..asked.clone() };
        leg.stopping.as_mut().unwrap().max_new_tokens = 1;
        let end = prefill.generate(leg).await.unwrap().into_inner().outputs.unwrap().finish_info.unwrap();
        let params = end.kv_transfer_params.expect("where the KV is").fields;
        let text = |name: &str| match params[name].kind.as_ref().unwrap() {
            prost_types::value::Kind::StringValue(text) => text.clone(),
            prost_types::value::Kind::NumberValue(number) => number.to_string(),
            other => panic!("{other:?}"),
        };
        assert_eq!(text("remote_port"), transfer);
        let remote = json!({
            "do_remote_prefill": true, "remote_host": text("remote_host"), "remote_port": text("remote_port")
        });
        let leg = GenerateRequest { kv: Some(with(&remote)), ..asked.clone() };
        let handed = decode.generate(leg).await.unwrap().into_inner().outputs.unwrap();
        let own = prefill.generate(asked).await.unwrap().into_inner().outputs.unwrap();
        assert_eq!(handed.token_ids, own.token_ids);
    });
    assert!(second.metric("baton:kv_store_rows_total{store=\"peer\",kind=\"fetched\"}") >= 20.0);
    drop(first);
}
