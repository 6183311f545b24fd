//! What belongs to the request that a task works on: whose it is, and the memory that it was charged for.

use std::sync::{Arc, Mutex, PoisonError};

use crate::auth::{Tenant, TenantId};
use crate::budget::Charge;

tokio::task_local! {
    static SCOPE: Scope;
}

struct Scope {
    tenant: TenantId,
    charge: Mutex<Option<Arc<Charge>>>,
}

/// Runs the handler of a tenant's request.
pub async fn within<F: Future>(tenant: &Tenant, handler: F) -> F::Output {
    SCOPE.scope(Scope { tenant: tenant.id(), charge: Mutex::default() }, handler).await
}

/// Whose request this is.
pub fn tenant() -> TenantId {
    SCOPE.try_with(|scope| scope.tenant).unwrap_or_default()
}

/// Keeps the charge for the body until [`release`], or until the request has ended.
pub fn hold(charge: Charge) {
    let _ = SCOPE.try_with(|scope| *lock(&scope.charge) = Some(Arc::new(charge)));
}

/// The charge, for work that may go on when the client has gone.
pub fn charge() -> Option<Arc<Charge>> {
    SCOPE.try_with(|scope| lock(&scope.charge).clone()).ok().flatten()
}

/// What was read has become tokens.
pub fn release() {
    let _ = SCOPE.try_with(|scope| lock(&scope.charge).take());
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
