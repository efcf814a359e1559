//! Rootless Podman as a real uid with subordinate ids, `sublet serve` as root: by hook and by shim. Runs in
//! the root that tests/engines/enter gives.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::process::{Command, Stdio};

use serde_json::json;
use sublet_e2e::docker::skip_unless_engines;
use sublet_e2e::rootless::{Rootless, done, text};
use sublet_e2e::{Engine, World, eventually, tree};

const SHARE: &[&str] = &["sublet.sm=25", "sublet.memory=8GiB"];
const POLICY: &str = "[[policy]]\nuser = \"tester\"\nsm = 50\nmemory = \"16GiB\"\nleases = 8\n";

fn serving() -> Rootless {
    Rootless::serving(World::simulated("h200", POLICY))
}

/// A whole life: first process, exec, `env -i`, stop and start again, remove.
fn lives(rootless: &Rootless, name: &str, options: &[&str]) {
    let health = ["--health-cmd=cuda-probe info >/tmp/checked", "--health-interval=disable"];
    let options = [options, &health].concat();
    let started = rootless.run(name, &options, SHARE, &["cuda-probe", "hold", "600"]);
    assert!(started.status.success(), "{}", text(&started.stderr));
    let exec = ["exec", name, "cuda-probe", "info"];
    let bare = ["exec", name, "env", "-i", "/usr/bin/cuda-probe", "info"];
    done(&mut rootless.podman(&["healthcheck", "run", name]));
    let checked = ["exec", name, "cat", "/tmp/checked"];
    for command in [["logs", name].as_slice(), &exec, &bare, &checked] {
        let info = rootless.info(name, command);
        assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)), "{command:?}: {info}");
    }
    let leases = rootless.world.leases();
    assert_eq!((leases.len(), &leases[0]["state"]), (1, &json!("active")), "{leases:?}");
    let seen = rootless.sublet(&["status"]);
    let left = "Your policy: sm 50 %, 25 % left; memory 16 GiB, 8 GiB left; leases 8, 7 left";
    assert!(seen.contains(leases[0]["id"].as_str().expect("text")) && seen.contains(left), "{seen}");
    let pid = done(rootless.podman(&["inspect", "--format", "{{.State.Pid}}", name]).arg("--type=container"));
    assert_eq!(leases[0]["pid"].to_string(), pid.trim());
    // Root does not look into a user's files: the user sees the name, root sees whose it is.
    assert!(seen.lines().any(|line| line.starts_with(&format!("{name} "))), "{seen}");
    assert_eq!((&leases[0]["name"], &leases[0]["user"]), (&json!(null), &json!("tester")));
    done(&mut rootless.podman(&["stop", "-t0", name]));
    assert!(eventually(|| rootless.world.leases().is_empty()), "{:?}", rootless.world.leases());
    done(&mut rootless.podman(&["start", name]));
    assert_eq!(rootless.world.leases().len(), 1);
    done(&mut rootless.podman(&["rm", "-f", "-t0", name]));
    assert!(eventually(|| rootless.world.leases().is_empty()), "{:?}", rootless.world.leases());
    rootless.world.assert_empty();
}

#[test]
fn by_the_hook() {
    if skip_unless_engines() {
        return;
    }
    lives(&serving(), "hooked", &[]);
}

/// What the runtime makes in a user's volume the user's own hook or shim removes: root does not go there.
#[test]
fn a_users_volume_is_left_as_it_was() {
    if skip_unless_engines() {
        return;
    }
    let rootless = serving();
    let dir = format!("/lib/{}-linux-gnu", std::env::consts::ARCH);
    let home = rootless.world.dir.path().join("home");
    let (image, volume) = (home.join("image"), home.join("volume"));
    rootless.world.rootfs.clone_to(&image);
    std::fs::rename(image.join(dir.trim_start_matches('/')), &volume).expect("its libraries");
    let owner = std::fs::metadata(&home).expect("the home directory");
    let everything = std::process::Command::new("chown")
        .args(["-R", &format!("{}:{}", owner.uid(), owner.gid())])
        .arg(&volume)
        .status();
    assert!(everything.expect("chown runs").success());
    let before = tree(&volume);
    let option = format!("-v={}:{dir}", volume.display());
    let shim = format!("--runtime={}", rootless.dir().join("bin/shim").display());
    for (name, entry_point) in [("hooked", &[][..]), ("shimmed", &[shim.as_str()])] {
        let options = [&[option.as_str()], entry_point].concat();
        let started = rootless.run(name, &options, SHARE, &["cuda-probe", "hold", "600"]);
        assert!(started.status.success(), "{}", text(&started.stderr));
        assert!(volume.join("libcuda.so.1").exists(), "a mount point is there while it runs");
        done(&mut rootless.podman(&["rm", "-f", "-t0", name]));
        assert!(eventually(|| rootless.world.leases().is_empty()), "{:?}", rootless.world.leases());
        assert!(eventually(|| tree(&volume) == before), "{name}: {:?}", tree(&volume));
        // The next container is started through the shim only.
        let _ = std::fs::remove_file(rootless.dir().join("hooks/sublet.json"));
    }
    rootless.world.assert_empty();
}

