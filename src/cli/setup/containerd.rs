//! containerd's `config.toml`, versions 2 and 3 (containerd's docs/cri/config.md): a runtime handler for pods.
//!
//! Our tables stand in a block of their own at the end. A line of ours in somebody else's table ends in
//! [`MARK`]; the line that it replaces is kept below it as a comment.

use super::{NAME, SetupError, Wish, quoted, toml};

const BEGIN: &str = "# >>> sublet setup: `sublet setup containerd --undo` takes this block out";
/// The same, where the file did not end with a newline.
const BEGIN_ON_OPEN_LINE: &str = "# >>> sublet setup, on a line that had no end: \
                                  `sublet setup containerd --undo` takes this block out";
const END: &str = "# <<< sublet setup\n";
const MARK: &str = " # sublet setup\n";
const KEPT: &str = "# sublet setup kept: ";

/// The plugin that serves pods, in versions 2 and 3.
const PLUGINS: [&str; 2] = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"];

/// What our block may hold beside `BinaryName`: ends of headers, and lines.
const TABLES: [&str; 4] =
    ["]", ".\"containerd\"]", ".containerd.runtimes.sublet]", ".containerd.runtimes.sublet.options]"];
const LINES: [&str; 6] = [
    "version = 2",
    "runtime_type = \"io.containerd.runc.v2\"",
    "pod_annotations = [\"sublet.*\"]",
    "container_annotations = [\"sublet.*\"]",
    "default_runtime_name = \"sublet\"",
    "enable_cdi = true",
];

/// `config.toml` with the handler; `found` is what it says now.
///
/// # Errors
/// It is no TOML of version 2 or 3, has another handler of that name, or tables that take no further lines.
pub fn set_up(found: Option<&str>, wish: &Wish) -> Result<String, SetupError> {
    // Anew: what is wished for may differ.
    let left = if found.is_some_and(has_lines_of_ours) { undo(found)? } else { found.map(str::to_owned) };
    match left.as_deref() {
        Some(left) if has_lines_of_ours(left) => {
            Err(SetupError::Taken { what: "a line of sublet setup's".into() })
        }
        left => added(left, wish),
    }
}

fn added(found: Option<&str>, wish: &Wish) -> Result<String, SetupError> {
    let version = if found.is_none() { "version = 2\n" } else { "" };
    let found = found.unwrap_or_default();
    let plugin = plugin(&toml(&format!("{version}{found}"))?)?;
    let cri = format!("plugins.\"{plugin}\"");
    if lookup(found, &[plugin, "containerd", "runtimes", NAME])?.is_some() {
        return Err(SetupError::Taken { what: format!("[{cri}.containerd.runtimes.{NAME}]") });
    }
    let begin = if found.is_empty() || found.ends_with('\n') { BEGIN } else { BEGIN_ON_OPEN_LINE };
    let mut text = found.to_owned();
    if begin == BEGIN_ON_OPEN_LINE {
        text.push('\n');
    }
    let mut block = format!("{version}{}", handler(&cri, wish)?);
    if wish.default {
        let wanted = ("default_runtime_name", format!("\"{NAME}\""));
        assign(&mut text, &mut block, &["plugins", plugin, "containerd"], &wanted);
    }
    if wish.cdi {
        assign(&mut text, &mut block, &["plugins", plugin], &("enable_cdi", "true".to_owned()));
    }
    let text = format!("{text}{begin}\n{block}{END}");
    confirmed(text, plugin, wish)
}

/// The plugin that serves pods.
fn plugin(file: &::toml::Table) -> Result<&'static str, SetupError> {
    match file.get("version").and_then(::toml::Value::as_integer) {
        Some(2) => Ok(PLUGINS[0]),
        Some(3) => Ok(PLUGINS[1]),
        _ => Err(SetupError::Version),
    }
}

fn handler(cri: &str, wish: &Wish) -> Result<String, SetupError> {
    Ok(format!(
        "[{cri}.containerd.runtimes.{NAME}]\n\
         runtime_type = \"io.containerd.runc.v2\"\n\
         pod_annotations = [\"sublet.*\"]\n\
         container_annotations = [\"sublet.*\"]\n\
         [{cri}.containerd.runtimes.{NAME}.options]\n\
         BinaryName = {}\n",
        quoted(&wish.runtime)?
    ))
}

