//! What is known about the lanes between a set of GPUs: which was found broken, and why; what one does, measured.

use super::report::ProbeReport;
use serde::{Deserialize, Serialize};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long a lane that was found broken is left alone. A box that was so busy that nothing arrived in time looks the same
/// as a broken one, so the finding must not last: to find out again costs a creation two seconds.
const BROKEN_FOR: Duration = Duration::from_secs(3600);

/// About one lane.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum LaneVerdict {
    /// What the owner of the memory found in it was not what had been written, or nothing came.
    Broken {
        /// The error, as text.
        why: String,
        /// When, in seconds since 1970.
        at: u64,
    },
    /// It delivers, and does this.
    Measured(ProbeReport),
}

impl LaneVerdict {
    /// Found just now.
    pub fn broken(why: String) -> Self {
        LaneVerdict::Broken { why, at: now() }
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// By lane.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Verdicts(Vec<(String, LaneVerdict)>);

impl Verdicts {
    pub fn get(&self, lane: &str) -> Option<&LaneVerdict> {
        self.0.iter().find(|(of, _)| of == lane).map(|(_, verdict)| verdict)
    }

    /// Why `lane` is not to be used, if that is known and recent.
    pub fn broken(&self, lane: &str) -> Option<&str> {
        self.broken_at(lane, now())
    }

    fn broken_at(&self, lane: &str, now: u64) -> Option<&str> {
        match self.get(lane)? {
            // A clock that was set back makes it old, not young.
            LaneVerdict::Broken { why, at } => {
                now.checked_sub(*at).filter(|age| *age < BROKEN_FOR.as_secs()).map(|_| why.as_str())
            }
            LaneVerdict::Measured(_) => None,
        }
    }

    pub fn measured(&self, lane: &str) -> Option<&ProbeReport> {
        match self.get(lane) {
            Some(LaneVerdict::Measured(report)) => Some(report),
            _ => None,
        }
    }

    pub fn set(&mut self, lane: &str, verdict: LaneVerdict) {
        self.0.retain(|(of, _)| of != lane);
        self.0.push((lane.to_owned(), verdict));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_is_left_alone_for_an_hour() {
        let mut verdicts = Verdicts::default();
        verdicts.set("vmm", LaneVerdict::Broken { why: "lost".into(), at: 10_000 });
        let at = |now| verdicts.broken_at("vmm", now);
        assert_eq!((at(10_000), at(13_599)), (Some("lost"), Some("lost")));
        assert_eq!((at(13_600), at(9_999)), (None, None));
        assert_eq!(verdicts.broken("ipc"), None);
    }

    #[test]
    fn the_last_verdict_counts() {
        let mut verdicts = Verdicts::default();
        verdicts.set("vmm", LaneVerdict::broken("first".into()));
        verdicts.set("vmm", LaneVerdict::broken("second".into()));
        assert_eq!(verdicts.broken("vmm"), Some("second"));
        assert_eq!(verdicts.measured("vmm"), None);
    }
}
