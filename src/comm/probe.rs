//! The probe, as all ranks of a communicator walk through it: see [`crate::probe`]. It runs in set-up, when the lane has
//! passed its test and nobody calls yet, in the region of the bulk protocol, where what is left behind means nothing.

use super::attempt::{agree, Failed, Outcome};
use super::fault::Fault;
use super::selftest;
use crate::bootstrap::Mesh;
use crate::error::{Error, Result};
use crate::lane::Layout;
use crate::launch::*;
use crate::probe::{steps, Access, Kind, PairRate, ProbeReport, Rate, Step};
use crate::schedule::Islands;
use crate::types::Protocol;
use std::time::Instant;

const STAGE: &str = "probe the lane";
/// Round trips of a pair; the kernel reads the clock after the first 8 (`PROBE_WARM_ROUNDS` in `cuda/probe.cuh`).
const LATENCY_ROUNDS: u32 = 72;
const WARM_ROUNDS: u32 = 8;
/// Rounds of a rate, of which every other carries data.
const RATE_ROUNDS: u32 = 12;
/// Bytes to a peer in a round: at 50 GB/s ten times what a round costs without data.
const MOST_BYTES: u64 = 512 << 10;
/// What one thread moves at once on any device divides this.
const UNIT: u64 = 1024;

/// One launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shot {
    pub what: u32,
    pub rounds: u32,
    pub blocks: u32,
    pub bytes: u64,
    pub tag: u64,
    pub to: u32,
    pub from: u32,
}

/// What runs launches of the probe on this rank, and returns their results as `cuda/probe.cuh` lays them out.
pub(super) trait Prober {
    fn blocks(&self) -> u32;
    /// Runs one launch to its end.
    fn shoot(&mut self, shot: &Shot) -> Result<Vec<u64>>;
}

/// Words of results of a launch.
pub(super) fn result_words(shot: &Shot) -> usize {
    shot.blocks as usize * (1 + 2 * shot.rounds as usize)
}

/// Fills in what a launch is about; `args` are those of any step of this rank.
pub(super) fn launch_of(
    shot: &Shot,
    layout: &Layout,
    args: pl_args,
    result: u64,
    barrier: u64,
) -> pl_probe {
    let place = Place::new(layout);
    let mut probe = pl_probe {
        args,
        flags: place.flags,
        data: place.data,
        slot_bytes: place.slot_bytes,
        tag: shot.tag,
        bytes: shot.bytes,
        result,
        barrier,
        what: shot.what,
        rounds: shot.rounds,
        to: shot.to,
        from: shot.from,
    };
    probe.args.count = 0;
    probe.args.chunk_packs = 1;
    probe
}

/// Where in a slab the probe works: in the bulk protocol's data of channel 0. Its words are taken for nothing unless a flag
/// says so, and the flags lie elsewhere.
struct Place {
    flags: u64,
    data: u64,
    slot_bytes: u64,
}

impl Place {
    fn new(layout: &Layout) -> Self {
        let (start, bytes) = layout.region(0, Protocol::Flagged);
        let flags = u64::from(PL_PROBE_FLAGS * PL_MAX_RANKS * PL_PROBE_BLOCKS) * 64;
        let slot_bytes = bytes.saturating_sub(flags) / u64::from(PL_MAX_RANKS) / UNIT * UNIT;
        Place { flags: start, data: start + flags, slot_bytes }
    }
}

/// What is measured, and where.
pub(super) struct Setting<'a> {
    pub lane: &'a str,
    pub islands: &'a Islands,
    pub layout: &'a Layout,
    /// The ranks whose slabs this one has mapped, a bit per rank.
    pub reach: u32,
    /// Whether each edge is measured by itself too.
    pub every_pair: bool,
}

