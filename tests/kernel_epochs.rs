//! Epochs, halves, tags: what makes consecutive steps on one channel safe, at the values where counters wrap.

// Helpers of tests are tests too, but clippy's exemption stops at functions with #[test].
#![allow(clippy::unwrap_used)]

mod common;

use common::tables::{one_shot, two_shot};
use common::world::{Buffers, Call, World, PLAIN};
use peerlane::launch::pl_channel;
use peerlane::Protocol;

const WAYS: [(Protocol, bool); 4] = [
    (Protocol::Ll, false),
    (Protocol::Sentinel, false),
    (Protocol::Flagged, false),
    (Protocol::Flagged, true),
];

/// Calls of distinct payload and changing size, so that stale data of an earlier call is wrong data.
fn calls(count: usize) -> Vec<Call> {
    (0..count).map(|i| Call { seed: i as u64 * 31, count: [1000, 1, 37][i % 3], ..PLAIN }).collect()
}

fn idle_at(epoch: u64, c: pl_channel) {
    assert_eq!((c.epoch, c.owner, c.arrived, c.failed), (epoch, 0, 0, 0));
}

#[test]
fn each_step_advances_the_epoch_by_one_and_frees_the_channel() {
    for (proto, pull) in WAYS {
        let world = World::new(3, proto, pull, two_shot);
        world.run(&calls(9));
        for r in 0..3 {
            idle_at(10, world.channel(r));
        }
    }
}

#[test]
fn an_empty_call_is_no_step() {
    let world = World::new(3, Protocol::Ll, false, one_shot);
    world.run(&[Call { count: 0, ..PLAIN }]);
    idle_at(1, world.channel(0));
}

#[test]
fn a_zeroed_channel_never_uses_the_tag_of_cleared_memory() {
    for (proto, pull) in WAYS {
        let world = World::starting_at(2, proto, pull, one_shot, 0);
        world.run(&calls(4));
        idle_at(6, world.channel(1));
    }
}

#[test]
fn halves_alternate_where_the_low_half_of_the_epoch_wraps() {
    for (proto, pull) in WAYS {
        let world = World::starting_at(4, proto, pull, two_shot, 0xffff_fffc);
        world.run(&calls(4)); // ...fc, fd, fe, ff; then 0 and 1 are skipped, so that an odd epoch meets an even one
        idle_at(0x1_0000_0002, world.channel(0));
        world.run(&calls(7));
        idle_at(0x1_0000_0009, world.channel(3));
    }
}

#[test]
fn steps_that_clear_the_other_half_disturb_nobody() {
    for start in [(1 << 30) - 6, (1 << 31) - 5, (1 << 32) + (1 << 30) - 4] {
        for build in [one_shot, two_shot] {
            World::starting_at(4, Protocol::Ll, false, build, start).run(&calls(12));
        }
    }
}

/// A word that short messages do not reach keeps its tag; 2^32 steps later it would be right again.
#[test]
fn no_ll_tag_survives_a_period_of_2_to_the_30() {
    let planted = [0xee; 8];
    for start in [1u64 << 29, (1 << 30) - 3] {
        let mut world = World::starting_at(2, Protocol::Ll, false, one_shot, start);
        for half in 0..2 {
            let words = world.half(0, half);
            let end = words.len();
            words[end - 8..].copy_from_slice(&planted);
        }
        world.run(&calls(5));
        for half in 0..2 {
            let words = world.half(0, half);
            let cleared = words[words.len() - 8..] == [0; 8];
            // In the middle of a period nothing is cleared: the control that shows the planted words would be seen.
            assert_eq!(cleared, start != 1 << 29, "half {half}, from {start:#x}");
        }
    }
}

/// Everything a sentinel step has read is armed again, or the step after next takes it for its own data (which the
/// explorer shows: explorer_controls.rs).
#[test]
fn a_sentinel_step_leaves_its_slots_armed() {
    let mut world = World::new(4, Protocol::Sentinel, false, two_shot);
    world.run(&calls(6));
    for r in 0..4 {
        for half in 0..2 {
            assert!(world.half(r, half).iter().all(|&b| b == 0xff), "rank {r}, half {half}");
        }
    }
}

/// The control for the re-arm: rank 1 never sends, yet rank 0 finishes, with old words for data.
#[test]
fn a_sentinel_word_that_nobody_armed_again_is_taken_for_data() {
    let mut world = World::new(2, Protocol::Sentinel, false, one_shot);
    world.deadline_ns = 5_000_000;
    let slot = world.geo.slot_bytes as usize;
    world.half(0, 1)[slot..2 * slot].fill(0);
    let mut buffers = Buffers::new(0, &PLAIN);
    buffers.run(&world, 0, &PLAIN);
    assert_eq!((world.state(0).abort, world.channel(0).epoch), (0, 2));
    // The step has re-armed what it took, so the same wait cannot be fooled twice.
    assert!(world.half(0, 1)[slot..][..4000].iter().all(|&b| b == 0xff));
    buffers.run(&world, 0, &PLAIN);
    assert_ne!(world.state(0).abort, 0);
}
