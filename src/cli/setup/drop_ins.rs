//! Podman and CRI-O: sublet's own drop-in in `containers.conf.d` (containers.conf(5)) and in `crio.conf.d`
//! (crio.conf.d(5), crio.conf(5) "CRIO.RUNTIME.RUNTIMES TABLE").

use std::path::Path;

use toml::Value;

use super::{NAME, SetupError, Wish, no_toml, plain};

/// How sublet's drop-in begins.
const DROP_IN: &str = "# Written by `sublet setup";

/// How the drop-in of the package sublet-podman begins (hooks/containers.conf).
const PACKAGED: &str = "# sublet's drop-in for Podman";

/// Whether `target`, of a link, is the drop-in of sublet-podman: upgrades replace it, and no setup writes it.
pub(crate) fn is_packaged(target: &Path) -> bool {
    target.ends_with("share/sublet/containers.conf")
}

/// The `found` text as it is, comments and all, if it says the same as `wanted`.
pub(crate) fn keep_if_same(found: Option<&str>, wanted: String) -> String {
    let says = |text: &str| toml::from_str::<toml::Table>(text).ok();
    found.filter(|found| says(found) == says(&wanted)).map_or(wanted, str::to_owned)
}

/// How a drop-in ends if a setup created its directory.
pub(crate) const MADE_DIRECTORY: &str = "# Its directory was made for it.\n";

/// Whether the directory of the drop-in `text` is removed with it if it is empty.
pub(crate) fn made_directory(text: &str) -> bool {
    text.ends_with(MADE_DIRECTORY)
}

/// Checks that an existing drop-in was written by sublet. One that was not is left alone, also by an undo.
///
/// # Errors
/// Another program wrote the file.
pub(crate) fn check_own(found: Option<&str>) -> Result<(), SetupError> {
    match found {
        Some(text) if !(text.starts_with(DROP_IN) || text.starts_with(PACKAGED)) => Err(SetupError::Foreign),
        _ => Ok(()),
    }
}

/// CRI-O's drop-in; `found` is the current text under its name.
///
/// # Errors
/// Another program wrote the file.
pub(crate) fn crio(found: Option<&str>, wish: &Wish) -> Result<String, SetupError> {
    check_own(found)?;
    let default = if wish.default { "\n[crio.runtime]\ndefault_runtime = \"sublet\"\n" } else { "" };
    Ok(format!(
        "{DROP_IN} crio`, which takes it away again with --undo.\n{default}\n\
         [crio.runtime.runtimes.{NAME}]\n\
         runtime_path = \"{}\"\n\
         runtime_type = \"oci\"\n",
        plain(&wish.runtime)?
    ))
}

// A list in a drop-in of Podman's replaces the lists of earlier files, and Podman before 4.8 cannot append. So the drop-in
// repeats the lists of the other files.

/// Podman's default (containers.conf(5)).
const HOOKS_DIR: &str = "/usr/share/containers/oci/hooks.d";
const JSON_RUNTIMES: [&str; 6] = ["crun", "runc", "kata", "runsc", "youki", "krun"];

/// Podman's drop-in. `found` is the current text under its name, `weaker` the texts of the files that Podman reads before
/// it, weakest first.
///
/// # Errors
/// Another program wrote the drop-in, or a weaker file is no TOML.
pub fn podman(found: Option<&str>, weaker: &[String], wish: &Wish) -> Result<String, SetupError> {
    check_own(found)?;
    let (mut hooks, mut json) = (vec![HOOKS_DIR.to_owned()], JSON_RUNTIMES.map(str::to_owned).to_vec());
    for text in weaker {
        let file = toml::from_str(text).map_err(no_toml)?;
        merge(&mut hooks, &file, "hooks_dir");
        merge(&mut json, &file, "runtime_supports_json");
    }
    add(&mut hooks, &wish.hooks_dir.to_string_lossy());
    add(&mut json, &wish.runtime.file_name().unwrap_or_default().to_string_lossy());
    let default = if wish.default { format!("runtime = \"{NAME}\"\n") } else { String::new() };
    Ok(format!(
        "{DROP_IN} podman`, which takes it away again with --undo.\n\
         # These lists replace those of the other files and repeat them: set up again when they change.\n\n\
         [engine]\nhooks_dir = {}\nruntime_supports_json = {}\n{default}\n\
         [engine.runtimes]\n{NAME} = [\"{}\"]\n",
        Value::from(hooks),
        Value::from(json),
        plain(&wish.runtime)?
    ))
}

