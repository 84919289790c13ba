//! What is asked.
//!
//! | source | a prompt is | an answer may have |
//! |---|---|---|
//! | `random` | words drawn from a fixed list, or token ids below `--random-vocab-size` | `--random-output-len` tokens |
//! | ShareGPT-like (`conversations`, `messages` or `prompt` in each record) | the first turn | a token for four letters of the second |
//! | workload (`requests` with `prompt` and `output_len`) | its token ids | its `output_len` |

use serde_json::Value;

use super::random::Random;
use super::{Endpoint, ServeBenchArgs};
use crate::Error;

/// Words that most tokenizers have whole.
const WORDS: [&str; 24] = [
    "the", "of", "and", "to", "in", "is", "that", "for", "on", "with", "as", "was", "at", "by", "from", "one", "had",
    "not", "but", "what", "all", "were", "when", "we",
];

/// Letters of English to a token, roughly; for answers of conversations, whose tokenizer is the server's.
const LETTERS: usize = 4;

/// What a request says.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// As text.
    Text(String),
    /// As token ids.
    Tokens(Vec<u32>),
}

impl Prompt {
    /// As a message of a chat. Token ids can not be one; [`read`] has refused them.
    pub fn text(&self) -> &str {
        match self {
            Prompt::Text(text) => text,
            Prompt::Tokens(_) => "",
        }
    }
}

/// A request to be sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// What it says.
    pub prompt: Prompt,
    /// Its length as far as it is known here: tokens, or words.
    pub length: usize,
    /// Most tokens of the answer.
    pub output: usize,
}

/// The questions that the flags ask for.
pub fn read(args: &ServeBenchArgs) -> Result<Vec<Question>, Error> {
    let problem = |message: String| Error::Failed(format!("--dataset {}: {message}", args.dataset));
    let questions = if args.dataset == "random" {
        random(args)
    } else {
        let text = std::fs::read_to_string(&args.dataset).map_err(|error| problem(error.to_string()))?;
        let all = parse(&text, args.random_output_len).map_err(problem)?;
        // As often as needed, from the start again.
        let count = args.num_prompts.unwrap_or(all.len().min(if is_workload(&text) { usize::MAX } else { 100 }));
        all.into_iter().cycle().take(count).collect()
    };
    if questions.is_empty() {
        return Err(problem("no request in it, or --num-prompts is 0".to_string()));
    }
    if args.endpoint == Endpoint::Chat && questions.iter().any(|question| matches!(question.prompt, Prompt::Tokens(_)))
    {
        return Err(problem("has token ids, and a chat takes texts; use --endpoint completions".to_string()));
    }
    Ok(questions)
}

fn random(args: &ServeBenchArgs) -> Vec<Question> {
    let mut random = Random::new(args.seed);
    let length = |mean: usize, random: &mut Random| {
        let spread = (mean as f64 * args.random_range_ratio) as usize;
        random.between((mean - spread).max(1), (mean + spread).max(1))
    };
    let mut question = || {
        let (input, output) = (length(args.random_input_len, &mut random), length(args.random_output_len, &mut random));
        let prompt = match args.random_vocab_size {
            Some(vocab) => {
                Prompt::Tokens((0..input).map(|_| (random.next() % u64::from(vocab.max(1))) as u32).collect())
            }
            None => {
                let words: Vec<&str> = (0..input).map(|_| WORDS[random.between(0, WORDS.len() - 1)]).collect();
                Prompt::Text(words.join(" "))
            }
        };
        Question { prompt, length: input, output }
    };
    (0..args.num_prompts.unwrap_or(100)).map(|_| question()).collect()
}

fn is_workload(text: &str) -> bool {
    serde_json::from_str::<Value>(text).is_ok_and(|value| value["requests"].is_array())
}

/// Questions of a file; a record without any text is left out.
fn parse(text: &str, default_output: usize) -> Result<Vec<Question>, String> {
    let records: Vec<Value> = match serde_json::from_str(text) {
        Ok(Value::Array(records)) => records,
        Ok(Value::Object(mut file)) if file.get("requests").is_some_and(Value::is_array) => {
            match file.remove("requests") {
                Some(Value::Array(records)) => records,
                _ => Vec::new(),
            }
        }
        _ => {
            let line = |(index, line): (usize, &str)| {
                serde_json::from_str(line).map_err(|error| format!("line {}: {error}", index + 1))
            };
            text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(line).collect::<Result<_, _>>()?
        }
    };
    Ok(records.iter().filter_map(|record| question(record, default_output)).collect())
}

fn question(record: &Value, default_output: usize) -> Option<Question> {
    let given = ["output_len", "output_tokens", "max_tokens"].iter().find_map(|name| record[name].as_u64());
    if let Some(ids) = record["prompt"].as_array() {
        let tokens: Vec<u32> = ids.iter().map(|id| id.as_u64()?.try_into().ok()).collect::<Option<_>>()?;
        let output = given.map_or(default_output, |n| n as usize);
        return Some(Question { length: tokens.len(), prompt: Prompt::Tokens(tokens), output });
    }
    let turns = ["conversations", "conversation", "messages"].iter().find_map(|name| record[name].as_array());
    let say = |turn: &Value| ["value", "content"].iter().find_map(|name| turn[name].as_str()).map(str::to_string);
    let (asked, answered) = match turns {
        Some(turns) => {
            let is_system = |turn: &&Value| turn["role"] == "system" || turn["from"] == "system";
            let mut turns = turns.iter().skip_while(is_system);
            (say(turns.next()?)?, turns.next().and_then(say))
        }
        None => (record["prompt"].as_str()?.to_string(), record["completion"].as_str().map(str::to_string)),
    };
    let written = answered.map(|text| (text.chars().count() / LETTERS).max(1));
    let output = given.map(|n| n as usize).or(written).unwrap_or(default_output);
    Some(Question { length: asked.split_whitespace().count(), prompt: Prompt::Text(asked), output })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_form_of_file_gives_its_questions() {
        let text = |prompt: &str, length, output| Question { prompt: Prompt::Text(prompt.into()), length, output };
        let sharegpt = r#"[{"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "12345678"}]}, {"conversations": []}]"#;
        assert_eq!(parse(sharegpt, 9).unwrap(), [text("a b", 2, 2)]);
        let lines = "{\"messages\": [{\"role\": \"system\", \"content\": \"s\"}, {\"role\": \"user\", \"content\": \"q\"}]}\n\n{\"prompt\": \"p\", \"max_tokens\": 3}\n";
        assert_eq!(parse(lines, 9).unwrap(), [text("q", 1, 9), text("p", 1, 3)]);
        let workload = r#"{"name": "w", "requests": [{"id": 0, "prompt": [1, 2, 3], "output_len": 5}]}"#;
        assert_eq!(
            parse(workload, 9).unwrap(),
            [Question { prompt: Prompt::Tokens(vec![1, 2, 3]), length: 3, output: 5 }]
        );
        assert!(parse("{\"prompt\": 1}\nnothing", 9).unwrap_err().starts_with("line 2: "));
    }
}
