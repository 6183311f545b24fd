//! `/v1/graphs`: a graph is uploaded once, then embeddings of its nodes are asked for as often as one likes.

use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::response::Response;
use baton_graph::{Embeddings, Graph, GraphData, GraphRequest, HostRows, NanPolicy, Sampling};
use tokio::sync::oneshot;

use crate::auth::TenantId;
use crate::body::JsonBody;
use crate::error::ApiError;
use crate::graphs::{Graphs, Stored};
use crate::ids;
use crate::prepare;
use crate::scope;
use crate::state::App;
use crate::types::embeddings::EncodingFormat;
use crate::types::graphs::{
    DeletedGraph, GraphEmbeddingRequest, GraphEmbeddings, GraphInfo, GraphList, GraphModelInfo, GraphUpload,
    NanField, NodeEmbedding,
};

use super::embeddings::{encode, from_base64};
use super::{json, parsed};

const MAX_ID_LEN: usize = 128;
/// What a number of an answer takes: itself, and its digits on their way out.
const BYTES_PER_NUMBER: usize = 20;

fn graphs(app: &App) -> Result<&Arc<Graphs>, ApiError> {
    app.graphs.as_ref().ok_or_else(ApiError::no_graph_model)
}

fn info(stored: &Stored) -> GraphInfo {
    GraphInfo {
        object: "graph",
        id: stored.id.clone(),
        version: stored.data.version(),
        num_nodes: stored.data.num_nodes(),
        num_edges: stored.data.graph().num_edges(),
        num_features: stored.data.features().cols(),
        bytes: stored.data.bytes(),
        created: stored.created,
    }
}

pub async fn create(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let graphs = Arc::clone(graphs(&app)?);
    let _in_flight = app.admit()?;
    let body = JsonBody::read(&app, request).await?;
    let tenant = scope::tenant();
    let stored = prepare::blocking(&app, move |_| {
        let mut upload: GraphUpload = body.parse()?;
        let id = upload.id.take().unwrap_or_else(|| format!("graph-{}", ids::unique()));
        check_id(&id)?;
        graphs.check_version(tenant, &id, upload.version.unwrap_or(1))?;
        let data = build(&graphs, tenant, &id, upload)?;
        graphs.insert(tenant, &id, data)
    });
    Ok(json(&info(&stored.await?)))
}

pub async fn list(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let graphs = graphs(&app)?;
    let model = graphs.serving.service.info();
    let model = GraphModelInfo {
        id: model.model.clone(),
        num_features: model.num_features,
        num_outputs: model.num_outputs,
        num_layers: model.num_layers,
        device: model.device.clone(),
    };
    let data = graphs.list(scope::tenant()).iter().map(info).collect();
    Ok(json(&GraphList { object: "list", model, data }))
}

pub async fn one(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    Ok(json(&info(&graphs(&app)?.get(scope::tenant(), &id)?)))
}

pub async fn remove(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    graphs(&app)?.remove(scope::tenant(), &id)?;
    Ok(json(&DeletedGraph { id, object: "graph.deleted", deleted: true }))
}

