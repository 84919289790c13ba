//! Plug-ins: an example library, built outside the workspace, is loaded, selected and run; invalid ones are refused. A
//! program of its own, because a loaded plug-in stays in the registry of the process.
#![allow(clippy::unwrap_used)]

mod plugin_example;

use std::path::Path;
use std::process::Command;

use attention_kernels::{
    AttentionArgs, AttentionBatch, BlockSparse, KernelChoice, KernelError, KvCache, KvShape, Needs, Operation, Values,
    load_plugin, select, variants,
};
use device::Device;
use plugin_example::build;
use testkit::capability::Capability;

/// The `[kernels]` table.
fn table(text: &str) -> KernelChoice {
    toml::from_str(text).unwrap()
}

/// One sequence of `context` tokens with one query row, on 2 query heads and 1 KV head of 8.
fn attend(device: &dyn Device, choice: &KernelChoice, context: usize) -> Result<Vec<f32>, KernelError> {
    attend_with(device, choice, context, None, false, None)
}

/// [`attend`] with latent values of some elements, with sinks, or in sparse blocks.
fn attend_with(
    device: &dyn Device,
    choice: &KernelChoice,
    context: usize,
    latent: Option<usize>,
    sinks: bool,
    sparse: Option<BlockSparse>,
) -> Result<Vec<f32>, KernelError> {
    let needs = Needs { head_dim: 8, window: true, ..Needs::on(device) };
    let set = select(choice, &needs).unwrap();
    let shape = KvShape { num_blocks: 4, num_kv_heads: 1, block_size: 16, head_dim: 8 };
    let mut cache = KvCache::with_format(device, shape, set.format).unwrap();
    for (buffer, salt) in cache.buffers_mut().zip([1, 2]) {
        let values = buffer.host_mut::<f32>().unwrap();
        values.iter_mut().enumerate().for_each(|(i, x)| *x = ((i * 37 * salt) % 19) as f32 / 9.0 - 1.0);
    }
    if let Some(dim) = latent {
        cache.values = Values::InKeys { dim };
    }
    let sinks = sinks.then(|| device.alloc(8).unwrap());
    let (mut query, mut output) = (device.alloc(64).unwrap(), device.alloc(64).unwrap());
    query.host_mut::<f32>().unwrap().iter_mut().enumerate().for_each(|(i, x)| *x = i as f32 / 16.0 - 0.4);
    let batch = AttentionBatch {
        query_starts: vec![0, 1],
        context_lens: vec![context as u32],
        block_tables: [[3, 0, 2]].into_iter().collect(),
    };
    let args = AttentionArgs {
        query: &query,
        query_stride: 16,
        num_heads: 2,
        output: &mut output,
        lse: None,
        cache: &cache,
        batch: &batch,
        seqs: 0..1,
        scale: 0.5,
        window: Some(30),
        sparse,
        soft_cap: None,
        alibi_slopes: None,
        sinks: sinks.as_ref(),
        workspace: None,
    };
    set.attention(device, args)?;
    Ok(output.host::<f32>().unwrap().to_vec())
}

/// In blocks of 16 tokens, a query sees its own block and those before it in turns.
const SPARSE: BlockSparse = BlockSparse {
    block_size: 16,
    local_blocks: 1,
    vertical_stride: 2,
    head_sliding_step: 1,
    first_head: 1,
    first_kv_head: 0,
};

