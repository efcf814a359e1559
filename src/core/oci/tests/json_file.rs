//! Reading and replacing JSON: bounds, duplicate keys, numbers.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::oci::{FileError, JsonFile};

fn text(text: &str) -> JsonFile {
    JsonFile { path: PathBuf::from("/bundle/config.json"), text: text.as_bytes().to_vec() }
}

fn refused(input: &str) -> String {
    text(input).parse().unwrap_err().to_string()
}

#[test]
fn compact_input_comes_back_byte_for_byte() {
    let input = r#"{"z":1,"a":{"pids":{},"n":null},"big":18446744073709551615,"low":-9223372036854775808,"f":0.1,"g":1.5e+300}"#;
    assert_eq!(text(input).parse().unwrap().to_string(), input);
}

#[test]
fn a_key_that_stands_twice_is_refused_at_any_depth() {
    let expected =
        "cannot edit /bundle/config.json: the key `a` occurs twice in one object at line 1 column ";
    for input in [r#"{"a":1,"a":2}"#, r#"{"x":[{"y":{"a":1,"\u0061":2}}]}"#] {
        assert!(refused(input).starts_with(expected), "{}", refused(input));
    }
    assert!(text(r#"{"a":{"a":1},"b":{"a":1}}"#).parse().is_ok());
}

#[test]
fn numbers_that_would_change_are_refused() {
    for number in ["18446744073709551616", "1.50", "-0", "1e400", "0.10000000000000000001"] {
        let input = format!(r#"{{"text":"1.50 \" 1.50","n":[1,{number}]}}"#);
        assert!(text(&input).parse().is_err(), "{number}");
    }
    assert_eq!(
        refused(r#"{"n":18446744073709551616}"#),
        "cannot edit /bundle/config.json: the number 18446744073709551616 cannot be written back unchanged; the file was not changed, and the program that wrote it is at fault"
    );
}

#[test]
fn broken_json_is_an_error() {
    let deep = "[".repeat(100_000);
    for input in ["", "{", "{}x", "\"\\ud800\"", deep.as_str()] {
        assert!(text(input).parse().is_err());
    }
    let not_utf8 = JsonFile { path: PathBuf::new(), text: b"{\"a\":\"\xff\"}".to_vec() };
    assert!(not_utf8.parse().is_err());
}

#[test]
fn a_mention_is_found_however_it_is_written() {
    assert!(text(r#"{"annotations":{"sublet.sm":"25"}}"#).mentions_sublet());
    assert!(text(r#"{"annotations":{"\u0073ublet.sm":"25"}}"#).mentions_sublet());
    assert!(text(r#"{"annotations":{"sublet\u002esm":"25"}}"#).mentions_sublet());
    assert!(text(r#"{"hooks":[{"path":"/usr/libexec/sublet/sublet-hook"}]}"#).mentions_sublet());
    for misspelt in
        ["Sublet.sm", "SUBLET_SM", "io.sublet/sm", r"sublet\/sm", r"sublet\u005fsm", r"\u0053ublet.sm"]
    {
        assert!(text(&format!(r#"{{"annotations":{{"{misspelt}":"25"}}}}"#)).mentions_sublet(), "{misspelt}");
    }
    assert!(!text(r#"{"args":["\u00e9","a\n","subletter"]}"#).mentions_sublet());
    assert!(!text("").mentions_sublet());
}

#[test]
fn a_pause_container_is_never_overlooked() {
    for pause in ["sandbox", r"sandbo\u0078", "/catatonit", r"\/catatonit", r"\u002fcatatonit"] {
        assert!(text(&format!(r#"{{"process":{{"args":["{pause}","-P"]}}}}"#)).may_be_pause(), "{pause}");
    }
    for other in ["", "sleep", "/bin/cat", "sand"] {
        assert!(!text(&format!(r#"{{"process":{{"args":["{other}"]}}}}"#)).may_be_pause(), "{other}");
    }
}

#[test]
fn replacing_keeps_mode_and_last_newline() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    fs::write(&path, "{\n  \"b\": 1\n}\n").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    let file = JsonFile::read(&path).unwrap();
    file.replace(&json!({"b": 2})).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "{\"b\":2}\n");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o640);

    fs::write(&path, "{}").unwrap();
    JsonFile::read(&path).unwrap().replace(&json!([1])).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "[1]");
}

#[test]
fn a_link_stays_a_link() {
    let dir = tempfile::tempdir().unwrap();
    let (real, link) = (dir.path().join("real.json"), dir.path().join("config.json"));
    fs::write(&real, "{}").unwrap();
    symlink("real.json", &link).unwrap();
    JsonFile::read(&link).unwrap().replace(&json!([1])).unwrap();
    assert_eq!(fs::read_to_string(&real).unwrap(), "[1]");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
}

#[test]
fn a_file_that_is_not_regular_or_too_large_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(matches!(JsonFile::read(&fifo), Err(FileError::NotRegular { .. })));
    assert!(matches!(JsonFile::read(dir.path()), Err(FileError::NotRegular { .. })));
    assert!(matches!(JsonFile::read(Path::new("/nonexistent/config.json")), Err(FileError::Read { .. })));

    let large = dir.path().join("large");
    let file = fs::File::create(&large).unwrap();
    file.set_len(100 << 20).unwrap();
    assert!(matches!(JsonFile::read(&large), Err(FileError::TooLarge { .. })));
    file.set_len(16 << 20).unwrap();
    assert_eq!(JsonFile::read(&large).unwrap().text.len(), 16 << 20);
}

/// Opening a socket fails (open(2), ENXIO), as opening a file may for want of descriptors or memory.
#[test]
fn a_file_that_cannot_be_opened_is_not_missing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    let missing = |path: &Path| JsonFile::read(path).unwrap_err().is_missing();
    assert!(missing(&path) && missing(&dir.path().join(".").join("x".repeat(256))));
    let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
    assert!(!missing(&path));
    assert!(missing(&path.join("below")));
    symlink("loop", dir.path().join("loop")).unwrap();
    assert!(missing(&dir.path().join("loop")));
}
