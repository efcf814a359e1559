//! Makes calls of NVML, and of libcuda's `cuCheckpointProcess…`, fail on demand, for tests, and records calls.
//!
//! `DIR/sim/fail`, or for one process the variable `SUBLET_SIM_FAIL`, has lines (in the variable also separated by
//! `;`):
//!
//! ```text
//! FUNCTION[@GPU] N CODE [done]
//! ```
//!
//! With `@GPU`, NVML's index, only calls for that GPU or its MIG devices count: `*@3 0 999` is a GPU that is sick for good.
//! The N-th call from now on of that function (`*`: of any function) returns the number CODE (`nvmlReturn_t`, or `CUresult`)
//! and does nothing. With `done` it does its work first, and the values written through pointers stay. With N 0 every call
//! fails. The file's lines count calls of all processes: the number in the file counts down, and a used line is
//! removed. A container has no root, so only the variable applies there. With CODE `kill` the process is killed by
//! SIGKILL instead, with `hang` the call never returns.
//!
//! If `DIR/sim/trace` exists, every call is appended to it, one function name a line.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::getpid;
use nvml_wrapper_sys::bindings::{
    nvmlReturn_enum_NVML_ERROR_UNKNOWN as UNKNOWN, nvmlReturn_enum_NVML_SUCCESS as SUCCESS, nvmlReturn_t,
};

use super::out::Answer;
use crate::layout::Root;

/// A requested failure.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Fault {
    function: String,
    /// Calls for this GPU only.
    gpu: Option<u32>,
    left: u32,
    /// The number to return. None: the process is killed, or hangs.
    code: Option<nvmlReturn_t>,
    hang: bool,
    done: bool,
}

/// The failures of the environment, read once.
static OWN: Mutex<Option<Vec<Fault>>> = Mutex::new(None);

/// The exported function that contains a closure of type `A`.
pub fn function_of<A>() -> &'static str {
    let name = std::any::type_name::<A>().trim_end_matches("::{{closure}}");
    name.rsplit("::").next().unwrap_or(name)
}

/// A call of an NVML function, for one GPU or for none.
#[derive(Clone, Copy)]
pub struct Call<'f> {
    pub function: &'f str,
    pub gpu: Option<u32>,
}

/// Calls `answer`, unless a failure is due.
pub fn around(root: Option<&Root>, call: Call<'_>, answer: impl FnOnce() -> Answer) -> Answer {
    let of_root = root.and_then(|root| {
        trace(root, call.function);
        from_file(&root.join("sim/fail"), call)
    });
    match of_root.or_else(|| from_environment(call)) {
        None => answer(),
        Some(fault) if fault.done => answer().and_then(|()| fault.answer()),
        Some(fault) => fault.answer(),
    }
}

/// The answer of a GPU that is sick for good.
pub fn sick(root: &Root, gpu: u32) -> Answer {
    let faults = parse(&fs::read_to_string(root.join("sim/fail")).unwrap_or_default());
    let of_it = |fault: &&Fault| fault.function == "*" && fault.gpu == Some(gpu);
    faults.iter().find(of_it).map_or(Ok(()), Fault::answer)
}

fn trace(root: &Root, function: &str) {
    if let Ok(mut trace) = File::options().append(true).open(root.join("sim/trace")) {
        // An error while writing the trace is ignored.
        let _ = trace.write_all(format!("{function}\n").as_bytes());
    }
}

fn from_file(file: &Path, call: Call<'_>) -> Option<Fault> {
    if !file.exists() {
        return None;
    }
    let lock = File::create(file.with_extension("lock")).ok()?;
    let _lock = Flock::lock(lock, FlockArg::LockExclusive).ok()?;
    let mut faults = parse(&fs::read_to_string(file).ok()?);
    let before = faults.clone();
    let due = count(&mut faults, call);
    if faults != before {
        fs::write(file, faults.iter().map(Fault::line).collect::<String>()).ok()?;
    }
    due
}

fn from_environment(call: Call<'_>) -> Option<Fault> {
    let mut own = OWN.lock().unwrap_or_else(PoisonError::into_inner);
    let read = || parse(&std::env::var("SUBLET_SIM_FAIL").unwrap_or_default());
    count(own.get_or_insert_with(read), call)
}

