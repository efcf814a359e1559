//! Engines' own records of a container. Nothing here says what a container may do: names are shown, and asked for.

use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use super::{Engine, Name};
use sublet_core::ledger::{Container, Lease};
use sublet_core::oci::{self, JsonFile};

/// Units that hold every container of an engine, and say nothing about one.
const ENGINES: [&str; 5] =
    ["docker.service", "containerd.service", "podman.service", "crio.service", "sublet.service"];

/// What people call the container of `lease`; `None` if nothing is known of it.
pub(super) fn name(lease: &Lease) -> Option<Name> {
    let container = &lease.container;
    let by_engine = docker(container).or_else(|| podman(container)).or_else(|| kubernetes(container));
    let cgroup = lease.init.as_ref().and_then(|init| init.cgroup.as_deref());
    let unit = cgroup.and_then(unit).unwrap_or_default();
    if by_engine.is_none() && unit.is_empty() {
        return None;
    }
    Some(Name { unit, ..by_engine.unwrap_or_default() })
}

/// Docker's record (moby, `container/container.go`, `toDisk`), below the data root that the container's root filesystem
/// is in: `Name` begins with a slash, and `Config.Image` is what `docker run` was given.
fn docker(container: &Container) -> Option<Name> {
    let id = engine_id(&container.id)?;
    let file = Path::new("containers").join(id).join("config.v2.json");
    let record =
        container.rootfs.ancestors().skip(1).map(|root| root.join(&file)).find(|path| path.exists())?;
    let record = read(&record)?;
    let (name, config) = (record["Name"].as_str()?, &record["Config"]);
    let label = |key: &str| config["Labels"][format!("com.docker.compose.{key}")].as_str();
    let part_of =
        label("project").zip(label("service")).map(|(project, service)| format!("{project}/{service}"));
    Some(Name {
        engine: Some(Engine::Docker),
        name: name.strip_prefix('/').unwrap_or(name).to_owned(),
        image: config["Image"].as_str()?.to_owned(),
        part_of: part_of.unwrap_or_default(),
        unit: String::new(),
    })
}

/// The list of Podman's storage (containers/storage, `containers.go`), in which the container's bundle is; of
/// containers that are removed when they end (`--rm`) there is another list.
fn podman(container: &Container) -> Option<Name> {
    let id = engine_id(&container.id)?;
    if !container.bundle.ends_with(Path::new(id).join("userdata")) {
        return None;
    }
    let storage = container.bundle.ancestors().nth(2)?;
    let lists = ["containers.json", "volatile-containers.json"].map(|list| storage.join(list));
    let in_list = |list: &PathBuf| read(list)?.as_array()?.iter().find(|entry| entry["id"] == id).cloned();
    let entry = lists.iter().find_map(in_list)?;
    let metadata = entry["metadata"].as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Some(Name {
        engine: Some(Engine::Podman),
        name: text(&entry["names"][0]),
        image: text(&metadata.unwrap_or_default()["image-name"]),
        ..Name::default()
    })
}

/// Annotations of containerd's CRI, in a bundle of its own.
fn kubernetes(container: &Container) -> Option<Name> {
    let bundle = Path::new("io.containerd.runtime.v2.task/k8s.io").join(&container.id);
    if container.id.is_empty() || !container.bundle.ends_with(bundle) {
        return None;
    }
    let spec: Value = JsonFile::read(&container.bundle.join("config.json")).ok()?.parse().ok()?;
    let mut annotations = oci::annotations(&spec).ok()?;
    let mut take = |key: &str| annotations.remove(&format!("io.kubernetes.cri.{key}")).unwrap_or_default();
    let (namespace, pod) = (take("sandbox-namespace"), take("sandbox-name"));
    Some(Name {
        engine: Some(Engine::Containerd),
        name: take("container-name"),
        image: take("image-name"),
        part_of: if pod.is_empty() { pod } else { format!("{namespace}/{pod}") },
        unit: String::new(),
    })
}

pub(super) fn read(file: &Path) -> Option<Value> {
    serde_json::from_slice(&JsonFile::read(file).ok()?.text).ok()
}