/// Measures everything, collectively. The inner error is the lane's: it lost, changed or held up what was written, and all
/// ranks get the same one. None where there is nobody to reach.
pub(super) fn measure(
    mesh: &mut Mesh,
    setting: &Setting<'_>,
    prober: &mut dyn Prober,
    fault: &Fault,
) -> Result<Outcome<Option<ProbeReport>>> {
    let begun = Instant::now();
    let mine = selftest::nonce().map(|nonce| (setting.reach, prober.blocks(), nonce));
    let all: Vec<(u32, u32, u64)> = mesh.all_gather("prepare the probe", mine)?;
    let reach: Vec<u32> = all.iter().map(|(reach, ..)| *reach).collect();
    let blocks =
        all.iter().map(|(_, blocks, _)| *blocks).min().unwrap_or(1).clamp(1, PL_PROBE_BLOCKS);
    // A tag that occurs in no slab yet: drawn by all ranks, so that none of them has to be trusted with it.
    let tag = all.iter().fold(0, |tag, (.., nonce)| tag ^ nonce) << 16;
    let bytes = Place::new(setting.layout).slot_bytes.min(MOST_BYTES);
    let steps = steps(setting.islands, &reach, setting.every_pair);
    if steps.is_empty() {
        return Ok(Ok(None));
    }
    let ended = |error| {
        fault.raise(error);
    };
    let measured = mesh.guard("begin the probe", ended, |mesh| {
        shoot(mesh, &steps, blocks, bytes, tag, prober)
    })??;
    let Measured { latency_ns, rates, pairs } = match measured {
        Ok(measured) => measured,
        Err(failed) => return Ok(Err(failed)),
    };
    let took = mesh.all_gather("end the probe", Ok(begun.elapsed().as_secs_f32() * 1e3))?;
    Ok(Ok(Some(ProbeReport {
        lane: setting.lane.to_owned(),
        islands: setting.islands.groups().to_vec(),
        latency_ns,
        rates: rates.into_iter().filter_map(|(kind, values)| rate(kind, values)).collect(),
        pairs,
        bytes,
        milliseconds: took[0],
    })))
}

/// By kind, what each busy rank measured.
type Rates = Vec<(Kind, Vec<(f32, u8)>)>;

/// What the steps have found.
struct Measured {
    /// By rank and peer, the nanoseconds of a hop.
    latency_ns: Vec<Vec<Option<f32>>>,
    rates: Rates,
    pairs: Vec<PairRate>,
}

/// Takes all steps in turn.
fn shoot(
    mesh: &mut Mesh,
    steps: &[Step],
    blocks: u32,
    bytes: u64,
    mut tag: u64,
    prober: &mut dyn Prober,
) -> Result<Outcome<Measured>> {
    let (n, rank) = (mesh.size(), mesh.rank());
    let mut latency_ns = vec![vec![None; n]; n];
    let mut rates: Rates = Vec::new();
    let mut pairs = Vec::new();
    for step in steps {
        let shot = shot(step, rank, blocks, bytes, tag);
        tag = tag.wrapping_add(1 << 8);
        let measured = match shot.to | shot.from {
            0 => Ok(0.0),
            _ => prober.shoot(&shot).and_then(|words| evaluate(&shot, &words)),
        };
        // It ends the step for all: nobody measures while others still do.
        let all = match agree(mesh, STAGE, measured.map_err(Failed::from))? {
            Ok(all) => all,
            Err(failed) => return Ok(Err(failed)),
        };
        if let Some((access, rank, memory)) = step.pair() {
            let gb_per_s = all[rank];
            pairs.push(PairRate { access, rank: rank as u8, memory: memory as u8, gb_per_s });
        }
        let busy = (0..n).filter(|&r| step.to[r] != 0);
        match step.kind {
            Kind::Latency => busy.for_each(|a| {
                let b = step.to[a].trailing_zeros() as usize;
                // One clock for both: that of the rank which began.
                latency_ns[a][b] = Some(all[a.min(b)]);
            }),
            Kind::Pair { .. } => {}
            kind => {
                let values = busy.map(|r| (all[r], r as u8));
                match rates.iter_mut().find(|(of, _)| *of == kind) {
                    Some((_, known)) => known.extend(values),
                    None => rates.push((kind, values.collect())),
                }
            }
        }
    }
    Ok(Ok(Measured { latency_ns, rates, pairs }))
}

fn shot(step: &Step, rank: usize, blocks: u32, bytes: u64, tag: u64) -> Shot {
    let (what, rounds, blocks) = match step.kind {
        Kind::Latency => (PL_PROBE_LATENCY, LATENCY_ROUNDS, 1),
        Kind::Rate { access, .. } | Kind::Pair { access } => match access {
            Access::Store => (PL_PROBE_STORE, RATE_ROUNDS, blocks),
            Access::Load => (PL_PROBE_LOAD, RATE_ROUNDS, blocks),
        },
    };
    Shot { what, rounds, blocks, bytes, tag, to: step.to[rank], from: step.from(rank) }
}

