//! Routing policies. All of them know the true state of the replicas without delay.

use std::ops::Range;

use super::super::random::Random;
use super::replica::{Job, Replica};

/// How a fleet chooses a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// One after the other.
    RoundRobin,
    /// The one with the fewest outstanding tokens, of all.
    LeastLoaded,
    /// The same, of two drawn at random (Mitzenmacher 1996).
    TwoChoices,
    /// Three candidates: two drawn at random, and the replica of the conversation's last turn. The one with the longest cached
    /// prefix is chosen, unless it is overloaded. See [`Router::pick`].
    PrefixAware,
    /// Prefill and decode apart: a replica for the prompt, chosen as in `PrefixAware`, then one for the other tokens,
    /// chosen as in `TwoChoices`, which receives the cache.
    Disaggregated,
}

impl Routing {
    /// All policies, in the order of the tables.
    pub const ALL: [Routing; 5] =
        [Routing::RoundRobin, Routing::LeastLoaded, Routing::TwoChoices, Routing::PrefixAware, Routing::Disaggregated];

    pub fn name(self) -> &'static str {
        match self {
            Routing::RoundRobin => "round-robin",
            Routing::LeastLoaded => "least-loaded",
            Routing::TwoChoices => "two choices",
            Routing::PrefixAware => "prefix-aware",
            Routing::Disaggregated => "disaggregated",
        }
    }
}

/// Prompt tokens of unfinished requests, by replica of a range. A tree of minima finds the least in O(log replicas).
struct Loads {
    /// Root at 1, children of `k` at `2 k` and `2 k + 1`; leaves in the second half.
    tree: Vec<u64>,
}

impl Loads {
    fn new(count: usize) -> Loads {
        let leaves = count.next_power_of_two();
        let mut tree = vec![0; 2 * leaves];
        tree[leaves + count..].fill(u64::MAX);
        (1..leaves).rev().for_each(|k| tree[k] = tree[2 * k].min(tree[2 * k + 1]));
        Loads { tree }
    }

    fn get(&self, at: usize) -> u64 {
        self.tree[self.tree.len() / 2 + at]
    }

    fn set(&mut self, at: usize, load: u64) {
        let mut node = self.tree.len() / 2 + at;
        self.tree[node] = load;
        while node > 1 {
            node /= 2;
            let least = self.tree[2 * node].min(self.tree[2 * node + 1]);
            if std::mem::replace(&mut self.tree[node], least) == least {
                break;
            }
        }
    }

    /// The first with the least load.
    fn least(&self) -> usize {
        let leaves = self.tree.len() / 2;
        let mut node = 1;
        while node < leaves {
            node = 2 * node + usize::from(self.tree[2 * node] > self.tree[node]);
        }
        node - leaves
    }
}

/// Chooses among a range of replicas.
pub struct Router {
    policy: Routing,
    range: Range<usize>,
    loads: Loads,
    random: Random,
    next: usize,
}

impl Router {
    pub fn new(policy: Routing, range: Range<usize>, seed: u64) -> Router {
        let loads = Loads::new(range.len());
        Router { policy, range, loads, random: Random(seed), next: 0 }
    }

    /// Prompt tokens of unfinished requests of a replica.
    fn load(&self, replica: usize) -> u64 {
        self.loads.get(replica - self.range.start)
    }

    fn draw(&mut self) -> usize {
        self.range.start + self.random.below(self.range.len() as u64)
    }

    /// The less loaded of two replicas.
    fn less_loaded(&self, a: usize, b: usize) -> usize {
        if self.load(b) < self.load(a) { b } else { a }
    }

    /// Returns the replica for a request. `home` is that of the conversation's last turn.
    ///
    /// A prefix-aware choice leaves the replica with the longest prefix if that has more than one and a half times the
    /// tokens of the least loaded candidate, plus those that it would save.
    pub fn pick<R: Replica>(&mut self, job: &Job, home: Option<usize>, replicas: &[R]) -> usize {
        match self.policy {
            Routing::RoundRobin => {
                let replica = self.range.start + self.next;
                self.next = (self.next + 1) % self.range.len();
                replica
            }
            Routing::LeastLoaded => self.range.start + self.loads.least(),
            Routing::TwoChoices => {
                let (a, b) = (self.draw(), self.draw());
                self.less_loaded(a, b)
            }
            Routing::PrefixAware | Routing::Disaggregated => {
                let (a, b) = (self.draw(), self.draw());
                let candidates = [home.unwrap_or(a), a, b];
                let cached = candidates.map(|replica| replicas[replica].cached(job));
                let (mut longest, mut least) = (0, 0);
                for k in 1..candidates.len() {
                    let (load, other) = (self.load(candidates[k]), self.load(candidates[longest]));
                    if cached[k] > cached[longest] || cached[k] == cached[longest] && load < other {
                        longest = k;
                    }
                    if load < self.load(candidates[least]) {
                        least = k;
                    }
                }
                let saved = u64::from(cached[longest] - cached[least]);
                let limit = self.load(candidates[least]) * 3 / 2 + saved;
                candidates[if self.load(candidates[longest]) > limit { least } else { longest }]
            }
        }
    }

    /// Counts a request as outstanding.
    pub fn add(&mut self, replica: usize, job: &Job) {
        let load = self.load(replica) + u64::from(job.prompt);
        self.loads.set(replica - self.range.start, load);
    }

    /// Counts it as done.
    pub fn remove(&mut self, replica: usize, job: &Job) {
        let load = self.load(replica) - u64::from(job.prompt);
        self.loads.set(replica - self.range.start, load);
    }
}
