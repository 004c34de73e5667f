//! Mistakes that are easily made in these layers. Tests make them on purpose, to show that the comparison with the golden
//! data would catch each; outside tests none is ever made.

/// A mistake in the code; mistakes in numbers (scales, epsilon) are made in the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// Rotating the halves of a head's rotary part against each other, where neighbours are the pairs.
    RotateHalves,
    /// Weighting experts with the score that the correction bias was added to.
    BiasInWeights,
    /// Ranking groups by their best expert alone, where the best two count.
    GroupsByOneExpert,
    /// Carrying the normed row on as the residual.
    ResidualAfterNorm,
    /// Adding the shared expert on every layer twice.
    SharedExpertTwice,
}

#[cfg(not(test))]
pub fn made(_: Mistake) -> bool {
    false
}

#[cfg(test)]
pub use switch::{made, make};

#[cfg(test)]
mod switch {
    use super::Mistake;
    use std::cell::Cell;

    thread_local! {
        static MADE: Cell<Option<Mistake>> = const { Cell::new(None) };
    }

    /// Whether this thread's rank makes `mistake`.
    pub fn made(mistake: Mistake) -> bool {
        MADE.get() == Some(mistake)
    }

    /// From now on this thread's rank makes `mistake`.
    pub fn make(mistake: Option<Mistake>) {
        MADE.set(mistake);
    }
}
