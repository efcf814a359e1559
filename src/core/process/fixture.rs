//! Processes for tests.

use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::Process;

const PROGRAM: &str = "
    #include <pthread.h>
    #include <unistd.h>
    static void *wait_for_a_signal(void *none) { for (;;) pause(); return none; }
    int main(void) {
        pthread_t other;
        pthread_create(&other, 0, wait_for_a_signal, 0);
        pthread_exit(0);
    }";

/// A process whose first thread has ended and whose second one waits. It is ended when this is dropped.
pub struct WithoutFirstThread {
    child: Child,
    _program: tempfile::TempDir,
}

/// Starts one. A C compiler is there, because Rust's programs are linked by it.
///
/// # Panics
/// There is none.
pub fn without_first_thread() -> WithoutFirstThread {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("without-first-thread");
    let mut compiler = Command::new("cc")
        .args(["-pthread", "-x", "c", "-", "-o"])
        .arg(&program)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    compiler.stdin.take().unwrap().write_all(PROGRAM.as_bytes()).unwrap();
    assert!(compiler.wait().unwrap().success());
    let started = WithoutFirstThread { child: Command::new(program).spawn().unwrap(), _program: dir };
    let pid = started.process().pid;
    let exe = Path::new("/proc").join(pid.to_string()).join("exe");
    // The kernel shows no program of a thread that has ended.
    while std::fs::read_link(&exe).is_ok() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    started
}

impl WithoutFirstThread {
    /// As it is now.
    ///
    /// # Panics
    /// It has been ended and waited for.
    pub fn process(&self) -> Process {
        Process::find(i32::try_from(self.child.id()).unwrap()).unwrap()
    }

    /// Ends it, and does not wait for it: it is a zombie.
    ///
    /// # Panics
    /// It cannot be ended.
    pub fn end(&mut self) {
        self.child.kill().unwrap();
    }
}

impl Drop for WithoutFirstThread {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
