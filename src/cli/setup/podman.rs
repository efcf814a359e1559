//! Podman: sublet's own drop-in in `containers.conf.d` (containers.conf(5)).
//!
//! A list in a drop-in replaces those of earlier files, and Podman before 4.8 cannot append. So this drop-in
//! repeats the lists of the other files.

use toml::Value;

use super::{DROP_IN, NAME, SetupError, Wish, own_drop_in, plain, toml as parsed};

/// Podman's default (containers.conf(5)).
const HOOKS_DIR: &str = "/usr/share/containers/oci/hooks.d";
const JSON_RUNTIMES: [&str; 6] = ["crun", "runc", "kata", "runsc", "youki", "krun"];

/// The drop-in. `found` is the current text under its name, `weaker` the texts of the files that Podman reads before
/// it, weakest first.
///
/// # Errors
/// Another program wrote the drop-in, or a weaker file is no TOML.
pub fn set_up(found: Option<&str>, weaker: &[String], wish: &Wish) -> Result<String, SetupError> {
    own_drop_in(found)?;
    let (mut hooks, mut json) = (vec![HOOKS_DIR.to_owned()], JSON_RUNTIMES.map(str::to_owned).to_vec());
    for text in weaker {
        let file = parsed(text)?;
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
    fn alone_it_is_podmans_lists_and_ours() {
        let text = set_up(None, &[], &wish()).unwrap();
        assert!(text.ends_with(
            "[engine]\nhooks_dir = [\"/usr/share/containers/oci/hooks.d\", \"/usr/share/sublet/hooks.d\"]\n\
             runtime_supports_json = [\"crun\", \"runc\", \"kata\", \"runsc\", \"youki\", \"krun\", \
             \"sublet-runtime\"]\n\n[engine.runtimes]\nsublet = [\"/usr/bin/sublet-runtime\"]\n"
        ), "{text}");
        parsed(&text).unwrap();
        let again = set_up(Some(&text), &[], &Wish { default: true, ..wish() }).unwrap();
        assert!(again.contains("\nruntime = \"sublet\"\n\n[engine.runtimes]"), "{again}");
    }

    #[test]
    fn what_other_files_name_stays_named() {
        let weaker = [
            "[engine]\nhooks_dir = [\"/a\"]\n".to_owned(),
            "[engine]\nhooks_dir = [\"/b\", {append=true}]\nruntime_supports_json = [\"crun\"]\n".to_owned(),
        ];
        let text = set_up(None, &weaker, &wish()).unwrap();
        assert!(text.contains("hooks_dir = [\"/a\", \"/b\", \"/usr/share/sublet/hooks.d\"]\n"), "{text}");
        assert!(text.contains("runtime_supports_json = [\"crun\", \"sublet-runtime\"]\n"), "{text}");
    }

    #[test]
    fn somebody_elses_file_is_left_alone() {
        assert_eq!(set_up(Some("[engine]\n"), &[], &wish()).unwrap_err(), SetupError::Foreign);
        set_up(Some(include_str!("../../../hooks/containers.conf")), &[], &wish()).unwrap();
        let broken = set_up(None, &["[engine\n".to_owned()], &wish()).unwrap_err().to_string();
        assert!(broken.starts_with("it is not valid TOML"), "{broken}");
    }
}
