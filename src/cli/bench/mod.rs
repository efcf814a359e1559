//! `sublet bench`: containers that share a GPU in each mode, measured side by side.

mod by_hand;
mod containers;
#[cfg(test)]
pub mod fixture;
mod http;
mod measure;
mod meter;
mod picture;
mod plan;
mod result;
mod runner;
mod samples;

pub use picture::{html, svg};
pub use result::{
    BenchResult, Cell, Figure, Measured, Mode, ResultError, SCHEMA, Settings, Sharing, Sm, digits,
};

/// What `sublet bench run` measures with.
pub mod run {
    pub use super::containers::{Engine, Workload, sweep};
    pub use super::http::{Client, free_ports};
    pub use super::measure::{Source, Times};
    pub use super::meter::Meter;
    pub use super::plan::{Gpu, grid, mode, number};
    pub use super::runner::Runner;
    pub use super::samples::{FIRST_NUMBER, Format};
}
