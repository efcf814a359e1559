//! Why `sublet explain` has nothing to say.

use crate::stack::StackError;

/// Why there is nothing to explain.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    /// No argument says what.
    #[error(
        "nothing to explain: give a share, such as sm=25 memory=8GiB, or --annotation KEY=VALUE, --bundle DIR, \
         --name NAME, --container CONTAINER, --compose FILE or --quadlet FILE"
    )]
    Nothing,
    /// A container without annotations that no rule matches.
    #[error("it has no sublet.* annotation and no rule of {0} matches it, so it gets no GPU")]
    NoShare(String),
    /// A container of which nothing is recorded.
    #[error(
        "container {0} holds no lease, and neither an earlier one, nor a refusal, nor an action of the guard is \
         recorded for it"
    )]
    NoContainer(String),
    /// The services of a stack cannot be read.
    #[error(transparent)]
    Stack(#[from] StackError),
}
