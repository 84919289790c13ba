//! Kernel variants from shared libraries: loads and checks them, and adds them to the registry.
//!
//! A library is opened once and never closed, because its variants live as long as the process. Everything it states is
//! checked before its first variant is added, so a library is added completely or not at all. Calls are checked as for
//! other variants, but what a variant does with its arguments is not: a plug-in is trusted code.

pub mod abi;
mod call;

pub use call::LoadedKernel;

use std::ffi::{CStr, c_char};
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};

use libloading::Library;
use simd::Isa;

use crate::format::{Dtype, KvDtype, Layout};
use crate::variant::{Capabilities, Kernel, Operation, Sizes, Variant};

/// A plug-in that cannot be loaded. None of its variants was added.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("[[kernels.plugin]] path = {path:?}: {what}")]
pub struct PluginError {
    /// Path as given.
    pub path: PathBuf,
    /// One line: what is wrong and what to do.
    pub what: String,
}

/// Loaded libraries and their variants.
static LOADED: RwLock<Vec<(PathBuf, Vec<&'static Variant>)>> = RwLock::new(Vec::new());

/// Returns the variants of all loaded libraries.
pub(crate) fn loaded() -> Vec<&'static Variant> {
    let loaded = LOADED.read().unwrap_or_else(PoisonError::into_inner);
    loaded.iter().flat_map(|(_, variants)| variants).copied().collect()
}

/// Loads a library and adds its variants to the registry. Does nothing if it is loaded already.
///
/// # Errors
/// The file does not exist, is not a plug-in or has another ABI version, or a variant is invalid.
pub fn load(path: &Path) -> Result<(), PluginError> {
    let error = |what: String| PluginError { path: path.to_owned(), what };
    let place = path.canonicalize().map_err(|e| error(format!("{e}; name an existing shared library")))?;
    let mut loaded = LOADED.write().unwrap_or_else(PoisonError::into_inner);
    if loaded.iter().any(|(other, _)| *other == place) {
        return Ok(());
    }
    // SAFETY: a plug-in is trusted code, named by the user; opening it runs its initialisers.
    let library = unsafe { Library::new(&place) }.map_err(|e| error(one_line(&e)))?;
    let mut taken = read(&library).map_err(error)?;
    let others: Vec<&Variant> = loaded.iter().flat_map(|(_, variants)| variants).copied().collect();
    let in_tree: Vec<&Variant> = inventory::iter::<Variant>.into_iter().collect();
    for (at, variant) in taken.iter().enumerate() {
        let same = |other: &&Variant| other.name == variant.name && other.operation == variant.operation;
        if others.iter().chain(&in_tree).copied().chain(&taken[..at]).any(|other| same(&other)) {
            return Err(error(format!(
                "its {} variant {:?} has the name of another; rename it",
                variant.operation, variant.name
            )));
        }
    }
    std::mem::forget(library);
    let leaked = taken.drain(..).map(|variant| &*Box::leak(Box::new(variant))).collect();
    loaded.push((place, leaked));
    Ok(())
}

fn one_line(error: &libloading::Error) -> String {
    let text = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    format!("{}; expected a shared library for this machine", text.replace('\n', " "))
}

/// Reads the variants that a library describes.
fn read(library: &Library) -> Result<Vec<Variant>, String> {
    // SAFETY: the header declares the symbol as this function.
    let entry = unsafe { library.get::<abi::Entry>(abi::SYMBOL.as_bytes()) }
        .map_err(|_| format!("it exports no {}; export it as include/quire_kernels.h declares it", abi::SYMBOL))?;
    // SAFETY: as above; it has no parameters.
    let plugin = unsafe { entry() };
    if plugin.is_null() {
        return Err(format!("{} returned null", abi::SYMBOL));
    }
    // The first three fields are the same in every ABI version, so they are read separately.
    // SAFETY: the pointer is not null, and every ABI version begins with these fields.
    let (magic, version, size) = unsafe { ((*plugin).magic, (*plugin).abi, (*plugin).size) };
    if magic != abi::MAGIC {
        return Err(format!("found magic number {magic:#x}, expected {:#x} (QUIREKRN)", abi::MAGIC));
    }
    if version != abi::ABI {
        return Err(format!(
            "found kernel ABI {version}, expected {}; build it with the header of this version of Quire",
            abi::ABI
        ));
    }
    at_least("its description", size, size_of::<abi::Plugin>())?;
    // SAFETY: the version is ours and the size sufficient, so all fields exist. The header requires it to live as long as
    // the process.
    let plugin: &'static abi::Plugin = unsafe { &*plugin };
    if plugin.variants.is_null() || plugin.num_variants == 0 || plugin.num_variants > 4096 {
        return Err(format!("it has {} variants, expected 1 to 4096", plugin.num_variants));
    }
    (0..plugin.num_variants as usize)
        .map(|at| {
            // SAFETY: the array has `num_variants` entries.
            let variant = unsafe { *plugin.variants.add(at) };
            if variant.is_null() {
                return Err(format!("variant {at} is null"));
            }
            // SAFETY: the pointer is not null, and a description begins with its size.
            let size = unsafe { (*variant).size };
            at_least(&format!("the description of variant {at}"), size, size_of::<abi::Variant>())?;
            // SAFETY: the pointer is not null, the size sufficient, and the header requires it to live as long as the
            // process.
            describe(unsafe { &*variant }, plugin).map_err(|what| format!("variant {at}: {what}"))
        })
        .collect()
}

