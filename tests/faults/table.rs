//! The table of system calls and errors, `tests/faults/table`.

use std::collections::BTreeMap;

use nix::errno::Errno;

/// One system call.
pub struct Row {
    pub name: &'static str,
    /// The errors with which it is made to fail.
    pub errors: Vec<Errno>,
}

/// The table, by the numbers of the calls.
pub struct Table(BTreeMap<u64, Row>);

impl Table {
    pub fn read() -> Self {
        let lines = include_str!("table").lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let rows = lines.map(|line| {
            let mut words = line.split_ascii_whitespace();
            let name = words.next().expect("a name");
            let number = words.next().and_then(|number| number.parse().ok()).expect("a number");
            let errors = words.filter(|word| *word != "-").map(|word| errno(word).expect("an errno"));
            (number, Row { name, errors: errors.collect() })
        });
        Self(rows.collect())
    }

    /// The call with this number.
    pub fn call(&self, number: u64) -> Option<&Row> {
        self.0.get(&number)
    }

    pub fn named(&self, name: &str) -> &Row {
        self.0.values().find(|row| row.name == name).expect("a call of the table")
    }
}

/// The error with this name.
pub fn errno(name: &str) -> Option<Errno> {
    (1..134).map(Errno::from_raw).find(|errno| format!("{errno:?}") == name)
}
