#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod plain;

use common::cases::{CASES, folder, prompts};
use engine::{EngineConfig, Event, GenerationParams, GenerationRequest, Llm, ModelSource, Quantization, SamplingParams};
use plain::Notes;

/// The log-probability of every token of the vocabulary, sorted by token.
type Scores = Vec<(u32, f32)>;

/// A text, and where the part of it begins that is drawn too.
struct Text {
    ids: Vec<u32>,
    drawn_from: usize,
}

struct Subject {
    name: String,
    model: ModelSource,
    texts: Vec<Text>,
}

impl Subject {
    fn case(case: &str) -> Subject {
        let texts = prompts(case).into_iter().map(|p| Text { ids: [&p.ids[..], &p.greedy].concat(), drawn_from: p.ids.len() });
        Subject { name: case.into(), model: ModelSource::Folder(folder(case)), texts: texts.collect() }
    }

    fn demo() -> Subject {
        let llm = Llm::new(EngineConfig::default()).unwrap();
        let texts = include_str!("../held_out.jsonl").lines().map(|line| serde_json::from_str::<String>(line).unwrap());
        let ids: Vec<u32> = texts.take(100).flat_map(|text| llm.tokenizer().encode(&text, false).unwrap()).collect();
        let texts = ids.chunks_exact(256).take(2).map(|ids| Text { ids: ids.to_vec(), drawn_from: 224 });
        Subject { name: "demo".into(), model: ModelSource::Demo, texts: texts.collect() }
    }

    fn llm(&self, form: Quantization, linear: &str) -> Llm {
        let mut config = EngineConfig {
            model: self.model.clone(),
            quantization: Some(form),
            kv_cache_memory_bytes: Some(16 << 20),
            threads: Some(1),
            ..Default::default()
        };
        config.kernels.linear = linear.into();
        Llm::new(config).unwrap()
    }

    /// [`Scores`] at every place but the first of each text.
    fn scores(&self, form: Quantization, linear: &str) -> Vec<Scores> {
        let request = |text: &Text| GenerationRequest {
            prompt: text.ids.clone(),
            params: GenerationParams { prompt_logprobs: Some(1 << 16), max_tokens: Some(0), ..Default::default() },
            ..Default::default()
        };
        let done = self.llm(form, linear).run_with_events(self.texts.iter().map(request).collect()).unwrap();
        let rows = done.into_iter().flat_map(|(_, events)| events).filter_map(|event| match event {
            Event::PromptLogprobs(scores) => Some(scores),
            _ => None,
        });
        let sorted = |mut top: Scores| {
            top.sort_unstable_by_key(|(token, _)| *token);
            top
        };
        rows.flatten().flatten().map(|score| sorted(score.top)).collect()
    }

    fn drawn(&self, form: Quantization) -> Vec<Option<u32>> {
        let params = GenerationParams {
            sampling: SamplingParams { temperature: 0.0, ..Default::default() },
            max_tokens: Some(1),
            ignore_eos: true,
            ..Default::default()
        };
        let mut llm = self.llm(form, "auto");
        let mut drawn = Vec::new();
        for text in &self.texts {
            drawn.extend((1..text.drawn_from).map(|_| None));
            let request = |end: usize| GenerationRequest { prompt: text.ids[..end].to_vec(), params: params.clone(), ..Default::default() };
            let done = llm.run((text.drawn_from..text.ids.len()).map(request).collect()).unwrap();
            drawn.extend(done.into_iter().map(|c| Some(c.outputs[0].token_ids[0])));
        }
        drawn
    }
}

/// One place of the text.
struct Place {
    off: f64,
    margin: f64,
    best: u32,
    ours: u32,
    drawn: Option<u32>,
}

fn best(scores: &Scores) -> (u32, f32) {
    *scores.iter().max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0))).unwrap()
}

fn places(ours: &[Scores], plain: &[Scores], drawn: &[Option<u32>]) -> Vec<Place> {
    assert!(ours.len() == plain.len() && ours.len() == drawn.len());
    let place = |((ours, plain), drawn): ((&Scores, &Scores), &Option<u32>)| {
        assert!(ours.len() > 500 && ours.iter().map(|s| s.0).eq(plain.iter().map(|s| s.0)));
        let off = ours.iter().zip(plain).map(|(a, b)| f64::from((a.1 - b.1).abs())).fold(0.0, f64::max);
        let (token, most) = best(plain);
        let second = plain.iter().filter(|s| s.0 != token).map(|s| s.1).fold(f32::MIN, f32::max);
        Place { off, margin: f64::from(most - second), best: token, ours: best(ours).0, drawn: *drawn }
    };
    ours.iter().zip(plain).zip(drawn).map(place).collect()
}

fn quantile(places: &[Place], q: f64) -> f64 {
    let mut offs: Vec<f64> = places.iter().map(|p| p.off).collect();
    offs.sort_by(f64::total_cmp);
    offs[((offs.len() - 1) as f64 * q).round() as usize]
}

#[test]
fn measure() {
    for subject in CASES.into_iter().map(Subject::case).chain([Subject::demo()]) {
        for form in [Quantization::Q8, Quantization::Q4] {
            let t = std::time::Instant::now();
            let ours = subject.scores(form, "auto");
            Notes::begin();
            let beside = subject.scores(form, "test.beside");
            let agreed = subject.scores(form, "test.agreed");
            let notes = Notes::end();
            assert!(ours == beside);
            let instead = subject.scores(form, "test.instead");
            let drawn = subject.drawn(form);
            println!("{} {form}: product {:.1e}, left {}, {} flips of {}, from tie {:.1e}", subject.name, notes.product_off, notes.integers.len(), notes.flips, notes.activations, notes.from_tie);
            for (what, plain) in [("agreed", &agreed), ("instead", &instead)] {
                let places = places(&ours, plain, &drawn);
                let q = |q| quantile(&places, q);
                let near = places.iter().filter(|p| p.off <= 1e-3).count();
                println!("   {what}: {} places, {near} within 1e-3, median {:.1e} p90 {:.1e} p99 {:.1e} max {:.1e}", places.len(), q(0.5), q(0.9), q(0.99), q(1.0));
                for (name, d) in [("median", q(0.5)), ("p90", q(0.9)), ("max", q(1.0))] {
                    let sure: Vec<&Place> = places.iter().filter(|p| p.margin > 2.0 * d).collect();
                    let wrong = sure.iter().filter(|p| p.ours != p.best || p.drawn.is_some_and(|d| d != p.best)).count();
                    println!("      margin > 2 {name}: {} places, {wrong} wrong", sure.len());
                }
                let differ = places.iter().filter(|p| p.ours != p.best).count();
                let drawn_ours = places.iter().filter(|p| p.drawn.is_some_and(|d| d != p.ours)).count();
                println!("      {differ} tokens differ, drawn unlike scored {drawn_ours}");
            }
            println!("   {:?}", t.elapsed());
        }
    }
}
