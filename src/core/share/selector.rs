//! `sublet.gpu`: which devices, as users name them.

use std::num::NonZeroU32;

use super::{Devices, Selector};

/// The syntax of [`parse_devices`], for messages.
pub(crate) const SELECTORS_ALLOWED: &str = "any, any:<count>, all, or a list of an index, GPU-<uuid> (8 hex digits or \
     more), PCI bus id, MIG-<uuid>, \"G:M\" (quoted in YAML), name:<alias>, model:<glob>";

/// Longest alias or glob.
const LONGEST: usize = 128;

/// A whole value of `sublet.gpu`.
///
/// # Errors
/// It names no devices. The error may hold a hint.
pub(crate) fn parse_devices(text: &str) -> Result<Devices, Option<String>> {
    match text {
        "any" => return Ok(Devices::Any(NonZeroU32::MIN)),
        "all" => return Ok(Devices::All),
        _ => {}
    }
    if let Some(count) = text.strip_prefix("any:") {
        return digits(count).and_then(NonZeroU32::new).map(Devices::Any).ok_or(None);
    }
    let mut selectors = Vec::new();
    for item in text.split(',').map(|item| item.trim_matches(' ')) {
        let selector = Selector::parse(item).ok_or_else(|| hint(item))?;
        if selectors.contains(&selector) {
            return Err(Some("it names the same device twice".to_owned()));
        }
        selectors.push(selector);
        // No host has more devices. A longer list is an attack on the quadratic search above.
        if selectors.len() > 1024 {
            return Err(None);
        }
    }
    Ok(Devices::These(selectors))
}

fn hint(item: &str) -> Option<String> {
    if item == "all" || item.starts_with("any") {
        return Some("any and all cannot be part of a list".to_owned());
    }
    let near = || crate::text::nearest(item, ["any", "all"]).map(|word| format!("did you mean {word}?"));
    range(item).or_else(near).or_else(|| node(item)).or_else(|| {
        let is_word = item.len() <= LONGEST && item.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let is_name = is_word && item.starts_with(|first: char| first.is_ascii_alphabetic());
        is_name.then(|| format!("write model:*{item}* for a model, name:{item} for an alias"))
    })
}

/// For `nvidia0` and `gpu0`.
fn node(item: &str) -> Option<String> {
    let lower = item.to_ascii_lowercase();
    let number = lower.strip_prefix("nvidia").or_else(|| lower.strip_prefix("gpu"))?;
    digits(number).filter(|_| !number.is_empty()).map(|index| format!("write {index}"))
}

/// For `0-3`, which other programs take for a range.
fn range(item: &str) -> Option<String> {
    let (first, last) = item.split_once('-')?;
    let (first, last) = (digits(first)?, digits(last)?);
    let indices = (first..=last).take(17).map(|index| index.to_string()).collect::<Vec<_>>();
    (2..=16).contains(&indices.len()).then(|| format!("write {}", indices.join(",")))
}

impl Selector {
    /// One device as users name it, hexadecimal digits in lower case, or `None`.
    pub fn parse(text: &str) -> Option<Self> {
        if let Some(index) = digits(text) {
            return Some(Self::Index(index));
        }
        if let Some(uuid) = text.strip_prefix("GPU-") {
            return uuid_prefix(uuid).map(|uuid| Self::Uuid(format!("GPU-{uuid}")));
        }
        if let Some(uuid) = text.strip_prefix("MIG-") {
            return mig_uuid(uuid).map(|uuid| Self::MigUuid(format!("MIG-{uuid}")));
        }
        if let Some(name) = text.strip_prefix("name:") {
            return word(name).map(Self::Name);
        }
        if let Some(glob) = text.strip_prefix("model:") {
            return word(glob).map(Self::Model);
        }
        mig_index(text).or_else(|| bus_id(text).map(Self::BusId))
    }

    /// Whether it names a MIG device rather than a GPU.
    pub const fn is_mig(&self) -> bool {
        matches!(self, Self::MigUuid(_) | Self::MigIndex(..))
    }
}

