//! `sublet top` on a terminal: what the screen shows, keys, the mouse, other sizes, a driver that goes and comes back,
//! and a terminal that is given back as it was.

use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sublet_e2e::terminal::Terminal;
use sublet_e2e::{Bundle, World, bin_dir, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];

fn top(world: &World, arguments: &[&str]) -> Command {
    let mut command = world.command("sublet");
    command.arg("top").args(arguments).env_remove("NO_COLOR");
    command
}

fn held<'a>(world: &'a World, id: &str, annotations: &[(&str, &str)]) -> Bundle<'a> {
    let bundle = world.bundle(id, annotations, HOLD);
    bundle.up();
    bundle.event("info");
    bundle
}

fn row<'a>(screen: &'a str, start: &str) -> &'a str {
    screen.lines().find(|line| line.starts_with(start)).unwrap_or_default()
}

/// Whether the row of container `first` is above that of `second`.
fn is_above(screen: &str, first: &str, second: &str) -> bool {
    let at = |start: &str| screen.lines().position(|line| line.starts_with(start));
    at(first).zip(at(second)).is_some_and(|(first, second)| first < second)
}

#[test]
fn the_screen_shows_gpus_and_containers_and_the_keys_work() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200-h100", "");
    let little =
        held(&world, "little", &[("sublet.gpu", "0"), ("sublet.sm", "25"), ("sublet.memory", "8GiB")]);
    let much = held(&world, "much", &[("sublet.gpu", "0"), ("sublet.sm", "25"), ("sublet.memory", "1GiB")]);
    let own = [("sublet.gpu", "1"), ("sublet.sm", "25"), ("sublet.isolation", "dedicated")];
    let own = held(&world, "own", &own);
    let mut terminal = Terminal::start(&top(&world, &["--interval", "300ms"]), 80, 24);
    let screen =
        terminal.until("its containers", |screen| screen.contains("little") && screen.contains("own"));
    assert!(screen.contains("SIMULATED") && screen.contains("2 GPUs, 3 leases"), "{screen}");
    assert!(screen.contains("GUARD OFF: ") && screen.contains("q end"), "{screen}");
    assert!(row(&screen, "0 ").contains("100 %") && row(&screen, "0 ").contains(" W"), "{screen}");
    let little_row = row(&screen, "little");
    assert!(little_row.contains("n/a of 100 %") && little_row.contains("/ 8 GiB"), "never a 0: {screen}");
    assert!(row(&screen, "own").contains(" 100 % "), "its own server's figure is its own: {screen}");
    assert!(screen.lines().all(|line| line.chars().count() <= 80), "{screen}");
    // Sorted by the part of its limit that each uses, then by name.
    assert!(is_above(&screen, "much", "little"), "{screen}");
    terminal.keys("ss");
    terminal
        .until("another order", |screen| screen.contains("sort: name") && is_above(screen, "little", "much"));
    terminal.keys("r");
    terminal.until("the other way round", |screen| is_above(screen, "own", "little"));
    terminal.keys("/MUCH\r");
    let screen =
        terminal.until("what is looked for", |screen| !screen.contains("little") && !screen.contains("_ "));
    assert!(screen.contains("much") && screen.contains("/ filter: MUCH"), "{screen}");
    terminal.keys("\r");
    let screen = terminal.until("details", |screen| screen.contains("Container much"));
    assert!(screen.contains("limits     SM 25 %, memory 1 GiB") && screen.contains("Processes"), "{screen}");
    // Below what 24 lines show.
    terminal.keys("G");
    let screen = terminal.until("the end", |screen| screen.contains("If its MPS server fails"));
    assert!(screen.contains("and that of 1 more:") && screen.contains("    little"), "{screen}");
    terminal.keys("\u{1b}");
    terminal.until("the rows", |screen| screen.contains("CONTAINER"));
    terminal.keys("\u{1b}");
    terminal.until("all rows", |screen| screen.contains("little"));
    terminal.keys("\t\r");
    let screen = terminal.until("a GPU's details", |screen| screen.contains("GPU 0: NVIDIA H200"));
    assert!(screen.contains("GPM ") && screen.contains("PCIe"), "{screen}");
    terminal.keys("?");
    terminal.until("the keys", |screen| screen.contains("Ctrl-C"));
    terminal.keys("q");
    assert!(terminal.ended().success());
    assert!(!terminal.is_taken() && terminal.echoes(), "the terminal is given back");
    for bundle in [little, much, own] {
        bundle.down();
    }
    world.assert_empty();
}

