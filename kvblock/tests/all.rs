//! The tests of kvblock, in one program.
#![allow(clippy::unwrap_used)]

mod model;
mod outside;
mod scenarios;
