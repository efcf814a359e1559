//! sublet's log lines on stderr, in the engine's `--log` file and in `[runtime] log`, in the form that runc writes
//! and engines read: `{"level":…,"msg":…,"time":…}`, or logrus text.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{Permissions, set_permissions};
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::text::in_lines;

/// The level of a line, in logrus's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Level {
    /// Only with `--debug`.
    Debug,
    /// Only to the files.
    Info,
    /// To the files; to stderr only if the engine names no file. In a `create` stderr is the container's own, so the line
    /// would be the first of its log.
    Warning,
    /// To the files and stderr.
    Error,
}

/// Where the lines of one invocation are written.
#[derive(Clone, Debug, Default)]
pub struct Log {
    program: &'static str,
    engine: Option<PathBuf>,
    json: bool,
    own: Option<PathBuf>,
}

impl Log {
    /// The log of `program`. `engine` is the file that the engine named with `--log`, `json` says whether it asked for
    /// `--log-format json`, and `own` is the file of `[runtime] log`.
    pub fn new(program: &'static str, engine: Option<&Path>, json: bool, own: Option<&Path>) -> Self {
        // runc's default. Lines are written to stderr in any case.
        let engine = engine.filter(|log| *log != Path::new("/dev/stderr")).map(Path::to_owned);
        Self { program, engine, json, own: own.map(Path::to_owned) }
    }

    /// Whether there is a file that lines go to.
    pub fn has_file(&self) -> bool {
        self.engine.is_some() || self.own.is_some()
    }

    /// Writes a warning to the files alone: standard error may be the container's.
    pub fn warn_in_files(&self, message: &str) {
        self.write(if self.engine.is_some() { Level::Warning } else { Level::Info }, message);
    }

    /// Writes a message to all places that `level` goes to: [`in_lines`] to stderr and as JSON, because engines show a
    /// string's line breaks to their users; elsewhere in one line. A place that cannot be written is skipped: a full disk must
    /// not keep containers from ending.
    pub fn write(&self, level: Level, message: &str) {
        let message = format!("{}: {}", self.program, one_line(message));
        let lines = in_lines(&message);
        if level == Level::Error || level != Level::Info && self.engine.is_none() {
            let _ = writeln!(std::io::stderr(), "{lines}");
        }
        let time = SystemTime::now();
        if let Some(file) = &self.engine {
            append(file, &format_line(self.json, level, if self.json { &lines } else { &message }, time));
        }
        if let Some(file) = &self.own {
            make_private(file);
            append(file, &format_line(false, level, &message, time));
        }
    }
}

/// Takes a log that is there already from those who are neither its user nor in its group.
fn make_private(file: &Path) {
    let shared = file.metadata().ok().filter(|found| found.is_file() && found.mode() & 0o007 != 0);
    let _ = shared.map(|found| set_permissions(file, Permissions::from_mode(found.mode() & 0o770)));
}

/// Other processes write to the same file, so each line is appended with one write. Lines have containers' names, which are
/// their users' alone.
fn append(file: &Path, line: &str) {
    let opened = std::fs::OpenOptions::new().append(true).create(true).mode(0o600).open(file);
    let _ = opened.and_then(|mut file| file.write_all(line.as_bytes()));
}

fn format_line(json: bool, level: Level, message: &str, time: SystemTime) -> String {
    let time = crate::text::timestamp(time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()));
    if json {
        let line = serde_json::json!({"level": level.to_string(), "msg": message, "time": time});
        return format!("{line}\n");
    }
    let quoted = message.replace('\\', "\\\\").replace('"', "\\\"");
    format!("time=\"{time}\" level={level} msg=\"{quoted}\"\n")
}

/// Escapes control characters, so that a message stays one line whatever foreign text it repeats.
pub fn one_line(message: &str) -> String {
    let mut line = String::with_capacity(message.len());
    for character in message.chars() {
        if character.is_control() {
            line.extend(character.escape_default());
        } else {
            line.push(character);
        }
    }
    line
}

