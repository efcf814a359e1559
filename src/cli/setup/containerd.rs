//! containerd's `config.toml`, versions 2 and 3 (containerd's docs/cri/config.md): a runtime handler for pods.
//!
//! sublet's tables are a block at the end of the file. A line of sublet's in another table ends in
//! [`MARK`]; the line that it replaces follows as a comment.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{NAME, SetupError, Wish, first_line, no_toml, quoted};

const BEGIN: &str = "# >>> sublet setup: `sublet setup containerd --undo` takes this block out";
/// The same, where the file did not end with a newline.
const BEGIN_ON_OPEN_LINE: &str = "# >>> sublet setup, on a line that had no end: \
                                  `sublet setup containerd --undo` takes this block out";
const END: &str = "# <<< sublet setup\n";
const MARK: &str = " # sublet setup\n";
const KEPT: &str = "# sublet setup kept: ";

/// The plugin that serves pods, in versions 2 and 3.
pub(super) const PLUGINS: [&str; 2] = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"];

/// What sublet's block may contain besides `BinaryName`: ends of headers, and lines.
const TABLES: [&str; 4] =
    ["]", ".\"containerd\"]", ".containerd.runtimes.sublet]", ".containerd.runtimes.sublet.options]"];
const LINES: [&str; 6] = [
    "version = 2",
    "runtime_type = \"io.containerd.runc.v2\"",
    "pod_annotations = [\"sublet.*\", \"sublet.*/*\"]",
    "container_annotations = [\"sublet.*\"]",
    "default_runtime_name = \"sublet\"",
    "enable_cdi = true",
];

/// `config.toml` with the handler; `found` is its current text.
///
/// # Errors
/// The file is no TOML of version 2 or 3, has another handler of that name, or has tables that take no further lines.
pub fn set_up(found: Option<&str>, wish: &Wish) -> Result<String, SetupError> {
    // Starts again from the file without sublet, because the wish may differ.
    let left = if found.is_some_and(has_sublet_lines) { undo(found)? } else { found.map(str::to_owned) };
    match left.as_deref() {
        Some(left) if has_sublet_lines(left) => {
            Err(SetupError::Taken { what: "a line of sublet setup's".into() })
        }
        left => added(left, wish),
    }
}

fn added(found: Option<&str>, wish: &Wish) -> Result<String, SetupError> {
    let version = if found.is_none() { "version = 2\n" } else { "" };
    let file = parsed(found.unwrap_or(version))?;
    let plugin = plugin(&file)?;
    let cri = format!("plugins.\"{plugin}\"");
    if at(&file, &["plugins", plugin, "containerd", "runtimes", NAME]).is_some() {
        return Err(SetupError::Taken { what: format!("[{cri}.containerd.runtimes.{NAME}]") });
    }
    let mut text = found.unwrap_or_default().to_owned();
    let begin = if text.is_empty() || text.ends_with('\n') { BEGIN } else { BEGIN_ON_OPEN_LINE };
    if begin == BEGIN_ON_OPEN_LINE {
        text.push('\n');
    }
    let mut block = format!("{version}{}", handler(&cri, wish)?);
    if wish.default {
        let wanted = ("default_runtime_name", format!("\"{NAME}\""));
        assign(&mut text, &mut block, &["plugins", plugin, "containerd"], &wanted)?;
    }
    if wish.cdi {
        assign(&mut text, &mut block, &["plugins", plugin], &("enable_cdi", "true".to_owned()))?;
    }
    let text = format!("{text}{begin}\n{block}{END}");
    confirmed(&text, plugin, wish)?;
    Ok(text)
}

fn parsed(text: &str) -> Result<DeTable<'_>, SetupError> {
    DeTable::parse(text).map(Spanned::into_inner).map_err(no_toml)
}

