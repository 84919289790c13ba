//! `1_Pooling/config.json`.

use crate::common::{Copy, Opened};
use models::Pooling;

#[test]
fn the_checkpoint_decides_and_the_last_token_is_the_default() {
    assert_eq!(Pooling::load(&Copy::of("llama").files()).unwrap(), Some(Pooling::Last));
    let load = |text: &str| Pooling::load(&Copy::of("llama").write("1_Pooling/config.json", text).files());
    for (text, expected) in [
        (r#"{"word_embedding_dimension": 8, "pooling_mode_lasttoken": true}"#, Some(Pooling::Last)),
        (r#"{"pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true}"#, Some(Pooling::Mean)),
        (r#"{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}"#, None),
        (r#"{"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": true}"#, None),
    ] {
        assert_eq!(load(text).unwrap(), expected, "{text}");
    }
    assert!(load("{").is_err());
}
