//! CRI-O: sublet's own drop-in in `crio.conf.d` (crio.conf.d(5), crio.conf(5) "CRIO.RUNTIME.RUNTIMES TABLE").

use super::{DROP_IN, NAME, SetupError, Wish, own_drop_in, plain};

/// The drop-in; `found` is the current text under its name.
///
/// # Errors
/// Another program wrote the file.
pub fn set_up(found: Option<&str>, wish: &Wish) -> Result<String, SetupError> {
    own_drop_in(found)?;
    let default = if wish.default { "\n[crio.runtime]\ndefault_runtime = \"sublet\"\n" } else { "" };
    Ok(format!(
        "{DROP_IN} crio`, which takes it away again with --undo.\n{default}\n\
         [crio.runtime.runtimes.{NAME}]\n\
         runtime_path = \"{}\"\n\
         runtime_type = \"oci\"\n",
        plain(&wish.runtime)?
    ))
}

#[cfg(test)]
mod tests {
    use super::super::{undo_drop_in, wish};
    use super::*;

    #[test]
    fn the_drop_in_is_written_by_sublet_only() {
        let text = set_up(None, &wish()).unwrap();
        assert_eq!(
            text,
            "# Written by `sublet setup crio`, which takes it away again with --undo.\n\n\
             [crio.runtime.runtimes.sublet]\nruntime_path = \"/usr/bin/sublet-runtime\"\nruntime_type = \"oci\"\n"
        );
        let default = set_up(Some(&text), &Wish { default: true, ..wish() }).unwrap();
        assert!(default.contains("[crio.runtime]\ndefault_runtime = \"sublet\"\n\n[crio.runtime.runtimes"));
        assert_eq!(undo_drop_in(Some(&default)).unwrap(), None);
        assert_eq!(undo_drop_in(None).unwrap(), None);
        assert_eq!(set_up(Some("[crio]\n"), &wish()).unwrap_err(), SetupError::Foreign);
        assert_eq!(undo_drop_in(Some("[crio]\n")).unwrap_err(), SetupError::Foreign);
        toml::from_str::<toml::Table>(&default).unwrap();
    }
}
