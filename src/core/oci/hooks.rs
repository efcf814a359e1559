//! The hooks that sublet adds to a config.json: its own, and the one that makes a refused container fail
//! (OCI runtime-spec, config.md, "POSIX-platform Hooks").

use std::path::Path;

use serde_json::{Value, json};

use super::conflict::member;
use crate::process::inheritance::{VARIABLE, installed};

/// The environment that the hook needs. Without an `env` of its own it would get the image's (CVE-2025-23266).
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// No program can exist below a file that is not a directory.
const NO_PROGRAM: &str = "/dev/null/sublet refuses this container: ";

/// `hooks` of config.json has another shape than the specification's.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("config.json: hooks.{0} is not an array of hooks")]
pub struct BadHooks(&'static str);

/// A stage to which sublet adds its hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The container exists and has not started.
    CreateRuntime,
    /// The container is deleted.
    Poststop,
}

impl Stage {
    /// Its name, and the seconds that the hook may take: one waits for the container's processes to be gone, the other
    /// may have to stop daemons of containers that it finds gone.
    const fn name_and_timeout(self) -> (&'static str, u32) {
        match self {
            Self::CreateRuntime => ("createRuntime", 30),
            Self::Poststop => ("poststop", 10),
        }
    }
}

/// The hook that belongs to this build.
pub fn program() -> Option<String> {
    installed("sublet-hook")?.into_os_string().into_string().ok()
}

/// Adds `program` to `stage`, after the existing hooks. `config` names its configuration.
///
/// # Errors
/// `hooks` is not an object of arrays.
pub fn add(spec: &mut Value, stage: Stage, program: &str, config: Option<&Path>) -> Result<(), BadHooks> {
    let (name, timeout) = stage.name_and_timeout();
    let (args, env) = (["sublet-hook", name], environment(config));
    array(spec, stage)?.push(json!({"path": program, "args": args, "env": env, "timeout": timeout}));
    Ok(())
}

/// Removes the hooks that [`add`] added, of any program.
pub fn remove(spec: &mut Value) {
    for stage in [Stage::CreateRuntime, Stage::Poststop] {
        let (name, timeout) = stage.name_and_timeout();
        let ours = |hook: &Value| hook["args"] == json!(["sublet-hook", name]) && hook["timeout"] == timeout;
        super::apply_edits::retain(spec, &format!("/hooks/{name}"), |hook| !ours(hook));
    }
}

/// The environment of sublet's hooks. `config` names their configuration.
pub fn environment(config: Option<&Path>) -> Vec<String> {
    let config = config.map(|config| format!("{}={}", VARIABLE, config.display()));
    [PATH.to_owned()].into_iter().chain(config).collect()
}

/// Makes the container's creation fail with `reason` in the runtime's message.
///
/// Podman discards the output of a precreate hook, and crun that of a container's hook. Both runtimes name the path of
/// a hook that they cannot run, and Podman shows that message to the user, also through its API.
pub fn add_refusal(spec: &mut Value, reason: &str) -> Result<(), BadHooks> {
    let hook = json!({"path": format!("{NO_PROGRAM}{reason}"), "args": ["sublet-hook"], "env": [PATH]});
    // It is the first hook, because no other hook needs to run.
    array(spec, Stage::CreateRuntime)?.insert(0, hook);
    Ok(())
}

fn array(spec: &mut Value, stage: Stage) -> Result<&mut Vec<Value>, BadHooks> {
    let (name, _) = stage.name_and_timeout();
    let hooks = spec.as_object_mut().and_then(|spec| member(spec, "hooks", json!({})).as_object_mut());
    hooks.and_then(|hooks| member(hooks, name, json!([])).as_array_mut()).ok_or(BadHooks(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hook_stands_last_and_has_its_own_environment() {
        let mut spec = json!({"hooks": {"x": 1, "poststop": [{"path": "/a"}]}, "y": 2});
        add(&mut spec, Stage::Poststop, "/usr/bin/sublet-hook", None).unwrap();
        let expected = r#"{"hooks":{"x":1,"poststop":[{"path":"/a"},{"path":"/usr/bin/sublet-hook","args":["sublet-hook","poststop"],"env":["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],"timeout":10}]},"y":2}"#;
        assert_eq!(spec.to_string(), expected);
    }

    #[test]
    fn hooks_are_made_where_there_are_none() {
        for mut spec in [json!({}), json!({"hooks": null}), json!({"hooks": {"createRuntime": null}})] {
            add(&mut spec, Stage::CreateRuntime, "/h", Some(Path::new("/etc/x.toml"))).unwrap();
            let hook = &spec["hooks"]["createRuntime"][0];
            assert_eq!((&hook["path"], &hook["args"][1]), (&json!("/h"), &json!("createRuntime")));
            assert_eq!(hook["env"][1], "SUBLET_CONFIG=/etc/x.toml");
        }
        for mut spec in [json!([]), json!({"hooks": []}), json!({"hooks": {"poststop": {}}})] {
            assert_eq!(add(&mut spec, Stage::Poststop, "/h", None), Err(BadHooks("poststop")));
        }
    }

    #[test]
    fn a_refusal_comes_first_and_can_be_no_program() {
        let mut spec = json!({"hooks": {"createRuntime": [{"path": "/a"}]}});
        add_refusal(&mut spec, "../../bin/sh is no share").unwrap();
        let path = spec["hooks"]["createRuntime"][0]["path"].as_str().unwrap();
        assert_eq!(path, "/dev/null/sublet refuses this container: ../../bin/sh is no share");
        let error = std::process::Command::new(path).spawn().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(nix::libc::ENOTDIR));
        assert_eq!(spec["hooks"]["createRuntime"][1]["path"], "/a");
    }
}
