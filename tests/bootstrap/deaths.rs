//! Ranks in processes of their own die; the others name them at once and the run directory stays clean.

use crate::child::PLACES;
use crate::support::*;
use std::collections::{HashMap, HashSet};
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
            let ended: u128 = said(lines, "ended").unwrap().parse().unwrap();
            // One that was told may be done before the teller says that it is.
            longest = longest.max(ended.saturating_sub(killed));
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
                _ => {
                    format!("set-up failed on rank {victim} in stage '{place}': rank {victim} died")
                }
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
    // Dropping kills, so all are asked first.
    let ended: Vec<bool> =
        ranks.iter_mut().map(|rank| rank.child.try_wait().unwrap().is_some()).collect();
    assert_eq!(ended, [false, false], "still working after a goodbye");
    dir.assert_empty();
}

#[test]
fn deaths_are_seen_across_pid_namespaces() {
    // The shell is process 1 of the namespace, which could not kill itself.
    let wrapper =
        ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "\"$0\" \"$@\"; exit 0"];
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

fn sockets_of(rank: &Rank) -> usize {
    let Ok(fds) = std::fs::read_dir(format!("/proc/{}/fd", rank.child.id())) else { return 0 };
    let links = fds.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
    links.filter(|to| to.to_string_lossy().starts_with("socket:")).count()
}

#[test]
fn a_rank_killed_before_all_have_come_is_named_by_those_who_have() {
    for victim in 0..3 {
        let dir = Dir::new();
        let id = dir.id();
        // Rank 3 never comes, so the rendezvous stays open.
        let mut ranks: Vec<Rank> =
            (0..3).map(|rank| process(&id, 4, rank, "die 9 never", &[])).collect();
        // Rank 0 holds the listener and two connections; a moment later it has admitted both.
        eventually(|| sockets_of(&ranks[0]) >= 3);
        std::thread::sleep(Duration::from_millis(200));
        let mut dead = ranks.remove(victim);
        let killed = clock();
        dead.child.kill().unwrap();
        for rank in ranks {
            let lines = rank.finish();
            let error = said(&lines, "error").unwrap();
            let stage = "set-up failed on rank";
            assert!(
                error.starts_with(&format!("{stage} {victim} in stage 'rendezvous'")),
                "{error}"
            );
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
    let mut stages = HashMap::<String, u32>::new();
    for round in 0..16 {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        let victim = (seed % 4) as usize;
        let delay = Duration::from_micros(seed / 7 % 12_000);
        let dir = Dir::new();
        let id = dir.id();
        let mut ranks: Vec<Rank> = (0..4).map(|rank| process(&id, 4, rank, "run 3", &[])).collect();
        std::thread::sleep(delay);
        let mut dead = ranks.remove(victim);
        let killed = clock();
        dead.child.kill().unwrap();
        let here = format!("round {round}, rank {victim}, after {delay:?}");
        for rank in ranks {
            let lines = rank.finish();
            let error = said(&lines, "error").unwrap_or_else(|| panic!("{here}: {lines:?}"));
            assert!(error.contains(&format!("rank {victim}")), "{here}: {error}");
            // One that had not come yet is missing, which takes the deadline; otherwise it is known at once.
            let came = !error.contains("did not come") && !error.contains("no socket");
            let took = said(&lines, "ended").unwrap().parse::<u128>().unwrap() - killed;
            assert!(took < AT_ONCE.as_nanos() || !came, "{here}: {took} ns, {error}");
            let stage = error.split('\'').nth(1).unwrap_or("after set-up").to_owned();
            *stages.entry(stage).or_default() += 1;
        }
        dir.assert_empty();
    }
    println!("survivors by the stage in which the rank died: {stages:?}");
}

#[test]
fn a_killed_process_of_several_ranks_is_named_by_its_lowest() {
    for _ in 0..5 {
        let dir = Dir::new();
        let id = dir.id();
        let ranks = [(0, "run 30"), (1, "pair"), (3, "run 30"), (4, "run 30")];
        let ranks = ranks.map(|(rank, task)| process(&id, 5, rank, task, &[]));
        for (i, lines) in ranks.map(Rank::finish).iter().enumerate().filter(|(i, _)| *i != 1) {
            // It may die before the others have left the last stage, so only the name is the same.
            let error = said(lines, "error").unwrap_or_else(|| panic!("{i}: {lines:?}"));
            assert!(error.contains("rank 1 died"), "{error}");
        }
    }
}
