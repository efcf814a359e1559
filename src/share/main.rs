//! `sublet-share` prints a container's own share, inside the container. sublet mounts it beside nvidia-smi.
//!
//! Limits come from the variables that sublet has set in the container's environment, and the memory in use from
//! nvidia-smi: NVML in a container lists the processes of the container's PID namespace with their memory, in every mode
//! (docs/evidence/2026-11-23-h200-used.md). Use that cannot be separated from other containers' is unknown, printed as `–`.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

const USAGE: &str = "usage: sublet-share [--format table|json]

Prints this container's share of a GPU: mode, SMs, memory. The limits are for
each process that uses CUDA; the memory in use is that of all processes of the
container.";

/// The environment, as far as it is sublet's.
type Environment = BTreeMap<String, String>;

fn main() -> ExitCode {
    let arguments: Vec<String> =
        std::env::args_os().skip(1).map(|text| text.to_string_lossy().into_owned()).collect();
    let words: Vec<&str> = arguments.iter().flat_map(|text| text.splitn(2, '=')).collect();
    let show: fn(&Share) -> String = match words[..] {
        [] | ["--format", "table"] => table,
        ["--format", "json"] => json,
        ["-h" | "--help" | "help"] => return print(USAGE),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    let Some(mut share) = Share::of(&read_environment()) else {
        eprintln!(
            "sublet-share: neither this process nor the container's first one has the environment of a share"
        );
        return ExitCode::FAILURE;
    };
    share.used = used_bytes();
    print(&show(&share))
}

fn print(text: &str) -> ExitCode {
    // A reader who has left is no reason to fail.
    let _ = writeln!(std::io::stdout(), "{text}");
    ExitCode::SUCCESS
}

/// This process's environment. A process that was started without the container's environment, as by `exec` with
/// Podman's hook, has that of the container's first process.
fn read_environment() -> Environment {
    let own: Vec<u8> = fs::read("/proc/self/environ").unwrap_or_default();
    let own = sublets(&own);
    if own.contains_key("SUBLET_DEVICES") {
        return own;
    }
    sublets(&fs::read("/proc/1/environ").unwrap_or_default())
}

/// The variables of sublet in the text of `/proc/PID/environ`.
fn sublets(environ: &[u8]) -> Environment {
    let variables = environ.split(|byte| *byte == 0).filter_map(|one| std::str::from_utf8(one).ok());
    let named = variables.filter_map(|one| one.split_once('='));
    let ours = named.filter(|(name, _)| name.starts_with("SUBLET_"));
    ours.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// The share as the environment has it. A value that is missing or makes no sense is `None`.
#[derive(Debug, PartialEq)]
struct Share {
    mode: Option<String>,
    devices: Vec<String>,
    /// In percent, of each process.
    sm: Option<f64>,
    /// In bytes, of each process.
    memory: Option<u64>,
    /// In bytes, by all processes of the container together.
    used: Option<u64>,
    processes: Option<u32>,
    neighbours: Option<u32>,
}

impl Share {
    fn of(environment: &Environment) -> Option<Self> {
        // Nothing that a terminal or a JSON parser would act on.
        let plain = |text: &&str| {
            !text.is_empty()
                && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '/' | '.'))
        };
        let text = |name: &str| environment.get(name).map(String::as_str).filter(plain);
        let number = |name: &str| text(name)?.parse::<u32>().ok();
        let percent =
            |text: &str| text.parse::<f64>().ok().filter(|percent| *percent > 0.0 && *percent <= 100.0);
        let devices: Vec<String> =
            environment.get("SUBLET_DEVICES")?.split(',').filter(plain).map(str::to_owned).collect();
        Some(Self {
            mode: text("SUBLET_MODE").map(str::to_owned),
            devices,
            sm: text("SUBLET_SM_PERCENT").and_then(percent),
            memory: text("SUBLET_MEMORY_BYTES").and_then(|bytes| bytes.parse().ok()),
            used: None,
            processes: number("SUBLET_PROCESSES"),
            neighbours: number("SUBLET_NEIGHBOURS"),
        })
    }
}

