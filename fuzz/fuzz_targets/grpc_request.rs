#![no_main]

use prost::Message;
use vllm_proto::GenerateRequest;

// A call's body: no media come past the check of the bytes, and whatever decodes is converted or refused.
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let is_passed = baton_grpc::request::check_message(bytes).is_ok();
    let Ok(request) = GenerateRequest::decode(bytes) else { return };
    assert!(!is_passed || request.media.is_empty(), "media came past the check");
    let _ = baton_grpc::request::convert(request.clone(), true);
    let _ = baton_grpc::request::convert(request, false);
});
