//! Calls run in the order they were made, on whichever stream: ranks must run the same calls in the same order, and a
//! stream that happens to be idle on one rank and busy on another must not change it.

use crate::device::cpu::Claim;
use crate::device::Stream;
use crate::error::Result;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Default)]
struct Turn {
    /// The ticket that the next call gets.
    next: u64,
    /// The ticket whose turn it is.
    current: u64,
    /// Threads that wait for `moved`. Notifying is a system call even when nobody listens, which a small call would feel.
    waiting: usize,
}

/// Hands out tickets and lets their holders run one after the other.
#[derive(Default)]
pub(crate) struct Order {
    turn: Mutex<Turn>,
    moved: Condvar,
}

/// How a call got in.
pub(crate) enum Admission<'a> {
    /// Nothing is before it: run it here and now.
    Now(Ticket<'a>, Claim<'a>),
    /// It has been queued.
    Queued,
}

/// The right to run one call when its turn has come; dropping it passes the turn on, also when the call unwinds.
pub(crate) struct Ticket<'a> {
    order: &'a Order,
    number: u64,
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let mut turn = self.order.lock();
        turn.current = self.number + 1;
        if turn.waiting > 0 {
            self.order.moved.notify_all();
        }
    }
}

impl Order {
    // The numbers are changed one at a time, so a poisoned lock is still good.
    fn lock(&self) -> MutexGuard<'_, Turn> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a ticket. If the call is next and `stream` is idle the caller runs it; else `job`, given the ticket's number,
    /// makes what the stream runs later. Ticket and place in the stream's queue are taken under one lock: two threads
    /// that got them in opposite order would wait for each other.
    pub fn admit<'a>(
        &'a self,
        stream: &'a Stream,
        may_run_here: bool,
        job: impl FnOnce(u64) -> Box<dyn FnOnce() + Send>,
    ) -> Result<Admission<'a>> {
        let mut turn = self.lock();
        let number = turn.next;
        if may_run_here && turn.current == number {
            if let Some(claim) = stream.claim() {
                turn.next += 1;
                return Ok(Admission::Now(Ticket { order: self, number }, claim));
            }
        }
        stream.push(job(number))?;
        turn.next += 1;
        Ok(Admission::Queued)
    }

    /// Waits for the turn of ticket `number`.
    pub fn wait_for(&self, number: u64) -> Ticket<'_> {
        self.wait_until(|turn| turn.current == number);
        Ticket { order: self, number }
    }

    /// Waits until every call made so far is done.
    pub fn drain(&self) {
        let until = self.lock().next;
        self.wait_until(|turn| turn.current >= until);
    }

    fn wait_until(&self, ready: impl Fn(&Turn) -> bool) {
        let mut turn = self.lock();
        turn.waiting += 1;
        while !ready(&turn) {
            turn = self.moved.wait(turn).unwrap_or_else(PoisonError::into_inner);
        }
        turn.waiting -= 1;
    }
}