fn table(share: &Share) -> String {
    let each = match share.processes {
        Some(count) if count > 1 => format!(" for each of {count} processes"),
        _ => String::new(),
    };
    let limit = |limit: Option<String>| limit.map_or_else(|| "no limit".to_owned(), |limit| limit + &each);
    let mut rows = vec![
        ("mode", share.mode.clone().unwrap_or_else(|| "–".to_owned())),
        ("SMs", limit(share.sm.map(|sm| format!("{sm} %")))),
        ("memory", limit(share.memory.map(amount))),
        ("used", share.used.map_or_else(|| "–".to_owned(), amount)),
    ];
    if let Some(neighbours) = share.neighbours {
        rows.push(("neighbours", format!("{neighbours} when this container started")));
    }
    rows.extend(share.devices.iter().map(|device| ("device", device.clone())));
    let lines: Vec<_> = rows.into_iter().map(|(name, value)| format!("{name:<10}  {value}")).collect();
    lines.join("\n")
}

/// Bytes, in GiB if they are whole, otherwise in MiB, as sublet gives them out.
fn amount(bytes: u64) -> String {
    if bytes % (1 << 30) == 0 { format!("{} GiB", bytes >> 30) } else { format!("{} MiB", bytes >> 20) }
}

fn json(share: &Share) -> String {
    fn or_null(value: Option<impl ToString>) -> String {
        value.map_or_else(|| "null".to_owned(), |value| value.to_string())
    }
    let quoted = |text: &String| format!("\"{text}\"");
    let devices: Vec<_> = share.devices.iter().map(quoted).collect();
    format!(
        "{{\"schema\":\"sublet.share/1\",\"mode\":{},\"devices\":[{}],\"sm_percent\":{},\"memory_bytes\":{},\
         \"used_bytes\":{},\"processes\":{},\"neighbours\":{}}}",
        or_null(share.mode.as_ref().map(quoted)),
        devices.join(","),
        or_null(share.sm),
        or_null(share.memory),
        or_null(share.used),
        or_null(share.processes),
        or_null(share.neighbours)
    )
}

/// Where sublet mounts the driver's program.
const SMI: &str = "/usr/bin/nvidia-smi";

/// A driver that does not answer is no reason to wait longer.
const LIMIT: Duration = Duration::from_secs(5);

/// The GPU memory that this container's processes use, in bytes; `None` if it is not known.
fn used_bytes() -> Option<u64> {
    // In the host's PID namespace the kernel's threads are listed, and so are the processes of other containers.
    if fs::read_to_string("/proc/2/comm").is_ok_and(|name| name.trim_end() == "kthreadd") {
        return None;
    }
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    sum(&listed()?, |pid| {
        let theirs = cgroups(pid);
        (!theirs.is_empty()).then(|| theirs.iter().any(|theirs| is_below(theirs, &own)))
    })
}

/// The cgroups of each thread of a process: of an ended thread cgroup v1 shows the root, also where other threads go on.
fn cgroups(pid: u32) -> Vec<String> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.filter_map(|thread| fs::read_to_string(thread.path().join("cgroup")).ok()).collect()
}

/// The output of nvidia-smi: a line for each process with its pid and MiB.
fn listed() -> Option<String> {
    let mut child = Command::new(SMI)
        .args(["--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let begun = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if begun.elapsed() < LIMIT => std::thread::sleep(Duration::from_millis(10)),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
        }
    };
    let mut text = String::new();
    // The child has ended, so this does not wait. Longer output than a pipe holds (64 KiB) ends at the limit above.
    child.stdout.take()?.read_to_string(&mut text).ok()?;
    status.success().then_some(text)
}

/// The sum of the processes that `is_own`. `None` if a line, or whose a process is, is not understood.
fn sum(text: &str, is_own: impl Fn(u32) -> Option<bool>) -> Option<u64> {
    let mut total = 0_u64;
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let (pid, mib) = line.split_once(',')?;
        let mib: u64 = mib.trim().parse().ok()?;
        if is_own(pid.trim().parse().ok()?)? {
            total = total.checked_add(mib.checked_mul(1 << 20)?)?;
        }
    }
    Some(total)
}

