//! All variants, those of this crate and those of plug-ins.

use device::Device;

use crate::format::KvDtype;
use crate::plugin;
use crate::variant::{Operation, Variant};

/// Returns the variants of an operation in the order in which `auto` tries them: proven ones first, then by rank from the
/// highest, then by name.
pub fn variants(operation: Operation) -> Vec<&'static Variant> {
    let all = inventory::iter::<Variant>.into_iter().chain(plugin::loaded());
    let mut found: Vec<&'static Variant> = all.filter(|v| v.operation == operation).collect();
    found.sort_by_key(|v| (!v.capabilities.proven, std::cmp::Reverse(v.capabilities.rank), v.name));
    found
}

/// Whether a device has kernels for caches of this type: a variant of each operation on caches.
///
/// ```
/// use attention_kernels::{KvDtype, serves_cache};
/// let cpu = device::open("cpu", Some(1))?;
/// assert!(KvDtype::ALL.into_iter().all(|kv_dtype| serves_cache(&*cpu, kv_dtype)));
/// # Ok::<(), device::DeviceError>(())
/// ```
pub fn serves_cache(device: &dyn Device, kv_dtype: KvDtype) -> bool {
    Operation::ON_CACHES.into_iter().all(|operation| {
        let serves =
            |v: &&Variant| v.capabilities.runs_on(device.name()) && v.capabilities.kv_dtypes.contains(&kv_dtype);
        variants(operation).iter().any(serves)
    })
}
