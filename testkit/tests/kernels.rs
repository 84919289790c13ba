//! Manifests of kernels, the compiler's cache, and the resources of kernels.

use std::path::Path;

use testkit::kernels::manifest::{Limits, Manifest};
use testkit::kernels::resources::{Needs, keeps_pipelines, kernels, lines, table, within_limits};

#[test]
fn a_mistake_in_a_manifest_is_named_with_its_line() {
    let problem = |text: &str| Manifest::parse(text, Path::new("csrc"), "demo").unwrap_err();
    let found = problem("include = []\n\n[[source]]\nfile = \"a.cu\"\nmax_spil_bytes = 3\n");
    assert!(found.starts_with("csrc/kernels.toml:5: unknown field `max_spil_bytes`"), "{found}");
    let found = problem("[[source]]\nshards = []\n");
    assert!(found.starts_with("csrc/kernels.toml:1: missing field `file`"), "{found}");
    let found = problem("max_registers = -1\n");
    assert!(found.starts_with("csrc/kernels.toml:1: invalid value"), "{found}");
    assert!(!found.contains('\n'), "{found}");
}

#[test]
fn a_source_that_does_not_exist_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kernels.toml");
    std::fs::write(&file, "[[source]]\nfile = \"gone.cu\"\n").unwrap();
    let found = Manifest::load(&file, "demo").unwrap_err();
    assert!(found.contains("found no source") && found.ends_with("gone.cu; correct its name"), "{found}");
}

fn limits(spill_bytes: u32, registers: u32) -> Limits {
    Limits { spill_bytes, registers, entry_registers: None }
}

const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'scale' for 'sm_80'
ptxas info    : Function properties for scale
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes stack frame, 528 bytes smem, 380 bytes cmem[0]
ptxas info    : Compiling entry function 'scale' for 'sm_100'
ptxas info    : Function properties for scale
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
";

#[test]
fn needs_are_read_for_each_architecture_and_held_to_the_limits() {
    let found = kernels(LOG, "a", limits(19, 39));
    let expected = Needs { registers: 40, shared_bytes: 528, stack_bytes: 16, spill_bytes: 20 };
    assert_eq!(found[0].needs["sm_80"], expected);
    assert_eq!(found[0].needs["sm_100"], Needs { registers: 32, ..Needs::default() });
    let problem = within_limits(&found).unwrap_err();
    assert_eq!(problem.lines().count(), 2, "{problem}");
    assert!(
        problem.contains("scale (a): found 20 bytes of spilled registers on sm_80, expected at most 19"),
        "{problem}"
    );
    assert!(problem.contains("scale (a): found 40 registers on sm_80, expected at most 39"), "{problem}");
    assert_eq!(within_limits(&kernels(LOG, "a", limits(20, 40))), Ok(()));
    // 40 registers on sm_80 and 32 on sm_100.
    let exact = Limits { entry_registers: Some(40), ..limits(20, 40) };
    let problem = within_limits(&kernels(LOG, "a", exact)).unwrap_err();
    assert!(
        problem.starts_with("scale (a): found 32 registers at entry on sm_100, expected exactly 40")
            && !problem.contains('\n'),
        "{problem}"
    );
}

/// As ptxas 13.0 writes them, before the resources of the kernels.
const LOST: [&str; 3] = [
    "(C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.",
    "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ill formed pipeline stage in the function 'scale'",
    "(C7517) warpgroup.wait is injected in around line 129 by compiler to allow use of registers defined by GMMA in function 'scale'",
];

#[test]
fn a_pipeline_that_ptxas_gives_up_fails_the_build() {
    assert_eq!(keeps_pipelines(LOG, "a"), Ok(()));
    for message in LOST {
        let problem = keeps_pipelines(&format!("ptxas info    : {message}\n{LOG}"), "a").unwrap_err();
        assert_eq!(problem, format!("a: ptxas gives up a pipeline: {message}; mend the source"));
    }
    let all = LOST.map(|message| format!("ptxas info    : {message}\n")).concat() + LOG;
    assert_eq!(keeps_pipelines(&all, "a").unwrap_err().lines().count(), 3);
}

#[test]
fn the_table_has_a_line_for_each_kernel() {
    let table = table(&kernels(LOG, "a", limits(0, 255)));
    let line = table.lines().nth(1).unwrap();
    assert_eq!(line.split_whitespace().collect::<Vec<_>>().join(" "), "scale 528 16 20 sm_80 40, sm_100 32");
}

#[test]
fn the_list_has_a_line_for_each_kernel_and_architecture() {
    let lines = lines(&kernels(LOG, "a", limits(0, 255)));
    assert_eq!(lines, "scale\tsm_100\t32\t0\t0\t0\nscale\tsm_80\t40\t528\t16\t20\n");
}

#[cfg(unix)]
mod cache {
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::time::Duration;

    use testkit::kernels::compile::Compile;

    /// A compiler that copies its source and counts its runs in `runs`. `after` runs after the copy.
    fn copying_compiler(folder: &Path, after: &str) -> Compile {
        let at = |name: &str| folder.join(name);
        let script = format!(
            "#!/bin/sh\ncp \"$6\" \"$5\" && echo \"out: $6\" > \"$3\" && echo run >> '{}'\n{after}\n",
            at("runs").display()
        );
        std::fs::write(at("compiler"), script).unwrap();
        std::fs::set_permissions(at("compiler"), std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::write(at("a.cu"), "first").unwrap();
        Compile {
            action: "compile",
            program: at("compiler"),
            version: "1".into(),
            args: Vec::new(),
            inputs: vec![at("a.cu")],
            output: at("a.o"),
        }
    }

    #[test]
    fn an_unchanged_source_is_not_compiled_again() {
        let folder = tempfile::tempdir().unwrap();
        let compile = copying_compiler(folder.path(), "");
        // The clock of the file system is coarser than that of the system.
        std::thread::sleep(Duration::from_millis(30));
        let runs = || std::fs::read_to_string(folder.path().join("runs")).unwrap().lines().count();
        compile.run().unwrap();
        compile.run().unwrap();
        assert_eq!(runs(), 1);
        std::fs::write(&compile.inputs[0], "second").unwrap();
        std::thread::sleep(Duration::from_millis(30));
        compile.run().unwrap();
        assert_eq!((runs(), std::fs::read_to_string(&compile.output).unwrap()), (2, "second".into()));
        Compile { version: "2".into(), ..compile.clone() }.run().unwrap();
        Compile { args: Vec::new(), version: "2".into(), ..compile }.run().unwrap();
        assert_eq!(runs(), 3, "another compiler compiles again, once");
    }

    #[test]
    fn a_source_written_while_it_is_compiled_is_compiled_again() {
        let folder = tempfile::tempdir().unwrap();
        let compile = copying_compiler(folder.path(), "sleep 0.05; printf second > \"$6\"");
        compile.run().unwrap();
        assert_eq!(std::fs::read_to_string(&compile.output).unwrap(), "first", "the edit comes too late");
        compile.run().unwrap();
        assert_eq!(std::fs::read_to_string(&compile.output).unwrap(), "second");
    }
}
