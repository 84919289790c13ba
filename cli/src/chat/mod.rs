//! `quire chat`: a conversation in the terminal.
//!
//! In a terminal, Ctrl-C stops the answer, and otherwise ends the program. What the model writes cannot control the terminal. The model
//! gets no tools, and its reasoning is shown but not part of the conversation.

mod input;

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;

use engine::{EngineConfig, Event, GenerationParams, GenerationRequest};
use serde_json::{Map, Value, json};
use text::{ChatInput, ChatTemplate, ReasoningFormat, ReasoningParser, Thought};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use super::command::ChatArgs;
use super::error::CliError;
use super::{note, session};
use input::{Input, Message};

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
    let reasoning = ReasoningFormat::of(&template).map_or(ReasoningFormat::Off, |(format, _)| format);
    let phase = watch::Sender::new(Phase::Prompt);
    let runtime = session::runtime()?;
    let mut conversation = Conversation { runtime, engine, template, params, reasoning, messages: Vec::new(), phase };
    conversation.set_system(&args.system.unwrap_or_default());
    let (mut input, mut output) = (Input::open(), io::stdout());
    let interactive = input.is_terminal();
    if interactive {
        // From here on, also before the task first runs, a signal waits for it.
        let signals = conversation.runtime.block_on(async { signal(SignalKind::interrupt()) })?;
        conversation.runtime.spawn(interrupt(signals, conversation.phase.clone()));
        note(HINT);
    }
    loop {
        let text = match input.message()? {
            Message::Text(text) => text,
            Message::Interrupted => std::process::exit(INTERRUPTED),
            Message::End => {
                if interactive {
                    note("");
                }
                return Ok(());
            }
        };
        match Command::of(text.trim()) {
            None if text.trim().is_empty() => {}
            Some(Command::Exit) => return Ok(()),
            Some(Command::Clear) => conversation.clear(),
            Some(Command::System(text)) => conversation.set_system(text),
            Some(Command::Save(path)) => match conversation.save(Path::new(path)) {
                Ok(()) => note(format_args!("saved {path}")),
                Err(error) => note(format_args!("/save {path}: {error}; expected a file that does not exist yet")),
            },
            Some(Command::Help) => note(HELP),
            None if interactive && text.contains(|c: char| c.is_control() && !"\n\t".contains(c)) => {
                note("arrows and other keys have no meaning here: not sent")
            }
            None => {
                // The answer begins with the key that sends the message.
                conversation.phase.send_replace(Phase::Answer);
                let answered = conversation.answer(text.trim(), &mut output);
                conversation.phase.send_replace(Phase::Prompt);
                match answered {
                    // The message does not fit; continue without it.
                    Err(CliError::Refused(error)) => {
                        note(error);
                        conversation.messages.pop();
                    }
                    other => other?,
                }
            }
        }
    }
}

const HINT: &str = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the program";

const HELP: &str = "\
/clear        begins a new conversation, with the same system message
/system TEXT  sets the system message; without a text, removes it
/save FILE    writes the messages as JSON, as a chat request has them
/exit         ends the program, as Ctrl-D does
A line that ends with \\ goes on in the next one. \"\"\" begins and ends a message of several lines.
The arrows edit the line and bring earlier messages back. Ctrl-C stops an answer, and at the prompt ends the program.";

/// Code of a program that Ctrl-C has ended.
const INTERRUPTED: i32 = 130;

