//! Beam search over a worker whose model is a table, compared with exhaustive and naive searches.
//!
//! The worker keeps tokens in a paged cache, as a device keeps keys and values. The tokens that it reads there must be those of the
//! beam, whichever beams were forked and whichever blocks were copied.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use engine::worker::{Draw, StepError, StepInput, StepOutput, Worker, WorkerInfo};
use engine::{BeamSearch, Engine, EngineParts, FinishReason, GenerationParams, GenerationRequest, Sampled, TokenEvent};
use proptest::prelude::*;
use sampling::Likely;
use sched::{MemOp, SchedConfig, SeqId};

/// Ends a hypothesis.
const END: u32 = 0;
const PROMPT: [u32; 3] = [1, 0, 1];
const BLOCK_SIZE: usize = 8;

/// A language model as a table: a distribution for every prefix.
#[derive(Clone, Debug)]
struct Table {
    vocab: u32,
    logits: Vec<f32>,
}

impl Table {
    /// The next tokens after `prefix` with their log-probabilities, likeliest first.
    fn next(&self, prefix: &[u32]) -> Vec<(u32, f32)> {
        let number = prefix.iter().fold(0, |number, token| number * self.vocab + token + 1);
        let row = &self.logits[(number * self.vocab) as usize..][..self.vocab as usize];
        let mass: f32 = row.iter().map(|logit| logit.exp()).sum();
        let mut next: Vec<(u32, f32)> = (0..).zip(row.iter().map(|logit| (logit - mass.ln()).min(0.0))).collect();
        next.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        next
    }
}

/// Tokens, sum and why it ended.
type Hypothesis = (Vec<u32>, f64, FinishReason);

fn reason(token: u32) -> Option<FinishReason> {
    (token == END).then_some(FinishReason::Stop(None))
}

fn score(hypothesis: &Hypothesis, search: BeamSearch) -> f64 {
    hypothesis.1 / (hypothesis.0.len() as f64).powf(search.length_penalty.into())
}

/// Every hypothesis there is.
fn all(table: &Table, limit: usize, prefix: &[u32], sum: f64) -> Vec<Hypothesis> {
    let next = table.next(prefix).into_iter().map(|(token, logprob)| {
        let (tokens, sum) = ([prefix, &[token]].concat(), sum + f64::from(logprob));
        match reason(token).or((tokens.len() == limit).then_some(FinishReason::Length)) {
            Some(reason) => vec![(tokens, sum, reason)],
            None => all(table, limit, &tokens, sum),
        }
    });
    next.flatten().collect()
}

/// A beam search with lists of tokens, which ends at the limit, or with `early_stopping`.
fn naive(table: &Table, limit: usize, search: BeamSearch) -> Vec<Hypothesis> {
    let (mut live, mut ended) = (vec![(Vec::new(), 0.0)], Vec::new());
    while !(live.is_empty() || search.early_stopping && ended.len() >= search.width) {
        let mut next: Vec<(Vec<u32>, f64)> = Vec::new();
        for (prefix, sum) in &live {
            let mut extended = table.next(prefix);
            extended.truncate(2 * search.width);
            extended.sort_by_key(|&(token, _)| token);
            next.extend(extended.iter().map(|&(t, p)| ([prefix, &[t][..]].concat(), sum + f64::from(p))));
        }
        next.sort_by(|a, b| b.1.total_cmp(&a.1)); // stable: parents in order, then tokens
        live.clear();
        for (tokens, sum) in next {
            let length = (tokens.len() == limit).then_some(FinishReason::Length);
            match reason(tokens[tokens.len() - 1]).or(length) {
                Some(reason) => ended.push((tokens, sum, reason)),
                None => live.push((tokens, sum)),
            }
        }
        live.truncate(search.width);
    }
    ended.sort_by(|a, b| score(b, search).total_cmp(&score(a, search)));
    ended.truncate(search.width);
    ended
}

/// Returns the likeliest tokens of a [`Table`] after the tokens in its cache.
struct TableWorker {
    table: Table,
    blocks: Vec<[u32; BLOCK_SIZE]>,
    tables: HashMap<SeqId, Vec<u32>>,
    step: Option<Arc<StepInput>>,
    /// Steps with work.
    steps: Arc<AtomicUsize>,
    /// Number of candidates that each beam was asked for last.
    count: Arc<AtomicUsize>,
}

