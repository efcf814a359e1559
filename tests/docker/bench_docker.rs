//! `sublet bench run` through a real Docker. Runs in the root that tests/engines/enter gives. One H200.

use serde_json::json;
use sublet_e2e::World;
use sublet_e2e::benched::{self, Benched};
use sublet_e2e::docker::{Docker, IMAGE, skip_unless_engines};

fn with(check: fn(&Benched<'_>)) {
    if skip_unless_engines() {
        return;
    }
    let docker = Docker::up(World::simulated("h200", "[mps]\nidle = \"0s\"\n"), &json!({}));
    let command = docker.command();
    let set = command.get_envs().filter_map(|(name, value)| Some((name, value?)));
    let environment = set.map(|(name, value)| [name, value].map(|text| text.to_string_lossy().into_owned()));
    check(&Benched {
        world: &docker.world,
        environment: environment.map(|[name, value]| (name, value)).collect(),
        version: "Docker version ",
        image: IMAGE,
        containers: &|| docker.ask(&["ps", "--all", "--format", "{{.Names}}"]),
    });
    docker.world.assert_empty();
}

#[test]
fn built_in_loads_need_no_image() {
    with(benched::built_in_loads);
}

#[test]
fn a_program_of_the_users_own() {
    with(benched::a_program);
}

#[test]
fn servers_are_asked() {
    with(benched::servers);
}

#[test]
fn a_signal_leaves_nothing() {
    with(benched::a_signal);
}
