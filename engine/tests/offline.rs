//! The library's front door, as it stands in `examples/`.

#[path = "../examples/offline.rs"]
mod example;

#[test]
fn the_offline_example_runs() -> Result<(), Box<dyn std::error::Error>> {
    example::main()
}