#[test]
fn a_mig_device_alone_within_the_policy() {
    if skip_unless_engines() {
        return;
    }
    let policy = "[[policy]]\nuser = \"tester\"\nmodes = [\"mig\"]\nsm = 20\n";
    let rootless = Rootless::serving(World::simulated("a100x2-mig", policy));
    let hold = ["cuda-probe", "hold", "600"];
    let started = rootless.run("mig", &[], &["sublet.mig=1g.5gb"], &hold);
    assert!(started.status.success(), "{}", text(&started.stderr));
    for command in [["logs", "mig"].as_slice(), &["exec", "mig", "cuda-probe", "info"]] {
        let info = rootless.info("mig", command);
        assert_eq!((&info["count"], &info["mps"], &info["sm"]), (&json!(1), &json!(false), &json!(14)));
    }
    let second = rootless.run("second", &[], &["sublet.mig=1c.2g.10gb"], &hold);
    let said = text(&second.stderr);
    assert!(
        !second.status.success()
            && said.contains("limits sm to 20 %")
            && said.contains("your containers hold 12.963 %"),
        "{said}"
    );
    done(&mut rootless.podman(&["rm", "-f", "-t0", "mig"]));
    assert!(eventually(|| rootless.world.leases().is_empty()), "{:?}", rootless.world.leases());
    rootless.world.assert_empty();
}

#[test]
fn by_the_shim() {
    if skip_unless_engines() {
        return;
    }
    let rootless = serving();
    std::fs::remove_file(rootless.dir().join("hooks/sublet.json")).expect("the hook is there");
    let shim = rootless.dir().join("bin/shim");
    let option = format!("--runtime={}", shim.display());
    lives(&rootless, "shimmed", &[&option]);
}

#[test]
fn by_both_at_once() {
    if skip_unless_engines() {
        return;
    }
    let rootless = serving();
    let option = format!("--runtime={}", rootless.dir().join("bin/shim").display());
    lives(&rootless, "both", &[&option]);
}

/// The user is `nobody` in the container: Podman 5 mounts its root filesystem after the hook has run.
#[test]
fn in_a_user_namespace_without_the_user_by_every_entry_point() {
    if skip_unless_engines() {
        return;
    }
    let rootless = serving();
    for below in ["home", "home/xdg"] {
        std::fs::set_permissions(rootless.dir().join(below), PermissionsExt::from_mode(0o711))
            .expect("chmod");
    }
    let option = format!("--runtime={}", rootless.dir().join("bin/shim").display());
    lives(&rootless, "hooked", &["--uidmap=0:1:60000"]);
    lives(&rootless, "both", &["--uidmap=0:1:60000", &option]);
    std::fs::remove_file(rootless.dir().join("hooks/sublet.json")).expect("the hook is there");
    lives(&rootless, "shimmed", &["--uidmap=0:1:60000", &option]);
}

#[test]
fn refused_without_the_service_and_beyond_the_policy() {
    if skip_unless_engines() {
        return;
    }
    let alone = Rootless::new(World::simulated("h200", POLICY));
    let refused = alone.run("alone", &[], SHARE, &["sleep", "600"]);
    assert!(!refused.status.success());
    assert!(text(&refused.stderr).contains("sublet serve is not running"), "{}", text(&refused.stderr));
    let plain = alone.run("plain", &[], &[], &["sleep", "600"]);
    assert!(plain.status.success(), "{}", text(&plain.stderr));
    drop(alone);
    let rootless = serving();
    let refused = rootless.run("large", &[], &["sublet.sm=60", "sublet.memory=1GiB"], &["sleep", "600"]);
    assert!(text(&refused.stderr).contains("limits sm to 50 %"), "{}", text(&refused.stderr));
    assert!(!refused.status.success());
    let last = rootless.sublet(&["status", "--last-error"]);
    assert!(last.contains("limits sm to 50 %"), "{last}");
    // It has no cgroup of its own, by which the hook would know it.
    let id = done(&mut rootless.podman(&["container", "inspect", "--format", "{{.Id}}", "large"]));
    assert!(last.contains(&format!("container {}: ", &id.trim()[..12])), "{last}");
    rootless.world.assert_empty();
}

/// `command` by a user who is in the group of the nodes.
fn in_group(command: &Command) -> Command {
    let mut grouped = Command::new("setpriv");
    grouped.args(["--reuid=1000", "--regid=1000", "--groups=44", "podman"]).args(command.get_args());
    grouped.env_clear().envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    grouped.current_dir("/").stdin(Stdio::null());
    grouped
}

