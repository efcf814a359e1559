//! `sublet config check|show`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;

use crate::mig::Layout;
use sublet_core::config::{self, Config, PolicyRule};
use sublet_core::config_files::{self, Containers, OneFile};
use sublet_core::text::{safe, safe_path};

/// Subcommands of `sublet config`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Check the configuration files for errors
    Check {
        /// Check the files of this directory as if it were /etc/sublet, before they are put there
        #[arg(long, value_name = "DIR")]
        etc: Option<PathBuf>,
    },
    /// Show the configuration in force, defaults included
    Show,
}

/// Runs it.
///
/// # Errors
/// The first error in the files, with file and line.
pub fn run(command: &Command) -> anyhow::Result<ExitCode> {
    let etc = if let Command::Check { etc } = command { etc.as_deref() } else { None };
    // The files of the configuration itself, the weakest first, and `containers.toml`, whether or not it exists.
    let (mut sources, beside) = match etc {
        None => (config_files::sources()?, config_files::containers_path()),
        Some(etc) => {
            // A misspelt directory would have no errors in it.
            std::fs::read_dir(etc).with_context(|| format!("cannot read {}", safe_path(etc)))?;
            (config_files::sources_with(etc)?, etc.join("containers.toml"))
        }
    };
    let loaded = config_files::load_files(&sources)?;
    let containers = config_files::read_containers(&beside)?;
    let each = config_files::each(&sources)?;
    sources.extend(containers.is_some().then(|| beside.clone()));
    if let Command::Show = command {
        show(&loaded, containers.as_ref(), &sources)?;
        return Ok(ExitCode::SUCCESS);
    }
    // A container whose mapped share does not exist is refused at its start, so it is reported here.
    let unknown = containers.as_ref().and_then(|containers| containers.unknown_share(&loaded)).map(|share| {
        let (path, share) = (beside.display(), safe(share));
        format!(
            "configuration {path}: the configuration has no [share.{share}]: add it, or name another share"
        )
    });
    Ok(check(&each, etc, unknown, &sources))
}

/// `containers` are shown as comments, because the rest of the output is one configuration file and they are another.
fn show(config: &Config, containers: Option<&Containers>, sources: &[PathBuf]) -> anyhow::Result<()> {
    for source in sources {
        print!("# from {}\n", source.display());
    }
    print!("{}", toml::to_string(&config::written_out(config))?);
    let Some(containers) = containers else { return Ok(()) };
    print!("\n# {}:\n", config_files::containers_path().display());
    for line in toml::to_string(containers)?.lines() {
        print!("{}\n", format!("# {line}").trim_end());
    }
    Ok(())
}

// The part of `sublet config check` that looks at more than the files: at the layout, the host's users, and rules of
// several files together.

/// Reports what works, but perhaps not as it is meant, then what can never work as it is written, and which files are in
/// order if there is nothing of that. `etc`: the directory that stands for `/etc/sublet`, if another one does.
fn check(files: &[OneFile], etc: Option<&Path>, unknown: Option<String>, sources: &[PathBuf]) -> ExitCode {
    let mut errors = Vec::new();
    let mut aliases: Vec<&String> = Vec::new();
    let without_effect = unreachable(files).into_iter().chain(replaced(files)).chain(hidden(files, PACKAGED));
    crate::terminal::warn(without_effect);
    for file in files {
        errors.extend(layout(file, etc));
        errors.extend(unknown_users(file));
        for (index, rule) in file.config.device.iter().enumerate() {
            let Some(name) = &rule.name else { continue };
            if aliases.contains(&name) {
                // It may be meant: the name then stands for any of the devices.
                let message = format!(
                    "another [[device]] is called {0} too: sublet.gpu=name:{0} takes any of their devices",
                    safe(name)
                );
                let key = ["device", &index.to_string(), "name"];
                eprintln!("sublet: warning: {}", file.about(&key, &message));
            }
            aliases.push(name);
        }
    }
    errors.extend(unknown);
    for error in &errors {
        eprintln!("sublet: {error}");
    }
    if !errors.is_empty() {
        return ExitCode::FAILURE;
    }
    if sources.is_empty() {
        println!("No configuration file: built-in defaults are in force.");
    }
    for source in sources {
        println!("{}: ok", source.display());
    }
    ExitCode::SUCCESS
}

