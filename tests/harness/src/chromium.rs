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
