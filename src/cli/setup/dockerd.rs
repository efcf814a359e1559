//! How this host starts dockerd: flags beside daemon.json, or in its place.

use std::path::Path;

use super::engine_files::words;
use super::json_file::JsonFile;
use super::{NAME, SetupError, docker};
use crate::names;
use crate::proc::{namespace, processes};
use sublet_core::config::{Config, WithoutShare};
use sublet_core::fs::under;
use sublet_core::ledger::Ledger;

/// dockerd's configuration, unless a flag says otherwise.
const FILE: &str = "/etc/docker/daemon.json";

/// Flags, and what daemon.json calls what a setup writes. dockerd does not start with both (moby,
/// `findConfigurationConflicts`; seen with 26.1). It merges `--add-runtime` and `runtimes`.
const TWICE: [(&str, &str); 2] =
    [("default-runtime", "default-runtime"), ("node-generic-resource", "node-generic-resources")];

/// dockerd, as this host starts it.
#[derive(Debug, Default)]
pub(crate) struct Dockerd {
    flags: Vec<Flag>,
}

/// A flag of its command line, with a value.
#[derive(Debug, PartialEq, Eq)]
struct Flag {
    name: String,
    value: String,
    /// Who says so.
    by: &'static str,
}

impl Dockerd {
    /// That of the host below `root`: the flags of the one that runs (of several, that which reads `file`), and those of
    /// the next start, which systemd tells. `ask` runs a program of the host.
    pub fn of(root: &Path, ask: fn(&[&str]) -> Option<String>, file: Option<&Path>) -> Self {
        let mut running = Self::running(root);
        // The sort is stable: without a `file`, or one that reads it, the first counts.
        running.sort_by_key(|dockerd| file.is_some_and(|file| dockerd.file() != file));
        let mut flags = running.into_iter().next().unwrap_or_default().flags;
        let properties = "--property=ExecStart,Environment,EnvironmentFiles";
        if let Some(unit) = ask(&["systemctl", "show", "docker.service", properties]) {
            flags.extend(self::flags(&start_of(&unit, root), "docker.service"));
        }
        Self { flags }
    }

    /// Those that run and see the files of this process.
    fn running(root: &Path) -> Vec<Self> {
        let proc = under(root, "/proc");
        let own = namespace(&proc.join("self"), "mnt");
        let of = |pid: i32| {
            let process = proc.join(pid.to_string());
            let is_dockerd = std::fs::read(process.join("comm")).ok()?.trim_ascii_end() == b"dockerd";
            let line = (is_dockerd && namespace(&process, "mnt") == own)
                .then(|| std::fs::read(process.join("cmdline")))?;
            let line = String::from_utf8_lossy(&line.ok()?).into_owned();
            let words: Vec<String> = line.split('\0').map(str::to_owned).collect();
            Some(Self { flags: flags(&words, "the running dockerd") })
        };
        processes(&proc).into_iter().filter_map(of).collect()
    }

    /// daemon.json.
    pub(crate) fn file(&self) -> &Path {
        Path::new(self.value("config-file").unwrap_or(FILE))
    }

    /// The program of the runtime `sublet`, where a flag defines it.
    pub(crate) fn runtime(&self) -> Option<&str> {
        let added = self.flags.iter().filter(|flag| flag.name == "add-runtime");
        added.filter_map(|flag| flag.value.split_once('=')).find(|(name, _)| *name == NAME).map(|to| to.1)
    }

    /// The runtime of containers that name none; `text` is daemon.json's.
    pub(crate) fn default_runtime(&self, text: &str) -> Option<String> {
        let by_flag = self.value("default-runtime").map(str::to_owned);
        by_flag.or_else(|| docker::default_runtime(text).ok().flatten())
    }

    /// Where it keeps its records of containers; `text` is daemon.json's.
    fn data_root(&self, text: &str) -> String {
        let in_file = || docker::string(text, &["data-root"]).ok().flatten();
        let told = self.value("data-root").map(str::to_owned).or_else(in_file);
        told.unwrap_or_else(|| "/var/lib/docker".to_owned())
    }

    /// Whether dockerd starts again with `text` as its daemon.json.
    ///
    /// # Errors
    /// One of its flags says what `text` says, too.
    pub fn starts_with(&self, text: &str) -> Result<(), SetupError> {
        let file = JsonFile::parse(text)?;
        for (name, key) in TWICE {
            let flag = self.flags.iter().find(|flag| flag.name == name);
            if let (Some(Flag { value, by, .. }), Some(_)) = (flag, file.get(&[key])?) {
                let flag = sublet_core::text::safe(&format!("--{name}={value}"));
                return Err(SetupError::Flag { flag, by, key });
            }
        }
        Ok(())
    }

    fn value(&self, name: &str) -> Option<&str> {
        self.flags.iter().find(|flag| flag.name == name).map(|flag| flag.value.as_str())
    }
}

/// The names of Docker's containers on the host below `root` that were meant to have a share and have none. Where every
/// container's runtime is sublet, or the configuration says that it is meant, that is not known.
pub(crate) fn without_share(root: &Path, ledger: &Ledger, config: &Config) -> Vec<String> {
    if config.runtime.without_share == Some(WithoutShare::Run) {
        return Vec::new();
    }
    let of = |dockerd: &Dockerd| {
        let text = dockerd.file().to_str().map(|file| std::fs::read_to_string(under(root, file)));
        let text = text.and_then(Result::ok).unwrap_or_default();
        let is_default = dockerd.default_runtime(&text).as_deref() == Some(NAME);
        let data_root = (!is_default).then(|| under(root, &dockerd.data_root(&text)));
        data_root.map(|data_root| names::without_share(&data_root, ledger)).unwrap_or_default()
    };
    Dockerd::running(root).iter().flat_map(of).collect()
}

