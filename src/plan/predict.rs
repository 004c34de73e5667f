//! The time of an all-reduce on a described box, from its schedule: what `choose` decides by where a box is described, and
//! what `explain` shows.
//!
//! In every phase a step waits for one way of latency and then for the slowest of what carries its bytes: a GPU's link out (a
//! share of it when it writes to several peers) or in, an uplink that GPUs of a switch share, the sockets' link. Each of these
//! times is proportional to the message, so a phase is one latency and one slope, and a whole candidate is a line: choosing
//! costs a few multiplications per call. On the dual-socket box with eight GPUs this gives the published nominal model
//! (a test compares).
//!
//! **Collapse.** Two or more GPUs behind one switch that write at once to GPUs behind two or more other root complexes were
//! measured at 2.7 of 37 GB/s on one platform, 7 of 52 on another, and unharmed on others. Only a measurement can tell, so
//! where the layout allows it, it is reckoned with: for a phase in which such GPUs leave their switch with several streams
//! each, or towards several root complexes together. `pairwise` and `staged` do neither.

use super::choose::Choice;
use super::constants::Constants;
use super::fabric::Fabric;
use crate::error::Result;
use crate::schedule::model::{Schedule, Wire};
use crate::schedule::{self, Islands};
use crate::topology::{Class, Topology};
use crate::types::{Algorithm, DType, Direction, Protocol};
use std::collections::{BTreeMap, BTreeSet};

/// Candidates closer than this are a tie, which fewer phases win: the model is not better than that.
const TIE: f64 = 1.02;

/// How much faster a candidate that may collapse must be, though reckoned as collapsed, to be preferred to one that cannot:
/// the rate was measured with two writers behind a switch, and more of them may be worse off.
const COLLAPSE_MARGIN: f64 = 1.5;

/// All candidates on a described box.
#[derive(Clone, Debug)]
pub struct Model {
    /// The box.
    pub fabric: Fabric,
    lines: Vec<Line>,
}

/// One candidate: its time is `fixed_us` and `us_per_byte` times the message.
#[derive(Clone, Debug)]
pub struct Line {
    /// How the call would be served.
    pub choice: Choice,
    /// Whether it is for 16-bit floats, whose partial sums travel in twice the bytes.
    pub wide: bool,
    /// Launch, latencies, fences.
    pub fixed_us: f64,
    /// What the bytes cost.
    pub us_per_byte: f64,
    /// Phase by phase.
    pub phases: Vec<PhaseCost>,
}

/// One phase of a candidate.
#[derive(Clone, Debug)]
pub struct PhaseCost {
    /// The latency of the farthest message, with its fence.
    pub latency_us: f64,
    /// The class of that message.
    pub farthest: Class,
    /// What the slowest carrier needs for each byte of the message.
    pub us_per_byte: f64,
    /// That carrier.
    pub carrier: Carrier,
    /// Bytes on the wire by class, over all ranks, for each byte of the message.
    pub bytes: [f64; 6],
}

/// What carries bytes, and can be what bounds a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Carrier {
    /// Nothing leaves a GPU.
    Nothing,
    /// A GPU's link outwards, writing to so many peers.
    LinkOut(usize),
    /// A GPU's link inwards.
    LinkIn,
    /// The uplink that GPUs behind a switch share.
    Uplink,
    /// The link between two sockets.
    Sockets,
    /// Posted writes that may collapse.
    Collapse,
}

impl std::fmt::Display for Carrier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Carrier::Nothing => f.write_str("latency"),
            Carrier::LinkOut(1) => f.write_str("the GPU's link, one stream"),
            Carrier::LinkOut(peers) => write!(f, "the GPU's link, {peers} streams"),
            Carrier::LinkIn => f.write_str("the GPU's link inwards"),
            Carrier::Uplink => f.write_str("a switch's uplink"),
            Carrier::Sockets => f.write_str("the link between sockets"),
            Carrier::Collapse => f.write_str("posted writes that may collapse"),
        }
    }
}

impl Line {
    /// Microseconds for a message of `bytes`.
    pub fn us(&self, bytes: usize) -> f64 {
        self.fixed_us + self.us_per_byte * bytes as f64
    }

    /// Whether some phase is reckoned as collapsed.
    pub fn may_collapse(&self) -> bool {
        self.phases.iter().any(|phase| phase.carrier == Carrier::Collapse)
    }

