//! Drafts from a smaller model, with its keys and values in the pages of the worker's pool.
//!
//! A page of the pool has a part for each place of the model and for each place of the draft model, and both use the block table of
//! the same group. So the draft model needs no tables of its own: shared prefixes, copies, swaps and preemption of a sequence apply to
//! its keys and values too.
//!
//! ```text
//! known text      t0 t1 … t(m-1)      the last token is not computed yet
//! pass 1          what the draft model lacks of t0 … t(m-1)   ─▶ d1
//! pass 2          d1                                          ─▶ d2
//! pass k          d(k-1)                                      ─▶ dk      the step verifies d1 … dk
//! ```
//!
//! A draft is drawn as the token would be: with the sampling parameters of the request, and with the noise of its position. So also at a
//! temperature the draft is right as often as the two models agree.
//!
//! **What the draft model lacks.** It computes prompts in the steps that compute them for the model, and other tokens when drafts
//! are next wanted. `filled` says which blocks have its keys and values for all their tokens, so that a sequence that finds blocks
//! in the prefix cache computes the others again. Such a block may have several owners. They have the same tokens, so it does not matter
//! which one writes.
//!
//! Nothing here can change a token or end a request: an error or a panic is reported, and no more drafts are asked for.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use attention_kernels::{KernelError, KvCache};
use device::Device;
use kvblock::MemOp;
use models::{ForwardBatch, LOGIT_ROWS, Model};
use sched::{RequestId, SeqId, Span, StepPlan};

use super::phase;
use super::request::RequestState;
use super::rows::{Drawn, HostRow, Row, draw_rows};
use crate::speculate::ProposeError;

/// Block tables of all sequences, one for each group of layers.
type Tables = HashMap<SeqId, Vec<Vec<i32>>>;
type Requests = HashMap<RequestId, RequestState>;

/// See the [module](self).
pub(crate) struct Drafter {
    device: Arc<dyn Device>,
    model: Model,
    /// Tokens of the worker's model.
    vocab_size: usize,
    /// The group of layers of the worker's model whose block tables are used. It has no window.
    group: usize,
    block_size: usize,
    /// Greatest number of rows of a forward pass, and of the rows that a step computes of known text.
    max_rows: usize,
    sequences: HashMap<SeqId, Progress>,
    /// For each block whether it has keys and values of this model for all its tokens.
    filled: Vec<bool>,
    failed: Option<ProposeError>,
    // Reused.
    batch: ForwardBatch,
    tokens: Vec<u32>,
    slots: Vec<i64>,
    logits: Vec<f32>,
}

/// How much of a sequence has keys and values of the draft model.
#[derive(Default)]
struct Progress {
    /// Number of known tokens.
    len: usize,
    /// Drafts behind them.
    ahead: Vec<u32>,
}

/// What to compute of a sequence.
struct Work {
    seq: SeqId,
    /// Position of the next row.
    at: usize,
    /// Number of known tokens to compute.
    end: usize,
    /// Number of drafts.
    wanted: usize,
    drafts: Vec<u32>,
}

impl Work {
    /// Number of rows that can be computed now.
    fn ready(&self) -> usize {
        if self.wanted > 0 && self.drafts.len() == self.wanted { 0 } else { self.end + self.drafts.len() - self.at }
    }
}

/// A sequence's tokens: the prompt, and what was drawn.
struct Text<'a>(&'a [u32], &'a [u32]);

impl<'a> Text<'a> {
    fn of(requests: &'a Requests, seq: SeqId) -> Option<Text<'a>> {
        let state = requests.get(&seq.request)?;
        Some(Text(&state.request.prompt, state.outputs.get(seq.index as usize)?.as_deref()?))
    }

    fn len(&self) -> usize {
        self.0.len() + self.1.len()
    }

    fn token(&self, position: usize) -> Option<u32> {
        self.0.get(position).or_else(|| self.1.get(position - self.0.len())).copied()
    }
}

impl Drafter {
    /// A drafter for a model of this vocabulary, over the block tables of one of its groups and blocks of this size.
    pub fn new(
        device: Arc<dyn Device>,
        model: Model,
        (vocab_size, group): (usize, usize),
        (num_blocks, block_size): (usize, usize),
        max_rows: usize,
    ) -> Drafter {
        Drafter {
            device,
            model,
            vocab_size,
            group,
            block_size,
            max_rows,
            sequences: HashMap::new(),
            filled: vec![false; num_blocks],
            failed: None,
            batch: ForwardBatch::default(),
            tokens: Vec::new(),
            slots: Vec::new(),
            logits: Vec::new(),
        }
    }

    /// Sequences have ended, or have lost their blocks.
    pub fn forget(&mut self, sequences: &[SeqId]) {
        for seq in sequences {
            self.sequences.remove(seq);
        }
    }

