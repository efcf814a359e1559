//! `sublet bench run` through a real Docker. Runs in the root that tests/engines/enter gives. One H200.

use serde_json::json;
use sublet_e2e::World;
use sublet_e2e::benched::Benched;
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

sublet_e2e::benched_by!(with);