/// sublet-mig.service would fail at boot.
fn layout(file: &OneFile, etc: Option<&Path>) -> Option<String> {
    let path = file.config.mig.layout.as_deref()?;
    let instead = etc.and_then(|etc| Some(etc.join(path.strip_prefix("/etc/sublet").ok()?)));
    let error = Layout::read(instead.as_deref().unwrap_or(path), None).err()?;
    Some(file.about(&["mig", "layout"], &error.to_string()).to_string())
}

/// The `[[policy]]` rules behind one that takes the same users before them.
fn unreachable(files: &[OneFile]) -> Vec<String> {
    let mut before: Vec<(&OneFile, &PolicyRule)> = Vec::new();
    let mut warnings = Vec::new();
    // The stronger files' rules come first.
    for (file, (index, rule)) in files
        .iter()
        .rev()
        .flat_map(|file| file.config.policy.iter().enumerate().map(move |rule| (file, rule)))
    {
        let covers = |other: &PolicyRule| {
            other.user.as_deref() == Some("*") || (&other.user, &other.group) == (&rule.user, &rule.group)
        };
        if let Some((stronger, other)) = before.iter().find(|(_, other)| covers(other)) {
            let whom = match (&other.user, &other.group) {
                (Some(user), _) => format!("user {}", safe(user)),
                (None, group) => format!("group {}", safe(group.as_deref().unwrap_or_default())),
            };
            let message = format!(
                "it never applies, because the rule of {whom} in {} comes first: put it before that rule",
                stronger.path().display()
            );
            warnings.push(file.about(&["policy", &index.to_string()], &message).to_string());
        }
        before.push((file, rule));
    }
    warnings
}

/// The values of local files that another local file replaces by another value.
fn replaced(files: &[OneFile]) -> Vec<String> {
    let local: Vec<&OneFile> = files.iter().filter(|file| !file.path().starts_with("/usr/lib")).collect();
    let mut warnings = Vec::new();
    for (index, file) in local.iter().enumerate() {
        for (keys, value) in leaves(&file.values(), &[]) {
            let other =
                |stronger: &&&OneFile| find(&stronger.values(), &keys).is_some_and(|other| other != value);
            if let Some(stronger) = local.iter().skip(index + 1).rfind(other) {
                let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
                let message = format!("{} has another value for it, which counts", stronger.path().display());
                warnings.push(file.about(&keys, &message).to_string());
            }
        }
    }
    warnings
}

/// The values below `table`, each with its keys. Rules (arrays of tables) are added up, so they replace nothing.
fn leaves(table: &toml::Table, above: &[String]) -> Vec<(Vec<String>, toml::Value)> {
    let each = table.iter().flat_map(|(key, value)| {
        let keys = [above, std::slice::from_ref(key)].concat();
        match value {
            toml::Value::Table(table) => leaves(table, &keys),
            toml::Value::Array(rules) if rules.iter().any(toml::Value::is_table) => Vec::new(),
            value => vec![(keys, value.clone())],
        }
    });
    each.collect()
}

fn find(table: &toml::Table, keys: &[String]) -> Option<toml::Value> {
    let (last, above) = keys.split_last()?;
    let table = above.iter().try_fold(table, |table, key| table.get(key)?.as_table())?;
    table.get(last).cloned()
}

/// Where packages have their drop-ins.
const PACKAGED: &str = "/usr/lib/sublet/conf.d";

