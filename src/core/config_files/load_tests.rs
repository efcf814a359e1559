//! Which files are read, how they are merged, and the messages about invalid ones.

use insta::assert_snapshot;

use toml::{Table, Value};

use super::*;
use crate::config::{DeviceRule, Policy, TimeSlice, Use};

fn file(path: &str, text: &str) -> File {
    File { path: path.into(), text: text.to_owned() }
}

fn merge(files: &[File]) -> Result<Config, ConfigError> {
    super::merge(&parse_files(files))
}

fn merge_runtime(files: &[File]) -> Result<Runtime, ConfigError> {
    super::merge_runtime(&parse_files(files))
}

fn one(text: &str) -> Config {
    merge(&[file("/c.toml", text)]).unwrap()
}

fn refused(text: &str) -> String {
    merge(&[file("/c.toml", text)]).unwrap_err().to_string()
}

/// The shipped file with every key uncommented. Keys without a default are left out.
fn uncommented() -> String {
    let shipped = include_str!("../../../config/config.toml");
    let uncomment = |line: &str| match line.strip_prefix('#') {
        Some(key) if !key.starts_with([' ', '#']) => key.to_owned(),
        _ => line.to_owned(),
    };
    shipped.lines().map(uncomment).collect::<Vec<_>>().join("\n")
}

fn to_toml(config: &Config) -> Result<String, toml::ser::Error> {
    toml::to_string(&crate::config::written_out(config))
}

#[test]
fn the_shipped_file_says_the_defaults() {
    let text = uncommented();
    let parsed: Config = toml::from_str(&text).unwrap();
    let unset = |line: &&str| !line.ends_with("# unset");
    let (with_defaults, examples) = text.split_once("\n[[device]]").unwrap();
    let examples = &examples[examples.find("[limits]").unwrap()..examples.find("[share.small]").unwrap()];
    let defaults = [with_defaults, examples].join("\n").lines().filter(unset).collect::<Vec<_>>().join("\n");
    assert_eq!(one(&defaults), Config::default());
    assert_eq!(one(include_str!("../../../config/config.toml")), Config::default());
    // The examples set the values that their comments name.
    assert_eq!(
        parsed.device,
        [DeviceRule {
            matches: "0".into(),
            name: Some("left".into()),
            fixed_use: Some(Use::Mps),
            time_slice: Some(TimeSlice::Long),
        }]
    );
    assert_eq!(one(&text).share["small"]["sm"], "25");
}

#[test]
fn the_shipped_file_names_every_key() {
    fn keys(table: &Table, found: &mut Vec<String>) {
        for (key, value) in table {
            found.push(key.clone());
            if let Value::Table(inner) = value {
                keys(inner, found);
            }
        }
    }
    let text = uncommented();
    let (mut shipped, mut wanted) = (Vec::new(), Vec::new());
    keys(&toml::from_str(&text).unwrap(), &mut shipped);
    keys(&Table::try_from(Config::default()).unwrap(), &mut wanted);
    wanted.extend(["log", "nvml", "layout"].map(str::to_owned));
    wanted.retain(|key| !shipped.contains(key));
    assert_eq!(wanted, Vec::<String>::new());
}

