//! The ranges of the parameters.

use std::sync::Arc;

use sampling::SamplingParams;

#[test]
fn a_value_outside_its_range_is_refused_by_name() {
    let ok = SamplingParams::default;
    let cases: Vec<(&str, SamplingParams)> = vec![
        ("temperature", SamplingParams { temperature: -0.1, ..ok() }),
        ("temperature", SamplingParams { temperature: 2.1, ..ok() }),
        ("temperature", SamplingParams { temperature: f32::NAN, ..ok() }),
        ("top_p", SamplingParams { top_p: 0.0, ..ok() }),
        ("top_p", SamplingParams { top_p: 1.1, ..ok() }),
        ("min_p", SamplingParams { min_p: -0.1, ..ok() }),
        ("min_p", SamplingParams { min_p: f32::INFINITY, ..ok() }),
        ("typical_p", SamplingParams { typical_p: Some(0.0), ..ok() }),
        ("repetition_penalty", SamplingParams { repetition_penalty: 0.0, ..ok() }),
        ("repetition_penalty", SamplingParams { repetition_penalty: f32::INFINITY, ..ok() }),
        ("presence_penalty", SamplingParams { presence_penalty: 2.1, ..ok() }),
        ("frequency_penalty", SamplingParams { frequency_penalty: f32::NAN, ..ok() }),
        ("logit_bias", SamplingParams { logit_bias: vec![(3, 1.0), (7, -101.0)], ..ok() }),
        ("allowed_token_ids", SamplingParams { allowed_token_ids: Some(Arc::default()), ..ok() }),
        ("bad_words", SamplingParams { bad_words: [vec![1], vec![]].into(), ..ok() }),
    ];
    for (param, params) in cases {
        let error = params.validate().unwrap_err();
        assert_eq!(error.param, param);
        let line = error.to_string();
        assert!(line.starts_with(param) && !line.contains('\n'), "{line}");
    }
}

#[test]
fn the_bounds_of_the_ranges_are_accepted() {
    let params = SamplingParams {
        temperature: 2.0,
        top_p: 1.0,
        min_p: 1.0,
        typical_p: Some(1.0),
        repetition_penalty: 0.01,
        presence_penalty: -2.0,
        frequency_penalty: 2.0,
        logit_bias: vec![(0, 100.0), (1, -100.0)],
        allowed_token_ids: Some([0].into()),
        bad_words: [vec![1]].into(),
        logprobs: Some(200_000),
        ..SamplingParams::default()
    };
    assert_eq!(params.validate(), Ok(()));
    let greedy = SamplingParams { temperature: 0.0, ..params };
    assert_eq!(greedy.validate(), Ok(()));
}
