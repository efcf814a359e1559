//! Podman: its version, whether it finds sublet's hook, and hooks in directories where they do harm.

use std::path::{Path, PathBuf};
use std::{fs, io};

use serde_json::Value;

use super::{Host, Outcome, fail, pass, skip, version, warn};
use crate::setup::engine_files::{drop_ins, podmans, read};
use sublet_core::fs::under;
use sublet_core::text::{safe, safe_path};

/// How many files of a user are read, and how much of each: a user may put anything there.
const FILES: usize = 32;
const LARGEST: u64 = 1 << 20;

/// The first version whose Docker API passes annotations on (containers/podman 22124).
const PASSES_ANNOTATIONS: [u32; 2] = [5, 1];

/// Where clients of Docker's find it.
const SOCKET: &str = "/run/podman/podman.sock";

/// The directories that every Podman, buildah and CRI-O reads.
const SHARED: [&str; 2] = ["/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d"];

/// Whether Podman runs the hook, for root and for users with their own settings.
pub(super) fn hook(host: &Host<'_>) -> Outcome {
    if host.program("podman").is_none() {
        return skip("not installed");
    }
    let podman = (host.ask)(&["podman", "--version"]).unwrap_or_default();
    if version(&podman).is_some_and(|parts| parts < vec![4, 3]) {
        return fail(format!("{} is older than 4.3", safe(podman.trim()))).fix("install Podman 4.3 or later");
    }
    let (directories, by) = match effective(&podmans(&host.root), read, vec![SHARED[0].to_owned()]) {
        Ok(effective) => effective,
        Err(error) => return fail(error).fix("correct that file"),
    };
    let Some(ours) = our_hook(&host.root, &directories) else {
        let by = by.map(|file| format!(", says {}", safe_path(&file))).unwrap_or_default();
        let list = safe(&directories.join(" "));
        return warn(format!("hooks_dir is {list}{by}, and sublet's hook is in none of these directories"))
            .fix("sublet setup podman");
    };
    let file: Value = serde_json::from_slice(&fs::read(&ours).unwrap_or_default()).unwrap_or_default();
    let program = file.pointer("/hook/path").and_then(Value::as_str);
    if let Some(missing) = program.filter(|path| !host.at(path).is_file()) {
        // Podman ignores such a file silently.
        return fail(format!("{} runs {}, which does not exist", safe_path(&ours), safe(missing)))
            .fix("install sublet-hook there");
    }
    if version(&podman).is_some_and(|parts| parts[..] < PASSES_ANNOTATIONS[..]) && host.at(SOCKET).exists() {
        return warn(format!(
            "the Docker API of {}, which {SOCKET} serves, drops annotations, and with them the shares of \
             clients of Docker's",
            safe(podman.trim())
        ))
        .fix("install Podman 5.1 or later, or start containers with podman itself");
    }
    users(host, &directories)
        .unwrap_or_else(|| pass(format!("{} runs {}", safe(podman.trim()), safe_path(&ours))))
}

/// Whether Podman below `root` runs sublet's hook, as far as the files say that it reads for root.
pub(crate) fn has_hook(root: &Path) -> bool {
    let found = effective(&podmans(root), read, vec![SHARED[0].to_owned()]);
    found.is_ok_and(|(directories, _)| our_hook(root, &directories).is_some())
}

/// sublet's hook in the first of `directories` that has it.
fn our_hook(root: &Path, directories: &[String]) -> Option<PathBuf> {
    directories.iter().map(|dir| under(root, dir).join("sublet.json")).find(|path| path.is_file())
}

/// The value of `hooks_dir` after all `files`, and the last file that sets it.
fn effective(
    files: &[PathBuf],
    read: fn(&Path) -> io::Result<Option<String>>,
    mut list: Vec<String>,
) -> Result<(Vec<String>, Option<PathBuf>), String> {
    let mut by = None;
    for file in files {
        let text = read(file).map_err(|error| format!("{}: {error}", safe_path(file)))?.unwrap_or_default();
        let table: toml::Table = toml::from_str(&text)
            .map_err(|error| format!("{} is not valid TOML: {}", safe_path(file), safe(error.message())))?;
        let before = list.clone();
        crate::setup::drop_ins::merge(&mut list, &table, "hooks_dir");
        if list != before {
            by = Some(file.clone());
        }
    }
    Ok((list, by))
}

