//! Exit statuses of both programs, as a number: their `main` is C's.

/// All went well.
pub(crate) const SUCCESS: u8 = 0;

/// It did not.
pub(crate) const FAILURE: u8 = 1;
