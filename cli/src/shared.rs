//! The flags that several commands share.

use crate::args::EngineArgs;
use crate::profile::ProfileArgs;
use crate::replay::RecordArgs;

/// The shared flags of a command, where it has them.
#[derive(Clone, Copy, Default)]
pub struct Shared<'a> {
    pub engine: Option<&'a EngineArgs>,
    pub record: Option<&'a RecordArgs>,
    pub profile: Option<&'a ProfileArgs>,
}
