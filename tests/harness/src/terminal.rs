//! A program on a terminal of its own, and what that terminal shows.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::pty::{Winsize, openpty};
use rustix::termios::{Winsize as Size, tcsetwinsize};

/// Longer than anything takes that is waited for.
const PATIENCE: Duration = Duration::from_secs(30);

/// A program on a terminal.
pub struct Terminal {
    child: Child,
    /// The other end of the terminal. While it is open, the terminal is.
    master: Option<File>,
    slave: File,
    parser: Arc<Mutex<vt100::Parser>>,
}

impl Terminal {
    /// Starts `program` on a terminal of `columns` and `rows`, which is its controlling terminal.
    ///
    /// # Panics
    /// There is no terminal to be had, or no `setsid` (util-linux).
    #[must_use]
    pub fn start(program: &Command, columns: u16, rows: u16) -> Self {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(Some(&size), None).expect("a terminal");
        let slave = File::from(pty.slave);
        let end = || Stdio::from(slave.try_clone().expect("a descriptor"));
        let mut command = Command::new("setsid");
        command.arg("--ctty").arg(program.get_program()).args(program.get_args());
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.env("TERM", "xterm-256color").stdin(end()).stdout(end()).stderr(end());
        let child = command.spawn().expect("setsid runs");
        let parser = Arc::new(Mutex::new(vt100::Parser::new(rows, columns, 0)));
        let master = File::from(pty.master);
        let (mut from, shown) = (master.try_clone().expect("a descriptor"), Arc::clone(&parser));
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                shown.lock().unwrap_or_else(PoisonError::into_inner).process(&bytes[..count]);
            }
        });
        Self { child, master: Some(master), slave, parser }
    }

    /// What it shows, a line each.
    #[must_use]
    pub fn screen(&self) -> String {
        self.parser.lock().unwrap_or_else(PoisonError::into_inner).screen().contents()
    }

    /// Whether it is on its other screen, and sends clicks.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        let parser = self.parser.lock().unwrap_or_else(PoisonError::into_inner);
        let screen = parser.screen();
        screen.alternate_screen() || screen.mouse_protocol_mode() != vt100::MouseProtocolMode::None
    }

    /// Whether what is typed is shown, as it is where no program has taken the terminal.
    ///
    /// # Panics
    /// It is no terminal any more.
    #[must_use]
    pub fn echoes(&self) -> bool {
        let modes = rustix::termios::tcgetattr(&self.slave).expect("a terminal").local_modes;
        modes.contains(rustix::termios::LocalModes::ECHO | rustix::termios::LocalModes::ICANON)
    }

    /// Types `keys`.
    ///
    /// # Panics
    /// The terminal has hung up.
    pub fn keys(&mut self, keys: &str) {
        self.master.as_mut().expect("it is open").write_all(keys.as_bytes()).expect("typed");
    }

    /// Changes its size, and tells the program.
    ///
    /// # Panics
    /// It is no terminal any more.
    pub fn resize(&self, columns: u16, rows: u16) {
        self.parser.lock().unwrap_or_else(PoisonError::into_inner).set_size(rows, columns);
        let size = Size { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(self.master.as_ref().expect("it is open"), size).expect("a terminal");
    }

    /// Waits until it shows what `wanted` asks for.
    ///
    /// # Panics
    /// It does not.
    pub fn until(&self, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        let end = Instant::now() + PATIENCE;
        loop {
            let screen = self.screen();
            if wanted(&screen) {
                return screen;
            }
            assert!(Instant::now() < end, "it never shows {what}:\n{screen}");
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// The program's pid.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the program has ended.
    ///
    /// # Panics
    /// It does not end.
    pub fn ended(&mut self) -> ExitStatus {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                // What it wrote last is still read.
                thread::sleep(Duration::from_millis(200));
                return status;
            }
            assert!(Instant::now() < end, "it does not end:\n{}", self.screen());
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
