//! A fleet: replicas behind a router, under the traffic of a day.
//!
//! A run is a pure function of its setup and traffic. A replica is the real scheduler (`replica::Detailed`) or a model of
//! it (`coarse::Coarse`); the fleet does not know which.

pub mod coarse;
pub mod measure;
pub mod prefixes;
mod queue;
pub mod replica;
pub mod route;
pub mod table;
pub mod traffic;

use std::iter::Peekable;

use self::measure::Report;
use self::queue::{Event, Queue};
use self::replica::{Job, Replica, Token};
use self::route::{Router, Routing};
use self::traffic::{Conversation, Shape};
use super::cost::CostModel;

/// Defaults of the command line: seconds of a day, new conversations per minute and replica, price of a replica's hour,
/// and the fraction of a disaggregated fleet that computes prompts.
pub const DAY: f64 = 1200.0;
pub const LOAD: f64 = 90.0;
pub const PRICE: f64 = 3.0;
pub const PREFILL_SHARE: f64 = 0.3;

/// The replicas and what connects them.
#[derive(Clone, Debug)]
pub struct Setup {
    pub replicas: usize,
    pub routing: Routing,
    /// Fraction of the replicas that compute prompts, if `routing` is disaggregated.
    pub prefill_share: f64,
    /// Bytes of cache per token, and bytes per second that a prefill replica sends.
    pub kv_bytes_per_token: f64,
    pub link: f64,
    pub seed: u64,
}

impl Setup {
    /// A fleet with links of 50 GB/s, which is 400 Gbit/s for each GPU.
    pub fn new(replicas: usize, routing: Routing, cost: &CostModel, seed: u64) -> Setup {
        let kv_bytes_per_token = cost.kv_bytes_per_token;
        Setup { replicas, routing, prefill_share: PREFILL_SHARE, kv_bytes_per_token, link: 50e9, seed }
    }

    /// Number of replicas that compute prompts.
    fn prefill_replicas(&self) -> usize {
        if self.routing != Routing::Disaggregated {
            return self.replicas;
        }
        let wanted = (self.prefill_share * self.replicas as f64).round() as usize;
        wanted.clamp(1, self.replicas.saturating_sub(1).max(1))
    }

    /// Runs the fleet until every request has all of its tokens. Later turns that would begin after the day do not.
    pub fn run<R: Replica>(
        &self,
        shape: &Shape,
        traffic: impl Iterator<Item = Conversation>,
        make: impl FnMut() -> R,
    ) -> Report {
        let split = self.prefill_replicas();
        let replicas: Vec<R> = std::iter::repeat_with(make).take(self.replicas).collect();
        let mut fleet = Fleet {
            setup: self,
            shape,
            wakes: vec![None; replicas.len()],
            link_free: vec![0.0; split],
            prefill: Router::new(self.routing, 0..split, self.seed),
            decode: Router::new(Routing::TwoChoices, split..self.replicas, !self.seed),
            replicas,
            // About a thousand events.
            queue: Queue::new((100.0 / self.replicas as f64).clamp(0.01, 1.0)),
            conversations: Slab::default(),
            requests: Slab::default(),
            report: Report { replicas: self.replicas, day: shape.day, ..Report::default() },
        };
        fleet.run(traffic.peekable());
        fleet.report.busy = fleet.replicas.iter().map(R::busy).sum();
        fleet.report
    }
}

/// Values by index. Indices are used again.
struct Slab<T> {
    values: Vec<T>,
    unused: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Slab<T> {
        Slab { values: Vec::new(), unused: Vec::new() }
    }
}

impl<T> Slab<T> {
    fn insert(&mut self, value: T) -> u32 {
        if let Some(at) = self.unused.pop() {
            self.values[at as usize] = value;
            return at;
        }
        self.values.push(value);
        self.values.len() as u32 - 1
    }
}

/// A request that is not finished.
#[derive(Clone, Copy)]
struct Live {
    /// What its replica was asked for.
    job: Job,
    conversation: u32,
    replica: usize,
    /// Number of tokens it asks for.
    output: u32,
}

struct Talk {
    conversation: Conversation,
    /// The replica of the last prompt.
    home: Option<usize>,
}

struct Fleet<'a, R> {
    setup: &'a Setup,
    shape: &'a Shape,
    replicas: Vec<R>,
    /// When a replica wakes. Other wakes in the queue are outdated.
    wakes: Vec<Option<f64>>,
    /// When the link of a prefill replica is free.
    link_free: Vec<f64>,
    prefill: Router,
    decode: Router,
    queue: Queue,
    conversations: Slab<Talk>,
    requests: Slab<Live>,
    report: Report,
}