#[test]
fn nodes_of_a_group_need_that_group_and_a_runtime_that_keeps_it() {
    if skip_unless_engines() {
        return;
    }
    let rootless = serving();
    let dev = rootless.world.driver_root.as_ref().expect("a simulated driver").join("dev");
    for node in std::fs::read_dir(dev).expect("nodes").flatten() {
        if node.file_name().to_string_lossy().starts_with("nvidia") && !node.path().is_dir() {
            std::os::unix::fs::chown(node.path(), Some(0), Some(44)).expect("chown");
            std::fs::set_permissions(node.path(), PermissionsExt::from_mode(0o660)).expect("chmod");
        }
    }
    let shim = format!("--runtime={}", rootless.dir().join("bin/shim").display());
    let share: Vec<String> = SHARE.iter().map(|key| format!("--annotation={key}")).collect();
    let run = |name: &str, options: &[&str]| {
        let mut all = vec!["run", "-d", "--name", name];
        all.extend(options);
        all.extend(share.iter().map(String::as_str));
        all.extend(["probe", "sleep", "600"]);
        rootless.podman(&all)
    };
    let refused = |command: &mut Command, why: &str| {
        let output = command.output().expect("podman runs");
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains("has mode 0660") && said.contains(why), "{said}");
        let last = rootless.sublet(&["status", "--last-error"]);
        assert!(last.contains(why), "{last}");
    };
    refused(&mut run("stranger", &[]), "have root add you to its group");
    refused(&mut in_group(&run("hooked", &[])), "start it with crun and `--group-add keep-groups`");
    refused(&mut in_group(&run("shimmed", &[&shim])), "start it with crun and `--group-add keep-groups`");
    // With the hook alone it starts, and is warned of where the runtime keeps no groups.
    done(&mut in_group(&run("kept", &["--group-add=keep-groups"])));
    let warning = "only crun keeps the groups of `--group-add keep-groups`: CUDA will find no GPU";
    let told = || {
        ["events", "status --last-error"].map(|command| {
            let words: Vec<&str> = command.split(' ').collect();
            rootless.sublet(&words).contains(warning)
        })
    };
    let is_runc = rootless.world.engine == Engine::Runc;
    assert_eq!(told(), [is_runc; 2], "{}", rootless.sublet(&["events"]));
    done(&mut rootless.podman(&["rm", "-f", "-t0", "kept"]));
    std::fs::remove_file(rootless.dir().join("hooks/sublet.json")).expect("the hook is there");
    let keeping = run("keeping", &[&shim, "--group-add=keep-groups"]);
    if is_runc {
        refused(&mut in_group(&keeping), "start it with crun and `--group-add keep-groups`");
    } else {
        done(&mut in_group(&keeping));
        let opened = ["exec", "keeping", "cuda-probe", "noderights", "/dev/nvidia0"];
        let opened = done(&mut in_group(&rootless.podman(&opened)));
        assert!(opened.contains("ENXIO"), "allowed, and no driver behind it: {opened}");
        done(&mut rootless.podman(&["rm", "-f", "-t0", "keeping"]));
    }
    assert!(eventually(|| rootless.world.leases().is_empty()), "{:?}", rootless.world.leases());
    rootless.world.assert_empty();
}

#[test]
fn a_runtime_that_fails_leaves_no_lease() {
    if skip_unless_engines() {
        return;
    }
    let rootless = serving();
    // The runtime's create fails after precreate took the lease: no poststop of any kind runs.
    let failed = rootless.run("failed", &[], SHARE, &["/no/such/program"]);
    assert!(!failed.status.success() && text(&failed.stderr).contains("/no/such/program"));
    assert!(eventually(|| rootless.world.leases().is_empty()), "{:?}", rootless.world.leases());
    rootless.world.assert_empty();
}

/// A container without its own cgroup has an id by its layer alone.
#[test]
fn of_twenty_at_once_those_start_that_the_policy_allows() {
    if skip_unless_engines() {
        return;
    }
    let rootless = serving();
    let names: Vec<String> = (0..20).map(|number| format!("many-{number}")).collect();
    let started: Vec<_> = std::thread::scope(|scope| {
        let run = |name| rootless.run(name, &[], &["sublet.sm=8", "sublet.memory=1GiB"], &["sleep", "600"]);
        let threads: Vec<_> = names.iter().map(|name| scope.spawn(move || run(name))).collect();
        threads.into_iter().map(|thread| thread.join().expect("it runs")).collect()
    });
    let refused: Vec<String> =
        started.iter().filter(|done| !done.status.success()).map(|done| text(&done.stderr)).collect();
    assert!(refused.iter().all(|line| line.contains("limits sm to 50 %")), "{refused:?}");
    let leases = rootless.world.leases();
    assert_eq!((leases.len(), refused.len()), (6, 14), "{leases:?}");
    assert!(leases.iter().all(|lease| lease["state"] == "active"), "{leases:?}");
    done(rootless.podman(&["rm", "--all", "--force", "--time=0"]));
    assert!(eventually(|| rootless.world.leases().is_empty()), "{:?}", rootless.world.leases());
    rootless.world.assert_empty();
}
