//! The screens that the docs show, each below its command, are what the programs print today, and fit on a terminal of
//! 80 columns.

use std::fs;
use std::path::Path;
use std::process::Child;

use sublet_e2e::{Bundle, World, eventually, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];

/// Words with one space between them, without what differs each time: moments, durations, pids and sparklines.
pub fn normal(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    let is_number = |word: &str| !word.is_empty() && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    let differs = |at: usize| {
        let (word, before) = (words[at], words[at.saturating_sub(1)]);
        is_number(word.trim_end_matches('s'))
            && (word.ends_with('s') || before == "after:" || before == "serving")
            || before == "(pid"
            || word.ends_with('Z') && word.contains('T')
            || words.get(at + 1) == Some(&"UTC")
            || word.chars().all(|c| ('▁'..='█').contains(&c))
    };
    (0..words.len()).map(|at| if differs(at) { "…" } else { words[at] }).collect::<Vec<_>>().join(" ")
}

/// The indented lines that a page of docs has below this one.
fn below(page: &str, line: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(page);
    let text = fs::read_to_string(path).expect("the page");
    let line = format!("\n    {line}\n");
    let (_, rest) = text.split_once(&line).unwrap_or_else(|| panic!("{page} has no line {line}"));
    let block = rest.lines().take_while(|line| line.is_empty() || line.starts_with("    "));
    block.map(|line| line.get(4..).unwrap_or_default().to_owned() + "\n").collect()
}

/// That `printed` is what the page shows, of which an ellipsis stands for any words.
fn check(page: &str, command: &str, printed: &str) {
    assert!(printed.lines().all(|line| line.chars().count() <= 80), "{printed}");
    let shown = normal(&below(page, command));
    let whole = normal(printed);
    let mut rest = whole.as_str();
    for piece in shown.split('…').map(str::trim) {
        let at = rest.find(piece).unwrap_or_else(|| panic!("{page} shows \"{piece}\", and not\n{printed}"));
        rest = &rest[at + piece.len()..];
    }
}

/// What `command` prints in 80 columns.
fn print(world: &World, command: &str) -> String {
    let mut words = command.split(' ');
    let mut program = world.command(words.next().expect("a program"));
    // Without Docker Compose, whatever this machine has.
    program.args(words).env("COLUMNS", "80").env("PATH", "/nonexistent").current_dir(world.dir.path());
    String::from_utf8(program.output().expect("it runs").stdout).expect("UTF-8")
}

/// `sublet serve` with its guard, until it is dropped.
struct Service(Child);

impl Service {
    fn start(world: &World) -> Self {
        let service = Self(world.command("sublet").arg("serve").spawn().expect("sublet serve"));
        assert!(eventually(|| print(world, "sublet status").contains("\nGuard: on.\n")), "no guard");
        service
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn explain_prints_what_its_page_shows() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    fs::write(world.dir.path().join("compose.yaml"), below("explain.md", "# compose.yaml")).expect("written");
    for command in ["sublet explain sm=25 memory=8GiB", "sublet explain --compose compose.yaml"] {
        check("explain.md", command, &print(&world, command));
    }
    world.assert_empty();
}

#[test]
fn status_and_top_print_what_their_pages_show() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let service = Service::start(&world);
    let shares = [("training", "60", "40GiB"), ("web", "25", "8GiB")];
    let bundles = shares.map(|(name, sm, memory)| {
        let bundle = world.bundle(name, &[("sublet.sm", sm), ("sublet.memory", memory)], HOLD);
        bundle.up();
        bundle.event("info");
        bundle
    });
    // What the driver notes of a process's work it notes a moment later.
    let is_noted = || print(&world, "sublet status").matches("n/a of 100 %").count() == 2;
    assert!(eventually(is_noted), "{}", print(&world, "sublet status"));
    check("troubleshooting.md", "sublet status", &print(&world, "sublet status"));
    check("top.md", "sublet top --once", &print(&world, "sublet top --once"));
    bundles.iter().for_each(Bundle::down);
    drop(service);
    world.assert_empty();
}
