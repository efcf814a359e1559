//! containerd's `config.toml`, versions 2 and 3 (containerd's docs/cri/config.md): a runtime handler for pods.

use std::fs::{File, read_to_string};
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::Path;

use nix::sys::memfd::{MFdFlags, memfd_create};
use toml_edit::{Array, DocumentMut, Item, Table, TableLike, Value, value};

use super::engine_files::{Record, Recorded, undo_by_record, with_record};
use super::{Ask, NAME, SetupError, Wish, no_toml, plain};
use sublet_core::text::{safe, safe_path};

/// The plugin that serves pods, in versions 2 and 3.
const PLUGINS: [&str; 2] = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"];

/// The plugin's tables on the way to the handler.
const TABLES: [&str; 2] = ["containerd", "runtimes"];

const DEFAULT: &str = "default_runtime_name";
const CDI: &str = "enable_cdi";

/// A file that says nothing: containerd does not accept one without a version.
const EMPTY: &str = "version = 2\n";

/// `config.toml` with the handler, and the record of the changes. `found` is its current text, `record` that of an earlier
/// setup, if any.
///
/// # Errors
/// The file is no TOML of version 2 or 3, has another handler of that name, or something else where tables belong.
pub fn set_up(found: Option<&str>, record: Option<&str>, wish: &Wish) -> Result<Recorded, SetupError> {
    let after = put_in(found.unwrap_or(EMPTY), wish)?;
    has(&after, wish)?;
    with_record(found, record, (found.is_some_and(is_set_up), after), take_out)
}

/// `config.toml` without sublet; `None`: no such file. `record` is the one from [`set_up`], if it still exists. Without it
/// `enable_cdi` stays.
///
/// # Errors
/// The file is no TOML, or the record is none.
pub fn undo(found: Option<&str>, record: Option<&str>) -> Result<Option<String>, SetupError> {
    undo_by_record(found, record, take_out)
}

fn put_in(found: &str, wish: &Wish) -> Result<String, SetupError> {
    if has(found, wish).is_ok() {
        return Ok(found.to_owned());
    }
    let mut file = parsed(found)?;
    let (plugin, runtime) = (plugin(&file)?, plain(&wish.runtime)?);
    let cri = table(file.as_table_mut(), &["plugins", plugin])?;
    if wish.cdi {
        set(cri, CDI, true.into())?;
    }
    let containerd = table(cri, &TABLES[..1])?;
    if wish.default {
        set(containerd, DEFAULT, NAME.into())?;
    }
    let runtimes = table(containerd, &TABLES[1..])?;
    match runtimes.get(NAME).map(|there| binary(there) == Some(runtime)) {
        Some(true) => {}
        Some(false) => {
            let key = format!("[plugins.\"{plugin}\".containerd.runtimes.{NAME}]");
            return Err(SetupError::Taken { key });
        }
        None => drop(runtimes.insert(NAME, Item::Table(handler(runtime)))),
    }
    Ok(file.to_string())
}

fn take_out(found: &str, record: Option<&Record>) -> Result<Option<String>, SetupError> {
    let mut file = parsed(found)?;
    let unedited = file.to_string();
    let Ok(plugin) = plugin(&file) else { return Ok(Some(found.to_owned())) };
    let before = parsed(record.and_then(|record| record.before.as_deref()).unwrap_or(EMPTY))?;
    let after = parsed(record.map_or(EMPTY, |record| &record.after))?;
    let is_on = |file: &DocumentMut| at(file, plugin, &[CDI]).and_then(Item::as_bool) == Some(true);
    if is_on(&after) && is_on(&file) {
        put_back(&mut file, plugin, (&[], CDI), &before)?;
    }
    if at(&file, plugin, &[TABLES[0], DEFAULT]).and_then(Item::as_str) == Some(NAME) {
        // Whoever set it: without the handler pods would not start.
        put_back(&mut file, plugin, (&TABLES[..1], DEFAULT), &before)?;
    }
    put_back(&mut file, plugin, (&TABLES, NAME), &before)?;
    if file.to_string() == unedited {
        return Ok(Some(found.to_owned()));
    }
    match record {
        Some(Record { before: None, .. }) if file.iter().all(|(key, _)| key == "version") => Ok(None),
        _ => Ok(Some(file.to_string())),
    }
}

