//! `containers.toml` beside `config.toml`: shares for containers whose clients cannot pass annotations.
//!
//! It is a separate file, because a container without annotations needs only `[runtime]` of the configuration. If this
//! file is absent, the only cost is looking for it.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::ConfigError;
use super::load::{self, File, Problem};
use crate::config::Config;
use crate::process::inheritance::honoured_config;
use crate::text::safe_path;

/// The whole file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Containers {
    /// Docker's `data-root`, where Docker records the names of its containers.
    pub docker_root: PathBuf,
    /// The first rule that matches counts.
    pub container: Vec<ContainerRule>,
}

impl Default for Containers {
    fn default() -> Self {
        Self { docker_root: PathBuf::from("/var/lib/docker"), container: Vec::new() }
    }
}

/// `[[container]]`: a container matches if each of the given globs matches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContainerRule {
    /// A glob for the container's name.
    pub name: Option<String>,
    /// A glob for the image's name as the engine records it, with its tag.
    pub image: Option<String>,
    /// A glob for the name of the Swarm service whose task the container is.
    pub service: Option<String>,
    /// A `[share.<name>]` of the configuration.
    pub share: String,
}

/// An engine's names of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// Its name.
    pub name: String,
    /// Its image's name, without the digest to which Swarm pins a service's image.
    pub image: String,
    /// The Swarm service whose task it is.
    pub service: Option<String>,
    /// `PROJECT/SERVICE` of Compose, or `NAMESPACE/POD`; empty if it is part of neither.
    pub part_of: String,
    /// Its labels, where the engine's record has them.
    pub labels: BTreeMap<String, String>,
    /// A warning of its labels, if some are meant as annotations.
    pub warning: Option<String>,
}

impl Containers {
    /// The share of the container that the engine knows as `known`.
    pub fn share(&self, known: &Known) -> Option<&str> {
        let fits = |glob: &Option<String>, text: Option<&str>| {
            glob.as_deref().is_none_or(|glob| text.is_some_and(|text| crate::share::glob_matches(glob, text)))
        };
        let rule = self.container.iter().find(|rule| {
            fits(&rule.name, Some(&known.name))
                && fits(&rule.image, Some(&known.image))
                && fits(&rule.service, known.service.as_deref())
        });
        rule.map(|rule| rule.share.as_str())
    }

    /// The first share that `config` does not define.
    pub fn unknown_share<'a>(&'a self, config: &Config) -> Option<&'a str> {
        let shares = self.container.iter().map(|rule| rule.share.as_str());
        shares.into_iter().find(|share| !config.share.contains_key(*share))
    }
}

/// The path of the file, whether or not it exists: beside the file that
/// [`VARIABLE`](crate::process::inheritance::VARIABLE) names, otherwise in `/etc/sublet`.
pub fn containers_path() -> PathBuf {
    let beside = honoured_config().and_then(|file| Some(file.parent()?.join("containers.toml")));
    beside.unwrap_or_else(|| PathBuf::from("/etc/sublet/containers.toml"))
}

/// The file; `None` if there is none.
pub fn load_containers() -> Result<Option<Containers>, ConfigError> {
    read_containers(&containers_path())
}

/// The file at `path`; `None` if there is none.
pub fn read_containers(path: &Path) -> Result<Option<Containers>, ConfigError> {
    match load::text(path) {
        Err(ConfigError::Unreadable(_, error)) if error.kind() == ErrorKind::NotFound => Ok(None),
        text => parse(path, &text?).map(Some),
    }
}

