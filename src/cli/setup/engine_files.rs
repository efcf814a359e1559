//! Where engines' configurations are, and obstacles to editing them.

use std::path::{Path, PathBuf};
use std::{fs, io};

use serde::{Deserialize, Serialize};

use super::SetupError;
use sublet_core::fs::{create_directories, replace_durably, under, unless_absent};

/// The file in which a setup of Docker or containerd records its changes of `path`, for the undo.
pub fn record(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".before-sublet");
    PathBuf::from(name)
}

/// The text of `path`; `None` if there is no such file.
///
/// # Errors
/// The file cannot be read, or is not UTF-8.
pub fn read(path: &Path) -> io::Result<Option<String>> {
    unless_absent(fs::read_to_string(path))
}

/// The files that Podman reads for root below `root`, weakest first (containers.conf(5)).
pub fn podmans(root: &Path) -> Vec<PathBuf> {
    let files = ["/usr/share/containers/containers.conf", "/etc/containers/containers.conf"];
    let mut files = files.map(|path| under(root, path)).to_vec();
    files.retain(|path| path.is_file());
    files.extend(drop_ins(&under(root, "/etc/containers/containers.conf.d"), "conf"));
    files
}

/// The files with this extension in a directory, sorted by name.
pub(crate) fn drop_ins(directory: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|own| own == extension));
    files.sort();
    files
}

/// Whether Docker is installed only as a snap: it is confined and cannot run programs of the host (snapcraft.io,
/// "Docker snap").
pub(crate) fn docker_snap(root: &Path) -> Option<PathBuf> {
    let has = |path: &str| under(root, path).exists();
    if ["/usr/bin/dockerd", "/usr/sbin/dockerd", "/usr/local/bin/dockerd"].into_iter().any(has) {
        return None;
    }
    ["/snap/bin/docker", "/var/snap/docker"].into_iter().find(|path| has(path)).map(PathBuf::from)
}

/// The numeric parts of the first version in a program's output: `Docker version 26.1.5+dfsg1` is [26, 1, 5].
pub(crate) fn version(words: &str) -> Option<Vec<u32>> {
    let digits = |word: &str| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.');
    let word = words.split([' ', '\n', '"', ',', 'v']).find(|word| digits(word))?;
    let end = word.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(word.len());
    Some(word[..end].split('.').filter_map(|part| part.parse().ok()).collect())
}

/// The words of a line of systemd's: splits at white space, except in quotes (systemd.syntax(7), "Quoting").
pub(crate) fn words(text: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None::<char>);
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match (character, quote) {
            ('\\', _) => word.get_or_insert_default().extend(characters.next()),
            (end, Some(open)) if end == open => quote = None,
            ('"' | '\'', None) => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (space, None) if space.is_whitespace() => words.extend(word.take()),
            (other, _) => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    words
}

// The record that a setup keeps beside the file that it edits, so that an undo gives back every byte where nobody has
// edited the file since.

/// The content of the record.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Record {
    /// The file without sublet; `None`: there was none.
    pub before: Option<String>,
    /// The file as the last setup left it.
    pub after: String,
}

/// Takes sublet out of a file that was edited since the setup; `None`: the file goes.
pub(super) type TakeOut = fn(found: &str, record: Option<&Record>) -> Result<Option<String>, SetupError>;

/// The output of a setup: a file's text, and the text of the record beside it.
pub type Recorded = (String, String);

/// The output of a setup: `after`, and its record. Where sublet is not `in_it`, in `found`, an earlier `record` is from a
/// setup that was undone by hand.
pub(super) fn with_record(
    found: Option<&str>,
    record: Option<&str>,
    (in_it, after): (bool, String),
    take_out: TakeOut,
) -> Result<Recorded, SetupError> {
    let before = if in_it { undo_by_record(found, record, take_out)? } else { found.map(str::to_owned) };
    let record = Record { before, after };
    let text = serde_json::to_string(&record).unwrap_or_default();
    Ok((record.after, format!("{text}\n")))
}