/// Gives `key` of the table at `path` of the plugin the value that it has in `before`, or none. Tables that are left empty,
/// and are not in `before`, go too.
fn put_back(
    file: &mut DocumentMut,
    plugin: &str,
    (path, key): (&[&str], &str),
    before: &DocumentMut,
) -> Result<(), SetupError> {
    let path = [&["plugins", plugin], path].concat();
    let was = item(before, &[&path[..], &[key]].concat()).and_then(Item::as_value);
    match was {
        Some(was) => return set(table(file.as_table_mut(), &path)?, key, was.clone()),
        None => drop(table(file.as_table_mut(), &path)?.remove(key)),
    }
    for depth in (1..=path.len()).rev() {
        let (above, name) = (&path[..depth - 1], path[depth - 1]);
        let is_left_empty =
            item(file, &path[..depth]).and_then(Item::as_table_like).is_some_and(TableLike::is_empty);
        if is_left_empty && item(before, &path[..depth]).is_none() {
            table(file.as_table_mut(), above)?.remove(name);
        }
    }
    Ok(())
}

fn parsed(text: &str) -> Result<DocumentMut, SetupError> {
    text.parse().map_err(no_toml)
}

/// The item at `path`.
fn item<'f>(file: &'f DocumentMut, path: &[&str]) -> Option<&'f Item> {
    path.iter().try_fold(file.as_item(), |item, name| item.get(*name))
}

/// The item at `path` in the plugin's table.
fn at<'f>(file: &'f DocumentMut, plugin: &str, path: &[&str]) -> Option<&'f Item> {
    item(file, &[&["plugins", plugin], path].concat())
}

/// The table at `path`; those that are missing are made.
fn table<'t>(from: &'t mut dyn TableLike, path: &[&str]) -> Result<&'t mut dyn TableLike, SetupError> {
    path.iter().try_fold(from, |table, name| {
        if !table.contains_key(name) {
            let mut new = Table::new();
            new.set_implicit(true);
            table.insert(name, Item::Table(new));
        }
        let no_table = SetupError::Shape { key: (*name).to_owned(), found: "no table", expected: "a table" };
        table.get_mut(name).and_then(Item::as_table_like_mut).ok_or(no_table)
    })
}

/// Gives `key` this value, with the comments and white space around the one that is there.
fn set(table: &mut dyn TableLike, key: &str, mut new: Value) -> Result<(), SetupError> {
    let no_value = SetupError::Shape { key: key.to_owned(), found: "a table", expected: "a value" };
    match table.get_mut(key) {
        Some(Item::Value(there)) => {
            *new.decor_mut() = there.decor().clone();
            *there = new;
        }
        Some(_) => return Err(no_value),
        None => drop(table.insert(key, Item::Value(new))),
    }
    Ok(())
}

fn handler(runtime: &str) -> Table {
    let list = |annotations: &[&str]| value(annotations.iter().copied().collect::<Array>());
    let mut options = Table::new();
    options.insert("BinaryName", value(runtime));
    let mut handler = Table::new();
    handler.insert("runtime_type", value("io.containerd.runc.v2"));
    handler.insert("pod_annotations", list(&["sublet.*", "sublet.*/*"]));
    handler.insert("container_annotations", list(&["sublet.*"]));
    handler.insert("options", Item::Table(options));
    handler
}

/// The program of a handler.
fn binary(handler: &Item) -> Option<&str> {
    handler.get("options")?.get("BinaryName")?.as_str()
}

/// The plugin that serves pods.
fn plugin(file: &DocumentMut) -> Result<&'static str, SetupError> {
    match file.get("version").and_then(Item::as_integer) {
        Some(2) => Ok(PLUGINS[0]),
        Some(3) => Ok(PLUGINS[1]),
        _ => Err(SetupError::Version),
    }
}

/// Whether containerd reads `wish` from `text`, which may be its dump of all its files.
fn has(text: &str, wish: &Wish) -> Result<(), SetupError> {
    let file = parsed(text).map_err(|error| SetupError::Unedited(error.to_string()))?;
    let plugin = plugin(&file)?;
    let missing = |key: &str| SetupError::Unedited(format!("{key} could not be found after the edit"));
    if at(&file, plugin, &[TABLES[0], TABLES[1], NAME]).and_then(binary) != wish.runtime.to_str() {
        return Err(missing("the runtime"));
    }
    if wish.default && at(&file, plugin, &[TABLES[0], DEFAULT]).and_then(Item::as_str) != Some(NAME) {
        return Err(missing(DEFAULT));
    }
    if wish.cdi && at(&file, plugin, &[CDI]).and_then(Item::as_bool) != Some(true) {
        return Err(missing(CDI));
    }
    Ok(())
}

