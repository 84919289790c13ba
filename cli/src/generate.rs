//! `quire generate`: one prompt, or a file of them.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;

use engine::{AsyncEngine, EngineConfig, Event, GenerationParams, GenerationRequest, OutputStream};
use serde_json::{Map, Value, json};

use super::command::GenerateArgs;
use super::error::CliError;
use super::progress::progress_bar;
use super::{note, session};

pub fn run(args: GenerateArgs, mut config: EngineConfig) -> Result<(), CliError> {
    session::check(&args.sampling)?;
    let prompts = match (&args.prompt, &args.input) {
        (Some(text), None) => vec![Prompt::Text(text.clone())],
        (_, Some(path)) => read_prompts(path)?,
        (None, None) => return Err(CliError::Usage("generate: expected -p TEXT or --input FILE.jsonl".into())),
    };
    args.engine.fetch(&mut config)?;
    let source = config.model.clone();
    let engine = session::start(config)?;
    note(session::describe(&engine, &source));
    engine.info().notes.iter().for_each(|line| note(format_args!("  {line}")));
    let params = session::params(&args.sampling, None);
    let runtime = session::runtime()?;
    if args.input.is_some() {
        return runtime.block_on(batch(&engine, prompts, &params));
    }
    let output = &mut io::stdout().lock();
    for prompt in prompts {
        let job = runtime.block_on(submit(&engine, prompt, &params))?;
        if args.json {
            writeln!(output, "{}", runtime.block_on(job.finish())?)?;
        } else {
            print(job.events, output)?;
        }
    }
    Ok(())
}

/// Prints the text as it is generated, and a line end.
fn print(mut events: OutputStream, output: &mut impl Write) -> Result<(), CliError> {
    while let Some(event) = events.next_blocking() {
        let Event::Delta(delta) = event else { continue };
        output.write_all(delta.text.as_bytes())?;
        output.flush()?;
        if session::finish_reason(&delta)?.is_some() {
            return Ok(writeln!(output)?);
        }
    }
    Err(session::broken_off())
}

/// Runs all prompts together, so that they share steps, and prints a record per prompt in the order of the file.
async fn batch(engine: &AsyncEngine, prompts: Vec<Prompt>, params: &GenerationParams) -> Result<(), CliError> {
    let total = prompts.len();
    let bar = progress_bar(total as u64, "{bar:32} {pos}/{len} prompts, {eta} left");
    let mut running = Vec::new();
    for prompt in prompts {
        let (bar, job) = (bar.clone(), submit(engine, prompt, params).await);
        running.push(tokio::spawn(async move {
            let record = match job {
                Ok(job) => job.finish().await,
                Err(refused) => Err(refused),
            };
            bar.inc(1);
            record
        }));
    }
    let (mut output, mut refused) = (io::BufWriter::new(io::stdout().lock()), 0);
    for (index, task) in running.into_iter().enumerate() {
        let record = task.await.map_err(CliError::failed)?;
        let mut record = record.unwrap_or_else(|error| {
            refused += 1;
            json!({"error": error.to_string()})
        });
        record["index"] = index.into();
        // Hide the bar while a record is printed, in case both go to the same terminal.
        bar.suspend(|| writeln!(output, "{record}"))?;
    }
    bar.finish_and_clear();
    output.flush()?;
    if refused > 0 {
        return Err(CliError::Failed(format!("{refused} of {total} prompts failed; their records contain the errors")));
    }
    Ok(())
}

enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

struct Job {
    text: Option<String>,
    ids: Vec<u32>,
    events: OutputStream,
}

async fn submit(engine: &AsyncEngine, prompt: Prompt, params: &GenerationParams) -> Result<Job, CliError> {
    let (text, ids) = match prompt {
        Prompt::Text(text) => {
            let ids = engine.tokenizer().encode(&text, true).map_err(CliError::failed)?;
            (Some(text), ids)
        }
        Prompt::Ids(ids) => (None, ids),
    };
    let request = GenerationRequest { prompt: ids.clone(), params: params.clone(), ..Default::default() };
    let events = engine.submit(request).await?;
    Ok(Job { text, ids, events })
}

impl Job {
    /// Waits for the end and returns the record of the prompt and its output.
    async fn finish(mut self) -> Result<Value, CliError> {
        let (mut text, mut tokens) = (String::new(), Vec::new());
        while let Some(event) = self.events.next().await {
            let Event::Delta(delta) = event else { continue };
            text.push_str(&delta.text);
            tokens.extend(delta.tokens.iter().map(|token| token.id));
            if let Some(reason) = session::finish_reason(&delta)? {
                return Ok(json!({
                    "prompt": self.text,
                    "prompt_token_ids": self.ids,
                    "text": text,
                    "token_ids": tokens,
                    "finish_reason": reason,
                }));
            }
        }
        Err(session::broken_off())
    }
}

fn read_prompts(path: &Path) -> Result<Vec<Prompt>, CliError> {
    let problem = |message: String| CliError::File { flag: "--input", path: path.to_owned(), message };
    let reader: Box<dyn Read> = if path == Path::new("-") {
        Box::new(io::stdin())
    } else {
        Box::new(std::fs::File::open(path).map_err(|error| problem(error.to_string()))?)
    };
    let mut prompts = Vec::new();
    for (i, line) in BufReader::new(reader).split(b'\n').enumerate() {
        let here = |message: String| problem(format!("line {}{message}", i + 1));
        let bytes = line.map_err(|error| here(format!(": {error}")))?;
        let text = std::str::from_utf8(&bytes).map_err(|_| here(" is not UTF-8".into()))?;
        // Some editors write a byte order mark at the beginning of a file.
        let text = if i == 0 { text.trim_start_matches('\u{feff}') } else { text };
        if !text.trim().is_empty() {
            prompts.push(parse_prompt(text).map_err(|message| here(format!(": {message}")))?);
        }
    }
    if prompts.is_empty() { Err(problem("found no prompts, expected at least one".into())) } else { Ok(prompts) }
}

fn parse_prompt(line: &str) -> Result<Prompt, String> {
    let expected = || "expected {\"prompt\": \"text\"} or {\"prompt\": [token ids]}".to_string();
    let record: Map<String, Value> = serde_json::from_str(line).map_err(|_| expected())?;
    // Sampling is set by flags for all lines, so a sampling field must not be ignored.
    if let Some(unknown) = record.keys().find(|key| *key != "prompt") {
        return Err(format!("unknown key {unknown:?}, {}", expected()));
    }
    match record.get("prompt") {
        Some(Value::String(text)) => Ok(Prompt::Text(text.clone())),
        Some(Value::Array(ids)) => {
            let ids = ids.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()));
            ids.collect::<Option<_>>().map(Prompt::Ids).ok_or_else(expected)
        }
        _ => Err(expected()),
    }
}
