//! The first error: one wins, and who sees the abort word finds it.

use super::Fault;
use crate::error::Error;
use crate::{control, explore};
use loom::sync::Arc;
use loom::thread;

#[test]
fn who_sees_the_word_finds_the_one_error() {
    explore("two errors, one reader", 8, || {
        let fault = Arc::new(Fault::new());
        let raise = |error: Error| {
            let fault = fault.clone();
            thread::spawn(move || fault.raise(error))
        };
        let errors = [Error::RankDied { rank: 3 }, Error::Aborted { rank: 0 }];
        let raised = errors.clone().map(raise);
        let seen = fault.aborted().then(|| fault.get().cloned().expect("a word without its error"));
        let won = raised.map(|thread| thread.join().unwrap());
        assert_eq!(won.iter().filter(|&&first| first).count(), 1);
        let first = errors[usize::from(won[1])].clone();
        assert_eq!(fault.get(), Some(&first));
        assert!(seen.is_none_or(|seen| seen == first), "another error was seen before");
    });
}

#[test]
fn without_the_safeguard_of_the_fault_it_fails() {
    let model = "fault::models::who_sees_the_word_finds_the_one_error";
    control(model, "the word releases the error", "a word without its error");
}