/// A line that is not sent to the model.
#[derive(Debug, PartialEq, Eq)]
enum Command<'a> {
    Clear,
    System(&'a str),
    Save(&'a str),
    Exit,
    Help,
}

impl Command<'_> {
    /// A line that begins with a command, or is a word that begins with a slash, which may have been meant as one.
    fn of(line: &str) -> Option<Command<'_>> {
        let (word, rest) = line.split_once(char::is_whitespace).map_or((line, ""), |(word, rest)| (word, rest.trim()));
        let is_word =
            word.strip_prefix('/').is_some_and(|name| !name.is_empty() && name.chars().all(char::is_alphabetic));
        match (word, rest) {
            ("/clear", "") => Some(Command::Clear),
            ("/exit" | "/quit" | "/bye", "") => Some(Command::Exit),
            ("/system", text) => Some(Command::System(text)),
            ("/save", path) if !path.is_empty() => Some(Command::Save(path)),
            (_, "") if is_word => Some(Command::Help),
            _ => None,
        }
    }
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
async fn interrupt(mut signals: Signal, phase: watch::Sender<Phase>) {
    while signals.recv().await.is_some() {
        let stops = phase.send_if_modified(|phase| {
            let is_answer = *phase == Phase::Answer;
            if is_answer {
                *phase = Phase::Stopped;
            }
            is_answer
        });
        if !stops {
            std::process::exit(INTERRUPTED);
        }
    }
}

/// Text without what controls a terminal.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() || "\n\t".contains(*c)).collect()
}

/// Writes pieces of an answer: on a terminal without what controls it, and reasoning dimmed; elsewhere the answer alone.
struct Screen<'a, W> {
    output: &'a mut W,
    is_terminal: bool,
    has_colours: bool,
    /// The last text was reasoning.
    thinks: bool,
}

impl<W: Write> Screen<'_, W> {
    fn write(&mut self, thought: &Thought) -> io::Result<()> {
        if self.is_terminal && !thought.reasoning.is_empty() {
            let text = shown(&thought.reasoning);
            match self.has_colours {
                true => write!(self.output, "\x1b[2m{text}\x1b[22m")?,
                false => write!(self.output, "{text}")?,
            }
            self.thinks = true;
        }
        if self.thinks && !thought.content.is_empty() {
            self.output.write_all(b"\n\n")?;
            self.thinks = false;
        }
        let text = if self.is_terminal { shown(&thought.content) } else { thought.content.clone() };
        self.output.write_all(text.as_bytes())?;
        self.output.flush()
    }
}

struct Conversation {
    runtime: Runtime,
    engine: session::Running,
    template: Arc<ChatTemplate>,
    params: GenerationParams,
    reasoning: ReasoningFormat,
    messages: Vec<Value>,
    phase: watch::Sender<Phase>,
}

impl Conversation {
    /// Writes the answer to `text` as it is generated, and adds both to the conversation. Reasoning is not part of it.
    fn answer(&mut self, text: &str, output: &mut (impl Write + IsTerminal)) -> Result<(), CliError> {
        self.messages.push(json!({"role": "user", "content": text}));
        let (prompt, ids) = self.prompt()?;
        let mut params = self.params.clone();
        let mut reasoning = self.reasoning.parser(&prompt);
        // There are no tools, so nothing is a call.
        reasoning.iter_mut().for_each(ReasoningParser::ignore_calls);
        params.reasoning.clone_from(&reasoning);
        if self.reasoning.has_special_marker(self.engine.tokenizer()) {
            params.skip_special_tokens = false;
        }
        let request = GenerationRequest { prompt: ids, params, ..Default::default() };
        let mut events = self.runtime.block_on(self.engine.submit(request))?;
        let is_terminal = output.is_terminal();
        let has_colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let mut screen = Screen { output, is_terminal, has_colours, thinks: false };
        let mut answer = String::new();
        let mut phase = self.phase.subscribe();
        loop {
            let next = self.runtime.block_on(async {
                tokio::select! {
                    event = events.next() => event.map(Some).ok_or_else(session::broken_off),
                    _ = phase.wait_for(|phase| *phase == Phase::Stopped) => Ok(None),
                }
            });
            let (text, is_last) = match next? {
                Some(Event::Delta(delta)) => {
                    let is_last = session::finish_reason(&delta)?.is_some();
                    (delta.text, is_last)
                }
                Some(_) => continue,
                // Dropping the events cancels the request.
                None => (String::new(), true),
            };
            let mut thoughts = match &mut reasoning {
                Some(parser) => vec![parser.push(&text)],
                None => vec![Thought { content: text.to_string(), ..Thought::default() }],
            };
            thoughts.extend(reasoning.as_mut().filter(|_| is_last).map(ReasoningParser::finish));
            for thought in &thoughts {
                screen.write(thought)?;
                answer.push_str(&thought.content);
            }
            if is_last {
                writeln!(screen.output)?;
                self.messages.push(json!({"role": "assistant", "content": answer}));
                return Ok(());
            }
        }
    }