#[test]
fn a_variable_that_sublet_sets_is_not_taken_from_the_file() {
    for name in
        ["NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "SUBLET_SM_PERCENT"]
    {
        let error = refused(&format!("[grant.env]\nOTHER = \"1\"\n{name} = \"all\"\n"));
        assert!(
            error
                .starts_with(&format!("configuration /c.toml:3:1: grant.env.{name} is set by sublet itself")),
            "{error}"
        );
    }
}

#[test]
fn no_gpus_node_can_be_allowed() {
    let with = |path: &str| format!("[limits]\nallow_devices = [\"{path}\"]\n");
    for path in [
        "/dev",
        "/dev/nvidia0",
        "/dev/nvidia-uvm",
        "/dev/nvidia-caps/nvidia-cap1",
        "nvidia-fs0",
        "/srv/nvidia-fs0",
    ] {
        assert!(refused(&with(path)).contains("limits.allow_devices may have"), "{path}");
    }
    assert_eq!(one(&with("/dev/nvidia-caps-imex-channels")).limits.allow_devices.len(), 1);
}

#[test]
fn how_long_daemons_wait() {
    let says = |text: &str| one(text).mps.idle.as_secs();
    assert_eq!(says(""), 60);
    assert_eq!(says("[mps]\nidle = \"0\"\n"), 0);
    assert_eq!(says("[mps]\nidle = \"5m\"\n"), 300);
    assert_snapshot!(refused("[mps]\nidle = 60\n"), @r#"configuration /c.toml:2:8: mps.idle: "60" must be 0 or a whole number of ms, s or m, such as 10s"#);
    assert_snapshot!(refused("[mps]\nidle = \"\"\n"), @r#"configuration /c.toml:2:8: mps.idle: "" must be 0 or a whole number of ms, s or m, such as 10s"#);
}

#[test]
fn a_shown_configuration_can_be_read_again() {
    let config = one(
        "state_dir = \"/run/x\"\n[defaults]\nwait = \"1500ms\"\n[limits]\nreserve = \"1GiB\"\nrequire = [\"sm\"]\n\
         [runtime]\nlog = \"/l\"\n[[device]]\nmatch = 0\nuse = \"mps\"\n[share.a]\nsm = 12.5\n[grant.env]\nA = \"b\"\n",
    );
    assert_eq!(one(&to_toml(&config).unwrap()), config);
    assert_eq!(one(&to_toml(&Config::default()).unwrap()), Config::default());
    let without = one("[grant.env]\nXLA_PYTHON_CLIENT_MEM_FRACTION = \"\"\n");
    assert_eq!(one(&to_toml(&without).unwrap()), without, "a shipped variable stays taken out");
}

/// Run by [`one_file_instead_of_all`], which sets the environment that it looks at.
#[test]
#[ignore = "a helper of one_file_instead_of_all"]
fn sees_the_file_of_its_environment() {
    assert_eq!(sources().unwrap(), [PathBuf::from("/nowhere/one.toml")]);
    assert!(load().unwrap_err().to_string().starts_with("configuration /nowhere/one.toml cannot be read"));
}

#[test]
fn one_file_instead_of_all() {
    let seen_with = |value: &str| {
        std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "config_files::load::tests::sees_the_file_of_its_environment"])
            .env("SUBLET_CONFIG", value)
            .output()
            .map(|output| {
                (output.status.success(), String::from_utf8_lossy(&output.stdout).contains("1 passed"))
            })
    };
    assert_eq!(seen_with("/nowhere/one.toml").unwrap(), (true, true));
    assert_eq!(seen_with("").unwrap(), (false, false));
}

#[test]
fn with_no_file_there_are_the_defaults() {
    let nowhere = tempfile::tempdir().unwrap();
    let missing = nowhere.path().join("missing");
    assert_eq!(files(&missing, &missing).unwrap(), Vec::<PathBuf>::new());
    assert_eq!(merge(&[]).unwrap(), Config::default());
    assert_eq!(merge_runtime(&[]).unwrap(), Runtime::default());
}

#[test]
fn files_from_weakest_to_strongest() {
    let root = tempfile::tempdir().unwrap();
    let (etc, usr) = (root.path().join("etc"), root.path().join("usr"));
    for name in ["etc/conf.d/20-b.toml", "etc/conf.d/10-a.toml", "etc/config.toml", "usr/conf.d/30-c.toml"] {
        let path = root.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "").unwrap();
    }
    for ignored in
        ["usr/conf.d/10-a.toml", "etc/conf.d/.hidden.toml", "etc/conf.d/10-a.toml.bak", "etc/conf.d/README"]
    {
        std::fs::write(root.path().join(ignored), "").unwrap();
    }
    assert_eq!(
        files(&etc, &usr).unwrap(),
        [
            usr.join("conf.d/30-c.toml"),
            etc.join("config.toml"),
            etc.join("conf.d/10-a.toml"),
            etc.join("conf.d/20-b.toml")
        ]
    );
}

