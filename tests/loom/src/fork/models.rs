//! The registry of descriptors: a slot each, and the parts are in one list.

use super::{register, FREE, REGISTRY};
use crate::sync::atomic::{AtomicI32, Ordering};
use crate::{control, explore};
use loom::thread;

/// What a forked child would close.
fn registered() -> Vec<i32> {
    let parts = std::iter::successors(Some(&*REGISTRY), |part| part.next());
    let slots = parts.flat_map(|part| &part.slots).map(|slot| slot.load(Ordering::Relaxed));
    let mut all: Vec<_> = slots.filter(|&fd| fd != FREE).collect();
    all.sort();
    all
}

fn free(slot: &AtomicI32) {
    slot.store(FREE, Ordering::Release);
}

#[test]
fn each_descriptor_has_a_slot_of_its_own() {
    explore("two threads register, free and register", 6, || {
        let other = thread::spawn(|| {
            free(register(10));
            register(11);
        });
        register(20);
        register(21);
        other.join().unwrap();
        assert_eq!(registered(), [11, 20, 21], "a descriptor without a slot");
    });
}

#[test]
fn without_a_safeguard_of_the_registry_it_fails() {
    let model = "fork::models::each_descriptor_has_a_slot_of_its_own";
    for safeguard in ["a slot is taken by exchange", "a part is added by exchange"] {
        control(model, safeguard, "a descriptor without a slot");
    }
}
