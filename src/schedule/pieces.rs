//! Who owns which part of the message in which island.

use super::model::Cuts;
use super::Islands;

/// In an island of m members, member o owns the interval [o/m, (o+1)/m) of the message. The pieces are the common
/// refinement of all islands' partitions, so that a piece has exactly one owner in every island.
pub(super) struct Pieces {
    pub cuts: Cuts,
    /// `owner[island][piece]`.
    owner: Vec<Vec<u8>>,
}

impl Pieces {
    pub fn new(islands: &Islands) -> Self {
        let sizes: Vec<u16> = islands.groups().iter().map(|g| g.len() as u16).collect();
        let den = sizes.iter().fold(1, |all, &m| all / gcd(all, m) * m);
        let mut num: Vec<u16> =
            sizes.iter().flat_map(|&m| (0..=m).map(move |o| o * (den / m))).collect();
        num.sort_unstable();
        num.dedup();
        let owner = islands
            .groups()
            .iter()
            .map(|group| {
                let share = den / group.len() as u16;
                num[..num.len() - 1].iter().map(|&start| group[(start / share) as usize]).collect()
            })
            .collect();
        Pieces { cuts: Cuts { num, den }, owner }
    }

    /// All pieces.
    pub fn all(&self) -> std::ops::Range<u8> {
        0..self.cuts.pieces()
    }

    /// The owner of a piece in an island.
    pub fn owner(&self, island: usize, piece: u8) -> u8 {
        self.owner[island][piece as usize]
    }
}

fn gcd(a: u16, b: u16) -> u16 {
    if b == 0 {
        a
    } else {
        gcd(b, a % b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_refine_the_partitions_of_all_islands() {
        let pieces = Pieces::new(&Islands::parse(5, "0-1,2-4").unwrap());
        assert_eq!(pieces.cuts, Cuts { num: vec![0, 2, 3, 4, 6], den: 6 });
        assert_eq!(pieces.all().map(|p| pieces.owner(0, p)).collect::<Vec<_>>(), [0, 0, 1, 1]);
        assert_eq!(pieces.all().map(|p| pieces.owner(1, p)).collect::<Vec<_>>(), [2, 3, 3, 4]);
    }
}