    /// Puts a system message in place of the one that there is. An empty one removes it.
    fn set_system(&mut self, text: &str) {
        self.messages.retain(|message| message["role"] != "system");
        if !text.is_empty() {
            self.messages.insert(0, json!({"role": "system", "content": text}));
        }
    }

    /// Writes the messages to a new file.
    fn save(&self, path: &Path) -> io::Result<()> {
        let mut file = std::fs::File::create_new(path)?;
        let text = json!({"model": self.engine.info().name, "messages": self.messages});
        writeln!(file, "{text:#}")
    }

    /// Forgets all messages but that of the system.
    fn clear(&mut self) {
        self.messages.retain(|message| message["role"] == "system");
    }

    /// The conversation as text and as token ids. While it leaves no space for an answer, its oldest turn is dropped. A system message is never
    /// dropped.
    fn prompt(&mut self) -> Result<(String, Vec<u32>), CliError> {
        let context = self.engine.info().max_model_len;
        let answer = self.params.max_tokens.unwrap_or(context / 4).clamp(1, context / 2 + 1);
        loop {
            let (text, ids) = self.render()?;
            let system = usize::from(self.messages[0]["role"] == "system");
            if ids.len() + answer <= context || self.messages.len() <= system + 2 {
                return Ok((text, ids));
            }
            // The user's message and its answer.
            self.messages.drain(system..system + 2);
            note("(the conversation exceeds the context length: its oldest turn was dropped)");
        }
    }

    fn render(&self) -> Result<(String, Vec<u32>), CliError> {
        let input = ChatInput {
            messages: &self.messages,
            tools: None,
            add_generation_prompt: true,
            continue_final_message: false,
            kwargs: &Map::new(),
        };
        let text = self.template.render(&input).map_err(CliError::failed)?;
        let ids = self.engine.tokenizer().encode(&text, false).map_err(CliError::failed)?;
        Ok((text, ids))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_command_only_if_it_is_one() {
        for (line, expected) in [
            ("/clear", Some(Command::Clear)),
            ("/exit", Some(Command::Exit)),
            ("/system", Some(Command::System(""))),
            ("/system  Be brief. ", Some(Command::System("Be brief."))),
            ("/save a b.json", Some(Command::Save("a b.json"))),
            ("/save", Some(Command::Help)),
            ("/help", Some(Command::Help)),
            ("/unknown", Some(Command::Help)),
            ("/clear the table", None),
            ("/etc/passwd", None),
            ("/", None),
            ("1/2", None),
        ] {
            assert_eq!(Command::of(line), expected, "{line}");
        }
    }

    #[test]
    fn reasoning_is_dimmed_on_a_terminal_and_absent_elsewhere() {
        let thought = Thought { reasoning: "Hm\x1b[1m.".to_string(), content: "Paris\x07".to_string() };
        for (is_terminal, has_colours, expected) in [
            (true, true, "\x1b[2mHm[1m.\x1b[22m\n\nParis"),
            (true, false, "Hm[1m.\n\nParis"),
            (false, false, "Paris\x07"),
        ] {
            let mut output = Vec::new();
            Screen { output: &mut output, is_terminal, has_colours, thinks: false }.write(&thought).unwrap_or_default();
            assert_eq!(String::from_utf8_lossy(&output), expected);
        }
    }
}