    /// What most of the time for `bytes` goes to: the carrier of the phase with the longest transfer, or latency.
    pub fn bound(&self, bytes: usize) -> Carrier {
        let transfer = self.us_per_byte * bytes as f64;
        let slowest = self.phases.iter().max_by(|a, b| a.us_per_byte.total_cmp(&b.us_per_byte));
        match slowest {
            Some(phase) if transfer > self.fixed_us => phase.carrier,
            _ => Carrier::Nothing,
        }
    }
}

impl Model {
    /// Every schedule that these islands have, on ranks that sit on GPUs `gpu_of` of `topology`.
    ///
    /// # Errors
    /// As [`schedule::build`].
    pub fn new(
        topology: &Topology,
        gpu_of: &[usize],
        islands: &Islands,
        constants: &Constants,
    ) -> Result<Self> {
        let fabric = Fabric::new(topology, gpu_of, constants);
        let mut lines = Vec::new();
        for &algorithm in Algorithm::ALL.iter().filter(|a| schedule::exists(**a, islands)) {
            let schedule = schedule::build(algorithm, islands)?;
            for &protocol in Protocol::ALL {
                // Staged passes are for bytes that matter, and pace themselves by flags.
                if algorithm == Algorithm::Staged && protocol != Protocol::Flagged {
                    continue;
                }
                for wide in [false, true] {
                    lines.push(line(&fabric, &schedule, protocol, wide, constants));
                }
            }
        }
        Ok(Model { fabric, lines })
    }

    /// Candidates that can carry `dtype`, fastest first; of each algorithm its best protocol.
    pub fn candidates(&self, bytes: usize, dtype: DType) -> Vec<&Line> {
        let mut best: BTreeMap<Algorithm, &Line> = BTreeMap::new();
        for line in self.fitting(dtype) {
            let known = best.entry(line.choice.algorithm).or_insert(line);
            if line.us(bytes) < known.us(bytes) {
                *known = line;
            }
        }
        let mut lines: Vec<&Line> = best.into_values().collect();
        lines.sort_by(|a, b| a.us(bytes).total_cmp(&b.us(bytes)));
        lines
    }

    /// The candidate for a call, among algorithms that `may` serve: the fastest, or of those that tie with it the one with the
    /// fewest phases. One that may collapse is passed over unless it is faster by a wide margin. A pure function of the
    /// description: all ranks choose alike.
    pub fn choose(
        &self,
        bytes: usize,
        dtype: DType,
        may: impl Fn(Algorithm) -> bool,
    ) -> Option<&Line> {
        let cost = |line: &Line| {
            let margin = if line.may_collapse() { COLLAPSE_MARGIN } else { 1.0 };
            line.us(bytes) * margin
        };
        let fitting = || self.fitting(dtype).filter(|line| may(line.choice.algorithm));
        let cheapest = fitting().map(cost).reduce(f64::min)?;
        fitting()
            .filter(|line| cost(line) <= cheapest * TIE)
            .min_by(|a, b| a.phases.len().cmp(&b.phases.len()).then(cost(a).total_cmp(&cost(b))))
    }

    fn fitting(&self, dtype: DType) -> impl Iterator<Item = &Line> {
        let wide = dtype.acc_size() != dtype.size();
        self.lines.iter().filter(move |line| {
            let p = line.choice.protocol;
            line.wide == wide && (p != Protocol::Sentinel || dtype.has_sentinel())
        })
    }
}

fn line(
    fabric: &Fabric,
    schedule: &Schedule,
    protocol: Protocol,
    wide: bool,
    constants: &Constants,
) -> Line {
    let count = schedule.ranks.first().map_or(0, |rank| rank.phases.len());
    let phases: Vec<PhaseCost> =
        (0..count).map(|at| phase(fabric, schedule, at, protocol, wide, constants)).collect();
    Line {
        choice: Choice { algorithm: schedule.algorithm, protocol, direction: Direction::Push },
        wide,
        fixed_us: constants.launch_us + phases.iter().map(|p| p.latency_us).sum::<f64>(),
        us_per_byte: phases.iter().map(|p| p.us_per_byte).sum(),
        phases,
    }
}

/// Bytes of one GPU in a phase, for each byte of the message.
#[derive(Default)]
struct Load {
    out: f64,
    into: f64,
    peers: BTreeSet<u8>,
}