fn digits(text: &str) -> Option<u32> {
    // `parse` alone would accept a leading `+` and any number of zeros.
    if text.len() <= 10 && text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}

fn word(text: &str) -> Option<String> {
    let fits = !text.is_empty() && text.len() <= LONGEST && !text.contains(char::is_control);
    fits.then(|| text.to_owned())
}

/// The beginning of a UUID (8-4-4-4-12), at least eight digits.
fn uuid_prefix(text: &str) -> Option<String> {
    let fits = (8..=36).contains(&text.len())
        && text.bytes().enumerate().all(|(position, byte)| match position {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        });
    fits.then(|| text.to_ascii_lowercase())
}

/// `<uuid>`, or the form of drivers before R470: `GPU-<uuid>/<gi>/<ci>`.
fn mig_uuid(text: &str) -> Option<String> {
    let Some(old) = text.strip_prefix("GPU-") else { return uuid_prefix(text) };
    let mut parts = old.split('/');
    let uuid = uuid_prefix(parts.next()?).filter(|uuid| uuid.len() == 36)?;
    let (gi, ci) = (digits(parts.next()?)?, digits(parts.next()?)?);
    parts.next().is_none().then(|| format!("GPU-{uuid}/{gi}/{ci}"))
}

fn mig_index(text: &str) -> Option<Selector> {
    let (gpu, device) = text.split_once(':')?;
    Some(Selector::MigIndex(digits(gpu)?, digits(device)?))
}

/// A bus id as the kernel writes it: `3b:00.0`, `0000:3b:00.0` and `00000000:3B:00.0` are the same. A domain has four digits,
/// or more where it needs them (drivers/pci/probe.c, `pci_setup_device`).
fn bus_id(text: &str) -> Option<String> {
    let text = text.to_ascii_lowercase();
    let (domain, rest) = match text.len() {
        7 => ("0", text.as_str()),
        12..=16 => text.split_once(':')?,
        _ => return None,
    };
    let shape = |(byte, wanted)| if wanted == b'x' { u8::is_ascii_hexdigit(&byte) } else { byte == wanted };
    let fits = domain.bytes().all(|byte| byte.is_ascii_hexdigit())
        && rest.len() == 7
        && rest.bytes().zip(*b"xx:xx.x").all(shape);
    let domain = u32::from_str_radix(domain, 16).ok().filter(|_| fits)?;
    Some(format!("{domain:04x}:{rest}"))
}

