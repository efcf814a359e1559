//! Makes text from containers, images and files safe to print.

use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

/// Longest piece of foreign text that a message repeats, in characters.
const LONGEST: usize = 120;

/// The last second of the year 9999, since the epoch. RFC 3339 has four digits for a year.
pub(crate) const LAST_SECOND: u64 = 253_402_300_799;

/// `text` with control characters and other unprintables escaped, cut to a readable length.
///
/// Terminals act on escape sequences and journals split on newlines, so neither ever gets foreign text unescaped.
pub fn safe(text: &str) -> String {
    let mut out = String::with_capacity(text.len().min(LONGEST));
    for (count, character) in text.chars().enumerate() {
        if count == LONGEST {
            out.push('…');
            break;
        }
        if character.is_control() || is_invisible(character) {
            out.extend(character.escape_default());
        } else {
            out.push(character);
        }
    }
    out
}

/// [`safe`] of a path.
pub fn safe_path(path: &Path) -> String {
    safe(&path.to_string_lossy())
}

/// [`safe`] of a longer text, up to `most` characters.
pub fn safe_long(text: &str, most: usize) -> String {
    let characters: Vec<char> = text.chars().take(most).collect();
    characters.chunks(100).map(|piece| safe(&piece.iter().collect::<String>())).collect()
}

/// A message names this many devices or holders, and counts the rest.
const NAMED: usize = 4;

/// The first few of `texts`, and the number of the rest.
pub(crate) fn list_some(texts: impl Iterator<Item = String>, between: &str) -> String {
    let mut texts: Vec<String> = texts.collect();
    let rest = texts.len().saturating_sub(NAMED);
    texts.truncate(NAMED);
    let named = texts.join(between);
    if rest == 0 { named } else { format!("{named}{between}and {rest} more") }
}

/// The marks before the reason in a message, and before a way out.
const WHY: &str = "; why: ";
const FIX: &str = "; fix: ";

/// The first part of `message`, which stands alone.
pub fn first_line(message: &str) -> &str {
    let end = [WHY, FIX].iter().filter_map(|mark| message.find(mark)).min();
    &message[..end.unwrap_or(message.len())]
}

/// `message` with one more reason, which may be a message with a reason and ways out of its own.
pub fn add_why(message: &str, why: &str) -> String {
    let (said, fix) = message.split_at(message.find(FIX).unwrap_or(message.len()));
    let (why, way) = why.split_once(FIX).map_or((why, None), |(why, way)| (why, Some(way)));
    let mark = if said.contains(WHY) { "; " } else { WHY };
    let message = format!("{said}{mark}{}{fix}", why.replace(WHY, "; "));
    way.into_iter().fold(message, |message, way| add_fix(&message, way))
}

/// `message` with one more way out.
pub(crate) fn add_fix(message: &str, fix: &str) -> String {
    let mark = if message.contains(FIX) { "; or " } else { FIX };
    format!("{message}{mark}{fix}")
}

/// `message`, which is one line in logs and in JSON, as people read it: the reason and the way out begin new lines.
pub fn in_lines(message: &str) -> String {
    message.replace(WHY, "\nwhy: ").replace(FIX, "\nfix: ")
}

/// The messages in `text`, each in one line again.
pub(crate) fn in_one_line(text: &str) -> String {
    text.replace("\nwhy: ", WHY).replace("\nfix: ", FIX)
}

/// Longest name of a container in a table or in a list, in characters.
pub const LONGEST_NAME: usize = 32;

/// No longer than [`LONGEST_NAME`], and safe to print.
pub fn cut(name: &str) -> String {
    safe(&name.chars().take(LONGEST_NAME).collect::<String>())
}

/// A container's id as tables and messages have it: of one that an engine made, which has hexadecimal digits alone, the
/// first twelve characters, as engines show it. Other ids are names (`n1.alice.6.0.0`), of which every character may count.
pub fn short_id(id: &str) -> String {
    let is_made = id.bytes().all(|byte| byte.is_ascii_hexdigit());
    safe(&id.chars().take(if is_made { 12 } else { LONGEST_NAME }).collect::<String>())
}

/// Whether `id` is one that Docker or Podman gives; anything else names no file of theirs.
pub(crate) fn is_engine_id(id: &str) -> bool {
    id.len() == 64 && id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Characters that change how the text around them is shown: bidirectional marks, zero-width signs.
fn is_invisible(character: char) -> bool {
    matches!(character,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Seconds since the epoch as RFC 3339 in UTC. A later time, which a wrongly set clock may give, becomes the last
/// second that has such a form.
pub fn timestamp(seconds: u64) -> String {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds.min(LAST_SECOND))).to_string()
}

/// The candidate whose spelling is nearest to `word`; `None` if no spelling is near.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // Computing the distance takes the product of the lengths, and no text this long is a misspelling of a sublet word.
    if word.len() > 40 {
        return None;
    }
    let word = word.to_ascii_lowercase();
    candidates
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(&word, &candidate.to_ascii_lowercase()), candidate))
        .filter(|(distance, candidate)| *distance <= (candidate.chars().count() / 3).max(1))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_characters_that_a_terminal_would_act_on() {
        assert_eq!(safe("a\u{1b}[2Jb\nc\0"), "a\\u{1b}[2Jb\\nc\\u{0}");
        assert_eq!(safe("a\u{202e}b"), "a\\u{202e}b");
        assert_eq!(safe("8GiB Größe"), "8GiB Größe");
    }

    #[test]
    fn a_message_has_three_lines_or_one() {
        let bare = "GPU 0 is drained";
        let message = add_fix(&add_why(bare, "root did it"), "ask root");
        assert_eq!(message, "GPU 0 is drained; why: root did it; fix: ask root");
        assert_eq!((first_line(&message), first_line(bare)), (bare, bare));
        assert_eq!(first_line("no; fix: yes"), "no");
        let more = add_fix(&add_why(&message, "today"), "wait");
        assert_eq!(more, "GPU 0 is drained; why: root did it; today; fix: ask root; or wait");
        let lines = in_lines(&more);
        assert_eq!(lines, "GPU 0 is drained\nwhy: root did it; today\nfix: ask root; or wait");
        assert_eq!(in_one_line(&lines), more);
        let inner = add_why("no exec; fix: retry", "no answer; why: it hangs; fix: end it; or wait");
        assert_eq!(inner, "no exec; why: no answer; it hangs; fix: retry; or end it; or wait");
    }

    #[test]
    fn cuts_long_text() {
        assert_eq!(safe(&"x".repeat(1 << 20)).chars().count(), LONGEST + 1);
    }

    #[test]
    fn times_of_wrong_clocks_are_shown_up_to_the_last_one() {
        assert_eq!(timestamp(0), "1970-01-01T00:00:00Z");
        for late in [LAST_SECOND, LAST_SECOND + 1, u64::MAX] {
            assert_eq!(timestamp(late), "9999-12-31T23:59:59Z");
        }
    }
}
