//! The terminal of `sublet top`: keys and the mouse come in, frames go out. It is given back as it was, however the
//! program ends.

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal as _, stdout};
use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::signal::{SigSet, Signal};
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::event::{self, DisableMouseCapture, EnableMouseCapture, Event};
use ratatui::crossterm::terminal::{
    BeginSynchronizedUpdate, EndSynchronizedUpdate, EnterAlternateScreen, LeaveAlternateScreen,
    disable_raw_mode, enable_raw_mode,
};
use ratatui::crossterm::{execute, queue};

use super::draw::draw;
use super::skin::Skin;
use super::source::{Told, watch};
use super::view::View;
use sublet_core::config::Config;

/// A frame is drawn at least this often, so that an old look is said to be old.
const OFTEN: Duration = Duration::from_secs(2);

/// More than a frame of a large terminal has, in bytes.
const FRAME: usize = 64 << 10;

/// Standard error while the screen is ours: what libraries and warnings write there would stand in the middle of it.
static STDERR: Mutex<Option<OwnedFd>> = Mutex::new(None);

/// What the main thread waits for.
enum Happened {
    Told(Box<Told>),
    Terminal(Event),
    /// The terminal is gone.
    Gone,
    Signal(Signal),
}

/// Shows a look every `interval` until somebody ends it.
pub fn run(config: &Config, interval: Duration) -> anyhow::Result<ExitCode> {
    let (tell, happened) = mpsc::channel();
    let ends = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
    // Before any thread starts: they inherit the mask.
    ends.thread_block()?;
    let ending = tell.clone();
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        while let Ok(signal) = ends.wait() {
            // A terminal that is gone may let nothing be written to it any more.
            let _ = ending.send(Happened::Signal(signal));
        }
    })?;
    let screen = Screen::enter().context("this terminal cannot be used")?;
    let looking = tell.clone();
    let config = config.clone();
    thread::Builder::new().name("look".to_owned()).spawn(move || {
        watch(&config, interval, &mut |told| looking.send(Happened::Told(Box::new(told))).is_ok());
    })?;
    thread::Builder::new().name("keys".to_owned()).spawn(move || {
        while let Ok(event) = event::read() {
            if tell.send(Happened::Terminal(event)).is_err() {
                return;
            }
        }
        let _ = tell.send(Happened::Gone);
    })?;
    let ended = show(&happened, interval);
    drop(screen);
    ended
}

/// Draws what happens.
fn show(happened: &Receiver<Happened>, interval: Duration) -> anyhow::Result<ExitCode> {
    let backend = CrosstermBackend::new(BufWriter::with_capacity(FRAME, stdout()));
    let mut terminal = Terminal::new(backend)?;
    let mut view = View::default();
    let skin = Skin::of_terminal();
    loop {
        // The terminal shows nothing of a frame before all of it is there, if it can (mode 2026).
        queue!(terminal.backend_mut(), BeginSynchronizedUpdate)?;
        let mut areas = None;
        terminal.draw(|frame| {
            areas = Some(draw(&view, skin, interval, Instant::now(), frame.buffer_mut()));
        })?;
        execute!(terminal.backend_mut(), EndSynchronizedUpdate)?;
        view.areas = areas.unwrap_or_default();
        let first = match happened.recv_timeout(OFTEN) {
            Ok(first) => Some(first),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return Ok(ExitCode::SUCCESS),
        };
        for next in first.into_iter().chain(happened.try_iter()) {
            match next {
                Happened::Told(told) => view.take(*told),
                Happened::Terminal(Event::Key(key)) => {
                    if !view.key(key) {
                        return Ok(ExitCode::SUCCESS);
                    }
                }
                Happened::Terminal(Event::Mouse(mouse)) => view.mouse(mouse),
                Happened::Terminal(_) => {}
                Happened::Gone => return Ok(ExitCode::SUCCESS),
                // As a shell reports it.
                Happened::Signal(signal) => {
                    return Ok(ExitCode::from(128 + u8::try_from(signal as i32).unwrap_or_default()));
                }
            }
        }
    }
}

/// The terminal, in raw mode, on its other screen.
struct Screen;

impl Screen {
    fn enter() -> io::Result<Self> {
        enable_raw_mode()?;
        let screen = Self;
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            before(panic);
        }));
        execute!(stdout(), EnterAlternateScreen, EnableMouseCapture, Hide)?;
        if io::stderr().is_terminal() {
            let kept = rustix::io::fcntl_dupfd_cloexec(io::stderr(), 3)?;
            rustix::stdio::dup2_stderr(File::options().write(true).open("/dev/null")?)?;
            *STDERR.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(kept);
        }
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Gives the terminal back as it was. What fails has to be left: it is gone.
fn restore() {
    let _ = execute!(stdout(), EndSynchronizedUpdate, DisableMouseCapture, Show, LeaveAlternateScreen);
    let _ = disable_raw_mode();
    let kept = STDERR.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    if let Some(kept) = kept {
        let _ = rustix::stdio::dup2_stderr(kept);
    }
}