#[test]
fn stronger_values_replace_weaker_ones_and_device_rules_add_up() {
    let config = merge(&[
        file(
            "/usr.toml",
            "[placement]\npolicy = \"spread\"\n[limits]\ntime_slice_max = 4\nrequire = [\"sm\", \"memory\"]\n\
             [[device]]\nmatch = \"all\"\n[share.s]\nsm = 25\nmemory = \"8GiB\"\n",
        ),
        file(
            "/etc.toml",
            "[limits]\nrequire = []\nsm_overcommit = 2\n[[device]]\nmatch = 1\n[[device]]\nmatch = 0\n[share.s]\nsm = 50\n",
        ),
    ])
    .unwrap();
    assert_eq!(config.placement.policy, Policy::Spread);
    assert_eq!((config.limits.time_slice_max, config.limits.require.len()), (4, 0));
    assert!((config.limits.sm_overcommit - 2.0).abs() < 1e-9);
    let matches: Vec<_> = config.device.iter().map(|rule| rule.matches.as_str()).collect();
    assert_eq!(matches, ["1", "0", "all"]);
    assert_eq!(config.share["s"]["sm"], "50");
    assert_eq!(config.share["s"]["memory"], "8GiB");
}

#[test]
fn environment_of_frameworks_adds_up_too() {
    let config = one("[grant.env]\nMINE = \"${SUBLET_SM_PERCENT}\"\n");
    let names: Vec<_> = config.grant.env.keys().map(String::as_str).collect();
    assert_eq!(names, ["MINE", "XLA_PYTHON_CLIENT_MEM_FRACTION"]);
    let none = one("[grant.env]\nXLA_PYTHON_CLIENT_MEM_FRACTION = \"\"\n");
    assert!(none.grant.env.is_empty());
}

#[test]
fn fractions_of_the_ceiling_are_not_lost() {
    assert_eq!(one("[limits]\nsm_overcommit = 1.15\n").sm_bookable().thousandths(), 115_000);
}

