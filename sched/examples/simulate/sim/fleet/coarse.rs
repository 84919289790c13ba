//! A replica that is cheap enough for fleets of 10,000: steps with prompts one by one, steps without as one leap.
//!
//! It follows the real scheduler's plan: every decoding sequence gets a token, then prompts get what is left of the
//! budget, in order of arrival. Costs come from the same cost model. It differs in four points:
//!
//! - Blocks are tokens; only the length of a cached prefix is rounded to blocks.
//! - A request is admitted when its output fits too, so nothing is ever preempted.
//! - Two requests that compute the same system prompt at once share it.
//! - A leap's steps take the time of its middle step.
//!
//! An event costs O(log running); the memory is that of running and waiting requests and cached conversations.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::super::cost::{CostModel, Work};
use super::super::paged::PREFILL_SHARE;
use super::measure::Tally;
use super::prefixes::Prefixes;
use super::replica::{BLOCK, Job, MAX_NUM_SEQS, Replica, Token};

/// What the device does.
#[derive(Clone, Copy)]
enum Phase {
    Idle,
    /// A step with prompts, or with sequences that were received. The first `decoding` sequences have decoded before.
    Step {
        start: f64,
        end: f64,
        decoding: usize,
    },
    /// This number of steps without.
    Leap {
        start: f64,
        end: f64,
        steps: usize,
    },
}

/// A prompt whose tokens before `done` are computed when the current step ends.
struct Prefill {
    job: Job,
    done: usize,
}

/// See the module.
pub struct Coarse<'a> {
    cost: &'a CostModel,
    waiting: VecDeque<Job>,
    prefilling: VecDeque<Prefill>,
    /// Decoding requests, by the step after which they end.
    ends: BinaryHeap<Reverse<(u64, u32)>>,
    jobs: Vec<Job>,
    unused: Vec<u32>,
    /// Times of the first tokens of the requests that were received for this step.
    received: Vec<f64>,
    phase: Phase,
    /// Steps so far.
    steps: u64,
    /// Cached tokens that the next step of all decoding sequences reads.
    context: usize,
    /// Tokens that running requests own, and those that they will own at most.
    held: usize,
    reserved: usize,
    /// Number of running requests by system prompt.
    users: Vec<u32>,
    cache: Prefixes,
    busy: f64,
}

/// Key of a system prompt; those of conversations are smaller.
fn app_key(job: &Job) -> u64 {
    u64::MAX - u64::from(job.app)
}

