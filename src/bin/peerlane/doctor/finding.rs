//! A finding, and how bad it is.

use serde::Serialize;

/// How bad; the number is the exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Worth knowing; nothing to change.
    Note = 0,
    /// Makes it slow.
    Slow = 1,
    /// Makes it wrong, unsafe or impossible.
    Wrong = 2,
}

impl Severity {
    pub fn name(self) -> &'static str {
        match self {
            Severity::Note => "note",
            Severity::Slow => "SLOW",
            Severity::Wrong => "WRONG",
        }
    }
}

/// What was found, where, what it costs and how to fix it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Its name, for programs.
    pub id: &'static str,
    pub severity: Severity,
    pub what: String,
    /// File and value.
    pub evidence: String,
    pub cost: String,
    pub fix: String,
}