/// Whether a process with the cgroups `theirs` is in the cgroups `own` or below, in each hierarchy (cgroups(7),
/// `/proc/PID/cgroup`). Containers of a pod can share a PID namespace, but not a cgroup.
fn is_below(theirs: &str, own: &str) -> bool {
    let count = own.lines().count();
    count == theirs.lines().count()
        && own.lines().zip(theirs.lines()).all(|(own, theirs)| {
            let rest = theirs.strip_prefix(own.trim_end_matches('/'));
            // A path with `..` is outside the root of this cgroup namespace.
            rest.is_some_and(|rest| (rest.is_empty() || rest.starts_with('/')) && !rest.starts_with("/.."))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(environ: &str) -> Option<Share> {
        Share::of(&sublets(environ.replace(' ', "\0").as_bytes()))
    }

    #[test]
    fn the_share_in_the_environment_is_shown() {
        let environ = "A=b SUBLET_DEVICES=GPU-1 SUBLET_MODE=mps SUBLET_SM_PERCENT=12.5 SUBLET_MEMORY_BYTES=8589934592 \
                    SUBLET_PROCESSES=2 SUBLET_NEIGHBOURS=1 ";
        let mut share = share(environ).unwrap();
        share.used = Some(516 << 20);
        assert_eq!(
            table(&share),
            "mode        mps\nSMs         12.5 % for each of 2 processes\nmemory      8 GiB for each of 2 processes\n\
             used        516 MiB\nneighbours  1 when this container started\ndevice      GPU-1"
        );
        assert_eq!(
            json(&share),
            r#"{"schema":"sublet.share/1","mode":"mps","devices":["GPU-1"],"sm_percent":12.5,"memory_bytes":8589934592,"used_bytes":541065216,"processes":2,"neighbours":1}"#
        );
    }

    #[test]
    fn missing_and_senseless_variables_are_left_out() {
        assert_eq!(share("PATH=/bin SUBLET_MODE=mps"), None);
        let odd = "SUBLET_DEVICES=GPU-1,\u{1b}[2J,GPU-2 SUBLET_MODE=\"}, SUBLET_SM_PERCENT=1e9 SUBLET_MEMORY_BYTES=-1";
        let share = share(odd).unwrap();
        assert_eq!(
            json(&share),
            r#"{"schema":"sublet.share/1","mode":null,"devices":["GPU-1","GPU-2"],"sm_percent":null,"memory_bytes":null,"used_bytes":null,"processes":null,"neighbours":null}"#
        );
        assert_eq!(
            table(&share),
            "mode        –\nSMs         no limit\nmemory      no limit\nused        –\ndevice      GPU-1\ndevice      GPU-2"
        );
        assert_eq!(amount(1536 << 20), "1536 MiB");
        // Numbers that are none in JSON.
        for (percent, shown) in [(".5", "0.5"), ("12.", "12"), ("1e1", "10")] {
            let share = self::share(&format!("SUBLET_DEVICES=GPU-1 SUBLET_SM_PERCENT={percent}")).unwrap();
            assert!(json(&share).contains(&format!("\"sm_percent\":{shown},")), "{shown}");
        }
    }
}

#[cfg(test)]
mod used_tests {
    use super::*;

    #[test]
    fn only_the_containers_own_processes_count() {
        let own = |pid| Some(pid < 100);
        assert_eq!(sum("1, 2518\n7, 516\n200, 9000\n", own), Some(3034 << 20));
        assert_eq!(sum("", own), Some(0));
        assert_eq!(sum("1, [N/A]\n", own), None);
        assert_eq!(sum("1, 2518\n", |_| None), None);
        assert_eq!(sum("No devices were found\n", own), None);
    }

    #[test]
    fn a_cgroup_of_another_container_is_not_below() {
        assert!(is_below("0::/\n", "0::/\n"));
        assert!(is_below("0::/init.scope\n", "0::/\n"));
        assert!(!is_below("0::/../other\n", "0::/\n"));
        assert!(is_below("0::/docker/a/b\n", "0::/docker/a\n"));
        assert!(!is_below("0::/docker/ab\n", "0::/docker/a\n"));
        assert!(!is_below("2:cpu:/a\n1:memory:/b\n", "2:cpu:/a\n1:memory:/a\n"));
        assert!(!is_below("", "0::/\n"));
    }
}