fn at_least(what: &str, found: u32, expected: usize) -> Result<(), String> {
    if (found as usize) < expected {
        return Err(format!("{what} has {found} bytes, expected at least {expected}: set the field `size`"));
    }
    Ok(())
}

/// Converts a variant of a plug-in.
fn describe(variant: &abi::Variant, plugin: &'static abi::Plugin) -> Result<Variant, String> {
    let name = text("name", variant.name)?;
    let in_variant = |what: String| format!("({name}) {what}");
    if !name.contains('.') {
        return Err(in_variant("found a name without a dot, expected owner.kind".into()));
    }
    let operation = match variant.operation {
        abi::DECODE => Operation::Decode,
        abi::PREFILL => Operation::Prefill,
        abi::CACHE_WRITE => Operation::CacheWrite,
        abi::BLOCK_COPY => Operation::BlockCopy,
        other => return Err(in_variant(format!("found operation {other}, expected 0 to 3"))),
    };
    let device = text("device", variant.device).map_err(&in_variant)?;
    if device != "cpu" {
        return Err(in_variant(format!(
            "found device {device:?}, expected \"cpu\": plug-ins for other devices are not supported yet"
        )));
    }
    let sizes = |what: &str, max: u32, step: u32| match (max as usize, step as usize) {
        (max, step) if step > 0 && max >= step => Ok(Sizes::UpTo { max, step }),
        _ => Err(in_variant(format!("found {what} sizes up to {max} in steps of {step}, expected at least one"))),
    };
    let has = |feature| variant.features & feature != 0;
    let row_invariant =
        if variant.row_invariant.is_null() { None } else { Some(text("row_invariant", variant.row_invariant)?) };
    let capabilities = Capabilities {
        devices: &["cpu"],
        isa: Isa::Portable,
        dtypes: bits("dtypes", variant.dtypes, &Dtype::ALL).map_err(&in_variant)?,
        kv_dtypes: bits("kv_dtypes", variant.kv_dtypes, &KvDtype::COMMON).map_err(&in_variant)?,
        layouts: bits("layouts", variant.layouts, &Layout::COMMON).map_err(&in_variant)?,
        head_sizes: sizes("head", variant.max_head_dim, variant.head_dim_step)?,
        block_sizes: sizes("block", variant.max_block_size, variant.block_size_step)?,
        max_query_len: usize::try_from(variant.max_query_len).unwrap_or(usize::MAX),
        window: has(abi::WINDOW),
        block_sparse: has(abi::BLOCK_SPARSE),
        soft_cap: has(abi::SOFT_CAP),
        alibi: has(abi::ALIBI),
        sinks: has(abi::SINKS),
        lse: has(abi::LSE),
        row_invariant,
        rank: variant.rank,
        ..Capabilities::NONE
    };
    let loaded = LoadedKernel { name, run: variant.run, last_error: plugin.last_error };
    Ok(Variant { name, operation, capabilities, kernel: Kernel::Loaded(loaded) })
}

/// Reads a string that lives as long as the process.
fn text(what: &str, at: *const c_char) -> Result<&'static str, String> {
    if at.is_null() {
        return Err(format!("its {what} is null"));
    }
    // SAFETY: the header requires that strings end with a 0 and live as long as the process.
    let text = unsafe { CStr::from_ptr(at) }.to_str().map_err(|_| format!("its {what} is not UTF-8"))?;
    if text.is_empty() || text.contains(char::is_control) { Err(format!("its {what} is {text:?}")) } else { Ok(text) }
}

/// Returns the values whose bits are set; `all` is in the order of the header's numbers.
fn bits<T: Copy>(what: &str, found: u32, all: &[T]) -> Result<&'static [T], String> {
    if found == 0 || found >> all.len() != 0 {
        return Err(format!("found {what} {found:#b}, expected some of the {} lowest bits", all.len()));
    }
    let set = all.iter().enumerate().filter(|(bit, _)| found >> bit & 1 == 1).map(|(_, value)| *value);
    Ok(Vec::leak(set.collect()))
}
