//! Every fault once: each system call on the paths of sublet's programs fails with the errors of `tests/faults/table`,
//! one in each run, or its process is killed there. After each run the command has either done its work or says why
//! not, and the next command puts everything right.
//!
//!     faults [--all] [PATH…]
//!     faults --only PATH:[PROCESS/]CALL:NTH:ERROR
//!
//! Without `--all` (or `ALL=1` in the environment, for `make test-faults`) each call fails once; its errors and the kill take
//! turns, from call to call of the same name. `ONLY` in the environment is `--only`. As root; x86-64 alone.

#[cfg(target_arch = "x86_64")]
mod hook;
#[cfg(target_arch = "x86_64")]
mod injector;
#[cfg(target_arch = "x86_64")]
mod joined;
#[cfg(target_arch = "x86_64")]
mod prestart;
#[cfg(target_arch = "x86_64")]
mod scene;
#[cfg(target_arch = "x86_64")]
mod service;
#[cfg(target_arch = "x86_64")]
mod shim;
#[cfg(target_arch = "x86_64")]
mod sweep;
#[cfg(target_arch = "x86_64")]
mod table;
#[cfg(target_arch = "x86_64")]
mod tools;

#[cfg(target_arch = "x86_64")]
fn main() -> std::process::ExitCode {
    use sweep::{Choice, Path, sweep};

    let mut words: Vec<String> = std::env::args().skip(1).collect();
    let mut only = std::env::var("ONLY").ok().filter(|only| !only.is_empty());
    if words.first().is_some_and(|word| word == "--only") {
        only = Some(words.split_off(1).join(" "));
        words.clear();
    }
    let all = words.first().is_some_and(|word| word == "--all");
    if all {
        words.remove(0);
    }
    let all = all || std::env::var("ALL").is_ok_and(|all| !all.is_empty());
    let choice = match &only {
        Some(only) => one_of(only),
        None if all => Choice::All,
        None => Choice::InTurn,
    };
    let path_of_only = only.as_deref().and_then(|only| only.split(':').next());
    let is_chosen = |name: &str| {
        (words.is_empty() || words.iter().any(|word| word == name))
            && path_of_only.is_none_or(|only| only == name)
    };
    if sublet_e2e::skip_unless_root() {
        return std::process::ExitCode::SUCCESS;
    }
    let table = table::Table::read();
    let mut total = sweep::Outcome::default();
    println!(
        "{:<26} {:>6} {:>7} {:>7} {:>7} {:>7} {:>6}",
        "path", "calls", "faults", "passed", "missed", "failed", "s"
    );
    for (name, make) in PATHS.iter().filter(|(name, _)| is_chosen(name)) {
        let mut path: Box<dyn Path> = make();
        let result = sweep(name, path.as_mut(), &table, &choice);
        print(name, &result);
        total.calls += result.calls;
        total.faults += result.faults;
        total.passed += result.passed;
        total.missed += result.missed;
        total.took += result.took;
        total.failures.extend(result.failures);
    }
    print("all", &total);
    for failure in &total.failures {
        println!("FAILED {failure}");
    }
    if total.failures.is_empty() { std::process::ExitCode::SUCCESS } else { std::process::ExitCode::FAILURE }
}

#[cfg(target_arch = "x86_64")]
type Make = fn() -> Box<dyn sweep::Path>;

#[cfg(target_arch = "x86_64")]
const PATHS: &[(&str, Make)] = &[
    ("create-plain", || Box::new(shim::Create::new(shim::Kind::Plain))),
    ("create", || Box::new(shim::Create::new(shim::Kind::Warm))),
    ("create-cold", || Box::new(shim::Create::new(shim::Kind::Cold))),
    ("run", || Box::new(shim::Create::new(shim::Kind::Run))),
    ("start", || Box::new(joined::Joined::new(joined::Command::Start))),
    ("exec-plain", || Box::new(joined::Joined::new(joined::Command::ExecPlain))),
    ("exec", || Box::new(joined::Joined::new(joined::Command::Exec))),
    ("delete-plain", || Box::new(joined::Joined::new(joined::Command::DeletePlain))),
    ("delete", || Box::new(joined::Joined::new(joined::Command::Delete))),
    ("precreate-plain", || Box::new(hook::Hook::new(hook::Stage::PrecreatePlain))),
    ("precreate", || Box::new(hook::Hook::new(hook::Stage::Precreate))),
    ("createRuntime", || Box::new(hook::Hook::new(hook::Stage::CreateRuntime))),
    ("poststop", || Box::new(hook::Hook::new(hook::Stage::Poststop))),
    ("prestart", || Box::new(prestart::Prestart::new())),
    ("request", || Box::new(service::Serve::new(service::Work::Request))),
    ("guard", || Box::new(service::Serve::new(service::Work::Guard))),
    ("gc", || Box::new(tools::Run::new(tools::Tool::Gc))),
    ("refresh", || Box::new(tools::Run::new(tools::Tool::Refresh))),
    ("mps-start", || Box::new(tools::Run::new(tools::Tool::MpsStart))),
    ("mps-stop", || Box::new(tools::Run::new(tools::Tool::MpsStop))),
    ("mig-apply", || Box::new(tools::Run::new(tools::Tool::MigApply))),
];

#[cfg(target_arch = "x86_64")]
fn print(name: &str, result: &sweep::Outcome) {
    println!(
        "{name:<26} {:>6} {:>7} {:>7} {:>7} {:>7} {:>6.1}",
        result.calls,
        result.faults,
        result.passed,
        result.missed,
        result.failures.len(),
        result.took.as_secs_f64()
    );
}

/// The fault that `--only` names.
#[cfg(target_arch = "x86_64")]
fn one_of(only: &str) -> sweep::Choice {
    let usage = "usage: faults --only PATH:[PROCESS/]CALL:NTH:ERROR";
    let parts: Vec<&str> = only.split(':').collect();
    let [_, call, nth, fault] = parts[..] else { panic!("{usage}") };
    let (process, name) = call.split_once('/').unwrap_or(("0", call));
    let fault = match fault {
        "KILL" => injector::Fault::Kill,
        error => injector::Fault::Error(table::errno(error).expect("an errno")),
    };
    let name = table::Table::read().named(name).name;
    let key = injector::Key { process: process.to_owned(), name, nth: nth.parse().expect("a number") };
    sweep::Choice::Only(key, fault)
}

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    println!("skipped: the injector knows the registers of x86-64 alone");
}
