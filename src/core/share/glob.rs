//! Globs, as in `model:<glob>` of selectors and in `containers.toml`.

/// Whether `glob` matches `text`: `*` stands for any number of characters, `?` for one. Case is ignored.
pub(crate) fn glob_matches(glob: &str, text: &str) -> bool {
    let (glob, text) = (glob.as_bytes(), text.as_bytes());
    let (mut g, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match glob.get(g) {
            Some(b'*') => {
                star = Some((g, t));
                g += 1;
            }
            Some(byte) if *byte == b'?' || byte.eq_ignore_ascii_case(&text[t]) => {
                g += 1;
                t += 1;
            }
            // The last star takes one character more.
            _ => match star.as_mut() {
                Some((at, taken)) => {
                    *taken += 1;
                    (g, t) = (*at + 1, *taken);
                }
                None => return false,
            },
        }
    }
    glob[g..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs() {
        for (glob, text) in [("*", ""), ("a*b*c", "aXbYbZc"), ("NVIDIA ?200", "nvidia h200"), ("**x", "x")] {
            assert!(glob_matches(glob, text), "{glob} {text}");
        }
        for (glob, text) in [("", "a"), ("a*b", "a"), ("?", ""), ("H200", "NVIDIA H200")] {
            assert!(!glob_matches(glob, text), "{glob} {text}");
        }
    }
}
