//! The page of `sublet bench show --html` in a headless Chromium: on a telephone and on a desk, dark and light, titles with
//! markup, and nothing that it loads. Runs in the root `chromium` of tests/engines/root. `SUBLET_PICTURES=DIR` has
//! pictures of it written there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use sublet_e2e::bin_dir;
use sublet_e2e::chromium::{Chromium, PROGRAM};

/// What an H200 came to: ten modes, some cells overcommitted.
const RESULT: &str = include_str!("../../docs/evidence/2026-11-23-h200-sharing-yolos.json");

/// The page of a result.
fn page(dir: &Path, result: &Value) -> PathBuf {
    let (file, page) = (dir.join("result.json"), dir.join("page.html"));
    fs::write(&file, result.to_string()).expect("written");
    let mut show = Command::new(bin_dir().join("sublet"));
    show.args(["bench", "show"]).arg(&file).arg("--html").arg(&page);
    let output = show.output().expect("it runs");
    assert!(output.status.success(), "{output:?}");
    page
}

fn open(browser: &mut Chromium, page: &Path, loaded: &str) {
    browser.call("Page.navigate", &json!({"url": format!("file://{}", page.display())}));
    let is_there = sublet_e2e::eventually(|| browser.value(loaded) == true);
    assert!(is_there, "{}", browser.value("document.body.innerText"));
}

fn pictures(browser: &mut Chromium) {
    let Some(dir) = std::env::var_os("SUBLET_PICTURES").map(PathBuf::from) else { return };
    for (name, width, height, colours) in [("phone", 360, 1200, "dark"), ("desktop", 1000, 1300, "light")] {
        browser.set(width, height, colours);
        browser.picture(&dir.join(format!("bench-page-{name}.png")));
    }
}

#[test]
fn the_page_of_a_result_is_readable_and_loads_nothing() {
    let has_browser = Command::new(PROGRAM).arg("--version").output().is_ok();
    assert!(has_browser, "this test runs in the root `chromium` (make test-web)");
    let dir = tempfile::tempdir().expect("a directory");
    let mut result: Value = serde_json::from_str(RESULT).expect("JSON");
    let mut browser = Chromium::start();
    let whole = page(dir.path(), &result);
    open(
        &mut browser,
        &whole,
        "document.readyState === 'complete' && document.querySelectorAll('svg').length === 7",
    );
    browser.check_looks();
    let text = browser.value("document.body.innerText");
    let text = text.as_str().expect("text");
    for part in ["YOLOS-small in PyTorch", "NVIDIA H200", "54.7", "overcommitted", "\"sm_overcommit\": 7.2"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // No word of a picture ends outside of it, and none lies on another one.
    browser.set(1280, 800, "light");
    assert_eq!(browser.value(OUTSIDE), json!([]));
    pictures(&mut browser);

    result["title"] = json!("<img src=x onerror=hit=1><script>hit=2</script>\u{1b}[2J");
    result["machine"]["gpu"] = json!("<b>".repeat(500));
    result["simulated"] = json!(true);
    result["cells"][0]["error"] = json!("</table><script>hit=3</script>");
    result["cells"][1]["load"] = json!("</svg><script>hit=4</script>");
    let hostile = page(dir.path(), &result);
    open(
        &mut browser,
        &hostile,
        "document.body !== null && document.body.innerText.includes('mean nothing')",
    );
    assert_eq!(browser.value("typeof hit"), "undefined");
    assert_eq!(browser.value("document.images.length + document.scripts.length"), 0);
    browser.check_looks();
    // The warning is a paragraph like others; the picture's word is huge and pale.
    assert_eq!(browser.value("getComputedStyle(document.querySelector('p.warn')).opacity"), "1");
    assert_eq!(browser.value("performance.getEntriesByType('resource').length"), 0);
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

/// Words that lie outside of their picture, and pairs of words that overlap.
const OUTSIDE: &str = r"Array.from(document.querySelectorAll('svg')).flatMap((svg) => {
    const frame = svg.getBoundingClientRect();
    const words = Array.from(svg.querySelectorAll('text')).map((text) => [text.textContent, text.getBoundingClientRect()]);
    const outside = words.filter(([, box]) => box.left < frame.left || box.right > frame.right ||
        box.top < frame.top || box.bottom > frame.bottom).map(([word]) => word);
    const over = words.flatMap(([one, a], index) => words.slice(index + 1).filter(([, b]) =>
        a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
        .map(([other]) => `${one} / ${other}`));
    return outside.concat(over);
})";