/// Replaces `list` with the strings of `[engine] KEY`, or appends them if the file says `{append=true}`.
pub(crate) fn merge(list: &mut Vec<String>, file: &toml::Table, key: &str) {
    let Some(Value::Array(values)) = file.get("engine").and_then(|engine| engine.get(key)) else { return };
    let append = values.iter().any(|value| value.get("append").and_then(Value::as_bool) == Some(true));
    if !append {
        list.clear();
    }
    for value in values.iter().filter_map(Value::as_str) {
        add(list, value);
    }
}

fn add(list: &mut Vec<String>, value: &str) {
    if !list.iter().any(|there| there == value) {
        list.push(value.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::super::wish;
    use super::*;

    #[test]
    fn the_drop_in_is_written_by_sublet_only() {
        let text = crio(None, &wish()).unwrap();
        assert_eq!(
            text,
            "# Written by `sublet setup crio`, which takes it away again with --undo.\n\n\
             [crio.runtime.runtimes.sublet]\nruntime_path = \"/usr/bin/sublet-runtime\"\nruntime_type = \"oci\"\n"
        );
        let default = crio(Some(&text), &Wish { default: true, ..wish() }).unwrap();
        assert!(default.contains("[crio.runtime]\ndefault_runtime = \"sublet\"\n\n[crio.runtime.runtimes"));
        assert_eq!((check_own(Some(&default)), check_own(None)), (Ok(()), Ok(())));
        assert_eq!(crio(Some("[crio]\n"), &wish()).unwrap_err(), SetupError::Foreign);
        assert_eq!(check_own(Some("[crio]\n")).unwrap_err(), SetupError::Foreign);
        toml::from_str::<toml::Table>(&default).unwrap();
    }

    #[test]
    fn alone_it_is_podmans_lists_and_ours() {
        let text = podman(None, &[], &wish()).unwrap();
        assert!(text.ends_with(
            "[engine]\nhooks_dir = [\"/usr/share/containers/oci/hooks.d\", \"/usr/share/sublet/hooks.d\"]\n\
             runtime_supports_json = [\"crun\", \"runc\", \"kata\", \"runsc\", \"youki\", \"krun\", \
             \"sublet-runtime\"]\n\n[engine.runtimes]\nsublet = [\"/usr/bin/sublet-runtime\"]\n"
        ), "{text}");
        toml::from_str::<toml::Table>(&text).unwrap();
        let again = podman(Some(&text), &[], &Wish { default: true, ..wish() }).unwrap();
        assert!(again.contains("\nruntime = \"sublet\"\n\n[engine.runtimes]"), "{again}");
    }

    #[test]
    fn the_packages_drop_in_stays_because_a_setup_would_write_the_same() {
        let packaged = include_str!("../../../hooks/containers.conf");
        let wanted = |wish: &Wish| podman(Some(packaged), &[], wish).unwrap();
        assert_eq!(keep_if_same(Some(packaged), wanted(&wish())), packaged);
        let default = wanted(&Wish { default: true, ..wish() });
        assert_eq!(keep_if_same(Some(packaged), default.clone()), default);
        assert_eq!(keep_if_same(None, default.clone()), default);
        assert!(is_packaged(Path::new("/usr/share/sublet/containers.conf")));
        assert!(!is_packaged(Path::new("/srv/containers.conf")));
    }

    #[test]
    fn names_in_other_files_stay_named() {
        let weaker = [
            "[engine]\nhooks_dir = [\"/a\"]\n".to_owned(),
            "[engine]\nhooks_dir = [\"/b\", {append=true}]\nruntime_supports_json = [\"crun\"]\n".to_owned(),
        ];
        let text = podman(None, &weaker, &wish()).unwrap();
        assert!(text.contains("hooks_dir = [\"/a\", \"/b\", \"/usr/share/sublet/hooks.d\"]\n"), "{text}");
        assert!(text.contains("runtime_supports_json = [\"crun\", \"sublet-runtime\"]\n"), "{text}");
    }

    #[test]
    fn somebody_elses_file_is_left_alone() {
        assert_eq!(podman(Some("[engine]\n"), &[], &wish()).unwrap_err(), SetupError::Foreign);
        podman(Some(include_str!("../../../hooks/containers.conf")), &[], &wish()).unwrap();
        let broken = podman(None, &["[engine\n".to_owned()], &wish()).unwrap_err().to_string();
        assert!(broken.starts_with("it is not valid TOML"), "{broken}");
    }
}