#[test]
fn a_plug_in_named_in_the_kernels_table_computes_the_same_as_built_in_variants() {
    let device = device::open("cpu", Some(2)).unwrap();
    let library = build("");
    let choice = table(&format!(
        "decode = \"example.plain\"\nprefill = \"example.plain\"\n[[plugin]]\npath = {:?}\n",
        library.display().to_string()
    ));
    for context in [1, 15, 16, 40, 48] {
        let found = attend(&*device, &choice, context).unwrap();
        let expected = attend(&*device, &table("decode = \"cpu.reference\"\n"), context).unwrap();
        assert_eq!(found.len(), expected.len(), "context {context}");
        for (a, b) in found.iter().zip(&expected) {
            assert!((a - b).abs() < 1e-5, "context {context}: {a} {b}");
        }
    }
    for head_sliding_step in [1, -1] {
        let sparse = Some(BlockSparse { head_sliding_step, first_kv_head: 1, ..SPARSE });
        let [found, expected] = [&choice, &table("decode = \"cpu.reference\"\n")]
            .map(|choice| attend_with(&*device, choice, 40, None, false, sparse).unwrap());
        let alike = found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5);
        assert!(alike && found != attend(&*device, &choice, 40).unwrap(), "{found:?} {expected:?}");
    }
    assert!(variants(Operation::Prefill).iter().any(|v| v.name == "example.plain"));
    let description = attention_kernels::describe(&choice, &Needs::on(&*device)).unwrap();
    assert!(
        description.variants.iter().any(|it| it.variant == "example.plain" && it.chosen.is_some()),
        "{description}"
    );
}

#[test]
fn a_plug_in_of_an_older_minor_version_runs_and_is_not_chosen_for_what_it_does_not_know() {
    let device = device::open("cpu", Some(1)).unwrap();
    let libraries = ["abi-1-0", "abi-1-1", ""].map(build);
    libraries.iter().for_each(|library| load_plugin(library).unwrap());
    let old = table("decode = \"example.version_1_0\"\nprefill = \"example.version_1_0\"\n");
    let new = table("decode = \"example.plain\"\nprefill = \"example.plain\"\n");
    assert_eq!(attend(&*device, &old, 40).unwrap(), attend(&*device, &new, 40).unwrap());
    let needs = Needs { head_dim: 8, sinks: true, ..Needs::on(&*device) };
    let error = select(&old, &needs).err().unwrap().to_string();
    assert!(
        error.contains("\"example.version_1_0\" cannot serve: the model has attention sinks; use one of: "),
        "{error}"
    );
    assert_eq!(select(&new, &needs).unwrap().decode.name, "example.plain");
    let error = select(&new, &Needs { latent: Some(48), ..needs.clone() }).err().unwrap().to_string();
    assert!(error.contains("cannot serve: the model has a latent cache"), "{error}");
    let middle = table("decode = \"example.version_1_1\"\nprefill = \"example.version_1_1\"\n");
    assert_eq!(attend(&*device, &middle, 40).unwrap(), attend(&*device, &new, 40).unwrap());
    assert_eq!(select(&middle, &needs).unwrap().decode.name, "example.version_1_1");
    let sparse = Needs { block_sparse: Some(32), ..needs.clone() };
    for choice in [&old, &middle] {
        let error = select(choice, &Needs { sinks: false, ..sparse.clone() }).err().unwrap().to_string();
        assert!(error.contains("cannot serve: the model has block-sparse attention; use one of: "), "{error}");
    }
    assert_eq!(select(&new, &sparse).unwrap().decode.name, "example.plain");
    // Nor is it called by mistake.
    let error = attend_with(&*device, &middle, 40, None, false, Some(SPARSE)).unwrap_err().to_string();
    let refused = "example.version_1_1 was called with block-sparse attention, which it does not support";
    assert!(error.starts_with(refused), "{error}");
    let error = attend_with(&*device, &old, 40, None, true, None).unwrap_err().to_string();
    assert!(
        error.starts_with("example.version_1_0 was called with attention sinks, which it does not support"),
        "{error}"
    );
    let error = attend_with(&*device, &new, 40, Some(4), false, None).unwrap_err().to_string();
    assert!(error.starts_with("example.plain was called with a latent cache, which it does not support"), "{error}");
    assert!(attend_with(&*device, &new, 40, None, true, None).is_ok());
    assert!(!select(&KernelChoice::default(), &needs).unwrap().decode.name.starts_with("example"));
}

#[test]
fn an_error_or_panic_in_a_plug_in_is_an_error_of_its_variant() {
    let device = device::open("cpu", Some(1)).unwrap();
    load_plugin(&build("")).unwrap();
    load_plugin(&build("")).unwrap();
    let message = |name: &str| {
        let choice = table(&format!("decode = {name:?}\n"));
        attend(&*device, &choice, 5).unwrap_err().to_string()
    };
    assert_eq!(message("example.fails"), "example.fails failed with code 1: this variant always fails");
    assert_eq!(message("example.panics"), "example.panics failed with code 2: panic: this variant always panics");
}