fn phase(
    fabric: &Fabric,
    schedule: &Schedule,
    at: usize,
    protocol: Protocol,
    wide: bool,
    constants: &Constants,
) -> PhaseCost {
    let cuts = &schedule.cuts;
    let mut cost = PhaseCost {
        latency_us: 0.0,
        farthest: Class::X,
        us_per_byte: 0.0,
        carrier: Carrier::Nothing,
        bytes: [0.0; 6],
    };
    let mut gpus: BTreeMap<usize, Load> = BTreeMap::new();
    let (mut uplinks, mut sockets): (BTreeMap<(usize, bool), f64>, BTreeMap<_, f64>) =
        Default::default();
    // By uplink: the GPUs that leave through it, with how many streams, and towards which root complexes.
    let mut leaving: BTreeMap<usize, (BTreeMap<usize, usize>, BTreeSet<usize>)> = BTreeMap::new();
    for (me, rank) in schedule.ranks.iter().enumerate() {
        let phase = &rank.phases[at];
        let words = if phase.wire == Wire::Accumulator && wide { 2.0 } else { 1.0 };
        let words = if protocol == Protocol::Ll { 2.0 * words } else { words };
        for send in &phase.sends {
            let (peer, piece) = (usize::from(send.peer), usize::from(send.piece));
            let bytes =
                words * f64::from(cuts.num[piece + 1] - cuts.num[piece]) / f64::from(cuts.den);
            let hop = fabric.hops[me][peer];
            let fence =
                if protocol == Protocol::Flagged { constants.of(hop.class).fence_us } else { 0.0 };
            if hop.latency_us + fence > cost.latency_us {
                (cost.latency_us, cost.farthest) = (hop.latency_us + fence, hop.class);
            }
            cost.bytes[hop.class as usize] += bytes;
            let (from, to) = (&fabric.seats[me], &fabric.seats[peer]);
            if from.gpu == to.gpu {
                continue;
            }
            let load = gpus.entry(from.gpu).or_default();
            load.out += bytes;
            load.peers.insert(send.peer);
            gpus.entry(to.gpu).or_default().into += bytes;
            if from.uplink != to.uplink || from.uplink.is_none() {
                for (uplink, outwards) in [(from.uplink, true), (to.uplink, false)] {
                    if let Some(uplink) = uplink {
                        *uplinks.entry((uplink, outwards)).or_default() += bytes;
                    }
                }
                if let (Some(uplink), true) = (from.uplink, from.root != to.root) {
                    let (streams, roots) = leaving.entry(uplink).or_default();
                    *streams.entry(from.gpu).or_default() += 1;
                    roots.insert(to.root);
                }
            }
            if from.side != to.side {
                *sockets.entry((from.side, to.side)).or_default() += bytes;
            }
        }
    }
    let mut carry = |us_per_byte: f64, carrier: Carrier| {
        if us_per_byte > cost.us_per_byte {
            (cost.us_per_byte, cost.carrier) = (us_per_byte, carrier);
        }
    };
    // GB/s are bytes in a nanosecond.
    let us = |bytes: f64, gb_per_s: f64| bytes / gb_per_s / 1000.0;
    let link = |gpu: usize| fabric.seats.iter().find(|s| s.gpu == gpu).map_or(1.0, |s| s.link);
    for (&gpu, load) in &gpus {
        let peers = load.peers.len();
        carry(us(load.out, link(gpu) * constants.share(peers)), Carrier::LinkOut(peers));
        carry(us(load.into, link(gpu)), Carrier::LinkIn);
    }
    for ((uplink, _), bytes) in &uplinks {
        carry(us(*bytes, fabric.uplinks[*uplink]), Carrier::Uplink);
    }
    for bytes in sockets.values() {
        carry(us(*bytes, fabric.sockets), Carrier::Sockets);
    }
    for (streams, roots) in leaving.values().filter(|_| fabric.collapse_prone) {
        if streams.len() > 1 && (roots.len() > 1 || streams.values().any(|s| *s > 1)) {
            let worst = streams
                .keys()
                .filter_map(|gpu| gpus.get(gpu))
                .map(|load| load.out)
                .fold(0.0, f64::max);
            carry(us(worst, constants.collapsed), Carrier::Collapse);
        }
    }
    cost
}

#[cfg(test)]
mod tests {
    use super::super::constants::NOMINAL;
    use super::*;
    use crate::topology::from_matrix;

    /// Two sockets of four GPUs, each on a root port of its own.
    fn direct() -> Topology {
        let mut text =
            String::from(" GPU0 GPU1 GPU2 GPU3 GPU4 GPU5 GPU6 GPU7 CPU Affinity NUMA Affinity\n");
        for a in 0..8 {
            text.push_str(&format!("GPU{a} "));
            for b in 0..8 {
                text.push_str(match (a == b, a / 4 == b / 4) {
                    (true, _) => "X ",
                    (_, true) => "NODE ",
                    _ => "SYS ",
                });
            }
            text.push_str(&format!("0-1 {}\n", a / 4));
        }
        from_matrix("direct", &text).unwrap()
    }

