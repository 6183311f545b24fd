//! The server's log: lines go to a queue, and one thread writes them to stderr.
//!
//! Whoever reads stderr may stop reading, close it, or fill its disk. None of that may reach a request: a line that
//! finds the queue full is dropped and counted, and a write that fails is a line less. Nothing here panics.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::Context;
use tracing_subscriber::fmt::MakeWriter;

use crate::serve_args::{LogFormat, LogLevel};

/// Starts the log of a process that serves, on stderr. Lines go to a queue, so that a reader that stops reading stops no request.
/// Gives the count of lost lines.
pub fn start_for_process(
    format: LogFormat,
    level: LogLevel,
    max_queued_lines: usize,
) -> anyhow::Result<Arc<AtomicU64>> {
    let lost: fn(u64) -> String = match format {
        LogFormat::Human => |count| format!(" WARN {count} lines of the log were lost: nobody took them\n"),
        LogFormat::Json => |count| {
            format!("{{\"level\":\"WARN\",\"message\":\"lines of the log were lost\",\"count\":{count}}}\n")
        },
    };
    let log =
        Log::start(io::stderr(), max_queued_lines, lost).context("the log's thread could not be started")?;
    log.install();
    let num_lost = log.num_lost();
    let builder = tracing_subscriber::fmt()
        .with_max_level(level.0)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        .with_writer(log);
    match format {
        LogFormat::Human => builder.init(),
        LogFormat::Json => builder.json().flatten_event(true).init(),
    }
    Ok(num_lost)
}

/// How long the end of the process waits for the last lines to leave.
const LAST_LINES: Duration = Duration::from_secs(1);

static LOG: OnceLock<Log> = OnceLock::new();

enum Entry {
    Line(Vec<u8>),
    /// Answered when all lines before it have been written.
    Flush(SyncSender<()>),
}

/// The way into the queue.
#[derive(Clone, Debug)]
pub struct Log {
    entries: SyncSender<Entry>,
    num_lost: Arc<AtomicU64>,
}

impl Log {
    /// Starts the thread that writes. Lines that are lost are told of by `lost`, when the sink takes lines again.
    pub fn start(
        sink: impl Write + Send + 'static,
        capacity: usize,
        lost: fn(u64) -> String,
    ) -> io::Result<Self> {
        let (entries, queue) = sync_channel(capacity);
        let num_lost = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&num_lost);
        std::thread::Builder::new()
            .name("baton-log".to_owned())
            .spawn(move || write_all(&queue, sink, &counter, lost))?;
        Ok(Self { entries, num_lost })
    }

    /// Makes this the log that [`say`] writes to.
    pub fn install(&self) {
        // Twice is once: there is one stderr.
        let _ = LOG.set(self.clone());
    }

    /// Lines that were not written.
    pub fn num_lost(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.num_lost)
    }

    fn push(&self, line: &[u8]) {
        if self.entries.try_send(Entry::Line(line.to_vec())).is_err() {
            self.num_lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits a moment for the lines so far to be written.
    fn flush(&self) {
        let deadline = Instant::now() + LAST_LINES;
        let (done, written) = sync_channel(1);
        while let Err(TrySendError::Full(_)) = self.entries.try_send(Entry::Flush(done.clone())) {
            if Instant::now() >= deadline {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(done);
        let _ = written.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    }
}

fn write_all(queue: &Receiver<Entry>, mut sink: impl Write, num_lost: &AtomicU64, lost: fn(u64) -> String) {
    let mut num_told = 0;
    while let Ok(entry) = queue.recv() {
        match entry {
            Entry::Line(line) => {
                if sink.write_all(&line).and_then(|()| sink.flush()).is_err() {
                    num_lost.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                let now = num_lost.load(Ordering::Relaxed);
                if now > num_told && sink.write_all(lost(now - num_told).as_bytes()).is_ok() {
                    num_told = now;
                }
            }
            Entry::Flush(done) => {
                let _ = done.try_send(());
            }
        }
    }
}

/// One event of `tracing`.
#[derive(Debug)]
pub struct Line<'a>(&'a Log);

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line(self)
    }
}

/// A line for whoever reads stderr, through the log where there is one. Neither fails nor, with a log, waits.
pub fn say(line: &str) {
    let line = format!("{line}\n");
    match LOG.get() {
        Some(log) => log.push(line.as_bytes()),
        None => {
            let _ = io::stderr().write_all(line.as_bytes());
        }
    }
}

/// Gives the last lines a moment to leave. To be called before the process ends.
pub fn flush() {
    if let Some(log) = LOG.get() {
        log.flush();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// A sink that waits for leave before each write, and fails when it is told to.
    struct Slow {
        leave: Receiver<bool>,
        written: Arc<Mutex<String>>,
    }

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            match self.leave.recv() {
                Ok(true) => {}
                _ => return Err(io::Error::from(io::ErrorKind::BrokenPipe)),
            }
            self.written.lock().expect("no panic").push_str(&String::from_utf8_lossy(bytes));
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn slow(capacity: usize) -> (Log, Sender<bool>, Arc<Mutex<String>>) {
        let (leave, waits) = channel();
        let written = Arc::new(Mutex::new(String::new()));
        let sink = Slow { leave: waits, written: Arc::clone(&written) };
        let log = Log::start(sink, capacity, |count| format!("{count} lost\n")).expect("a thread");
        (log, leave, written)
    }

    #[test]
    fn a_stuck_sink_costs_lines_and_never_waits() {
        let (log, leave, written) = slow(4);
        for number in 0..100 {
            // One is in the writer's hands or in the queue, four more are queued at most.
            log.push(format!("{number}\n").as_bytes());
        }
        let lost = log.num_lost().load(Ordering::Relaxed);
        assert!((95..=96).contains(&lost), "{lost} lost");
        (0..100).for_each(|_| leave.send(true).expect("the writer lives as long as the log"));
        log.flush();
        let text = written.lock().expect("no panic").clone();
        assert!(text.starts_with("0\n") && text.contains(&format!("{lost} lost\n")), "{text}");
    }

    #[test]
    fn a_closed_sink_is_counted() {
        let (log, leave, _) = slow(10);
        leave.send(false).expect("waits");
        log.push(b"x\n");
        log.flush();
        assert_eq!(log.num_lost().load(Ordering::Relaxed), 1);
        drop(leave);
        log.push(b"y\n");
        log.flush();
        assert_eq!(log.num_lost().load(Ordering::Relaxed), 2);
    }
}