/// The value at `path`.
fn at<'f, 't>(file: &'f DeTable<'t>, path: &[&str]) -> Option<&'f Spanned<DeValue<'t>>> {
    let (first, rest) = path.split_first()?;
    rest.iter().try_fold(file.get(*first)?, |value, name| value.get_ref().get(*name))
}

/// The plugin that serves pods.
fn plugin(file: &DeTable<'_>) -> Result<&'static str, SetupError> {
    let version = file.get("version").and_then(|value| value.get_ref().as_integer());
    match version.and_then(|version| i64::from_str_radix(version.as_str(), version.radix()).ok()) {
        Some(2) => Ok(PLUGINS[0]),
        Some(3) => Ok(PLUGINS[1]),
        _ => Err(SetupError::Version),
    }
}

fn handler(cri: &str, wish: &Wish) -> Result<String, SetupError> {
    Ok(format!(
        "[{cri}.containerd.runtimes.{NAME}]\n\
         runtime_type = \"io.containerd.runc.v2\"\n\
         pod_annotations = [\"sublet.*\", \"sublet.*/*\"]\n\
         container_annotations = [\"sublet.*\"]\n\
         [{cri}.containerd.runtimes.{NAME}.options]\n\
         BinaryName = {}\n",
        quoted(&wish.runtime)?
    ))
}

/// Puts `key = value` into the table at `path`: in place of the lines that set it now, or below the table's header, or
/// as a new table in `block`.
fn assign(
    text: &mut String,
    block: &mut String,
    path: &[&str],
    (key, value): &(&str, String),
) -> Result<(), SetupError> {
    let file = parsed(text)?;
    // A table without a header of its own has the position of a key.
    let table = at(&file, path).filter(|table| text.get(table.span()).is_some_and(|at| at.starts_with('[')));
    let Some((header, table)) = table.and_then(|table| Some((table.span(), table.get_ref().as_table()?)))
    else {
        let names: Vec<String> = path[1..].iter().map(|name| format!("\"{name}\"")).collect();
        *block = format!("{block}[{}.{}]\n{key} = {value}\n", path[0], names.join("."));
        return Ok(());
    };
    let there = table.get_key_value(*key).filter(|(_, value)| !value.get_ref().is_table());
    let there = there.map(|(key, value)| key.span().start..value.span().end);
    let Range { start, end } = there.clone().unwrap_or(header);
    let start = text[..start].rfind('\n').map_or(0, |before| before + 1);
    let end = text[end..].find('\n').map_or(text.len(), |rest| end + rest + 1);
    let lines = &text[start..end];
    let indent = &lines[..lines.len() - lines.trim_start_matches([' ', '\t']).len()];
    let ours = format!("{indent}{key} = {value}{MARK}");
    let lines = match there {
        Some(_) => lines.split_inclusive('\n').fold(ours, |all, line| all + KEPT + line),
        None => format!("{lines}{ours}"),
    };
    text.replace_range(start..end, &lines);
    Ok(())
}

/// Whether `dump`, which containerd prints of all its files, has what was asked for.
pub(super) fn has(dump: &str, wish: &Wish) -> Result<(), SetupError> {
    confirmed(dump, plugin(&parsed(dump)?)?, wish)
}

/// Whether containerd will read from `text` what was asked for.
fn confirmed(text: &str, plugin: &str, wish: &Wish) -> Result<(), SetupError> {
    let inline = |why: String| SetupError::Inline { why };
    let file = parsed(text).map_err(|error| inline(error.to_string()))?;
    let value = |path: &[&str]| at(&file, &[&["plugins", plugin], path].concat()).map(Spanned::get_ref);
    let runtime = value(&["containerd", "runtimes", NAME, "options", "BinaryName"]);
    if runtime.and_then(DeValue::as_str) != wish.runtime.to_str() {
        return Err(inline("the runtime could not be found after the edit".to_owned()));
    }
    let default = value(&["containerd", "default_runtime_name"]);
    if wish.default && default.and_then(DeValue::as_str) != Some(NAME) {
        return Err(inline("default_runtime_name could not be found after the edit".to_owned()));
    }
    if wish.cdi && value(&["enable_cdi"]).and_then(DeValue::as_bool) != Some(true) {
        return Err(inline("enable_cdi could not be found after the edit".to_owned()));
    }
    Ok(())
}

/// `config.toml` without sublet; `None`: no such file.
///
/// # Errors
/// The file is no TOML, or would not be any more; or sublet's block contains other lines.
pub fn undo(found: Option<&str>) -> Result<Option<String>, SetupError> {
    let Some(found) = found else { return Ok(None) };
    if parsed(found)?.values().any(|value| has_marker_lines(found, value)) {
        return Err(altered(
            "a line inside a value looks like a marker line of `sublet setup`: write that value another way"
                .to_owned(),
        ));
    }
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
            if ours && !was_written_by_sublet(line.trim_end()) {
                let line = sublet_core::text::safe(line.trim());
                return Err(altered(format!(
                    "its block contains the line `{line}`: move that line out of the block"
                )));
            }
        } else if let Some(kept) = line.strip_prefix(KEPT) {
            left.push_str(kept);
        } else if !line.trim_end().ends_with(MARK.trim_end()) {
            left.push_str(line);
        }
    }
    if ours {
        let end = END.trim_end();
        return Err(altered(format!("its block has no end: add the line `{end}` after its last line")));
    }
    // Restored lines and those that replaced them: either may have been edited into a key of its own.
    DeTable::parse(&left).map_err(|error| {
        let why = first_line(error);
        altered(format!(
            "the rest is not valid TOML ({why}): `sublet setup kept` marks the lines that are put back"
        ))
    })?;
    // containerd does not accept a file without a version, so this one was sublet's.
    Ok((!left.is_empty()).then_some(left))
}

