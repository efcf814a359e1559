use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::*;
use crate::ledger::fixture::lease;

fn ledger(numbers: &[u64]) -> Ledger {
    Ledger { leases: numbers.iter().map(|number| lease(*number, "GPU-0")).collect(), ..Ledger::empty("boot") }
}

fn named(name: &str) -> Name {
    Name { name: name.to_owned(), ..Name::default() }
}

#[test]
fn stored_names_are_read_and_written_again_alike() {
    let stored = include_str!("../../../tests/formats/every-key/names.json");
    let stored: serde_json::Value = serde_json::from_str(stored).unwrap();
    let read: Stored = serde_json::from_value(stored.clone()).unwrap();
    assert_eq!(serde_json::to_value(read).unwrap(), stored);
}

#[test]
fn a_container_that_its_engine_has_forgotten_keeps_its_name() {
    let mut names = Names::default();
    names.note(&ledger(&[1, 2]), 10, |_| Some(named("web")));
    names.note(&ledger(&[1]), 20, |_| None);
    assert_eq!(names.0.values().map(|known| known.seen).collect::<Vec<_>>(), [20, 10]);
    assert_eq!(names.of(&lease(2, "GPU-0")).map(|name| name.name.as_str()), Some("web"));
    names.note(&ledger(&[1]), 30, |_| Some(named("renamed")));
    assert_eq!(names.of(&lease(1, "GPU-0")).map(|name| name.name.as_str()), Some("renamed"));
}

#[test]
fn names_of_those_that_ended_first_are_dropped() {
    let mut names = Names::default();
    for number in 0..600 {
        names.note(&ledger(&[number]), number, |_| Some(named("x")));
    }
    assert_eq!(names.0.len(), ENDED + 1);
    assert!(names.of(&lease(87, "GPU-0")).is_some() && names.of(&lease(86, "GPU-0")).is_none());
}

#[test]
fn refusals_drive_out_no_names_of_those_that_ended() {
    let mut names = Names::default();
    for number in 0..3 {
        names.note(&ledger(&[number]), number, |_| Some(named("x")));
    }
    names.0.extend((0..600).map(|number| {
        let id = format!("{number:064x}");
        (id.clone(), known(&id, "refused", 100 + number))
    }));
    names.note(&ledger(&[]), 1000, |_| None);
    assert_eq!((names.0.len(), names.refused("refused").count()), (3 + ENDED, ENDED));
}

#[test]
fn who_stores_names_keeps_those_that_another_stored_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("names.json");
    let [mut one, mut other] = [Names::default(), Names::default()];
    one.note(&ledger(&[1]), 10, |_| Some(named("one")));
    other.note(&ledger(&[2]), 10, |_| Some(named("other")));
    one.store(&path, &ledger(&[]));
    other.store(&path, &ledger(&[]));
    let stored = Names::stored(&path);
    assert_eq!(stored, other);
    assert_eq!(stored.0.values().map(|known| &*known.name.name).collect::<Vec<_>>(), ["one", "other"]);
}

#[test]
fn long_names_are_cut_between_characters() {
    let long = "ä".repeat(100);
    let (name, image, part_of, owner) = (long.clone(), long.clone(), long.clone(), long.clone());
    let cut = Name { engine: None, name, image, part_of, unit: long, owner }.cut();
    let lengths = [&cut.name, &cut.image, &cut.part_of, &cut.unit, &cut.owner].map(String::len);
    assert_eq!(lengths, LONGEST);
    let image = format!("registry.example/{}:tag", "x".repeat(100));
    assert!(Name { image, ..Name::default() }.cut().image.ends_with("x:tag"));
}

#[test]
fn the_file_is_roots_alone_and_a_broken_one_has_no_names() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("names.json");
    let mut names = Names::default();
    names.note(&ledger(&[1]), 10, |_| Some(named("a\u{1b}[31m")));
    names.store(&path, &ledger(&[1]));
    let mode = std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(Names::stored(&path), names);
    for text in ["", "{", "[]", r#"{"schema":"sublet.names/2","leases":{}}"#] {
        std::fs::write(&path, text).unwrap();
        assert_eq!(Names::stored(&path), Names::default(), "{text}");
    }
}

