//! What a call that failed leaves behind, with ranks as threads of this process: an error that names the cause, and no
//! old data, nor its own input, that a caller who reads on could take for a sum.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/ranks.rs"]
mod ranks;

use peerlane::comm::{group_end, group_start, Communicator, Config};
use peerlane::device::Stream;
use peerlane::lane::{step_packs, Layout};
use peerlane::schedule::{self, Islands};
use peerlane::{Algorithm, DType, Direction, Error, Op, Protocol};
use ranks::{config, data, expected, on_ranks, sum, sum_in_place};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(30);

fn all_nan(output: &[f32]) -> bool {
    !output.is_empty() && output.iter().all(|v| v.to_bits() == 0x7fff_ffff)
}

fn eventually(what: impl Fn() -> bool) {
    let begun = Instant::now();
    while !what() {
        assert!(begun.elapsed() < SOON, "did not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Memory whose end cannot be read until [`Stalled::release`]: a call that reads it stops there, between two steps.
struct Stalled {
    map: *mut u8,
    bytes: usize,
    /// Where the readable part ends; a whole page.
    edge: usize,
}

static STALLED: AtomicUsize = AtomicUsize::new(0);
static REACHED: AtomicBool = AtomicBool::new(false);
static RELEASED: AtomicBool = AtomicBool::new(false);

extern "C" fn wait_for_release(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the system hands a valid siginfo to the handler.
    let at = unsafe { (*info).si_addr() } as usize;
    let edge = STALLED.load(Ordering::SeqCst);
    if edge == 0 || at < edge {
        // SAFETY: a real fault: the default action ends the process when the access is made again.
        unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
        return;
    }
    REACHED.store(true, Ordering::SeqCst);
    while !RELEASED.load(Ordering::SeqCst) {
        std::thread::yield_now();
    }
}

impl Stalled {
    /// `count` floats in which reading stops before element `stop`.
    fn new(values: &[f32], stop: usize) -> (Self, *const f32) {
        let page = 4096;
        let before = (stop * 4).div_ceil(page) * page;
        let bytes = before + ((values.len() - stop) * 4).div_ceil(page) * page;
        // SAFETY: a new private mapping; the values fit it; only its end is protected.
        unsafe {
            let (prot, flags) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let map = libc::mmap(std::ptr::null_mut(), bytes, prot, flags, -1, 0).cast::<u8>();
            assert_ne!(map as isize, -1);
            let input = map.add(before - stop * 4).cast::<f32>();
            input.copy_from_nonoverlapping(values.as_ptr(), values.len());
            let edge = map as usize + before;
            assert_eq!(libc::mprotect(edge as *mut _, bytes - before, libc::PROT_NONE), 0);
            REACHED.store(false, Ordering::SeqCst);
            RELEASED.store(false, Ordering::SeqCst);
            STALLED.store(edge, Ordering::SeqCst);
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = wait_for_release as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGSEGV, &action, std::ptr::null_mut()), 0);
            (Stalled { map, bytes, edge }, input)
        }
    }

    fn release(&self) {
        let length = self.map as usize + self.bytes - self.edge;
        // SAFETY: the end of our own mapping.
        unsafe { libc::mprotect(self.edge as *mut _, length, libc::PROT_READ) };
        RELEASED.store(true, Ordering::SeqCst);
    }
}

// SAFETY: plain memory, released from another thread than the one that reads it.
unsafe impl Sync for Stalled {}

/// What becomes of rank 1 in the middle of the call.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Then {
    Nothing,
    Abort,
    Leave,
}

