//! The step under way, as another thread may see it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::worker::StepInput;

/// The plan of the step under way, if one is.
pub(crate) type StepUnderWay = Arc<Mutex<Option<Arc<StepInput>>>>;

/// Plain values stay right even if a thread died while it held them.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
