//! A seeded simulator of everything between the clients and the device (development only).
//!
//! One seed makes a configuration, a load and a sequence of mishaps. The real scheduler plans it; a [`FakeDevice`]
//! executes the Plans on blocks that remember *which prefix* each slot was written for, so that any mistake in
//! sharing, copying, swapping or evicting is seen at the step that reads the wrong slot; a [`FakeModel`] makes the
//! tokens a function of the prefix alone, so that every request can be compared with what it gives when nobody else
//! is there. Nothing here knows a real tensor, a clock or a thread.
#![forbid(unsafe_code)]

mod client;
mod device;
mod fake_model;
mod guesses;
mod load;
mod oracle;
mod run;
mod store;

pub use baton_core::random::Random as Rng;
pub use device::FakeDevice;
pub use fake_model::{FakeModel, Naming, PrefixHash};
pub use load::{Scenario, random_request, random_scenario};
pub use oracle::{Expected, ExpectedSequence, expected};
pub use run::{Report, simulate, simulate_scenario};
