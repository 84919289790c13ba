//! The list of registers and spills that a build writes, and that `device::Resources` reads.

use device::{Options, Resources};
use testkit::kernels::manifest::Limits;
use testkit::kernels::resources::{kernels, lines};

const LOG: &str = "\
ptxas info    : Compiling entry function 'scale' for 'sm_80'
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 528 bytes smem
ptxas info    : Compiling entry function 'scale' for 'sm_90a'
ptxas info    : Used 32 registers, used 0 barriers
";

#[test]
fn resources_are_those_that_the_build_has_listed_for_an_architecture() {
    let folder = tempfile::tempdir().unwrap();
    let counting = folder.path().join("counts");
    std::fs::create_dir(&counting).unwrap();
    let options = Options { kernels: Some(counting.clone()), ..Options::default() };
    assert!(Resources::find(&options, "sm_80").unwrap().is_empty(), "nothing was compiled");
    let file = folder.path().join("demo.resources.tsv");
    std::fs::write(&file, lines(&kernels(LOG, "a", Limits { spill_bytes: 0, registers: 255, entry_registers: None })))
        .unwrap();
    // Counting libraries live in a subfolder.
    let of = |architecture| Resources::find(&options, architecture).unwrap().get("scale").copied();
    let expected = Resources { registers: 40, shared_bytes: 528, stack_bytes: 16, spill_bytes: 20 };
    assert_eq!(of("sm_80"), Some(expected));
    assert_eq!(of("sm_90a"), Some(Resources { registers: 32, ..Resources::default() }));
    assert_eq!(of("sm_89"), None);
    std::fs::write(&file, "scale\tsm_80\t40\n").unwrap();
    let problem = Resources::find(&options, "sm_80").unwrap_err().to_string();
    assert!(problem.contains("demo.resources.tsv: found line 1") && !problem.contains('\n'), "{problem}");
}
