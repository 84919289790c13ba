//! Sampling on the device that holds the logits. A step copies back token ids and the log-probabilities that were
//! requested, but no logits.
//!
//! The kernels are in `csrc/`. [`Sampler`](crate::Sampler) defines their results: tokens, log-probabilities and ranks
//! are equal to the bit. That holds on every device, because both sides use only single IEEE additions, multiplications
//! and divisions, and all sums are sums of integers (`numbers`). Neither the order of threads nor the batch can show.
//!
//! # Usage
//!
//! A *slot* stores one sequence on the device: the parameters of its request, its masks, and what penalties, bad words
//! and `min_tokens` need of its history. The caller assigns the slots, below [`Limits::max_num_seqs`].
//!
//! ```text
//! admission, resumption   set_row(slot, params, context)      parameters, lists, history: once
//! n sequences of a prompt fork(from, to, sequence)            copied on the device
//! grammar                 constrain(slot, mask)               each step of such a row
//! preemption, end         clear_row(slot)
//!
//! a step   set_token_copies, stage(rows, padded) ─▶ copy_tokens(tokens) ─▶ the forward pass
//!          changes, row ─▶ slot                     last tokens
//!             ─▶ launch(logits, padded) ─▶ read() ─▶ … ─▶ collect(pending)
//!                4 or 5 kernels            ids, logprobs  the step's one wait
//! ```
//!
//! - Only [`DeviceSampler::launch`] belongs into a CUDA graph. Its grid follows from the padded number of rows and the
//!   vocabulary, its arguments never change for one buffer of logits, and blocks of padding rows return at once.
//! - A row that continues needs no upload: the kernels count its tokens themselves. So the host can stage and launch a
//!   step before it knows the tokens of the last one. Uploads and results have two buffers each.
//!   [`DeviceSampler::copy_tokens`] copies those tokens to where the next forward pass reads them.
//! - **Drafts**: a sequence with drafts has a row before each and one behind the last ([`Row::with_drafts`]). The kernels
//!   treat the drafts before a row as output: penalties, bad words, `min_tokens` and the noise see them. The slot itself
//!   takes only the tokens up to the first that differs from its draft, within the same launch, so it never has to be
//!   reset. A constraint holds for all rows of a slot; rows with masks of their own are for the host.
//! - A preempted sequence keeps no state on the device. When it resumes, it is set again, with its output so far. One
//!   launch counts prompt and output anew, if penalties need counts.
//! - A request that exceeds a slot (a list longer than [`Limits::list_words`], for example) is refused with
//!   [`SampleError::TooMany`]. It can be sampled on the host.
//!
//! Beam searches ([`Sampler::likeliest`](crate::Sampler::likeliest)) and the log-probabilities of a prompt stay on the
//! host. Their rows of logits have to be copied back.
//!
//! [`Limits::device_bytes`] is the cost in memory. All device and page-locked memory is allocated at the start. A
//! constraint's mask is `vocab / 8` bytes a step. `csrc/README.md` counts the passes over a row. The kernels have run
//! only on `cuda-sim`; their times on a GPU have not been measured.
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
//!     let pending = sampler.sample(&logits, &[Row::new(7, 0)])?;
//!     println!("{}", sampler.collect(&pending)?.map(|sampled| sampled.token).sum::<u32>());
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod args;
mod arrays;
mod limits;
mod sampler;
mod slot;
mod staging;
mod token_copy;

pub use args::{MAX_DRAFTS, Row, TokenCopy};
pub use limits::{Limits, MAX_SLOTS, SampleError};
pub use sampler::{DeviceSampler, Logits, Pending};