/// Whether sublet's handler is in it.
pub fn is_set_up(text: &str) -> bool {
    let handler = |file: &DocumentMut, plugin| at(file, plugin, &[TABLES[0], TABLES[1], NAME]).is_some();
    parsed(text).is_ok_and(|file| plugin(&file).is_ok_and(|plugin| handler(&file, plugin)))
}

/// Checks that containerd, with the files that its configuration imports, reads the setup in `text`, which is to become
/// `path`. Its versions treat a table that stands in several files differently, so it is asked.
///
/// # Errors
/// An imported file takes the place of sublet's lines, or containerd does not read the file.
pub(crate) fn check_imports(path: &Path, text: &str, wish: &Wish, ask: Ask) -> Result<(), SetupError> {
    let mut file = parsed(text)?;
    let imports = file.get_mut("imports").and_then(Item::as_array_mut).filter(|imports| !imports.is_empty());
    let Some(imports) = imports.filter(|_| ask(&["containerd", "--version"]).is_some()) else {
        return Ok(());
    };
    // A copy is read, so that nothing is changed yet. It has no directory that names could be relative to.
    let beside = path.parent().unwrap_or(Path::new("/"));
    for import in imports.iter_mut() {
        if let Some(name) = import.as_str() {
            *import = beside.join(name).to_string_lossy().into_owned().into();
        }
    }
    let read = || {
        let mut copy = File::from(memfd_create(c"config.toml", MFdFlags::MFD_CLOEXEC).ok()?);
        copy.write_all(file.to_string().as_bytes()).ok()?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), copy.as_raw_fd());
        ask(&["containerd", "--config", &path, "config", "dump"])
    };
    let dump = read().ok_or_else(|| SetupError::Unread(safe_path(path)))?;
    has(&dump, wish).map_err(|_| SetupError::Replaced { files: replacing(&dump).join(", ") })
}