#[test]
fn it_follows_the_size_and_the_mouse_and_has_no_need_of_utf8() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let one = held(&world, "first", &[("sublet.sm", "25")]);
    let two = held(&world, "second", &[("sublet.sm", "25"), ("sublet.memory", "1GiB")]);
    let mut plain = top(&world, &["--interval", "300ms"]);
    plain.env("LC_ALL", "C");
    let mut terminal = Terminal::start(&plain, 80, 24);
    let screen = terminal.until("its containers", |screen| screen.contains("first"));
    assert!(screen.is_ascii(), "{screen}");
    for (columns, rows) in [(20, 5), (1, 1), (200, 50), (40, 10)] {
        terminal.resize(columns, rows);
        let wide = |screen: &str| screen.lines().any(|line| line.starts_with("first"));
        terminal.until(&format!("{columns}x{rows}"), |screen| {
            columns < 20 || wide(screen) || screen.contains("second")
        });
    }
    terminal.resize(80, 24);
    let screen = terminal
        .until("80x24", |screen| screen.lines().nth(23).is_some_and(|line| line.starts_with("q end")));
    let line = screen.lines().position(|line| line.starts_with("first")).expect("a row") + 1;
    // A click as xterm sends it (SGR mode), and one more.
    let click = format!("\u{1b}[<0;3;{line}M\u{1b}[<0;3;{line}m");
    terminal.keys(&click);
    terminal.keys(&click);
    terminal.until("details", |screen| screen.contains("Container first"));
    kill(Pid::from_raw(terminal.pid().cast_signed()), Signal::SIGTERM).expect("it runs");
    assert_eq!(terminal.ended().code(), Some(128 + 15));
    assert!(!terminal.is_taken() && terminal.echoes(), "the terminal is given back");
    one.down();
    two.down();
    world.assert_empty();
}

#[test]
fn a_driver_that_goes_is_looked_for_again_and_a_lost_gpu_is_a_line() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200-h100", "");
    let bundle = held(&world, "stays", &[("sublet.sm", "25"), ("sublet.memory", "8GiB")]);
    let mut terminal = Terminal::start(&top(&world, &["--interval", "200ms"]), 100, 30);
    terminal.until("its memory", |screen| row(screen, "stays").contains(" MiB / 8 GiB"));
    let fail = world.driver_root.as_ref().expect("simulated").join("sim/fail");
    // 15 is NVML_ERROR_GPU_IS_LOST.
    std::fs::write(&fail, "nvmlDeviceGetMemoryInfo_v2 0 15\nnvmlDeviceGetMemoryInfo 0 15\n")
        .expect("written");
    terminal.until("a lost GPU", |screen| {
        screen.contains("GPU 0: what is used is not known: ") && row(screen, "stays").contains(" - / 8 GiB")
    });
    std::fs::write(&fail, "nvmlInit_v2 0 999\n").expect("written");
    terminal.until("no driver", |screen| screen.contains("what is used is not known: "));
    std::fs::remove_file(&fail).expect("removed");
    terminal.until("its memory again", |screen| row(screen, "stays").contains(" MiB / 8 GiB"));
    bundle.down();
    terminal.until("no container", |screen| screen.contains("No leases."));
    terminal.keys("\u{3}");
    assert!(terminal.ended().success());
    world.assert_empty();
}

#[test]
fn one_frame_is_text_and_a_closed_pipe_ends_it() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = held(&world, "piped", &[("sublet.mode", "time-slice")]);
    let output = world.sublet(&["top", "--once"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && !text.contains('\u{1b}'), "{text}");
    assert!(row(&text, "piped").contains("time-slice") && row(&text, "0 ").contains(" W"), "{text}");
    let line = format!("{} top --once | head -1", bin_dir().join("sublet").display());
    let mut shell = Command::new("sh");
    let output = shell.args(["-c", &line]).env("SUBLET_CONFIG", &world.config).output().expect("sh runs");
    assert!(output.stderr.is_empty(), "{output:?}");
    let refused = world.sublet(&["top"]);
    let told = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && told.contains("--once"), "{told}");
    bundle.down();
    world.assert_empty();
}

#[test]
fn every_signal_that_ends_it_gives_the_terminal_back() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    for signal in [Signal::SIGINT, Signal::SIGHUP, Signal::SIGTERM] {
        let mut terminal = Terminal::start(&top(&world, &["--interval", "300ms"]), 80, 24);
        terminal.until("a look", |screen| screen.contains("No leases."));
        assert!(terminal.is_taken() && !terminal.echoes(), "{signal}");
        kill(Pid::from_raw(terminal.pid().cast_signed()), signal).expect("it runs");
        assert_eq!(terminal.ended().code(), Some(128 + signal as i32), "{signal}");
        assert!(!terminal.is_taken() && terminal.echoes(), "{signal}: the terminal is given back");
    }
}
