//! The binary `quire`; everything is in the library of this crate.

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main(std::env::args_os())
}