#[test]
fn a_library_that_is_not_a_plug_in_of_this_version_is_refused_in_one_line() {
    let message = |path: &Path| {
        let message = load_plugin(path).unwrap_err().to_string();
        assert!(message.starts_with("[[kernels.plugin]] path = ") && !message.contains('\n'), "{message}");
        message
    };
    let found = message(&build("other-abi"));
    assert!(found.ends_with("found kernel ABI 2, expected 1; build it with the header of this version of Quire"));
    let found = message(&build("no-symbol"));
    assert!(found.contains("exports no quire_kernels_plugin"), "{found}");
    let found = message(&build("name-taken"));
    assert!(found.contains("its decode variant \"cpu.reference\" has the name of another"), "{found}");
    let found = message(Path::new("no/such/library.so"));
    assert!(found.contains("No such file") && found.ends_with("name an existing shared library"), "{found}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("no-library.so");
    std::fs::write(&file, "text").unwrap();
    let found = message(&file);
    assert!(found.ends_with("expected a shared library for this machine"), "{found}");
}

/// The C header and the Rust module describe the same structures: sizes and the offsets of last fields agree.
#[test]
fn the_c_header_and_the_rust_module_have_the_same_layout() {
    use attention_kernels::plugin_abi as abi;
    use std::mem::offset_of;
    let Some(compiler) = ["cc", "gcc", "clang"]
        .into_iter()
        .find(|name| Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success()))
    else {
        testkit::not_run::report(Capability::Cc, "found none of cc, gcc and clang");
        return;
    };
    let include = testkit::workspace::root().join("attention-kernels/include");
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("sizes.c");
    let expected = [
        ("quire_host", "parallel_for", size_of::<abi::Host>(), offset_of!(abi::Host, parallel_for)),
        ("quire_cache", "token_stride", size_of::<abi::Cache>(), offset_of!(abi::Cache, token_stride)),
        ("quire_attention", "sinks", size_of::<abi::Attention>(), offset_of!(abi::Attention, sinks)),
        ("quire_attention", "first_kv_head", size_of::<abi::Attention>(), offset_of!(abi::Attention, first_kv_head)),
        ("quire_attention", "reserved", size_of::<abi::Attention>(), offset_of!(abi::Attention, reserved)),
        ("quire_cache_write", "cache", size_of::<abi::CacheWrite>(), offset_of!(abi::CacheWrite, cache)),
        ("quire_block_copy", "cache", size_of::<abi::BlockCopy>(), offset_of!(abi::BlockCopy, cache)),
        ("quire_variant", "run", size_of::<abi::Variant>(), offset_of!(abi::Variant, run)),
        ("quire_plugin", "last_error", size_of::<abi::Plugin>(), offset_of!(abi::Plugin, last_error)),
    ];
    let mut text = "#include <stdio.h>\n#include \"quire_kernels.h\"\nint main(void) {\n".to_string();
    for (name, field, ..) in expected {
        text += &format!("printf(\"%zu %zu\\n\", sizeof({name}), offsetof({name}, {field}));\n");
    }
    text += "printf(\"%u.%u %llu\\n\", QUIRE_KERNELS_ABI, QUIRE_KERNELS_ABI_MINOR, (unsigned long long)QUIRE_KERNELS_MAGIC);\nreturn 0; }\n";
    std::fs::write(&source, text).unwrap();
    let program = source.with_extension("out");
    let flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-I"];
    let status = Command::new(compiler).args(flags).arg(include).arg("-o").arg(&program).arg(&source).status().unwrap();
    assert!(status.success(), "the header does not compile as C");
    let said = String::from_utf8(Command::new(&program).output().unwrap().stdout).unwrap();
    let mut lines: Vec<String> = expected.iter().map(|(_, _, size, offset)| format!("{size} {offset}")).collect();
    lines.push(format!("{}.{} {}", abi::ABI, abi::MINOR, abi::MAGIC));
    assert_eq!(said.lines().collect::<Vec<_>>(), lines);
}
