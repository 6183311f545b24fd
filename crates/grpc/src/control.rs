//! `vllm.Control`: what is served, where its KV events are, and aborts. The rest belongs to adapters and to training, which are not
//! served here.

use baton_events::KvEventsConfig;
use baton_serve::Frontend;
use tonic::{Request, Response, Status};
use vllm_proto::control_server::Control;
use vllm_proto::{
    AbortRequest, AbortResponse, FinishWeightUpdateRequest, FinishWeightUpdateResponse,
    GetKvEventSourcesRequest, GetKvEventSourcesResponse, GetModelInfoRequest, GetServerInfoRequest,
    GetWeightVersionRequest, GetWeightVersionResponse, InitWeightTransferEngineRequest,
    InitWeightTransferEngineResponse, IsPausedRequest, IsPausedResponse, IsSleepingRequest,
    IsSleepingResponse, KvEventSource, ListLorasRequest, ListLorasResponse, LoadLoraRequest,
    LoadLoraResponse, ModelInfo, ParallelismInfo, PauseGenerationRequest, PauseGenerationResponse,
    ResumeGenerationRequest, ResumeGenerationResponse, ServerInfo, SleepRequest, SleepResponse,
    StartDraftWeightUpdateRequest, StartDraftWeightUpdateResponse, StartWeightUpdateRequest,
    StartWeightUpdateResponse, UnloadLoraRequest, UnloadLoraResponse, UpdateWeightVersionRequest,
    UpdateWeightVersionResponse, UpdateWeightsRequest, UpdateWeightsResponse, WakeUpRequest, WakeUpResponse,
};

use crate::abort::Running;
use crate::inference::tenant;

/// vLLM's name of this version of the services.
const API_VERSION: &str = "vllm";
const EVENT_SCHEMA_VERSION: u32 = 1;

/// What the front end does not know.
#[derive(Clone, Debug)]
pub struct ControlFacts {
    /// Where others find the model's tokenizer: a directory, or the model's name.
    pub model_id: String,
    /// Tokens of a step, where that was said; 0 otherwise.
    pub max_batched_tokens: usize,
    /// Where events are published, if they are.
    pub kv_events: Option<KvEventsConfig>,
}

#[derive(Clone, Debug)]
pub struct ControlService {
    pub frontend: Frontend,
    pub running: Running,
    pub facts: ControlFacts,
    pub instance_id: String,
}

fn unimplemented<T>(what: &str) -> Result<Response<T>, Status> {
    Err(Status::unimplemented(format!("{what} is not supported")))
}

#[tonic::async_trait]
impl Control for ControlService {
    async fn get_server_info(
        &self,
        _: Request<GetServerInfoRequest>,
    ) -> Result<Response<ServerInfo>, Status> {
        let model = self.frontend.facts();
        Ok(Response::new(ServerInfo {
            engine_version: concat!("baton-", env!("CARGO_PKG_VERSION")).to_owned(),
            api_version: API_VERSION.to_owned(),
            instance_id: self.instance_id.clone(),
            parallelism: Some(ParallelismInfo {
                tensor_parallel_size: 1,
                pipeline_parallel_size: 1,
                data_parallel_size: 1,
                data_parallel_rank: 0,
                decode_context_parallel_size: 1,
                world_size: 1,
                data_parallel_size_local: 1,
            }),
            max_model_len: model.max_model_len as u32,
            kv_block_size: model.block_size as u32,
            total_kv_blocks: model.num_kv_blocks as u64,
            max_running_requests: model.max_num_seqs as u64,
            max_batched_tokens: self.facts.max_batched_tokens as u64,
            max_loras: 0,
            rl_capabilities: None,
            effective_attention_block_size: Some(model.block_size as u64),
        }))
    }

    async fn get_model_info(&self, _: Request<GetModelInfoRequest>) -> Result<Response<ModelInfo>, Status> {
        let model = self.frontend.facts();
        let (name, aliases) = model.names.split_first().ok_or_else(|| Status::internal("no name"))?;
        Ok(Response::new(ModelInfo {
            model_id: self.facts.model_id.clone(),
            served_model_name: name.clone(),
            served_model_aliases: aliases.to_vec(),
            supports_text_input: model.has_tokenizer,
            supports_token_ids_input: true,
            ..ModelInfo::default()
        }))
    }

