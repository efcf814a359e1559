//! How values are written for people, in tables and in `sublet top`.

pub mod bars;
pub mod device;
pub mod lease;

use std::io::IsTerminal as _;

use clap::ValueEnum;

use sublet_core::text::safe_long;

/// Colour only on a terminal, and not against `NO_COLOR` (no-color.org).
pub fn colour() -> bool {
    std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Memory as `8 GiB`, `1.5 GiB`, `512 MiB`: exact if that is short, otherwise rounded to a tenth.
pub fn memory(bytes: u64) -> String {
    const GIB: u64 = 1 << 30;
    if bytes < GIB {
        return format!("{} MiB", bytes >> 20);
    }
    if bytes % GIB == 0 {
        return format!("{} GiB", bytes / GIB);
    }
    let tenths = bytes / (GIB / 10);
    format!("{}.{} GiB", tenths / 10, tenths % 10)
}

/// The memory of a lease, or `unlimited` if it has no limit.
pub fn memory_limit(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "unlimited".to_owned(), memory)
}

/// The time since `since`, such as `3m 20s`.
pub fn ago(since: u64) -> String {
    let seconds = sublet_core::process::epoch_seconds().saturating_sub(since);
    humantime::format_duration(std::time::Duration::from_secs(seconds)).to_string()
}

/// The last `longest` characters of `text`, with an ellipsis where something is cut off before them.
pub fn end_of(text: &str, longest: usize) -> String {
    let length = text.chars().count();
    if length <= longest {
        return text.to_owned();
    }
    let end: String = text.chars().skip(length + 1 - longest).collect();
    format!("…{end}")
}

/// `text`, safe to print and not cut.
pub fn escaped(text: &str) -> String {
    safe_long(text, usize::MAX)
}

/// The word that stands for `value` on the command line.
pub fn name_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// The word that stands for `value` in JSON.
pub fn word(value: &impl serde::Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_reads_as_people_write_it() {
        let shown = [512 << 20, 8 << 30, 1536 << 20, 143_155 << 20].map(memory);
        assert_eq!(shown, ["512 MiB", "8 GiB", "1.5 GiB", "139.7 GiB"]);
        assert_eq!(memory_limit(None), "unlimited");
    }
}
