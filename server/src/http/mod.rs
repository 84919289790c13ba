//! HTTP: connections, errors, who may use the server, and what a call holds until it is answered. Nothing here knows what a
//! request asks for.
//!
//! | file | what it owns |
//! |---|---|
//! | `listener` | ports and sockets, with or without TLS |
//! | `connection`, `refusal` | connections that drop clients which do not read; errors for bytes that are not a request |
//! | `waiting` | the limit of open connections, and which one a new one replaces |
//! | `keys`, `origin`, `cors`, `head` | who may use the server: API keys, web sites; the size of a head |
//! | `call` | the id of a call, and the resources that it holds until its response has been sent |
//! | `budget`, `parse_pool` | the memory of all requests in flight; the threads that read bodies |
//! | `multipart` | forms with files |
//! | `error`, `json`, `sse` | responses: errors, JSON, server-sent events |

mod budget;
pub mod call;
mod connection;
pub mod cors;
mod error;
pub mod head;
pub mod json;
pub mod keys;
mod listener;
pub mod multipart;
pub mod origin;
mod parse_pool;
pub mod refusal;
pub mod sse;
mod waiting;

pub use budget::{Budget, Reserved, largest as largest_part};
pub use connection::Connection;
pub use error::{ApiError, ErrorForm, excerpt, method_not_allowed, not_found, reshape};
pub use keys::Client;
pub use listener::{Accepted, ClientCertificates, Listener, Stream, Tls};
pub use parse_pool::{INLINE, LANES, ParsePool};
pub use waiting::Waiting;
