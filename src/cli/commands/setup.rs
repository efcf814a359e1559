//! `sublet setup`: configures an engine to use sublet, and undoes that.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail, ensure};

use super::doctor::ask;
use super::tables::{self, Format};
use crate::preview::Whose;
use crate::setup::docker::{self, Dockerd};
use crate::setup::{self, Wish, containerd, drop_ins, engine_files};
use crate::shown::name_of;
use crate::stack::{self, Count};
use sublet_core::config::{Config, WithoutShare};
use sublet_core::fs::{replace_durably as replace, sync_directory};
use sublet_core::text::{safe, safe_path};

/// Arguments of `sublet setup`.
#[expect(clippy::struct_excessive_bools, reason = "options that have nothing to do with one another")]
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The engine to configure
    #[arg(value_enum)]
    engine: Engine,
    /// Make sublet the default runtime; containers without annotations start as before
    #[arg(long, conflicts_with = "undo")]
    default: bool,
    /// Enable CDI in the engine, even if the configuration has no [share]
    #[arg(long, conflicts_with = "undo")]
    cdi: bool,
    /// Docker: tell Swarm how many containers of each named share this node's GPUs hold. Implies --default, because
    /// services cannot name a runtime
    #[arg(long, conflicts_with = "undo")]
    swarm: bool,
    /// Remove what an earlier setup added, and nothing else
    #[arg(long)]
    undo: bool,
    /// Show what would change; changes nothing
    #[arg(long)]
    dry_run: bool,
    /// Check whether the engine is set up as asked: exit code 0 if it is, 1 if not; changes nothing
    #[arg(long, conflicts_with = "dry_run")]
    check: bool,
    /// Output format of --check
    #[arg(long, value_enum, default_value_t, requires = "check")]
    format: Format,
    /// The engine's configuration file, if it is not in its usual place
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl Arguments {
    /// Swarm's services name no runtime.
    const fn default(&self) -> bool {
        self.default || self.swarm
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Engine {
    /// /etc/docker/daemon.json
    Docker,
    /// /etc/containers/containers.conf.d/sublet.conf
    Podman,
    /// /etc/containerd/config.toml
    Containerd,
    /// /etc/crio/crio.conf.d/sublet.conf
    Crio,
}

impl Engine {
    const fn path(self) -> &'static str {
        match self {
            Self::Docker => "/etc/docker/daemon.json",
            Self::Podman => "/etc/containers/containers.conf.d/sublet.conf",
            Self::Containerd => "/etc/containerd/config.toml",
            Self::Crio => "/etc/crio/crio.conf.d/sublet.conf",
        }
    }

    /// The command that makes the engine read the file again. A reload of dockerd only adds: removed settings stay in
    /// force, and it looks for CDI devices only at its start (seen with 26.1).
    fn restart(self, whole: bool, systemd: bool) -> String {
        let verb = if whole || self != Self::Docker { "restart" } else { "reload" };
        let how = match self {
            Self::Podman => {
                return "it takes effect with the next container; nothing has to be restarted".to_owned();
            }
            _ if systemd => format!("run `systemctl {verb} {}` to put it into effect", name_of(&self)),
            Self::Docker if whole => "restart dockerd to put it into effect".to_owned(),
            Self::Docker => {
                "send dockerd SIGHUP to put it into effect (`kill -HUP $(cat /var/run/docker.pid)`)"
                    .to_owned()
            }
            Self::Containerd | Self::Crio => "restart it to put it into effect".to_owned(),
        };
        if self == Self::Docker { how } else { how + "; containers keep running" }
    }
}

/// Runs it.
///
/// # Errors
/// A file that cannot be parsed, read or written, or an engine that cannot use sublet. Nothing is changed then.
pub fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<ExitCode> {
    let dockerd = Dockerd::of(Path::new("/"), ask, arguments.config.as_deref());
    let path = path(arguments, &dockerd)?;
    let counts = counts(arguments, config)?;
    let found = read(&path)?;
    let (wanted, record) =
        edited(arguments, &path, found.as_deref(), &counts, config).with_context(|| safe_path(&path))?;
    let is_dockerds = arguments.engine == Engine::Docker
        && fs::canonicalize(dockerd.file()).map_or(dockerd.file() == path, |file| file == path);
    let text = wanted.as_deref().unwrap_or("{}");
    if is_dockerds && !arguments.undo {
        dockerd.starts_with(text).with_context(|| safe_path(&path))?;
    }
    if arguments.check {
        let (engine, as_asked) = (Some(name_of(&arguments.engine)), wanted == found);
        let document = Checked { schema: "sublet.setup/1", engine, file: &path, as_asked };
        let difference = "not as asked; the same command with --dry-run shows the difference";
        let found = if as_asked { "as asked" } else { difference };
        tables::print(arguments.format, &document, || format!("{}: {found}.", path.display()))?;
        return Ok(if as_asked { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    if is_dockerds && !arguments.dry_run && sublet_core::process::inheritance::honoured_config().is_none() {
        let is_default = dockerd.default_runtime(text).as_deref() == Some(setup::NAME);
        let is_meant = config.runtime.without_share.is_none_or(|set| set == WithoutShare::Run);
        let file = Path::new(engine_files::DEFAULT_RUNTIME);
        engine_files::say_default_runtime(file, is_default && is_meant)
            .map_err(|error| cannot("write", file, &error))?;
    }
    if wanted == found {
        println!("{}: nothing to do.", path.display());
        return Ok(ExitCode::SUCCESS);
    }
    let notes = notes(arguments, &path, found.as_deref(), &counts);
    if arguments.dry_run {
        let name = |text: &Option<_>| text.as_ref().map_or("/dev/null".into(), |_| path.to_string_lossy());
        let (before, after) = (found.as_deref().unwrap_or_default(), wanted.as_deref().unwrap_or_default());
        let diff = similar::TextDiff::from_lines(before, after);
        print!("{}", diff.unified_diff().header(&name(&found), &name(&wanted)));
        // Standard output is the diff alone.
        for note in notes {
            eprintln!("{note}");
        }
        return Ok(ExitCode::SUCCESS);
    }
    store(&path, wanted.as_deref(), record.as_deref())?;
    if arguments.undo {
        let _ = fs::remove_file(engine_files::record(&path));
        if found.as_deref().is_some_and(drop_ins::made_directory) {
            // Removes the directory only if it is empty now.
            let _ = path.parent().map(fs::remove_dir);
        }
    }
    // Settings that dockerd reads at its start alone.
    let cdi = |text| docker::has_cdi(text).unwrap_or(false);
    let resources = |text| docker::advertised(text).unwrap_or_default();
    let before = found.as_deref().unwrap_or("{}");
    let whole = arguments.undo || cdi(text) && !cdi(before) || resources(text) != resources(before);
    let done = if arguments.undo { "sublet is out" } else { "sublet is in" };
    println!(
        "{}: {done}; {}.",
        path.display(),
        arguments.engine.restart(whole, sd_notify::booted().unwrap_or(false))
    );
    for note in notes {
        println!("{note}");
    }
    Ok(ExitCode::SUCCESS)
}

/// What `--check` prints as JSON.
#[derive(serde::Serialize, schemars::JsonSchema)]
#[schemars(rename = "SetupCheck")]
pub struct Checked<'a> {
    /// `sublet.setup/1`.
    schema: &'static str,
    engine: Option<String>,
    /// Its configuration file.
    file: &'a Path,
    /// Whether it is set up as asked.
    as_asked: bool,
}

/// The counts for Swarm, where they are asked for.
fn counts(arguments: &Arguments, config: &Config) -> anyhow::Result<Vec<Count>> {
    if !arguments.swarm {
        return Ok(Vec::new());
    }
    ensure!(arguments.engine == Engine::Docker, "--swarm is for Docker: `sublet setup docker --swarm`");
    if config.share.is_empty() {
        bail!("the configuration has no [share.NAME], and Swarm counts named shares: docs/swarm.md");
    }
    Ok(stack::counts(config, &Whose::Root.inventory(config)?)?)
}

/// The file to edit: the target of a link, so that the link stays, but for the link to a drop-in of a package.
fn path(arguments: &Arguments, dockerd: &Dockerd) -> anyhow::Result<PathBuf> {
    let path = match (&arguments.config, arguments.engine) {
        (Some(file), _) => file,
        (None, engine) => {
            refuse_unserved(engine)?;
            if engine == Engine::Docker { dockerd.file() } else { Path::new(engine.path()) }
        }
    };
    match (fs::canonicalize(path), fs::symlink_metadata(path)) {
        (Ok(target), _) if !drop_ins::is_packaged(&target) => Ok(target),
        (Err(error), Ok(_)) => Err(cannot("read", path, &error)),
        _ => Ok(std::path::absolute(path)?),
    }
}

fn read(path: &Path) -> anyhow::Result<Option<String>> {
    engine_files::read(path).map_err(|error| cannot("read", path, &error))
}

/// Refuses engines that would not read the file, or that do not support what it says.
fn refuse_unserved(engine: Engine) -> anyhow::Result<()> {
    if let Some(snap) = engine_files::docker_snap(Path::new("/")).filter(|_| engine == Engine::Docker) {
        bail!(
            "Docker is installed as a snap ({}): a snap cannot run programs of the host, so neither \
             sublet's runtime nor its CDI hooks; install Docker as a package (Debian: docker.io)",
            snap.display()
        );
    }
    if nix::unistd::geteuid().is_root() {
        return Ok(());
    }
    let instead = match engine {
        Engine::Docker => {
            "; rootless Docker reads another file: --config ~/.config/docker/daemon.json. Rootless containers get \
             shares by annotations while `sublet serve` runs; CDI devices and containers.toml do not work"
        }
        Engine::Podman => {
            " and is for all users; for your own Podman: --config \
             ~/.config/containers/containers.conf.d/sublet.conf"
        }
        Engine::Containerd | Engine::Crio => ": run this as root",
    };
    bail!("{} belongs to root{instead}", engine.path())
}

/// The new text of the file (`None`: the file is removed), and the record beside it.
fn edited(
    arguments: &Arguments,
    path: &Path,
    found: Option<&str>,
    counts: &[Count],
    config: &Config,
) -> anyhow::Result<(Option<String>, Option<String>)> {
    let record = read(&engine_files::record(path))?;
    let record = record.as_deref();
    if arguments.undo {
        let text = match arguments.engine {
            Engine::Docker => docker::undo(found, record)?,
            Engine::Containerd => containerd::undo(found, record)?,
            Engine::Podman | Engine::Crio => drop_ins::check_own(found).map(|()| None)?,
        };
        return Ok((text, None));
    }
    let wish = wish(arguments, counts, config)?;
    // If the directory is created for the drop-in, by this setup or by the one before.
    let missing = path.parent().is_some_and(|directory| !directory.exists());
    let is_made = missing || found.is_some_and(drop_ins::made_directory);
    let note = if is_made { drop_ins::MADE_DIRECTORY } else { "" };
    let (text, record) = match arguments.engine {
        Engine::Docker => docker::set_up(found, record, &wish).map(|(text, record)| (text, Some(record)))?,
        Engine::Containerd => {
            let (text, record) = containerd::set_up(found, record, &wish)?;
            containerd::check_imports(path, &text, &wish, ask)?;
            (text, Some(record))
        }
        Engine::Crio => (drop_ins::crio(found, &wish)? + note, None),
        Engine::Podman => {
            let wanted = drop_ins::podman(found, &weaker(path)?, &wish)? + note;
            (drop_ins::keep_if_same(found, wanted), None)
        }
    };
    Ok((Some(text), record))
}

fn wish(arguments: &Arguments, counts: &[Count], config: &Config) -> anyhow::Result<Wish> {
    let own = std::env::current_exe().context("sublet cannot find its own program file")?;
    let beside = own.with_file_name("sublet-runtime");
    let runtime = [beside, PathBuf::from("/usr/bin/sublet-runtime")].into_iter().find(|path| path.is_file());
    let Some(runtime) = runtime else {
        bail!("sublet-runtime is missing, both beside this program and in /usr/bin: install it first");
    };
    // That of the installation that this program belongs to.
    let prefix = own.parent().and_then(Path::parent).unwrap_or(Path::new("/usr"));
    let hooks_dir = Some(prefix.join("share/sublet/hooks.d")).filter(|dir| dir.is_dir());
    let hooks_dir = hooks_dir.unwrap_or_else(|| PathBuf::from("/usr/share/sublet/hooks.d"));
    if arguments.engine == Engine::Podman && !hooks_dir.join("sublet.json").is_file() {
        bail!("the hook {} is missing: install it first", hooks_dir.join("sublet.json").display());
    }
    let cdi = arguments.cdi || !config.share.is_empty();
    let resources = arguments.swarm.then(|| stack::resources(counts));
    Ok(Wish { runtime, hooks_dir, default: arguments.default(), cdi, resources })
}

/// The files that Podman reads before the drop-in at `path`. A user's own files are read after all of root's.
fn weaker(path: &Path) -> anyhow::Result<Vec<String>> {
    let mut files = engine_files::podmans(Path::new("/"));
    let directory = path.parent().unwrap_or(Path::new("/"));
    if !files.iter().any(|file| file.parent() == Some(directory)) {
        files.extend(directory.parent().map(|above| above.join("containers.conf")));
        files.extend(engine_files::drop_ins(directory, "conf"));
    }
    let weaker = files.iter().filter(|file| file.parent() != Some(directory) || file.as_path() < path);
    weaker.filter_map(|file| read(file).transpose()).collect()
}

/// Writes the file. The record that an undo needs is written first.
fn store(path: &Path, wanted: Option<&str>, record: Option<&str>) -> anyhow::Result<()> {
    let beside = engine_files::record(path);
    if let Some(directory) = path.parent() {
        sublet_core::fs::create_directories(directory).map_err(|error| cannot("write", directory, &error))?;
    }
    let before = record.and_then(|_| fs::read(&beside).ok());
    if let Some(record) = record {
        // It has the file's secrets, too.
        replace(&beside, record.as_bytes(), 0o600).map_err(|error| cannot("write", &beside, &error))?;
    }
    let written = match wanted {
        Some(text) => replace(path, text.as_bytes(), 0o644),
        None => fs::remove_file(path).map(|()| sync_directory(path)),
    };
    if written.is_err() && record.is_some() {
        // Restores the record: an undo must not follow one of a setup that did not happen.
        let _ = before.map_or_else(|| fs::remove_file(&beside), |before| replace(&beside, &before, 0o600));
    }
    written.map_err(|error| cannot("write", path, &error))
}

/// Further notes for the user.
fn notes(arguments: &Arguments, path: &Path, found: Option<&str>, counts: &[Count]) -> Vec<String> {
    let mut notes = swarm_notes(counts);
    let was = found.and_then(|text| docker::default_runtime(text).ok().flatten());
    let was = was.filter(|was| arguments.default() && was != setup::NAME && was != "runc");
    if arguments.undo {
        notes.push(
            "Containers created with the runtime sublet cannot start without it: remove them.".to_owned(),
        );
    } else if let Some(was) = was.map(|was| safe(&was)) {
        notes.push(format!(
            "The default runtime is no longer {was}: containers that name no runtime now start with \
             sublet, and without sublet.* annotations as with runc or crun. What they need of {was} they \
             get with `--runtime {was}`. `sublet setup docker --undo` restores it."
        ));
        notes.extend((was == "nvidia").then(|| {
            "So containers that have GPUs only by NVIDIA_VISIBLE_DEVICES, without `--gpus`, start without a GPU: give \
             them sublet.* annotations, `--gpus` or `--runtime nvidia`."
                .to_owned()
        }));
    }
    let is_rootless = arguments.engine == Engine::Docker && path.to_string_lossy().contains("/.config/");
    notes.extend(is_rootless.then(|| {
        "Rootless Docker: containers get shares by annotations while `sublet serve` runs. CDI devices and \
         containers.toml do not work."
            .to_owned()
    }));
    notes
}

fn swarm_notes(counts: &[Count]) -> Vec<String> {
    if counts.is_empty() {
        return Vec::new();
    }
    let (without, fitting): (Vec<&Count>, _) = counts.iter().partition(|count| count.fits == 0);
    let none = |count: &&Count| format!("Share {} fits on no GPU here: {}.", safe(&count.share), count.why);
    let mut notes: Vec<String> = without.iter().map(none).collect();
    notes.extend((fitting.len() > 1).then(|| {
        "Swarm counts each share by itself, although they share GPUs: docs/swarm.md says what follows."
            .to_owned()
    }));
    notes.push(
        "dockerd reads node-generic-resources at its start only, and its restart ends this node's tasks: first \
         `docker node update --availability drain NODE`."
            .to_owned(),
    );
    notes
}

fn cannot(verb: &str, path: &Path, error: &io::Error) -> anyhow::Error {
    let built = "; it is on a read-only file system: change it where that file system is built (`--dry-run` shows the \
                 lines)";
    let hint = match error.kind() {
        ErrorKind::ReadOnlyFilesystem => built,
        ErrorKind::PermissionDenied => "; run as root",
        _ => "",
    };
    anyhow::anyhow!("cannot {verb} {}: {error}{hint}; nothing was changed", safe_path(path))
}
