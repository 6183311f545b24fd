//! The caller's trace: the `traceparent` header of W3C Trace Context, kept beside the request while it is handled.

use axum::http::HeaderMap;

/// The span of the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceParent {
    pub trace_id: String,
    pub span_id: String,
    /// Whether the caller records this trace.
    pub sampled: bool,
}

tokio::task_local! {
    static PARENT: Option<TraceParent>;
}

/// Runs a request's handler so that [`current_parent`] knows what its headers say.
pub async fn in_context<T>(headers: &HeaderMap, handler: impl Future<Output = T>) -> T {
    let header = headers.get("traceparent").and_then(|value| value.to_str().ok());
    PARENT.scope(header.and_then(TraceParent::parse), handler).await
}

/// The caller's span, if there is one.
pub fn current_parent() -> Option<TraceParent> {
    PARENT.try_with(Clone::clone).ok().flatten()
}

impl TraceParent {
    /// `version-traceid-spanid-flags`; what does not follow the form is no parent.
    fn parse(header: &str) -> Option<Self> {
        let mut parts = header.trim().split('-');
        let mut hex = |length: usize| {
            let part = parts.next()?;
            let sound =
                part.len() == length && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
            sound.then_some(part)
        };
        let (version, trace_id, span_id, flags) = (hex(2)?, hex(32)?, hex(16)?, hex(2)?);
        // Later versions may say more; the first says no more than this.
        let too_long = version == "00" && parts.next().is_some();
        let is_zero = |id: &str| id.bytes().all(|byte| byte == b'0');
        if version == "ff" || too_long || is_zero(trace_id) || is_zero(span_id) {
            return None;
        }
        let sampled = u8::from_str_radix(flags, 16).is_ok_and(|flags| flags & 1 == 1);
        Some(Self { trace_id: trace_id.to_owned(), span_id: span_id.to_owned(), sampled })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sound_headers_are_parents() {
        let (trace, span) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
        let parent = TraceParent::parse(&format!("00-{trace}-{span}-01")).expect("sound");
        assert_eq!((parent.trace_id.as_str(), parent.span_id.as_str(), parent.sampled), (trace, span, true));
        assert!(!TraceParent::parse(&format!("00-{trace}-{span}-00")).expect("sound").sampled);
        assert!(TraceParent::parse(&format!("01-{trace}-{span}-01-more")).is_some());
        let zeros = "0".repeat(32);
        for wrong in [
            String::new(),
            format!("00-{trace}-{span}"),
            format!("00-{trace}-{span}-01-more"),
            format!("ff-{trace}-{span}-01"),
            format!("00-{zeros}-{span}-01"),
            format!("00-{}-{span}-01", trace.to_uppercase()),
            format!("00-{span}-{trace}-01"),
        ] {
            assert_eq!(TraceParent::parse(&wrong), None, "{wrong:?}");
        }
    }
}
