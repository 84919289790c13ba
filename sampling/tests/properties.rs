//! The sampler, checked against a naive float64 model that sorts the whole row.

use crate::rows::rows;
use proptest::prelude::*;
use sampling::{Context, Sampler, SamplingParams, gumbel_noise, token_logprobs};

/// A cut closer to its boundary than this can go either way in float32.
const UNDECIDED: f64 = 1e-4;

/// The model's result for a row.
struct Model {
    /// Logit / temperature of the kept tokens in float64; at temperature 0 the chosen token.
    kept: Vec<(u32, f64)>,
    /// Whether a cut was closer to its boundary than [`UNDECIDED`].
    undecided: bool,
}

/// Probabilities of `kept`, in the same order.
fn softmax(kept: &[(u32, f64)]) -> Vec<f64> {
    let largest = kept.iter().map(|k| k.1).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = kept.iter().map(|k| (k.1 - largest).exp()).collect();
    let mass: f64 = weights.iter().sum();
    weights.iter().map(|w| w / mass).collect()
}

fn model(logits: &[f32], params: &SamplingParams, context: &Context<'_>) -> Model {
    let mut row: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
    for (token, logit) in row.iter_mut().enumerate() {
        let token = token as u32;
        let in_output = context.output.iter().filter(|&&t| t == token).count();
        let banned = params.allowed_token_ids.as_ref().is_some_and(|allowed| !allowed.contains(&token))
            || params
                .bad_words
                .iter()
                .any(|word| word[word.len() - 1] == token && context.output.ends_with(&word[..word.len() - 1]))
            || (context.output.len() < params.min_tokens && context.stop_ids.contains(&token));
        if banned {
            *logit = f64::NEG_INFINITY;
        }
        *logit += params.logit_bias.iter().filter(|b| b.0 == token).map(|b| f64::from(b.1)).sum::<f64>();
        if in_output > 0 || context.prompt.contains(&token) {
            let penalty = f64::from(params.repetition_penalty);
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
        if in_output > 0 {
            *logit -= f64::from(params.frequency_penalty) * in_output as f64;
            *logit -= f64::from(params.presence_penalty);
        }
    }
    let mut kept: Vec<(u32, f64)> = (0..).zip(row).filter(|&(_, logit)| logit > f64::NEG_INFINITY).collect();
    let descending = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    kept.sort_by(descending);
    if params.temperature == 0.0 {
        // Undecided if float32 arithmetic could make the best two equal or swap them.
        let undecided = kept.windows(2).take(1).any(|two| two[0].1 != two[1].1 && two[0].1 - two[1].1 < UNDECIDED);
        kept.truncate(1);
        return Model { kept, undecided };
    }
    kept.iter_mut().for_each(|k| k.1 /= f64::from(params.temperature));

    let mut undecided = false;
    if params.min_p > 0.0 {
        let largest = softmax(&kept).first().copied().unwrap_or(0.0);
        let mut p = softmax(&kept).into_iter();
        kept.retain(|_| {
            let ratio = p.next().unwrap() / largest;
            undecided |= (ratio - f64::from(params.min_p)).abs() < UNDECIDED && ratio < 1.0;
            ratio >= f64::from(params.min_p)
        });
    }
    if params.top_k > 0 && (params.top_k as usize) < kept.len() {
        let last = kept[params.top_k as usize - 1].1;
        undecided |= kept.iter().any(|k| k.1 != last && (k.1 - last).abs() < UNDECIDED);
        kept.retain(|k| k.1 >= last);
    }
    if params.top_p < 1.0 {
        let mut before = 0.0;
        let mut p = softmax(&kept).into_iter();
        kept.retain(|_| {
            let keep = before < f64::from(params.top_p);
            undecided |= (before - f64::from(params.top_p)).abs() < UNDECIDED;
            before += p.next().unwrap();
            keep
        });
    }
    if let Some(typical_p) = params.typical_p.filter(|&p| p < 1.0) {
        let p = softmax(&kept);
        let entropy: f64 = -p.iter().filter(|&&p| p > 0.0).map(|p| p * p.ln()).sum::<f64>();
        let mut by_distance: Vec<(f64, f64)> = p.iter().map(|&p| ((-p.ln() - entropy).abs(), p)).collect();
        by_distance.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (mut sum, mut reach) = (0.0, 0.0);
        for &(distance, p) in &by_distance {
            undecided |= (sum - f64::from(typical_p)).abs() < UNDECIDED;
            if sum >= f64::from(typical_p) {
                break;
            }
            (sum, reach) = (sum + p, distance);
        }
        // Equal logits have equal distances. Others this close are undecided.
        undecided |= by_distance.iter().any(|d| (d.0 - reach).abs() < UNDECIDED && (d.0 - reach).abs() > 1e-12);
        let mut distances = p.iter().map(|&p| (-p.ln() - entropy).abs());
        kept.retain(|_| distances.next().unwrap() <= reach + 1e-12);
    }
    Model { kept, undecided }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn probabilities_equal_a_plain_float64_model(row in rows()) {
        let model = model(&row.logits, &row.params, &row.context(0));
        prop_assume!(!model.undecided && !model.kept.is_empty());
        let mut wanted = vec![0.0; row.logits.len()];
        for (&(token, _), p) in model.kept.iter().zip(softmax(&model.kept)) {
            wanted[token as usize] = p;
        }
        let found = Sampler::new().probabilities(&row.logits, &row.params, &row.context(0));
        prop_assert_eq!(found.len(), wanted.len());
        for (token, (&found, &wanted)) in found.iter().zip(&wanted).enumerate() {
            prop_assert!((f64::from(found) - wanted).abs() < 1e-5, "token {token}: {found}, not {wanted}");
        }
    }

    #[test]
    fn the_draw_is_the_argmax_of_logit_plus_noise_over_the_kept_tokens(row in rows(), seed: u64) {
        let model = model(&row.logits, &row.params, &row.context(seed));
        prop_assume!(!model.undecided && !model.kept.is_empty());
        let at = row.output.len() as u32;
        let mut sums: Vec<(f64, u32)> =
            model.kept.iter().map(|&(token, logit)| (logit + gumbel_noise(seed, at, 0, token), token)).collect();
        sums.sort_by(|a, b| b.0.total_cmp(&a.0));
        prop_assume!(sums.len() < 2 || sums[0].0 - sums[1].0 > UNDECIDED);
        let drawn = Sampler::new().sample(&row.logits, &row.params, &row.context(seed));
        prop_assert_eq!(drawn.token, sums[0].1);
    }

    #[test]
    fn a_used_sampler_draws_like_a_new_one(rows in prop::collection::vec(rows(), 1..6), seed: u64) {
        let mut used = Sampler::new();
        for row in &rows {
            let context = row.context(seed);
            let fresh = Sampler::new().sample(&row.logits, &row.params, &context);
            prop_assert_eq!(used.sample(&row.logits, &row.params, &context), fresh);
        }
    }

    #[test]
    fn no_row_causes_a_panic(
        logits in prop::collection::vec(
            prop_oneof![
                Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY), Just(f32::MAX), Just(f32::MIN), -9.0f32..9.0,
            ],
            0..40,
        ),
        mut row in rows(),
    ) {
        row.logits = logits;
        row.params.logprobs = Some(5);
        let mut sampler = Sampler::new();
        let sampled = sampler.sample(&row.logits, &row.params, &row.context(3));
        prop_assert!((sampled.token as usize) < row.logits.len().max(1));
        prop_assert!(!sampled.logprob.unwrap().logprob.is_nan());
        let sum: f32 = sampler.probabilities(&row.logits, &row.params, &row.context(3)).iter().sum();
        prop_assert!((sum - 1.0).abs() < 1e-4 || row.logits.is_empty());
        let likeliest = sampler.likeliest(&row.logits, &row.params, &row.context(3), 4);
        prop_assert!((1..=4).contains(&likeliest.len()));
        prop_assert!(likeliest.iter().all(|likely| likely.logprob <= 0.0), "{likeliest:?}");
        // A possible token is drawn if the parameters leave one.
        let plain = sampler.sample(&row.logits, &SamplingParams::default(), &row.context(3));
        if row.logits.iter().any(|&x| x > f32::NEG_INFINITY) {
            prop_assert!(row.logits[plain.token as usize] > f32::NEG_INFINITY);
        }
    }

    #[test]
    fn the_likeliest_tokens_follow_the_adjusted_row_and_ignore_filters(row in rows(), k in 0usize..40) {
        let plain = SamplingParams { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, typical_p: None, ..row.params.clone() };
        let model = model(&row.logits, &plain, &row.context(0));
        prop_assume!(!model.kept.is_empty());
        let params = SamplingParams { logprobs: Some(2), ..row.params.clone() };
        let found = Sampler::new().likeliest(&row.logits, &params, &row.context(7), k);
        prop_assert_eq!(found.len(), k.min(model.kept.len()));
        prop_assert!(found.is_sorted_by(|a, b| (-a.logprob, a.sampled.token) < (-b.logprob, b.sampled.token)));
        let wanted: Vec<f64> = softmax(&model.kept).into_iter().map(f64::ln).collect();
        let worst = found.last().map_or(0.0, |likely| f64::from(likely.logprob));
        for (&(token, _), &wanted) in model.kept.iter().zip(&wanted) {
            match found.iter().find(|likely| likely.sampled.token == token) {
                Some(likely) => prop_assert!((f64::from(likely.logprob) - wanted).abs() < 1e-5, "{token}: {likely:?}, not {wanted}"),
                None => prop_assert!(k == 0 || wanted <= worst + 1e-5, "{token} is missing"),
            }
        }
        for likely in found {
            prop_assert!(likely.logprob <= 0.0);
            let raw = token_logprobs(&row.logits, likely.sampled.token, 2);
            prop_assert_eq!(likely.sampled.logprob, Some(raw));
        }
    }

    #[test]
    fn log_probabilities_equal_a_plain_float64_model(row in rows(), k in 0usize..40) {
        let all: Vec<(u32, f64)> = (0..).zip(row.logits.iter().map(|&x| f64::from(x))).collect();
        prop_assume!(row.logits.iter().any(|x| x.is_finite()));
        let p = softmax(&all);
        for token in [0, row.logits.len() / 2] {
            let found = token_logprobs(&row.logits, token as u32, k);
            let wanted = p[token].ln();
            prop_assert!(f64::from(found.logprob) == wanted || (f64::from(found.logprob) - wanted).abs() < 1e-5);
            prop_assert_eq!(found.rank, 1 + p.iter().filter(|&&q| q > p[token]).count());
        }
        let mut order: Vec<u32> = (0..p.len() as u32).filter(|&t| p[t as usize] > 0.0).collect();
        order.sort_by(|&a, &b| p[b as usize].total_cmp(&p[a as usize]).then(a.cmp(&b)));
        order.truncate(k);
        let found: Vec<u32> = token_logprobs(&row.logits, 0, k).top.iter().map(|top| top.0).collect();
        prop_assert_eq!(found, order);
    }
}