    async fn abort(&self, request: Request<AbortRequest>) -> Result<Response<AbortResponse>, Status> {
        let tenant = tenant(&request)?;
        for id in request.into_inner().request_ids {
            self.running.abort(tenant.id(), id);
        }
        Ok(Response::new(AbortResponse {}))
    }

    async fn get_kv_event_sources(
        &self,
        _: Request<GetKvEventSourcesRequest>,
    ) -> Result<Response<GetKvEventSourcesResponse>, Status> {
        let config = self.facts.kv_events.as_ref().filter(|config| config.uses_zmq());
        let source = config.map(|config| KvEventSource {
            transport: "zmq".to_owned(),
            endpoint: config.endpoint.clone(),
            topic: config.topic.clone(),
            replay_endpoint: config.replay_endpoint.clone().unwrap_or_default(),
            data_parallel_rank: Some(0),
            encoding: "msgpack".to_owned(),
            schema_version: EVENT_SCHEMA_VERSION,
            buffer_steps: config.buffer_steps as u32,
            hwm: config.hwm as u32,
            max_queue_size: config.max_queue_size as u32,
        });
        Ok(Response::new(GetKvEventSourcesResponse { sources: source.into_iter().collect() }))
    }

    async fn list_loras(&self, _: Request<ListLorasRequest>) -> Result<Response<ListLorasResponse>, Status> {
        Ok(Response::new(ListLorasResponse::default()))
    }

    async fn is_paused(&self, _: Request<IsPausedRequest>) -> Result<Response<IsPausedResponse>, Status> {
        Ok(Response::new(IsPausedResponse { paused: false }))
    }

    async fn is_sleeping(
        &self,
        _: Request<IsSleepingRequest>,
    ) -> Result<Response<IsSleepingResponse>, Status> {
        Ok(Response::new(IsSleepingResponse { sleeping: false }))
    }

    async fn load_lora(&self, _: Request<LoadLoraRequest>) -> Result<Response<LoadLoraResponse>, Status> {
        unimplemented("LoadLora")
    }

    async fn unload_lora(
        &self,
        _: Request<UnloadLoraRequest>,
    ) -> Result<Response<UnloadLoraResponse>, Status> {
        unimplemented("UnloadLora")
    }

    async fn pause_generation(
        &self,
        _: Request<PauseGenerationRequest>,
    ) -> Result<Response<PauseGenerationResponse>, Status> {
        unimplemented("PauseGeneration")
    }

    async fn resume_generation(
        &self,
        _: Request<ResumeGenerationRequest>,
    ) -> Result<Response<ResumeGenerationResponse>, Status> {
        unimplemented("ResumeGeneration")
    }

    async fn sleep(&self, _: Request<SleepRequest>) -> Result<Response<SleepResponse>, Status> {
        unimplemented("Sleep")
    }

    async fn wake_up(&self, _: Request<WakeUpRequest>) -> Result<Response<WakeUpResponse>, Status> {
        unimplemented("WakeUp")
    }

    async fn init_weight_transfer_engine(
        &self,
        _: Request<InitWeightTransferEngineRequest>,
    ) -> Result<Response<InitWeightTransferEngineResponse>, Status> {
        unimplemented("InitWeightTransferEngine")
    }

    async fn start_weight_update(
        &self,
        _: Request<StartWeightUpdateRequest>,
    ) -> Result<Response<StartWeightUpdateResponse>, Status> {
        unimplemented("StartWeightUpdate")
    }

    async fn start_draft_weight_update(
        &self,
        _: Request<StartDraftWeightUpdateRequest>,
    ) -> Result<Response<StartDraftWeightUpdateResponse>, Status> {
        unimplemented("StartDraftWeightUpdate")
    }

    async fn update_weights(
        &self,
        _: Request<UpdateWeightsRequest>,
    ) -> Result<Response<UpdateWeightsResponse>, Status> {
        unimplemented("UpdateWeights")
    }

    async fn finish_weight_update(
        &self,
        _: Request<FinishWeightUpdateRequest>,
    ) -> Result<Response<FinishWeightUpdateResponse>, Status> {
        unimplemented("FinishWeightUpdate")
    }

    async fn update_weight_version(
        &self,
        _: Request<UpdateWeightVersionRequest>,
    ) -> Result<Response<UpdateWeightVersionResponse>, Status> {
        unimplemented("UpdateWeightVersion")
    }

    async fn get_weight_version(
        &self,
        _: Request<GetWeightVersionRequest>,
    ) -> Result<Response<GetWeightVersionResponse>, Status> {
        unimplemented("GetWeightVersion")
    }
}
