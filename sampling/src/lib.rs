//! Sampling: draws the next token from a row of logits.
//!
//! The input is one row of logits, the parameters of the request ([`SamplingParams`]) and the sequence so far
//! ([`Context`]). The output is the next token ([`Sampled`]). The order of the steps is that of vLLM's V1 engine:
//!
//! ```text
//! logits ─▶ constraint, allowed ids ─▶ bad words ─▶ min_tokens ─▶ logit_bias
//!        ─▶ repetition ─▶ frequency, presence                                                              (adjust)
//!        ─▶ temperature 0: argmax, done
//!        ─▶ ÷ temperature ─▶ min_p ─▶ top_k ─▶ top_p ─▶ typical_p                                          (filter)
//!        ─▶ argmax of logit + Gumbel noise                                                                (draw)
//! ```
//!
//! A [`Constraint`] restricts a sequence to a grammar. Its mask is part of the [`Context`] and takes precedence over
//! all parameters.
//!
//! It differs from vLLM in these points:
//!
//! | | here | vLLM |
//! |---|---|---|
//! | temperatures between 1e-5 and 0.01 | used as they are | raised to 0.01 |
//! | temperatures above 0 and below 1e-5 | the likeliest token | raised to 0.01 |
//! | log-probabilities under a grammar | of all tokens | of those that its mask allows |
//! | rank of a token | 1 + the number of tokens with a greater logit | number of tokens with at least its logit |
//! | `logit_bias` beyond -100 to 100 | refused | cut to that range |
//! | `typical_p` | as in transformers | none |
//!
//! A beam search draws no tokens; it uses the [likeliest](Sampler::likeliest) tokens of the adjusted row.
//!
//! A draw has no state: its noise is a function of the request's seed, the index of the output token, the index of the
//! sequence and the token id. So it depends neither on the batch nor on the order of rows, and a preemption in between
//! changes nothing.
//!
//! [`Sampler`] works on host memory and defines the results. [`device`] computes the same results on the device that
//! holds the logits.
//!
//! The crate runs no model, decodes no text, and does not decide when a sequence ends. It only holds back stop ids
//! until `min_tokens` is reached.
//!
//! NaN and −∞ mark impossible tokens. A row without a possible token does not panic; [`Sampler::sample`] documents its
//! result.
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

pub use adjust::banned_words;
pub use constraint::{Constraint, ConstraintError, Mask, TokenSet};
pub use context::{Context, Likely, Sampled};
pub use draw::gumbel_noise;
pub use logprobs::{TokenLogprobs, token_logprobs};
pub use params::{MAX_TEMPERATURE, ParamError, SamplingParams};
pub use philox::philox4x32_10;
pub use sampler::Sampler;