/// The imported files that have the table of the plugin for pods, from the `dump` of containerd.
fn replacing(dump: &str) -> Vec<String> {
    let dump = parsed(dump).unwrap_or_default();
    let read = dump.get("imports").and_then(Item::as_array).into_iter().flatten().filter_map(Value::as_str);
    let has_it = |path: &&str| {
        let file = parsed(&read_to_string(path).unwrap_or_default()).unwrap_or_default();
        PLUGINS.iter().any(|plugin| item(&file, &["plugins", plugin]).is_some())
    };
    read.filter(has_it).map(safe).collect()
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
        let (text, record) = set_up(None, None, &wish()).unwrap();
        let expected = "version = 2\n\n\
             [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.sublet]\n\
             runtime_type = \"io.containerd.runc.v2\"\n\
             pod_annotations = [\"sublet.*\", \"sublet.*/*\"]\n\
             container_annotations = [\"sublet.*\"]\n\n\
             [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.sublet.options]\n\
             BinaryName = \"/usr/bin/sublet-runtime\"\n";
        assert_eq!(text, expected);
        assert_eq!(undo(Some(&text), Some(&record)).unwrap(), None);
        assert_eq!(undo(Some(&text.replace('[', " [")), Some(&record)).unwrap(), None);
        assert_eq!(set_up(Some(&text), Some(&record), &wish()).unwrap(), (text.clone(), record.clone()));
        let (text, record) = set_up(Some("version = 2\n"), None, &wish()).unwrap();
        assert_eq!(undo(Some(&text), Some(&record)).unwrap().as_deref(), Some("version = 2\n"));
        assert_eq!(undo(Some(&text), None).unwrap().as_deref(), Some("version = 2\n"), "without the record");
    }

    /// As `containerd config default` prints it.
    const FOUND: &str = "version = 2\n\n[plugins]\n\n  [plugins.\"io.containerd.grpc.v1.cri\"]\n    \
        enable_cdi = false # why\n    max = 3 # pods\n\n    [plugins.\"io.containerd.grpc.v1.cri\".containerd]\n      \
        default_runtime_name = \"runc\"\n\n      \
        [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n        runtime_type = \"x\"";

    #[test]
    fn the_dump_of_the_defaults_keeps_its_lines() {
        let (text, record) = set_up(Some(FOUND), None, &all()).unwrap();
        let edited =
            FOUND.replace("enable_cdi = false", "enable_cdi = true").replace("\"runc\"", "\"sublet\"");
        assert!(text.starts_with(&format!("{edited}\n")), "{text}");
        assert_eq!(undo(Some(&text), Some(&record)).unwrap().as_deref(), Some(FOUND));
        let again = set_up(Some(&text), Some(&record), &all()).unwrap();
        assert_eq!(again, (text.clone(), record.clone()), "a second time changes nothing");
        let (plain, record) = set_up(Some(&text), Some(&record), &wish()).unwrap();
        assert_eq!(undo(Some(&plain), Some(&record)).unwrap().as_deref(), Some(FOUND));
    }

    #[test]
    fn version_3_has_its_own_plugin() {
        let (text, record) = set_up(Some("version = 3\n"), None, &all()).unwrap();
        assert!(text.contains("[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.sublet]\n"));
        assert!(text.contains("[plugins.\"io.containerd.cri.v1.runtime\"]\nenable_cdi = true\n"), "{text}");
        assert!(text.contains(
            "[plugins.\"io.containerd.cri.v1.runtime\".containerd]\ndefault_runtime_name = \"sublet\"\n"
        ));
        assert_eq!(undo(Some(&text), Some(&record)).unwrap().as_deref(), Some("version = 3\n"));
    }

    #[test]
    fn a_file_that_cannot_be_edited_is_refused() {
        let why = |text: &str| set_up(Some(text), None, &all()).unwrap_err().to_string();
        assert!(why("disabled_plugins = [\"cri\"]\n").starts_with("its version is not 2 or 3"));
        assert!(why("version = 2\n[plug").starts_with("it is not valid TOML (TOML parse error at line 2"));
        assert!(why("version = 2\nplugins = 1\n").starts_with("plugins is no table, not a table"));
        let table = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".enable_cdi]\n";
        assert!(why(table).starts_with("enable_cdi is a table, not a value"), "{}", why(table));
        let taken =
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.sublet]\nx = 1\n";
        assert!(why(taken).contains("already exists"), "{}", why(taken));
    }

    #[test]
    fn inline_tables_and_dotted_keys_take_it_too() {
        for found in [
            "version = 2\nplugins = { \"io.containerd.grpc.v1.cri\" = { containerd = {} } }\n",
            "version = 2\nplugins.\"io.containerd.grpc.v1.cri\".enable_cdi = false\n",
            "version = 2\n[plugins]\n\"io.containerd.grpc.v1.cri\".containerd.x = 1\n",
        ] {
            let (text, record) = set_up(Some(found), None, &all()).unwrap();
            assert_eq!(set_up(Some(&text), Some(&record), &all()).unwrap(), (text.clone(), record.clone()));
            assert_eq!(undo(Some(&text), Some(&record)).unwrap().as_deref(), Some(found));
        }
    }

    #[test]
    fn an_undo_loses_no_line_of_another_program() {
        let (text, record) = set_up(Some(FOUND), None, &all()).unwrap();
        let added = "[metrics]\naddress = \"\" # mine\n";
        let left = undo(Some(&format!("{text}{added}")), Some(&record)).unwrap().unwrap();
        assert_eq!(left, format!("{FOUND}\n{added}"));
        let theirs =
            text.replace("\"sublet\"\n", "\"kata\"\n").replace("enable_cdi = true", "enable_cdi = false");
        let left = undo(Some(&theirs), Some(&record)).unwrap().unwrap();
        assert_eq!(left, FOUND.replace("\"runc\"", "\"kata\"") + "\n");
        let left = undo(Some(&text), None).unwrap().unwrap();
        let known = FOUND.replace("enable_cdi = false", "enable_cdi = true");
        assert_eq!(
            left,
            known.replace("      default_runtime_name = \"runc\"\n", "") + "\n",
            "without the record"
        );
        assert_eq!(undo(Some(FOUND), None).unwrap().as_deref(), Some(FOUND), "nothing of sublet's");
        assert!(undo(Some(&text), Some("{")).unwrap_err().to_string().contains("its record beside the file"));
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
            let (text, record) = set_up(Some(&found), None, &wish).unwrap();
            prop_assert_eq!(&set_up(Some(&text), Some(&record), &wish).unwrap(), &(text.clone(), record.clone()));
            prop_assert_eq!(undo(Some(&text), Some(&record)).unwrap(), Some(found.clone()));
            // Edited since, so that it is taken out piece by piece: foreign lines stay, and none of sublet's.
            let left = undo(Some(&format!("{text}# theirs\n")), Some(&record)).unwrap().unwrap();
            prop_assert!(!left.contains(NAME), "{}", left);
            let values = |text: &str| toml::from_str::<toml::Table>(text).unwrap();
            prop_assert_eq!(values(&left), values(&found));
        }
    }
}
