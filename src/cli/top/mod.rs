//! `sublet top`: GPUs and containers, live. [`source`] looks at the host in a thread of its own, so that a driver that
//! hangs never stops the keys; [`view`] has the state, [`draw`](mod@draw) draws it. [`web`] shows it as a page. Here is
//! the terminal: keys and the mouse come in, frames go out. It is given back as it was, however the program ends.

mod draw;
#[cfg(test)]
pub mod fixture;
mod rows;
mod source;
#[cfg(test)]
mod tests;
mod view;
pub mod web;

use std::io::{self, BufWriter, IsTerminal as _, stdout};
use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::signal::{SigSet, Signal};
use ratatui::Terminal;
use ratatui::buffer::Buffer;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::event::{self, DisableMouseCapture, EnableMouseCapture, Event};
use ratatui::crossterm::terminal::{
    BeginSynchronizedUpdate, EndSynchronizedUpdate, EnterAlternateScreen, LeaveAlternateScreen,
    disable_raw_mode, enable_raw_mode,
};
use ratatui::crossterm::{execute, queue};
use ratatui::layout::Rect;

use crate::names::Of;
use crate::terminal::{colour, utf8};
use draw::{draw, draw_all};
use rows::Skin;
use source::{LookResult, watch};
use sublet_core::config::Config;
use view::{Areas, View};

/// Between the two looks of [`once`]: what GPM reports is what happened between them.
const BETWEEN: Duration = Duration::from_millis(250);

/// One frame of `width` columns as text, with all rows.
pub fn once(config: &Config, of: Of, width: u16, utf8: bool) -> Result<String, String> {
    let mut view = View { of, ..View::default() };
    let mut looks = 0;
    watch(config, BETWEEN, &mut |result| {
        view.take(result);
        looks += 1;
        looks < 2
    });
    if let Some(error) = view.error {
        return Err(error);
    }
    // Between words, a line may be broken in its middle.
    let rows_of = |warning: &String| 1 + 2 * warning.len() / usize::from(width.max(1));
    let warnings = view.look.iter().flat_map(|look| &look.status.warnings).map(rows_of).sum::<usize>();
    let rows = view.devices().len() + view.containers().len() + warnings + 24;
    let mut buffer = Buffer::empty(Rect::new(0, 0, width, u16::try_from(rows).unwrap_or(u16::MAX)));
    draw_all(&view, Skin { utf8, colour: false }, Instant::now(), &mut buffer);
    Ok(text_of(&buffer).trim_end().to_owned() + "\n")
}

/// The characters of `buffer`, without blanks at the ends of lines.
fn text_of(buffer: &Buffer) -> String {
    let width = usize::from(buffer.area.width.max(1));
    let line = |cells: &[ratatui::buffer::Cell]| {
        // The cell after a character of two columns is part of it.
        let (mut at, mut line) = (0, String::new());
        while let Some(cell) = cells.get(at) {
            line.push_str(cell.symbol());
            at += ratatui::text::Span::raw(cell.symbol()).width().max(1);
        }
        line.trim_end().to_owned() + "\n"
    };
    buffer.content.chunks(width).map(line).collect()
}

/// A frame is drawn at least this often, so that an old look is said to be old.
const OFTEN: Duration = Duration::from_secs(2);

/// More than a frame of a large terminal has, in bytes.
const FRAME: usize = 64 << 10;

/// Standard error while the screen is ours: what libraries and warnings write there would stand in the middle of it.
static STDERR: Mutex<Option<OwnedFd>> = Mutex::new(None);

/// An event for the main thread.
enum Happened {
    Looked(Box<LookResult>),
    Terminal(Event),
    /// The terminal is gone, or a signal came.
    Ended(ExitCode),
}

/// Shows a look every `interval` until somebody ends it.
pub fn run(config: &Config, of: Of, interval: Duration) -> anyhow::Result<ExitCode> {
    let (tell, happened) = mpsc::channel();
    let ends = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
    // Before any thread starts: they inherit the mask.
    ends.thread_block()?;
    let ending = tell.clone();
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        while let Ok(signal) = ends.wait() {
            // As a shell reports it.
            let code = ExitCode::from(128 + u8::try_from(signal as i32).unwrap_or_default());
            // A terminal that is gone may let nothing be written to it any more.
            let _ = ending.send(Happened::Ended(code));
        }
    })?;
    let _screen = Screen::enter().context("this terminal cannot be used")?;
    let looking = tell.clone();
    let config = config.clone();
    thread::Builder::new().name("look".to_owned()).spawn(move || {
        watch(&config, interval, &mut |result| looking.send(Happened::Looked(Box::new(result))).is_ok());
    })?;
    thread::Builder::new().name("keys".to_owned()).spawn(move || {
        while let Ok(event) = event::read() {
            if tell.send(Happened::Terminal(event)).is_err() {
                return;
            }
        }
        let _ = tell.send(Happened::Ended(ExitCode::SUCCESS));
    })?;
    show(&happened, of, interval)
}

/// Draws what happens.
fn show(happened: &Receiver<Happened>, of: Of, interval: Duration) -> anyhow::Result<ExitCode> {
    let backend = ratatui::backend::CrosstermBackend::new(BufWriter::with_capacity(FRAME, stdout()));
    let mut terminal = Terminal::new(backend)?;
    let mut view = View { of, ..View::default() };
    let skin = Skin { utf8: utf8(), colour: colour() };
    loop {
        // The terminal shows nothing of a frame before all of it is there, if it can (mode 2026).
        queue!(terminal.backend_mut(), BeginSynchronizedUpdate)?;
        let mut areas = Areas::default();
        terminal.draw(|frame| areas = draw(&view, skin, interval, Instant::now(), frame.buffer_mut()))?;
        execute!(terminal.backend_mut(), EndSynchronizedUpdate)?;
        view.areas = areas;
        // The thread that waits for signals never ends, so that somebody can always send.
        for next in happened.recv_timeout(OFTEN).into_iter().chain(happened.try_iter()) {
            match next {
                Happened::Looked(result) => view.take(*result),
                Happened::Terminal(Event::Key(key)) => {
                    if !view.key(key) {
                        return Ok(ExitCode::SUCCESS);
                    }
                }
                Happened::Terminal(Event::Mouse(mouse)) => view.mouse(mouse),
                Happened::Terminal(_) => {}
                Happened::Ended(code) => return Ok(code),
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
            rustix::stdio::dup2_stderr(std::fs::File::options().write(true).open("/dev/null")?)?;
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

/// Gives the terminal back as it was. Failures are left: the terminal is gone.
fn restore() {
    let _ = execute!(stdout(), EndSynchronizedUpdate, DisableMouseCapture, Show, LeaveAlternateScreen);
    let _ = disable_raw_mode();
    let kept = STDERR.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    if let Some(kept) = kept {
        let _ = rustix::stdio::dup2_stderr(kept);
    }
}
