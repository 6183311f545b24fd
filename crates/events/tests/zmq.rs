//! Events over real ZeroMQ sockets, from the history to a subscriber.

use std::sync::Arc;
use std::time::Duration;

use baton_events::{Event, EventHub, KvEventsConfig, Publisher, Subscriber};
use baton_kv::{BlockHash, KvEvent};

fn stored(token: u32) -> KvEvent {
    let hashes = vec![BlockHash::root(None).child(&[token])];
    KvEvent::BlockStored { hashes, parent: None, token_ids: vec![token], block_size: 1, group: 0 }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscriber_gets_what_is_published() {
    let config = KvEventsConfig { endpoint: "tcp://127.0.0.1:*".to_owned(), ..KvEventsConfig::default() };
    let publisher = Publisher::bind(&config).await.expect("a free port");
    let endpoint = publisher.endpoint.clone();
    let hub = Arc::new(EventHub::new(100, 0));
    let publishing = tokio::spawn(publisher.run(Arc::clone(&hub)));
    let mut subscriber = Subscriber::connect(&endpoint).await.expect("a connection");
    // A subscription takes a while to arrive, so events go on until the first one is seen.
    let own = Arc::clone(&hub);
    let filling = tokio::spawn(async move {
        for token in 0..500 {
            own.publish(&[stored(token)]);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    for index in 0..5 {
        let received = tokio::time::timeout(Duration::from_secs(30), subscriber.next()).await;
        let received = received.expect("events come").expect("the socket is open");
        assert!(!received.missed, "batch {index}");
        assert!(matches!(&received.batch.events[..], [Event::BlockStored { block_size: 1, .. }]));
    }
    filling.abort();
    publishing.abort();
}
