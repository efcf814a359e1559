//! `sublet bench run` through a real Podman. Runs in the root that tests/engines/enter gives. One H200.

use std::fs;

use sublet_e2e::benched::Benched;
use sublet_e2e::docker::skip_unless_engines;
use sublet_e2e::podman::{IMAGE, Podman};
use sublet_e2e::{World, programs};

/// `podman` and no `docker` first in PATH, with this world's storage.
fn path(podman: &Podman) -> String {
    let command = podman.command();
    let words =
        command.get_args().map(|word| format!("'{}'", word.to_string_lossy())).collect::<Vec<_>>().join(" ");
    let set = command.get_envs().filter_map(|(name, value)| Some((name, value?)));
    let exports =
        set.map(|(name, value)| format!("export {}='{}'", name.to_string_lossy(), value.to_string_lossy()));
    let environment = exports.collect::<Vec<_>>().join("\n");
    let real = ["/usr/bin/podman", "/usr/local/bin/podman"]
        .into_iter()
        .find(|path| fs::exists(path).is_ok_and(|is| is));
    let dir = podman.world.dir.path().join("engine");
    fs::create_dir_all(&dir).expect("a directory");
    programs::script(
        &dir.join("podman"),
        &format!("{environment}\nexec {} {words} \"$@\"\n", real.expect("Podman")),
    );
    programs::script(&dir.join("docker"), "exit 1\n");
    format!("{}:{}", dir.display(), std::env::var("PATH").expect("a PATH"))
}

fn with(check: fn(&Benched<'_>)) {
    if skip_unless_engines() {
        return;
    }
    let podman = Podman::up(World::simulated("h200", "[mps]\nidle = \"0s\"\n"));
    check(&Benched {
        world: &podman.world,
        environment: vec![("PATH".to_owned(), path(&podman))],
        version: "podman version ",
        image: IMAGE,
        containers: &|| podman.done(&["ps", "--all", "--format", "{{.Names}}"]),
    });
    podman.assert_empty();
}

sublet_e2e::benched_by!(with);
