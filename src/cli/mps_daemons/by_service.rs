//! Without systemd, `sublet serve` starts the daemons where it runs. A process that is started below a container runtime
//! stays below it: the kernel gives orphans to the nearest process above that asked for them (`PR_SET_CHILD_SUBREAPER`,
//! prctl(2)), and `crun run`, say, waits until it has no child any more.

use std::path::Path;
use std::time::Duration;

use nix::unistd::getppid;

use sublet_core::broker::client::Broker;
use sublet_core::broker::protocol::{Answer, Ask};
use sublet_core::config::Config;
use sublet_core::ledger::{DaemonKey, Ledger};
use sublet_core::mps::MpsError;
use sublet_core::process::Process;
use sublet_core::process::sublet::SubletError;

/// How long the service may take to say that it is there.
const PATIENCE: Duration = Duration::from_secs(2);

/// Has the service start the daemon of `key`. `None`: this process has to, because there is no service, because it is a
/// child of the service, or because systemd runs.
pub(super) fn start(
    key: &DaemonKey,
    ledger: &Ledger,
    config: &Config,
) -> Option<Result<Vec<String>, MpsError>> {
    ledger.keeper.filter(Process::is_alive)?;
    if is_systemd_running() || is_by_service(ledger) {
        return None;
    }
    // One that hangs must not keep a container from starting.
    let asked = Broker::answers(config, PATIENCE);
    match asked.and_then(|()| Broker::new(config).ask(&Ask::StartDaemon { key: key.0.clone() })) {
        Ok(Answer::Started(warnings)) => Some(Ok(warnings)),
        Ok(Answer::NotStarted(why)) => Some(Err(MpsError::Own(SubletError(why)))),
        // It hangs, is ending, or of a version that does not start daemons for others.
        Ok(_) => None,
        Err(error) => {
            tracing::debug!("{error}");
            None
        }
    }
}

/// Whether this process is a child of the service, by which no process is kept waiting.
pub(super) fn is_by_service(ledger: &Ledger) -> bool {
    ledger.keeper.is_some_and(|keeper| keeper.pid == getppid().as_raw())
}

/// Whether systemd runs: `sd_booted(3)`.
pub(super) fn is_systemd_running() -> bool {
    Path::new("/run/systemd/system").is_dir()
}
