//! Messages of rank 0 of any length, as broadcasts that every carrier accepts.
//!
//! A message begins with its length, [`HEAD`] bytes. The first broadcast has this and as much as fits, the further ones the rest.

use collective::{Collective, CollectiveError};

/// Bytes of the length.
pub(super) const HEAD: usize = size_of::<u64>();
/// Most bytes of a broadcast: small beside what carriers accept, so that a long message takes little memory twice.
pub(super) const PIECE: usize = 4 << 20;

/// Broadcasts a message, whose length is filled in.
pub(super) fn send(world: &dyn Collective, message: &mut Vec<u8>) -> Result<(), CollectiveError> {
    let length = (message.len() as u64).to_le_bytes();
    message[..HEAD].copy_from_slice(&length);
    if message.len() <= PIECE {
        return world.broadcast(0, message);
    }
    let mut piece = Vec::with_capacity(PIECE);
    message.chunks(PIECE).try_for_each(|part| {
        piece.clear();
        piece.extend_from_slice(part);
        world.broadcast(0, &mut piece)
    })
}

/// Receives a message of rank 0, and returns what follows its length.
pub(super) fn receive<'a>(world: &dyn Collective, message: &'a mut Vec<u8>) -> Result<&'a [u8], String> {
    let cast = |bytes: &mut Vec<u8>| world.broadcast(0, bytes).map_err(|error| error.to_string());
    message.clear();
    message.shrink_to(PIECE);
    cast(message)?;
    let length = message.first_chunk().map_or(0, |length| u64::from_le_bytes(*length));
    let mut piece = Vec::new();
    while (message.len() as u64) < length {
        cast(&mut piece)?;
        if piece.is_empty() {
            break;
        }
        message.append(&mut piece);
    }
    match message.get(HEAD..) {
        Some(said) if message.len() as u64 == length => Ok(said),
        _ => Err(format!("an order of {} bytes, expected {length}", message.len())),
    }
}
