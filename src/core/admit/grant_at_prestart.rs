//! Admission for a container that already exists: the same request, placement, lease and grant, applied to its
//! namespaces. Its environment can no longer be changed, so it gets nodes, files, and a dedicated MPS server with its
//! limits as default limits. With a CDI device the engine has set the environment. The
//! share is then as configured, also with a shared server.

use serde_json::Value;

use super::local::{Local, is_same_container, read};
use super::request_of_spec::{
    RequestSource, asks_for_a_share, check_environment, explain_gone_cdi_device, find_cdi_device, request_of,
};
use super::take_lease::{self, Terms};
use super::{Admission, AdmitError, Candidate, Engine, Leases};
use crate::config::Config;
use crate::grant::{Grant, MPS_DEFAULT_DIR, MPS_DIR};
use crate::ledger::{Container, Init, LEASE_ANNOTATION, Lease, Ledger, Scan};
use crate::oci::cdi::{Asked, CdiError};
use crate::oci::{self, Live, container_root};
use crate::process::Process;
use crate::request::Request;
use crate::share::{Isolation, Mode, Priority};

/// The result, and for the log the environment that the container lacks. A CDI device brings its own.
type LateAdmission = (Admission, Option<String>);

/// Takes a share for `container`, whose first process is `init`, and gives it to the live container. `spec` is its
/// config.json with the annotations that its runtime reported, and need not be written. `by_cdi` has the arguments of a CDI
/// device's hook. `engine` is the engine that waits for the container.
///
/// # Errors
/// Any reason not to start the container. The lease is then freed, and `sublet status --last-error` shows the reason.
pub fn admit_late(
    container: &Container,
    init: Process,
    spec: &Value,
    by_cdi: Option<&Asked>,
    engine: Option<&Engine>,
    config: &Config,
) -> Result<LateAdmission, AdmitError> {
    let source = RequestSource { annotations: oci::own_annotations(spec, &container.bundle)?, share: None };
    if by_cdi.is_none() && !asks_for_a_share(spec, &source.annotations, None) {
        return Ok((Admission::NoShare, None));
    }
    let admitted =
        check_cdi_arguments(by_cdi, spec).and_then(|()| match source.annotations.get(LEASE_ANNOTATION) {
            Some(id) => Local::new(config)
                .find_granted(id, container)
                .map(|lease| (Admission::AlreadyGranted(lease.id), None)),
            None => admit_live(container, init, (&source, spec), engine, config),
        });
    admitted.inspect_err(|error| Leases::of(config).record_refusal(container, error, source.owner(config)))
}

/// The hook's arguments must agree with the spec that all entry points read.
fn check_cdi_arguments(by_cdi: Option<&Asked>, spec: &Value) -> Result<(), AdmitError> {
    if by_cdi.is_none() || find_cdi_device(spec)?.as_ref() == by_cdi {
        return Ok(());
    }
    Err(CdiError::NotAsked.into())
}

fn admit_live(
    container: &Container,
    init: Process,
    (source, spec): (&RequestSource, &Value),
    engine: Option<&Engine>,
    config: &Config,
) -> Result<LateAdmission, AdmitError> {
    let local = Local::for_engine(config);
    let store = local.store()?;
    if let Some(lease) = find_lease(&read(&store)?, init) {
        return Ok((Admission::AlreadyGranted(lease.id.clone()), None));
    }
    source.check_without_shim(config)?;
    let (asked, request) = (find_cdi_device(spec)?, request_of(source, spec, config)?);
    let request = if asked.is_some() { request } else { make_dedicated(request, source, config)? };
    // Mounts are attached now, at the path in config.json. The lease has the path in the engine's storage, because the
    // other one may be gone at the end.
    let rootfs = container_root::podman_root_filesystem(container.rootfs.clone(), spec, &container.bundle)?;
    let lasting = Container { rootfs, ..container.clone() };
    let candidate = Candidate { container: lasting, rootfs: None, owner: init, engine };
    let mut taken = take_lease::take(&candidate, &request, Terms::OfSpec(spec), &store, local)
        .map_err(|error| explain_gone_cdi_device(error, spec, config))?;
    // Here a link can be covered itself, and not the file to which it leads.
    taken.image.left_out.clear();
    let lease = &taken.lease.id;
    let applied = Init::of(init)
        .map_err(|source| AdmitError::no_cgroup(lease, &source))
        // It is active at once, because the container exists.
        .and_then(|init| Ok(store.change_with_scan(Scan::None, |ledger| ledger.activate(lease, init))?))
        .and_then(|_| local.grant(&taken, &request, &store))
        .and_then(|grant| {
            taken.check_mount_points(spec, &grant)?;
            oci::check_node_modes(spec, &grant.nodes, source.keeps_groups())?;
            match &asked {
                Some(asked) => check_environment(spec, asked, &grant)?,
                None => check_mps_directory(&taken, spec)?,
            }
            let warnings = local.make_daemon_ready(&taken, &grant, &store)?;
            candidate.check_wanted()?;
            oci::apply(&grant, Live { init, rootfs: &container.rootfs })?;
            Ok(Grant { warnings, ..grant })
        });
    let grant = applied.inspect_err(|_| local.free_or_warn(&taken.lease, &store))?;
    let environment = asked.is_none().then(|| describe_environment(&grant, &taken.lease));
    Ok((Admission::Granted { lease: taken.lease.id, warnings: grant.warnings }, environment))
}

