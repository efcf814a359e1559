//! A headless Chromium, driven by the Chrome `DevTools` Protocol over a pair of pipes (`--remote-debugging-pipe`).

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};
use tempfile::TempDir;

/// The program.
pub const PROGRAM: &str = "chromium-headless-shell";

const RUN: &str = "exec \"$0\" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars \
    --remote-debugging-pipe --user-data-dir=\"$1\" 3<\"$1/to\" 4>\"$1/from\"";

/// Widths and heights, in CSS pixels, and colours.
const SIZES: [(u32, u32, &str); 4] =
    [(360, 800, "dark"), (360, 800, "light"), (1280, 800, "dark"), (1280, 800, "light")];

/// Nothing is wider than the page, and all text has the contrast that WCAG 2 asks for (AA, 4.5).
const LOOKS: &str = r"(() => {
    const light = (colour) => {
        const [r, g, b] = colour.map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const parse = (colour) => colour.match(/[\d.]+/g).map(Number);
    const behind = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const colour = parse(getComputedStyle(at).backgroundColor);
            if (colour.length === 3 || colour[3] === 1) return colour;
        }
        return [255, 255, 255];
    };
    const pale = [];
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const element = walk.currentNode.parentElement;
        if (!walk.currentNode.data.trim() || !element.getClientRects().length) continue;
        const [a, b] = [light(parse(getComputedStyle(element).color).slice(0, 3)), light(behind(element).slice(0, 3))];
        const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (contrast < 4.5) pale.push(`${walk.currentNode.data}: ${contrast.toFixed(1)}`);
    }
    const root = document.documentElement;
    return { pale, wider: root.scrollWidth - root.clientWidth, back: getComputedStyle(document.body).backgroundColor };
})()";

/// A browser with one page; killed when dropped.
pub struct Chromium {
    child: Child,
    to: File,
    from: BufReader<File>,
    sent: u64,
    session: Option<String>,
    /// Events of the protocol, such as what the page's console has.
    pub events: Vec<Value>,
    _dir: TempDir,
}

impl Chromium {
    /// A browser with an empty page.
    #[must_use]
    pub fn start() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let pipe = |name: &str| {
            let path = dir.path().join(name);
            mkfifo(&path, Mode::S_IRWXU).expect("a pipe");
            path
        };
        let (to, from) = (pipe("to"), pipe("from"));
        let mut shell = Command::new("sh");
        shell.args(["-c", RUN, PROGRAM]).arg(dir.path()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = shell.spawn().expect("it runs");
        // The shell opens them in this order, too.
        let to = File::options().write(true).open(to).expect("opened");
        let from = BufReader::new(File::open(from).expect("opened"));
        let mut browser = Self { child, to, from, sent: 0, session: None, events: Vec::new(), _dir: dir };
        let target = browser.call("Target.createTarget", &json!({"url": "about:blank"}));
        let attached = json!({"targetId": target["targetId"], "flatten": true});
        let session = browser.call("Target.attachToTarget", &attached);
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), &json!({}));
        }
        browser
    }

    /// Calls a method of the protocol.
    pub fn call(&mut self, method: &str, parameters: &Value) -> Value {
        self.sent += 1;
        let mut message = json!({"id": self.sent, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.to.write_all(format!("{message}\0").as_bytes()).expect("it reads");
        loop {
            let mut bytes = Vec::new();
            self.from.read_until(0, &mut bytes).expect("it answers");
            assert_eq!(bytes.pop(), Some(0), "the browser has ended");
            let answer: Value = serde_json::from_slice(&bytes).expect("JSON");
            if answer["id"] == self.sent {
                assert_eq!(answer["error"], Value::Null, "{method}");
                return answer["result"].clone();
            }
            self.events.push(answer);
        }
    }

    /// The width of the page, and its colours.
    pub fn set(&mut self, width: u32, height: u32, colours: &str) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        self.call("Emulation.setDeviceMetricsOverride", &size);
        let colours = json!({"features": [{"name": "prefers-color-scheme", "value": colours}]});
        self.call("Emulation.setEmulatedMedia", &colours);
    }

    /// The value of an expression of the page.
    pub fn value(&mut self, expression: &str) -> Value {
        let asked = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let answer = self.call("Runtime.evaluate", &asked);
        assert_eq!(answer["exceptionDetails"], Value::Null, "{expression}");
        answer["result"]["value"].clone()
    }

    /// Looks at the page on a telephone and on a desk, dark and light: [`LOOKS`].
    ///
    /// # Panics
    /// Something is too wide, has too little contrast, or does not follow the colours.
    pub fn check_looks(&mut self) {
        let mut backs = Vec::new();
        for (width, height, colours) in SIZES {
            self.set(width, height, colours);
            let looks = self.value(LOOKS);
            assert_eq!((&looks["pale"], &looks["wider"]), (&json!([]), &json!(0)), "{width} {colours}");
            backs.push(looks["back"].clone());
        }
        assert!(backs[0] != backs[1] && backs[0] == backs[2] && backs[1] == backs[3], "{backs:?}");
    }

    /// What the page's log has, violations of its policy too, and exceptions.
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
        let is_wrong = |event: &&Value| {
            matches!(event["method"].as_str(), Some("Log.entryAdded" | "Runtime.exceptionThrown"))
        };
        self.events.iter().filter(is_wrong).map(Value::to_string).collect()
    }

    /// Writes a picture of the page, PNG.
    pub fn picture(&mut self, file: &Path) {
        let picture = self.call("Page.captureScreenshot", &json!({"format": "png"}));
        let mut base64 = Command::new("base64");
        base64.arg("--decode").stdin(Stdio::piped()).stdout(File::create(file).expect("created"));
        let mut child = base64.spawn().expect("it runs");
        let mut stdin = child.stdin.take().expect("piped");
        stdin.write_all(picture["data"].as_str().expect("base64").as_bytes()).expect("it reads");
        drop(stdin);
        assert!(child.wait().expect("it ends").success());
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
