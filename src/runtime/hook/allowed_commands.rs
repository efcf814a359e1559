//! The commands that a hook's parent process runs for it. The hook's own process may start none
//! ([`sublet_core::process::confine`]).

use std::process::Command;

use sublet_core::ledger::LeaseId;
use sublet_core::process::sublet;
use sublet_core::{mps, oci};

/// The command that `words` ask for, with a clean environment.
pub(super) fn command(words: &[&str]) -> Option<Command> {
    match words {
        ["sublet", arguments @ ..] if is_sublet_command(arguments) => {
            Some(sublet::command(&sublet::program(), arguments))
        }
        ["nvidia-cuda-mps-control", key] => mps::control_command(key),
        ["systemctl", arguments @ ..] => oci::systemctl(arguments),
        _ => None,
    }
}

/// Whether these are arguments of a `sublet` command that sublet's other programs run.
fn is_sublet_command(arguments: &[&str]) -> bool {
    match arguments {
        ["refresh", "--quiet"] | ["mig", "make" | "clear"] => true,
        ["gc", "--deleted", lease] => LeaseId::parse(lease).is_some(),
        ["mps", "start" | "rest" | "lower", key] => mps::is_key(key),
        ["mps", "stop", word, key] => *word == mps::IF_THERE && mps::is_key(key),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_run_but_what_hooks_run() {
        let words: [&[&str]; 16] = [
            &[],
            &["sh", "-c", "true"],
            &["/bin/true"],
            &["sublet"],
            &["sublet", "gc"],
            &["sublet", "gc", "--deleted", "--rebuild"],
            &["sublet", "gc", "--rebuild"],
            &["sublet", "refresh", "--quiet", "--boot"],
            &["sublet", "mps", "start", "--help"],
            &["sublet", "mps", "stop", "--if-there", "../x"],
            &["sublet", "mig", "apply", "x"],
            &["nvidia-cuda-mps-control", "../../tmp"],
            &["systemctl", "stop", "docker"],
            &["systemctl", "show", "--property=ControlGroup", "--value", "-H", "host"],
            &["systemctl", "set-property", "--runtime", "--", "x.scope", "ExecStart=/bin/true"],
            &["systemctl", "set-property", "--runtime", "--", "x.scope", "DeviceAllow=/dev/sda rw"],
        ];
        for words in words {
            assert!(command(words).is_none(), "{words:?}");
        }
        for words in [
            &["sublet", "refresh", "--quiet"][..],
            &["sublet", "gc", "--deleted", "0123456789abcdef"],
            &["sublet", "mps", "start", "GPU-0"],
            &["sublet", "mps", "lower", "GPU-0"],
            &["sublet", "mps", "stop", "--if-there", "GPU-0"],
            &["systemctl", "show", "--property=ControlGroup", "--value", "--", "x.scope"],
            &["systemctl", "set-property", "--runtime", "--", "x.scope", "DeviceAllow=/dev/char/195:0 rw"],
        ] {
            assert!(command(words).is_some(), "{words:?}");
        }
    }
}