impl Worker for TableWorker {
    fn submit(&mut self, input: Arc<StepInput>) {
        self.step = Some(input);
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), StepError> {
        output.clear();
        let StepInput { plan, draws, .. } = &*self.step.take().unwrap();
        plan.released.iter().for_each(|seq| drop(self.tables.remove(seq)));
        for op in &plan.memory {
            match *op {
                MemOp::Copy { src, dst } => self.blocks[dst.index()] = self.blocks[src.index()],
                MemOp::Poison { block, from_slot } => self.blocks[block.index()][from_slot..].fill(u32::MAX),
                _ => panic!("{op}"),
            }
        }
        for span in &plan.spans {
            let table = self.tables.entry(span.seq).or_default();
            span.groups[0].table.apply(table, u32::MAX, |block| block.0);
            for (token, &slot) in span.tokens.iter().zip(&span.groups[0].slots) {
                self.blocks[slot as usize / BLOCK_SIZE][slot as usize % BLOCK_SIZE] = *token;
            }
        }
        for (span, draw) in plan.spans.iter().zip(draws) {
            let Draw::Likeliest { output: beam, count } = draw else { continue };
            let held = self.tables[&span.seq].iter().flat_map(|&block| self.blocks[block as usize]);
            let held: Vec<u32> = held.take(span.start + span.tokens.len()).collect();
            assert_eq!(held, [&PROMPT[..], beam].concat(), "the cache of {}", span.seq);
            self.count.store(*count, Relaxed);
            let likeliest = self.table.next(beam).into_iter().take(*count);
            let likely =
                likeliest.map(|(token, logprob)| Likely { sampled: Sampled { token, logprob: None }, logprob });
            output.likeliest.push((span.seq, likely.collect()));
        }
        self.steps.fetch_add(usize::from(!plan.spans.is_empty()), Relaxed);
        Ok(())
    }

    fn num_sequences(&self) -> usize {
        0
    }
}

/// The result of a search.
struct Found {
    hypotheses: Vec<Hypothesis>,
    steps: usize,
    count: usize,
}

fn run(table: &Table, limit: usize, search: BeamSearch) -> Found {
    run_with(table, limit, search, vec![])
}

fn run_with(table: &Table, limit: usize, search: BeamSearch, stop_token_ids: Vec<u32>) -> Found {
    const BLOCKS: usize = 400;
    let (steps, count) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let worker = Box::new(TableWorker {
        table: table.clone(),
        blocks: vec![[u32::MAX; BLOCK_SIZE]; BLOCKS],
        tables: HashMap::new(),
        step: None,
        steps: steps.clone(),
        count: count.clone(),
    });
    let info = WorkerInfo {
        vocab_size: table.vocab as usize,
        max_in_flight: 1,
        sampler: None,
        profile: None,
        host_block_bytes: 0,
    };
    let sched = SchedConfig { max_num_seqs: 80, ..SchedConfig::new(BLOCKS, BLOCK_SIZE) };
    let parts = EngineParts {
        is_headless: false,
        worker,
        info,
        sched,
        eos_token_ids: vec![END],
        seed: 1,
        adapters: None,
        itl_target: None,
        speculation: None,
        kv_events: None,
        kv_transfer: None,
    };
    let mut engine = Engine::new(parts).unwrap();
    let params = GenerationParams {
        n: search.width,
        max_tokens: Some(limit),
        beam: Some(search),
        stop_token_ids,
        ..Default::default()
    };
    engine.submit(GenerationRequest { prompt: PROMPT.into(), params, ..Default::default() }).unwrap();
    let mut results = vec![(Vec::new(), None); search.width];
    while engine.has_work() {
        engine.step(|_, event| {
            if let TokenEvent::Token { index, token, finish, .. } = event {
                let (tokens, reason) = &mut results[index as usize];
                tokens.extend(token.map(|sampled| sampled.token));
                *reason = finish;
            }
        });
    }
    engine.audit().unwrap();
    let sum = |tokens: &[u32]| {
        let of = |at: usize| table.next(&tokens[..at]).iter().find(|next| next.0 == tokens[at]).unwrap().1;
        (0..tokens.len()).map(|at| f64::from(of(at))).sum()
    };
    // Where fewer hypotheses exist than were asked for, the rest is empty.
    let found = results.into_iter().filter(|(tokens, _)| !tokens.is_empty());
    let hypotheses = found.map(|(tokens, reason)| (tokens.clone(), sum(&tokens), reason.unwrap())).collect();
    Found { hypotheses, steps: steps.load(Relaxed), count: count.load(Relaxed) }
}