/// Counts a call and returns the failure that is due with it.
fn count(faults: &mut Vec<Fault>, call: Call<'_>) -> Option<Fault> {
    let mut due = None;
    faults.retain_mut(|fault| {
        let is_other_gpu = fault.gpu.is_some() && fault.gpu != call.gpu;
        if is_other_gpu || fault.function != "*" && fault.function != call.function {
            return true;
        }
        let every = fault.left == 0;
        fault.left = fault.left.saturating_sub(1);
        if fault.left == 0 {
            due.get_or_insert_with(|| fault.clone());
        }
        every || fault.left > 0
    });
    due
}

/// Invalid lines are ignored.
fn parse(text: &str) -> Vec<Fault> {
    text.split(['\n', ';']).filter_map(Fault::parse).collect()
}

impl Fault {
    fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (function, left, code, done) = match words[..] {
            [function, left, code] => (function, left, code, false),
            [function, left, code, "done"] => (function, left, code, true),
            _ => return None,
        };
        let hang = code == "hang";
        let code = if hang || code == "kill" { None } else { Some(code.parse().ok()?) };
        let (function, gpu) = match function.split_once('@') {
            Some((function, gpu)) => (function, Some(gpu.parse().ok()?)),
            None => (function, None),
        };
        Some(Self { function: function.to_owned(), gpu, left: left.parse().ok()?, code, hang, done })
    }

    fn line(&self) -> String {
        let done = if self.done { " done" } else { "" };
        let without = if self.hang { "hang" } else { "kill" };
        let code = self.code.map_or_else(|| without.to_owned(), |code| code.to_string());
        let gpu = self.gpu.map(|gpu| format!("@{gpu}")).unwrap_or_default();
        format!("{}{gpu} {} {code}{done}\n", self.function, self.left)
    }

    fn answer(&self) -> Answer {
        match self.code {
            Some(SUCCESS) => Ok(()),
            Some(code) => Err(code),
            None if self.hang => loop {
                std::thread::park();
            },
            None => {
                let _ = kill(getpid(), Signal::SIGKILL);
                Err(UNKNOWN)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(function: &str, gpu: Option<u32>) -> Call<'_> {
        Call { function, gpu }
    }

    #[test]
    fn the_nth_call_fails_once() {
        let mut faults = parse("nvmlA 2 19\n\nnonsense\nnvmlA 1 dead\n* 4 999 done");
        let calls = ["nvmlA", "nvmlB", "nvmlA", "nvmlA", "nvmlA"];
        let due: Vec<_> =
            calls.map(|name| count(&mut faults, call(name, None)).and_then(|fault| fault.code)).into();
        assert_eq!(due, [None, None, Some(19), Some(999), None]);
        assert!(faults.is_empty());
    }

    #[test]
    fn zero_is_every_call() {
        let mut faults = parse("nvmlA 0 4");
        for _ in 0..3 {
            assert_eq!(
                count(&mut faults, call("nvmlA", Some(1))).map(|fault| fault.line()),
                Some("nvmlA 0 4\n".into())
            );
        }
        assert_eq!(count(&mut faults, call("nvmlB", None)), None);
    }

    #[test]
    fn one_gpu_fails_alone() {
        let mut faults = parse("*@3 0 999");
        let due = [Some(3), Some(2), None].map(|gpu| count(&mut faults, call("nvmlA", gpu)).is_some());
        assert_eq!(due, [true, false, false]);
    }

    #[test]
    fn a_line_is_written_as_it_was_read() {
        for line in
            ["nvmlA 2 19\n", "* 0 999 done\n", "nvmlA 1 kill\n", "nvmlA@7 3 kill done\n", "cuA 1 hang\n"]
        {
            assert_eq!(parse(line)[0].line(), line);
        }
    }

    #[test]
    fn a_closure_knows_its_function() {
        fn function<A: FnOnce()>(_: A) -> &'static str {
            function_of::<A>()
        }
        assert_eq!(function(|| {}), "a_closure_knows_its_function");
    }
}
