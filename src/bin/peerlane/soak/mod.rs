//! `peerlane soak`: random communicators and calls for as long as asked, every result checked, every leak looked for.

mod draw;
mod watch;

use crate::bench::orders::{Answer, Order};
use crate::bench::parent::Ranks;
use anyhow::{bail, ensure, Context, Result};
use draw::{Limits, Round};
use peerlane::types::MAX_RANKS;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use watch::{Held, Watch};

/// How often it says how far it is.
const REPORT: Duration = Duration::from_secs(10);

/// Flags of `peerlane soak`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
A round makes a communicator of a random number of threads or processes, with random islands, slab, algorithm, protocol
and direction, makes random calls (sizes from 0 to beyond the slab, every type and operation, in place or not, on streams
and in groups), compares every element bit by bit with a result from first principles, and destroys it. After each round
there must be as many descriptors, threads, mapped slabs, and files in /dev/shm and the run directory as before the first
one, and memory must not grow with the rounds. What a round does follows from the seed and its number alone.
Exit status: 0 when nothing was wrong, 1 otherwise, 2 for a wrong flag.")]
pub struct Args {
    /// How long
    #[arg(long, value_name = "MINUTES", default_value_t = 1.0, value_parser = minutes)]
    pub minutes: f64,
    /// End after so many rounds, if that is earlier
    #[arg(long, value_name = "N")]
    pub rounds: Option<u64>,
    /// Number of the first round
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub first: u64,
    /// Most ranks of a communicator
    #[arg(long, value_name = "N", default_value_t = MAX_RANKS)]
    pub ranks: usize,
    /// Seed of everything random [default: drawn and printed]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Seconds until a wait inside a call gives up
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = minutes)]
    pub deadline: f64,
    /// Print every round before it begins
    #[arg(short, long)]
    pub verbose: bool,
}

fn minutes(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number <= 1e6 => Ok(number),
        _ => Err("is not a number above 0 and up to 1000000".into()),
    }
}

/// What was done so far.
#[derive(Default)]
struct Done {
    rounds: u64,
    communicators: u64,
    calls: u64,
    bytes: u64,
}

/// A run directory of this run alone: what is left in it is this run's.
struct RunDir(PathBuf);

impl Drop for RunDir {
    fn drop(&mut self) {
        // What a failed round left there is the evidence, and stays.
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Soaks; an error is a wrong result, a failed call or a leak, with the flags that replay it.
pub fn run(args: &Args) -> Result<()> {
    ensure!(
        (1..=MAX_RANKS).contains(&args.ranks),
        "--ranks {}: a communicator has 1 to {MAX_RANKS} ranks",
        args.ranks
    );
    watch::settle_allocator();
    let seed = args.seed.unwrap_or_else(|| fastrand::u64(..1 << 32));
    let run_dir =
        RunDir(std::env::temp_dir().join(format!("peerlane-soak-{}", std::process::id())));
    let limits = Limits { most_ranks: args.ranks, deadline: args.deadline, run_dir: &run_dir.0 };
    say(&format!(
        "# peerlane {} soak: seed {seed}, {} minutes, up to {} ranks, CPU device",
        env!("CARGO_PKG_VERSION"),
        args.minutes,
        args.ranks
    ))?;

    // What a first communicator leaves for good (lazily opened, allocated once) is no leak.
    let mut warm_up = Round::draw(seed, args.first, &limits)?;
    (warm_up.threads, warm_up.cycles) = (true, 1);
    warm_up.orders.truncate(1);
    play(&warm_up).context("the first communicator")?;
    std::thread::sleep(Duration::from_millis(100));
    let mut watch = Watch::start(&run_dir.0)?;

    let start = Instant::now();
    let limit = Duration::from_secs_f64(args.minutes * 60.0);
    let (mut done, mut reported) = (Done::default(), start);
    let mut held = watch.first();
    while start.elapsed() < limit && args.rounds.is_none_or(|rounds| done.rounds < rounds) {
        let number = args.first + done.rounds;
        let round = Round::draw(seed, number, &limits)?;
        if args.verbose {
            say(&format!("# round {number}: {round}"))?;
        }
        let replay = || {
            format!(
                "round {number} ({round}); to replay: peerlane soak --seed {seed} --first {number} --rounds 1 --ranks {}",
                args.ranks
            )
        };
        play(&round).with_context(replay)?;
        held = watch.round().with_context(replay)?;
        let (calls, bytes) = round.calls();
        done.rounds += 1;
        done.communicators += round.cycles as u64;
        done.calls += calls * round.settings.ranks as u64;
        done.bytes += bytes * round.settings.ranks as u64;
        if reported.elapsed() >= REPORT {
            reported = Instant::now();
            say(&format!(
                "# {:4.0} s: {}",
                start.elapsed().as_secs_f64(),
                summary(&done, &watch, &held)
            ))?;
        }
    }
    say(&format!(
        "soak: OK, seed {seed}, {:.0} s: {}",
        start.elapsed().as_secs_f64(),
        summary(&done, &watch, &held)
    ))
}

fn summary(done: &Done, watch: &Watch, held: &Held) -> String {
    let (first, (from, to)) = (watch.first(), watch.memory_mib());
    format!(
        "{} rounds, {} communicators, {} calls, {:.1} GiB, 0 wrong; memory {from:.1} to {to:.1} MiB, descriptors {} to {}, \
         threads {} to {}, slabs {}, files in /dev/shm {}, in the run directory {}",
        done.rounds,
        done.communicators,
        done.calls,
        done.bytes as f64 / (1u64 << 30) as f64,
        first.descriptors,
        held.descriptors,
        first.threads,
        held.threads,
        held.slabs,
        held.shm,
        held.run_dir
    )
}

/// Carries out a round; a wrong element is an error.
fn play(round: &Round) -> Result<()> {
    for _ in 0..round.cycles {
        let mut ranks = match round.threads {
            true => Ranks::threads(&round.settings)?,
            false => Ranks::processes(&round.settings)?,
        };
        for order in &round.orders {
            let wrong = ask(&mut ranks, order).with_context(|| format!("{order:?}"))?;
            ensure!(wrong == 0, "{wrong} elements wrong: {order:?}");
        }
        ranks.leave()?;
    }
    Ok(())
}

fn ask(ranks: &mut Ranks, order: &Order) -> Result<u64> {
    let mut wrong = 0;
    for answer in ranks.ask(order)? {
        match answer {
            Answer::Checked { wrong: more } => wrong += more,
            other => bail!("a rank answered a check with {other:?}"),
        }
    }
    Ok(wrong)
}

fn say(line: &str) -> Result<()> {
    let mut out = std::io::stdout();
    Ok(writeln!(out, "{line}").and_then(|()| out.flush())?)
}