/// A table for hypotheses of up to `limit` tokens; coarse logits give ties.
fn tables() -> impl Strategy<Value = (Table, usize)> {
    (2..=4u32, 1..=4usize).prop_flat_map(|(vocab, limit)| {
        let prefixes: u32 = (0..limit as u32).map(|length| vocab.pow(length)).sum();
        let len = (prefixes * vocab) as usize;
        let coarse = prop::collection::vec((0..=1i32).prop_map(|x| x as f32), len);
        let logits = prop_oneof![coarse, prop::collection::vec(-4.0f32..4.0, len)];
        logits.prop_map(move |logits| (Table { vocab, logits }, limit))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn a_beam_as_wide_as_all_prefixes_finds_the_best_of_all(
        (table, limit) in tables(), penalty in -2.0f32..2.0, best in 1..20usize,
    ) {
        let width = (table.vocab as usize).pow(limit as u32 - 1).max(best);
        let search = BeamSearch { length_penalty: penalty, ..BeamSearch::new(width) };
        let mut all = all(&table, limit, &[], 0.0);
        all.sort_by(|a, b| score(b, search).total_cmp(&score(a, search)));
        let found = run(&table, limit, search).hypotheses;
        prop_assert_eq!(found.len(), all.len().min(width));
        for (found, best) in found.iter().zip(&all) {
            // Equal scores may come in either order.
            prop_assert!((score(found, search) - score(best, search)).abs() < 1e-12, "{:?} {:?}", found, best);
            prop_assert!(all.contains(found));
        }
        prop_assert!(found.iter().enumerate().all(|(i, f)| !found[..i].contains(f)), "{:?}", found);
    }

    #[test]
    fn a_narrow_beam_finds_what_a_search_without_early_end_finds(
        (table, limit) in tables(), penalty in -2.0f32..2.0, width in 1..6usize, early_stopping: bool,
    ) {
        let search = BeamSearch { width, length_penalty: penalty, early_stopping };
        prop_assert_eq!(run(&table, limit, search).hypotheses, naive(&table, limit, search));
    }

    #[test]
    fn no_length_penalty_breaks_the_order((table, limit) in tables(), high: bool, width in 1..6usize) {
        let length_penalty = if high { f32::MAX } else { f32::MIN };
        let found = run(&table, limit, BeamSearch { length_penalty, ..BeamSearch::new(width) }).hypotheses;
        prop_assert!(!found.is_empty());
        let lengths = found.iter().map(|hypothesis| hypothesis.0.len());
        // Below 0 every token is a loss beyond measure.
        prop_assert!(high || lengths.is_sorted_by_key(|length| length > 1), "{:?}", found);
    }
}

/// The end is likely after each prefix.
fn hasty(limit: usize) -> Table {
    let prefixes: u32 = (0..limit as u32).map(|length| 3u32.pow(length)).sum();
    Table { vocab: 3, logits: [3.0, 1.0, 0.0].repeat(prefixes as usize) }
}

#[test]
fn a_search_ends_when_no_beam_can_beat_the_best_any_more() {
    let steps = |length_penalty, early_stopping| {
        run(&hasty(6), 6, BeamSearch { width: 2, length_penalty, early_stopping }).steps
    };
    // Short ones win: after two steps no other can be among the best two.
    assert_eq!(steps(-1.0, false), 2);
    assert_eq!(steps(0.0, false), 2);
    // Long hypotheses score higher, so the search continues, unless it may stop early.
    assert!(steps(1.0, false) > 2);
    assert_eq!(steps(1.0, true), 2);
}

#[test]
fn the_bound_of_a_negative_length_penalty_is_one_token_away() {
    // After the prompt these probabilities; after anything else the end is all but certain.
    let found = |first: [f32; 3]| {
        let mut table = hasty(4);
        table.logits = [first.map(f32::ln).to_vec(), [20.0, 0.0, 0.0].repeat(table.logits.len() / 3 - 1)].concat();
        let found = run(&table, 4, BeamSearch { length_penalty: -1.0, ..BeamSearch::new(1) });
        (found.hypotheses[0].0.clone(), found.steps)
    };
    // ln 0.6 twice is above ln 0.25 once, four times is not: to end at once would be too soon.
    assert_eq!(found([0.25, 0.6, 0.15]), (vec![1, END], 2));
    // ln 0.5 twice is below ln 0.45: nothing can come of it.
    assert_eq!(found([0.45, 0.5, 0.05]), (vec![END], 1));
}

#[test]
fn each_beam_gets_enough_candidates_that_width_of_them_continue() {
    let count = |stop_token_ids| run_with(&hasty(3), 2, BeamSearch::new(4), stop_token_ids).count;
    assert_eq!(count(vec![]), 8);
    assert_eq!(count(vec![0, 1, 2, 0, 1, 2]), 11, "seven ids may end a hypothesis");
}
