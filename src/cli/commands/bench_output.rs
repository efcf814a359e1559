//! The file of `sublet bench run`: looked at before anything starts, and gone on with.

use std::path::Path;

use anyhow::bail;
use rustix::fs::{Access, access};

use crate::bench::{BenchResult, Settings};
use sublet_core::text::safe;

/// What the file has already, to be gone on with; `None`: there is no such file.
///
/// # Errors
/// It cannot be written, is no result, or is there although nobody said `resume`.
pub fn before(file: &Path, resume: bool) -> anyhow::Result<Option<BenchResult>> {
    let name = safe(&file.to_string_lossy());
    let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if file.is_dir() {
        bail!("--output {name}: it is a directory: name a file in it");
    }
    let shown = safe(&dir.to_string_lossy());
    if !dir.is_dir() {
        bail!("--output {name}: {shown} is no directory: create it, or name another one");
    }
    if let Err(error) = access(dir, Access::WRITE_OK | Access::EXEC_OK) {
        bail!("--output {name}: nothing can be written into {shown}: {error}; name another directory");
    }
    if !file.exists() {
        return Ok(None);
    }
    if !resume {
        bail!("{name} exists: --resume goes on with it, --output names another file");
    }
    Ok(Some(BenchResult::read(file)?))
}

/// `new`, with what was measured `before`.
///
/// # Errors
/// That was measured on another GPU, by another driver or engine, or in another way.
pub fn go_on(before: BenchResult, new: BenchResult, file: &Path) -> anyhow::Result<BenchResult> {
    let bare = |settings: &Settings| Settings { sm_overcommit: 1.0, time_slice_max: 0, ..settings.clone() };
    let same = [
        ("GPU", before.machine.uuid == new.machine.uuid),
        ("driver", before.machine.driver == new.machine.driver),
        ("engine", before.machine.engine == new.machine.engine),
        ("command or time", bare(&before.settings) == bare(&new.settings)),
    ];
    if let Some((what, _)) = same.iter().find(|(_, same)| !same) {
        let name = safe(&file.to_string_lossy());
        bail!("{name} was measured with another {what}: it cannot be gone on with");
    }
    let in_use_by_others = before.in_use_by_others || new.in_use_by_others;
    Ok(BenchResult { in_use_by_others, settings: new.settings, ..before })
}
