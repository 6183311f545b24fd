//! API keys, and what each key's requests may share.
//!
//! A key is compared by its BLAKE3 hash, in constant time and against every key that is allowed, so that neither its
//! letters nor its length nor its place in the list can be timed. The probes are open: whoever restarts a stuck
//! server has no key. So are the files of the console, which hold nothing private: the page asks for the key.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::console;
use crate::error::ApiError;
use crate::scope;
use crate::state::App;

pub const OPEN_ROUTES: [&str; 4] = ["/health", "/live", "/ready", "/ping"];
const DOCS: &str = "/docs";
const SALT_CONTEXT: &str = "baton prefix cache salt of an API key";

#[derive(Debug)]
struct Key {
    hash: blake3::Hash,
    tenant: Tenant,
}

/// The keys that are allowed; none allows everybody.
#[derive(Debug)]
pub struct Keys(Vec<Key>);

/// The number of a key, from 1; 0 where there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(pub u32);

/// Whose request it is: requests share cached prefixes only within a tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tenant {
    id: TenantId,
    salt: Option<Arc<str>>,
}

impl Keys {
    pub fn new(keys: &[String]) -> Self {
        let key = |(index, key): (usize, &String)| {
            let id = TenantId(index as u32 + 1);
            let salt = blake3::Hash::from(blake3::derive_key(SALT_CONTEXT, key.as_bytes()));
            let salt = Some(Arc::from(&salt.to_hex()[..32]));
            Key { hash: blake3::hash(key.as_bytes()), tenant: Tenant { id, salt } }
        };
        Self(keys.iter().enumerate().map(key).collect())
    }

    /// Several share the server.
    pub fn has_many(&self) -> bool {
        self.0.len() > 1
    }

    /// Who comes with this key; `None` for nobody.
    pub fn check(&self, presented: Option<&str>) -> Option<Tenant> {
        if self.0.is_empty() {
            return Some(Tenant::default());
        }
        let hash = blake3::hash(presented?.as_bytes());
        let mut found = None;
        for key in &self.0 {
            // Comparing hashes takes the same time wherever they differ.
            if key.hash == hash {
                found = Some(key.tenant.clone());
            }
        }
        found
    }
}

impl Tenant {
    pub fn id(&self) -> TenantId {
        self.id
    }

    /// The salt of a request's prefixes: the tenant's and, within it, what the request asks for.
    pub fn cache_salt(&self, asked: Option<&str>) -> Option<Arc<str>> {
        match (&self.salt, asked) {
            (None, asked) => asked.map(Arc::from),
            (Some(salt), None) => Some(Arc::clone(salt)),
            (Some(salt), Some(asked)) => Some(Arc::from(format!("{salt}:{asked}"))),
        }
    }
}

/// Every request passes here; handlers find the [`Tenant`] in its extensions.
pub async fn authenticate(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if OPEN_ROUTES.contains(&path) || console::is_file(path, app.config.console) {
        return next.run(request).await;
    }
    let headers = request.headers();
    let key = presented_key(headers);
    match app.keys.check(key) {
        Some(tenant) => {
            request.extensions_mut().insert(tenant.clone());
            let response = scope::within(&tenant, next.run(request)).await;
            if app.keys.has_many() && response.status().is_client_error() {
                app.refusals.pace(Some(tenant.id())).await;
            }
            response
        }
        // A browser cannot send a key with an address that is typed: its answer is the page that asks for one.
        None if path == DOCS && accepts_html(headers) => console::docs(StatusCode::UNAUTHORIZED),
        None => {
            app.refusals.pace(None).await;
            ApiError::unauthorized(key.is_some()).into_response()
        }
    }
}

/// The key that a request comes with.
pub fn presented_key(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .map(|(_, key)| key.trim());
    bearer.or_else(|| headers.get("x-api-key").and_then(|value| value.to_str().ok()))
}

fn accepts_html(headers: &HeaderMap) -> bool {
    let accepted = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    accepted.is_some_and(|accepted| accepted.contains("text/html"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_keys_everybody_may_ask() {
        let keys = Keys::new(&[]);
        assert_eq!(keys.check(None), Some(Tenant::default()));
        assert_eq!(keys.check(Some("anything")), Some(Tenant::default()));
        assert_eq!(Tenant::default().cache_salt(Some("a")).as_deref(), Some("a"));
        assert_eq!(Tenant::default().cache_salt(None), None);
    }

    #[test]
    fn every_key_is_a_tenant_of_its_own() {
        let keys = Keys::new(&["one".to_owned(), "two".to_owned()]);
        assert_eq!(keys.check(None), None);
        assert_eq!(keys.check(Some("")), None);
        assert_eq!(keys.check(Some("on")), None);
        let (one, two) = (keys.check(Some("one")).unwrap(), keys.check(Some("two")).unwrap());
        assert_ne!(one.cache_salt(None), two.cache_salt(None));
        assert_ne!(one.cache_salt(Some("a")), two.cache_salt(Some("a")));
        assert_ne!(one.cache_salt(Some("a")), one.cache_salt(None));
        assert!(!one.cache_salt(None).unwrap().contains("one"));
    }
}
