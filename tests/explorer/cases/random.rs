//! Numbers drawn from a seed.

use crate::common::world::mix;

pub struct Random(pub u64);
impl Random {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = mix(self.0);
        (self.0 >> 11) % n
    }
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
    pub fn of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len() as u64) as usize]
    }
}
