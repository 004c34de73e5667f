//! `peerlane soak` from outside: half a minute of it in every test run, and what a seed is worth.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::{Command, Output};

fn soak(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_peerlane"));
    command.arg("soak").args(line.split_whitespace()).env("PEERLANE_LOG", "off");
    command.output().unwrap()
}

fn lines(output: &Output) -> Vec<String> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

/// `make soak MINUTES=30` is the same for longer.
#[test]
fn random_communicators_and_calls_are_right_and_leave_nothing_behind() {
    let printed = lines(&soak("--minutes 0.5 --seed 20"));
    let last = printed.last().unwrap();
    println!("{last}");
    assert!(last.starts_with("soak: OK, seed 20"), "{last}");
    assert!(last.contains(" 0 wrong; memory "), "{last}");
    let count = |what: &str| -> u64 {
        let before = last.split(what).next().unwrap();
        before.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert!(count(" rounds,") >= 3 && count(" calls,") >= 100, "{last}");
}

#[test]
fn a_round_is_replayed_by_its_seed_and_number() {
    let all = lines(&soak("--seed 9 --rounds 3 --ranks 4 --verbose"));
    let round: Vec<_> = all.iter().filter(|line| line.starts_with("# round 2:")).collect();
    assert_eq!(round.len(), 1, "{all:?}");
    let again = lines(&soak("--seed 9 --first 2 --rounds 1 --ranks 4 --verbose"));
    assert!(again.contains(round[0]), "{again:?}");
    assert!(again.last().unwrap().contains("1 rounds"), "{again:?}");
}

#[test]
fn wrong_flags_are_refused() {
    for (line, code) in [("--ranks 17", 1), ("--minutes 0", 2), ("--seed x", 2)] {
        assert_eq!(soak(line).status.code(), Some(code), "{line}");
    }
}
