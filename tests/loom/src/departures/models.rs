//! A step and a goodbye that come at the same time: one of the two threads notices.

use super::Departures;
use crate::{control, explore};
use loom::sync::Arc;
use loom::thread;

#[test]
fn a_step_that_misses_a_rank_is_noticed() {
    explore("one step, one goodbye", 5, || {
        let ranks = Arc::new(Departures::new(2));
        let watch = thread::spawn({
            let ranks = ranks.clone();
            move || ranks.leave(1, 1)
        });
        let begun = ranks.begin(1);
        let noticed = watch.join().unwrap();
        assert!(begun == Err(1) || noticed, "the step waits in vain");
    });
}

#[test]
fn a_step_that_the_rank_has_finished_is_not_held_up() {
    explore("two steps, two goodbyes", 8, || {
        let ranks = Arc::new(Departures::new(3));
        let watch = thread::spawn({
            let ranks = ranks.clone();
            move || (ranks.leave(1, 2), ranks.leave(2, 3))
        });
        assert_eq!(ranks.begin(1), Ok(()), "both finish step 1");
        ranks.end();
        let begun = ranks.begin(2);
        let (first, second) = watch.join().unwrap();
        assert!(begun == Err(1) || first, "the step waits in vain");
        assert!(!second, "rank 2 finishes step 2");
    });
}

#[test]
fn without_a_safeguard_of_the_departures_it_fails() {
    for safeguard in ["announce, then look", "the caller's fence", "the watch's fence"] {
        for model in [
            "a_step_that_misses_a_rank_is_noticed",
            "a_step_that_the_rank_has_finished_is_not_held_up",
        ] {
            control(&format!("departures::models::{model}"), safeguard, "the step waits in vain");
        }
    }
}
