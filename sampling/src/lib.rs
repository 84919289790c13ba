//! Logits become tokens.
//!
//! The crate takes one row of logits, what a request asked for ([`SamplingParams`]) and what the sequence holds so far
//! ([`Context`]), and gives the next token ([`Sampled`]). The order of the steps is vLLM's (V1 engine):
//!
//! ```text
//! logits ─▶ constraint, allowed ids ─▶ bad words ─▶ min_tokens ─▶ logit_bias
//!        ─▶ repetition ─▶ frequency, presence                                                              (adjust)
//!        ─▶ temperature 0: argmax, done
//!        ─▶ ÷ temperature ─▶ min_p ─▶ top_k ─▶ top_p ─▶ typical_p                                          (filter)
//!        ─▶ argmax of logit + Gumbel noise                                                                (draw)
//! ```
//!
//! A [`Constraint`] holds a sequence to a grammar: its mask comes with the [`Context`] and outranks every other wish.
//!
//! A beam search draws nothing: it asks for the [likeliest](Sampler::likeliest) tokens of the adjusted row.
//!
//! A draw has no state: its noise is a function of the request's seed, the index of the output token, the index of the
//! sequence and the token id. So the batch a row is in, the order of rows, and a preemption in between change nothing.
//!
//! [`Sampler`] works on host memory and is the definition; [`device`] draws the same where the logits are.
//!
//! What it is not: it runs no model, decodes no text, and does not know when a sequence ends. Stop ids are only held back
//! here until `min_tokens` is reached.
//!
//! A row that offers nothing (NaN and −∞ count as "impossible") never panics; see [`Sampler::sample`] for what it gives.
//!
//! ```
//! use sampling::{Context, Sampler, SamplingParams};
//!
//! let params = SamplingParams { temperature: 0.8, top_k: 2, ..SamplingParams::default() };
//! params.validate()?;
//! let context = Context { prompt: &[3, 1], output: &[], stop_ids: &[0], allowed: None, seed: 42, sequence: 0 };
//! let logits = [0.1, 2.0, 1.5, -1.0];
//!
//! let drawn = Sampler::new().sample(&logits, &params, &context);
//! assert!(drawn.token == 1 || drawn.token == 2);
//! assert_eq!(drawn, Sampler::new().sample(&logits, &params, &context)); // same seed, same draw
//! # Ok::<(), sampling::ParamError>(())
//! ```

mod adjust;
mod argmax;
mod constraint;
mod context;
pub mod device;
mod draw;
mod filter;
mod logprobs;
mod numbers;
mod params;
mod philox;
mod sampler;

pub use constraint::{Constraint, ConstraintError, Mask, TokenSet};
pub use context::{Context, Likely, Sampled};
pub use draw::gumbel_noise;
pub use logprobs::{TokenLogprobs, token_logprobs};
pub use params::{MAX_LOGPROBS, ParamError, SamplingParams};
pub use philox::philox4x32_10;
pub use sampler::Sampler;
