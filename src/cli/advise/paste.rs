//! The advice as text to paste, in the forms of docs/recipes.md.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use schemars::JsonSchema;
use serde::Serialize;

/// Texts that give a share to a container. `IMAGE` stands for the tenant's own.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Paste {
    /// A command, for one tenant.
    pub docker_run: String,
    /// A Compose file with all tenants.
    pub compose: String,
    /// A `.container` file, for one tenant.
    pub quadlet: String,
}

impl Paste {
    /// The texts for so many tenants with these annotations.
    pub fn new(annotations: &BTreeMap<String, String>, tenants: u32) -> Self {
        let options: String = annotations.iter().fold(String::new(), |mut text, (key, value)| {
            // Writing to a text cannot fail.
            let _ = write!(text, "--annotation {key}={value} ");
            text
        });
        Self {
            docker_run: format!("docker run --runtime sublet {options}IMAGE\n"),
            compose: compose(annotations, tenants),
            quadlet: quadlet(annotations, options.trim_end()),
        }
    }
}

fn compose(annotations: &BTreeMap<String, String>, tenants: u32) -> String {
    let lines = annotations.iter().map(|(key, value)| format!("      {key}: \"{value}\"\n"));
    let scale = if tenants == 1 { String::new() } else { format!("    scale: {tenants}\n") };
    format!(
        "services:\n  tenant:\n    image: IMAGE\n    runtime: sublet\n{scale}    annotations:\n{}",
        lines.collect::<String>()
    )
}

fn quadlet(annotations: &BTreeMap<String, String>, options: &str) -> String {
    // systemd reads % as the beginning of a specifier.
    let plain = |text: &str| text.replace('%', "%%");
    let lines = annotations.iter().map(|(key, value)| format!("Annotation={key}={}\n", plain(value)));
    format!(
        "[Unit]\nStartLimitIntervalSec=0\n\n[Container]\nImage=IMAGE\n{}\n[Service]\n\
         ExecStartPre=/usr/bin/sublet wait {}\nRestart=always\nRestartSec=5\n",
        lines.collect::<String>(),
        plain(options)
    )
}