/// Finds a user whose own settings leave out sublet's hook.
fn users(host: &Host<'_>, directories: &[String]) -> Option<Outcome> {
    // The home directories of ordinary users.
    let passwd = host.text("/etc/passwd").unwrap_or_default();
    let home = |line: &str| {
        let fields: Vec<&str> = line.split(':').collect();
        let uid: u32 = fields.get(2)?.parse().ok()?;
        fields.get(5).filter(|_| uid >= 1000).map(|home| host.at(home))
    };
    for home in passwd.lines().filter_map(home) {
        let own = home.join(".config/containers");
        let files =
            [vec![own.join("containers.conf")], drop_ins(&own.join("containers.conf.d"), "conf")].concat();
        let some = &files[..files.len().min(FILES)];
        let Ok((list, Some(by))) = effective(some, read_users, directories.to_vec()) else { continue };
        if our_hook(&host.root, &list).is_none() {
            let found =
                format!("hooks_dir in {} does not contain the directory of sublet's hook", safe_path(&by));
            return Some(warn(found).fix("add /usr/share/sublet/hooks.d to hooks_dir in that file"));
        }
    }
    None
}

/// Reads a file that may be anything a user has created: a pipe without a writer, or a link to /dev/zero.
fn read_users(path: &Path) -> io::Result<Option<String>> {
    let bytes = sublet_core::ledger::read_up_to(path, LARGEST)?;
    bytes.map(|bytes| String::from_utf8(bytes).map_err(io::Error::other)).transpose()
}

