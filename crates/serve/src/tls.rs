//! HTTPS: the operator's certificate and key become what connections are wrapped in.
//!
//! Both are PEM files, read once at the start: a renewed certificate needs a restart, which loses no request (see the
//! drain in `server`). Only HTTP/1.1 is spoken inside. Clients are known by API keys, not by certificates.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{Error as PemError, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{Error as RustlsError, InconsistentKeys, ServerConfig};

/// Where certificate and key lie.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The server's certificate, then those that lead to one that clients trust.
    pub certificates: PathBuf,
    pub key: PathBuf,
}

#[derive(Debug, Error)]
pub enum TlsError {
    #[error("cannot read {path}: {cause}")]
    Read { path: PathBuf, cause: PemError },
    #[error("{0} holds no certificate: it must be a PEM file with BEGIN CERTIFICATE")]
    NoCertificate(PathBuf),
    #[error("{0} holds no private key: it must be a PEM file with BEGIN PRIVATE KEY, not encrypted")]
    NoKey(PathBuf),
    #[error("the key in {key} does not belong to the certificate in {certificates}")]
    Mismatch { certificates: PathBuf, key: PathBuf },
    #[error("certificate and key cannot be used: {0}")]
    Unusable(RustlsError),
}

/// Reads both files; what is wrong with them is said before the server listens.
pub fn read(files: &TlsFiles) -> Result<Arc<ServerConfig>, TlsError> {
    let unreadable = |path: &Path| {
        let path = path.to_owned();
        move |cause| TlsError::Read { path, cause }
    };
    let certificates = CertificateDer::pem_file_iter(&files.certificates)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(unreadable(&files.certificates))?;
    if certificates.is_empty() {
        return Err(TlsError::NoCertificate(files.certificates.clone()));
    }
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|cause| match cause {
        PemError::NoItemsFound => TlsError::NoKey(files.key.clone()),
        cause => unreadable(&files.key)(cause),
    })?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|config| config.with_no_client_auth().with_single_cert(certificates, key));
    let mut config = config.map_err(|error| match error {
        RustlsError::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            TlsError::Mismatch { certificates: files.certificates.clone(), key: files.key.clone() }
        }
        error => TlsError::Unusable(error),
    })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
