//! From selectors to devices.
