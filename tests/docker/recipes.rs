//! docs/recipes.md: every share in it is one that sublet grants, and, in the root that tests/engines/enter
//! gives, Compose and Quadlet read every file in it.

use std::path::Path;
use std::process::{Child, Command};

use sublet_e2e::docker::skip_unless_engines;
use sublet_e2e::kept::KEEP;
use sublet_e2e::{Bundle, World, eventually, skip_unless_root};

const RECIPES: &str = include_str!("../../docs/recipes.md");

/// A program's name, its Compose file and its Quadlet unit.
struct Recipe {
    name: &'static str,
    compose: String,
    quadlet: String,
}

/// The indented lines that begin with `first`, until others come. One file follows the other.
fn blocks(text: &str, first: &str) -> Vec<String> {
    let lines = text.lines().skip_while(|line| line.strip_prefix("    ") != Some(first));
    let block = lines.take_while(|line| line.is_empty() || line.starts_with("    "));
    let block: Vec<&str> = block.map(|line| line.get(4..).unwrap_or("")).collect();
    let block = block.join("\n").replace("\n\n[Container]", "\n\n\n[Container]");
    block.split("\n\n\n").map(|file| file.trim_end().to_owned() + "\n").collect()
}

fn block(text: &str, first: &str) -> String {
    blocks(text, first).swap_remove(0)
}

fn recipes() -> Vec<Recipe> {
    let (first, _) = RECIPES.split_once("\n# A home server\n").expect("the recipes come first");
    let sections = first.split("\n## ").skip(1);
    let recipe = |section: &'static str| Recipe {
        name: section.lines().next().expect("a heading"),
        compose: block(section, "services:"),
        quadlet: block(section, "[Container]"),
    };
    sections.map(recipe).collect()
}

/// config/home-server: its Compose file with each of its units.
fn home_server() -> Vec<Recipe> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config/home-server");
    let read = |name: &str| std::fs::read_to_string(dir.join(name)).expect("it is there");
    let names = ["ollama", "jellyfin", "whisper", "immich-machine-learning"];
    let recipe = |name: &'static str| Recipe {
        name,
        compose: read("compose.yaml"),
        quadlet: read(&format!("{name}.container")),
    };
    names.into_iter().map(recipe).collect()
}

/// "Models in turns": its Compose file with each of its units, and the configuration.
fn in_turns() -> (Vec<Recipe>, String) {
    let (_, section) = RECIPES.split_once("\n# Models in turns\n").expect("in docs/recipes.md");
    let (section, _) = section.split_once("\n# ").expect("another follows");
    let units = ["ollama", "vllm", "training"].into_iter().zip(blocks(section, "[Container]"));
    let recipe = |(name, quadlet)| Recipe { name, compose: block(section, "services:"), quadlet };
    (units.map(recipe).collect(), block(section, "[suspend]"))
}

impl Recipe {
    fn compose_annotations(&self) -> Vec<String> {
        let pair =
            |line: &str| line.trim().split_once(": ").map(|(key, value)| (key.to_owned(), value.to_owned()));
        let ours = self.compose.lines().filter_map(pair).filter(|(key, _)| key.starts_with("sublet."));
        ours.map(|(key, value)| format!("{key}={}", value.trim_matches('"'))).collect()
    }

    fn quadlet_annotations(&self) -> Vec<String> {
        self.quadlet.lines().filter_map(|line| line.strip_prefix("Annotation=")).map(str::to_owned).collect()
    }
}

#[test]
fn each_asks_for_a_share_that_is_granted_and_for_the_same_by_both() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h100x2-mig-off", "");
    let recipes = recipes();
    let names: Vec<&str> = recipes.iter().map(|recipe| recipe.name).collect();
    let all = [
        "Ollama",
        "vLLM",
        "vLLM on two GPUs",
        "JAX",
        "TensorFlow",
        "PyTorch",
        "Triton Inference Server",
        "Jupyter",
        "ffmpeg",
        "Jellyfin",
    ];
    assert_eq!(names, all);
    for recipe in recipes {
        let annotations = recipe.compose_annotations();
        assert!(annotations.len() > 1, "{}: {}", recipe.name, recipe.compose);
        assert_eq!(recipe.quadlet_annotations(), annotations, "{}", recipe.name);
        let asked: Vec<&str> = annotations.iter().flat_map(|line| ["--annotation", line]).collect();
        let output = world.sublet(&[&["explain"], &asked[..]].concat());
        assert!(output.status.success(), "{}: {output:?}", recipe.name);
        for (option, name, text) in [
            ("--compose", "compose.yaml", &recipe.compose),
            ("--quadlet", "recipe.container", &recipe.quadlet),
        ] {
            let file = world.dir.path().join(name);
            std::fs::write(&file, text).expect("it is written");
            let output = world.sublet(&["explain", option, file.to_str().expect("UTF-8")]);
            let table = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && table.contains(" fits\n"), "{}: {output:?}", recipe.name);
        }
    }
}

