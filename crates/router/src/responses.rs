//! Which worker keeps which stored response: `/v1/responses/{id}` and `previous_response_id` must go where the response is.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

/// The oldest are forgotten first; workers forget theirs too.
const MAX_KNOWN: usize = 64 << 10;
/// The id stands at the beginning of an answer.
const LOOK_AT: usize = 4 << 10;
const MAX_ID: usize = 128;

#[derive(Debug, Default)]
pub struct Owners(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    owners: HashMap<String, u32>,
    order: VecDeque<String>,
}

impl Owners {
    pub fn note(&self, id: String, worker: u32) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.owners.insert(id.clone(), worker).is_none() {
            known.order.push_back(id);
        }
        if known.order.len() > MAX_KNOWN
            && let Some(oldest) = known.order.pop_front()
        {
            known.owners.remove(&oldest);
        }
    }

    pub fn owner(&self, id: &str) -> Option<u32> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).owners.get(id).copied()
    }
}

/// The response that a path is about.
pub fn named(path: &str) -> Option<&str> {
    let rest = path.strip_prefix("/v1/responses/").or_else(|| path.strip_prefix("/responses/"))?;
    rest.split('/').next().filter(|id| !id.is_empty())
}

/// The id of a response that was just made, from the first bytes of the answer.
pub fn created(path: &str, first: &[u8]) -> Option<String> {
    if path != "/v1/responses" && path != "/responses" {
        return None;
    }
    let head = String::from_utf8_lossy(&first[..first.len().min(LOOK_AT)]);
    let start = head.find("\"resp_")? + 1;
    let id = &head[start..start + head[start..].find('"')?];
    (id.len() <= MAX_ID).then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_found() {
        assert_eq!(named("/v1/responses/resp_1/cancel"), Some("resp_1"));
        assert_eq!(named("/v1/responses"), None);
        let event = b"event: response.created\ndata: {\"response\":{\"id\":\"resp_ab\",\"x\":1}}\n\n";
        assert_eq!(created("/v1/responses", event).as_deref(), Some("resp_ab"));
        assert_eq!(created("/v1/completions", event), None);
        assert_eq!(created("/v1/responses", b"{\"id\": \"resp_cut"), None);
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let owners = Owners::default();
        for number in 0..=MAX_KNOWN {
            owners.note(number.to_string(), 1);
        }
        assert_eq!((owners.owner("0"), owners.owner("1")), (None, Some(1)));
    }
}