/// `found` without sublet; `None` if there is no such file.
pub(super) fn undo_by_record(
    found: Option<&str>,
    record: Option<&str>,
    take_out: TakeOut,
) -> Result<Option<String>, SetupError> {
    let Some(found) = found else { return Ok(None) };
    let parsed = record.map(serde_json::from_str::<Record>).transpose().map_err(|error| SetupError::Altered {
        why: format!(
            "its record beside the file cannot be read ({error}): remove the record, and sublet's lines by hand"
        ),
    })?;
    match parsed {
        Some(record) if record.after == found => Ok(record.before),
        record => take_out(found, record.as_ref()),
    }
}

// The setting of sublet's own configuration where sublet is Docker's default runtime: containers without a share are meant
// there. The shim reads nothing of Docker's, because that would cost every container.

/// The file, of sublet's own configuration.
pub(crate) const DEFAULT_RUNTIME: &str = "/etc/sublet/conf.d/docker-default.toml";

const TEXT: &str = "# Written by `sublet setup docker --default`; --undo removes it.\n\
                    [runtime]\nwithout_share = \"run\"\n";

/// Writes `file` if sublet is the default runtime, else removes it.
pub(crate) fn say_default_runtime(file: &Path, is_default: bool) -> io::Result<()> {
    let is_said = fs::read_to_string(file).is_ok_and(|text| text == TEXT);
    match (is_default, is_said) {
        (true, false) => {
            file.parent().map_or(Ok(()), create_directories)?;
            replace_durably(file, TEXT.as_bytes(), 0o644)
        }
        (false, true) => fs::remove_file(file),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_in_the_output_of_programs() {
        let cases = [
            ("Docker version 26.1.5+dfsg1, build 411e817", vec![26, 1, 5]),
            ("Docker Compose version v2.24.5\n", vec![2, 24, 5]),
            ("podman version 5.4.2\n", vec![5, 4, 2]),
            ("runc version 1.1.15+ds1\ncommit: 1.1", vec![1, 1, 15]),
            ("crun version 1.21\n", vec![1, 21]),
            ("28.0.0-rc1", vec![28, 0, 0]),
        ];
        for (words, expected) in cases {
            assert_eq!(version(words), Some(expected), "{words}");
        }
        assert_eq!(version("no such thing"), None);
    }

    #[test]
    fn a_docker_of_a_snap_is_known_unless_there_is_another() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(docker_snap(root.path()), None);
        fs::create_dir_all(root.path().join("var/snap/docker")).unwrap();
        assert_eq!(docker_snap(root.path()), Some(PathBuf::from("/var/snap/docker")));
        fs::create_dir_all(root.path().join("usr/bin")).unwrap();
        fs::write(root.path().join("usr/bin/dockerd"), "").unwrap();
        assert_eq!(docker_snap(root.path()), None);
    }

    #[test]
    fn podmans_files_come_weakest_first() {
        let root = tempfile::tempdir().unwrap();
        let file = |path: &str| {
            let path = under(root.path(), path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
            path
        };
        let expected = [
            file("/usr/share/containers/containers.conf"),
            file("/etc/containers/containers.conf"),
            file("/etc/containers/containers.conf.d/10-a.conf"),
            file("/etc/containers/containers.conf.d/sublet.conf"),
        ];
        file("/etc/containers/containers.conf.d/sublet.conf.dpkg-old");
        assert_eq!(podmans(root.path()), expected);
    }

    #[test]
    fn the_setting_stands_while_sublet_is_the_default_and_a_foreign_file_stays() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("conf.d/x.toml");
        say_default_runtime(&file, false).unwrap();
        assert!(!file.exists());
        for _ in 0..2 {
            say_default_runtime(&file, true).unwrap();
            let config = sublet_core::config_files::load_files(std::slice::from_ref(&file)).unwrap();
            assert_eq!(config.runtime.without_share, Some(sublet_core::config::WithoutShare::Run));
        }
        say_default_runtime(&file, false).unwrap();
        assert!(!file.exists());
        fs::write(&file, "").unwrap();
        say_default_runtime(&file, false).unwrap();
        assert!(file.exists());
    }
}