#[test]
fn a_call_that_fails_between_its_steps_keeps_what_is_done_and_fills_the_rest() {
    const SLAB: u64 = 1 << 20;
    let table = schedule::build(Algorithm::OneShot, &Islands::single(2).unwrap()).unwrap();
    let table = table.tables(Direction::Push).unwrap()[0];
    let geometry =
        Layout::new(SLAB, 1).unwrap().with_rotation().geometry(0, Protocol::Flagged, &table);
    let step = 4 * step_packs(&geometry, &table, DType::F32, Protocol::Flagged) as usize;
    let config = Config {
        slab_bytes: Some(SLAB),
        algorithm: Some(Algorithm::OneShot),
        protocol: Some(Protocol::Flagged),
        direction: Some(Direction::Push),
        ..config(2)
    };
    let count = 6 * step + 123;
    for (then, done, in_place) in [
        (Then::Nothing, 0, false),
        (Then::Nothing, 3, false),
        (Then::Nothing, 3, true),
        (Then::Abort, 0, true),
        (Then::Abort, 3, false),
        (Then::Abort, 3, true),
        // A rank cannot leave in the middle of a call of its own.
        (Then::Leave, 0, false),
        (Then::Leave, 0, true),
    ] {
        // Where nobody speaks up only the deadline ends the wait.
        let deadline = match then {
            // After rank 1 has come as far as it is meant to, on a busy machine too.
            Then::Nothing => Duration::from_secs(1),
            _ => config.deadline,
        };
        let config = Config { deadline, ..config.clone() };
        let here = format!("{then:?} after {done} steps, in place: {in_place}");
        let over = AtomicBool::new(false);
        on_ranks(Communicator::create_local(2, &config).unwrap(), |comm| {
            if comm.rank() == 1 {
                if then == Then::Leave {
                    return;
                }
                let (memory, input) = Stalled::new(&data(1, 0, count), done * step);
                let mut output = vec![5.0; count];
                let (address, to) = (input as usize, output.as_mut_ptr() as usize);
                std::thread::scope(|scope| {
                    let call = scope.spawn(|| {
                        let (input, output) = (address as *const _, to as *mut _);
                        // SAFETY: `count` elements in both, which live until the scope's end.
                        unsafe { comm.all_reduce(input, output, count, DType::F32, Op::Sum, None) }
                    });
                    eventually(|| REACHED.load(Ordering::SeqCst));
                    if then == Then::Abort {
                        comm.abort();
                    }
                    // Not before: rank 0 takes what is there when it gives up.
                    eventually(|| over.load(Ordering::SeqCst));
                    memory.release();
                    assert_eq!(call.join().unwrap().err(), comm.error(), "{here}");
                });
                // Its own step was under way: the data had all come, or it is filled.
                assert!(output[..done * step] == expected(2, 0, count)[..done * step], "{here}");
                assert!(all_nan(&output[(done + 1) * step..]), "{here}");
                // From then on whatever is called fails, and fills.
                let mut output = vec![5.0; 9];
                let error = sum(&comm, &[1.0; 9], &mut output, None).unwrap_err();
                assert!(all_nan(&output), "{here}");
                assert_eq!(Some(error), comm.error());
                return;
            }
            let mut output = data(0, 0, count);
            let result = if in_place {
                sum_in_place(&comm, &mut output)
            } else {
                output.fill(5.0);
                sum(&comm, &data(0, 0, count), &mut output, None)
            };
            over.store(true, Ordering::SeqCst);
            let error = result.unwrap_err();
            match then {
                Then::Nothing => {
                    let named = matches!(&error, Error::Deadline { rank: 0, peer: 1, .. });
                    assert!(named, "{here}: {error}");
                }
                Then::Abort => assert_eq!(error, Error::Aborted { rank: 1 }, "{here}"),
                Then::Leave => assert_eq!(error, Error::RankLeft { rank: 1 }, "{here}"),
            }
            let (sums, rest) = output.split_at(done * step);
            assert!(sums == &expected(2, 0, count)[..done * step], "{here}");
            assert!(all_nan(rest), "{here}");
            // A call that comes after the abort is refused before it counts.
            assert_eq!(comm.stats().failed, comm.stats().calls, "{here}");
        });
    }
}

#[test]
fn a_refusal_before_the_first_step_fills_too() {
    on_ranks(Communicator::create_local(2, &config(2)).unwrap(), |comm| {
        if comm.rank() == 1 {
            return;
        }
        // Rank 1 has left before this call: no step begins.
        std::thread::sleep(Duration::from_millis(200));
        let mut output = data(0, 0, 70);
        assert_eq!(sum_in_place(&comm, &mut output), Err(Error::RankLeft { rank: 1 }));
        assert!(all_nan(&output));
        assert_eq!(comm.stats().steps, 0);
    });
}