#[test]
fn ollama_and_jellyfin_run_on_one_gpu_whichever_starts_first() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let recipes = recipes();
    let of = |name: &str| recipes.iter().find(|recipe| recipe.name == name).expect("in docs/recipes.md");
    for order in [["Ollama", "Jellyfin"], ["Jellyfin", "Ollama"]] {
        let asked = order.map(|name| of(name).quadlet_annotations());
        let bundles = order.into_iter().zip(&asked).map(|(name, asked)| {
            let pairs: Vec<_> = asked.iter().filter_map(|line| line.split_once('=')).collect();
            world.bundle(&name.to_lowercase(), &pairs, &["/bin/sleep", "120"])
        });
        let bundles: Vec<_> = bundles.collect();
        bundles.iter().for_each(Bundle::up);
        assert_eq!(world.leases().len(), 2, "{order:?}");
        bundles.iter().for_each(Bundle::down);
        world.assert_empty();
    }
}

/// The service, until it is dropped.
struct Serve(Child);

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn each_of_the_models_in_turns_has_its_turn() {
    if skip_unless_root() {
        return;
    }
    let (recipes, config) = in_turns();
    let by_units: Vec<String> = recipes.iter().flat_map(Recipe::quadlet_annotations).collect();
    assert_eq!((by_units.len(), by_units), (6, recipes[0].compose_annotations()));
    assert!(config.contains("turns = \"10m\""), "{config}");
    // One GPU of 80 GiB.
    let topology = concat!(env!("CARGO_MANIFEST_DIR"), "/../sim/topologies/h200.toml");
    let topology = std::fs::read_to_string(topology).expect("a topology");
    let topology = topology.replace("= 143771", "= 81559").replace("= 143155", "= 81079");
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("80.toml");
    std::fs::write(&file, topology).expect("written");
    let soon = config.replace("10m", "2s") + "at_least = \"1s\"\n";
    let world = World::simulated(file.to_str().expect("UTF-8"), &soon);
    let serve = Serve(world.command("sublet").arg("serve").spawn().expect("sublet serve runs"));
    let socket = world.state_dir().join("sublet.sock");
    assert!(eventually(|| std::os::unix::net::UnixStream::connect(&socket).is_ok()), "no socket");
    let bundles = recipes.iter().map(|recipe| {
        let asked = recipe.quadlet_annotations();
        let pairs: Vec<_> = asked.iter().filter_map(|line| line.split_once('=')).collect();
        let bundle = world.bundle(recipe.name, &pairs, KEEP);
        bundle.up();
        bundle.event("round");
        bundle
    });
    let bundles: Vec<_> = bundles.collect();
    let active = || {
        let leases = world.leases();
        leases.iter().filter(|lease| lease["state"] == "active").count()
    };
    for bundle in &bundles {
        let rounds = || bundle.output().matches("\"event\":\"round\"").count();
        let before = rounds();
        assert!(eventually(|| rounds() > before + 1), "{} has no turn: {:?}", bundle.id, world.leases());
        assert!(active() <= 1, "{:?}", world.leases());
    }
    assert_eq!(world.leases().len(), 3);
    bundles.iter().for_each(Bundle::down);
    drop(serve);
    world.assert_empty();
}

#[test]
fn compose_and_quadlet_read_each() {
    if skip_unless_engines() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    for recipe in recipes().into_iter().chain(home_server()).chain(in_turns().0) {
        let file = dir.path().join("compose.yaml");
        std::fs::write(&file, &recipe.compose).expect("it is written");
        let mut compose = Command::new("docker-compose");
        let read =
            compose.arg("--file").arg(&file).args(["config", "--format=json"]).output().expect("installed");
        assert!(read.status.success(), "{}: {read:?}", recipe.name);
        for annotation in recipe.compose_annotations() {
            let (key, value) = annotation.split_once('=').expect("key and value");
            let said = String::from_utf8_lossy(&read.stdout).into_owned();
            assert!(said.contains(&format!("\"{key}\": \"{value}\"")), "{}: {said}", recipe.name);
        }
        std::fs::write(dir.path().join("recipe.container"), &recipe.quadlet).expect("it is written");
        let mut quadlet = Command::new("/usr/lib/systemd/system-generators/podman-system-generator");
        let read = quadlet.arg("--dryrun").env("QUADLET_UNIT_DIRS", dir.path()).output().expect("installed");
        let said = String::from_utf8_lossy(&read.stdout).into_owned();
        assert!(read.status.success() && said.contains("ExecStart="), "{}: {read:?}", recipe.name);
        for annotation in recipe.quadlet_annotations() {
            assert!(said.contains(&format!("--annotation {annotation}")), "{}: {said}", recipe.name);
        }
    }
}
