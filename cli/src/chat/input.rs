//! The messages of a user: edited lines of a terminal, or the lines of standard input.
//!
//! A line that ends with a backslash goes on in the next one, and what stands between two `"""` may have any number of lines.

use std::io::{self, BufRead, IsTerminal, Write};

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use crate::error::CliError;

/// Begins and ends a message of several lines.
const QUOTES: &str = "\"\"\"";

/// Where messages come from.
pub enum Input {
    /// A terminal, with a history of this conversation.
    Editor(Box<DefaultEditor>),
    Lines {
        lines: io::Lines<io::StdinLock<'static>>,
        /// A person types them.
        is_terminal: bool,
    },
}

/// What was read.
#[derive(Debug, PartialEq, Eq)]
pub enum Message {
    Text(String),
    /// The input ended.
    End,
    /// Ctrl-C at the prompt.
    Interrupted,
}

impl Input {
    pub fn open() -> Input {
        let is_terminal = io::stdin().is_terminal();
        // Without a terminal for its output an editor would write its prompts into the answers.
        let editor = (is_terminal && io::stdout().is_terminal()).then(DefaultEditor::new);
        match editor {
            Some(Ok(editor)) => Input::Editor(Box::new(editor)),
            _ => Input::Lines { lines: io::stdin().lock().lines(), is_terminal },
        }
    }

    /// Whether a person types.
    pub fn is_terminal(&self) -> bool {
        match self {
            Input::Editor(_) => true,
            Input::Lines { is_terminal, .. } => *is_terminal,
        }
    }

    /// Reads the next message.
    pub fn message(&mut self) -> Result<Message, CliError> {
        let mut stopped = None;
        let text = join(|prompt| -> Result<_, CliError> {
            match self.line(prompt)? {
                Message::Text(line) => Ok(Some(line)),
                end => {
                    stopped = Some(end);
                    Ok(None)
                }
            }
        })?;
        match (text, stopped) {
            // A message that the end of the input cuts is sent.
            (Some(text), None | Some(Message::End)) => {
                if let Input::Editor(editor) = self {
                    // Only a full memory could refuse it.
                    let _ = editor.add_history_entry(&text);
                }
                Ok(Message::Text(text))
            }
            (_, Some(stopped)) => Ok(stopped),
            (None, None) => Ok(Message::End),
        }
    }

    fn line(&mut self, prompt: &str) -> Result<Message, CliError> {
        match self {
            Input::Editor(editor) => match editor.readline(prompt) {
                Ok(line) => Ok(Message::Text(line)),
                Err(ReadlineError::Eof) => Ok(Message::End),
                Err(ReadlineError::Interrupted) => Ok(Message::Interrupted),
                Err(ReadlineError::Io(error)) => Err(error.into()),
                Err(error) => Err(CliError::failed(error)),
            },
            Input::Lines { lines, is_terminal } => {
                if *is_terminal {
                    write!(io::stderr(), "{prompt}")?;
                }
                let unreadable = |error: io::Error| match error.kind() {
                    io::ErrorKind::InvalidData => CliError::NotUtf8,
                    _ => error.into(),
                };
                let line = lines.next().transpose().map_err(unreadable)?;
                Ok(line.map_or(Message::End, Message::Text))
            }
        }
    }
}

/// Joins the lines of a message. `next` returns the next line, after a prompt.
fn join<E>(mut next: impl FnMut(&str) -> Result<Option<String>, E>) -> Result<Option<String>, E> {
    let Some(mut text) = next("> ")? else { return Ok(None) };
    if let Some(begun) = text.trim_start().strip_prefix(QUOTES).map(str::to_string) {
        text = begun;
        while !text.trim_end().ends_with(QUOTES) {
            let Some(line) = next(". ")? else { return Ok(Some(text)) };
            text = text + "\n" + &line;
        }
        let end = text.trim_end().len() - QUOTES.len();
        text.truncate(end);
        return Ok(Some(text.trim_matches('\n').to_string()));
    }
    while text.ends_with('\\') {
        text.pop();
        text.push('\n');
        match next(". ")? {
            Some(line) => text += &line,
            None => break,
        }
    }
    Ok(Some(text))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn joined(lines: &[&str]) -> (Option<String>, usize) {
        let mut left = lines.iter();
        let text = join(|_| Ok::<_, Infallible>(left.next().map(ToString::to_string))).unwrap_or_default();
        (text, left.len())
    }

    #[test]
    fn backslashes_and_quotes_join_the_lines_of_a_message() {
        for (lines, expected, left) in [
            (&["a", "b"][..], Some("a"), 1),
            (&["a\\", "b\\", "c", "d"], Some("a\nb\nc"), 1),
            (&["a\\"], Some("a\n"), 0),
            (&["\"\"\"a", "", "b\"\"\"", "c"], Some("a\n\nb"), 1),
            (&["\"\"\"", "a \\", "\"\"\"  ", "c"], Some("a \\"), 1),
            (&["\"\"\"a\"\"\"", "c"], Some("a"), 1),
            (&["\"\"\"a", "b"], Some("a\nb"), 0),
            (&["say \"\"\"", "c"], Some("say \"\"\""), 1),
            (&[], None, 0),
        ] {
            assert_eq!(joined(lines), (expected.map(str::to_string), left), "{lines:?}");
        }
    }
}
