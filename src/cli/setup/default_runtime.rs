//! What sublet's own configuration says where sublet is Docker's default runtime: containers without a share are meant
//! there. The shim reads nothing of Docker's, because that would cost every container.

use std::fs;
use std::io;
use std::path::Path;

use sublet_core::fs::atomic::replace_durably;
use sublet_core::fs::trusted;

/// The file, of sublet's own configuration.
pub(crate) const FILE: &str = "/etc/sublet/conf.d/docker-default.toml";

const TEXT: &str = "# Written by `sublet setup docker --default`; --undo removes it.\n\
                    [runtime]\nwithout_share = \"run\"\n";

/// Writes `file` if sublet is the default runtime, else removes it.
pub fn say(file: &Path, is_default: bool) -> io::Result<()> {
    let is_said = fs::read_to_string(file).is_ok_and(|text| text == TEXT);
    match (is_default, is_said) {
        (true, false) => {
            file.parent().map_or(Ok(()), trusted::create)?;
            replace_durably(file, TEXT.as_bytes(), 0o644)
        }
        (false, true) => fs::remove_file(file),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_as_long_as_it_is_so_and_a_file_of_others_stays() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("conf.d/x.toml");
        say(&file, false).unwrap();
        assert!(!file.exists());
        for _ in 0..2 {
            say(&file, true).unwrap();
            let config = sublet_core::config_files::load_files(std::slice::from_ref(&file)).unwrap();
            assert_eq!(config.runtime.without_share, Some(sublet_core::config::WithoutShare::Run));
        }
        say(&file, false).unwrap();
        assert!(!file.exists());
        fs::write(&file, "").unwrap();
        say(&file, false).unwrap();
        assert!(file.exists());
    }
}
