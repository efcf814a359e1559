//! Whether a lease's container still lives: its processes, its runtime's record, its cgroup.