/// Checks for hooks in the shared directories that make engines fail.
pub(super) fn precreate(host: &Host<'_>) -> Outcome {
    let files: Vec<PathBuf> = SHARED.iter().flat_map(|dir| drop_ins(&host.at(dir), "json")).collect();
    for file in &files {
        let text = fs::read(file).unwrap_or_default();
        let name = safe_path(file);
        let Ok(value) = serde_json::from_slice::<Value>(&text) else {
            return fail(format!("{name} is not valid JSON, so Podman and CRI-O start no container at all"))
                .fix(format!("rm {name}"));
        };
        let stages = value.get("stages").and_then(Value::as_array);
        if stages.is_some_and(|stages| stages.iter().any(|stage| stage == "precreate")) {
            return fail(format!(
                "{name} has the stage precreate, on which podman build, buildah and CRI-O fail"
            ))
            .fix(format!("rm {name} (the place of sublet's hook is /usr/share/sublet/hooks.d)"));
        }
    }
    pass(format!("{} in the shared directories, none with the stage precreate", files.len()))
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::{Fail, Warn};
    use super::super::fake_host::{Fake, finding, passed, skipped};
    use super::*;

    const DROP_IN: &str = "/etc/containers/containers.conf.d/sublet.conf";
    const HOOK: &str = "/usr/share/sublet/hooks.d/sublet.json";

    #[test]
    fn the_hook_is_named_there_and_can_be_run() {
        let fake = Fake::new();
        assert_eq!(skipped(hook(&fake.host())), "not installed");
        fake.file("/usr/bin/podman", "");
        let old = Host { ask: |_| Some("podman version 3.4.4".into()), ..fake.host() };
        assert!(finding(hook(&old), Fail).0.contains("older than 4.3"));
        assert_eq!(finding(hook(&fake.host()), Warn).1, "sublet setup podman");
        fake.file(DROP_IN, "[engine]\nhooks_dir = [\"/usr/share/sublet/hooks.d\"]\n");
        assert_eq!(finding(hook(&fake.host()), Warn).1, "sublet setup podman");
        assert!(!has_hook(&fake.path("/")));
        fake.file(HOOK, r#"{"hook": {"path": "/usr/libexec/sublet/sublet-hook"}}"#);
        assert!(has_hook(&fake.path("/")));
        assert!(finding(hook(&fake.host()), Fail).0.contains("which does not exist"));
        fake.file("/usr/libexec/sublet/sublet-hook", "");
        passed(hook(&fake.host()));
        let four = |_: &[&str]| Some("podman version 4.3.1\n".to_owned());
        passed(hook(&Host { ask: four, ..fake.host() }));
        fake.file(SOCKET, "");
        let (found, fix) = finding(hook(&Host { ask: four, ..fake.host() }), Warn);
        assert!(found.contains("podman version 4.3.1") && fix.contains("5.1"), "{found}: {fix}");
        passed(hook(&Host { ask: |_| Some("podman version 5.4.2".into()), ..fake.host() }));
        fake.file("/etc/containers/containers.conf.d/zz.conf", "[engine]\nhooks_dir = [\"/elsewhere\"]\n");
        let (found, _) = finding(hook(&fake.host()), Warn);
        assert!(found.contains("hooks_dir is /elsewhere, says ") && found.contains("zz.conf"), "{found}");
        fake.file("/etc/containers/containers.conf.d/zz.conf", "[engine\n");
        assert!(finding(hook(&fake.host()), Fail).0.contains("is not valid TOML"));
    }

    #[test]
    fn a_user_may_have_left_it_out() {
        let fake = Fake::new();
        fake.file("/usr/bin/podman", "").file(HOOK, "{}");
        fake.file(DROP_IN, "[engine]\nhooks_dir = [\"/usr/share/sublet/hooks.d\"]\n");
        fake.file("/etc/passwd", "root:x:0:0::/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\n");
        passed(hook(&fake.host()));
        fake.file(
            "/home/alice/.config/containers/containers.conf",
            "[engine]\nhooks_dir = [\"/mine\", {append=true}]\n",
        );
        passed(hook(&fake.host()));
        fake.file("/home/alice/.config/containers/containers.conf", "[engine]\nhooks_dir = [\"/mine\"]\n");
        assert!(finding(hook(&fake.host()), Warn).0.contains("/home/alice/"));
    }

    #[test]
    fn pipes_and_endless_files_of_users_do_not_block_the_check() {
        let fake = Fake::new();
        fake.file("/usr/bin/podman", "").file(HOOK, "{}");
        fake.file(DROP_IN, "[engine]\nhooks_dir = [\"/usr/share/sublet/hooks.d\"]\n");
        fake.file("/etc/passwd", "eve:x:1000:1000::/home/eve:/bin/sh\nbob:x:1001:1001::/home/bob:/bin/sh\n");
        let own = "/home/eve/.config/containers/containers.conf.d";
        fake.file(&format!("{own}/a.conf"), "");
        let pipe = fake.path(&format!("{own}/b.conf"));
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        fake.link("/home/bob/.config/containers/containers.conf", "/dev/zero");
        passed(hook(&fake.host()));
        assert!(read_users(&pipe).unwrap_err().to_string().contains("not a regular file"));
        fake.file("/large", &" ".repeat((1 << 20) + 1));
        assert!(read_users(&fake.path("/large")).unwrap_err().to_string().contains("larger than 1 MiB"));
    }

    #[test]
    fn hooks_that_break_engines_are_found() {
        let fake = Fake::new();
        fake.file("/usr/share/containers/oci/hooks.d/a.json", r#"{"stages": ["prestart"]}"#);
        passed(precreate(&fake.host()));
        fake.file("/etc/containers/oci/hooks.d/b.json", r#"{"stages": ["precreate"]}"#);
        assert!(finding(precreate(&fake.host()), Fail).0.contains("podman build"));
        fake.file("/etc/containers/oci/hooks.d/b.json", "{");
        assert!(finding(precreate(&fake.host()), Fail).0.contains("start no container at all"));
    }
}