/// Sends the library's trace events to `log`: warnings always, debug lines with `--debug`.
pub fn trace_to(log: Log, debug: bool) {
    let most = if debug { tracing::Level::DEBUG } else { tracing::Level::WARN };
    // A second call in the same process keeps the first log. Only tests do that.
    let _ = tracing::subscriber::set_global_default(Tracer { log, most });
}

/// Tells each of `lines` as a warning.
pub fn warn(lines: impl IntoIterator<Item = String>) {
    for line in lines {
        tracing::warn!("{line}");
    }
}

/// Warns of what each pass over the ledger finds anew: once an hour in one process.
pub fn warn_once(line: String) {
    static WARNED: Mutex<BTreeMap<String, Instant>> = Mutex::new(BTreeMap::new());
    let mut warned = WARNED.lock().unwrap_or_else(PoisonError::into_inner);
    warned.retain(|_, time| time.elapsed() < Duration::from_secs(3600));
    warned.entry(line).or_insert_with_key(|line| {
        tracing::warn!("{line}");
        Instant::now()
    });
}

/// The smallest subscriber there is: no spans, each event one line.
struct Tracer {
    log: Log,
    most: tracing::Level,
}

impl tracing::Subscriber for Tracer {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= self.most
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        let level = match *event.metadata().level() {
            tracing::Level::ERROR | tracing::Level::WARN => Level::Warning,
            tracing::Level::INFO => Level::Info,
            _ => Level::Debug,
        };
        self.log.write(level, &(text.message + &text.fields));
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl tracing::field::Visit for Text {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        let _ = if field.name() == "message" {
            write!(self.message, "{value:?}")
        } else {
            write!(self.fields, " {}={value:?}", field.name())
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-11-21T09:00:00Z
    fn time() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_251_600)
    }

    #[test]
    fn lines_have_the_form_that_engines_read() {
        assert_eq!(
            format_line(true, Level::Error, "a \"b\" \\", time()),
            "{\"level\":\"error\",\"msg\":\"a \\\"b\\\" \\\\\",\"time\":\"2026-11-21T09:00:00Z\"}\n"
        );
        assert_eq!(
            format_line(false, Level::Warning, "a \"b\" \\", time()),
            "time=\"2026-11-21T09:00:00Z\" level=warning msg=\"a \\\"b\\\" \\\\\"\n"
        );
    }

    #[test]
    fn a_message_stays_one_line() {
        assert_eq!(one_line("a\nb\u{1b}[2J"), "a\\nb\\u{1b}[2J");
    }

    #[test]
    fn lines_are_appended_to_both_files() {
        let dir = tempfile::tempdir().unwrap();
        let (engine, own) = (dir.path().join("engine"), dir.path().join("own"));
        std::fs::write(&engine, "{}\n").unwrap();
        std::fs::write(&own, "").unwrap();
        set_permissions(&own, Permissions::from_mode(0o644)).unwrap();

        Log::new("sublet-runtime", Some(&engine), true, Some(&own)).write(Level::Info, "no; why: \nx");
        assert_eq!(own.metadata().unwrap().mode() & 0o777, 0o640, "names are its readers' alone");
        let engine = std::fs::read_to_string(engine).unwrap();
        assert!(
            engine.starts_with("{}\n{\"level\":\"info\",\"msg\":\"sublet-runtime: no\\nwhy: \\\\nx\","),
            "{engine}"
        );
        assert!(
            std::fs::read_to_string(own)
                .unwrap()
                .ends_with(" level=info msg=\"sublet-runtime: no; why: \\\\nx\"\n")
        );
    }

    #[test]
    fn a_clock_before_its_epoch_stops_no_line() {
        let line = format_line(false, Level::Info, "m", UNIX_EPOCH - Duration::from_secs(1));
        assert!(line.starts_with("time=\"1970-01-01T00:00:00Z\""), "{line}");
    }
}