    /// Notes which blocks get other contents in a step that begins.
    pub fn begin(&mut self, plan: &StepPlan) {
        let slots = plan.spans.iter().flat_map(|span| &span.groups).flat_map(|group| &group.slots);
        let first = slots.filter_map(|slot| usize::try_from(*slot).ok()).filter(|slot| slot % self.block_size == 0);
        let moved = plan.memory.iter().filter_map(|op| match op {
            MemOp::Copy { dst, .. } | MemOp::SwapIn { dst, .. } => Some(dst.index()),
            _ => None,
        });
        for block in first.map(|slot| slot / self.block_size).chain(moved) {
            if let Some(filled) = self.filled.get_mut(block) {
                *filled = false;
            }
        }
    }

    /// Computes the prompts of a step for the draft model too.
    pub(super) fn follow(&mut self, plan: &StepPlan, requests: &Requests, on: (&Tables, &mut [KvCache])) {
        let is_followed = |span: &&Span| {
            let state = requests.get(&span.seq.request).filter(|state| state.request.speculative);
            let is_text = |state: &RequestState| span.start < state.request.prompt.len() || span.tokens.len() > 1;
            span.drafts == 0 && span.awaits.is_none() && state.is_some_and(is_text)
        };
        if self.failed.is_some() || !plan.spans.iter().any(|span| is_followed(&span)) {
            return;
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let spans = plan.spans.iter().filter(is_followed);
            let mut work = self.work(spans, requests, on.0, |span| (span.start + span.tokens.len(), 0));
            while self.pass(&mut work, requests, on.0, on.1)?.is_some() {}
            self.finish(work, on.0);
            Ok(())
        }));
        self.check(outcome);
    }

    /// Computes the drafts of a step that has begun.
    pub(super) fn propose(
        &mut self,
        plan: &StepPlan,
        requests: &mut Requests,
        on: (&Tables, &mut [KvCache]),
    ) -> Result<Vec<u32>, ProposeError> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        let _phase = phase(&*self.device.clone(), "draft");
        let spans = || plan.spans.iter().filter(|span| span.drafts > 0);
        let outcome = catch_unwind(AssertUnwindSafe(|| self.drafts(spans(), requests, on)));
        // The drafts are no output yet.
        for span in spans() {
            let known = span.start + span.tokens.len() - span.drafts;
            if let Some(state) = requests.get_mut(&span.seq.request)
                && let Some(Some(output)) = state.outputs.get_mut(span.seq.index as usize)
            {
                output.truncate(known - state.request.prompt.len());
            }
        }
        match self.check(outcome) {
            Some(drafts) => Ok(drafts),
            None => Err(self.failed.clone().unwrap_or_else(|| ProposeError("it failed".to_string()))),
        }
    }

    /// Notes why work failed, if it did.
    fn check<T>(&mut self, outcome: std::thread::Result<Result<T, KernelError>>) -> Option<T> {
        let problem = match outcome {
            Ok(Ok(done)) => return Some(done),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "the draft model panicked".to_string(),
        };
        self.failed = Some(ProposeError(problem));
        None
    }

    fn drafts<'a>(
        &mut self,
        spans: impl Iterator<Item = &'a Span> + Clone,
        requests: &mut Requests,
        (tables, caches): (&Tables, &mut [KvCache]),
    ) -> Result<Vec<u32>, KernelError> {
        let known = |span: &Span| (span.start + span.tokens.len() - span.drafts, span.drafts);
        let mut work = self.work(spans.clone(), requests, tables, known);
        while let Some(drawn) = self.pass(&mut work, requests, tables, caches)? {
            for (at, token) in drawn {
                let Work { seq, drafts, .. } = &mut work[at];
                drafts.push(token);
                if let Some(state) = requests.get_mut(&seq.request)
                    && let Some(Some(output)) = state.outputs.get_mut(seq.index as usize)
                {
                    output.push(token);
                }
            }
        }
        let mut all = Vec::new();
        let mut done = work.iter().peekable();
        for span in spans {
            let own = done.next_if(|work| work.seq == span.seq).map_or(&[][..], |work| &work.drafts);
            // A sequence that lacks too much gets no drafts this time.
            all.extend(own.iter().copied().chain(std::iter::repeat(0)).take(span.drafts));
        }
        self.finish(work, tables);
        Ok(all)
    }

    /// What to compute for spans, of which `wants` returns how many tokens of the text, and how many drafts behind it.
    fn work<'a>(
        &mut self,
        spans: impl Iterator<Item = &'a Span>,
        requests: &Requests,
        tables: &Tables,
        wants: impl Fn(&Span) -> (usize, usize),
    ) -> Vec<Work> {
        let Drafter { sequences, filled, block_size, group, .. } = self;
        let mut left = self.max_rows;
        let mut all = Vec::new();
        for span in spans {
            let (seq, (end, wanted)) = (span.seq, wants(span));
            let (Some(text), Some(table)) = (Text::of(requests, seq), table_of(tables, seq, *group)) else { continue };
            let progress = sequences.entry(seq).or_insert_with(|| {
                let is_filled = |block: &&i32| usize::try_from(**block).is_ok_and(|block| filled[block]);
                Progress { len: table.iter().take_while(is_filled).count() * *block_size, ahead: Vec::new() }
            });
            let right = progress.ahead.iter().zip(progress.len..).take_while(|(d, at)| text.token(*at) == Some(**d));
            // The last token is computed in any case: a draft follows from its row.
            let at = (progress.len + right.count()).min(end.saturating_sub(1));
            let (rows, is_all) = ((end - at).min(left), end - at <= left && text.len() >= end);
            left -= rows;
            if rows > 0 {
                let wanted = if is_all { wanted } else { 0 };
                all.push(Work { seq, at, end: at + rows, wanted, drafts: Vec::with_capacity(wanted) });
            }
        }
        all
    }

    /// Computes what is ready, and draws the drafts that follow. Returns the places of the sequences that drew and what, or `None` if
    /// nothing was left to do.
    fn pass(
        &mut self,
        work: &mut [Work],
        requests: &Requests,
        tables: &Tables,
        caches: &mut [KvCache],
    ) -> Result<Option<Vec<(usize, u32)>>, KernelError> {
        let Drafter { device, model, batch, tokens, slots, group, block_size, max_rows, .. } = self;
        batch.clear(1);
        let mut drawing = Vec::new();
        // The batch begins with what the decode kernel computes.
        let most = model.decode_rows();
        for is_long in [false, true] {
            for (place, work) in work.iter_mut().enumerate() {
                let count = work.ready().min(*max_rows - batch.tokens.len());
                let (text, table) = (Text::of(requests, work.seq), table_of(tables, work.seq, *group));
                let (Some(text), Some(table)) = (text, table) else { continue };
                if count == 0 || (count > most) != is_long {
                    continue;
                }
                tokens.clear();
                tokens.extend((work.at..work.at + count).filter_map(|position| text.token(position)));
                slots.clear();
                let slot = |position: usize| {
                    let block = table.get(position / *block_size).copied().unwrap_or(-1);
                    i64::from(block) * *block_size as i64 + (position % *block_size) as i64
                };
                slots.extend((work.at..work.at + count).map(slot));
                let last = batch.push(work.at, tokens, [(&slots[..], table)]);
                work.at += count;
                if work.wanted > 0 && work.at == work.end + work.drafts.len() {
                    drawing.push((place, last));
                }
            }
        }
        if batch.tokens.is_empty() {
            return Ok(None);
        }
        batch.needed.get_or_insert_default().extend(drawing.iter().map(|(_, row)| *row));
        match device.features().launches {
            true => model.forward(batch, caches)?,
            false => device.pool().enter(|| model.forward(batch, caches))?,
        }
        let mut drawn = Vec::with_capacity(drawing.len());
        for chunk in drawing.chunks(LOGIT_ROWS) {
            let rows: Vec<u32> = chunk.iter().map(|(_, row)| *row).collect();
            let logits = device.pool().enter(|| model.logits(&rows))?;
            let width = logits.len() / rows.len();
            let logits = of_vocabulary(logits, width, self.vocab_size, &mut self.logits);
            let row = |((place, _), logits): (&(usize, u32), _)| {
                let seq = work[*place].seq;
                let at = HostRow { span: *place, drafts: 0 };
                Some(Row::of_draft(requests.get(&seq.request)?, at, seq, logits))
            };
            let rows = chunk.iter().zip(logits.chunks(self.vocab_size)).filter_map(row).collect();
            for (at, drawn_of) in draw_rows(device.pool(), rows) {
                if let Drawn::Tokens(tokens) = drawn_of {
                    drawn.extend(tokens.iter().map(|(_, sampled)| (at.span, sampled.token)));
                }
            }
        }
        Ok(Some(drawn))
    }

    /// Notes what was computed.
    fn finish(&mut self, work: Vec<Work>, tables: &Tables) {
        for Work { seq, end, mut drafts, .. } in work {
            // The last draft has not been computed.
            drafts.pop();
            let table = table_of(tables, seq, self.group).unwrap_or_default();
            for block in table.iter().take(end / self.block_size).filter_map(|block| usize::try_from(*block).ok()) {
                if let Some(filled) = self.filled.get_mut(block) {
                    *filled = true;
                }
            }
            self.sequences.insert(seq, Progress { len: end, ahead: drafts });
        }
    }
}

/// The block table of a sequence in a group.
fn table_of(tables: &Tables, seq: SeqId, group: usize) -> Option<&[i32]> {
    tables.get(&seq)?.get(group).map(Vec::as_slice)
}

/// Rows of `width` logits as rows of `vocab_size`: the tokenizers agree on the tokens, but matrices may have rows of none.
fn of_vocabulary<'a>(logits: &'a [f32], width: usize, vocab_size: usize, scratch: &'a mut Vec<f32>) -> &'a [f32] {
    if width == vocab_size {
        return logits;
    }
    scratch.clear();
    for row in logits.chunks(width) {
        scratch.extend_from_slice(&row[..width.min(vocab_size)]);
        scratch.extend(std::iter::repeat_n(f32::NEG_INFINITY, vocab_size.saturating_sub(width)));
    }
    scratch
}
