//! The CDI specification itself: its content, how it is kept current, and what its hook does with bundles that runc
//! and crun get without an engine.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use sublet_e2e::hooked::cdi_specification as specification;
use sublet_e2e::user::Host;
use sublet_e2e::{Bundle, World, eventually, skip_unless_root};

const SMALL: &str = "[share.small]\nsm = 25\nmemory = \"8GiB\"\n";

#[test]
fn list_shows_the_devices_and_why_a_share_has_none() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated(
        "h200x8",
        "[share.pair]\ngpu = \"any:2\"\n[share.small]\nsm = 25\n[share.third]\ngpu = 3\n",
    );
    let output = world.sublet(&["cdi", "list", "--format", "json"]);
    let listed: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let names: Vec<_> =
        listed["devices"].as_array().expect("devices").iter().map(|device| &device["name"]).collect();
    let mut expected: Vec<String> = (0..8).map(|gpu| format!("sublet/share=small.{gpu}")).collect();
    expected.extend(["sublet/share=third".into(), "sublet/share=third.3".into()]);
    assert_eq!(names, expected.iter().collect::<Vec<_>>());
    let why = |name: &str| {
        let without = listed["without"].as_array().expect("without");
        without.iter().find(|entry| entry["name"] == name).map(|entry| entry["why"].to_string())
    };
    assert!(why("sublet/share=pair.0").is_some_and(|why| why.contains("several GPUs")), "{listed}");
    assert!(why("sublet/share=small").is_some_and(|why| why.contains("8 GPUs can serve it")), "{listed}");
    let table = String::from_utf8_lossy(&world.sublet(&["cdi", "list"]).stdout).into_owned();
    assert!(table.contains("absent, run `sublet cdi generate`"), "{table}");
    assert!(world.sublet(&["cdi", "generate"]).status.success());
    let table = String::from_utf8_lossy(&world.sublet(&["cdi", "list"]).stdout).into_owned();
    assert!(table.contains("cdi/sublet.json: current"), "{table}");
}

#[test]
fn without_a_share_nothing_is_written() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let spec = world.dir.path().join("cdi/sublet.json");
    std::fs::create_dir_all(spec.parent().expect("a directory")).expect("a directory");
    let generate = || world.sublet(&["cdi", "generate", "--output", spec.to_str().expect("UTF-8")]);
    let refused = generate();
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("no [share.<name>]"), "{refused:?}");
    assert!(!spec.exists());
    std::fs::write(&spec, "somebody else's").expect("a file");
    world.configure(SMALL);
    let refused = generate();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("was not overwritten"), "{refused:?}");
    assert_eq!(std::fs::read(&spec).expect("it is there"), b"somebody else's");
}

/// The CDI project's own schema of the version that our specification names (Apache-2.0, from
/// github.com/cncf-tags/container-device-interface 0.5.2, schema/).
#[test]
fn the_specification_is_valid_by_cdis_own_schema() {
    if skip_unless_root() {
        return;
    }
    // On two GPUs, one of them cut into four MIG devices.
    let mig = "[share.mig]\nmode = \"mig\"\n";
    let world = World::simulated("a100x2-mig", &format!("{SMALL}[share.1g]\ncapabilities = \"all\"\n{mig}"));
    world.generate_cdi();
    let spec = specification(&world);
    assert_eq!(spec["cdiVersion"], "0.5.0");
    let names: Vec<_> =
        spec["devices"].as_array().expect("devices").iter().map(|device| &device["name"]).collect();
    let expected = ["1g", "1g.1", "mig.0:0", "mig.0:1", "mig.0:2", "mig.0:3", "small", "small.1"];
    assert_eq!(names, expected);
    let script = "import json, sys, jsonschema\n\
                  read = lambda path: json.load(open(path))\n\
                  schema, defs, spec = map(read, sys.argv[1:4])\n\
                  resolver = jsonschema.RefResolver('', schema, store={'defs.json': defs})\n\
                  jsonschema.Draft7Validator(schema, resolver=resolver).validate(spec)\n";
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/cdi-schema");
    let judge = |spec: &Path| {
        let files = [&schema.join("schema.json"), &schema.join("defs.json"), spec];
        Command::new("python3")
            .args(["-W", "ignore", "-c", script])
            .args(files)
            .output()
            .expect("python3 runs")
    };
    let judged = judge(&world.dir.path().join("cdi/sublet.json"));
    assert!(judged.status.success(), "{}", String::from_utf8_lossy(&judged.stderr));
    let mut wrong = spec;
    wrong["devices"][0]["containerEdits"]["deviceNodes"][0]["major"] = json!("195");
    let path = world.dir.path().join("wrong.json");
    std::fs::write(&path, wrong.to_string()).expect("written");
    assert!(!judge(&path).status.success(), "the schema judges nothing");
}

