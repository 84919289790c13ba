//! `quire chat`: a conversation in the terminal.

use std::io::{self, BufRead, IsTerminal, Write};
use std::sync::Arc;

use engine::{AsyncEngine, ChatInput, ChatTemplate, EngineConfig, Event, GenerationParams, GenerationRequest};
use serde_json::{Map, Value, json};
use tokio::runtime::Runtime;

use super::command::ChatArgs;
use super::error::CliError;
use super::{note, session};

/// Talks until `/exit`, the end of the input, or a closed pipe.
pub fn run(args: ChatArgs, config: EngineConfig) -> Result<(), CliError> {
    session::check(&args.sampling)?;
    let source = config.model.clone();
    let engine = session::start(config)?;
    note(session::describe(&engine, &source));
    session::sampling_defaults(engine.generation_defaults()).iter().for_each(|line| note(format_args!("  {line}")));
    let Some(template) = engine.chat_template().cloned() else {
        let name = &engine.info().name;
        return Err(CliError::Generation(format!("{name} has no chat template; use `quire generate`")));
    };
    let params = session::params(&args.sampling, Some(engine.generation_defaults()));
    let mut talk = Talk { runtime: session::runtime()?, engine, template, params, messages: Vec::new() };
    talk.messages.extend(args.system.map(|text| json!({"role": "system", "content": text})));
    let (input, mut output) = (io::stdin().lock(), io::stdout().lock());
    let interactive = io::stdin().is_terminal();
    if interactive {
        note("/exit or Ctrl-D ends the conversation");
    }
    let mut lines = input.lines();
    loop {
        if interactive {
            write!(io::stderr(), "> ")?;
        }
        let Some(line) = lines.next().transpose().map_err(unreadable)? else {
            if interactive {
                note("");
            }
            return Ok(());
        };
        match line.trim() {
            "" => {}
            "/exit" => return Ok(()),
            text => match talk.answer(text, &mut output) {
                // What was said does not fit; the conversation goes on without it.
                Err(CliError::Refused(error)) => {
                    note(error);
                    talk.messages.pop();
                }
                other => other?,
            },
        }
    }
}

fn unreadable(error: io::Error) -> CliError {
    if error.kind() == io::ErrorKind::InvalidData { CliError::NotUtf8 } else { error.into() }
}

struct Talk {
    runtime: Runtime,
    engine: AsyncEngine,
    template: Arc<ChatTemplate>,
    params: GenerationParams,
    messages: Vec<Value>,
}

impl Talk {
    /// Writes the answer to `text` as it comes and remembers both.
    fn answer(&mut self, text: &str, output: &mut impl Write) -> Result<(), CliError> {
        self.messages.push(json!({"role": "user", "content": text}));
        let prompt = self.prompt()?;
        let request = GenerationRequest { prompt, params: self.params.clone(), ..Default::default() };
        let mut events = self.runtime.block_on(self.engine.submit(request))?;
        let mut answer = String::new();
        while let Some(event) = events.next_blocking() {
            let Event::Delta(delta) = event else { continue };
            output.write_all(delta.text.as_bytes())?;
            output.flush()?;
            answer.push_str(&delta.text);
            if session::finish_reason(&delta)?.is_some() {
                writeln!(output)?;
                self.messages.push(json!({"role": "assistant", "content": answer}));
                return Ok(());
            }
        }
        Err(session::broken_off())
    }

    /// The conversation as token ids. When it no longer leaves room for an answer, its oldest turns are forgotten; a
    /// system message stays.
    fn prompt(&mut self) -> Result<Vec<u32>, CliError> {
        let context = self.engine.info().max_model_len;
        let room = self.params.max_tokens.unwrap_or(context / 4).clamp(1, context / 2 + 1);
        loop {
            let ids = self.render()?;
            let system = usize::from(self.messages[0]["role"] == "system");
            if ids.len() + room <= context || self.messages.len() <= system + 2 {
                return Ok(ids);
            }
            // A user's turn and its answer.
            self.messages.drain(system..system + 2);
            note("(the conversation has outgrown the context: its oldest turn is forgotten)");
        }
    }

    fn render(&self) -> Result<Vec<u32>, CliError> {
        let input = ChatInput {
            messages: &self.messages,
            tools: None,
            add_generation_prompt: true,
            continue_final_message: false,
            kwargs: &Map::new(),
        };
        let failed = |error: &dyn std::error::Error| CliError::Generation(error.to_string());
        let text = self.template.render(&input).map_err(|error| failed(&error))?;
        self.engine.tokenizer().encode(&text, false).map_err(|error| failed(&error))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn talk(max_model_len: usize, messages: Vec<Value>) -> Talk {
        let config = EngineConfig {
            kv_cache_memory_bytes: Some(16 << 20),
            max_model_len: Some(max_model_len),
            threads: Some(1),
            ..EngineConfig::default()
        };
        let engine = AsyncEngine::start(config, &|_, _| {}).unwrap();
        let template = engine.chat_template().cloned().unwrap();
        let mut params = GenerationParams { max_tokens: Some(8), ..Default::default() };
        params.sampling.temperature = 0.0;
        Talk { runtime: session::runtime().unwrap(), engine, template, params, messages }
    }

    #[test]
    fn both_sides_of_a_conversation_are_remembered() {
        let (mut talk, mut output) = (talk(256, Vec::new()), Vec::new());
        talk.answer("What is the capital of France?", &mut output).unwrap();
        let first = String::from_utf8(output.clone()).unwrap();
        talk.answer("What is the capital of Italy?", &mut output).unwrap();
        let roles: Vec<&str> = talk.messages.iter().map(|message| message["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["user", "assistant", "user", "assistant"]);
        assert_eq!(talk.messages[1]["content"], first.trim_end_matches('\n'));
    }

    #[test]
    fn a_conversation_that_outgrows_the_context_forgets_its_oldest_turns_but_not_the_system_message() {
        let mut talk = talk(96, vec![json!({"role": "system", "content": "Answer briefly."})]);
        for i in 0..8 {
            talk.answer(&format!("What is the capital of France? ({i})"), &mut Vec::new()).unwrap();
            assert!(talk.messages.len() < 2 * 8, "turns are dropped");
        }
        assert_eq!(talk.messages[0]["role"], "system");
        assert_eq!(talk.messages[1]["role"], "user");
        assert_eq!(talk.messages[talk.messages.len() - 2]["content"], "What is the capital of France? (7)");
        assert!(talk.render().unwrap().len() <= 96);
    }
}
