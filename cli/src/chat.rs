//! `quire chat`: a conversation in the terminal.

use std::io::{self, BufRead, IsTerminal, Write};
use std::sync::Arc;

use engine::{ChatInput, ChatTemplate, EngineConfig, Event, GenerationParams, GenerationRequest};
use serde_json::{Map, Value, json};
use tokio::runtime::Runtime;

use super::command::ChatArgs;
use super::error::CliError;
use super::{note, session};

/// Runs the conversation until `/exit`, the end of the input, or a closed pipe.
pub fn run(args: ChatArgs, mut config: EngineConfig) -> Result<(), CliError> {
    session::check(&args.sampling)?;
    args.engine.fetch(&mut config)?;
    let source = config.model.clone();
    let engine = session::start(config)?;
    note(session::describe(&engine, &source));
    session::sampling_defaults(engine.generation_defaults()).iter().for_each(|line| note(format_args!("  {line}")));
    let Some(template) = engine.chat_template().cloned() else {
        let name = &engine.info().name;
        return Err(CliError::Failed(format!(
            "{name}: found no chat template, expected one for `quire chat`; use `quire generate`"
        )));
    };
    let params = session::params(&args.sampling, Some(engine.generation_defaults()));
    let mut conversation =
        Conversation { runtime: session::runtime()?, engine, template, params, messages: Vec::new() };
    conversation.messages.extend(args.system.map(|text| json!({"role": "system", "content": text})));
    let (input, mut output) = (io::stdin().lock(), io::stdout().lock());
    let interactive = io::stdin().is_terminal();
    if interactive {
        note("type /exit or press Ctrl-D to end the conversation");
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
            text => match conversation.answer(text, &mut output) {
                // The message does not fit; continue without it.
                Err(CliError::Refused(error)) => {
                    note(error);
                    conversation.messages.pop();
                }
                other => other?,
            },
        }
    }
}

fn unreadable(error: io::Error) -> CliError {
    if error.kind() == io::ErrorKind::InvalidData { CliError::NotUtf8 } else { error.into() }
}

struct Conversation {
    runtime: Runtime,
    engine: session::Running,
    template: Arc<ChatTemplate>,
    params: GenerationParams,
    messages: Vec<Value>,
}

impl Conversation {
    /// Writes the answer to `text` as it is generated, and adds both to the conversation.
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

    /// The conversation as token ids. While it leaves no space for an answer, its oldest turn is dropped. A system message is never
    /// dropped.
    fn prompt(&mut self) -> Result<Vec<u32>, CliError> {
        let context = self.engine.info().max_model_len;
        let answer = self.params.max_tokens.unwrap_or(context / 4).clamp(1, context / 2 + 1);
        loop {
            let ids = self.render()?;
            let system = usize::from(self.messages[0]["role"] == "system");
            if ids.len() + answer <= context || self.messages.len() <= system + 2 {
                return Ok(ids);
            }
            // The user's message and its answer.
            self.messages.drain(system..system + 2);
            note("(the conversation exceeds the context length: its oldest turn was dropped)");
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
        let text = self.template.render(&input).map_err(CliError::failed)?;
        self.engine.tokenizer().encode(&text, false).map_err(CliError::failed)
    }
}
