//! Conversations that arrive at a fleet: a day's rate, shared system prompts, several turns.
//!
//! All lengths of a conversation depend on the seed and its number only, so every policy gets the same work. The time of
//! a later turn depends on when the answer before it ended.
//!
//! The shape follows public descriptions of production traces: many conversations with log-normal lengths and prompts that
//! are several times longer than answers (the Azure traces of Patel et al. 2024, "Splitwise"), and a rate that rises and
//! falls with the day and is bursty (Wang et al. 2024, "BurstGPT"). No number is taken from them.

use super::super::random::Random;
use super::super::trace::Arrival;

/// The shape of the traffic.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Length of a day in seconds.
    pub day: f64,
    /// New conversations per second, as a mean over the day.
    pub rate: f64,
    /// The rate follows `1 - swing * cos(2 pi t / day)`.
    pub swing: f64,
    /// In each of 144 parts of the day the rate is multiplied by a factor of `1 - noise` to `1 + noise`.
    pub noise: f64,
    /// Number of system prompts. The k-th is as popular as `1 / k`.
    pub apps: usize,
    /// Means of log-normal lengths in tokens.
    pub system: f64,
    pub question: f64,
    pub answer: f64,
    /// Mean of the geometric number of turns.
    pub turns: f64,
    /// Mean of the exponential time between an answer and the next question in seconds.
    pub think: f64,
    pub max_model_len: usize,
    pub seed: u64,
}

impl Shape {
    /// A chat service. Every number is an assumption.
    pub fn chat(day: f64, rate: f64, max_model_len: usize, seed: u64) -> Shape {
        Shape {
            day,
            rate,
            swing: 0.6,
            noise: 0.2,
            apps: 64,
            system: 1500.0,
            question: 300.0,
            answer: 400.0,
            turns: 4.0,
            think: 30.0,
            max_model_len,
            seed,
        }
    }

    /// Generates the conversations of a day, in order of arrival.
    pub fn conversations(&self) -> Traffic<'_> {
        let mut random = Random(self.seed);
        let systems = (0..self.apps).map(|_| random.log_normal(self.system, self.longest()) as u32).collect();
        let mut sum = 0.0;
        let popularity = (1..=self.apps).map(|k| (sum += 1.0 / k as f64, sum).1).collect();
        let noise = (0..144).map(|_| 1.0 + self.noise * (2.0 * random.unit() - 1.0)).collect();
        Traffic { shape: self, random, systems, popularity, noise, at: 0.0, number: 0 }
    }

    /// Greatest length of a system prompt, a question or an answer: a first turn always fits.
    fn longest(&self) -> usize {
        self.max_model_len / 4
    }
}

/// A conversation and its next turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// Time of its first turn.
    pub at: f64,
    pub number: u64,
    /// Its system prompt and the length of that.
    pub app: u32,
    pub system: u32,
    /// Number of tokens of the next turn's prompt, and how many tokens it asks for.
    pub prompt: u32,
    pub output: u32,
    /// Whether there is no other turn after it.
    is_last: bool,
    random: Random,
}

impl Conversation {
    /// A conversation of one turn without a system prompt.
    pub fn single(number: u64, arrival: Arrival) -> Conversation {
        let (prompt, output) = (arrival.prompt as u32, arrival.output as u32);
        let random = Random(number);
        Conversation { at: arrival.at, number, app: 0, system: 0, prompt, output, is_last: true, random }
    }

    /// Moves on to the next turn, and returns the seconds until it. `None` if the conversation has ended or its context
    /// is full.
    pub fn advance(&mut self, shape: &Shape) -> Option<f64> {
        if self.is_last || self.random.unit() <= 1.0 / shape.turns {
            return None;
        }
        self.prompt += self.output;
        self.draw(shape);
        let fits = (self.prompt + self.output) as usize <= shape.max_model_len;
        fits.then(|| shape.think * self.random.exponential())
    }

    fn draw(&mut self, shape: &Shape) {
        self.prompt += self.random.log_normal(shape.question, shape.longest()) as u32;
        self.output = self.random.log_normal(shape.answer, shape.longest()) as u32;
    }
}

/// The conversations of a day: a Poisson process whose rate changes, by thinning (Lewis and Shedler 1979).
pub struct Traffic<'a> {
    shape: &'a Shape,
    random: Random,
    systems: Vec<u32>,
    /// Sums of the weights.
    popularity: Vec<f64>,
    noise: Vec<f64>,
    at: f64,
    number: u64,
}

impl Iterator for Traffic<'_> {
    type Item = Conversation;

    fn next(&mut self) -> Option<Conversation> {
        let shape = self.shape;
        let most = shape.rate * (1.0 + shape.swing) * (1.0 + shape.noise);
        loop {
            self.at += self.random.exponential() / most;
            let part = self.at / shape.day;
            if part >= 1.0 {
                return None;
            }
            let wave = 1.0 - shape.swing * (std::f64::consts::TAU * part).cos();
            let rate = shape.rate * wave * self.noise[(part * self.noise.len() as f64) as usize];
            if self.random.unit() * most <= rate {
                break;
            }
        }
        let sum = self.popularity.last().copied().unwrap_or(0.0);
        let drawn = self.random.unit() * sum;
        let app = self.popularity.partition_point(|sum| *sum < drawn);
        let system = self.systems.get(app).copied().unwrap_or(0);
        self.number += 1;
        // The next number of a generator is a hash of its state, so different numbers give different streams.
        let random = Random(Random(shape.seed ^ self.number).next());
        let (at, number) = (self.at, self.number);
        let app = app as u32;
        let mut it = Conversation { at, number, app, system, prompt: system, output: 0, is_last: false, random };
        it.draw(shape);
        Some(it)
    }
}
