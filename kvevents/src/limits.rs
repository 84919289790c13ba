//! Deadlines and sizes that bound what peers cost.

use std::time::Duration;

/// Deadlines and sizes that bound what peers of the sockets cost. The defaults are meant for every server; tests have shorter ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Time for a handshake. Also the time after which a subscriber that subscribes to nothing we publish is disconnected, and after
    /// which an idle replay connection is when all places are taken.
    pub patience: Duration,
    /// Time after which a peer that reads nothing is disconnected.
    pub stall: Duration,
    /// Greatest number of connections of a socket. Further ones are closed.
    pub peers: usize,
    /// Greatest size in bytes of the messages kept for all subscribers and for replay. The last message is kept whatever its size.
    pub bytes: usize,
    /// Size in bytes of the send buffer of a connection; `None`: the system chooses.
    pub send_buffer: Option<usize>,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            patience: Duration::from_secs(10),
            stall: Duration::from_secs(60),
            peers: 256,
            bytes: 64 << 20,
            send_buffer: None,
        }
    }
}