/// A bundle as an engine makes it of the first CDI device, with `first` before the device's own hook.
fn injected<'a>(world: &'a World, annotations: &[(&str, &str)], first: &Value) -> Bundle<'a> {
    let mut bundle = world.bundle("plain", annotations, &["/usr/bin/cuda-probe", "hold", "120"]);
    bundle.inject_cdi();
    let hooks = bundle.spec["hooks"]["createRuntime"].as_array_mut().expect("its hook");
    hooks.splice(..0, first.as_array().expect("hooks").iter().cloned());
    bundle
}

#[test]
fn a_hook_of_ones_own_beside_the_devices_makes_one_lease_and_none_without_its_device() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", SMALL);
    world.generate_cdi();
    let device = specification(&world)["devices"][0]["containerEdits"]["hooks"][0].clone();
    let own =
        json!([{"path": device["path"], "args": ["sublet-hook", "createRuntime"], "env": device["env"]}]);
    for (annotations, first) in
        [(&[][..], json!([])), (&[], own.clone()), (&[("sublet.share", "small")][..], own)]
    {
        let bundle = injected(&world, annotations, &first);
        bundle.up();
        let info = bundle.event("info");
        assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)), "{info}");
        assert!(info["free_mib"].as_u64() < Some(8192), "{info}");
        let leases = world.leases();
        assert_eq!((leases.len(), &leases[0]["isolation"]), (1, &json!("shared")), "{leases:?}");
        bundle.down();
        world.assert_empty();
        std::fs::remove_dir_all(&bundle.dir).expect("the bundle");
    }
    // Started in another way than by config.json's hooks, it cannot know which device was injected.
    let mut bundle = injected(&world, &[], &json!([]));
    let mut hook = device;
    hook["args"][3] = json!("other");
    bundle.spec["hooks"]["createRuntime"].as_array_mut().expect("hooks").push(hook);
    let refused = bundle.create();
    let last = world.sublet(&["status", "--last-error"]);
    let said = String::from_utf8_lossy(&last.stdout).into_owned();
    assert!(
        !refused.ok && said.contains("two CDI devices of sublet/share are asked for"),
        "{refused:?} {said}"
    );
    world.assert_empty();
}

#[test]
fn users_without_root_are_refused() {
    if skip_unless_root() {
        return;
    }
    let mut host = Host::new("h200", SMALL, Path::new(env!("CARGO_BIN_EXE_speak")));
    host.world.generate_cdi();
    let device = &specification(&host.world)["devices"][0]["containerEdits"];
    let hook = json!({"path": device["hooks"][0]["path"], "args": device["hooks"][0]["args"],
        "env": device["hooks"][0]["env"]});
    host.start();
    let mut bundle = host.bundle(1000, "mine", &[("sublet.share", "small")], &["/bin/true"]);
    bundle.spec["hooks"] = json!({"createRuntime": [hook]});
    let refused = bundle.create();
    assert!(!refused.ok && refused.stderr.contains("CDI devices of sublet/share need root"), "{refused:?}");
    host.world.assert_empty();
}

#[test]
fn serve_keeps_the_specification_current() {
    if skip_unless_root() {
        return;
    }
    let mut host = Host::new("h200", "", Path::new(env!("CARGO_BIN_EXE_speak")));
    let spec = host.world.driver_root.as_ref().expect("simulated").join("cdi/sublet.json");
    let text = || std::fs::read_to_string(&spec).unwrap_or_default();
    host.world.configure(SMALL);
    host.start();
    assert!(eventually(|| text().contains("\"small.0\"")), "no specification: {:?}", text());
    host.stop();
    let config = std::fs::read_to_string(&host.world.config).expect("config.toml");
    std::fs::write(&host.world.config, config.replace("sm = 25", "sm = 50")).expect("config.toml");
    host.start();
    assert!(eventually(|| text().contains("PERCENTAGE=50")), "not followed: {}", text());
    let written = || std::fs::metadata(&spec).and_then(|file| file.modified()).expect("it is there");
    let before = written();
    host.stop();
    host.start();
    assert!(eventually(|| host.world.state_dir().join("sublet.sock").exists()));
    assert_eq!(written(), before, "the same text is not written again");
    host.stop();
    std::fs::write(&host.world.config, config.replace(SMALL, "")).expect("config.toml");
    host.start();
    assert!(eventually(|| !spec.exists()), "no share, and still a specification");
}