impl<R: Replica> Fleet<'_, R> {
    fn run(&mut self, mut traffic: Peekable<impl Iterator<Item = Conversation>>) {
        let mut tokens = Vec::new();
        // The next conversation is one event in the queue: the turn of a conversation that has had none.
        self.arrive(&mut traffic);
        while let Some((now, event)) = self.queue.pop() {
            match event {
                Event::Turn(conversation) => {
                    if self.conversations.values[conversation as usize].home.is_none() {
                        self.arrive(&mut traffic);
                    }
                    self.ask(now, conversation);
                }
                Event::Received(id) => {
                    let job = self.requests.values[id as usize].job;
                    let replica = self.decode.pick(&job, None, &self.replicas);
                    self.decode.add(replica, &job);
                    self.submit(now, id, replica);
                }
                Event::Wake(replica) => {
                    let at = replica as usize;
                    if self.wakes[at] != Some(now) {
                        continue;
                    }
                    let wake = self.replicas[at].wake(now, &mut self.report.tally, &mut tokens);
                    self.sleep(at, wake);
                    tokens.drain(..).for_each(|token| self.token(now, token));
                }
            }
        }
    }

    /// Takes the next conversation of the traffic.
    fn arrive(&mut self, traffic: &mut Peekable<impl Iterator<Item = Conversation>>) {
        if let Some(conversation) = traffic.next() {
            let at = conversation.at;
            let index = self.conversations.insert(Talk { conversation, home: None });
            self.queue.push(at, Event::Turn(index));
        }
    }

    /// Sends the request of a conversation's turn.
    fn ask(&mut self, now: f64, index: u32) {
        let Talk { conversation, home } = &mut self.conversations.values[index as usize];
        let &mut Conversation { number, app, system, prompt, output, .. } = conversation;
        let is_split = self.setup.routing == Routing::Disaggregated;
        let here = if is_split { 1 } else { output };
        let job = Job { id: 0, conversation: number, app, system, prompt, output: here, at: now, first_at: None };
        let replica = self.prefill.pick(&job, *home, &self.replicas);
        *home = Some(replica);
        let id = self.requests.insert(Live { job, conversation: index, replica, output });
        self.requests.values[id as usize].job.id = id;
        self.report.requests += 1;
        self.report.asked_tokens += u64::from(output);
        self.prefill.add(replica, &job);
        self.submit(now, id, replica);
    }

    fn submit(&mut self, now: f64, id: u32, replica: usize) {
        let live = &mut self.requests.values[id as usize];
        live.replica = replica;
        let wake = self.replicas[replica].submit(now, live.job, &mut self.report.tally);
        self.sleep(replica, wake);
    }

    fn sleep(&mut self, replica: usize, wake: Option<f64>) {
        if let Some(at) = wake.filter(|_| self.wakes[replica] != wake) {
            self.queue.push(at, Event::Wake(replica as u32));
        }
        self.wakes[replica] = wake;
    }

    /// A request has got its first or last token from a replica.
    fn token(&mut self, now: f64, Token { id, is_first, is_last }: Token) {
        let Live { mut job, conversation, replica, output } = self.requests.values[id as usize];
        if is_first {
            self.report.first.add(now - job.at, 1);
        }
        if !is_last {
            return;
        }
        self.report.output_tokens += u64::from(job.output);
        if job.first_at.is_some() {
            self.decode.remove(replica, &job)
        } else {
            self.prefill.remove(replica, &job)
        }
        if job.first_at.is_none() && job.output < output {
            job = Job { output: output - job.output, first_at: Some(now), ..job };
            self.requests.values[id as usize].job = job;
            let bytes = self.setup.kv_bytes_per_token * f64::from(job.prompt);
            let free = &mut self.link_free[replica];
            *free = free.max(now) + bytes / self.setup.link;
            self.queue.push(*free, Event::Received(id));
            return;
        }
        self.report.finished += 1;
        self.report.elapsed = now;
        self.requests.unused.push(id);
        let pause = self.conversations.values[conversation as usize].conversation.advance(self.shape);
        match pause.filter(|pause| now + pause < self.shape.day) {
            Some(pause) => self.queue.push(now + pause, Event::Turn(conversation)),
            None => self.conversations.unused.push(conversation),
        }
    }
}
