//! `sublet bench`: containers that share a GPU in each mode, measured side by side.

mod result;

pub use result::{BenchResult, Cell, Machine, Measured, Mode, ResultError, SCHEMA, Settings, Sharing, Sm, Tenant};