/// The drop-ins of `packaged` that a local one of the same name hides as a whole. An empty one, or a link to /dev/null, is
/// meant to.
fn hidden(files: &[OneFile], packaged: &str) -> Vec<String> {
    let hides = |file: &OneFile| {
        let drop_in = file.path().parent()?.ends_with("conf.d") && !file.values().is_empty();
        let packaged = Path::new(packaged).join(file.path().file_name()?);
        let hides = drop_in && packaged != file.path() && packaged.exists();
        hides.then(|| {
            let (path, packaged) = (file.path().display(), packaged.display());
            format!(
                "configuration {path}: it hides {packaged}, of which nothing counts: another name adds to it"
            )
        })
    };
    files.iter().filter_map(hides).collect()
}

/// The rules of a user or group that this host does not have. They never apply.
fn unknown_users(file: &OneFile) -> Vec<String> {
    let problem = |(index, rule): (usize, &PolicyRule)| {
        let name = crate::doctor::unknown(rule)?;
        let key = if rule.user.is_some() { "user" } else { "group" };
        let message = format!("this host has no {name}, so the rule never applies");
        Some(file.about(&["policy", &index.to_string(), key], &message).to_string())
    };
    file.config.policy.iter().enumerate().filter_map(problem).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Warnings about the files of these names and texts, the weakest first, without the directory's name.
    fn warnings(files: &[(&str, &str)], of: fn(&[OneFile], &str) -> Vec<String>) -> Vec<String> {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let written = files.iter().map(|(name, text)| {
            std::fs::create_dir_all(at(name).parent().unwrap()).unwrap();
            std::fs::write(at(name), text).unwrap();
            at(name)
        });
        let paths: Vec<PathBuf> = written.filter(|path| !path.starts_with(at("usr"))).collect();
        let found = of(&config_files::each(&paths).unwrap(), &at("usr/conf.d").to_string_lossy());
        let directory = format!("{}/", directory.path().display());
        found.iter().map(|warning| warning.replace(&directory, "")).collect()
    }

    #[test]
    fn rules_behind_one_for_the_same_users_are_found() {
        let found = warnings(
            &[
                (
                    "config.toml",
                    "[[policy]]\nuser = 'ann'\n[[policy]]\ngroup = 'lab'\n[[policy]]\nuser = 'bob'\n",
                ),
                ("conf.d/a.toml", "[[policy]]\nuser = 'ann'\n"),
            ],
            |files, _| unreachable(files),
        );
        insta::assert_snapshot!(found.join("\n"), @"configuration config.toml:1:1: policy.0: it never applies, because the rule of user ann in conf.d/a.toml comes first: put it before that rule");
        let found = warnings(
            &[("config.toml", "[[policy]]\nuser = '*'\n[[policy]]\ngroup = 'lab'\n")],
            |files, _| unreachable(files),
        );
        insta::assert_snapshot!(found.join("\n"), @"configuration config.toml:3:1: policy.1: it never applies, because the rule of user * in config.toml comes first: put it before that rule");
    }

    #[test]
    fn values_that_another_local_file_replaces_are_found() {
        let found = warnings(
            &[
                (
                    "config.toml",
                    "[limits]\ntime_slice_max = 4\nreserve = '1GiB'\n[[device]]\nmatch = 0\nuse = 'mps'\n",
                ),
                (
                    "conf.d/a.toml",
                    "[limits]\ntime_slice_max = 2\nreserve = '1GiB'\n[[device]]\nmatch = 0\nuse = 'mig'\n",
                ),
            ],
            |files, _| replaced(files),
        );
        insta::assert_snapshot!(found.join("\n"), @"configuration config.toml:2:1: limits.time_slice_max: conf.d/a.toml has another value for it, which counts");
    }

    #[test]
    fn packaged_drop_ins_that_are_hidden_are_found() {
        let packaged = ("usr/conf.d/a.toml", "[guard]\n");
        let hidden_by = |text| warnings(&[packaged, ("conf.d/a.toml", text)], hidden);
        assert_eq!(hidden_by(""), Vec::<String>::new());
        insta::assert_snapshot!(hidden_by("[limits]\nreserve = '1GiB'\n").join("\n"), @"configuration conf.d/a.toml: it hides usr/conf.d/a.toml, of which nothing counts: another name adds to it");
    }
}
