//! The tests of the store in one executable.
#![allow(clippy::unwrap_used)]

mod common;
mod crashes;
mod faults;
mod folder;
mod model;
mod room;
