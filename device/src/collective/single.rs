//! A group of one rank.

use std::sync::{Arc, OnceLock};

use super::{Collective, CollectiveError};

/// Returns a group of one rank.
pub fn single() -> Arc<dyn Collective> {
    Arc::new(Single { aborted: OnceLock::new() })
}

struct Single {
    aborted: OnceLock<String>,
}

impl Single {
    fn check(&self) -> Result<(), CollectiveError> {
        self.aborted.get().map_or(Ok(()), |reason| Err(CollectiveError::Aborted(reason.clone())))
    }

    fn no_other(&self, rank: usize) -> Result<(), CollectiveError> {
        self.check()?;
        Err(CollectiveError::NoSuchRank { found: rank, expected: 1 })
    }
}

impl Collective for Single {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn carrier(&self) -> &'static str {
        "single"
    }

    fn split(&self, _color: usize) -> Result<Arc<dyn Collective>, CollectiveError> {
        self.check()?;
        Ok(single())
    }

    fn broadcast(&self, root: usize, _bytes: &mut Vec<u8>) -> Result<(), CollectiveError> {
        if root == 0 { self.check() } else { self.no_other(root) }
    }

    fn all_gather(&self, own: &[u8], rows: usize, widths: &[usize], all: &mut [u8]) -> Result<(), CollectiveError> {
        self.check()?;
        CollectiveError::check_gather(0, 1, (own.len(), all.len()), rows, widths)?;
        all.copy_from_slice(own);
        Ok(())
    }

    fn send(&self, to: usize, _bytes: &[u8]) -> Result<(), CollectiveError> {
        self.no_other(to)
    }

    fn receive(&self, from: usize, _bytes: &mut [u8]) -> Result<(), CollectiveError> {
        self.no_other(from)
    }

    fn abort(&self, reason: &str) {
        let _ = self.aborted.set(reason.to_string());
    }
}