/// The lease that another hook has taken for this same container, under whatever names. A process is the first process
/// of only one container.
fn find_lease(ledger: &Ledger, init: Process) -> Option<&Lease> {
    ledger.leases.iter().find(|lease| lease.init.as_ref().is_some_and(|known| known.process == init))
}

/// Without an environment, mode mps needs a dedicated server: with a shared server, each client brings its limits in
/// its environment.
fn make_dedicated(request: Request, source: &RequestSource, config: &Config) -> Result<Request, AdmitError> {
    let annotations = &source.annotations;
    let of_share = annotations.get("sublet.share").and_then(|name| config.share.get(name)?.get("isolation"));
    let wanted = annotations.get("sublet.isolation").or(of_share);
    if wanted.is_some_and(|isolation| isolation == "shared") {
        return Err(AdmitError::LateShared);
    }
    if request.priority == Priority::Low {
        return Err(AdmitError::LatePriority);
    }
    let has_servers = matches!(request.mode, None | Some(Mode::Mps | Mode::TimeSlice));
    let isolation = if has_servers { Isolation::Dedicated } else { request.isolation };
    Ok(Request { isolation, ..request })
}

/// Checks that the container's processes find its MPS server without an environment.
fn check_mps_directory(taken: &take_lease::Taken, spec: &Value) -> Result<(), AdmitError> {
    if taken.lease.daemon.is_none() {
        return Ok(());
    }
    if !taken.image.takes_default_directory() {
        return Err(AdmitError::LateTmp);
    }
    let env = spec.pointer("/process/env").and_then(Value::as_array);
    let leads_away = |entry: &&str| match entry.split_once('=') {
        Some(("CUDA_MPS_PIPE_DIRECTORY", dir)) => dir != MPS_DIR && dir != MPS_DEFAULT_DIR,
        Some((name, _)) => name.starts_with("CUDA_MPS_"),
        None => false,
    };
    match env.into_iter().flatten().filter_map(Value::as_str).find(leads_away) {
        Some(entry) => Err(AdmitError::LateEnvironment(entry.to_owned())),
        None => Ok(()),
    }
}

/// One line: which variables the container lacks, and why it works without them.
fn describe_environment(grant: &Grant, lease: &Lease) -> String {
    let names: Vec<&str> =
        grant.env.set.iter().chain(&grant.env.default).map(|(name, _)| name.as_str()).collect();
    let server = if lease.daemon.is_some() {
        ", CUDA finds the MPS server in /tmp/nvidia-mps, and the server has the share's limits as defaults"
    } else {
        ""
    };
    format!(
        "a hook cannot set {}, and need not: the container has nodes of its own devices only{server} (set \
         SUBLET_* or the variables of frameworks yourself for programs that read them)",
        names.join(", ")
    )
}

/// Frees the lease of an ended container that only the ledger knows, because its config.json names none. If another command
/// has freed it, clears what that may still have to.
pub fn end_late(container: &Container, config: &Config) -> Result<(), AdmitError> {
    let leases = Leases::of(config);
    let Some(ledger) = leases.ledger_of_hooks()? else { return Ok(()) };
    if let Some(lease) = find_ended(&ledger, container) {
        return leases.end(&lease.id);
    }
    let local = Local::for_engine(config);
    local.clear_pending(&ledger, &local.store()?);
    Ok(())
}

