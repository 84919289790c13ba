//! The bytes that tokens represent, in both spellings of a vocabulary.

use serde_json::json;
use text::Tokenizer;

use crate::checkpoints::Copy;

/// A tokenizer with some tokens added to its vocabulary.
fn with_tokens(case: &str, tokens: &[&str]) -> Tokenizer {
    let copy = Copy::of(case).edit("tokenizer.json", |json| {
        let vocab = json["model"]["vocab"].as_object_mut().unwrap();
        for (i, token) in tokens.iter().enumerate() {
            vocab.insert((*token).to_string(), json!(10_000 + i));
        }
    });
    Tokenizer::load(copy.folder()).unwrap()
}

fn bytes_of(tokenizer: &Tokenizer, token: &str) -> Vec<u8> {
    tokenizer.token_bytes(tokenizer.token_to_id(token).unwrap())
}

#[test]
fn the_byte_level_alphabet_represents_every_byte_once() {
    let tokenizer = with_tokens("qwen2", &["世", "a世"]);
    let single = |id: u32| tokenizer.id_to_token(id).is_some_and(|token| token.chars().count() == 1);
    let mut bytes: Vec<u8> = (0..600).filter(|id| single(*id)).flat_map(|id| tokenizer.token_bytes(id)).collect();
    bytes.sort_unstable();
    assert_eq!(bytes, (0..=0xFF).collect::<Vec<u8>>());
    assert_eq!((bytes_of(&tokenizer, "Ġ"), bytes_of(&tokenizer, "Ċ")), (b" ".to_vec(), b"\n".to_vec()));
    // A token with a character outside the alphabet represents itself.
    for token in ["世", "a世"] {
        assert_eq!(bytes_of(&tokenizer, token), token.as_bytes());
    }
}

#[test]
fn a_byte_fallback_token_has_exactly_two_digits() {
    let others = ["<0x>", "<0x0>", "<0x00A>", "<0xGG>", "0x0A", "<0xé>"];
    let tokenizer = with_tokens("llama", &[&others[..], &["<0xff>"]].concat());
    assert_eq!((bytes_of(&tokenizer, "<0x0A>"), bytes_of(&tokenizer, "<0xff>")), (vec![b'\n'], vec![0xFF]));
    for other in others {
        assert_eq!(bytes_of(&tokenizer, other), other.as_bytes(), "{other}");
    }
}