/// Nanoseconds of a hop, or gigabytes per second; an error where the data were not what had been written.
fn evaluate(shot: &Shot, words: &[u64]) -> Result<f32> {
    let block =
        |b: usize| &words[b * (1 + 2 * shot.rounds as usize)..][..1 + 2 * shot.rounds as usize];
    let blocks = shot.blocks as usize;
    if shot.what == PL_PROBE_LATENCY {
        let span = block(0)[2].saturating_sub(block(0)[1]);
        return Ok(span as f32 / 2.0 / (shot.rounds - WARM_ROUNDS) as f32);
    }
    let wrong = (0..blocks).fold(0, |mask, b| mask | block(b)[0]);
    if wrong != 0 {
        let how = if shot.what == PL_PROBE_STORE {
            "stored into this one's slab"
        } else {
            "has in its own"
        };
        return Err(Error::Lane(format!(
            "of {} bytes that rank {} {how}, others are found",
            shot.bytes,
            wrong.trailing_zeros()
        )));
    }
    if shot.to == 0 {
        return Ok(0.0);
    }
    // Of a round: from the first block's start to the last one's end. The first round of each sort meets cold caches.
    let span = |round: usize| {
        let start = (0..blocks).map(|b| block(b)[1 + 2 * round]).min().unwrap_or(0);
        let end = (0..blocks).map(|b| block(b)[2 + 2 * round]).max().unwrap_or(0);
        end.saturating_sub(start)
    };
    let middle = |first: usize| {
        let mut spans: Vec<u64> = (first..shot.rounds as usize).step_by(2).map(span).collect();
        spans.sort_unstable();
        spans[spans.len() / 2]
    };
    let (empty, full) = (middle(2), middle(3));
    // What a round costs without data is no part of the rate; where noise hides the data's share, all of it counts.
    let ns = if full > empty { full - empty } else { full.max(1) };
    Ok((shot.bytes * u64::from(shot.to.count_ones())) as f32 / ns as f32)
}

fn rate(kind: Kind, mut values: Vec<(f32, u8)>) -> Option<Rate> {
    let Kind::Rate { access, scope, fan_out, together } = kind else { return None };
    values.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (worst, worst_rank) = *values.first()?;
    let median = values[(values.len() - 1) / 2].0;
    Some(Rate { access, scope, fan_out, together, median, worst, worst_rank })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(rounds: u32, blocks: u32) -> Shot {
        let (what, to) = (PL_PROBE_STORE, 0b110);
        Shot { what, rounds, blocks, bytes: 1000, tag: 0, to, from: 0 }
    }

    #[test]
    fn a_rate_leaves_out_what_a_round_costs_without_data() {
        // Two blocks that start and end apart; rounds of 100 ns, with data 300.
        let mut words = Vec::new();
        for block in 0..2u64 {
            words.push(0);
            for round in 0..6u64 {
                let start = 1000 * round + 10 * block;
                words.extend([
                    start,
                    1000 * round + if round % 2 == 1 { 290 } else { 90 } + 10 * block,
                ]);
            }
        }
        assert_eq!(evaluate(&store(6, 2), &words).unwrap(), 2000.0 / 200.0);
        words[0] = 0b100;
        let error = evaluate(&store(6, 2), &words).unwrap_err().to_string();
        assert!(error.contains("rank 2") && error.contains("does not deliver"), "{error}");
    }

    #[test]
    fn a_hop_is_half_a_round_trip() {
        let shot = Shot { what: PL_PROBE_LATENCY, rounds: WARM_ROUNDS + 4, ..store(0, 1) };
        let mut words = vec![0; result_words(&shot)];
        (words[1], words[2]) = (500, 500 + 8 * 700);
        assert_eq!(evaluate(&shot, &words).unwrap(), 700.0);
    }

    #[test]
    fn the_probe_keeps_to_the_bulk_data_of_the_first_channel() {
        for (slab, channels) in [(1 << 20, 1), (4 << 20, 4), (32 << 20, 4), (1 << 30, 4)] {
            let layout = Layout::new(slab, channels).unwrap();
            let (start, bytes) = layout.region(0, Protocol::Flagged);
            let place = Place::new(&layout);
            assert!(place.flags == start && place.slot_bytes >= UNIT, "{slab}");
            assert!(place.data + 16 * place.slot_bytes <= start + bytes, "{slab}");
            assert_eq!(place.slot_bytes % UNIT, 0);
        }
    }
}