    #[test]
    fn the_published_nominal_model_comes_out_for_two_sockets_of_four() {
        // One stream 50 GB/s, 3 peers 28, 7 peers 21, sockets 95; hops 1.0 and 1.5 us, fences likewise; launch 3.0.
        let constants =
            Constants { unknown_link: 50.0, efficiency: 1.0, sockets: [(1e9, 95.0); 2], ..NOMINAL };
        let islands = Islands::parse(8, "0-3,4-7").unwrap();
        let model =
            Model::new(&direct(), &(0..8).collect::<Vec<_>>(), &islands, &constants).unwrap();
        use {Algorithm::*, Protocol::*};
        // Sizes 14, 57, 115, 256 KB and 1 MB.
        for (algorithm, protocol, wide, published) in [
            (OneShot, Sentinel, true, [9.3, 23.6, 42.7, 91.9, 354.0]),
            (TwoShot, Sentinel, true, [7.2, 10.8, 15.6, 27.8, 93.4]),
            (Hierarchical, Sentinel, false, [7.4, 10.2, 13.9, 23.3, 73.7]),
            (Hierarchical, Sentinel, true, [7.6, 10.8, 15.1, 26.1, 84.7]),
            (DualOwner, Sentinel, true, [7.1, 11.8, 18.1, 34.4, 121.0]),
            (Pairwise, Sentinel, false, [7.7, 11.2, 15.9, 28.0, 92.6]),
            (Hierarchical, Ll, false, [8.3, 13.9, 21.2, 40.1, 141.0]),
            (TwoShot, Ll, true, [8.4, 15.6, 25.1, 49.7, 181.0]),
            (Hierarchical, Flagged, false, [10.9, 13.7, 17.4, 26.8, 77.2]),
            (DualOwner, Flagged, true, [9.6, 14.3, 20.6, 36.9, 124.0]),
            (Staged, Flagged, false, [18.6, 20.3, 22.6, 28.6, 60.5]),
        ] {
            let line = model
                .lines
                .iter()
                .find(|l| {
                    (l.choice.algorithm, l.choice.protocol, l.wide) == (algorithm, protocol, wide)
                })
                .unwrap();
            for (bytes, published) in
                [14_336, 57_344, 114_688, 262_144, 1 << 20].into_iter().zip(published)
            {
                let off = (line.us(bytes) / published - 1.0).abs();
                assert!(
                    off < 0.012,
                    "{algorithm} {protocol} {bytes}: {} against {published}",
                    line.us(bytes)
                );
            }
        }
    }

    #[test]
    fn a_slower_link_or_more_bytes_never_make_it_faster() {
        let islands = Islands::parse(8, "0-3,4-7").unwrap();
        let ranks: Vec<usize> = (0..8).collect();
        let fast = Model::new(&direct(), &ranks, &islands, &NOMINAL).unwrap();
        let slow = Constants { unknown_link: 16.0, ..NOMINAL };
        let slow = Model::new(&direct(), &ranks, &islands, &slow).unwrap();
        for (a, b) in fast.lines.iter().zip(&slow.lines) {
            assert_eq!(a.choice, b.choice);
            assert!(a.us_per_byte < b.us_per_byte && a.us(1024) < a.us(2048), "{:?}", a.choice);
        }
    }

    #[test]
    fn ties_go_to_fewer_phases_and_types_to_what_carries_them() {
        let islands = Islands::parse(8, "0-3,4-7").unwrap();
        let model = Model::new(&direct(), &(0..8).collect::<Vec<_>>(), &islands, &NOMINAL).unwrap();
        for bytes in [0, 1024, 14_336, 57_344, 1 << 20, 1 << 30] {
            for &dtype in DType::ALL {
                let chosen = model.choose(bytes, dtype, |_| true).unwrap();
                let best = model.candidates(bytes, dtype)[0];
                assert!(
                    chosen.us(bytes) <= best.us(bytes) * TIE
                        && chosen.phases.len() <= best.phases.len()
                );
                assert!(chosen.choice.protocol != Protocol::Sentinel || dtype.has_sentinel());
            }
        }
        assert_eq!(
            model
                .choose(57_344, DType::BF16, |a| a == Algorithm::Pairwise)
                .unwrap()
                .choice
                .algorithm,
            Algorithm::Pairwise
        );
        assert!(model.choose(57_344, DType::BF16, |_| false).is_none());
    }
}
