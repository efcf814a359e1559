//! `sublet bench`: containers that share a GPU in each mode, measured side by side.

pub mod containers;
#[cfg(test)]
pub mod fixture;
pub mod measure;
mod picture;
pub mod plan;
mod result;
pub mod runner;
pub mod samples;

pub use picture::{html, svg};
pub use result::{
    BenchResult, Cell, Figure, Measured, Mode, ResultError, SCHEMA, Settings, Sharing, Sm, digits,
};
