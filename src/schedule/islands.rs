//! Islands: groups of ranks with fast links inside and a scarce crossing between them.

use crate::error::{Error, Result};
use crate::types::{MAX_ISLANDS, MAX_RANKS};

/// A partition of the ranks `0..n` into one to four islands, in canonical order: islands by their lowest rank, ranks in
/// order inside.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Islands {
    groups: Vec<Vec<u8>>,
}

impl Islands {
    /// One island of all `n` ranks.
    pub fn single(n: usize) -> Result<Self> {
        Self::new(n, vec![(0..n).collect()])
    }

    /// Islands from lists of ranks in any order; every rank of `0..n` exactly once.
    pub fn new(n: usize, groups: Vec<Vec<usize>>) -> Result<Self> {
        if n == 0 || n > MAX_RANKS {
            return Err(Error::InvalidArgument(format!(
                "a communicator has 1 to {MAX_RANKS} ranks, not {n}"
            )));
        }
        if groups.is_empty() || groups.len() > MAX_ISLANDS {
            return Err(Error::InvalidArgument(format!(
                "there are 1 to {MAX_ISLANDS} islands, not {}",
                groups.len()
            )));
        }
        let mut island_of = [None; MAX_RANKS];
        for (island, ranks) in groups.iter().enumerate() {
            if ranks.is_empty() {
                return Err(Error::InvalidArgument(format!("island {island} has no rank")));
            }
            for &rank in ranks {
                if rank >= n {
                    return Err(Error::InvalidArgument(format!(
                        "island {island} names rank {rank}, but ranks are 0 to {}",
                        n - 1
                    )));
                }
                if island_of[rank].replace(island).is_some() {
                    return Err(Error::InvalidArgument(format!("rank {rank} is in two islands")));
                }
            }
        }
        if let Some(rank) = (0..n).find(|&r| island_of[r].is_none()) {
            return Err(Error::InvalidArgument(format!("rank {rank} is in no island")));
        }
        let mut groups: Vec<Vec<u8>> = groups
            .into_iter()
            .map(|ranks| {
                let mut ranks: Vec<u8> = ranks.into_iter().map(|r| r as u8).collect();
                ranks.sort_unstable();
                ranks
            })
            .collect();
        groups.sort_unstable();
        Ok(Islands { groups })
    }

    /// Islands from text: ranks and ranges, islands separated by a comma or semicolon. `0-3,4-7` is two islands; an
    /// island that is no single range is written with `+`, as in `0+2+4,1+3+5`.
    pub fn parse(n: usize, text: &str) -> Result<Self> {
        let number = |t: &str| {
            t.trim().parse::<usize>().map_err(|_| {
                Error::InvalidArgument(format!(
                    "islands '{text}': '{t}' is no rank; write islands like 0-3,4-7 or 0+2,1+3"
                ))
            })
        };
        let mut groups = Vec::new();
        for island in text.split([',', ';']) {
            let mut ranks = Vec::new();
            for part in island.split('+') {
                match part.split_once('-') {
                    Some((a, b)) => {
                        let (a, b) = (number(a)?, number(b)?);
                        if a > b || b >= MAX_RANKS {
                            return Err(Error::InvalidArgument(format!(
                                "islands '{text}': '{part}' is no range of ranks below {MAX_RANKS}"
                            )));
                        }
                        ranks.extend(a..=b);
                    }
                    None => ranks.push(number(part)?),
                }
            }
            groups.push(ranks);
        }
        Self::new(n, groups)
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.groups.iter().map(Vec::len).sum()
    }

    /// The islands in canonical order.
    pub fn groups(&self) -> &[Vec<u8>] {
        &self.groups
    }

    /// The island of a rank.
    pub fn island_of(&self, rank: u8) -> Option<usize> {
        self.groups.iter().position(|g| g.contains(&rank))
    }
}

impl std::fmt::Display for Islands {
    /// The form that [`Islands::parse`] reads.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, ranks) in self.groups.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            let mut at = 0;
            while at < ranks.len() {
                let run = (at + 1..ranks.len())
                    .take_while(|&k| ranks[k] == ranks[at] + (k - at) as u8)
                    .count();
                if at > 0 {
                    f.write_str("+")?;
                }
                match run {
                    0 => write!(f, "{}", ranks[at])?,
                    _ => write!(f, "{}-{}", ranks[at], ranks[at + run])?,
                }
                at += run + 1;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn text_and_islands_correspond() {
        for (n, text, shown) in [
            (8, "0-3,4-7", "0-3,4-7"),
            (8, "4-7,0-3", "0-3,4-7"),
            (4, "0+2,1+3", "0+2,1+3"),
            (6, "3+0-1;5+2+4", "0-1+3,2+4-5"),
            (1, "0", "0"),
        ] {
            let islands = Islands::parse(n, text).unwrap();
            assert_eq!(islands.to_string(), shown);
            assert_eq!(Islands::parse(n, shown).unwrap(), islands);
        }
    }

    #[test]
    fn partitions_that_are_none_are_refused() {
        for (n, text, what) in [
            (4, "0-3,3", "two islands"),
            (4, "0-2", "no island"),
            (4, "0-4", "rank 4"),
            (4, "", "no rank"),
            (4, "0,1,2,3,", "no rank"),
            (6, "0,1,2,3,4+5", "1 to 4 islands"),
            (4, "3-1,0", "range"),
            (4, "0-99999999999", "range"),
            (17, "0-15", "1 to 16"),
            (0, "0", "1 to 16"),
        ] {
            let error = Islands::parse(n, text).unwrap_err().to_string();
            assert!(error.contains(what), "{text}: {error}");
        }
    }

    proptest! {
        /// Mostly of the characters that mean something, so that a part of it is islands.
        #[test]
        fn any_text_is_refused_or_survives_printing(n in 0..20usize, text in "[0-9]{1,2}([-+,; ][0-9]{1,2}){0,6}|.{0,20}") {
            if let Ok(islands) = Islands::parse(n, &text) {
                prop_assert_eq!(islands.ranks(), n);
                prop_assert_eq!(Islands::parse(n, &islands.to_string()).unwrap(), islands);
            }
        }
    }
}
