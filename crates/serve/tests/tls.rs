//! HTTPS over real sockets, with a certificate made for the occasion.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use baton_serve::{Server, ServerConfig, TlsFiles};
use common::{engine_config, served_model};
use rcgen::{CertifiedKey, KeyPair, generate_simple_self_signed};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

struct Files {
    folder: tempfile::TempDir,
    made: CertifiedKey<KeyPair>,
}

impl Files {
    fn new() -> Self {
        let made = generate_simple_self_signed(vec!["localhost".to_owned()]).expect("a certificate");
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("cert.pem"), made.cert.pem()).expect("written");
        std::fs::write(folder.path().join("key.pem"), made.signing_key.serialize_pem()).expect("written");
        Self { folder, made }
    }

    fn config(&self, certificates: &str, key: &str) -> ServerConfig {
        let path = |name: &str| self.folder.path().join(name);
        let tls = Some(TlsFiles { certificates: path(certificates), key: path(key) });
        ServerConfig { port: 0, tls, read_timeout: Duration::from_millis(300), ..ServerConfig::default() }
    }

    /// A client that trusts this certificate, or nobody.
    fn client(&self, trusting: bool) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        if trusting {
            roots.add(self.made.cert.der().clone()).expect("a root");
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let config = config.with_safe_default_protocol_versions().expect("versions");
        Arc::new(config.with_root_certificates(roots).with_no_client_auth())
    }
}

fn get(address: SocketAddr, config: Arc<ClientConfig>, path: &str) -> std::io::Result<String> {
    let client = ClientConnection::new(config, "localhost".try_into().expect("a name")).expect("a client");
    let mut stream = StreamOwned::new(client, TcpStream::connect(address)?);
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[tokio::test(flavor = "multi_thread")]
async fn https_is_served_to_those_who_trust_the_certificate() {
    let files = Files::new();
    let server = Server::bind(served_model(&engine_config()), files.config("cert.pem", "key.pem")).await;
    let server = server.expect("the files are sound");
    let address = server.address();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(server.run(async {
        let _ = stopped.await;
    }));
    let (trusting, doubting) = (files.client(true), files.client(false));
    tokio::task::spawn_blocking(move || {
        let answer = get(address, Arc::clone(&trusting), "/v1/models").expect("an answer");
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"tiny\""), "{answer}");
        assert!(get(address, doubting, "/v1/models").is_err(), "a client that trusts nobody was served");
        // Plain HTTP on this port is no handshake, and silence is none either: both are let go.
        for sent in ["GET /health HTTP/1.1\r\nHost: x\r\n\r\n", ""] {
            let mut plain = TcpStream::connect(address).expect("a connection");
            plain.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
            plain.write_all(sent.as_bytes()).expect("sent");
            let mut answer = Vec::new();
            // A reset is as good an end as any; a timeout of the client is not.
            if let Err(error) = plain.read_to_end(&mut answer) {
                assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{sent:?}: {error}");
            }
            assert!(!answer.starts_with(b"HTTP/"), "{answer:?}");
        }
        assert!(get(address, trusting, "/health").expect("an answer").starts_with("HTTP/1.1 200"));
    })
    .await
    .expect("the client is content");
    stop.send(()).expect("the server listens");
    running.await.expect("no panic").expect("a clean end");
}

#[tokio::test]
async fn wrong_files_are_named() {
    let files = Files::new();
    let folder: &Path = files.folder.path();
    std::fs::write(folder.join("empty.pem"), "").expect("written");
    std::fs::write(folder.join("noise.pem"), [0u8, 255, 10, 13, 45, 45, 45]).expect("written");
    let other = KeyPair::generate().expect("a key");
    std::fs::write(folder.join("other.pem"), other.serialize_pem()).expect("written");
    for (certificates, key, expected) in [
        ("none.pem", "key.pem", "cannot read"),
        ("cert.pem", "none.pem", "cannot read"),
        ("empty.pem", "key.pem", "holds no certificate"),
        ("noise.pem", "key.pem", "noise.pem"),
        ("key.pem", "key.pem", "holds no certificate"),
        ("cert.pem", "cert.pem", "holds no private key"),
        ("cert.pem", "other.pem", "does not belong"),
    ] {
        let bound = Server::bind(served_model(&engine_config()), files.config(certificates, key)).await;
        let error = bound.err().unwrap_or_else(|| panic!("{certificates} and {key} were taken")).to_string();
        assert!(error.contains(expected), "{certificates} and {key}: {error}");
    }
}