/// Leases 1 to 3; the containers are c1, c2 and c3, the first two named `web-1` and `web`.
fn world() -> (Ledger, Names) {
    let leases = [1, 2, 3].map(|number| {
        let mut lease = lease(number, "GPU-0");
        lease.container.id = format!("c{number}");
        lease
    });
    let known = |name: &str| Known {
        seen: 0,
        container_id: String::new(),
        name: Name { name: name.to_owned(), ..Name::default() },
    };
    let names = [("web-1", 0), ("web", 1)].map(|(name, at)| (leases[at].id.to_string(), known(name)));
    (Ledger { leases: leases.to_vec(), ..Ledger::empty("boot") }, Names(names.into()))
}

#[test]
fn a_name_an_id_and_a_unique_prefix_are_understood() {
    let (ledger, names) = world();
    let found = |text: &str| lease_of(text, &ledger, &names).map(|lease| lease.container.id.as_str());
    assert_eq!(found("web-1"), Ok("c1"));
    assert_eq!(found("web"), Ok("c2"), "in full, before the prefix of another");
    assert_eq!(found("web-"), Ok("c1"));
    assert_eq!(found("c3"), Ok("c3"));
    assert_eq!(found(ledger.leases[2].id.as_str()), Ok("c3"));
}

#[test]
fn none_and_several_are_said() {
    let (ledger, names) = world();
    let error = |text: &str| lease_of(text, &ledger, &names).unwrap_err();
    assert_eq!(error("x\u{1b}"), NoLease::None("x\\u{1b}".to_owned()));
    assert_eq!(error(""), NoLease::None(String::new()));
    let NoLease::Several { matches, .. } = error("c") else { panic!("c means three") };
    assert_eq!(matches.len(), 3);
    assert!(matches[0].starts_with("web-1 (lease ") && matches[2].starts_with("c3 (lease "), "{matches:?}");
}

#[test]
fn a_container_that_has_ended_is_found_by_name_and_id_the_last_one_first() {
    let (ledger, mut names) = world();
    let mut end = |number: u64, name: &str| {
        let name = Name { name: name.to_owned(), ..Name::default() };
        let known = Known { seen: number, container_id: format!("c{number}"), name };
        names.0.insert(lease(number, "GPU-0").id.to_string(), known);
    };
    end(7, "job");
    end(9, "job");
    end(8, "jobs");
    let found = |text: &str| {
        names.ended(text, &ledger).into_iter().map(|(_, known)| &*known.container_id).collect::<Vec<_>>()
    };
    assert_eq!(found("job"), ["c9", "c7"], "in full, before what it is a prefix of");
    assert_eq!(found("jobs"), ["c8"]);
    assert_eq!(found("jo"), ["c9", "c8", "c7"]);
    assert_eq!(found("c7"), ["c7"]);
    assert_eq!((found("web"), found("")), (vec![], vec![]), "it has not ended");
}

const ID: &str = "452325ed5f7f35588a551450be5d67fde0f40a94317f3f8f8a275a3aebf20f2a";

fn container(id: &str, bundle: PathBuf, rootfs: PathBuf) -> Container {
    Container { uid: 0, id: id.to_owned(), bundle, rootfs, record: PathBuf::new() }
}

fn write(path: &Path, content: &Value) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content.to_string()).unwrap();
}

