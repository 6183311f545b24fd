//! Server-sent events out of a stream of bytes that may be cut anywhere. An event of these APIs is one `data:` line.

/// A longer line is not an event of a language model.
const MAX_LINE_BYTES: usize = 16 << 20;

/// What is left of a line whose end has not come.
#[derive(Debug, Default)]
pub struct SseParser {
    carry: Vec<u8>,
}

impl SseParser {
    /// Calls `event` with the data of every line that is complete. False when a line never ends.
    pub fn feed(&mut self, mut bytes: &[u8], mut event: impl FnMut(&[u8])) -> bool {
        while let Some(end) = bytes.iter().position(|&byte| byte == b'\n') {
            if self.carry.is_empty() {
                line(&bytes[..end], &mut event);
            } else {
                self.carry.extend_from_slice(&bytes[..end]);
                line(&self.carry, &mut event);
                self.carry.clear();
            }
            bytes = &bytes[end + 1..];
        }
        self.carry.extend_from_slice(bytes);
        self.carry.len() <= MAX_LINE_BYTES
    }
}

fn line(line: &[u8], event: &mut impl FnMut(&[u8])) {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    if let Some(data) = line.strip_prefix(b"data:") {
        event(data.strip_prefix(b" ").unwrap_or(data));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &[u8] = b"data: {\"a\":1}\n\n: comment\r\nevent: x\ndata:two\r\n\r\ndata: [DONE]\n\n";

    #[test]
    fn events_do_not_depend_on_how_the_stream_is_cut() {
        for size in 1..STREAM.len() {
            let mut parser = SseParser::default();
            let mut events = Vec::new();
            for piece in STREAM.chunks(size) {
                assert!(parser.feed(piece, |data| events.push(String::from_utf8(data.to_vec()).unwrap())));
            }
            assert_eq!(events, ["{\"a\":1}", "two", "[DONE]"], "pieces of {size}");
        }
    }

    #[test]
    fn a_line_without_end_is_noticed() {
        let mut parser = SseParser::default();
        let piece = vec![b'x'; MAX_LINE_BYTES];
        assert!(parser.feed(&piece, |_| {}));
        assert!(!parser.feed(b"x", |_| {}));
    }
}
