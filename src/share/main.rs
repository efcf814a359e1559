//! `sublet-share` prints a container's own share, inside the container. sublet mounts it beside nvidia-smi.
//!
//! Limits come from the variables that sublet has set in the container's environment, and the memory in use from
//! nvidia-smi. What is not known is printed as `–`.

mod used;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::ExitCode;

const USAGE: &str = "usage: sublet-share [--format table|json]

Prints this container's share of a GPU: mode, SMs, memory. The limits are for each process that uses CUDA; the memory in use is
that of all processes of the container.";

/// The environment, as far as it is sublet's.
type Told = BTreeMap<String, String>;

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
    let Some(mut share) = Share::of(&told()) else {
        eprintln!(
            "sublet-share: neither this process nor the container's first one has the environment of a share"
        );
        return ExitCode::FAILURE;
    };
    share.used = used::bytes();
    print(&show(&share))
}

fn print(text: &str) -> ExitCode {
    // A reader who has left is no reason to fail.
    let _ = writeln!(std::io::stdout(), "{text}");
    ExitCode::SUCCESS
}

/// This process's environment. A process that was started without the container's environment, as by `exec` with
/// Podman's hook, has that of the container's first process.
fn told() -> Told {
    let own: Vec<u8> = std::fs::read("/proc/self/environ").unwrap_or_default();
    let own = sublets(&own);
    if own.contains_key("SUBLET_DEVICES") {
        return own;
    }
    sublets(&std::fs::read("/proc/1/environ").unwrap_or_default())
}

/// The variables of sublet in the text of `/proc/PID/environ`.
fn sublets(environ: &[u8]) -> Told {
    let variables = environ.split(|byte| *byte == 0).filter_map(|one| std::str::from_utf8(one).ok());
    let named = variables.filter_map(|one| one.split_once('='));
    let ours = named.filter(|(name, _)| name.starts_with("SUBLET_"));
    ours.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// What the container was told. What it was not told, or what makes no sense, is `None`.
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
    fn of(told: &Told) -> Option<Self> {
        // Nothing that a terminal or a JSON parser would act on.
        let plain = |text: &&str| {
            !text.is_empty()
                && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '/' | '.'))
        };
        let text = |name: &str| told.get(name).map(String::as_str).filter(plain);
        let number = |name: &str| text(name)?.parse::<u32>().ok();
        let percent =
            |text: &str| text.parse::<f64>().ok().filter(|percent| *percent > 0.0 && *percent <= 100.0);
        let devices: Vec<String> =
            told.get("SUBLET_DEVICES")?.split(',').filter(plain).map(str::to_owned).collect();
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

#[cfg(test)]
mod tests {
    use super::*;

    fn share(environ: &str) -> Option<Share> {
        Share::of(&sublets(environ.replace(' ', "\0").as_bytes()))
    }

    #[test]
    fn what_was_told_is_shown() {
        let told = "A=b SUBLET_DEVICES=GPU-1 SUBLET_MODE=mps SUBLET_SM_PERCENT=12.5 SUBLET_MEMORY_BYTES=8589934592 \
                    SUBLET_PROCESSES=2 SUBLET_NEIGHBOURS=1 ";
        let mut share = share(told).unwrap();
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
    fn what_was_not_told_or_makes_no_sense_is_left_out() {
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
        for (told, shown) in [(".5", "0.5"), ("12.", "12"), ("1e1", "10")] {
            let told = self::share(&format!("SUBLET_DEVICES=GPU-1 SUBLET_SM_PERCENT={told}")).unwrap();
            assert!(json(&told).contains(&format!("\"sm_percent\":{shown},")), "{shown}");
        }
    }
}
