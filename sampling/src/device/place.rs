//! Tokens that were drawn become tokens of the next forward pass, without a way over the host.

use device::{Arg, Buffer, Launch};

use super::DeviceSampler;
use super::buffers::Target;
use super::layout::{MODULE, ROW_THREADS};
use super::limits::{SampleError, at_most};

/// Where the last token of a slot's sequence goes in an array of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The sequence's slot.
    pub slot: u32,
    /// Index of the token.
    pub at: u32,
}

impl DeviceSampler {
    /// Says whose last tokens the next [`place`](DeviceSampler::place) takes, and where they go. They travel with the next
    /// [`stage`](DeviceSampler::stage).
    ///
    /// # Errors
    /// [`SampleError::TooMany`], [`SampleError::NotSet`], and the device's.
    pub fn announce(&mut self, places: &[Place]) -> Result<(), SampleError> {
        at_most("places of a step", places.len(), self.limits.max_num_seqs)?;
        places.iter().try_for_each(|place| self.find(place.slot).map(|_| ()))?;
        self.places.clear();
        self.places.extend(places.iter().map(|place| [place.slot, place.at]));
        if !self.sent_places.starts_with(&self.places) {
            self.make_room(2 * places.len())?;
            self.stage.upload(Target::Places, 0, self.places.as_flattened());
            self.sent_places.clone_from(&self.places);
        }
        Ok(())
    }

    /// Puts the last token of each announced sequence in its place among `tokens`, an array of u32: what the steps launched so
    /// far drew, whether or not the host knows it yet.
    ///
    /// # Errors
    /// [`SampleError::Place`] if the array ends before, and the device's.
    pub fn place(&self, tokens: &Buffer) -> Result<(), SampleError> {
        let places = tokens.len_bytes() / size_of::<u32>();
        if let Some(&[_, at]) = self.places.iter().find(|[_, at]| *at as usize >= places) {
            return Err(SampleError::Place { at, places });
        }
        if self.places.is_empty() {
            return Ok(());
        }
        let shape = [self.places.len() as u32, self.limits.tail_tokens() as u32];
        let own = &self.buffers;
        let args =
            [Arg::pointer(&own.places, 0), Arg::pointer(&own.state, 0), Arg::pointer(tokens, 0), Arg::bytes(&shape)];
        let (grid, block) = ([shape[0].div_ceil(ROW_THREADS), 1, 1], [ROW_THREADS, 1, 1]);
        let launch = Launch { module: MODULE, kernel: "sample_place", grid, block, shared_bytes: 0, args: &args };
        Ok(self.device.launch(&launch)?)
    }
}