/// The command line of the next start, of what `systemctl show` says: variables of systemd.exec(5) are filled in.
fn start_of(unit: &str, root: &Path) -> Vec<String> {
    let property =
        |name: &'static str| unit.lines().filter_map(move |line| line.strip_prefix(name)?.strip_prefix('='));
    let files = property("EnvironmentFiles").filter_map(|file| {
        let path = file.split_once(" (").map_or(file, |(path, _)| path);
        std::fs::read_to_string(under(root, path)).ok()
    });
    let mut variables: Vec<(String, String)> = Vec::new();
    let of_unit = property("Environment").flat_map(words);
    let of_files = files.flat_map(|text| text.lines().map(|line| words(line).concat()).collect::<Vec<_>>());
    for entry in of_unit.chain(of_files) {
        variables.extend(entry.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned())));
    }
    let argv = property("ExecStart").find_map(|start| start.split_once("argv[]=")?.1.split(" ; ").next());
    let fill_in = |word: String| {
        let Some(name) = word.strip_prefix('$').map(|name| name.trim_matches(['{', '}'])) else {
            return vec![word];
        };
        let value = variables.iter().rev().find(|(known, _)| known == name).map(|(_, value)| value.as_str());
        words(value.unwrap_or_default())
    };
    words(argv.unwrap_or_default()).into_iter().flat_map(fill_in).collect()
}

/// Those of `line` that come behind `dockerd`.
fn flags(line: &[String], by: &'static str) -> Vec<Flag> {
    let at = line.iter().position(|word| word.ends_with("dockerd")).unwrap_or(line.len());
    let rest = line.iter().skip(at + 1);
    // Of a flag without a value, the word behind it is taken for one.
    let next = rest.clone().skip(1).map(String::as_str).chain([""]);
    let flag = |(word, next): (&String, &str)| {
        let word = word.strip_prefix("--")?;
        let (name, value) = word.split_once('=').unwrap_or((word, next));
        Some(Flag { name: name.to_owned(), value: value.to_owned(), by })
    };
    rest.zip(next).filter_map(flag).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Dockerd {
        Dockerd { flags: flags(&words(line), "the running dockerd") }
    }

    #[test]
    fn flags_count_beside_the_file_and_before_it() {
        let text = r#"{"default-runtime": "kata", "data-root": "/data"}"#;
        let plain = of("/usr/bin/dockerd -H fd:// --containerd=/run/containerd/containerd.sock --debug");
        assert_eq!((plain.file(), plain.runtime()), (Path::new(FILE), None));
        assert_eq!(
            (plain.default_runtime(text).as_deref(), plain.data_root(text)),
            (Some("kata"), "/data".into())
        );
        assert_eq!((plain.default_runtime("{}"), plain.data_root("{}")), (None, "/var/lib/docker".into()));
        let told = of("/usr/bin/dockerd --config-file /x.json --data-root=/d --add-runtime a=/b \
                       --add-runtime sublet=/usr/bin/sublet-runtime --default-runtime sublet");
        assert_eq!((told.file(), told.runtime()), (Path::new("/x.json"), Some("/usr/bin/sublet-runtime")));
        assert_eq!(
            (told.default_runtime("{}").as_deref(), told.data_root(text)),
            (Some("sublet"), "/d".into())
        );
    }

    #[test]
    fn what_would_stop_dockerd_at_its_next_start_is_refused_with_the_flag() {
        let dockerd = of("dockerd --default-runtime=runc --add-runtime x=/y");
        dockerd.starts_with(r#"{"runtimes": {"sublet": {"path": "/usr/bin/sublet-runtime"}}}"#).unwrap();
        let error = dockerd.starts_with(r#"{"default-runtime": "sublet"}"#).unwrap_err().to_string();
        assert!(error.contains("--default-runtime=runc") && error.contains("the running dockerd"), "{error}");
        let swarm = of("dockerd --node-generic-resource a=1");
        assert!(swarm.starts_with(r#"{"node-generic-resources": ["sublet-small=1"]}"#).is_err());
    }

    #[test]
    fn the_process_and_the_unit_are_read() {
        let root = tempfile::tempdir().unwrap();
        let file = |path: &str, text: &str| {
            let path = under(root.path(), path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        file("/proc/7/comm", "containerd\n");
        file("/proc/6/comm", "dockerd\n");
        file("/proc/6/cmdline", "/usr/bin/dockerd\0--config-file=/other.json\0");
        file("/proc/8/comm", "dockerd\n");
        file("/proc/8/cmdline", "/usr/bin/dockerd\0--config-file=/x.json\0");
        file(
            "/etc/sysconfig/docker",
            "# OPTIONS=\nOPTIONS=\"--default-ulimit nofile=1024 --data-root /d\"\n",
        );
        let unit = |argv: &[&str]| {
            assert_eq!(argv[..3], ["systemctl", "show", "docker.service"]);
            let start = "ExecStart={ path=/usr/bin/dockerd ; argv[]=/usr/bin/dockerd -H fd:// $OPTIONS ${MORE} $NONE ; \
                         ignore_errors=no ; pid=0 }\nEnvironment=A=b \"MORE=--default-runtime runc\"\n\
                         EnvironmentFiles=/etc/sysconfig/docker (ignore_errors=yes)\n";
            Some(start.to_owned())
        };
        let dockerd = Dockerd::of(root.path(), unit, Some(Path::new("/x.json")));
        assert_eq!((dockerd.file(), dockerd.data_root("{}")), (Path::new("/x.json"), "/d".into()));
        let error = dockerd.starts_with(r#"{"default-runtime": "sublet"}"#).unwrap_err().to_string();
        assert!(error.contains("--default-runtime=runc of docker.service"), "{error}");
    }
}
