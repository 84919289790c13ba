//! Commands in a terminal: they can be left at any time, whatever a server or a model does.

use std::ffi::CStr;
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::FromRawFd;
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// Arguments of [`this_is_the_program_if_another_test_starts_it`], a line each.
const ARGUMENTS: &str = "TEST_ARGUMENTS";

/// The program with the kernels of these tests.
#[test]
fn this_is_the_program_if_another_test_starts_it() {
    if let Ok(arguments) = std::env::var(ARGUMENTS) {
        let code = ::cli::main(arguments.lines().map(Into::into));
        std::process::exit(i32::from(code != ExitCode::SUCCESS));
    }
}

/// A program in a terminal of 100 columns and 30 lines.
struct Terminal {
    child: Child,
    keys: File,
    output: Receiver<String>,
    shown: String,
}

impl Terminal {
    fn start(args: &[&str]) -> Terminal {
        let mut program = Command::new(env!("CARGO_BIN_EXE_quire"));
        program.args(args);
        Terminal::of(program)
    }

    /// A program whose steps take milliseconds.
    fn start_slow(folder: &Path, args: &[&str]) -> Terminal {
        let settings = folder.join("slow.toml");
        std::fs::write(&settings, "[kernels]\ncache_write = \"test.slow\"\n").unwrap();
        let arguments = [&["quire"], args, &["--config", settings.to_str().unwrap()]].concat();
        let mut program = Command::new(std::env::current_exe().unwrap());
        program.args(["--exact", "terminal::this_is_the_program_if_another_test_starts_it", "--nocapture"]);
        program.env(ARGUMENTS, arguments.join("\n"));
        Terminal::of(program)
    }

    fn of(mut program: Command) -> Terminal {
        // SAFETY: plain calls of the C library on a descriptor that this function owns; `name` and `size` outlive them.
        let (ours, theirs) = unsafe {
            let ours = libc::posix_openpt(libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC);
            assert!(ours >= 0 && libc::grantpt(ours) == 0 && libc::unlockpt(ours) == 0);
            let size = libc::winsize { ws_row: 30, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 };
            assert_eq!(libc::ioctl(ours, libc::TIOCSWINSZ, &size), 0);
            let mut name = [0; 64];
            assert_eq!(libc::ptsname_r(ours, name.as_mut_ptr(), name.len()), 0);
            let path = CStr::from_ptr(name.as_ptr()).to_str().unwrap();
            (File::from_raw_fd(ours), File::options().read(true).write(true).open(path).unwrap())
        };
        let child = program
            .stdin(theirs.try_clone().unwrap())
            .stdout(theirs.try_clone().unwrap())
            .stderr(theirs)
            .spawn()
            .unwrap();
        let (mut reader, (sender, output)) = (ours.try_clone().unwrap(), channel());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // The last read fails: the program has closed its side.
            while let Ok(count) = reader.read(&mut bytes) {
                if sender.send(String::from_utf8_lossy(&bytes[..count]).into_owned()).is_err() {
                    return;
                }
            }
        });
        Terminal { child, keys: ours, output, shown: String::new() }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until the program shows a text that it has not shown since the last call. Returns what it shows before that.
    fn until(&mut self, text: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.shown.find(text) {
                let behind = self.shown.split_off(at + text.len());
                return std::mem::replace(&mut self.shown, behind);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(more) => self.shown += &more,
                Err(why) => panic!("no {text:?} in {:?}: {why}, status {:?}", self.shown, self.child.try_wait()),
            }
        }
    }

    fn end(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the program goes on: {:?}", self.shown);
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn top_can_be_left_while_the_server_does_not_answer() {
    // The system accepts connections for it; nobody reads them.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    for key in ["q", "\x03", "\x1b"] {
        let mut top = Terminal::start(&["top", &url]);
        top.until("press q to quit");
        top.press(key);
        assert!(top.end().success(), "{key:?}");
    }
    let mut top = Terminal::start(&["top", &url]);
    top.until("found no whole answer within 5 s");
    top.press("q");
    assert!(top.end().success());
}

#[test]
fn ctrl_c_stops_the_answer_of_a_chat_and_at_its_prompt_ends_it() {
    let folder = tempfile::tempdir().unwrap();
    let engine = ["--threads", "1", "--kv-cache-memory-bytes", "16M", "--dtype", "float32"];
    // More than 15 s: the answer is not over before the signal comes.
    let answer = ["--max-tokens", "900", "--ignore-eos", "--temperature", "0"];
    let mut chat = Terminal::start_slow(folder.path(), &[&["chat"], &engine[..], &answer].concat());
    let interrupt = |chat: &Terminal| {
        // SAFETY: a signal to a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(chat.child.id() as i32, libc::SIGINT) }, 0);
    };
    chat.until("> ");
    chat.press("What is the capital of France?\r");
    chat.until("Paris");
    interrupt(&chat);
    let rest = chat.until("> ");
    assert!(rest.len() < 1000, "the whole answer: {rest}");
    chat.press("/help\r");
    chat.until("/save FILE");
    chat.until("> ");
    // The last line comes back.
    chat.press("\x1b[A\r");
    chat.until("/save FILE");
    chat.until("> ");
    chat.press("/clear\r");
    chat.until("> ");
    chat.press("half a message\x03");
    assert_eq!(chat.end().code(), Some(130));
}
