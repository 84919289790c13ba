//! Vector instructions are part of the kernels, not functions that they call.

use std::str::from_utf8;

/// A function that is compiled without an instruction set, such as a closure that the compiler keeps, calls a function for each of its
/// instructions, which is then a symbol of this program. Products of 8-bit integers were twenty times slower by it. Loads are left
/// out: with the checks of a test build they are long, and some stay functions.
#[cfg(target_arch = "x86_64")]
#[test]
fn no_kernel_calls_a_function_for_an_instruction() {
    let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let names = program.split(|byte| *byte == 0).filter_map(|name| from_utf8(name).ok());
    // Names that are not in this program as they are written here.
    let (kernel, instructions) = (format!("score_all4avx{}", 2), ["256_", "512_"].map(|width| format!("_mm{width}")));
    let is_called = |name: &str| instructions.iter().any(|it| name.contains(it)) && !name.contains("loadu");
    let symbols = names.filter(|name| name.contains(&kernel) || is_called(name));
    let (kernels, called): (Vec<&str>, Vec<&str>) = symbols.partition(|name| name.contains(&kernel));
    assert!(!kernels.is_empty(), "this program has no symbols");
    assert_eq!(called, [""; 0]);
}