impl<'a> Coarse<'a> {
    pub fn new(cost: &'a CostModel) -> Coarse<'a> {
        Coarse {
            cost,
            waiting: VecDeque::new(),
            prefilling: VecDeque::new(),
            ends: BinaryHeap::new(),
            jobs: Vec::new(),
            unused: Vec::new(),
            received: Vec::new(),
            phase: Phase::Idle,
            steps: 0,
            context: 0,
            held: 0,
            reserved: 0,
            users: Vec::new(),
            cache: Prefixes::default(),
            busy: 0.0,
        }
    }

    fn users(&self, job: &Job) -> u32 {
        self.users.get(job.app as usize).copied().unwrap_or(0)
    }

    /// Tokens that a request does not share with running ones. Received caches share nothing.
    fn own_prompt(job: &Job) -> usize {
        (job.prompt - if job.first_at.is_some() { 0 } else { job.system }) as usize
    }

    fn own_tokens(job: &Job) -> usize {
        Self::own_prompt(job) + job.output as usize - usize::from(job.first_at.is_none())
    }

    fn may_admit(&self, job: &Job) -> bool {
        let running = self.ends.len() + self.prefilling.len();
        let shared = if self.users(job) == 0 { job.system as usize } else { 0 };
        let most = self.cost.kv_capacity - self.cost.kv_capacity / 100;
        running == 0 || running < MAX_NUM_SEQS && self.reserved + Self::own_tokens(job) + shared <= most
    }

    /// Takes the blocks of a request's prompt, and returns how many of its tokens were cached.
    fn open(&mut self, job: &Job) -> usize {
        let cached = self.cached(job) as usize;
        self.held += Self::own_prompt(job);
        self.reserved += Self::own_tokens(job);
        if job.first_at.is_none() {
            self.cache.take(job.conversation);
            let app = job.app as usize;
            self.users.resize(self.users.len().max(app + 1), 0);
            self.users[app] += 1;
            if self.users[app] == 1 {
                self.cache.take(app_key(job));
                self.held += job.system as usize;
                self.reserved += job.system as usize;
            }
        }
        self.trim();
        cached
    }

    /// Gives back the blocks of a request that has ended. They stay cached.
    fn close(&mut self, job: &Job) {
        self.held -= Self::own_tokens(job);
        self.reserved -= Self::own_tokens(job);
        if job.first_at.is_none() {
            self.cache.insert(job.conversation, Self::own_tokens(job) as u32);
            let users = &mut self.users[job.app as usize];
            *users -= 1;
            if *users == 0 {
                self.held -= job.system as usize;
                self.reserved -= job.system as usize;
                self.cache.insert(app_key(job), job.system);
            }
        }
        self.trim();
    }

    fn trim(&mut self) {
        self.cache.trim(self.cost.kv_capacity.saturating_sub(self.held) as u64);
    }

    /// Adds a sequence to those that decode, for `tokens` more steps.
    fn decode(&mut self, job: Job, tokens: u64) {
        let at = match self.unused.pop() {
            Some(at) => {
                self.jobs[at as usize] = job;
                at
            }
            None => {
                self.jobs.push(job);
                self.jobs.len() as u32 - 1
            }
        };
        self.ends.push(Reverse((self.steps + tokens, at)));
        self.context += job.prompt as usize;
    }

    /// Seconds of the next `steps` steps without prompts.
    fn leap_seconds(&self, steps: usize) -> f64 {
        let rows = self.ends.len();
        let context = self.context + rows * (steps - 1) / 2;
        steps as f64 * self.step_seconds(Work { rows, context, pairs: context + rows })
    }

    fn step_seconds(&self, work: Work) -> f64 {
        self.cost.device_seconds(work) + self.cost.host_seconds
    }

    /// Plans what comes next.
    fn begin(&mut self, now: f64, tally: &mut Tally) -> Option<f64> {
        let decoding = self.ends.len();
        let mut work = Work { rows: decoding, context: self.context, pairs: self.context + decoding };
        let mut budget = MAX_NUM_SEQS + PREFILL_SHARE - decoding;
        for prefill in &mut self.prefilling {
            let rows = budget.min(prefill.job.prompt as usize - prefill.done);
            work.add_span(prefill.done, rows);
            prefill.done += rows;
            budget -= rows;
        }
        while budget > 0
            && let Some(&job) = self.waiting.front()
            && self.may_admit(&job)
        {
            self.waiting.pop_front();
            let cached = self.open(&job);
            if let Some(first_at) = job.first_at {
                self.received.push(first_at);
                self.decode(job, job.output.into());
                work.add_span(job.prompt as usize, 1);
                budget -= 1;
                continue;
            }
            tally.prompt_tokens += u64::from(job.prompt);
            tally.cached_tokens += cached as u64;
            let rows = budget.min(job.prompt as usize - cached);
            work.add_span(cached, rows);
            budget -= rows;
            self.prefilling.push_back(Prefill { job, done: cached + rows });
        }
        let end;
        (self.phase, end) = if work.rows > decoding {
            let end = now + self.step_seconds(work);
            (Phase::Step { start: now, end, decoding }, Some(end))
        } else if let Some(Reverse((last, _))) = self.ends.peek() {
            let steps = (last - self.steps) as usize;
            let end = now + self.leap_seconds(steps);
            (Phase::Leap { start: now, end, steps }, Some(end))
        } else {
            (Phase::Idle, None)
        };
        end
    }

    /// Ends `steps` steps, and the requests that they complete.
    fn advance(&mut self, steps: usize, out: &mut Vec<Token>) {
        let rows = self.ends.len();
        self.steps += steps as u64;
        self.context += steps * rows;
        self.held += steps * rows;
        while let Some(&Reverse((last, at))) = self.ends.peek()
            && last <= self.steps
        {
            self.ends.pop();
            self.unused.push(at);
            let job = self.jobs[at as usize];
            // It has decoded all of its tokens except one that came with its prompt.
            let decoded = job.output - u32::from(job.first_at.is_none());
            self.context -= (job.prompt + decoded) as usize;
            self.close(&job);
            out.push(Token { id: job.id, is_first: false, is_last: true });
        }
        self.trim();
    }
}

impl Replica for Coarse<'_> {
    fn submit(&mut self, now: f64, job: Job, tally: &mut Tally) -> Option<f64> {
        let was_empty = self.waiting.is_empty();
        self.waiting.push_back(job);
        match self.phase {
            Phase::Idle => self.begin(now, tally),
            Phase::Step { end, .. } => Some(end),
            Phase::Leap { start, end, steps } => {
                if !was_empty {
                    return Some(end);
                }
                // The leap ends with the step that is under way: the first that does not end before now.
                let (mut least, mut most) = (1, steps);
                while least < most {
                    let middle = (least + most) / 2;
                    if start + self.leap_seconds(middle) < now { least = middle + 1 } else { most = middle }
                }
                let end = start + self.leap_seconds(least);
                self.phase = Phase::Leap { start, end, steps: least };
                Some(end)
            }
        }
    }

    fn wake(&mut self, now: f64, tally: &mut Tally, out: &mut Vec<Token>) -> Option<f64> {
        match self.phase {
            Phase::Idle => {}
            Phase::Leap { start, end, steps } => {
                self.busy += end - start;
                tally.intervals.add((end - start) / steps as f64, (steps * self.ends.len()) as u64);
                self.advance(steps, out);
            }
            Phase::Step { start, end, decoding } => {
                self.busy += end - start;
                if decoding > 0 {
                    tally.intervals.add(end - start, decoding as u64);
                }
                for first_at in self.received.drain(..) {
                    tally.intervals.add(end - first_at, 1);
                    tally.handovers.add(end - first_at, 1);
                }
                self.advance(1, out);
                while let Some(&Prefill { job, done }) = self.prefilling.front()
                    && done == job.prompt as usize
                {
                    self.prefilling.pop_front();
                    let is_last = job.output == 1;
                    out.push(Token { id: job.id, is_first: true, is_last });
                    if is_last {
                        self.close(&job);
                    } else {
                        self.decode(job, u64::from(job.output) - 1);
                    }
                }
            }
        }
        self.begin(now, tally)
    }

    fn cached(&self, job: &Job) -> u32 {
        let app = if self.users(job) > 0 { Some(job.system) } else { self.cache.get(app_key(job)) };
        let app = if job.system == 0 { 0 } else { app.unwrap_or(0) };
        let own = if app < job.system { 0 } else { self.cache.get(job.conversation).unwrap_or(0) };
        // The last token of a prompt is always computed.
        let blocks = (app + own).min(job.prompt - 1) / BLOCK as u32;
        blocks * BLOCK as u32
    }

    fn busy(&self) -> f64 {
        self.busy
    }
}