#[test]
fn dockers_record_lies_below_its_data_root_wherever_that_is() {
    let root = tempfile::tempdir().unwrap();
    let record = json!({"Name": "/web-1", "Config": {"Image": "probe:1", "Labels": {
        "com.docker.compose.project": "shop", "com.docker.compose.service": "web", "team": "vision"}}});
    write(&root.path().join("containers").join(ID).join("config.v2.json"), &record);
    for rootfs in ["overlay2/abc/merged", &format!("rootfs/overlayfs/{ID}")] {
        let named = by_engine(&container(ID, "/run/x".into(), root.path().join(rootfs)), &[]).unwrap();
        assert_eq!((named.name.as_str(), named.image.as_str()), ("web-1", "probe:1"));
        assert_eq!((named.part_of.as_str(), named.owner.as_str()), ("shop/web", ""));
        let labels = ["cost-centre", "team"].map(str::to_owned);
        let by_label = by_engine(&container(ID, "/run/x".into(), root.path().join(rootfs)), &labels).unwrap();
        assert_eq!(by_label.owner, "vision", "the first label that it has");
    }
    let unlabelled = json!({"Name": "x", "Config": {"Image": "", "Labels": null}});
    write(&root.path().join("containers").join(ID).join("config.v2.json"), &unlabelled);
    let named =
        by_engine(&container(ID, PathBuf::new(), root.path().join("overlay2/a/merged")), &[]).unwrap();
    assert_eq!((named.name.as_str(), named.part_of.as_str()), ("x", ""));
    for id in ["job", "../../etc", "", &ID[1..]] {
        assert_eq!(by_engine(&container(id, PathBuf::new(), root.path().join("a/b")), &[]), None, "{id}");
    }
}

/// As Podman 5.4 wrote them, for `podman run` and `podman run --rm`.
#[test]
fn podmans_lists_have_the_name_and_the_image() {
    let storage = tempfile::tempdir().unwrap();
    let containers = storage.path().join("vfs-containers");
    let bundle = containers.join(ID).join("userdata");
    let entry = json!([{"id": ID, "names": ["web-1"], "image": "c11780", "layer": "0939",
        "metadata": "{\"image-name\":\"localhost/probe:latest\",\"image-id\":\"c11780\",\"name\":\"web-1\"}",
        "created": "2026-11-23T04:48:28.625741757Z", "flags": {"MountLabel": "", "ProcessLabel": ""}}]);
    for list in ["containers.json", "volatile-containers.json"] {
        write(&containers.join(list), &entry);
        let by_layer = storage.path().join("vfs/dir/0939");
        for known in [
            container(ID, bundle.clone(), "/r".into()),
            container(ID, PathBuf::new(), by_layer.clone()),
            container("", PathBuf::new(), by_layer.clone()),
        ] {
            let named = by_engine(&known, &[]).unwrap();
            assert_eq!((named.name.as_str(), named.image.as_str()), ("web-1", "localhost/probe:latest"));
        }
        assert_eq!(container_root::podman_id(&by_layer).as_deref(), Some(ID));
        assert_eq!(container_root::podman_id(&storage.path().join("vfs/dir/other")), None);
        fs::remove_file(containers.join(list)).unwrap();
        assert_eq!(by_engine(&container(ID, bundle.clone(), "/r".into()), &[]), None);
    }
    write(&containers.join("containers.json"), &json!([{"id": "other"}]));
    assert_eq!(by_engine(&container(ID, bundle, "/r".into()), &[]), None);
}

#[test]
fn a_pods_container_is_known_by_containerds_annotations_in_its_own_bundle() {
    let root = tempfile::tempdir().unwrap();
    let bundle = root.path().join("io.containerd.runtime.v2.task/k8s.io/c1");
    let annotations = json!({"io.kubernetes.cri.container-type": "container",
        "io.kubernetes.cri.container-name": "web", "io.kubernetes.cri.image-name": "x:1",
        "io.kubernetes.cri.sandbox-name": "shop-0", "io.kubernetes.cri.sandbox-namespace": "prod"});
    write(&bundle.join("config.json"), &json!({"annotations": annotations}));
    let named = by_engine(&container("c1", bundle, "/r".into()), &[]).unwrap();
    assert_eq!(
        (named.name.as_str(), named.image.as_str(), named.part_of.as_str()),
        ("web", "x:1", "prod/shop-0")
    );
    let elsewhere = root.path().join("c1");
    write(&elsewhere.join("config.json"), &json!({"annotations": annotations}));
    assert_eq!(by_engine(&container("c1", elsewhere, "/r".into()), &[]), None);
}

