//! `quire chat`: a conversation in the terminal.
//!
//! In a terminal, Ctrl-C stops the answer, and otherwise ends the program. What the model writes cannot control the terminal.

use std::io::{self, BufRead, IsTerminal, Write};
use std::sync::Arc;

use engine::{EngineConfig, Event, GenerationParams, GenerationRequest};
use serde_json::{Map, Value, json};
use text::{ChatInput, ChatTemplate};
use tokio::runtime::Runtime;
use tokio::sync::watch;

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
    note(format_args!("  chat template: {}", template.origin()));
    let params = session::params(&args.sampling, Some(engine.generation_defaults()));
    let phase = watch::Sender::new(Phase::Prompt);
    let mut conversation =
        Conversation { runtime: session::runtime()?, engine, template, params, messages: Vec::new(), phase };
    conversation.messages.extend(args.system.map(|text| json!({"role": "system", "content": text})));
    let (input, mut output) = (io::stdin().lock(), io::stdout().lock());
    let interactive = io::stdin().is_terminal();
    if interactive {
        note(HELP);
        conversation.runtime.spawn(interrupt(conversation.phase.clone()));
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
            "/clear" => conversation.clear(),
            command if is_command(command) => note(HELP),
            text if interactive && text.contains(char::is_control) => {
                note("arrows and other keys have no meaning here: not sent")
            }
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

const HELP: &str = "/clear begins a new conversation, /exit or Ctrl-D ends the program, Ctrl-C stops an answer";

/// Whether a line is a word that begins with a slash.
fn is_command(line: &str) -> bool {
    line.strip_prefix('/').is_some_and(|name| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphabetic()))
}

/// What Ctrl-C would interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Prompt,
    Answer,
    /// An answer that was interrupted.
    Stopped,
}

/// Stops the answer at each Ctrl-C, and ends the program if there is none.
async fn interrupt(phase: watch::Sender<Phase>) {
    while tokio::signal::ctrl_c().await.is_ok() {
        let stops = phase.send_if_modified(|phase| {
            let is_answer = *phase == Phase::Answer;
            if is_answer {
                *phase = Phase::Stopped;
            }
            is_answer
        });
        if !stops {
            std::process::exit(130);
        }
    }
}

/// Text without what controls a terminal.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() || "\n\t".contains(*c)).collect()
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
    phase: watch::Sender<Phase>,
}

impl Conversation {
    /// Writes the answer to `text` as it is generated, and adds both to the conversation.
    fn answer(&mut self, text: &str, output: &mut (impl Write + IsTerminal)) -> Result<(), CliError> {
        self.messages.push(json!({"role": "user", "content": text}));
        let prompt = self.prompt()?;
        let request = GenerationRequest { prompt, params: self.params.clone(), ..Default::default() };
        let mut events = self.runtime.block_on(self.engine.submit(request))?;
        let (mut answer, is_terminal) = (String::new(), output.is_terminal());
        self.phase.send_replace(Phase::Answer);
        let mut phase = self.phase.subscribe();
        loop {
            let next = self.runtime.block_on(async {
                tokio::select! {
                    event = events.next() => event.map(Some).ok_or_else(session::broken_off),
                    _ = phase.wait_for(|phase| *phase == Phase::Stopped) => Ok(None),
                }
            });
            let is_last = match next? {
                Some(Event::Delta(delta)) => {
                    let text = if is_terminal { shown(&delta.text) } else { delta.text.clone() };
                    output.write_all(text.as_bytes())?;
                    output.flush()?;
                    answer.push_str(&delta.text);
                    session::finish_reason(&delta)?.is_some()
                }
                Some(_) => false,
                // Dropping the events cancels the request.
                None => true,
            };
            if is_last {
                self.phase.send_replace(Phase::Prompt);
                writeln!(output)?;
                self.messages.push(json!({"role": "assistant", "content": answer}));
                return Ok(());
            }
        }
    }

    /// Forgets all messages but that of the system.
    fn clear(&mut self) {
        self.messages.retain(|message| message["role"] == "system");
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