/// The file `path` with the content `text`.
pub fn parse(path: &Path, text: &str) -> Result<Containers, ConfigError> {
    let parsed: Containers = load::parse(text).map_err(|error| ConfigError::toml(path, text, &error))?;
    let is_for_all =
        |rule: &ContainerRule| rule.name.is_none() && rule.image.is_none() && rule.service.is_none();
    if let Some(at) = parsed.container.iter().position(is_for_all) {
        let message = "a [[container]] needs a name, an image, a service or several of them; name = \"*\" matches \
                       every container";
        let key = vec!["container".to_owned(), at.to_string()];
        let file = File { path: path.to_owned(), text: text.to_owned() };
        return Err(load::locate(&[&file], &Problem { key, message: message.to_owned() }));
    }
    if parsed.docker_root.is_absolute() {
        return Ok(parsed);
    }
    let root = safe_path(&parsed.docker_root);
    let message = format!("docker_root {root} must be an absolute path: Docker's data-root");
    Err(ConfigError::invalid(path, text, None, &message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Option<Containers>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("containers.toml");
        std::fs::write(&path, text).unwrap();
        let name = format!("{}/", dir.path().display());
        read_containers(&path).map_err(|error| error.to_string().replace(&name, ""))
    }

    #[test]
    fn the_first_rule_that_fits_counts() {
        let text = "[[container]]\nname = \"web-*\"\nimage = \"r.io/*\"\nshare = \"both\"\n\
                    [[container]]\nname = \"web-?\"\nshare = \"name\"\n\
                    [[container]]\nimage = \"*/ollama:*\"\nshare = \"image\"\n";
        let containers = parsed(text).unwrap().unwrap();
        let share = |name: &str, image: &str| containers.share(&known(name, image, None));
        assert_eq!(share("web-1", "r.io/x:1"), Some("both"));
        assert_eq!(share("web-1", "ollama"), Some("name"));
        assert_eq!(share("db", "ollama/ollama:latest"), Some("image"));
        assert_eq!((share("db", "ollama"), share("", "")), (None, None));
        assert_eq!(containers.unknown_share(&Config::default()), Some("both"));
        let shown = toml::to_string(&containers).unwrap();
        assert_eq!(parsed(&shown).unwrap().unwrap(), containers, "what is shown is the same file");
    }

    fn known(name: &str, image: &str, service: Option<&str>) -> Known {
        let service = service.map(str::to_owned);
        Known { name: name.into(), image: image.into(), service, ..Known::default() }
    }

    #[test]
    fn a_rule_for_a_service_is_for_its_tasks_alone() {
        let text = "[[container]]\nservice = \"web*\"\nimage = \"*/x:1\"\nshare = \"both\"\n\
                    [[container]]\nservice = \"*\"\nshare = \"any\"\n";
        let containers = parsed(text).unwrap().unwrap();
        let share = |image: &str, service| containers.share(&known("web.1.x", image, service));
        assert_eq!(share("r.io/x:1", Some("web_api")), Some("both"));
        assert_eq!(share("r.io/x:2", Some("web_api")), Some("any"));
        assert_eq!(share("r.io/x:1", None), None, "it is no task, whatever its name");
    }

    #[test]
    fn an_empty_file_is_no_rule_and_none_is_none() {
        assert_eq!(parsed("").unwrap(), Some(Containers::default()));
        assert_eq!(
            parsed(include_str!("../../../config/containers.toml")).unwrap(),
            Some(Containers::default())
        );
        assert_eq!(read_containers(Path::new("/nowhere/containers.toml")).unwrap(), None);
        // The commented lines are examples that work.
        let example: String = include_str!("../../../config/containers.toml")
            .lines()
            .map(|line| line.strip_prefix('#').filter(|key| !key.starts_with(' ')).unwrap_or(line))
            .flat_map(|line| [line, "\n"])
            .collect();
        let example = parsed(&example).unwrap().unwrap();
        assert_eq!(example.share(&known("trainer-7", "x", None)), Some("small"));
        assert_eq!(example.share(&known("x.1.y", "x", Some("research_x"))), Some("small"));
        assert_eq!(example.docker_root, Path::new("/var/lib/docker"));
    }

    #[test]
    fn errors_name_the_file_and_the_line() {
        for (text, expected) in [
            (
                "[[container]]\nshare = \"s\"\n",
                "configuration containers.toml:1:1: a [[container]] needs a name, an image, a service or \
                 several of them; name = \"*\" matches every container",
            ),
            (
                "\n[[container]]\nnames = \"a\"\nshare = \"s\"\n",
                "configuration containers.toml:3:1: unknown key `names`, did you mean name?; why: expected one of `name`, `image`, `service`, `share`",
            ),
            (
                "docker_root = \"docker\"\n",
                "configuration containers.toml:1:1: docker_root docker must be an absolute path: Docker's \
                 data-root",
            ),
        ] {
            assert_eq!(parsed(text).unwrap_err(), expected);
        }
        assert!(parsed("[[container").unwrap_err().starts_with("configuration containers.toml:1:"));
    }
}
