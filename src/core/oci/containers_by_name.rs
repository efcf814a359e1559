//! The name of a container, and the share that `containers.toml` gives it by that if it has no annotations.
//!
//! Only names that the engine itself recorded count: never the container's environment, nor
//! labels and annotations, which may be its image's. The labels of a Swarm task are the engine's: dockerd sets them over
//! the image's and the user's.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::{FileError, JsonFile, SpecError, annotations};
use crate::config_files::{self, ConfigError, Known};
use crate::fs::parse_json;
use crate::request::warn_of_labels;
use crate::text::{is_engine_id, safe, safe_path};

/// The label in which dockerd names the service of a task.
const SERVICE: &str = "com.docker.swarm.service.name";

/// Why it is unknown whether a rule of `containers.toml` matches the container.
#[derive(Debug, thiserror::Error)]
pub enum MappedError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// config.json.
    #[error(transparent)]
    File(#[from] FileError),
    /// Of config.json.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Docker keeps its records elsewhere than here.
    #[error(
        "Docker's record of it was found neither in {} nor above its root filesystem: set docker_root in containers.toml to \
         Docker's data-root (`docker info --format '{{{{.DockerRootDir}}}}'`)",
        safe_path(.0)
    )]
    NoRecord(PathBuf),
    /// The engine's own record of the container, and its fault.
    #[error("{} is not a record of a Docker container: {}", safe_path(.0), .1)]
    Docker(PathBuf, #[source] serde_json::Error),
}

/// The share of the container `id`, whose config.json in `bundle` is `file`.
///
/// # Errors
/// `containers.toml`, config.json or the engine's record cannot be read.
pub fn share(id: &str, bundle: &Path, file: &JsonFile) -> Result<Option<String>, MappedError> {
    let Some(containers) = config_files::load_containers()? else { return Ok(None) };
    let known = match read_docker(id, &containers.docker_root)? {
        Some(known) => Some(known),
        None if bundle.ends_with(Path::new(DOCKERS).join(id)) => {
            find_docker(id, file, &containers.docker_root)?
        }
        None => read_containerd(id, bundle, file)?,
    };
    let Some(known) = known else { return Ok(None) };
    if let Some(warning) = &known.warning {
        tracing::warn!("container {}: {warning}", safe(&known.name));
    }
    Ok(containers.share(&known).map(str::to_owned))
}

/// Where containerd has dockerd's bundles.
const DOCKERS: &str = "io.containerd.runtime.v2.task/moby";

/// Docker's record below another data-root than `docker_root`: the container's root filesystem is below it, too. A
/// rootless dockerd's containers are not mapped.
fn find_docker(id: &str, file: &JsonFile, docker_root: &Path) -> Result<Option<Known>, MappedError> {
    if crate::process::is_nested() {
        return Ok(None);
    }
    let spec = file.parse()?;
    let rootfs = spec.pointer("/root/path").and_then(Value::as_str).unwrap_or_default();
    let found = docker_above(id, Path::new(rootfs))?;
    found.map(Some).ok_or_else(|| MappedError::NoRecord(docker_root.to_owned()))
}

/// Docker's record of the container `id` with this root filesystem, which is below Docker's data-root, wherever that is.
pub(crate) fn docker_above(id: &str, rootfs: &Path) -> Result<Option<Known>, MappedError> {
    let mut all = rootfs.ancestors().filter(|above| above.is_absolute()).map(|above| read_docker(id, above));
    all.find_map(Result::transpose).transpose()
}

/// Docker's own record (moby, `container/container.go`, `toDisk`): `Name` begins with a slash, and
/// `Config.Image` is the argument of `docker run`. Only Swarm can set `Managed`, which marks its services' tasks.
fn read_docker(id: &str, data_root: &Path) -> Result<Option<Known>, MappedError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Record {
        name: String,
        #[serde(default)]
        managed: bool,
        config: Config,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Config {
        image: String,
        labels: Option<BTreeMap<String, String>>,
    }
    if !is_engine_id(id) {
        return Ok(None);
    }
    let path = data_root.join("containers").join(id).join("config.v2.json");
    let file = match JsonFile::read(&path) {
        Ok(file) => file,
        // It is another engine's container, or this user may not read Docker's record.
        Err(FileError::Read(_, error))
            if crate::fs::is_absent(&error) || error.kind() == std::io::ErrorKind::PermissionDenied =>
        {
            return Ok(None);
        }
        Err(error) => return Err(error.into()),
    };
    let record: Record = parse_json(&file.text).map_err(|fault| MappedError::Docker(path, fault))?;
    let name = record.name.strip_prefix('/').unwrap_or(&record.name).to_owned();
    let (image, labels) = (record.config.image, record.config.labels.unwrap_or_default());
    let compose = |key: &str| labels.get(&format!("com.docker.compose.{key}"));
    let part_of = compose("project").zip(compose("service"));
    let part_of = part_of.map(|(project, service)| format!("{project}/{service}")).unwrap_or_default();
    let service = labels.get(SERVICE).filter(|_| record.managed).cloned();
    // `docker service create` adds the registry's digest.
    let pinned = image.split_once('@').filter(|_| record.managed);
    let image = pinned.map_or(&*image, |(image, _)| image).to_owned();
    let warning = warn_of_labels(&labels, "as --annotation");
    Ok(Some(Known { name, image, service, part_of, labels, warning }))
}

