//! `--kv-events-config`, with the fields of vLLM's.

use serde::Deserialize;

/// How events leave the process. Names and defaults are vLLM's.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KvEventsConfig {
    pub enable_kv_cache_events: bool,
    /// `zmq`, or `null` for the HTTP stream alone.
    pub publisher: String,
    pub endpoint: String,
    /// Where what was missed can be asked for.
    pub replay_endpoint: Option<String>,
    /// Batches that are kept for replays.
    pub buffer_steps: usize,
    /// Messages that wait for a subscriber. The socket has a limit of its own.
    pub hwm: usize,
    pub max_queue_size: usize,
    pub topic: String,
}

impl Default for KvEventsConfig {
    fn default() -> Self {
        Self {
            enable_kv_cache_events: false,
            publisher: "zmq".to_owned(),
            endpoint: "tcp://*:5557".to_owned(),
            replay_endpoint: None,
            buffer_steps: 10_000,
            hwm: 100_000,
            max_queue_size: 100_000,
            topic: String::new(),
        }
    }
}

impl KvEventsConfig {
    pub fn uses_zmq(&self) -> bool {
        self.publisher == "zmq"
    }

    /// What is wrong with it, if anything.
    pub fn check(&self) -> Result<(), String> {
        if !["zmq", "null"].contains(&self.publisher.as_str()) {
            return Err(format!("{:?} is not a publisher: write zmq or null", self.publisher));
        }
        if self.buffer_steps == 0 || self.buffer_steps > 1 << 24 {
            return Err("buffer_steps must be from 1 to 16777216".to_owned());
        }
        if self.uses_zmq() {
            for endpoint in [Some(&self.endpoint), self.replay_endpoint.as_ref()].into_iter().flatten() {
                bind_address(endpoint)?;
            }
        }
        Ok(())
    }
}

/// `tcp://*:5557` is every address of the machine, as libzmq has it.
pub(crate) fn bind_address(endpoint: &str) -> Result<String, String> {
    let wrong = || format!("{endpoint:?} is no address to bind: write for example tcp://*:5557");
    let rest = endpoint.strip_prefix("tcp://").ok_or_else(wrong)?;
    let (host, port) = rest.rsplit_once(':').ok_or_else(wrong)?;
    let port: u16 = if port == "*" { 0 } else { port.parse().map_err(|_| wrong())? };
    match host {
        "" => Err(wrong()),
        "*" => Ok(format!("tcp://0.0.0.0:{port}")),
        "localhost" => Ok(format!("tcp://127.0.0.1:{port}")),
        host => Ok(format!("tcp://{host}:{port}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_as_libzmq_does() {
        assert_eq!(bind_address("tcp://*:5557").unwrap(), "tcp://0.0.0.0:5557");
        assert_eq!(bind_address("tcp://127.0.0.1:*").unwrap(), "tcp://127.0.0.1:0");
        for wrong in ["ipc:///tmp/x", "tcp://x", "tcp://:1", "tcp://x:y", ""] {
            assert!(bind_address(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn settings_are_checked() {
        let of = |text: &str| serde_json::from_str::<KvEventsConfig>(text);
        let config = of(r#"{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv"}"#).unwrap();
        assert!(config.check().is_ok() && config.endpoint == "tcp://*:5557");
        assert!(of(r#"{"endpont": "x"}"#).is_err());
        assert!(of(r#"{"publisher": "kafka"}"#).unwrap().check().is_err());
        assert!(of(r#"{"buffer_steps": 0}"#).unwrap().check().is_err());
        assert!(of(r#"{"endpoint": "udp://x"}"#).unwrap().check().is_err());
    }
}