fn altered(why: String) -> SetupError {
    SetupError::Altered { why }
}

/// Whether `line` is one that [`set_up`] puts into its block.
fn was_written_by_sublet(line: &str) -> bool {
    let is_header = |plugin: &&str| {
        let rest = line.strip_prefix(&format!("[plugins.\"{plugin}\""));
        rest.is_some_and(|rest| TABLES.contains(&rest))
    };
    LINES.contains(&line) || line.starts_with("BinaryName = ") || PLUGINS.iter().any(is_header)
}

/// Whether sublet's block is in it.
#[must_use]
pub fn is_set_up(text: &str) -> bool {
    text.lines().any(|line| line == BEGIN || line == BEGIN_ON_OPEN_LINE)
}

/// Whether an undo would remove anything: the block, or sublet's lines without it.
fn has_sublet_lines(text: &str) -> bool {
    let is_sublet_line = |line: &str| line.starts_with(KEPT) || line.trim_end().ends_with(MARK.trim_end());
    is_set_up(text) || text.lines().any(is_sublet_line)
}

/// Whether an undo, which works on lines, would remove lines of `value`.
fn has_marker_lines(text: &str, value: &Spanned<DeValue<'_>>) -> bool {
    text.get(value.span()).is_none_or(has_sublet_lines)
        || match value.get_ref() {
            DeValue::Table(table) => table.values().any(|value| has_marker_lines(text, value)),
            DeValue::Array(array) => array.iter().any(|value| has_marker_lines(text, value)),
            _ => false,
        }
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
             pod_annotations = [\"sublet.*\", \"sublet.*/*\"]\n\
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
        assert!(why("disabled_plugins = [\"cri\"]\n").starts_with("its version is not 2 or 3"));
        assert!(why("version = 2\n[plug").starts_with("it is not valid TOML (TOML parse error at line 2"));
        let inline = "version = 2\nplugins = { \"io.containerd.grpc.v1.cri\" = { containerd = {} } }\n";
        assert!(why(inline).starts_with("it cannot be edited line by line"), "{}", why(inline));
        let taken =
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.sublet]\nx = 1\n";
        assert!(why(taken).contains("already exists"), "{}", why(taken));
    }

    #[test]
    fn an_undo_loses_no_line_of_others() {
        let text = set_up(Some(DEFAULT), &all()).unwrap();
        let why = |text: &str| undo(Some(text)).unwrap_err().to_string();
        let open = text.replace(END, "") + "[metrics]\naddress = \"\"\n";
        assert!(why(&open).contains("contains the line `[metrics]`"), "{}", why(&open));
        assert!(
            why(&text.replace(END, "")).contains("add the line `# <<< sublet setup` after"),
            "{}",
            why(&text)
        );
        let added = text.replace(END, "# mine\nprivileged_without_host_devices = true\n# <<< sublet setup\n");
        assert!(why(&added).contains("contains the line `# mine`"), "{}", why(&added));
        let theirs = text.replace("\"sublet\" # sublet setup", "\"kata\"");
        assert!(why(&theirs).contains("the rest is not valid TOML"), "{}", why(&theirs));
        assert_eq!(set_up(Some(&theirs), &wish()).unwrap_err(), undo(Some(&theirs)).unwrap_err());
    }

    #[test]
    fn sublets_lines_without_their_block_are_removed_too() {
        let found = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = true # sublet setup\n\
                     # sublet setup kept: enable_cdi = false\n";
        let text = set_up(Some(found), &all()).unwrap();
        assert_eq!(set_up(Some(&text), &all()).unwrap(), text, "a second time changes nothing");
        let left = undo(Some(&text)).unwrap().unwrap();
        assert_eq!(left, "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = false\n");
        let open = "version = 2\n# sublet setup kept: ";
        let text = set_up(Some(open), &all()).unwrap();
        assert_eq!(set_up(Some(&text), &all()).unwrap(), text, "a kept line that was empty");
        let nested = "version = 2\n# sublet setup kept: # sublet setup kept: x\n";
        assert!(set_up(Some(nested), &all()).is_err());
    }

    /// An undo works on lines, and would remove these from inside a value.
    #[test]
    fn a_value_with_lines_like_sublets_is_refused() {
        for value in [
            "'''\n# sublet setup kept: x\n'''".to_owned(),
            "\"\"\"a # sublet setup\n\"\"\"".to_owned(),
            format!("'''\n{BEGIN}\n{END}'''"),
            "[\n  1, # sublet setup\n  2]".to_owned(),
        ] {
            let found = format!("version = 2\n[proxy]\nx = {value}\n");
            let why = set_up(Some(&found), &wish()).unwrap_err().to_string();
            assert!(
                why.contains("a line inside a value looks like a marker line of `sublet setup`"),
                "{found}: {why}"
            );
            undo(Some(&found)).unwrap_err();
        }
        let found = "version = 2\nroot = '/srv # sublet setup' # mine\n";
        let text = set_up(Some(found), &wish()).unwrap();
        assert_eq!(undo(Some(&text)).unwrap().as_deref(), Some(found));
    }

    /// A line in a string that looks like a table's header is none, and a value may span several lines.
    #[test]
    fn tables_and_values_are_found_where_the_parser_finds_them() {
        let found = "\u{feff}version = 2\nx = '''\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\n'''\n\
                     [plugins.\"io.containerd.grpc.v1.cri\"]\n  \"enable_cdi\" = [\n    false,\r\n  ]\n\
                     [plugins.\"io.containerd.grpc.v1.cri\".containerd]\n";
        let text = set_up(Some(found), &all()).unwrap();
        let cdi = "  enable_cdi = true # sublet setup\n# sublet setup kept:   \"enable_cdi\" = [\n\
                   # sublet setup kept:     false,\r\n# sublet setup kept:   ]\n";
        assert!(text.contains(cdi), "{text}");
        assert!(text.contains("containerd]\ndefault_runtime_name = \"sublet\" # sublet setup\n"), "{text}");
        assert_eq!(undo(Some(&text)).unwrap().as_deref(), Some(found));
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
