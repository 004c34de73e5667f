//! Drafts as a drafter of a given skill would make them: each next token is the one that the model itself goes on to choose
//! with probability `hits`, and else a wrong one. All ranks draw the same.

use crate::batch::Draft;

pub struct Drafter {
    random: fastrand::Rng,
    hits: f64,
    vocabulary: u32,
}

impl Drafter {
    pub fn new(seed: u64, hits: f64, vocabulary: usize) -> Self {
        Drafter { random: fastrand::Rng::with_seed(seed), hits, vocabulary: vocabulary as u32 }
    }

    /// Any token.
    pub fn any(&mut self) -> u32 {
        self.random.u32(0..self.vocabulary)
    }

    /// Any token but `token`.
    fn other(&mut self, token: u32) -> u32 {
        if self.vocabulary == 1 {
            return token;
        }
        (token + self.random.u32(1..self.vocabulary)) % self.vocabulary
    }

    /// Tokens for the rows of `draft`: row 0 is `first`, which has been committed, and behind it the model would choose
    /// `truth`.
    pub fn draft(&mut self, draft: &Draft, first: u32, truth: &[u32]) -> Vec<u32> {
        let mut tokens = vec![first];
        // How deep a row is, if all rows up to it are as the model would choose.
        let mut right = vec![Some(0)];
        let mut has_child = vec![false; draft.rows()];
        for row in 1..draft.rows() {
            let parent = draft.parent(row).unwrap_or(0);
            let next = right[parent].and_then(|depth| Some((depth + 1, *truth.get(depth)?)));
            let first_child = !std::mem::replace(&mut has_child[parent], true);
            match next {
                Some((depth, token)) if first_child && self.random.f64() < self.hits => {
                    tokens.push(token);
                    right.push(Some(depth));
                }
                Some((_, token)) => {
                    let other = self.other(token);
                    tokens.push(other);
                    right.push(None);
                }
                None => {
                    let any = self.any();
                    tokens.push(any);
                    right.push(None);
                }
            }
        }
        tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_perfect_drafter_is_always_right_and_a_hopeless_one_never() {
        let truth = [10, 11, 12];
        let mut perfect = Drafter::new(1, 1.0, 100);
        let chain = Draft::chain(4).unwrap();
        assert_eq!(perfect.draft(&chain, 9, &truth), [9, 10, 11, 12]);
        let tree = Draft::tree(vec![-1, 0, 0, 1, 1]).unwrap();
        let tokens = perfect.draft(&tree, 9, &truth);
        assert_eq!((tokens[0], tokens[1], tokens[3]), (9, 10, 11));
        assert!(tokens[2] != 10 && tokens[4] != 11);
        let mut hopeless = Drafter::new(1, 0.0, 100);
        for _ in 0..1000 {
            assert_ne!(hopeless.draft(&chain, 9, &truth)[1], 10);
        }
    }

    #[test]
    fn skill_is_a_probability() {
        let mut drafter = Drafter::new(3, 0.7, 1000);
        let chain = Draft::chain(2).unwrap();
        let hits = (0..10_000).filter(|_| drafter.draft(&chain, 0, &[5])[1] == 5).count();
        assert!((6_800..7_200).contains(&hits), "{hits}");
    }
}
