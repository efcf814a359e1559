//! Every key, rule and message of the annotations, in plain values.

use insta::assert_snapshot;
use proptest::prelude::*;

use super::Capability::{Compute, Graphics, Utility, Video};
use super::rules::KEYS;
use super::*;
use crate::config::Required;
use crate::share::{Action, Guarding, Selector, Suspend};

fn annotations(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn request(pairs: &[(&str, &str)]) -> Request {
    parse(&annotations(pairs), None, None, &Config::default()).unwrap()
}

fn refused(pairs: &[(&str, &str)]) -> String {
    refused_by(&Config::default(), pairs)
}

fn refused_by(config: &Config, pairs: &[(&str, &str)]) -> String {
    parse(&annotations(pairs), None, None, config).unwrap_err().to_string()
}

fn with_share(name: &str, pairs: &[(&str, &str)]) -> Config {
    Config { share: BTreeMap::from([(name.to_owned(), annotations(pairs))]), ..Config::default() }
}

#[test]
fn only_annotated_containers_are_ours() {
    assert!(has_sublet_annotations(&annotations(&[("sublet.gpu", "any")])));
    assert!(has_sublet_annotations(&annotations(&[("sublet.nonsense", "")])));
    assert!(has_sublet_annotations(&annotations(&[("sublet.lease", "0123456789abcdef")])));
    assert!(!has_sublet_annotations(&annotations(&[])));
    assert!(!has_sublet_annotations(&annotations(&[
        ("sublets.gpu", "any"),
        ("subletgpu", "any"),
        ("io.foo.sublet.color", "any")
    ])));
    for misspelt in ["io.sublet.gpu", "Sublet.sm", "SUBLET_SM", "sublet/mig_caps"] {
        let meant = annotations(&[(misspelt, "25")]);
        assert!(has_sublet_annotations(&meant));
        let error = parse(&meant, None, None, &Config::default()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{misspelt}=25: write sublet.")), "{error}");
    }
}

#[test]
fn sandboxes_are_never_ours() {
    for key in ["io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType"] {
        assert!(is_sandbox(&annotations(&[("sublet.gpu", "any"), (key, "sandbox")])));
        assert!(!is_sandbox(&annotations(&[("sublet.gpu", "any"), (key, "container")])));
    }
}

#[test]
fn podmans_infra_container_is_known_by_its_program() {
    let podman = annotations(&[("io.container.manager", "libpod"), ("sublet.gpu", "any")]);
    assert!(is_podman_infra(&podman, &["/catatonit", "-P"]));
    assert!(!is_podman_infra(&podman, &["/catatonit", "--", "python3"]));
    assert!(!is_podman_infra(&annotations(&[("sublet.gpu", "any")]), &["/catatonit", "-P"]));
}

#[test]
fn a_lone_gpu_is_time_sliced() {
    assert_eq!(
        request(&[("sublet.gpu", "0"), ("other.key", "x")]),
        Request {
            devices: Devices::These(vec![Selector::Index(0)]),
            mode: None,
            default_mode: Mode::TimeSlice,
            isolation: Isolation::Shared,
            sm: None,
            memory: None,
            mig: None,
            mig_caps: Vec::new(),
            priority: Priority::Normal,
            guard: None,
            suspend: Suspend::Never,
            visible_devices: None,
            default_directory: true,
            owner: None,
            processes: NonZeroU32::MIN,
            capabilities: Capabilities(vec![Capability::Compute, Capability::Utility]),
            not_served: Vec::new(),
            wait: Duration::ZERO,
        }
    );
}

#[test]
fn every_key_at_once() {
    let request = request(&[
        ("sublet.gpu", "model:*H200*"),
        ("sublet.mode", "mps"),
        ("sublet.sm", "12.5"),
        ("sublet.memory", "8GiB"),
        ("sublet.mig", "1g.18gb"),
        ("sublet.isolation", "dedicated"),
        ("sublet.priority", "low"),
        ("sublet.processes", "4"),
        ("sublet.capabilities", "video, compute"),
        ("sublet.wait", "30s"),
        ("sublet.guard", "terminate"),
        ("sublet.owner", "Ana Müller"),
        ("sublet.lease", "0123456789abcdef"),
    ]);
    assert_eq!(
        request,
        Request {
            devices: Devices::These(vec![Selector::Model("*H200*".into())]),
            mode: Some(Mode::Mps),
            default_mode: Mode::TimeSlice,
            isolation: Isolation::Dedicated,
            sm: Some(Percent::from_thousandths(12_500)),
            memory: Some(Memory::Bytes(8_589_934_592)),
            mig: Some("1g.18gb".into()),
            mig_caps: Vec::new(),
            priority: Priority::Low,
            guard: Some(Guarding::AtLeast(Action::Terminate)),
            suspend: Suspend::Never,
            visible_devices: None,
            default_directory: true,
            owner: Some("Ana Müller".into()),
            processes: NonZeroU32::new(4).unwrap(),
            capabilities: Capabilities(vec![Capability::Compute, Capability::Video]),
            not_served: Vec::new(),
            wait: Duration::from_secs(30),
        }
    );
}

#[test]
fn only_a_named_share_says_how_devices_are_named_and_where_the_daemon_is_found() {
    let share = [("sm", "25"), ("visible_devices", "ordinal"), ("default_directory", "false")];
    let share = share.map(|(key, value)| (key.to_owned(), value.to_owned())).into_iter().collect();
    let config = Config { share: [("vllm".to_owned(), share)].into(), ..Config::default() };
    let parsed = |pairs: &[(&str, &str)]| parse(&annotations(pairs), None, None, &config);
    let request = parsed(&[("sublet.share", "vllm"), ("sublet.memory", "1GiB")]).unwrap();
    assert_eq!((request.visible_devices, request.default_directory), (Some(VisibleDevices::Ordinal), false));
    assert_eq!(request.over(&config).grant.visible_devices, Some(VisibleDevices::Ordinal));
    for key in ["sublet.visible_devices", "sublet.default_directory"] {
        let error = parsed(&[("sublet.share", "vllm"), (key, "false")]).unwrap_err().to_string();
        assert!(error.contains("unknown key"), "{error}");
    }
}

#[test]
fn the_mode_that_keys_imply() {
    let mode = |pairs: &[_]| request(pairs).mode;
    assert_eq!(mode(&[("sublet.sm", "25")]), Some(Mode::Mps));
    assert_eq!(mode(&[("sublet.priority", "normal")]), Some(Mode::Mps));
    assert_eq!(mode(&[("sublet.processes", "1")]), Some(Mode::Mps));
    assert_eq!(mode(&[("sublet.mig", "1g.18gb")]), Some(Mode::Mig));
    assert_eq!(mode(&[("sublet.gpu", "MIG-9a1b2c3d")]), Some(Mode::Mig));
    assert_eq!(mode(&[("sublet.gpu", "0:1")]), Some(Mode::Mig));
    assert_eq!(mode(&[("sublet.mig", "1g.18gb"), ("sublet.sm", "50")]), Some(Mode::Mps));
    assert_eq!(mode(&[("sublet.memory", "8GiB")]), None);
    assert_eq!(mode(&[("sublet.isolation", "dedicated")]), None);
    assert_eq!(mode(&[("sublet.mode", "time-slice"), ("sublet.mig", "1g.18gb")]), Some(Mode::TimeSlice));
}

#[test]
fn defaults_come_from_the_configuration() {
    let mut config = Config::default();
    config.defaults.mode = Mode::Exclusive;
    config.defaults.isolation = Isolation::Dedicated;
    config.defaults.wait = Duration::from_secs(5);
    let parse = |pairs: &[_]| parse(&annotations(pairs), None, None, &config).unwrap();
    let request = parse(&[("sublet.gpu", "any")]);
    assert_eq!((request.mode, request.default_mode), (None, Mode::Exclusive));
    assert_eq!((request.isolation, request.wait), (Isolation::Dedicated, Duration::from_secs(5)));
    assert_eq!(parse(&[("sublet.mode", "exclusive")]).isolation, Isolation::Shared);
    assert_eq!(parse(&[("sublet.wait", "0")]).wait, Duration::ZERO);
}

#[test]
fn mig_profiles() {
    for profile in
        ["1g.5gb", "1g.18gb", "1c.2g.35gb", "1g.18gb+me", "7g.141gb", "1g.5gb-me", "1g.24gb+me.all"]
    {
        assert_eq!(request(&[("sublet.mig", profile)]).mig.as_deref(), Some(profile));
    }
    for profile in
        ["", "1g", "18gb", "1g.18", "g.18gb", "1g.gb", "1c.1c.1g.5gb", "1g.18gb+", "1g.18gb+../x", "1g 18gb"]
    {
        assert!(refused(&[("sublet.mig", profile)]).starts_with("sublet.mig="), "{profile}");
    }
}

#[test]
fn a_named_share_stands_for_its_keys() {
    let pairs = [("sm", "25"), ("memory", "8GiB"), ("mode", "mps"), ("owner", "vision")];
    let config = with_share("small", &pairs);
    let by_key = parse(&annotations(&[("sublet.share", "small")]), None, None, &config).unwrap();
    let by_entry_point = parse(&annotations(&[]), Some("small"), None, &config).unwrap();
    assert_eq!(by_key.sm, Some(Percent::from_thousandths(25_000)));
    assert_eq!(by_key.memory, Some(Memory::Bytes(8_589_934_592)));
    assert_eq!(by_key.owner.as_deref(), Some("vision"));
    assert_eq!(by_key, by_entry_point);
    let beside = annotations(&[("sublet.sm", "50"), ("sublet.gpu", "1")]);
    let beside = parse(&beside, Some("small"), None, &config).unwrap();
    assert_eq!(beside.sm, Some(Percent::from_thousandths(50_000)));
    assert_eq!(beside.memory, Some(Memory::Bytes(8_589_934_592)));
    assert_eq!(beside.devices, Devices::These(vec![Selector::Index(1)]));
}

#[test]
fn the_containers_share_comes_before_the_entry_points() {
    let mut config = with_share("small", &[("sm", "25")]);
    config.share.insert("large".into(), annotations(&[("sm", "75")]));
    let request = parse(&annotations(&[("sublet.share", "large")]), Some("small"), None, &config).unwrap();
    assert_eq!(request.sm, Some(Percent::from_thousandths(75_000)));
}

#[test]
fn images_choose_from_the_capabilities_that_the_configuration_allows() {
    let mut config = Config::default();
    let of = |image: Option<&str>, config: &Config| {
        parse(&annotations(&[("sublet.gpu", "any")]), None, image, config).unwrap().capabilities.0
    };
    assert_eq!(of(None, &config), [Compute, Utility]);
    assert_eq!(of(Some(""), &config), [Compute, Utility]);
    assert_eq!(of(Some("all"), &config), [Compute, Utility, Graphics, Video]);
    assert_eq!(of(Some("video,compat32,ngx,display,compute"), &config), [Compute, Video]);
    assert_eq!(of(Some("compat32,ngx,display"), &config), [Compute, Utility]);
    let not_served = |key: &str, image: &str, config: &Config| {
        parse(&annotations(&[(key, "compute")]), None, Some(image), config).unwrap().not_served
    };
    let image = "compute, display,compat32,ngx,all";
    assert_eq!(not_served("sublet.share", image, &with_share("compute", &[])), ["display", "compat32"]);
    assert_eq!(not_served("sublet.capabilities", image, &config), Vec::<String>::new());
    config.limits.capabilities = vec![Utility, Compute];
    assert_eq!(
        not_served(
            "sublet.share",
            "video,utility",
            &Config { share: with_share("compute", &[]).share, ..config.clone() }
        ),
        ["video"]
    );
    assert_eq!(of(Some("all"), &config), [Compute, Utility]);
    assert_eq!(of(Some("graphics,utility"), &config), [Utility]);
    let chosen = annotations(&[("sublet.capabilities", "graphics")]);
    assert_eq!(parse(&chosen, None, Some("all"), &config).unwrap().capabilities.0, [Graphics]);
}

#[test]
fn memory_and_sm_can_be_required() {
    let mut config = Config::default();
    config.limits.require = vec![Required::Memory, Required::Sm];
    assert_snapshot!(refused_by(&config, &[("sublet.sm", "25")]), @"sublet.memory is missing, and this host requires it; why: [limits] require; fix: add it, for example sublet.memory=8GiB");
    assert_snapshot!(refused_by(&config, &[("sublet.memory", "8GiB")]), @"sublet.sm is missing, and this host requires it; why: [limits] require; fix: add it with sublet.mode=mps, for example sublet.sm=25");
    config.defaults.mode = Mode::Exclusive;
    assert_snapshot!(refused_by(&config, &[("sublet.gpu", "any")]), @"sublet.memory is missing, and this host requires it; why: [limits] require; fix: add it with sublet.mode=mps, for example sublet.memory=8GiB, or write sublet.mode=exclusive");
    let both = annotations(&[("sublet.memory", "8GiB"), ("sublet.sm", "25")]);
    assert!(parse(&both, None, None, &config).is_ok());
    assert!(parse(&annotations(&[("sublet.mig", "1g.18gb")]), None, None, &config).is_ok());
}

/// Each pair of required limits and of a mode, asked for or the default: a request with the advised limits is served.
#[test]
fn required_limits_can_be_given_in_every_mode() {
    let all_required = [vec![Required::Memory], vec![Required::Sm], vec![Required::Memory, Required::Sm]];
    for (default, require) in
        Mode::VARIANTS.iter().flat_map(|mode| all_required.iter().map(move |all| (mode, all)))
    {
        let mut config = Config::default();
        config.limits.require.clone_from(require);
        config.defaults.mode = *default;
        for mode in Mode::VARIANTS.iter().map(Some).chain([None]) {
            let mut asked = annotations(&[("sublet.gpu", "0")]);
            asked.extend(mode.map(|mode| ("sublet.mode".to_owned(), mode.to_string())));
            for _ in require {
                let Err(refusal) = parse(&asked, None, None, &config) else { break };
                let words = refusal.message.split([' ', ',']).skip(1);
                let advised = words
                    .filter_map(|word| word.split_once('='))
                    .filter(|(key, _)| key.starts_with("sublet."));
                // The mode that comes first goes with the example.
                for (key, value) in advised.collect::<Vec<_>>().into_iter().rev() {
                    asked.insert(key.to_owned(), value.to_owned());
                }
            }
            let refusal = parse(&asked, None, None, &config).err();
            assert!(refusal.is_none(), "{mode:?}, default {default}, {require:?}: {asked:?}: {refusal:?}");
        }
    }
}

#[test]
fn unknown_keys() {
    assert_snapshot!(refused(&[("sublet.vram", "8GiB")]), @"sublet.vram=8GiB: unknown key, did you mean sublet.memory?; why: the keys are sublet.gpu, sublet.mode, sublet.sm, sublet.memory, sublet.mig, sublet.mig-caps, sublet.isolation, sublet.priority, sublet.processes, sublet.capabilities, sublet.wait, sublet.guard, sublet.suspend, sublet.owner, sublet.share");
    assert_snapshot!(refused(&[("sublet.isolaton", "dedicated")]), @"sublet.isolaton=dedicated: unknown key, did you mean sublet.isolation?; why: the keys are sublet.gpu, sublet.mode, sublet.sm, sublet.memory, sublet.mig, sublet.mig-caps, sublet.isolation, sublet.priority, sublet.processes, sublet.capabilities, sublet.wait, sublet.guard, sublet.suspend, sublet.owner, sublet.share");
    assert_snapshot!(refused(&[("sublet.\u{1b}[2J", "x\ny")]), @r#"sublet.\u{1b}[2J=x\ny: unknown key; why: the keys are sublet.gpu, sublet.mode, sublet.sm, sublet.memory, sublet.mig, sublet.mig-caps, sublet.isolation, sublet.priority, sublet.processes, sublet.capabilities, sublet.wait, sublet.guard, sublet.suspend, sublet.owner, sublet.share"#);
    for (wrong, meant) in [
        ("compute", "sm"),
        ("cores", "sm"),
        ("percent", "sm"),
        ("mem", "memory"),
        ("gpus", "gpu"),
        ("device", "gpu"),
        ("SM", "sm"),
        ("process", "processes"),
        ("capability", "capabilities"),
    ] {
        let message = refused(&[(&format!("sublet.{wrong}"), "1")]);
        assert!(message.contains(&format!("did you mean sublet.{meant}?")), "{message}");
    }
    assert!(!refused(&[("sublet.zzzzzzzz", "1")]).contains("did you mean"));
    assert!(!refused(&[("sublet.", "1")]).contains("did you mean"));
}

#[test]
fn values_that_do_not_parse() {
    assert_snapshot!(refused(&[("sublet.sm", "0.25")]), @"sublet.sm=0.25: a quarter of a percent? write 25; why: it must be a percentage over 0 up to 100, such as 25, 25% or 12.5");
    assert_snapshot!(refused(&[("sublet.sm", "101%")]), @"sublet.sm=101%: not a possible value; why: it must be a percentage over 0 up to 100, such as 25, 25% or 12.5");
    assert_snapshot!(refused(&[("sublet.memory", "25")]), @"sublet.memory=25: the unit is missing: write 25GiB or 25MiB or 25%; why: it must be an amount of 1MiB or more with a unit, such as 8GiB or 8192MiB, or a percentage up to 100%, such as 25%");
    assert_snapshot!(refused(&[("sublet.memory", "1e309")]), @"sublet.memory=1e309: not a possible value; why: it must be an amount of 1MiB or more with a unit, such as 8GiB or 8192MiB, or a percentage up to 100%, such as 25%");
    assert_snapshot!(refused(&[("sublet.gpu", "GPU-12")]), @r#"sublet.gpu=GPU-12: not a possible value; why: it must be any, any:<count>, all, or a list of an index, GPU-<uuid> (8 hex digits or more), PCI bus id, MIG-<uuid>, "G:M" (quoted in YAML), name:<alias>, model:<glob>"#);
    assert_snapshot!(refused(&[("sublet.mode", "timeslice")]), @"sublet.mode=timeslice: did you mean time-slice?; why: it must be one of time-slice, mps, mig, exclusive");
    assert_snapshot!(refused(&[("sublet.mig", "1g")]), @"sublet.mig=1g: not a possible value; why: it must be a MIG profile such as 1g.18gb or 1c.2g.35gb");
    assert_snapshot!(refused(&[("sublet.isolation", "dedicate")]), @"sublet.isolation=dedicate: did you mean dedicated?; why: it must be one of shared, dedicated");
    assert_snapshot!(refused(&[("sublet.priority", "high")]), @"sublet.priority=high: not a possible value; why: it must be one of normal, low");
    assert_snapshot!(refused(&[("sublet.processes", "0")]), @"sublet.processes=0: not a possible value; why: it must be a whole number, 1 or more");
    assert_snapshot!(refused(&[("sublet.capabilities", "compute,compat32")]), @"sublet.capabilities=compute,compat32: not a possible value; why: it must be a list of compute, utility, graphics, video, or all");
    assert_snapshot!(refused(&[("sublet.capabilities", "grafics")]), @"sublet.capabilities=grafics: did you mean graphics?; why: it must be a list of compute, utility, graphics, video, or all");
    assert_snapshot!(refused(&[("sublet.wait", "2m")]), @"sublet.wait=2m: not a possible value; why: it must be 0 or a whole number of ms, s or m, such as 10s, at most 1m ([limits] wait_max)");
    for processes in ["+1", "-1", "1.0", "4294967296", "١", ""] {
        assert!(refused(&[("sublet.processes", processes)]).starts_with("sublet.processes="), "{processes}");
    }
}

#[test]
fn shares_that_do_not_work() {
    assert_snapshot!(refused(&[("sublet.share", "small")]), @"sublet.share=small: this host has no named share; why: its configuration has no [share.<name>]");
    let config = with_share("small", &[("sm", "0"), ("mode", "mps")]);
    assert_snapshot!(refused_by(&config, &[("sublet.share", "smal")]), @"sublet.share=smal: did you mean small?; why: it must be a share of this host's configuration: small");
    assert_snapshot!(refused_by(&config, &[("sublet.share", "small")]), @"sublet.sm=0 (from [share.small]): not a possible value; why: it must be a percentage over 0 up to 100, such as 25, 25% or 12.5");
    let nested = with_share("a", &[("share", "b")]);
    assert_snapshot!(refused_by(&nested, &[("sublet.share", "a")]), @"sublet.share=b (from [share.a]): unknown key; why: the keys are sublet.gpu, sublet.mode, sublet.sm, sublet.memory, sublet.mig, sublet.mig-caps, sublet.isolation, sublet.priority, sublet.processes, sublet.capabilities, sublet.wait, sublet.guard, sublet.suspend, sublet.owner, visible_devices, default_directory");
    let config = with_share("half", &[("sm", "50")]);
    assert_snapshot!(refused_by(&config, &[("sublet.share", "half"), ("sublet.mode", "exclusive")]), @"sublet.sm=50 (from [share.half]) cannot be combined with sublet.mode=exclusive; why: only MPS limits SMs; fix: write sublet.mode=mps or leave sublet.sm out");
}

#[test]
fn mig_capabilities_have_to_be_allowed() {
    let asked = |caps: &str, allowed: &[MigCapability]| {
        let mut config = Config::default();
        config.mig.allow_caps = allowed.to_vec();
        let request = parse(&annotations(&[("sublet.mig-caps", caps)]), None, None, &config);
        request.map(|request| request.mig_caps).map_err(|error| error.to_string())
    };
    assert_eq!(asked("monitor", &[MigCapability::Monitor]), Ok(vec![MigCapability::Monitor]));
    assert_eq!(
        asked("config, monitor", MigCapability::VARIANTS),
        Ok(vec![MigCapability::Monitor, MigCapability::Config])
    );
    assert_snapshot!(asked("config,monitor", &[MigCapability::Monitor]).unwrap_err(), @"sublet.mig-caps=config,monitor cannot be combined with [mig] allow_caps of this host's configuration; why: it gives access to all MIG instances, so root has to allow it there");
    assert_snapshot!(asked("monitr", MigCapability::VARIANTS).unwrap_err(), @"sublet.mig-caps=monitr: did you mean monitor?; why: it must be monitor, config, or both");
}

#[test]
fn a_mode_mig_alone_says_how_large_the_instance_is_at_least() {
    let least = request(&[("sublet.mode", "mig"), ("sublet.memory", "8GiB"), ("sublet.sm", "25")]);
    assert_eq!((least.mode, least.memory), (Some(Mode::Mig), Some(Memory::Bytes(8_589_934_592))));
    assert_snapshot!(refused(&[("sublet.mode", "mig"), ("sublet.mig", "1g.18gb"), ("sublet.sm", "25")]), @"sublet.sm=25 cannot be combined with sublet.mode=mig; why: an instance has the SMs of its profile; fix: write sublet.mode=mps or leave sublet.sm out");
}

#[test]
fn contradictions() {
    assert_snapshot!(refused(&[("sublet.sm", "25"), ("sublet.mode", "exclusive")]), @"sublet.sm=25 cannot be combined with sublet.mode=exclusive; why: only MPS limits SMs; fix: write sublet.mode=mps or leave sublet.sm out");
    assert_snapshot!(refused(&[("sublet.priority", "normal"), ("sublet.mode", "time-slice")]), @"sublet.priority=normal cannot be combined with sublet.mode=time-slice; why: only MPS has priorities; fix: write sublet.mode=mps or leave sublet.priority out");
    assert_snapshot!(refused(&[("sublet.processes", "1"), ("sublet.mode", "mig")]), @"sublet.processes=1 cannot be combined with sublet.mode=mig; why: only MPS counts processes; fix: write sublet.mode=mps or leave sublet.processes out");
    assert_snapshot!(refused(&[("sublet.memory", "8GiB"), ("sublet.mode", "exclusive")]), @"sublet.memory=8GiB cannot be combined with sublet.mode=exclusive; why: the container has the whole device; fix: write sublet.mode=mps or leave sublet.memory out");
    assert_snapshot!(refused(&[("sublet.memory", "8GiB"), ("sublet.mig", "1g.18gb")]), @"sublet.memory=8GiB cannot be combined with mode mig, which sublet.mig=1g.18gb implies; why: an instance has the memory of its profile; fix: leave sublet.memory out");
    assert_snapshot!(refused(&[("sublet.mig", "1g.18gb"), ("sublet.mode", "exclusive")]), @"sublet.mig=1g.18gb cannot be combined with sublet.mode=exclusive; why: sublet.mode=mig gives the container an instance of its own");
    assert_snapshot!(refused(&[("sublet.gpu", "0:1"), ("sublet.mode", "exclusive")]), @"sublet.gpu=0:1 cannot be combined with sublet.mode=exclusive; why: sublet.mode=mig gives the container the whole MIG device");
    assert_snapshot!(refused(&[("sublet.isolation", "dedicated"), ("sublet.mode", "exclusive")]), @"sublet.isolation=dedicated cannot be combined with sublet.mode=exclusive; why: it needs sublet.mode=mps or sublet.mode=time-slice; fix: leave it out");
    assert_snapshot!(refused(&[("sublet.isolation", "dedicated"), ("sublet.gpu", "MIG-9a1b2c3d")]), @"sublet.isolation=dedicated cannot be combined with mode mig, which sublet.gpu=MIG-9a1b2c3d implies; why: it needs sublet.mode=mps or sublet.mode=time-slice; fix: leave it out");
    assert_snapshot!(refused(&[("sublet.gpu", "any:2"), ("sublet.sm", "25"), ("sublet.isolation", "shared")]), @"sublet.isolation=shared cannot be combined with sublet.gpu=any:2; why: a process connects to one MPS daemon, and a shared daemon has one device; fix: leave sublet.isolation out, because several devices get their own daemon");
    for gpu in ["0,1", "all"] {
        let refused =
            refused(&[("sublet.gpu", gpu), ("sublet.memory", "8GiB"), ("sublet.isolation", "shared")]);
        assert!(
            refused.starts_with(&format!("sublet.isolation=shared cannot be combined with sublet.gpu={gpu}"))
        );
    }
}

#[test]
fn several_devices_under_mps_have_a_server_of_their_own() {
    for gpu in ["any:2", "0,1", "all"] {
        for key in ["sublet.sm", "sublet.processes"] {
            let wanted = request(&[("sublet.gpu", gpu), (key, "25"), ("sublet.memory", "25%")]);
            assert_eq!((wanted.mode, wanted.isolation), (Some(Mode::Mps), Isolation::Dedicated), "{gpu}");
        }
    }
    let one = request(&[("sublet.gpu", "any:1"), ("sublet.sm", "25"), ("sublet.isolation", "shared")]);
    assert_eq!(one.isolation, Isolation::Shared);
    let whole =
        request(&[("sublet.gpu", "any:2"), ("sublet.mode", "exclusive"), ("sublet.isolation", "shared")]);
    assert_eq!(whole.mode, Some(Mode::Exclusive), "there is no server to share");
}

#[test]
fn a_container_can_have_itself_held_more_strictly_and_a_share_of_the_configuration_less() {
    let guard = |pairs: &[_]| request(pairs).guard;
    assert_eq!(guard(&[("sublet.guard", "container")]), Some(Guarding::AtLeast(Action::Container)));
    assert_eq!(guard(&[("sublet.guard", "terminate")]), Some(Guarding::AtLeast(Action::Terminate)));
    assert_snapshot!(refused(&[("sublet.guard", "report")]), @"sublet.guard=report cannot be combined with [guard] of this host's configuration; why: a container cannot make the guard less strict on itself; fix: root can do that in a [share]");
    assert_snapshot!(refused(&[("sublet.guard", "kill")]), @"sublet.guard=kill: not a possible value; why: it must be one of report, terminate, container");
    let config = with_share("debug", &[("guard", "report")]);
    let of_share =
        |pairs: &[_]| parse(&annotations(pairs), Some("debug"), None, &config).map(|found| found.guard);
    assert_eq!(of_share(&[]), Ok(Some(Guarding::Exactly(Action::Report))));
    let own = of_share(&[("sublet.guard", "container")]);
    assert_eq!(own, Ok(Some(Guarding::AtLeast(Action::Container))));
    assert!(of_share(&[("sublet.guard", "report")]).is_err(), "its own word, though the share says the same");
}

#[test]
fn annotations_that_go_together_are_accepted() {
    for pairs in [
        &[("sublet.gpu", "any:1"), ("sublet.mode", "mps")][..],
        &[("sublet.gpu", "0,1"), ("sublet.mode", "time-slice")],
        &[("sublet.gpu", "all"), ("sublet.mode", "exclusive")],
        &[("sublet.mode", "time-slice"), ("sublet.memory", "8GiB"), ("sublet.isolation", "dedicated")],
        &[("sublet.mode", "exclusive"), ("sublet.isolation", "shared")],
        &[("sublet.mode", "mps")],
        &[("sublet.gpu", "0:1"), ("sublet.mode", "mps"), ("sublet.sm", "50"), ("sublet.memory", "4GiB")],
    ] {
        assert!(parse(&annotations(pairs), None, None, &Config::default()).is_ok(), "{pairs:?}");
    }
}

#[test]
fn a_megabyte_is_refused_in_a_line() {
    for key in KEYS {
        for value in
            ["9".repeat(1 << 20), "0".repeat(1 << 20), "a,".repeat(1 << 19), "\u{1b}".repeat(1 << 20)]
        {
            let message = refused(&[(&format!("sublet.{key}"), &value)]);
            assert!(message.starts_with(&format!("sublet.{key}=")) && message.len() < 2000, "{message}");
        }
    }
}

fn key() -> impl Strategy<Value = String> {
    prop_oneof![
        8 => proptest::sample::select(&KEYS[..]).prop_map(|key| format!("sublet.{key}")),
        1 => any::<String>().prop_map(|key| format!("sublet.{key}")),
        1 => any::<String>(),
    ]
}

fn value() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<String>(),
        "[0-9.,:%a-zA-Z\\-]{0,20}",
        proptest::sample::select(&["25", "8GiB", "mps", "mig", "exclusive", "0,1", "1g.5gb", "low", "1"][..])
            .prop_map(str::to_owned),
        "[\\PC\0\r\n\u{202e}]{0,300}",
    ]
}

proptest! {
    #[test]
    fn whatever_stands_there_gives_a_request_or_a_line(
        annotations in proptest::collection::btree_map(key(), value(), 0..6),
        share in proptest::option::of(value()),
        image in proptest::option::of(value()),
    ) {
        if let Err(error) = parse(&annotations, share.as_deref(), image.as_deref(), &Config::default()) {
            let message = error.to_string();
            prop_assert!(message.contains("sublet."), "{}", message);
            prop_assert!(!message.contains(char::is_control), "{:?}", message);
            prop_assert!(message.chars().count() < 1000, "{}", message);
        }
    }
}

#[test]
fn a_share_that_may_be_suspended_has_one_gpu_and_no_mps() {
    let suspend = |pairs: &[(&str, &str)]| request(pairs).suspend;
    assert_eq!(suspend(&[("sublet.gpu", "0")]), Suspend::Never);
    assert_eq!(suspend(&[("sublet.mode", "mps"), ("sublet.suspend", "never")]), Suspend::Never);
    assert_eq!(suspend(&[("sublet.memory", "8GiB"), ("sublet.suspend", "allow")]), Suspend::Allow);
    assert_eq!(
        suspend(&[("sublet.mode", "exclusive"), ("sublet.suspend", "allow-many")]),
        Suspend::AllowMany
    );
    assert_snapshot!(refused(&[("sublet.suspend", "alow")]), @"sublet.suspend=alow: did you mean allow?; why: it must be one of never, allow, allow-many");
    assert_snapshot!(refused(&[("sublet.sm", "25"), ("sublet.suspend", "allow")]), @"sublet.suspend=allow cannot be combined with mode mps, which sublet.sm=25 implies; why: the driver suspends nothing under MPS or on a MIG device; fix: write sublet.mode=time-slice, or leave sublet.suspend out");
    assert_snapshot!(refused(&[("sublet.gpu", "all"), ("sublet.suspend", "allow")]), @"sublet.suspend=allow cannot be combined with sublet.gpu=all; why: the driver loses a process that uses several GPUs; fix: name one GPU, or leave sublet.suspend out");
    assert_snapshot!(refused(&[("sublet.mode", "time-slice"), ("sublet.isolation", "dedicated"), ("sublet.suspend", "allow")]), @"sublet.isolation=dedicated cannot be combined with sublet.suspend=allow; why: the driver suspends nothing under MPS; fix: leave one of them out");
}
