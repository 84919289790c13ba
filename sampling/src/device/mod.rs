//! Sampling where the logits are: a step copies back token ids and the log-probabilities that were asked for, no logits.
//!
//! The kernels are in `csrc/`, and [`Sampler`](crate::Sampler) says what they compute: the same tokens, log-probabilities
//! and ranks, to the bit. That holds on every device, since both use IEEE additions, multiplications and divisions alone
//! and all sums are of integers (`numbers`), so neither the order of threads nor the batch can show.
//!
//! # How an executor calls it
//!
//! A *slot* is one sequence's place on the device: what its request asks for, its masks, and what penalties, bad words
//! and `min_tokens` need to know of its tokens. Slots are the caller's to deal out, below [`Limits::max_num_seqs`].
//!
//! ```text
//! admission, resumption   set_row(slot, params, context)      params, lists, history: once
//! n sequences of a prompt fork(slot, other, sequence)         copied on the device
//! grammar                 constrain(slot, mask)               each step of such a row
//! preemption, end         clear_row(slot)
//!
//! a step   announce(places), stage(rows, padded) ─▶ place(tokens) ─▶ the forward pass
//!          changes, row ─▶ slot                   last tokens
//!             ─▶ launch(logits, padded) ─▶ read() ─▶ … ─▶ collect(pending)
//!                4 kernels                 ids, logprobs  the step's one wait
//! ```
//!
//! - [`DeviceSampler::launch`] alone belongs into a CUDA graph: its grid follows from the padded number of rows and the
//!   vocabulary, its arguments never change for one buffer of logits, and rows of padding leave at once.
//! - Nothing is uploaded for a row that goes on as before: the kernels count its tokens themselves. So a step can be staged
//!   and launched while the host does not know the tokens of the last one yet; uploads and results have two buffers each. [`DeviceSampler::place`]
//!   brings those tokens to where the next forward pass reads them.
//! - A preempted sequence leaves nothing behind. Resumed, it is set again, with the output that it has by then: one launch
//!   counts prompt and output anew, only where penalties want counts. No state is moved, so nothing can be forgotten.
//! - What a slot has no room for (a list longer than [`Limits::list_words`], say) is [`SampleError::TooMany`], and such a
//!   request can still be sampled on the host.
//!
//! What stays on the host: beam searches ([`Sampler::likeliest`](crate::Sampler::likeliest)) and the log-probabilities of a
//! prompt, whose rows of logits must be copied back.
//!
//! Costs: [`Limits::device_bytes`], known before anything is allocated; no device or page-locked memory is allocated
//! afterwards. A constraint's mask is `vocab / 8` bytes a step. `csrc/README.md` counts the passes over a row. The kernels
//! have run on `cuda-sim` alone: nothing is known of their time on a GPU yet.
//!
//! ```no_run
//! use device::Dtype;
//! use sampling::device::{DeviceSampler, Limits, Logits, Row};
//! use sampling::{Context, SamplingParams};
//!
//! let device = device::open("cuda", None)?;
//! let mut sampler = DeviceSampler::new(device.clone(), Limits::new(256, 151_936, 32_768))?;
//! let context = Context { prompt: &[3, 1], output: &[], stop_ids: &[0], allowed: None, seed: 42, sequence: 0 };
//! sampler.set_row(7, &SamplingParams { top_p: 0.9, ..SamplingParams::default() }, &context)?;
//!
//! let buffer = device.alloc(151_936 * 2)?; // the model writes its logits here
//! let logits = Logits { buffer: &buffer, dtype: Dtype::Bf16, stride: 151_936 };
//! for _ in 0..10 {
//!     let pending = sampler.sample(&logits, &[Row { slot: 7, logits_row: 0 }])?;
//!     println!("{}", sampler.collect(&pending)?.map(|sampled| sampled.token).sum::<u32>());
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod buffers;
mod layout;
mod limits;
mod place;
mod sampler;
mod slot;
mod stage;

pub use limits::{Limits, MAX_SLOTS, SampleError};
pub use place::Place;
pub use sampler::{DeviceSampler, Logits, Pending, Row};
