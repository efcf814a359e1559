//! Points in time as `docker events` takes them: RFC 3339, a date, seconds since the epoch, or how long ago.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::Timestamp;
use jiff::tz::TimeZone;
use sublet_core::text::safe;

/// The moment that `text` means. Without an offset it is in UTC.
pub(crate) fn parse(text: &str) -> Result<SystemTime, String> {
    parse_at(text, SystemTime::now())
}

fn parse_at(text: &str, now: SystemTime) -> Result<SystemTime, String> {
    let moment = seconds(text).or_else(|| ago(text, now)).or_else(|| date(text));
    moment.ok_or_else(|| {
        format!(
            "{} is no time: write 2026-11-23T07:00:00Z, 2026-11-23, seconds since 1970, or how long ago, as 10m or \
             1h30m",
            safe(text)
        )
    })
}

/// Seconds since the epoch, perhaps with a fraction.
fn seconds(text: &str) -> Option<SystemTime> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let all_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !all_digits(whole) || !all_digits(fraction) || fraction.len() > 9 {
        return None;
    }
    let nanoseconds = format!("{fraction:0<9}").parse().ok()?;
    UNIX_EPOCH.checked_add(Duration::new(whole.parse().ok()?, nanoseconds))
}

fn ago(text: &str, now: SystemTime) -> Option<SystemTime> {
    let ago = humantime::parse_duration(text).ok()?;
    Some(now.checked_sub(ago).unwrap_or(UNIX_EPOCH).max(UNIX_EPOCH))
}

fn date(text: &str) -> Option<SystemTime> {
    let of_utc = || TimeZone::UTC.to_timestamp(text.parse().ok()?).ok();
    let moment = text.parse::<Timestamp>().ok().or_else(of_utc)?;
    Some(SystemTime::from(moment).max(UNIX_EPOCH))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_taken_in_every_form() {
        let now = UNIX_EPOCH + Duration::from_secs(1_795_251_600);
        let at = |text: &str| {
            let moment = parse_at(text, now).map(|moment| moment.duration_since(UNIX_EPOCH).unwrap());
            moment.map(|since| since.as_secs_f64()).ok()
        };
        let nine = 1_795_251_600.0;
        for text in [
            "2026-11-21T09:00:00Z",
            "2026-11-21T09:00:00",
            "2026-11-21 09:00:00",
            "2026-11-21T10:00:00+01:00",
            "2026-11-21T04:30:00-04:30",
            "1795251600",
            "0s",
        ] {
            assert_eq!(at(text), Some(nine), "{text}");
        }
        assert_eq!(at("1795251600.25"), Some(nine + 0.25));
        assert_eq!(at("2026-11-21"), Some(nine - 9.0 * 3600.0));
        assert_eq!(at("1h30m"), Some(nine - 5400.0));
        assert_eq!(at("99999years"), Some(0.0), "longer ago than time is");
        assert_eq!(at("999999999999"), Some(999_999_999_999.0), "shown as the end of the year 9999");
        for text in [
            "",
            "yesterday",
            "2026-13-01",
            "1795251600.",
            "-5",
            "2026-11-21T09:00:00+1:00",
            "99999999999999999999",
        ] {
            assert_eq!(at(text), None, "{text}");
        }
        assert!(parse("\u{1b}[2J").unwrap_err().starts_with("\\u{1b}[2J is no time"));
    }
}
