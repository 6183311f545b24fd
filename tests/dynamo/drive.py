#!/usr/bin/env python3
"""The calls that dynamo-vllm-sidecar makes, by a client of Python's gRPC: `drive.py PROTO_DIR HOST:PORT [KEY]`.

PROTO_DIR holds `inference.proto` and `control.proto` of the crate vllm-proto 0.3. Needs grpcio, grpcio-tools and
grpcio-health-checking. Every answer is checked as the sidecar checks it; with KV events on, so are those of a repeated prompt
(needs pyzmq and msgspec).
"""

import pathlib
import struct
import sys
import tempfile

import grpc
import grpc_tools.protoc
from grpc_health.v1 import health_pb2, health_pb2_grpc

PROTOS, ADDRESS = pathlib.Path(sys.argv[1]), sys.argv[2]
METADATA = [("authorization", f"Bearer {sys.argv[3]}")] if len(sys.argv) > 3 else []
NAMES = ["inference", "control"]


def compiled():
    folder = tempfile.mkdtemp()
    include = pathlib.Path(grpc_tools.__file__).parent / "_proto"
    words = ["protoc", f"-I{PROTOS}", f"-I{include}", f"--python_out={folder}", f"--grpc_python_out={folder}"]
    assert grpc_tools.protoc.main([*words, *[str(PROTOS / f"{name}.proto") for name in NAMES]]) == 0
    sys.path.insert(0, folder)
    import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
    return inference_pb2, inference_pb2_grpc, control_pb2, control_pb2_grpc


I, IG, C, CG = compiled()


def request(ids, tokens, name="", **kv):
    """As the sidecar writes it."""
    return I.GenerateRequest(
        request_id=name, token_ids=I.TokenIds(ids=ids), temperature=0.0, sampling=I.RandomSampling(num_sequences=1),
        decoding=I.DecodingParameters(), stopping=I.StoppingCriteria(max_new_tokens=tokens, ignore_eos=True),
        response=I.ResponseOptions(output_text=True, output_token_ids=True, output_logprobs=True,
                                   output_candidates=I.CandidateTokens(top_n=2)),
        kv=I.KVCacheParameters(**kv))


def read(stream, num_prompt_tokens):
    ids, end = [], None
    for response in stream:
        if response.HasField("prompt_info"):
            assert response.prompt_info.num_prompt_tokens == num_prompt_tokens and not ids
        output = response.outputs
        count = len(output.token_ids)
        assert output.index == 0 and output.num_tokens == count and end is None
        assert len(output.logprobs) == len(output.ranks) == len(output.candidate_tokens) == count
        ids += output.token_ids
        if output.HasField("finish_info"):
            end = output.finish_info
    assert end is not None and end.num_output_tokens == len(ids), (end, len(ids))
    return ids, end


def subscribe(source):
    import msgspec
    import zmq
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(source.endpoint.replace("*", ADDRESS.rsplit(":", 1)[0]))
    socket.setsockopt_string(zmq.SUBSCRIBE, source.topic)

    def stored():
        blocks = 0
        while socket.poll(500):
            _, number, payload = socket.recv_multipart()
            struct.unpack(">Q", number)
            _, events, rank = msgspec.msgpack.decode(payload)
            assert rank == 0
            blocks += sum(len(event[1]) for event in events if event[0] == "BlockStored")
        return blocks

    return stored


def main():
    channel = grpc.insecure_channel(ADDRESS)
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("vllm.Inference", "vllm.Control"):
        status = health.Check(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True, timeout=60).status
        assert status == health_pb2.HealthCheckResponse.SERVING, service
    control, inference = CG.ControlStub(channel), IG.InferenceStub(channel)
    server = control.GetServerInfo(C.GetServerInfoRequest(), metadata=METADATA)
    model = control.GetModelInfo(C.GetModelInfoRequest(), metadata=METADATA)
    assert server.api_version == "vllm" and server.parallelism.data_parallel_size == 1
    assert model.model_id and model.served_model_name and model.supports_token_ids_input
    print(f"{model.served_model_name}: {server.max_model_len} tokens, {server.total_kv_blocks} blocks of {server.kv_block_size}")
    sources = control.GetKvEventSources(C.GetKvEventSourcesRequest(), metadata=METADATA).sources
    stored = subscribe(sources[0]) if sources else None
    prompt = [1000 + number * 37 % 20000 for number in range(20 * server.kv_block_size)]
    if stored:
        # A subscription takes a while to arrive.
        for number in range(40):
            read(inference.GenerateStream(request([number + 5] * 64, 1), metadata=METADATA), 64)
            if stored():
                break
    first, end = read(inference.GenerateStream(request(prompt, 16, "first"), metadata=METADATA), len(prompt))
    assert end.finish_reason == I.FinishInfo.LENGTH and len(first) == 16
    news = stored() if stored else None
    again, _ = read(inference.GenerateStream(request(prompt, 16, "again"), metadata=METADATA), len(prompt))
    assert again == first
    if stored:
        assert news >= 20 and stored() == 0, "the second time, everything is cached"
        print(f"KV events: {news} blocks stored by the first request, none by the second")
    running = inference.GenerateStream(request(prompt, server.max_model_len - len(prompt) - 1, "long"), metadata=METADATA)
    next(running)
    control.Abort(C.AbortRequest(request_ids=["long"]), metadata=METADATA)
    ends = [one.outputs.finish_info.finish_reason for one in running if one.outputs.HasField("finish_info")]
    assert ends == [I.FinishInfo.ABORTED], ends
    try:
        inference.Generate(I.GenerateRequest(), metadata=METADATA)
        raise AssertionError("a request without a prompt was taken")
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
    print("ok: health, discovery, streams, log-probabilities, abort, refusals")


main()
