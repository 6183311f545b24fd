//! `--profile`: the step loop as a Chrome trace (open it in Perfetto or chrome://tracing).
//!
//! One event a phase of a step, written as it happens; the file can be read even if the process was killed, because
//! the format allows the list to be left open.

use std::io::{BufWriter, Write};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use baton_engine::RelayReport;

/// Rows of the picture.
#[derive(Clone, Copy, Debug)]
pub enum Row {
    Engine = 1,
    Text = 2,
    Device = 3,
}

/// Groups of a step that are listed; the others are only counted.
const MAX_GROUPS: usize = 32;

pub struct Trace {
    origin: Instant,
    out: Mutex<BufWriter<Box<dyn Write + Send>>>,
}

impl std::fmt::Debug for Trace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Trace")
    }
}

impl Trace {
    pub fn new(out: Box<dyn Write + Send>) -> Self {
        let trace = Self { origin: Instant::now(), out: Mutex::new(BufWriter::new(out)) };
        trace.write(format_args!(
            "[{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":1,\"tid\":1,\"args\":{{\"name\":\"engine\"}}}},\n\
             {{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":1,\"tid\":2,\"args\":{{\"name\":\"text\"}}}},\n\
             {{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":1,\"tid\":3,\"args\":{{\"name\":\"device\"}}}}"
        ));
        trace
    }

    /// One span of work. `name` is one of ours: it needs no escaping.
    pub fn span(&self, row: Row, name: &str, start: Instant, end: Instant, step: u64, num_tokens: usize) {
        let begin_us = start.saturating_duration_since(self.origin).as_nanos() as f64 / 1e3;
        let duration_us = end.saturating_duration_since(start).as_nanos() as f64 / 1e3;
        self.write(format_args!(
            ",\n{{\"name\":\"{name}\",\"ph\":\"X\",\"pid\":1,\"tid\":{},\"ts\":{begin_us:.3},\"dur\":{duration_us:.3},\
             \"args\":{{\"step\":{step},\"num_tokens\":{num_tokens}}}}}",
            row as u8
        ));
    }

    /// What the sequences of a step read together: a mark on the engine's row, and a curve of what it saved.
    pub fn relay(&self, report: &RelayReport) {
        let at_us = report.at.saturating_duration_since(self.origin).as_nanos() as f64 / 1e3;
        let groups = &report.relay.groups;
        let shown =
            groups.iter().take(MAX_GROUPS).map(|group| format!("[{},{}]", group.num_seqs, group.num_tokens));
        self.write(format_args!(
            ",\n{{\"name\":\"relay\",\"ph\":\"i\",\"s\":\"t\",\"pid\":1,\"tid\":{},\"ts\":{at_us:.3},\
             \"args\":{{\"step\":{},\"num_groups\":{},\"groups_seqs_tokens\":[{}]}}}},\n\
             {{\"name\":\"KV reads saved\",\"ph\":\"C\",\"pid\":1,\"ts\":{at_us:.3},\"args\":{{\"tokens\":{}}}}}",
            Row::Engine as u8,
            report.step,
            groups.len(),
            shown.collect::<Vec<_>>().join(","),
            report.relay.num_tokens_saved,
        ));
    }

    fn write(&self, text: std::fmt::Arguments<'_>) {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        // A full disk costs the profile, not the requests.
        let _ = out.write_fmt(text);
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.write(format_args!("]\n"));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use baton_engine::{RelayGroup, StepRelay};

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_trace_is_a_list_of_events() {
        let file = Shared::default();
        let trace = Trace::new(Box::new(file.clone()));
        let start = Instant::now();
        trace.span(Row::Engine, "wait", start, start + Duration::from_micros(250), 7, 64);
        let groups =
            vec![RelayGroup { num_seqs: 64, num_tokens: 2048 }, RelayGroup { num_seqs: 2, num_tokens: 16 }];
        let relay = StepRelay { groups, num_tokens_saved: 129_040 };
        trace.relay(&RelayReport { step: 7, at: start, relay });
        drop(trace);
        let events: serde_json::Value = serde_json::from_slice(&file.0.lock().unwrap()).expect("JSON");
        assert_eq!(events[2]["args"]["name"], "device");
        assert_eq!(events[3]["name"], "wait");
        assert_eq!(events[3]["dur"], 250.0);
        assert_eq!(events[3]["args"]["num_tokens"], 64);
        let expected =
            serde_json::json!({"step": 7, "num_groups": 2, "groups_seqs_tokens": [[64, 2048], [2, 16]]});
        assert_eq!((&events[4]["name"], &events[4]["args"]), (&"relay".into(), &expected));
        assert_eq!(events[5]["args"]["tokens"], 129_040);
    }
}