#[test]
fn after_a_sticky_error_every_call_fills_its_output() {
    let comms = Communicator::create_local(1, &config(1)).unwrap();
    let comm = &comms[0];
    // Control: before it, sums.
    let mut output = vec![5.0; 3];
    sum(comm, &[1.0; 3], &mut output, None).unwrap();
    assert_eq!(output, [1.0; 3]);
    comm.abort();
    let aborted = Err(Error::Aborted { rank: 0 });
    assert_eq!(sum(comm, &[1.0; 3], &mut output, None), aborted);
    assert!(all_nan(&output));
    let mut both = [1.0; 3];
    assert_eq!(sum_in_place(comm, &mut both), aborted);
    assert!(all_nan(&both));
    let stream = Stream::new().unwrap();
    output.fill(5.0);
    assert_eq!(sum(comm, &[1.0; 3], &mut output, Some(&stream)), aborted);
    stream.synchronize().unwrap();
    assert!(all_nan(&output));
    group_start();
    output.fill(5.0);
    assert_eq!(sum(comm, &[1.0; 3], &mut output, None), aborted, "not even noted");
    assert!(all_nan(&output));
    group_end().unwrap();
    let (input, mut output) = ([1i32; 5], [5i32; 7]);
    // SAFETY: live arrays of at least five elements.
    let result = unsafe {
        comm.all_reduce(
            input.as_ptr().cast(),
            output.as_mut_ptr().cast(),
            5,
            DType::I32,
            Op::Sum,
            None,
        )
    };
    assert_eq!(result, aborted);
    assert_eq!(output, [0, 0, 0, 0, 0, 5, 5], "integers have no NaN; nothing beyond the output");
}

#[test]
fn calls_queued_behind_a_fault_have_their_outputs_filled() {
    let comms = Communicator::create_local(2, &config(2)).unwrap();
    let streams = [Stream::new().unwrap(), Stream::new().unwrap()];
    let mut first = vec![5.0; 100];
    let mut queued = vec![vec![5.0; 100]; 3];
    let input = data(0, 0, 100);
    std::thread::scope(|scope| {
        let (comm, streams, input) = (&comms[0], &streams, &input);
        let first = &mut first;
        let waiting = scope.spawn(move || sum(comm, input, first, Some(&streams[0])));
        // It runs on that thread and waits for rank 1, so what follows is queued: behind it on its stream, and on another
        // stream behind its turn.
        eventually(|| format!("{:?}", streams[0]).contains("running: true"));
        for (i, output) in queued.iter_mut().enumerate() {
            assert_eq!(sum(comm, input, output, Some(&streams[i % 2])), Ok(()), "queued");
        }
        assert!(!waiting.is_finished());
        comms[1].abort();
        assert_eq!(waiting.join().unwrap(), Err(Error::Aborted { rank: 1 }));
        for stream in streams {
            stream.synchronize().unwrap();
        }
    });
    assert!(all_nan(&first));
    assert!(queued.iter().all(|output| all_nan(output)));
    assert_eq!(comms[0].error(), Some(Error::Aborted { rank: 1 }));
    assert_eq!(comms[0].stats().failed, 4);
}

#[test]
fn a_call_noted_for_a_communicator_that_is_gone_ends_at_once() {
    let mut comms = Communicator::create_local(2, &config(2)).unwrap();
    let begun = Instant::now();
    let mut output = data(0, 0, 50);
    group_start();
    sum_in_place(&comms[0], &mut output).unwrap();
    drop(comms.remove(0));
    assert_eq!(group_end(), Err(Error::Closed));
    assert!(all_nan(&output));
    assert!(begun.elapsed() < SOON, "it did not wait for rank 1");
    let mut output = vec![5.0; 50];
    assert_eq!(
        sum(&comms[0], &data(1, 0, 50), &mut output, None),
        Err(Error::RankLeft { rank: 0 })
    );
    assert!(all_nan(&output));
}

#[test]
fn a_rank_whose_thread_panics_is_a_death_to_the_others() {
    let comms = Communicator::create_local(3, &config(3)).unwrap();
    let begun = Instant::now();
    let ended: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = comms
            .into_iter()
            .map(|comm| {
                scope.spawn(move || {
                    let mut output = vec![0.0; 40];
                    sum(&comm, &data(comm.rank(), 0, 40), &mut output, None).unwrap();
                    assert!(output == expected(3, 0, 40));
                    if comm.rank() == 1 {
                        panic!("part of the test");
                    }
                    let result = sum(&comm, &data(comm.rank(), 1, 40), &mut output, None);
                    assert!(all_nan(&output));
                    // Leaving now must not become the other's reason.
                    result
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().ok()).collect()
    });
    let died = Some(Err(Error::RankDied { rank: 1 }));
    assert_eq!(ended, [died.clone(), None, died]);
    assert!(begun.elapsed() < SOON);
}