/// Whether `glob`, as in `model:<glob>` and in `containers.toml`, matches `text`: `*` stands for any number of characters, `?` for one. Case is ignored.
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

    const UUID: &str = "GPU-8d2e5f1a-0b3c-4d5e-8f90-a1b2c3d4e5f6";

    fn one(text: &str) -> Selector {
        match parse_devices(text) {
            Ok(Devices::These(selectors)) if selectors.len() == 1 => selectors[0].clone(),
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn any_and_all() {
        assert_eq!(parse_devices("any"), Ok(Devices::Any(NonZeroU32::MIN)));
        assert_eq!(parse_devices("any:2"), Ok(Devices::Any(NonZeroU32::new(2).unwrap())));
        assert_eq!(parse_devices("all"), Ok(Devices::All));
        for text in ["any:0", "any:", "any:+1", "any:4294967296"] {
            assert_eq!(parse_devices(text), Err(None), "{text}");
        }
        for text in ["0,any", "all,1", "any,any", "0,any:2"] {
            assert_eq!(
                parse_devices(text),
                Err(Some("any and all cannot be part of a list".into())),
                "{text}"
            );
        }
        assert_eq!(parse_devices("ALL"), Err(Some("did you mean all?".into())));
        assert_eq!(parse_devices("0-3"), Err(Some("write 0,1,2,3".into())));
        assert_eq!(parse_devices("nvidia0"), Err(Some("write 0".into())));
        assert_eq!(parse_devices("1,GPU2"), Err(Some("write 2".into())));
        let model = "write model:*rtx* for a model, name:rtx for an alias";
        assert_eq!(parse_devices("rtx"), Err(Some(model.into())));
        for text in ["3-0", "0-99", "-", "0-", "3-3"] {
            assert_eq!(parse_devices(text), Err(None), "{text}");
        }
    }

    #[test]
    fn every_way_to_name_a_device() {
        assert_eq!(one("0"), Selector::Index(0));
        assert_eq!(one(UUID), Selector::Uuid(UUID.into()));
        assert_eq!(one("GPU-8D2E5F1A"), Selector::Uuid("GPU-8d2e5f1a".into()));
        assert_eq!(one("GPU-8d2e5f1a-0b"), Selector::Uuid("GPU-8d2e5f1a-0b".into()));
        assert_eq!(one("3b:00.0"), Selector::BusId("0000:3b:00.0".into()));
        assert_eq!(one("0000:3b:00.0"), Selector::BusId("0000:3b:00.0".into()));
        assert_eq!(one("00000000:3B:00.0"), Selector::BusId("0000:3b:00.0".into()));
        for text in ["10000:3b:00.0", "00010000:3B:00.0", "010000:3b:00.0"] {
            assert_eq!(one(text), Selector::BusId("10000:3b:00.0".into()));
        }
        assert_eq!(
            one("MIG-9a1b2c3d-0b3c-4d5e-8f90-a1b2c3d4e5f6"),
            Selector::MigUuid("MIG-9a1b2c3d-0b3c-4d5e-8f90-a1b2c3d4e5f6".into())
        );
        assert_eq!(
            one("MIG-GPU-8d2e5f1a-0b3c-4d5e-8f90-a1b2c3d4e5f6/7/0"),
            Selector::MigUuid("MIG-GPU-8d2e5f1a-0b3c-4d5e-8f90-a1b2c3d4e5f6/7/0".into())
        );
        assert_eq!(one("0:1"), Selector::MigIndex(0, 1));
        assert_eq!(one("name:left"), Selector::Name("left".into()));
        assert_eq!(one("model:*H200*"), Selector::Model("*H200*".into()));
    }

    #[test]
    fn lists() {
        assert_eq!(
            parse_devices("1, 0,name:left"),
            Ok(Devices::These(vec![Selector::Index(1), Selector::Index(0), Selector::Name("left".into())]))
        );
        let twice = Err(Some("it names the same device twice".to_owned()));
        assert_eq!(parse_devices("0,1,0"), twice);
        assert_eq!(parse_devices("3b:00.0,0000:3B:00.0"), twice);
        let endless = (0..5000).map(|index| index.to_string()).collect::<Vec<_>>().join(",");
        assert_eq!(parse_devices(&endless), Err(None));
    }

    #[test]
    fn refuses_text_that_names_no_device() {
        for text in [
            "",
            ",",
            "0,",
            "-1",
            "+1",
            "1.0",
            "4294967296",
            "GPU-",
            "GPU-8d2e5f1",
            "GPU-8d2e5f1ag",
            "gpu-8d2e5f1a",
            "GPU-8d2e5f1a0b3c",
            "GPU-8d2e5f1a-0b3c-4d5e-8f90-a1b2c3d4e5f60",
            "MIG-",
            "MIG-GPU-8d2e5f1a/7/0",
            "MIG-GPU-8d2e5f1a-0b3c-4d5e-8f90-a1b2c3d4e5f6/7",
            "MIG-GPU-8d2e5f1a-0b3c-4d5e-8f90-a1b2c3d4e5f6/7/0/1",
            "0:",
            ":1",
            "0:1:2",
            "3b:00",
            "3b:00.g",
            "03b:00.0",
            "000010000:3b:00.0",
            "+0000:3b:00.0",
            "name:",
            "model:",
            "name:a\u{1b}b",
            "١",
        ] {
            assert_eq!(parse_devices(text), Err(None), "{text:?}");
        }
    }
}

#[cfg(test)]
mod glob_tests {
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