/// If the first thread of its first process runs, this is a later container with the same name. A runtime takes the end of
/// that thread for the container's, whatever its other threads do.
fn find_ended<'l>(ledger: &'l Ledger, container: &Container) -> Option<&'l Lease> {
    let has_ended = |lease: &Lease| lease.init.as_ref().is_some_and(|init| !init.process.has_first_thread());
    ledger.leases.iter().find(|lease| is_same_container(&lease.container, container) && has_ended(lease))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::ledger::fixture::lease;
    use crate::process::fixture::without_first_thread;

    fn wished(annotations: &Value, config: &Config) -> Result<Request, String> {
        let spec = json!({"process": {}, "annotations": annotations});
        let source = RequestSource { annotations: oci::annotations(&spec).expect("texts"), share: None };
        let request = request_of(&source, &spec, config).map_err(|error| error.to_string())?;
        make_dedicated(request, &source, config).map_err(|error| error.to_string())
    }

    #[test]
    fn mps_is_always_dedicated_and_an_explicit_shared_is_refused() {
        let mut config = Config::default();
        let isolation =
            |annotations, config: &Config| wished(&annotations, config).map(|wish| wish.isolation);
        let sm = json!({"sublet.sm": "25"});
        assert_eq!(isolation(sm.clone(), &config), Ok(Isolation::Dedicated));
        assert_eq!(isolation(json!({"sublet.gpu": "0"}), &config), Ok(Isolation::Dedicated));
        assert_eq!(isolation(json!({"sublet.mode": "exclusive"}), &config), Ok(Isolation::Shared));
        let shared = json!({"sublet.sm": "25", "sublet.isolation": "shared"});
        assert!(
            isolation(shared, &config).unwrap_err().starts_with("sublet.isolation=shared does not work with")
        );
        let share =
            [("sm", "25"), ("isolation", "shared")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        config.share.insert("small".into(), share.into_iter().collect());
        assert!(isolation(json!({"sublet.share": "small"}), &config).is_err());
        let overridden = json!({"sublet.share": "small", "sublet.isolation": "dedicated"});
        assert_eq!(isolation(overridden, &config), Ok(Isolation::Dedicated));
    }

    #[test]
    fn a_low_priority_orders_nobody_on_a_server_of_its_own() {
        let config = Config::default();
        let low = wished(&json!({"sublet.priority": "low"}), &config).unwrap_err();
        assert!(low.starts_with("sublet.priority=low does not work with a hook"), "{low}");
        assert!(wished(&json!({"sublet.priority": "normal"}), &config).is_ok());
    }

    #[test]
    fn a_hook_of_a_cdi_device_serves_only_the_share_in_config_json() {
        let asked = |share: &str| Asked { share: share.to_owned(), device: "GPU-a".to_owned() };
        let small = asked("small");
        let hook = json!({"path": "/sublet-hook", "args": small.arguments(crate::oci::cdi::STAGE)});
        let spec = json!({"hooks": {"createRuntime": [hook]}});
        assert!(check_cdi_arguments(Some(&small), &spec).is_ok() && check_cdi_arguments(None, &spec).is_ok());
        assert!(check_cdi_arguments(Some(&asked("large")), &spec).is_err());
        let error = check_cdi_arguments(Some(&small), &json!({})).unwrap_err();
        assert!(error.to_string().starts_with("its config.json has no CDI device"), "{error}");
    }

    #[test]
    fn a_lease_is_of_this_container_by_its_process_and_ends_when_that_is_gone() {
        let me = Process::current().unwrap();
        let mut held = lease(1, "GPU-a");
        held.init = Some(Init { process: me, pid_namespace: 0, cgroup: None, cgroup_inode: None });
        let ledger = Ledger { leases: vec![held], ..Ledger::empty("boot") };
        assert!(find_lease(&ledger, me).is_some(), "whatever names it is given");
        assert!(find_lease(&ledger, Process { start_time: 1, ..me }).is_none());
    }

    #[test]
    fn a_container_has_ended_with_the_first_thread_of_its_first_process() {
        let (me, started) = (Process::current().unwrap(), without_first_thread());
        let of = |process| Init { process, pid_namespace: 0, cgroup: None, cgroup_inode: None };
        let held = lease(1, "GPU-a");
        for (process, expected) in
            [(me, false), (started.process(), true), (Process { start_time: 1, ..me }, true)]
        {
            let leases = vec![Lease { init: Some(of(process)), ..held.clone() }];
            let ledger = Ledger { leases, ..Ledger::empty("boot") };
            assert_eq!(find_ended(&ledger, &held.container).is_some(), expected, "{process:?}");
        }
    }
}
