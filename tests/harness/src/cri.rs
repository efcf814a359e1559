//! Pods of a [`Containerd`], started through the Kubernetes CRI.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::bundle::Finished;
use crate::containerd::{Containerd, IMAGE};

/// A running pod.
pub struct Pod {
    /// Its sandbox's id.
    pub id: String,
    /// Its `PodSandboxConfig`, which every `CreateContainer` repeats.
    config: String,
}

impl Containerd {
    /// One call, with request and answer in protobuf's text format.
    #[must_use]
    pub fn cri(&self, method: &str, request: &str) -> Finished {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engines/cri");
        let file = tempfile::NamedTempFile::new_in(self.world.dir.path()).expect("a file");
        std::fs::write(file.path(), request).expect("the request");
        let mut command = Command::new(program);
        command.arg(self.socket()).arg(method).stdin(Stdio::from(file.reopen().expect("the request")));
        Finished::of(&command.output().expect("tests/engines/cri runs"))
    }

    /// [`Self::cri`], which must succeed; the answer.
    #[must_use]
    pub fn cri_ask(&self, method: &str, request: &str) -> String {
        let finished = self.cri(method, request);
        assert!(finished.ok, "{method} {request}: {}\n{}", finished.stderr, self.log());
        finished.stdout
    }

    /// Like [`Self::cri_ask`], without the answer.
    pub fn cri_done(&self, method: &str, request: &str) {
        let _ = self.cri_ask(method, request);
    }

    /// `RunPodSandbox` with this runtime handler, on the host's network, which needs no CNI.
    #[must_use]
    pub fn run_pod(&self, name: &str, handler: &str, annotations: &[&str]) -> Pod {
        let config = format!(
            "metadata {{ name: {name:?} uid: {name:?} namespace: \"default\" }} log_directory: \"{}\" {} \
             linux {{ security_context {{ namespace_options {{ network: NODE }} }} }}",
            self.world.dir.path().display(),
            entries(annotations)
        );
        let request = format!("config {{ {config} }} runtime_handler: {handler:?}");
        let id = field(&self.cri_ask("RunPodSandbox", &request), "pod_sandbox_id");
        Pod { id, config }
    }

    /// `CreateContainer` and `StartContainer`, which may be refused; returns the container's id.
    ///
    /// # Errors
    /// The CRI's error message.
    pub fn run_in_pod(
        &self,
        pod: &Pod,
        name: &str,
        annotations: &[&str],
        args: &[&str],
    ) -> Result<String, String> {
        let request = format!(
            "pod_sandbox_id: {:?} sandbox_config {{ {} }} config {{ metadata {{ name: {name:?} }} \
             image {{ image: {IMAGE:?} }} command: {args:?} \
             log_path: \"{name}.log\" {} linux {{}} }}",
            pod.id,
            pod.config,
            entries(annotations)
        );
        let id = field(&self.cri_ask("CreateContainer", &request), "container_id");
        let started = self.cri("StartContainer", &format!("container_id: {id:?}"));
        if started.ok { Ok(id) } else { Err(started.stderr) }
    }

    /// The output of `cuda-probe info` in a process started by `ExecSync`, with the prefix command `before`.
    #[must_use]
    pub fn exec_sync_info(&self, container: &str, before: &[&str]) -> Value {
        let words = [before, &["cuda-probe", "info"]].concat();
        let request = format!("container_id: {container:?} cmd: {words:?} timeout: 10");
        let answer = self.cri_ask("ExecSync", &request);
        serde_json::from_str(&field(&answer, "stdout")).unwrap_or_else(|_| panic!("no info: {answer}"))
    }

    /// `StopContainer` without a grace period.
    pub fn stop_in_pod(&self, container: &str) {
        self.cri_done("StopContainer", &format!("container_id: {container:?} timeout: 0"));
    }

    /// `StopPodSandbox` and `RemovePodSandbox`, with all its containers.
    pub fn remove_pod(&self, pod: &Pod) {
        for method in ["StopPodSandbox", "RemovePodSandbox"] {
            self.cri_done(method, &format!("pod_sandbox_id: {:?}", pod.id));
        }
    }

    /// [`Self::remove_pod`] for all pods; failures are ignored.
    pub(crate) fn remove_pods(&self) {
        let listed = self.cri("ListPodSandbox", "").stdout;
        // The ids are members of a `PodSandbox`, two levels deep in the answer.
        for id in listed.lines().filter_map(|line| line.strip_prefix("  id: \"")?.strip_suffix('"')) {
            for method in ["StopPodSandbox", "RemovePodSandbox"] {
                let _ = self.cri(method, &format!("pod_sandbox_id: {id:?}"));
            }
        }
    }
}

fn entries(annotations: &[&str]) -> String {
    let entry = |annotation: &&str| {
        let (key, value) = annotation.split_once('=').expect("KEY=VALUE");
        format!("annotations {{ key: {key:?} value: {value:?} }} ")
    };
    annotations.iter().map(entry).collect()
}

/// A string of `answer`. JSON escapes the characters in these texts as `protoc --decode` does.
fn field(answer: &str, name: &str) -> String {
    let start = format!("{name}: ");
    let quoted = answer.lines().find_map(|line| line.strip_prefix(&start));
    let quoted = quoted.unwrap_or_else(|| panic!("no {name}: {answer}"));
    serde_json::from_str(quoted).unwrap_or_else(|error| panic!("{quoted}: {error}"))
}