/// Annotations of containerd's CRI, which overwrites a pod's own
/// (`DefaultCRIAnnotations` comes last in `buildLinuxSpec` of `container_create.go`). Other engines let a
/// user or, as Podman 4.3, an image write the same annotations: the bundle decides whose it is.
pub(crate) fn read_containerd(
    id: &str,
    bundle: &Path,
    file: &JsonFile,
) -> Result<Option<Known>, MappedError> {
    if !bundle.ends_with(Path::new("io.containerd.runtime.v2.task/k8s.io").join(id)) {
        return Ok(None);
    }
    let mut annotations = annotations(&file.parse()?)?;
    let mut take = |key: &str| annotations.remove(&format!("io.kubernetes.cri.{key}")).unwrap_or_default();
    let is_container = take("container-type") == "container";
    let (name, image) = (take("container-name"), take("image-name"));
    let (namespace, pod) = (take("sandbox-namespace"), take("sandbox-name"));
    let part_of = if pod.is_empty() { pod } else { format!("{namespace}/{pod}") };
    Ok(is_container.then(|| Known { name, image, part_of, ..Known::default() }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const ID: &str = "452325ed5f7f35588a551450be5d67fde0f40a94317f3f8f8a275a3aebf20f2a";

    fn in_docker(record: &str) -> Result<Option<Known>, MappedError> {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("containers").join(ID);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("config.v2.json"), record).unwrap();
        read_docker(ID, root.path())
    }

    #[test]
    fn docker_writes_down_the_names() {
        let labels = [("name".to_owned(), "x".to_owned())].into();
        let names = Known { name: "web-1".into(), image: "probe:1".into(), labels, ..Known::default() };
        let record = json!({"ID": ID, "Config": {"Image": "probe:1", "Labels": {"name": "x"}},
            "Image": "sha256:0", "Name": "/web-1"});
        assert_eq!(in_docker(&record.to_string()).unwrap(), Some(names));
        let broken = in_docker("{\"Name\":").unwrap_err().to_string();
        assert!(broken.contains("config.v2.json is not a record of a Docker container"), "{broken}");
    }

    #[test]
    fn docker_tells_the_service_of_a_task_and_no_other_containers_label() {
        let record = |managed: bool| {
            let record = json!({"Name": "/web.1.x", "Managed": managed,
                "Config": {"Image": "r.io/x:1@sha256:0", "Labels": {SERVICE: "web"}}});
            in_docker(&record.to_string()).unwrap().unwrap()
        };
        let name = "web.1.x".to_owned();
        let image = "r.io/x:1".to_owned();
        let labels = BTreeMap::from([(SERVICE.to_owned(), "web".to_owned())]);
        let service = Some("web".to_owned());
        let task = Known { name: name.clone(), image, service, labels: labels.clone(), ..Known::default() };
        assert_eq!(record(true), task);
        let plain = Known { name, image: "r.io/x:1@sha256:0".into(), labels, ..Known::default() };
        assert_eq!(record(false), plain);
        let bare = json!({"Name": "/a", "Managed": true, "Config": {"Image": "x", "Labels": null}});
        assert_eq!(in_docker(&bare.to_string()).unwrap().unwrap().service, None);
    }

    #[test]
    fn an_id_of_no_docker_container_is_left_alone() {
        for id in [ID, "job", "../../etc", "", &ID[1..], &ID.to_uppercase()] {
            assert_eq!(read_docker(id, Path::new("/nowhere")).unwrap(), None, "{id}");
        }
    }

    #[test]
    fn a_record_below_another_data_root_is_found_above_the_root_filesystem() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("containers").join(ID);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("config.v2.json"), r#"{"Name": "/web", "Config": {"Image": "x"}}"#).unwrap();
        let of = |rootfs: &Path| {
            let text = json!({"root": {"path": rootfs}}).to_string().into_bytes();
            let file = JsonFile { path: "config.json".into(), text };
            find_docker(ID, &file, Path::new("/var/lib/docker"))
        };
        for rootfs in ["overlay2/x/merged", &format!("rootfs/overlayfs/{ID}")] {
            assert_eq!(of(&root.path().join(rootfs)).unwrap().unwrap().name, "web");
        }
        let error = of(Path::new("/elsewhere/overlay2/x/merged")).unwrap_err().to_string();
        assert!(
            error.contains("neither in /var/lib/docker nor") && error.contains("'{{.DockerRootDir}}'"),
            "{error}"
        );
    }

    fn in_containerd(bundle: &str, annotations: &Value) -> Option<Known> {
        let text = json!({"annotations": annotations}).to_string().into_bytes();
        let file = JsonFile { path: "config.json".into(), text };
        read_containerd("c", Path::new(bundle), &file).unwrap()
    }

    #[test]
    fn containerds_own_annotations_count_in_its_own_bundles_alone() {
        let ours = "/run/containerd/io.containerd.runtime.v2.task/k8s.io/c";
        let all = |kind| {
            json!({"io.kubernetes.cri.container-type": kind,
            "io.kubernetes.cri.container-name": "web", "io.kubernetes.cri.image-name": "docker.io/x:1"})
        };
        let names = Known { name: "web".into(), image: "docker.io/x:1".into(), ..Known::default() };
        assert_eq!(in_containerd(ours, &all("container")), Some(names));
        assert_eq!(in_containerd(ours, &all("sandbox")), None);
        assert_eq!(in_containerd(ours, &json!({})), None);
        for other in
            ["/run/containerd/io.containerd.runtime.v2.task/moby/c", "/var/lib/c/userdata", "k8s.io/c"]
        {
            assert_eq!(in_containerd(other, &all("container")), None, "{other}");
        }
    }
}