pub async fn embed(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, ApiError> {
    let graphs = Arc::clone(graphs(&app)?);
    let tenant = scope::tenant();
    let _in_flight = app.admit()?;
    let stored = graphs.get(tenant, &id)?;
    let running = graphs.begin(tenant)?;
    let body = JsonBody::read(&app, request).await?;
    let asked: GraphEmbeddingRequest = parsed(&app, body, JsonBody::parse).await?;
    let num_rows = asked.nodes.as_ref().map_or(stored.data.num_nodes(), Vec::len);
    let num_outputs = graphs.serving.service.info().num_outputs;
    let cost = num_rows.saturating_mul(num_outputs).saturating_mul(BYTES_PER_NUMBER);
    if cost > app.bodies.share() {
        return Err(ApiError::answer_too_large(
            num_rows,
            app.bodies.share() / (num_outputs * BYTES_PER_NUMBER),
        ));
    }
    let mut charge = app.bodies.charge(tenant);
    if !charge.grow(cost) {
        return Err(ApiError::busy());
    }
    let request = GraphRequest {
        data: Arc::clone(&stored.data),
        targets: asked.nodes,
        sampling: sampling(asked.fan_outs, asked.seed)?,
        priority: 0,
    };
    let (sender, receiver) = oneshot::channel();
    let reply = Box::new(move |result| drop(sender.send(result)));
    let ticket = graphs.serving.service.submit(request, reply);
    let embeddings = receiver.await.map_err(|_| {
        if graphs.holds(tenant, &stored) {
            ApiError::unavailable("the graph engine has stopped")
        } else {
            ApiError::graph_gone(&id)
        }
    })??;
    drop((ticket, running));
    let format = asked.encoding_format.unwrap_or_default();
    let model = graphs.serving.service.info().model.clone();
    prepare::blocking(&app, move |_| {
        let _charge = charge;
        Ok(json(&answer(model, &stored, &embeddings, format)))
    })
    .await
}

fn answer(
    model: String,
    stored: &Stored,
    embeddings: &Embeddings,
    format: EncodingFormat,
) -> GraphEmbeddings {
    let node = |index: usize| embeddings.nodes.as_ref().map_or(index as u32, |nodes| nodes[index]);
    let rows = embeddings.values.chunks_exact(embeddings.cols).enumerate();
    let row = |(index, row)| NodeEmbedding {
        object: "embedding",
        index,
        node: node(index),
        embedding: encode(row, format),
    };
    GraphEmbeddings {
        object: "list",
        model,
        graph: stored.id.clone(),
        version: stored.data.version(),
        data: rows.map(row).collect(),
    }
}

fn check_id(id: &str) -> Result<(), ApiError> {
    let sound = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if id.is_empty() || id.len() > MAX_ID_LEN || !id.chars().all(sound) {
        let message = format!("id must be 1 to {MAX_ID_LEN} letters, digits, '.', '_' or '-'");
        return Err(ApiError::invalid_field("id", message));
    }
    Ok(())
}

fn sampling(fan_outs: Option<Vec<i64>>, seed: Option<u64>) -> Result<Option<Sampling>, ApiError> {
    let Some(fan_outs) = fan_outs.filter(|fan_outs| !fan_outs.is_empty()) else { return Ok(None) };
    let fan_out = |fan_out: i64| match fan_out {
        -1 => Ok(usize::MAX),
        _ => usize::try_from(fan_out).map_err(|_| {
            ApiError::invalid_field(
                "fan_outs",
                format!("a fan-out is {fan_out}: give 1 or more, or -1 for all"),
            )
        }),
    };
    let fan_outs = fan_outs.into_iter().map(fan_out).collect::<Result<_, _>>()?;
    Ok(Some(Sampling { fan_outs, seed: seed.unwrap_or(0) }))
}

/// The graph of an upload, checked against the model.
fn build(graphs: &Graphs, tenant: TenantId, id: &str, upload: GraphUpload) -> Result<GraphData, ApiError> {
    let num_features = graphs.serving.service.info().num_features;
    let features = features(upload.features, upload.features_base64, num_features)?;
    let [mut sources, mut targets] = edges(upload.edge_index, upload.edges, upload.edge_index_base64)?;
    if upload.undirected == Some(true) {
        let forward = sources.clone();
        sources.extend_from_slice(&targets);
        targets.extend(forward);
    }
    let graph = Graph::from_columns(features.rows(), sources.len(), |edge| {
        (i64::from(sources[edge]), i64::from(targets[edge]))
    })?;
    let nan_policy = match upload.nan.unwrap_or_default() {
        NanField::Reject => NanPolicy::Reject,
        NanField::Allow => NanPolicy::Allow,
    };
    let engine_id = Graphs::engine_id(tenant, id);
    Ok(GraphData::new(engine_id, upload.version.unwrap_or(1), graph, features, nan_policy)?)
}

fn features(
    rows: Option<Vec<Vec<f32>>>,
    encoded: Option<String>,
    num_features: usize,
) -> Result<HostRows, ApiError> {
    let wrong = |message: String| ApiError::invalid_field("features", message);
    let values = match (rows, encoded) {
        (Some(rows), None) => {
            if let Some((node, row)) = rows.iter().enumerate().find(|(_, row)| row.len() != num_features) {
                let got = row.len();
                return Err(wrong(format!(
                    "node {node} has {got} features, but the model takes {num_features}"
                )));
            }
            rows.concat()
        }
        (None, Some(text)) => {
            let bytes = from_base64("features_base64", &text)?;
            let row_bytes = 4 * num_features;
            if !bytes.len().is_multiple_of(row_bytes) {
                let got = bytes.len();
                return Err(wrong(format!(
                    "features_base64 has {got} bytes, which is no whole number of rows: the model takes \
                     {num_features} features, {row_bytes} bytes a node"
                )));
            }
            bytes.as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect()
        }
        _ => return Err(wrong("give either features or features_base64".to_owned())),
    };
    let num_nodes = values.len() / num_features;
    Ok(HostRows::from_f32(num_nodes, num_features, values).expect("the rows are whole"))
}

/// Sources and targets.
fn edges(
    columns: Option<[Vec<u32>; 2]>,
    pairs: Option<Vec<(u32, u32)>>,
    encoded: Option<String>,
) -> Result<[Vec<u32>; 2], ApiError> {
    match (columns, pairs, encoded) {
        (Some([sources, targets]), None, None) => {
            if sources.len() != targets.len() {
                let (from, to) = (sources.len(), targets.len());
                let message = format!("edge_index has {from} sources and {to} targets");
                return Err(ApiError::invalid_field("edge_index", message));
            }
            Ok([sources, targets])
        }
        (None, Some(pairs), None) => {
            let (sources, targets) = pairs.into_iter().unzip();
            Ok([sources, targets])
        }
        (None, None, Some(text)) => {
            let bytes = from_base64("edge_index_base64", &text)?;
            if !bytes.len().is_multiple_of(8) {
                let got = bytes.len();
                let message =
                    format!("edge_index_base64 has {got} bytes, but an edge is two numbers of 4 bytes");
                return Err(ApiError::invalid_field("edge_index_base64", message));
            }
            let numbers = bytes.as_chunks::<4>().0.iter().map(|raw| u32::from_le_bytes(*raw));
            let mut sources: Vec<u32> = numbers.collect();
            let targets = sources.split_off(sources.len() / 2);
            Ok([sources, targets])
        }
        _ => {
            let message = "give one of edge_index, edges and edge_index_base64 (an empty list for no edges)";
            Err(ApiError::invalid_field("edge_index", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::embeddings::base64;
    use super::*;

    #[test]
    fn names_are_plain() {
        assert!(check_id("a-B_9.x").is_ok());
        for wrong in ["", "a/b", "ä", "a b", &"x".repeat(MAX_ID_LEN + 1)] {
            assert!(check_id(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn all_ways_of_writing_edges_are_one() {
        let numbers: Vec<u8> = [0u32, 1, 2, 5, 6, 7].iter().flat_map(|n| n.to_le_bytes()).collect();
        let expected = [vec![0, 1, 2], vec![5, 6, 7]];
        assert_eq!(edges(Some(expected.clone()), None, None).unwrap(), expected);
        assert_eq!(edges(None, Some(vec![(0, 5), (1, 6), (2, 7)]), None).unwrap(), expected);
        assert_eq!(edges(None, None, Some(base64(&numbers))).unwrap(), expected);
        assert!(edges(None, None, None).is_err());
        assert!(edges(Some(expected), Some(Vec::new()), None).is_err());
        assert!(edges(Some([vec![1], vec![]]), None, None).is_err());
        assert!(edges(None, None, Some(base64(&numbers[..12]))).is_err());
    }
}
