//! Why there is no place now, in words that help.

/// A request that no device can serve now.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// One line: what was asked, what each device has left, who holds it, what would fit now.
    pub message: String,
    /// Whether waiting could help.
    pub temporary: bool,
}
