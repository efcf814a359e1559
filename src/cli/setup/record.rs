//! What a setup keeps beside the file that it edits, so that an undo gives back every byte where nobody has edited the
//! file since.

use serde::{Deserialize, Serialize};

use super::SetupError;

/// What it is.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Record {
    /// The file without sublet; `None`: there was none.
    pub before: Option<String>,
    /// The file as the last setup left it.
    pub after: String,
}

/// Takes sublet out of a file that others have edited since the setup; `None`: the file goes.
pub(super) type TakeOut = fn(found: &str, record: Option<&Record>) -> Result<Option<String>, SetupError>;

/// What a setup writes: `after`, and the record of it.
pub(super) fn kept(before: Option<String>, after: String) -> (String, String) {
    let record = Record { before, after };
    let text = serde_json::to_string(&record).unwrap_or_default();
    (record.after, format!("{text}\n"))
}

/// `found` without sublet; `None` if there is no such file.
pub(super) fn undo(
    found: Option<&str>,
    record: Option<&str>,
    take_out: TakeOut,
) -> Result<Option<String>, SetupError> {
    let Some(found) = found else { return Ok(None) };
    match record.map(parse).transpose()? {
        Some(record) if record.after == found => Ok(record.before),
        record => take_out(found, record.as_ref()),
    }
}

fn parse(text: &str) -> Result<Record, SetupError> {
    serde_json::from_str(text).map_err(|error| SetupError::Altered {
        why: format!(
            "its record beside the file cannot be read ({error}): remove the record, and sublet's lines by hand"
        ),
    })
}