#[test]
fn unknown_keys() {
    assert_snapshot!(refused("[limits]\n\n  sm_overcomit = 1.5\n"), @"configuration /c.toml:3:3: unknown key `sm_overcomit`, did you mean sm_overcommit?; why: expected one of `sm_overcommit`, `memory_overcommit`, `time_slice_max`, `reserve`, `require`, `wait_max`, `capabilities`, `allow_privileged`, `allow_devices`");
    assert_snapshot!(refused("[limit]\n"), @"configuration /c.toml:1:2: unknown key `limit`, did you mean limits?; why: expected one of `state_dir`, `runtime`, `driver`, `defaults`, `device`, `limits`, `placement`, `mps`, `grant`, `mig`, `cdi`, `guard`, `retry`, `suspend`, `slurm`, `accounting`, `policy`, `share`");
    assert_snapshot!(refused("[guard]\nkill = true\n"), @"configuration /c.toml:2:1: unknown key `kill`; why: expected one of `enabled`, `period`, `memory_tolerance`, `memory`, `bypass`, `clients`, `strict_clients`, `left`, `silent`, `strangers`");
    assert_snapshot!(refused("[guard]\nperiod = \"20ms\"\n"), @"configuration /c.toml:2:1: guard.period must be from 100ms to 10s");
    assert_snapshot!(refused("[guard]\nstrangers = \"container\"\n"), @r#"configuration /c.toml:2:1: guard.strangers must be "report" or "terminate": strangers have no container"#);
    assert_snapshot!(refused("[defaults]\nmode = \"timeslice\"\n"), @"configuration /c.toml:2:8: defaults.mode: unknown value `timeslice`, did you mean time-slice?; why: expected one of `time-slice`, `mps`, `mig`, `exclusive`");
    assert_snapshot!(refused("\"\\u001b[2J\" = 1\n"), @r#"configuration /c.toml:1:1: unknown key `\u{1b}[2J`; why: expected one of `state_dir`, `runtime`, `driver`, `defaults`, `device`, `limits`, `placement`, `mps`, `grant`, `mig`, `cdi`, `guard`, `retry`, `suspend`, `slurm`, `accounting`, `policy`, `share`"#);
}

#[test]
fn wrong_values() {
    assert_snapshot!(refused("[limits]\nsm_overcommit = 0\n"), @"configuration /c.toml:2:1: limits.sm_overcommit must be over 0 and at most 100");
    assert_snapshot!(refused("[limits]\nmemory_overcommit = nan\n"), @"configuration /c.toml:2:1: limits.memory_overcommit must be over 0 and at most 100");
    assert_snapshot!(refused("[limits]\nmemory_overcommit = 1e309\n"), @"configuration /c.toml:2:21: floating-point number overflowed");
    assert_snapshot!(refused("[limits]\ntime_slice_max = 0\n"), @"configuration /c.toml:2:1: limits.time_slice_max must be 1 or more");
    assert_snapshot!(refused("[limits]\ntime_slice_max = -1\n"), @"configuration /c.toml:2:18: limits.time_slice_max must be a whole number from 0 to 4294967295, not -1");
    assert_snapshot!(refused("[limits]\nreserve = 512\n"), @r#"configuration /c.toml:2:11: limits.reserve: "512" must be an amount with a unit, such as 512MiB, or 0"#);
    assert_snapshot!(refused("[defaults]\nwait = \"2m\"\n"), @"configuration /c.toml:2:1: defaults.wait must be at most [limits] wait_max");
    assert_snapshot!(refused("[limits]\nwait_max = \"61m\"\n"), @"configuration /c.toml:2:1: limits.wait_max must be at most 60m");
    assert_snapshot!(refused("[mps]\nstart_timeout = \"soon\"\n"), @r#"configuration /c.toml:2:17: mps.start_timeout: "soon" must be 0 or a whole number of ms, s or m, such as 10s"#);
    assert_snapshot!(refused("[mps]\nstart_timeout = \"0\"\n"), @"configuration /c.toml:2:1: mps.start_timeout must be over 0");
    assert_snapshot!(refused("[suspend]\nlimit = \"61m\"\n"), @"configuration /c.toml:2:1: suspend.limit must be at most 60m: the engine waits with the start");
    assert_snapshot!(refused("state_dir = \"run\"\n"), @"configuration /c.toml:1:1: state_dir must be an absolute path");
    assert_snapshot!(refused("[cdi]\nspec = \"run/s.json\"\n"), @"configuration /c.toml:2:1: cdi.spec must be an absolute path");
    assert_snapshot!(refused("[cdi]\nspec = \"/run/sublet\"\n"), @"configuration /c.toml:2:1: cdi.spec must end in .json: engines read no other files");
    assert_snapshot!(refused("state_dir = \"/0123456789012345678901234567890123456789\"\n"), @"configuration /c.toml:1:1: state_dir must be at most 38 bytes long, because paths of MPS sockets below it may have 107");
    assert_snapshot!(refused("[runtime]\nlow_level = []\n"), @r#"configuration /c.toml:2:1: runtime.low_level must name one low-level runtime or more, such as ["runc", "crun"]"#);
    assert_snapshot!(refused("[[device]]\nmatch = 0\n\n[[device]]\nmatch = \"left\"\n"), @r#"configuration /c.toml:5:1: device.1.match must be all, an index, GPU-<uuid>, PCI bus id, MIG-<uuid>, "G:M" or model:<glob>"#);
    assert_snapshot!(refused("[[device]]\nname = \"left\"\n"), @"configuration /c.toml:1:1: missing key `match`");
    assert_snapshot!(refused("[[device]]\nmatch = 0\nname = \"a,b\"\n"), @"configuration /c.toml:3:1: device.0.name must be a word without commas and spaces, at most 128 bytes long");
    assert_snapshot!(refused("[mig]\nlayout = \"l.toml\"\n"), @"configuration /c.toml:2:1: mig.layout must be an absolute path");
    assert_snapshot!(refused("[grant.env]\n\"A=B\" = \"x\"\n"), @"configuration /c.toml:2:1: grant.env.A=B is not a valid name of an environment variable");
    assert_snapshot!(refused("[limits\n"), @"configuration /c.toml:1:8: unclosed table; why: expected `]`");
}

#[test]
fn the_longest_state_directory() {
    assert!(merge(&[file("/c", "state_dir = \"/0123456789012345678901234567890123456\"\n")]).is_ok());
}

#[test]
fn shares_that_make_no_request() {
    assert_snapshot!(refused("[share.small]\nmode = \"mps\"\nsm = 0.25\n"), @"configuration /c.toml:3:1: sublet.sm=0.25 (from [share.small]): a quarter of a percent? write 25; why: it must be a percentage over 0 up to 100, such as 25, 25% or 12.5");
    assert_snapshot!(refused("[share.small]\nvram = \"8GiB\"\n"), @"configuration /c.toml:2:1: sublet.vram=8GiB (from [share.small]): unknown key, did you mean sublet.memory?; why: the keys are sublet.gpu, sublet.mode, sublet.sm, sublet.memory, sublet.mig, sublet.mig-caps, sublet.isolation, sublet.priority, sublet.processes, sublet.capabilities, sublet.wait, sublet.guard, sublet.suspend, sublet.owner, visible_devices, default_directory");
    assert_snapshot!(refused("[share.a]\nshare = \"b\"\n[share.b]\nsm = 25\n"), @"configuration /c.toml:2:1: sublet.share=b (from [share.a]): unknown key; why: the keys are sublet.gpu, sublet.mode, sublet.sm, sublet.memory, sublet.mig, sublet.mig-caps, sublet.isolation, sublet.priority, sublet.processes, sublet.capabilities, sublet.wait, sublet.guard, sublet.suspend, sublet.owner, visible_devices, default_directory");
    assert_snapshot!(refused("[share.\"../x\"]\nsm = 25\n"), @"configuration /c.toml:1:8: share.../x must be named with letters, digits, '-', '_' and '.'");
    let files =
        [file("/weak", "[share.a]\nmode = \"exclusive\"\n"), file("/strong", "\n[share.a]\nsm = 25\n")];
    assert_snapshot!(merge(&files).unwrap_err(), @"configuration /strong:3:1: sublet.sm=25 (from [share.a]) cannot be combined with sublet.mode=exclusive (from [share.a]); why: only MPS limits SMs; fix: write sublet.mode=mps or leave sublet.sm out");
    assert!(merge(&[file("/c", "[limits]\nrequire = [\"memory\"]\n[share.a]\nsm = 25\n")]).is_ok());
}

#[test]
fn policies_of_all_files_are_kept_and_their_faults_are_named() {
    let files = [
        file("/a", "[[policy]]\nuser = \"*\"\nleases = 1\n"),
        file(
            "/b",
            "policy = [{ group = 44, sm = \"150%\", memory = \"16GiB\", modes = [\"mps\"], devices = [0] }]\n",
        ),
    ];
    let policy = merge(&files).unwrap().policy;
    assert_eq!((policy[0].group.as_deref(), policy[1].user.as_deref()), (Some("44"), Some("*")));
    assert_eq!(policy[0].sm.map(|sm| sm.to_string()).as_deref(), Some("150"));
    assert_eq!((policy[0].memory, policy[1].memory), (Some(16 << 30), None));
    assert_eq!(policy[0].devices.as_ref().map(|devices| devices[0].to_string()).as_deref(), Some("0"));
    assert_snapshot!(refused("[[policy]]\nleases = 1\n"), @r#"configuration /c.toml:1:1: policy.0 must name either a user ("*" for all) or a group"#);
    assert_snapshot!(refused("[[policy]]\nuser = 1\ngroup = 1\n"), @r#"configuration /c.toml:1:1: policy.0 must name either a user ("*" for all) or a group"#);
    assert_snapshot!(refused("[[policy]]\nuser = 1\nsm = 0\n"), @r#"configuration /c.toml:3:6: policy.0.sm: "0" must be a sum of percentages over 0, such as 50 or 150%"#);
    assert_snapshot!(refused("[[policy]]\nuser = 1\nmodes = []\n"), @"configuration /c.toml:3:1: policy.0.modes is empty");
    assert_snapshot!(refused("[[policy]]\nuser = 1\ndevices = [\"GPU-\"]\n"), @"configuration /c.toml:3:1: policy.0.devices must be a list of selectors as in sublet.gpu: indices, GPU-<uuid>, PCI bus ids, name:<alias>, model:<glob>");
}

#[test]
fn a_shown_policy_can_be_read_again() {
    let text = "[[policy]]\nuser = \"a\"\nmodes = [\"mps\"]\nsm = 12.5\nmemory = \"1GiB\"\ndevices = [0]\nleases = 2\n\
                [[policy]]\ngroup = \"b\"\n";
    let config = one(text);
    assert_eq!(config.policy.len(), 2);
    assert_eq!(one(&to_toml(&config).unwrap()), config);
}

#[test]
fn the_runtime_alone_needs_nothing_else_to_be_right() {
    let runtime = |text: &str| merge_runtime(&[file("/c.toml", text)]).map(|runtime| runtime.low_level);
    let crun = "[runtime]\nlow_level = [\"crun\"]\n";
    for other in [
        "[nonsense]\na = 1\n",
        "[limits]\nsm_overcommit = 0\n",
        "[guard]\n",
        "[limits]\nx = = 1\n",
        "[share.a\n",
    ] {
        assert_eq!(runtime(&format!("{crun}{other}")).unwrap(), ["crun"], "{other}");
        assert_eq!(runtime(other).unwrap(), ["runc", "crun"], "{other}");
    }
    assert_eq!(runtime(&format!("[limits]\nx = = 1\n{crun}")).unwrap(), ["crun"]);
}

#[test]
fn errors_of_the_runtime_table_are_found() {
    let refused = |text: &str| merge_runtime(&[file("/c.toml", text)]).unwrap_err();
    assert_snapshot!(refused("[runtime]\nlow_levl = [\"crun\"]\n"), @"configuration /c.toml:2:1: unknown key `low_levl`, did you mean low_level?; why: expected one of `low_level`, `log`, `without_share`");
    assert_snapshot!(refused("[runtime]\nlow_level = [\"crun\"\n"), @"configuration /c.toml:2:20: unclosed array; why: expected `]`");
    assert_snapshot!(refused("\n[runtime]\nlow_level = [\"\"]\n"), @r#"configuration /c.toml:3:1: runtime.low_level must name one low-level runtime or more, such as ["runc", "crun"]"#);
    assert_snapshot!(refused("[runtime]\nlog = \"l\"\n"), @"configuration /c.toml:2:1: runtime.log must be an absolute path");
    refused("[runtime\nlow_level = [\"crun\"]\n");
    refused("runtime.low_level = [\"crun\"\n");
    refused("[runtime]\nlow_level = [\"crun\"\n[share.x]\nsm = 25\n");
}

#[test]
fn the_strongest_runtime_counts() {
    let files = [
        file("/a", "[runtime]\nlow_level = [\"crun\"]\nlog = \"/l\"\n"),
        file("/b", "[runtime]\nlow_level = [\"runc\"]\n"),
    ];
    let runtime = merge_runtime(&files).unwrap();
    assert_eq!((runtime.low_level, runtime.log), (vec!["runc".to_owned()], Some("/l".into())));
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("x.toml");
    let message = read(&[missing]).err().unwrap().to_string();
    assert!(message.ends_with("x.toml cannot be read: No such file or directory (os error 2)"), "{message}");
    let binary = directory.path().join("b.toml");
    std::fs::write(&binary, b"[limits]\n\xff = 1\n").unwrap();
    let message = merge(&read(&[binary]).unwrap()).unwrap_err().to_string();
    assert!(message.contains("b.toml:2:1: "), "{message}");
}

proptest::proptest! {
    #[test]
    fn whatever_stands_in_a_file_gives_a_configuration_or_a_line(text in "[\\[\\]a-z_.=\"0-9\n\r\0\u{1b}é#' ,{}-]{0,200}") {
        let files = [file("/c.toml", &text)];
        for message in [merge(&files).map(drop), merge_runtime(&files).map(drop)].into_iter().filter_map(Result::err) {
            let message = message.to_string();
            proptest::prop_assert!(message.starts_with("configuration /c.toml:"), "{}", message);
            proptest::prop_assert!(!message.contains(char::is_control), "{:?}", message);
        }
    }
}
