//! One connection to a Redis server, plain or under TLS, where every wait ends at a deadline.

use std::io::{self, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::RedisUrl;
use crate::resp::{Reply, read_reply, write_command};
use crate::timed::Timed;

/// Large enough for the head of a value; values themselves are read past it.
const READ_BUFFER: usize = 16 << 10;
const WRITE_BUFFER: usize = 256 << 10;

/// Whose certificates are believed.
#[derive(Clone, Debug)]
pub(super) struct Tls(Arc<ClientConfig>);

impl Tls {
    pub(super) fn new(ca_pem: Option<&[u8]>) -> Result<Self, String> {
        let mut roots = RootCertStore::empty();
        match ca_pem {
            None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
            Some(pem) => {
                for certificate in CertificateDer::pem_slice_iter(pem) {
                    let certificate = certificate.map_err(|error| format!("the CA file: {error}"))?;
                    roots.add(certificate).map_err(|error| format!("the CA file: {error}"))?;
                }
                if roots.is_empty() {
                    return Err("the CA file holds no certificate".to_owned());
                }
            }
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?;
        Ok(Self(Arc::new(config.with_root_certificates(roots).with_no_client_auth())))
    }
}

#[derive(Debug)]
enum Stream {
    Plain(Timed),
    Tls(Box<StreamOwned<ClientConnection, Timed>>),
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(buffer),
            Self::Tls(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.write(buffer),
            Self::Tls(stream) => stream.write(buffer),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.flush(),
            Self::Tls(stream) => stream.flush(),
        }
    }
}

/// Commands are written to it, sent together, and answered in order.
#[derive(Debug)]
pub(super) struct Connection {
    stream: BufReader<Stream>,
    /// Written and not yet sent.
    unsent: Vec<u8>,
}

impl Write for Connection {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        if self.unsent.len() + buffer.len() > WRITE_BUFFER {
            self.flush()?;
        }
        if buffer.len() > WRITE_BUFFER {
            self.stream.get_mut().write_all(buffer)?;
        } else {
            self.unsent.extend_from_slice(buffer);
        }
        Ok(buffer.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if !self.unsent.is_empty() {
            self.stream.get_mut().write_all(&self.unsent)?;
            self.unsent.clear();
        }
        self.stream.get_mut().flush()
    }
}

impl Connection {
    pub(super) fn open(url: &RedisUrl, tls: Option<&Tls>, deadline: Instant) -> io::Result<Self> {
        let limit = deadline.saturating_duration_since(Instant::now());
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        let mut socket = None;
        for address in (url.host.as_str(), url.port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, limit.max(Duration::from_millis(1))) {
                Ok(connected) => {
                    socket = Some(connected);
                    break;
                }
                Err(error) => last = error,
            }
        }
        let socket = socket.ok_or(last)?;
        socket.set_nodelay(true)?;
        let timed = Timed { socket, deadline };
        let stream = match tls {
            None => Stream::Plain(timed),
            Some(Tls(config)) => {
                let name = ServerName::try_from(url.host.clone())
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
                let session = ClientConnection::new(Arc::clone(config), name).map_err(io::Error::other)?;
                Stream::Tls(Box::new(StreamOwned::new(session, timed)))
            }
        };
        let mut connection =
            Self { stream: BufReader::with_capacity(READ_BUFFER, stream), unsent: Vec::new() };
        connection.log_in(url)?;
        Ok(connection)
    }

    fn log_in(&mut self, url: &RedisUrl) -> io::Result<()> {
        let mut commands: Vec<Vec<&str>> = Vec::new();
        if let Some(password) = &url.password {
            let login = url.user.as_deref().into_iter().chain([password.as_str()]);
            commands.push(["AUTH"].into_iter().chain(login).collect());
        }
        let database = url.database.to_string();
        if url.database > 0 {
            commands.push(vec!["SELECT", &database]);
        }
        commands.push(vec!["PING"]);
        for command in commands {
            write_command(self, &command)?;
            self.send()?;
            match read_reply(self.reader())? {
                Reply::Simple(_) => {}
                Reply::Error(cause) => return Err(io::Error::new(io::ErrorKind::PermissionDenied, cause)),
                _ => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
        Ok(())
    }

    /// From now on there is so much time.
    pub(super) fn set_limit(&mut self, limit: Duration) {
        let deadline = Instant::now() + limit;
        match self.stream.get_mut() {
            Stream::Plain(timed) => timed.deadline = deadline,
            Stream::Tls(stream) => stream.sock.deadline = deadline,
        }
    }

    pub(super) fn send(&mut self) -> io::Result<()> {
        self.flush()
    }

    pub(super) fn reader(&mut self) -> &mut impl io::BufRead {
        &mut self.stream
    }
}
