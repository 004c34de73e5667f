//! Ranks in processes of their own die; the others name them at once and the run directory stays clean.

use crate::child::PLACES;
use crate::support::*;
use std::collections::HashSet;
use std::time::Duration;

/// Runs `n` ranks of which `victim` dies at `place`. The survivors' one error, and the longest time from death to it.
fn kill(n: usize, victim: usize, place: &str, wrapper: &[&str]) -> (String, Duration) {
    let dir = Dir::new();
    let id = dir.id();
    let task = format!("die {victim} {place}");
    let ranks: Vec<Rank> = (0..n).map(|rank| process(&id, n, rank, &task, wrapper)).collect();
    let lines: Vec<_> = ranks.into_iter().map(Rank::finish).collect();
    if let Some(pid) = said(&lines[victim], "child") {
        // SAFETY: a signal to the child that the victim left behind.
        unsafe { libc::kill(pid.parse().unwrap(), libc::SIGKILL) };
    }
    let killed: u128 = said(&lines[victim], "killed").expect("the victim died").parse().unwrap();
    let mut errors = HashSet::new();
    let mut longest = 0;
    for (rank, lines) in lines.iter().enumerate() {
        if rank != victim {
            let error = said(lines, "error");
            errors.insert(error.unwrap_or_else(|| panic!("rank {rank} of {place}: {lines:?}")));
            longest = longest.max(said(lines, "ended").unwrap().parse::<u128>().unwrap() - killed);
        }
    }
    assert_eq!(errors.len(), 1, "{place}, rank {victim}: {errors:?}");
    dir.assert_empty();
    let longest = Duration::from_nanos(longest as u64);
    assert!(longest < AT_ONCE, "{place}, rank {victim}: {longest:?}");
    (errors.into_iter().next().unwrap().to_owned(), longest)
}

#[test]
fn a_rank_killed_in_any_stage_is_named_by_all_survivors() {
    for place in PLACES {
        let mut longest = Duration::ZERO;
        for victim in 0..4 {
            let (error, took) = kill(4, victim, place, &[]);
            let expected = match place {
                "work" => format!("rank {victim} died"),
                _ => format!(
                    "set-up failed on rank {victim} in stage '{place}': rank {victim} died"
                ),
            };
            assert_eq!(error, expected);
            longest = longest.max(took);
        }
        println!("killed before '{place}': survivors knew within {longest:?}");
    }
}

#[test]
fn exit_without_a_goodbye_is_a_death() {
    assert_eq!(kill(3, 1, "exit", &[]).0, "rank 1 died");
}

#[test]
fn a_child_of_the_dead_rank_does_not_keep_it_alive() {
    // fork: the handler closes the sockets. clone: nothing does, and the pidfd tells.
    for place in ["fork", "clone"] {
        let (error, took) = kill(3, 2, place, &[]);
        assert_eq!(error, "rank 2 died");
        println!("killed with a child of '{place}' alive: known within {took:?}");
    }
}

#[test]
fn what_a_rank_told_before_it_ended_is_what_the_others_report() {
    assert_eq!(kill(3, 1, "tell", &[]).0, "device: the victim's own words");
}

#[test]
fn a_goodbye_before_the_process_ends_is_no_death() {
    let dir = Dir::new();
    let id = dir.id();
    let mut ranks: Vec<Rank> =
        (0..3).map(|rank| process(&id, 3, rank, "die 1 goodbye", &[])).collect();
    let left = ranks.remove(1).finish();
    assert!(said(&left, "working").is_some());
    std::thread::sleep(Duration::from_millis(500));
    for mut rank in ranks {
        let ended = rank.child.try_wait().unwrap();
        assert!(ended.is_none(), "rank {} ended after a goodbye", rank.rank);
    }
    dir.assert_empty();
}

#[test]
fn deaths_are_seen_across_pid_namespaces() {
    let wrapper = ["unshare", "--pid", "--fork", "--kill-child"];
    let can = std::process::Command::new(wrapper[0]).args(&wrapper[1..]).arg("true").status();
    if !can.is_ok_and(|status| status.success()) {
        eprintln!("needs the right to make PID namespaces; not run");
        return;
    }
    for place in ["alpha", "exit"] {
        let (error, _) = kill(3, 1, place, &wrapper);
        assert!(error.contains("rank 1 died"), "{error}");
    }
}

#[test]
fn a_rank_killed_before_all_have_come_is_named_by_those_who_have() {
    for victim in 0..3 {
        let dir = Dir::new();
        let id = dir.id();
        // Rank 3 never comes, so the rendezvous stays open.
        let mut ranks: Vec<Rank> =
            (0..3).map(|rank| process(&id, 4, rank, "die 9 never", &[])).collect();
        eventually(|| socket_of(&id).exists());
        std::thread::sleep(Duration::from_millis(300));
        let mut dead = ranks.remove(victim);
        let killed = clock();
        dead.child.kill().unwrap();
        for rank in ranks {
            let lines = rank.finish();
            let error = said(&lines, "error").unwrap();
            let stage = "set-up failed on rank";
            assert!(error.starts_with(&format!("{stage} {victim} in stage 'rendezvous'")), "{error}");
            let took = said(&lines, "ended").unwrap().parse::<u128>().unwrap() - killed;
            assert!(took < AT_ONCE.as_nanos(), "{took} ns");
        }
        dir.assert_empty();
    }
}

#[test]
fn a_rank_killed_at_a_random_moment_is_named_by_all_survivors() {
    // xorshift with a fixed seed; the delay decides the moment, so it is printed with a failure.
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    for round in 0..12 {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        let victim = (seed % 4) as usize;
        let delay = Duration::from_micros(seed / 7 % 20_000);
        let dir = Dir::new();
        let id = dir.id();
        let mut ranks: Vec<Rank> =
            (0..4).map(|rank| process(&id, 4, rank, "die 9 never", &[])).collect();
        eventually(|| socket_of(&id).exists());
        std::thread::sleep(delay);
        let mut dead = ranks.remove(victim);
        let killed = clock();
        dead.child.kill().unwrap();
        let here = format!("round {round}, rank {victim}, after {delay:?}");
        // One that had not come yet is missing, which takes the deadline; otherwise it is known at once.
        for rank in ranks {
            let lines = rank.finish();
            let error = said(&lines, "error").unwrap_or_else(|| panic!("{here}: {lines:?}"));
            assert!(error.contains(&format!("rank {victim}")), "{here}: {error}");
            let took = said(&lines, "ended").unwrap().parse::<u128>().unwrap() - killed;
            assert!(took < AT_ONCE.as_nanos() || error.contains("did not come"), "{here}: {took}");
        }
        dir.assert_empty();
    }
}
