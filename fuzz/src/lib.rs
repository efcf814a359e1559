//! What all targets demand.

use std::fmt::Display;

/// Demands that `error` is one line that a terminal shows and does not obey.
pub fn is_safe(error: impl Display) {
    let text = error.to_string();
    let harmful = text
        .chars()
        .find(|&c| c.is_control() || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'));
    assert_eq!(harmful, None, "{text:?}");
}

/// The value, if there is one; an error has to be safe to print.
pub fn ok<T>(result: Result<T, impl Display>) -> Option<T> {
    result.map_err(is_safe).ok()
}
