//! Bars for tables: what is used of a whole, and what is booked.

/// Used, booked and free; where the terminal shows no UTF-8, the second.
const MARKS: [[char; 3]; 2] = [['█', '▒', '·'], ['#', '=', '.']];

/// A bar of `width` characters: the used part, then the booked and unused part, then the rest. Both are fractions of 1.
/// `None` is unknown, and is shown as empty.
pub fn bar(used: Option<f64>, booked: Option<f64>, width: usize, utf8: bool) -> String {
    let [full, half, empty] = MARKS[usize::from(!utf8)];
    let [used, booked] = [used, booked].map(|part| characters(part.unwrap_or_default(), width));
    let mark = |at| match () {
        () if at < used => full,
        () if at < booked => half,
        () => empty,
    };
    (0..width).map(mark).collect()
}

/// The nearest number of characters; a part that is not nothing has at least one.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "0 to `width`"
)]
fn characters(part: f64, width: usize) -> usize {
    let exact = part.clamp(0.0, 1.0) * width as f64;
    if exact > 0.0 { (exact.round() as usize).max(1) } else { 0 }
}

/// Whether the user's terminal shows UTF-8: the first of these variables that is set decides (locale(7)).
pub fn utf8() -> bool {
    let set = ["LC_ALL", "LC_CTYPE", "LANG"]
        .into_iter()
        .find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()));
    is_utf8(&set.unwrap_or_default())
}

fn is_utf8(locale: &str) -> bool {
    let codeset = locale.split('.').nth(1).and_then(|rest| rest.split('@').next()).unwrap_or_default();
    codeset.replace('-', "").eq_ignore_ascii_case("utf8")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_show_what_is_used_and_what_is_booked() {
        let shown = |used, booked| bar(used, booked, 10, false);
        assert_eq!(shown(Some(0.3), Some(0.5)), "###==.....");
        assert_eq!(shown(Some(0.7), Some(0.5)), "#######...", "more than is booked");
        assert_eq!(shown(None, Some(1.0)), "==========");
        assert_eq!(shown(Some(0.001), None), "#.........", "a little is not nothing");
        assert_eq!(shown(Some(7.0), Some(f64::NAN)), "##########");
        assert_eq!(bar(Some(0.5), Some(0.75), 4, true), "██▒·");
        assert_eq!(bar(Some(0.5), None, 0, true), "");
    }

    #[test]
    fn the_locale_tells_what_a_terminal_shows() {
        let cases = [
            ("C.UTF-8", true),
            ("de_DE.utf8@euro", true),
            ("C", false),
            ("en_US.ISO-8859-1", false),
            ("", false),
        ];
        for (locale, expected) in cases {
            assert_eq!(is_utf8(locale), expected, "{locale}");
        }
    }
}
