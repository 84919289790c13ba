//! Prompts and output lengths of the requests.
//!
//! | source | prompt | maximum output |
//! |---|---|---|
//! | `random` | words from a fixed list, or token ids below `--random-vocab-size` | `--random-output-len` tokens |
//! | ShareGPT-like (`conversations`, `messages` or `prompt` in each record) | the first turn | one token per four characters of the second turn |
//! | workload (`requests` with `prompt` and `output_len`) | its token ids | its `output_len` |

use serde_json::Value;

use super::{Endpoint, ServeBenchArgs};
use crate::Error;
use crate::random::Random;

/// Words that are one token in most tokenizers.
const WORDS: [&str; 24] = [
    "the", "of", "and", "to", "in", "is", "that", "for", "on", "with", "as", "was", "at", "by", "from", "one", "had",
    "not", "but", "what", "all", "were", "when", "we",
];

/// Approximate number of characters per token of English text, to estimate answers in conversations: only the server has the tokenizer.
const CHARACTERS_PER_TOKEN: usize = 4;

/// The prompt of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

/// A request to send.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// The prompt.
    pub prompt: Prompt,
    /// Length of the prompt in tokens, or in words if the tokens are not known.
    pub length: usize,
    /// Maximum number of output tokens.
    pub output: usize,
}

/// Reads or generates the requests that the flags describe.
///
/// # Errors
/// The file cannot be read, has no requests, or has token ids for a chat.
pub fn read(args: &ServeBenchArgs) -> Result<Vec<Question>, Error> {
    let problem = |message: String| Error::Failed(format!("--dataset {}: {message}", args.dataset));
    let questions = if args.dataset == "random" {
        random(args)
    } else {
        let text = std::fs::read_to_string(&args.dataset).map_err(|error| problem(error.to_string()))?;
        let (all, is_workload) = parse(&text, args.random_output_len).map_err(problem)?;
        // Start again from the beginning as often as needed.
        let count = args.num_prompts.unwrap_or(if is_workload { all.len() } else { all.len().min(100) });
        all.into_iter().cycle().take(count).collect()
    };
    if questions.is_empty() {
        return Err(problem("found no requests, expected at least one: check the file and --num-prompts".to_string()));
    }
    if args.endpoint == Endpoint::Chat && questions.iter().any(|question| matches!(question.prompt, Prompt::Tokens(_)))
    {
        return Err(problem("found token ids, expected texts for a chat; use --endpoint completions".to_string()));
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

/// Parses a file, and returns whether it is a workload. Records without text are skipped.
fn parse(text: &str, default_output: usize) -> Result<(Vec<Question>, bool), String> {
    let (whole, is_workload) = match serde_json::from_str(text) {
        Ok(Value::Object(mut file)) => (file.remove("requests"), true),
        other => (other.ok(), false),
    };
    let (records, is_workload) = match whole {
        Some(Value::Array(records)) => (records, is_workload),
        _ => {
            let line = |(index, line): (usize, &str)| {
                serde_json::from_str(line).map_err(|error| format!("line {}: {error}", index + 1))
            };
            let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(line);
            (lines.collect::<Result<_, _>>()?, false)
        }
    };
    Ok((records.iter().filter_map(|record| question(record, default_output)).collect(), is_workload))
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
    let written = answered.map(|text| (text.chars().count() / CHARACTERS_PER_TOKEN).max(1));
    let output = given.map(|n| n as usize).or(written).unwrap_or(default_output);
    Some(Question { length: asked.split_whitespace().count(), prompt: Prompt::Text(asked), output })
}
