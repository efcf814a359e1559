//! The page of `sublet top --web` in a headless Chromium: what it shows on a telephone and on a desk, dark and light,
//! names with markup, a container that ends, and a server that ends. Runs in the root `chromium` of tests/engines/root.
//! `SUBLET_PICTURES=DIR` has the pictures of docs/pictures written there.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::json;
use sublet_e2e::chromium::{Chromium, PROGRAM};
use sublet_e2e::web::Web;
use sublet_e2e::{Bundle, World, eventually, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "300"];
const MARKUP: &str = "<img src=x onerror=hit=1>\u{1b}[2J";

/// A running container that has the name and the image by containerd's CRI.
fn named<'a>(world: &'a World, id: &str, [name, image]: [&str; 2], share: &[(&str, &str)]) -> Bundle<'a> {
    let cri = [
        ("io.kubernetes.cri.container-type", "container"),
        ("io.kubernetes.cri.container-name", name),
        ("io.kubernetes.cri.image-name", image),
    ];
    let annotations: Vec<(&str, &str)> = share.iter().copied().chain(cri).collect();
    let mut bundle = world.bundle(id, &annotations, HOLD);
    let dir = world.dir.path().join("io.containerd.runtime.v2.task/k8s.io");
    std::fs::create_dir_all(&dir).expect("made");
    std::fs::rename(&bundle.dir, dir.join(id)).expect("moved");
    bundle.dir = dir.join(id);
    bundle.up();
    bundle.event("info");
    bundle
}

/// Whether the processes of one container are shown.
const OPEN: &str = "Array.from(document.querySelectorAll('#containers tr'))\
    .find((row) => row.innerText.startsWith('training')).querySelector('details').open";

/// Something that a person may have selected: the line of one of its processes.
const LINE: &str = "Array.from(document.querySelectorAll('#containers tr'))\
    .find((row) => row.innerText.startsWith('training')).querySelector('details li').selected";

/// Waits until the page's expression is true.
fn until(browser: &mut Chromium, expression: &str) {
    let holds = eventually(|| browser.value(expression) == true);
    assert!(holds, "{expression}: {}", browser.value("document.body.innerText"));
}

fn pictures(browser: &mut Chromium) {
    let Some(dir) = std::env::var_os("SUBLET_PICTURES").map(PathBuf::from) else { return };
    let pictured = [("phone", 360, 1500, "dark"), ("desktop", 1280, 1130, "light")];
    // Sparklines need their time.
    std::thread::sleep(Duration::from_secs(62));
    for (name, width, height, colours) in pictured {
        browser.set(width, height, colours);
        std::thread::sleep(Duration::from_millis(1500));
        browser.picture(&dir.join(format!("top-web-{name}.png")));
    }
}

#[test]
fn the_page_is_live_readable_and_takes_no_markup() {
    if skip_unless_root() {
        return;
    }
    let has_browser = Command::new(PROGRAM).arg("--version").output().is_ok();
    assert!(has_browser, "this test runs in the root `chromium` (make test-web)");
    let world = World::simulated("a100x2-mig", "");
    let share = |gpu, sm, memory| [("sublet.gpu", gpu), ("sublet.sm", sm), ("sublet.memory", memory)];
    let running = [
        named(
            &world,
            "training",
            ["training", "registry.example/team/training:2.1"],
            &share("1", "40", "16GiB"),
        ),
        named(
            &world,
            "inference",
            ["inference", "registry.example/team/inference:7"],
            &share("0:0", "50", "8GiB"),
        ),
        named(&world, "whole", ["notebook", "jupyter/pytorch-notebook"], &[("sublet.gpu", "0:3")]),
    ];
    let small =
        named(&world, "small", ["embeddings", "registry.example/team/embed:3"], &share("1", "20", "200MiB"));
    let mut browser = Chromium::start();
    let mut web = Web::start(world.command("sublet"), &[]);
    browser.set(360, 800, "dark");
    browser.call("Page.navigate", &json!({"url": web.url}));
    until(&mut browser, "document.querySelectorAll('#containers tr').length === 4");
    until(&mut browser, "document.querySelector('#live').textContent === 'Live'");
    let text = browser.value("document.body.innerText");
    let text = text.as_str().expect("text");
    for part in [
        "SIMULATED",
        "GUARD OFF",
        "n/a of",
        "registry.example/team/training:2.1",
        "MIG 0:3",
        "/ 200 MiB",
        "booked",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    browser.check_looks();
    pictures(&mut browser);

    let hostile = named(&world, "hostile", [MARKUP, &"<b>".repeat(1400)], &share("1", "20", "6GiB"));
    until(&mut browser, "document.querySelectorAll('#containers tr').length === 5");
    assert_eq!(browser.value("document.images.length"), 0);
    assert_eq!(browser.value("typeof hit"), "undefined");
    let text = browser.value("document.body.innerText");
    let shown = text.as_str().is_some_and(|text| text.contains(r"<img src=x onerror=hit=1>\u{1b}[2J"));
    assert!(shown, "{text}");
    browser.check_looks();
    // What is open stays open while values change, and its lines are the same elements.
    browser.value(&format!("{OPEN} = true"));
    browser.value(&format!("{LINE} = true"));
    hostile.down();
    small.down();
    until(&mut browser, "document.querySelectorAll('#containers tr').length === 3");
    assert_eq!(browser.value(OPEN), true);
    assert_eq!(browser.value(LINE), true);

    // A page that nobody sees asks for nothing, and then again.
    let hide = |hidden| {
        format!(
            "Object.defineProperty(document, 'hidden', {{ configurable: true, value: {hidden} }});\
             document.dispatchEvent(new Event('visibilitychange'))"
        )
    };
    let asked = "performance.getEntriesByType('resource').length";
    browser.value(&hide(true));
    std::thread::sleep(Duration::from_secs(1));
    let before = browser.value(asked);
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(browser.value(asked), before);
    browser.value(&hide(false));
    until(&mut browser, &format!("{asked} > {before}"));

    // Markup and script of the page itself are stopped, too, by the policy.
    let inner = browser.value(
        "(() => { try { document.body.innerHTML = 'x'; return 'set'; } catch { return 'refused'; } })()",
    );
    assert_eq!(inner, "refused");
    let wrong: Vec<String> =
        browser.complaints().into_iter().filter(|line| !line.contains("TrustedHTML")).collect();
    assert_eq!(wrong, Vec::<String>::new(), "no violation of the policy, no exception");

    assert!(web.ended(Signal::SIGTERM).success());
    until(&mut browser, "document.querySelector('#live').textContent.includes('does not answer for')");
    for bundle in running {
        bundle.down();
    }
    world.assert_empty();
}