/// `id`, if it is one that Docker or Podman gives; anything else names no file of theirs.
fn engine_id(id: &str) -> Option<&str> {
    (id.len() == 64 && id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))).then_some(id)
}

/// The innermost systemd service that a cgroup directory lies in (systemd.resource-control(5): one directory a unit).
fn unit(cgroup: &Path) -> Option<String> {
    let names = cgroup.components().rev().filter_map(|part| match part {
        Component::Normal(name) => name.to_str(),
        _ => None,
    });
    let mut services = names.filter(|name| name.ends_with(".service"));
    let service = services.next()?;
    let says_nothing = ENGINES.contains(&service) || service.starts_with("user@");
    (!says_nothing).then(|| service.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

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
            "com.docker.compose.project": "shop", "com.docker.compose.service": "web"}}});
        write(&root.path().join("containers").join(ID).join("config.v2.json"), &record);
        for rootfs in ["overlay2/abc/merged", &format!("rootfs/overlayfs/{ID}")] {
            let named = docker(&container(ID, "/run/x".into(), root.path().join(rootfs))).unwrap();
            assert_eq!((named.name.as_str(), named.image.as_str()), ("web-1", "probe:1"));
            assert_eq!(named.part_of, "shop/web");
        }
        let unlabelled = json!({"Name": "x", "Config": {"Image": "", "Labels": null}});
        write(&root.path().join("containers").join(ID).join("config.v2.json"), &unlabelled);
        let named = docker(&container(ID, PathBuf::new(), root.path().join("overlay2/a/merged"))).unwrap();
        assert_eq!((named.name.as_str(), named.part_of.as_str()), ("x", ""));
        for id in ["job", "../../etc", "", &ID[1..]] {
            assert_eq!(docker(&container(id, PathBuf::new(), root.path().join("a/b"))), None, "{id}");
        }
    }

    /// As Podman 5.4 wrote them, for `podman run` and `podman run --rm`.
    #[test]
    fn podmans_lists_have_the_name_and_the_image() {
        let storage = tempfile::tempdir().unwrap();
        let bundle = storage.path().join(ID).join("userdata");
        let entry = json!([{"id": ID, "names": ["web-1"], "image": "c11780", "layer": "0939",
            "metadata": "{\"image-name\":\"localhost/probe:latest\",\"image-id\":\"c11780\",\"name\":\"web-1\"}",
            "created": "2026-11-23T04:48:28.625741757Z", "flags": {"MountLabel": "", "ProcessLabel": ""}}]);
        for list in ["containers.json", "volatile-containers.json"] {
            write(&storage.path().join(list), &entry);
            let named = podman(&container(ID, bundle.clone(), "/r".into())).unwrap();
            assert_eq!((named.name.as_str(), named.image.as_str()), ("web-1", "localhost/probe:latest"));
            fs::remove_file(storage.path().join(list)).unwrap();
        }
        assert_eq!(podman(&container(ID, bundle.clone(), "/r".into())), None);
        write(&storage.path().join("containers.json"), &json!([{"id": "other"}]));
        assert_eq!(podman(&container(ID, bundle, "/r".into())), None);
    }

    #[test]
    fn a_pods_container_is_known_by_containerds_annotations_in_its_own_bundle() {
        let root = tempfile::tempdir().unwrap();
        let bundle = root.path().join("io.containerd.runtime.v2.task/k8s.io/c1");
        let annotations = json!({"io.kubernetes.cri.container-name": "web", "io.kubernetes.cri.image-name": "x:1",
            "io.kubernetes.cri.sandbox-name": "shop-0", "io.kubernetes.cri.sandbox-namespace": "prod"});
        write(&bundle.join("config.json"), &json!({"annotations": annotations}));
        let named = kubernetes(&container("c1", bundle, "/r".into())).unwrap();
        assert_eq!(
            (named.name.as_str(), named.image.as_str(), named.part_of.as_str()),
            ("web", "x:1", "prod/shop-0")
        );
        let elsewhere = root.path().join("c1");
        write(&elsewhere.join("config.json"), &json!({"annotations": annotations}));
        assert_eq!(kubernetes(&container("c1", elsewhere, "/r".into())), None);
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
}
