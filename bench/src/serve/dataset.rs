//! Prompts and output lengths of the requests.
//!
//! | source | prompt | maximum output |
//! |---|---|---|
//! | `random` | words from a fixed list, or token ids below `--random-vocab-size` | `--random-output-len` tokens |
//! | `sonnet` (a text) | an instruction and lines of the text | `--sonnet-output-len` tokens |
//! | ShareGPT-like (`conversations`, `messages` or `prompt` in each record) | the first turn | one token per four characters of the second turn |
//! | workload (`requests` with `prompt` and `output_len`) | its token ids | its `output_len` |

use std::path::PathBuf;

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
    let named = ["sharegpt", "sonnet", "custom"].contains(&args.dataset.as_str());
    let path = match (&args.dataset_path, args.dataset.as_str()) {
        (None, "random") => None,
        (Some(_), "random") => {
            let expected = "expected sharegpt, sonnet or custom as --dataset-name with it";
            return Err(Error::Usage(format!("--dataset-path: found it with random prompts, {expected}")));
        }
        (None, name) if named => {
            return Err(Error::Usage(format!("--dataset {name}: expected --dataset-path FILE with it")));
        }
        (None, file) => Some(PathBuf::from(file)),
        (Some(path), _) if named => Some(path.clone()),
        (Some(_), other) => {
            let expected = "expected random, sharegpt, sonnet or custom";
            return Err(Error::Usage(format!("--dataset: found {other:?} with --dataset-path, {expected}")));
        }
    };
    let shown = path.as_ref().map_or(args.dataset.clone(), |path| path.display().to_string());
    let problem = |message: String| Error::Failed(format!("--dataset {shown}: {message}"));
    let questions = match path {
        None => random(args),
        Some(path) => {
            let text = std::fs::read_to_string(&path).map_err(|error| problem(error.to_string()))?;
            if args.dataset == "sonnet" {
                sonnets(args, &text).map_err(problem)?
            } else {
                let (mut all, is_workload) = parse(&text, args.random_output_len).map_err(problem)?;
                if let Some(output) = args.sharegpt_output_len {
                    all.iter_mut().for_each(|question| question.output = output);
                }
                // Start again from the beginning as often as needed.
                let count = args.num_prompts.unwrap_or(if is_workload { all.len() } else { all.len().min(100) });
                all.into_iter().cycle().take(count).collect()
            }
        }
    };
    if questions.is_empty() {
        return Err(problem("found no requests, expected at least one: check the file and --num-prompts".to_string()));
    }
    if args.api() == Endpoint::Chat && questions.iter().any(|question| matches!(question.prompt, Prompt::Tokens(_))) {
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
    let token = |random: &mut Random, vocab: u32| (random.next() % u64::from(vocab.max(1))) as u32;
    let word = |random: &mut Random| WORDS[random.between(0, WORDS.len() - 1)];
    // A prefix does not change the prompts behind it.
    let mut of_prefix = Random::new(!args.seed);
    let first = args.random_prefix_len;
    let prefix_tokens: Vec<u32> =
        (0..first).map(|_| token(&mut of_prefix, args.random_vocab_size.unwrap_or(1))).collect();
    let prefix_words: Vec<&str> = (0..first).map(|_| word(&mut of_prefix)).collect();
    let mut question = || {
        let (input, output) = (length(args.random_input_len, &mut random), length(args.random_output_len, &mut random));
        let prompt = match args.random_vocab_size {
            Some(vocab) => {
                let rest = (0..input).map(|_| token(&mut random, vocab));
                Prompt::Tokens(prefix_tokens.iter().copied().chain(rest).collect())
            }
            None => {
                let rest = (0..input).map(|_| word(&mut random));
                Prompt::Text(prefix_words.iter().copied().chain(rest).collect::<Vec<_>>().join(" "))
            }
        };
        Question { prompt, length: first + input, output }
    };
    (0..args.num_prompts.unwrap_or(100)).map(|_| question()).collect()
}

/// Prompts of lines of a text: the same first lines in each, then others in random order.
fn sonnets(args: &ServeBenchArgs, text: &str) -> Result<Vec<Question>, String> {
    const ASK: &str = "Pick as many lines as you can from these poem lines:\n";
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    if lines.is_empty() {
        return Err("found no lines, expected some".to_string());
    }
    if args.sonnet_prefix_len > args.sonnet_input_len {
        let (prefix, input) = (args.sonnet_prefix_len, args.sonnet_input_len);
        return Err(format!("found --sonnet-prefix-len {prefix}, expected at most --sonnet-input-len, {input}"));
    }
    let characters: usize = lines.iter().map(|line| line.chars().count() + 1).sum();
    let per_line = characters as f64 / lines.len() as f64 / CHARACTERS_PER_TOKEN as f64;
    let ask = ASK.len() / CHARACTERS_PER_TOKEN;
    let count = |tokens: usize| (tokens.saturating_sub(ask) as f64 / per_line).round() as usize;
    let (shared, all) = (count(args.sonnet_prefix_len), count(args.sonnet_input_len));
    let mut random = Random::new(args.seed);
    let mut question = || {
        let first = lines.iter().cycle().take(shared).copied();
        let rest: Vec<&str> = (shared..all).map(|_| lines[random.between(0, lines.len() - 1)]).collect();
        let prompt = first.chain(rest).fold(ASK.to_string(), |prompt, line| prompt + line + "\n");
        let length = prompt.chars().count() / CHARACTERS_PER_TOKEN;
        Question { prompt: Prompt::Text(prompt), length, output: args.sonnet_output_len }
    };
    Ok((0..args.num_prompts.unwrap_or(100)).map(|_| question()).collect())
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
