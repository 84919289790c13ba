//! All variants of an operation, those of the tree and those of plug-ins.

use crate::plugin;
use crate::variant::{Operation, Variant};

/// Every variant of an operation, registered or of a plug-in, in the order in which `auto` takes them: proven ones first, best rank first,
/// then by name.
pub fn variants(operation: Operation) -> Vec<&'static Variant> {
    let all = inventory::iter::<Variant>.into_iter().chain(plugin::loaded());
    let mut found: Vec<&'static Variant> = all.filter(|v| v.operation == operation).collect();
    found.sort_by_key(|v| (!v.capabilities.proven, std::cmp::Reverse(v.capabilities.rank), v.name));
    found
}
