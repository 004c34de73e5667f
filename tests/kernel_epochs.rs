//! Epochs, halves, tags: what makes consecutive steps on one channel safe, at the values where counters wrap.

// Helpers of tests are tests too, but clippy's exemption stops at functions with #[test].
#![allow(clippy::unwrap_used)]

mod common;

use common::tables::{one_shot, two_shot};
use common::world::{Buffers, Call, World, PLAIN};
use peerlane::launch::{pl_channel, PL_REASON_ABORTED};
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
    assert_eq!((c.epoch(), c.launch(), c.entered), (epoch, 0, 0));
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
        world.run(&calls(4)); // ...fc, fd, fe, ff; then 0 to 3 are skipped, so that the lowest two bits go round
        idle_at(0x1_0000_0004, world.channel(0));
        world.run(&calls(7));
        idle_at(0x1_0000_000b, world.channel(3));
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

/// Ranks make one large `ll` call in epoch `large`, then short calls from epoch `start` on, then go on 2^32 steps after
/// the large one. There rank 1 sends a single pack and rank 0 waits for all of a large message. True if rank 0 is done
/// all the same: it took the words of the first large call, whose tag is right again.
fn old_words_are_taken(large: u64, start: u64, alternate: bool) -> bool {
    let mut world = World::starting_at(2, Protocol::Ll, false, one_shot, large);
    world.run(&[PLAIN]);
    world.jump_to(start);
    let short = Call { count: 4, ..PLAIN };
    for step in 0..8 {
        // `ll` only on epochs of the large call's parity: every word of its half that short calls reach is used.
        let even = (start + step) % 2 == large % 2;
        if alternate && even != (world.proto == Protocol::Ll) {
            world.switch_protocol();
        }
        world.run(&[Call { seed: step, ..short }]);
    }
    if world.proto != Protocol::Ll {
        world.switch_protocol();
    }
    world.jump_to(large + (1 << 32));
    std::thread::scope(|scope| {
        let world = &world;
        scope.spawn(|| Buffers::new(0, &PLAIN).run(world, 0, &PLAIN));
        Buffers::new(1, &short).run(world, 1, &short);
        // Rank 1 has heard from rank 0, so rank 0 is in its step; it now looks once more and takes what is there.
        world.raise(0, PL_REASON_ABORTED);
    });
    world.channel(0).epoch() != large + (1 << 32)
}

/// The control: in the middle of a period nothing is cleared, and a word that short messages do not reach keeps its tag.
#[test]
fn an_ll_tag_that_comes_round_again_is_taken_for_data() {
    for large in [1000, 1001] {
        assert!(old_words_are_taken(large, 1 << 29, false), "epoch {large}");
        assert!(old_words_are_taken(large, 1 << 29, true), "epoch {large}, alternating");
    }
}

#[test]
fn no_ll_tag_survives_a_period_of_2_to_the_30() {
    for large in [1000, 1001] {
        for start in [(1 << 30) - 5, (1 << 30) - 4] {
            assert!(!old_words_are_taken(large, start, false), "epoch {large}, from {start}");
        }
    }
}

/// A clear that only `ll` steps made would clear the half that they do not use, in the one step of the two that is
/// theirs.
#[test]
fn old_ll_tags_go_also_where_every_other_step_is_of_another_protocol() {
    for large in [1000, 1001] {
        for start in [(1 << 30) - 5, (1 << 30) - 4] {
            assert!(!old_words_are_taken(large, start, true), "epoch {large}, from {start}");
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
    assert_eq!((world.state(0).abort, world.channel(0).epoch()), (0, 2));
    // The step has re-armed what it took, so the same wait cannot be fooled twice.
    assert!(world.half(0, 1)[slot..][..4000].iter().all(|&b| b == 0xff));
    buffers.run(&world, 0, &PLAIN);
    assert_ne!(world.state(0).abort, 0);
}