/// Puts `key = value` into `table`: in place of the line that is there, below the table's header, or as a
/// table of `block`.
fn assign(text: &mut String, block: &mut String, table: &[&str], (key, value): &(&str, String)) {
    let mut lines: Vec<String> = text.split_inclusive('\n').map(str::to_owned).collect();
    let Some(header) = lines.iter().position(|line| heads(line, table)) else {
        let names: Vec<String> = table[1..].iter().map(|name| format!("\"{name}\"")).collect();
        let header = format!("[{}.{}]", table[0], names.join("."));
        *block = format!("{block}{header}\n{key} = {value}\n");
        return;
    };
    let body = lines[header + 1..].iter().take_while(|line| !line.trim_start().starts_with('['));
    let at = body.clone().position(|line| toml(line).is_ok_and(|line| line.contains_key(*key)));
    let line = at.map_or(header, |at| header + 1 + at);
    let indent: String = lines[line].chars().take_while(|c| matches!(c, ' ' | '\t')).collect();
    let ours = format!("{indent}{key} = {value}{MARK}");
    lines[line] = match at {
        Some(_) => format!("{ours}{KEPT}{}", lines[line]),
        None => format!("{}{ours}", lines[line]),
    };
    *text = lines.concat();
}

/// Whether `line` is the header of `table`.
fn heads(line: &str, table: &[&str]) -> bool {
    if !line.trim_start().starts_with('[') {
        return false;
    }
    let Ok(mut inner) = toml(line) else { return false };
    for name in table {
        let Some(::toml::Value::Table(next)) = inner.remove(*name) else { return false };
        inner = next;
    }
    inner.is_empty()
}

/// `text`, if containerd will read in it what was wished for.
fn confirmed(text: String, plugin: &str, wish: &Wish) -> Result<String, SetupError> {
    let inline = |why: String| SetupError::Inline { why };
    let value = |path: &[&str]| lookup(&text, path).map_err(|error| inline(error.to_string()));
    let runtime = value(&[plugin, "containerd", "runtimes", NAME, "options", "BinaryName"])?;
    let default = value(&[plugin, "containerd", "default_runtime_name"])?;
    let cdi = value(&[plugin, "enable_cdi"])?;
    if runtime.and_then(|value| value.as_str().map(str::to_owned)).as_deref() != wish.runtime.to_str() {
        return Err(inline("the runtime is not found again".to_owned()));
    }
    if wish.default && default.as_ref().and_then(::toml::Value::as_str) != Some(NAME) {
        return Err(inline("default_runtime_name is not found again".to_owned()));
    }
    if wish.cdi && cdi.as_ref().and_then(::toml::Value::as_bool) != Some(true) {
        return Err(inline("enable_cdi is not found again".to_owned()));
    }
    Ok(text)
}

/// The value at `path` below `plugins`.
fn lookup(text: &str, path: &[&str]) -> Result<Option<::toml::Value>, SetupError> {
    let mut value = ::toml::Value::Table(toml(text)?);
    for name in std::iter::once(&"plugins").chain(path) {
        match value {
            ::toml::Value::Table(mut table) => match table.remove(*name) {
                Some(inner) => value = inner,
                None => return Ok(None),
            },
            _ => return Ok(None),
        }
    }
    Ok(Some(value))
}

/// `config.toml` without sublet; `None`: no such file.
///
/// # Errors
/// It is no TOML, or would be none then; lines of others stand in our block.
pub fn undo(found: Option<&str>) -> Result<Option<String>, SetupError> {
    let Some(found) = found else { return Ok(None) };
    toml(found)?;
    let mut left = String::new();
    let mut ours = false;
    for line in found.split_inclusive('\n') {
        let is = |begin: &str| line.trim_end() == begin;
        if is(BEGIN) || is(BEGIN_ON_OPEN_LINE) {
            ours = true;
            if is(BEGIN_ON_OPEN_LINE) {
                left.pop();
            }
        } else if ours {
            ours = line.trim_end() != END.trim_end();
            if ours && !is_ours(line.trim_end()) {
                let line = sublet_core::text::safe(line.trim());
                return Err(altered(format!("its block has the line `{line}`: move that out of the block")));
            }
        } else if let Some(kept) = line.strip_prefix(KEPT) {
            left.push_str(kept);
        } else if !line.trim_end().ends_with(MARK.trim_end()) {
            left.push_str(line);
        }
    }
    if ours {
        let end = END.trim_end();
        return Err(altered(format!("its block has no end: put `{end}` behind its last line")));
    }
    // Kept lines and those that replaced them: one may have been edited into a key of its own.
    ::toml::from_str::<::toml::Table>(&left).map_err(|error| {
        let why = sublet_core::text::safe(error.to_string().lines().next().unwrap_or_default());
        altered(format!(
            "the rest is no valid TOML ({why}): `sublet setup kept` marks the lines that come back"
        ))
    })?;
    // A file without a version is none of containerd's: it was ours.
    Ok((!left.is_empty()).then_some(left))
}

