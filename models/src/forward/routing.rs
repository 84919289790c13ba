//! The choice of experts by a router on a CPU.

use simd::Pool;

use crate::decoder::{Experts, Groups, MAX_EXPERT_GROUPS, MAX_EXPERTS, Routing, Scores};

/// An expert that computes a row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Choice {
    pub row: u32,
    pub expert: u32,
    pub weight: f32,
}

/// The experts of each row of a step, and the rows of each expert.
#[derive(Default)]
pub(super) struct Choices {
    /// `[rows, top_k]`, later sorted by expert.
    by_row: Vec<Choice>,
    sorted: Vec<Choice>,
    /// Ends of the experts in `sorted`.
    ends: Vec<usize>,
}

/// Rough cost of an expert's score in multiply-adds.
const SCORE_COST: usize = 64;

impl Choices {
    /// Chooses the experts of all rows. `scores` holds rows of router logits, `[rows, router.rows()]`; the logits of the experts
    /// become their scores. `vectors`: [`Routing::choice_bias`] and [`Routing::expert_scale`].
    pub fn choose(
        &mut self,
        pool: &Pool,
        experts: &Experts,
        scores: &mut [f32],
        [bias, scale]: [Option<&[f32]>; 2],
        rows: usize,
    ) {
        let (count, stride, routing) = (experts.experts.len(), experts.router.rows(), &experts.routing);
        self.by_row.clear();
        self.by_row.resize(rows * routing.top_k, Choice::default());
        let (choices, scores) = ((&mut self.by_row[..], routing.top_k), (&mut scores[..rows * stride], stride));
        pool.zip_chunks_mut(choices, scores, count * SCORE_COST, |row, choices, scores| {
            choose(routing, &mut scores[..count], bias, choices);
            for choice in choices {
                choice.row = row as u32;
                choice.weight *= scale.map_or(1.0, |scale| scale[choice.expert as usize]);
            }
        });
        self.ends.clear();
        self.ends.resize(count, 0);
        self.by_row.iter().for_each(|choice| self.ends[choice.expert as usize] += 1);
        let mut at = 0;
        for end in &mut self.ends {
            // First the start of each expert; it becomes the end below.
            (*end, at) = (at, at + *end);
        }
        self.sorted.resize(self.by_row.len(), Choice::default());
        for choice in &self.by_row {
            let place = &mut self.ends[choice.expert as usize];
            self.sorted[*place] = *choice;
            *place += 1;
        }
    }

    /// The rows of each expert that has any, by ascending expert.
    pub fn by_expert(&self) -> impl Iterator<Item = (usize, &[Choice])> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        let ranges = starts.zip(&self.ends).enumerate();
        ranges.map(|(expert, (start, end))| (expert, &self.sorted[start..*end])).filter(|(_, rows)| !rows.is_empty())
    }
}

/// A set of numbers below [`MAX_EXPERTS`].
struct Set([u64; MAX_EXPERTS / 64]);

impl Set {
    fn insert(&mut self, number: usize) {
        self.0[number / 64] |= 1 << (number % 64);
    }

    fn contains(&self, number: usize) -> bool {
        self.0[number / 64] >> (number % 64) & 1 == 1
    }
}

/// Chooses the experts of one row from its logits, which become scores. Of equal scores the first wins.
pub(super) fn choose(routing: &Routing, scores: &mut [f32], bias: Option<&[f32]>, choices: &mut [Choice]) {
    to_scores(routing.scores, scores);
    let score = |expert: usize| scores[expert] + bias.map_or(0.0, |bias| bias[expert]);
    let mut taken = Set([0; MAX_EXPERTS / 64]);
    if let Some(groups) = routing.groups {
        exclude_groups(groups, scores.len(), &score, &mut taken);
    }
    for choice in choices.iter_mut() {
        let left = || (0..scores.len()).filter(|expert| !taken.contains(*expert));
        let best = first_best(left(), score).unwrap_or(0);
        let weight = match routing.scores {
            Scores::SparseMixer { threshold } => {
                let greatest = scores[best];
                let is_far = |x: f32| (greatest - x) / x.abs().max(greatest) > threshold;
                1.0 / left().map(|i| scores[i]).filter(|x| !is_far(*x)).map(|x| (x - greatest).exp()).sum::<f32>()
            }
            _ => scores[best],
        };
        taken.insert(best);
        (choice.expert, choice.weight) = (best as u32, weight);
    }
    let divisor = match routing.scores {
        Scores::Logits => {
            let greatest = choices.iter().fold(f32::NEG_INFINITY, |greatest, choice| greatest.max(choice.weight));
            choices.iter_mut().for_each(|choice| choice.weight = (choice.weight - greatest).exp());
            choices.iter().map(|choice| choice.weight).sum()
        }
        _ if routing.renormalise => choices.iter().map(|choice| choice.weight).sum::<f32>() + 1e-20,
        _ => 1.0,
    };
    choices.iter_mut().for_each(|choice| choice.weight = choice.weight / divisor * routing.scale);
}

fn to_scores(scores: Scores, logits: &mut [f32]) {
    match scores {
        Scores::Logits | Scores::SparseMixer { .. } => {}
        Scores::Sigmoid => logits.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp())),
        Scores::Softmax => {
            let greatest = logits.iter().fold(f32::NEG_INFINITY, |greatest, x| greatest.max(*x));
            logits.iter_mut().for_each(|x| *x = (*x - greatest).exp());
            let sum: f32 = logits.iter().sum();
            logits.iter_mut().for_each(|x| *x /= sum);
        }
    }
}

/// Inserts the experts of all groups but the best into `taken`.
fn exclude_groups(groups: Groups, count: usize, score: &impl Fn(usize) -> f32, taken: &mut Set) {
    let size = count / groups.count;
    let mut ranks = [0.0; MAX_EXPERT_GROUPS];
    for (group, rank) in ranks[..groups.count].iter_mut().enumerate() {
        let members = || group * size..(group + 1) * size;
        let best = first_best(members(), score).unwrap_or(0);
        let second = first_best(members().filter(|expert| *expert != best), score).filter(|_| groups.by_two);
        *rank = score(best) + second.map_or(0.0, score);
    }
    let mut kept = Set([0; MAX_EXPERTS / 64]);
    for _ in 0..groups.top {
        let best = first_best((0..groups.count).filter(|group| !kept.contains(*group)), |group| ranks[group]);
        kept.insert(best.unwrap_or(0));
    }
    (0..count).filter(|expert| !kept.contains(expert / size)).for_each(|expert| taken.insert(expert));
}

/// The first number with the greatest score.
fn first_best(numbers: impl Iterator<Item = usize>, score: impl Fn(usize) -> f32) -> Option<usize> {
    let scored = numbers.map(|number| (number, score(number)));
    scored.reduce(|best, next| if next.1 > best.1 { next } else { best }).map(|best| best.0)
}
