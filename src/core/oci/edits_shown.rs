//! The edits in a container's config.json, for commands that show them.

use serde::Serialize;
use serde_json::Value;

use super::edits_record::Edits;
use crate::inventory::Node;

/// sublet's edits in a config.json.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct EditsShown {
    /// The variables, as `NAME=VALUE`.
    pub environment: Vec<String>,
    /// The device nodes.
    pub nodes: Vec<Node>,
}

/// That of `spec`; `None` if it records no edits of sublet's.
#[must_use]
pub fn edits_shown(spec: &Value) -> Option<EditsShown> {
    let edits = Edits::recorded(spec)?;
    let entries = spec.pointer("/process/env").and_then(Value::as_array).into_iter().flatten();
    let environment = entries.filter_map(Value::as_str).filter(|entry| edits.is_variable(entry));
    Some(EditsShown { environment: environment.map(str::to_owned).collect(), nodes: edits.nodes })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::ledger::LEASE_EDITS_ANNOTATION;

    #[test]
    fn only_what_sublet_set_is_shown() {
        let edits = r#"{"mounts":["/x"],"nodes":[{"path":"/dev/nvidia0","major":195,"minor":0}],"masks":[],
            "defaults":[["XLA_PYTHON_CLIENT_PREALLOCATE","false"]]}"#;
        let env = [
            "PATH=/bin",
            "CUDA_VISIBLE_DEVICES=0",
            "XLA_PYTHON_CLIENT_PREALLOCATE=false",
            "SUBLET_SM_PERCENT=25",
        ];
        let spec = json!({"process": {"env": env}, "annotations": {LEASE_EDITS_ANNOTATION: edits}});
        let shown = edits_shown(&spec).unwrap();
        assert_eq!(shown.environment, env[1..]);
        assert_eq!(shown.nodes[0].path.to_str(), Some("/dev/nvidia0"));
        assert_eq!(edits_shown(&json!({"process": {"env": env}})), None);
    }
}