fn altered(why: String) -> SetupError {
    SetupError::Altered { why }
}

/// Whether `line` is one that [`set_up`] puts into its block.
fn is_ours(line: &str) -> bool {
    let is_header = |plugin: &&str| {
        let rest = line.strip_prefix(&format!("[plugins.\"{plugin}\""));
        rest.is_some_and(|rest| TABLES.contains(&rest))
    };
    LINES.contains(&line) || line.starts_with("BinaryName = ") || PLUGINS.iter().any(is_header)
}

/// Whether our block stands in it.
#[must_use]
pub fn is_set_up(text: &str) -> bool {
    text.lines().any(|line| line == BEGIN || line == BEGIN_ON_OPEN_LINE)
}

/// Whether an undo would take anything out: our block, or lines of ours that outlived it.
fn has_lines_of_ours(text: &str) -> bool {
    let is_ours = |line: &str| line.starts_with(KEPT) || line.ends_with(MARK.trim_end());
    is_set_up(text) || text.lines().map(str::trim_end).any(is_ours)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::wish;
    use super::*;

    fn all() -> Wish {
        Wish { default: true, cdi: true, ..wish() }
    }

    #[test]
    fn a_new_file_has_a_version_and_goes_again() {
        let text = set_up(None, &wish()).unwrap();
        let expected = "# >>> sublet setup: `sublet setup containerd --undo` takes this block out\n\
             version = 2\n\
             [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.sublet]\n\
             runtime_type = \"io.containerd.runc.v2\"\n\
             pod_annotations = [\"sublet.*\"]\n\
             container_annotations = [\"sublet.*\"]\n\
             [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.sublet.options]\n\
             BinaryName = \"/usr/bin/sublet-runtime\"\n\
             # <<< sublet setup\n";
        assert_eq!(text, expected);
        assert_eq!(undo(Some(&text)).unwrap(), None);
        assert_eq!(set_up(Some(&text), &wish()).unwrap(), text);
        let text = set_up(Some("version = 2\n"), &wish()).unwrap();
        assert_eq!(undo(Some(&text)).unwrap().as_deref(), Some("version = 2\n"));
    }

    /// As `containerd config default` prints it.
    const DEFAULT: &str = "version = 2\n\n[plugins]\n\n  [plugins.\"io.containerd.grpc.v1.cri\"]\n    \
        enable_cdi = false\n    max = 3 # pods\n\n    [plugins.\"io.containerd.grpc.v1.cri\".containerd]\n      \
        default_runtime_name = \"runc\"\n\n      \
        [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n        runtime_type = \"x\"";

    #[test]
    fn the_dump_of_the_defaults_keeps_its_lines() {
        let text = set_up(Some(DEFAULT), &all()).unwrap();
        assert!(text.contains(
            "      default_runtime_name = \"sublet\" # sublet setup\n# sublet setup kept:       \
             default_runtime_name = \"runc\"\n"
        ));
        assert!(
            text.contains(
                "    enable_cdi = true # sublet setup\n# sublet setup kept:     enable_cdi = false\n"
            )
        );
        assert_eq!(undo(Some(&text)).unwrap().as_deref(), Some(DEFAULT));
        assert_eq!(set_up(Some(&text), &all()).unwrap(), text, "a second time changes nothing");
        let plain = set_up(Some(&text), &wish()).unwrap();
        assert_eq!(undo(Some(&plain)).unwrap().as_deref(), Some(DEFAULT));
    }

    #[test]
    fn version_3_has_its_own_plugin() {
        let text = set_up(Some("version = 3\n"), &all()).unwrap();
        assert!(text.contains("[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.sublet]\n"));
        assert!(text.contains("[plugins.\"io.containerd.cri.v1.runtime\"]\nenable_cdi = true\n"));
        assert!(text.contains(
            "[plugins.\"io.containerd.cri.v1.runtime\".\"containerd\"]\ndefault_runtime_name = \"sublet\"\n"
        ));
        assert_eq!(undo(Some(&text)).unwrap().as_deref(), Some("version = 3\n"));
    }

    #[test]
    fn what_cannot_be_edited_is_refused() {
        let why = |text: &str| set_up(Some(text), &all()).unwrap_err().to_string();
        assert!(why("disabled_plugins = [\"cri\"]\n").starts_with("it is not of version 2 or 3"));
        assert!(why("version = 2\n[plug").starts_with("it is no valid TOML (TOML parse error at line 2"));
        let inline = "version = 2\nplugins = { \"io.containerd.grpc.v1.cri\" = { containerd = {} } }\n";
        assert!(why(inline).starts_with("it cannot be edited line by line"), "{}", why(inline));
        let taken =
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.sublet]\nx = 1\n";
        assert!(why(taken).contains("is there already"), "{}", why(taken));
    }

    #[test]
    fn an_undo_loses_no_line_of_others() {
        let text = set_up(Some(DEFAULT), &all()).unwrap();
        let why = |text: &str| undo(Some(text)).unwrap_err().to_string();
        let open = text.replace(END, "") + "[metrics]\naddress = \"\"\n";
        assert!(why(&open).contains("has the line `[metrics]`"), "{}", why(&open));
        assert!(why(&text.replace(END, "")).contains("put `# <<< sublet setup` behind"), "{}", why(&text));
        let added = text.replace(END, "# mine\nprivileged_without_host_devices = true\n# <<< sublet setup\n");
        assert!(why(&added).contains("has the line `# mine`"), "{}", why(&added));
        let theirs = text.replace("\"sublet\" # sublet setup", "\"kata\"");
        assert!(why(&theirs).contains("the rest is no valid TOML"), "{}", why(&theirs));
        assert_eq!(set_up(Some(&theirs), &wish()).unwrap_err(), undo(Some(&theirs)).unwrap_err());
    }

    #[test]
    fn lines_of_ours_that_outlived_their_block_go_too() {
        let found = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = true # sublet setup\n\
                     # sublet setup kept: enable_cdi = false\n";
        let text = set_up(Some(found), &all()).unwrap();
        assert_eq!(set_up(Some(&text), &all()).unwrap(), text, "a second time changes nothing");
        let left = undo(Some(&text)).unwrap().unwrap();
        assert_eq!(left, "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = false\n");
        let nested = "version = 2\n# sublet setup kept: # sublet setup kept: x\n";
        assert!(set_up(Some(nested), &all()).is_err());
    }

    proptest! {
        #[test]
        fn an_undo_gives_back_every_byte(
            version in 2..4,
            parts in Just(vec![
                "[debug]\n  level = \"info\"  # why\n",
                "\n\n# [plugins.\"io.containerd.grpc.v1.cri\"]\n",
                "[plugins.\"io.containerd.grpc.v1.cri\"]\n\tenable_cdi=false\n",
                " [ plugins . \"io.containerd.grpc.v1.cri\" . containerd ] # here\r\n",
                "[plugins.\"io.containerd.cri.v1.runtime\".containerd]\ndefault_runtime_name = 'runc'\n",
                "[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.runc]\nx = '''\n [x]\n'''\n",
            ]).prop_shuffle(),
            count in 0..7_usize,
            open: bool,
            default: bool,
            cdi: bool,
        ) {
            let mut found = format!("version = {version}\n\n{}", parts[..count.min(6)].concat());
            if open {
                found = found.trim_end().to_owned();
            }
            let wish = Wish { default, cdi, ..wish() };
            let text = set_up(Some(&found), &wish).unwrap();
            prop_assert_eq!(&set_up(Some(&text), &wish).unwrap(), &text);
            prop_assert_eq!(undo(Some(&text)).unwrap(), Some(found));
        }
    }
}
