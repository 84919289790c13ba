//! A plug-in's variant, named in TOML, passes the same tests as built-in ones. A loaded plug-in stays in the registry, so
//! this runs in another process.

use std::process::Command;

use attention_kernels::{KernelChoice, Needs, select};
use testkit::capability::Capability;
use testkit::{not_run, workspace};

use super::attention;
use crate::plugin_example;
use crate::support::wanted;

/// Environment variable with the path of the `[kernels]` table, for the process that loads the plug-in.
const CHOICE: &str = "CONFORMANCE_OF_PLUGIN";
const NAME: &str = "example.plain";

#[test]
fn a_plug_in_named_in_toml_passes_every_conformance_test() {
    if workspace::bundle().is_some() {
        return not_run::report(Capability::Checkout, "a bundle has no plug-in");
    }
    if !wanted("cpu") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kernels.toml");
    let library = plugin_example::build("").display().to_string();
    std::fs::write(&file, format!("decode = {NAME:?}\nprefill = {NAME:?}\n[[plugin]]\npath = {library:?}\n")).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["conformance::plugins::the_table_of_a_plug_in", "--exact", "--ignored", "--nocapture"])
        .env(CHOICE, &file);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    for operation in ["decode  ", "prefill "] {
        assert!(said.contains(&format!("cpu      {operation} {NAME}")), "{said}");
    }
    print!("{said}");
}

#[test]
#[ignore = "only as a program of its own, with the table of the test above"]
fn the_table_of_a_plug_in() {
    let file = std::env::var_os(CHOICE).unwrap();
    let choice: KernelChoice = toml::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let set = select(&choice, &Needs { window: true, row_invariant: true, ..Needs::default() }).unwrap();
    assert_eq!([set.decode.name, set.prefill.name], [NAME; 2]);
    attention::every_claim_holds(|variant| variant.name == NAME);
    attention::families_agree(|variant| variant.name == NAME);
}