#[test]
fn the_innermost_service_of_a_cgroup_is_the_unit() {
    let of = |path: &str| unit(Path::new(path));
    assert_eq!(
        of("/sys/fs/cgroup/system.slice/job.service/libpod-payload-1"),
        Some("job.service".to_owned())
    );
    let rootless = "/sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service";
    assert_eq!(of(&format!("{rootless}/app.slice/job.service/x")), Some("job.service".to_owned()));
    for plain in [
        rootless,
        "/sys/fs/cgroup/system.slice/docker-1.scope",
        "/sys/fs/cgroup/system.slice/docker.service/x",
    ] {
        assert_eq!(of(plain), None, "{plain}");
    }
}

fn known(id: &str, name: &str, seen: u64) -> Known {
    Known { seen, container_id: id.to_owned(), name: named(name) }
}

#[test]
fn names_take_the_ids_places_and_nothing_else_changes() {
    let other = ID.replace('4', "5");
    let names = |all: &[(&str, &str, u64)]| {
        let each = (0..)
            .zip(all)
            .map(|(at, (id, name, seen))| (lease(at, "GPU-0").id.to_string(), known(id, name, *seen)));
        Names(each.collect())
    };
    let one = names(&[(ID, "old", 1), (ID, "lab-comfyui-1", 2), (&other, "", 2), ("first", "x", 2)]);
    let text = format!(
        "container {ID}: no place; held by 452325ed5f7f (mps, 25 % SM), first (mps),\n  {}; see /x/{ID}/y and {}",
        &other[..12],
        &ID[..16]
    );
    let expected = format!(
        "container lab-comfyui-1: no place; held by lab-comfyui-1 (mps, 25 % SM), first (mps),\n  {}; see /x/{ID}/y and {}",
        &other[..12],
        &ID[..16]
    );
    assert_eq!(one.replace_ids(&text), expected);
    let hostile = names(&[(ID, &format!("\u{1b}[2J\n{}", "x".repeat(4096)), 1)]);
    assert_eq!(
        hostile.replace_ids(&format!("held by {ID}")),
        format!("held by \\u{{1b}}[2J\\n{}", "x".repeat(27))
    );
    let twins = names(&[(ID, "web", 2), (&other, "web", 2), (&ID.replace('2', "6"), "web", 1)]);
    let text = format!("held by {} (mps), {other}", &ID[..12]);
    assert_eq!(
        twins.replace_ids(&text),
        format!("held by web ({}) (mps), web ({})", &ID[..12], &other[..12])
    );
}

#[test]
fn a_refused_container_keeps_its_name_and_is_none_that_has_ended() {
    let root = tempfile::tempdir().unwrap();
    let record = json!({"Name": "/web", "Config": {"Image": "x"}});
    let file = root.path().join("containers").join(ID).join("config.v2.json");
    write(&file, &record);
    let config = Config { state_dir: root.path().join("state"), ..Config::default() };
    fs::create_dir(&config.state_dir).unwrap();
    let refused = container(ID, PathBuf::new(), root.path().join("overlay2/a/merged"));
    Names::learn_with(Some(&refused), &ledger(&[]), &config);
    fs::remove_file(file).unwrap();
    let names = Names::learn(&ledger(&[]), &config);
    assert_eq!(names.refused("web").collect::<Vec<_>>(), [ID]);
    assert_eq!((names.refused("we").count(), names.ended("web", &ledger(&[])).len()), (0, 0));
    assert_eq!(names.of_id(ID).and_then(Name::called), Some("web"));
    assert_eq!(names.replace_ids(&format!("container {ID}: no")), "container web: no");
}
