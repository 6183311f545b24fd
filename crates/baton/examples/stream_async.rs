//! The same in async code, on any executor: `cargo run --release -p baton --example stream_async [MODEL]`.

use std::future::poll_fn;
use std::pin::Pin;

use baton::{Llm, Message, Params};
use futures_core::Stream;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), baton::Error> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "smollm2".to_owned());
    let llm = Llm::open(&model)?;
    let question = [Message::user("Name three rivers in Europe.")];
    let mut answer = llm.chat_stream(&question, &Params::new().max_tokens(64))?;
    while let Some(piece) = poll_fn(|cx| Pin::new(&mut answer).poll_next(cx)).await {
        print!("{}", piece?);
    }
    println!();
    Ok(())
}
