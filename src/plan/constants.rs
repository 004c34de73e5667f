//! What the model of a PCIe box reckons with: one number each, with its source.

use crate::topology::Class;

/// Figures of one distance class.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PerClass {
    /// The class.
    pub class: Class,
    /// One way from a store to its discovery by a polling reader, in microseconds, before switches.
    pub latency_us: f64,
    /// What a release and acquire cost more than a tag in the word, in microseconds.
    pub fence_us: f64,
    /// Where the figures come from.
    pub source: &'static str,
}

/// Every constant of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Constants {
    /// Launch, reading the input, summing and writing the output, inside a replayed graph, in microseconds.
    pub launch_us: f64,
    /// By class, nearest first.
    pub classes: [PerClass; 6],
    /// Microseconds that each switch on the way adds.
    pub switch_us: f64,
    /// GB/s of a link where the description has none: Gen4 x16.
    pub unknown_link: f64,
    /// The share of a link's rate that full-line stores reach.
    pub efficiency: f64,
    /// The share of one stream's rate that a GPU reaches in all when it writes to so many peers at once.
    pub fan_out: [(f64, f64); 3],
    /// GB/s in one direction between two sockets whose GPUs have links of up to so many GB/s.
    pub sockets: [(f64, f64); 2],
    /// GB/s of a GPU whose posted writes collapse.
    pub collapsed: f64,
}

/// The constants that boxes are reckoned with. Latencies are those of measured flags plus 0.3 to 0.4 us for the poll, in the
/// proportion of the published nominal model.
pub const NOMINAL: Constants = Constants {
    launch_us: 3.0,
    classes: [
        PerClass {
            class: Class::X,
            latency_us: 0.5,
            fence_us: 0.5,
            source: "assumed: L2 of one GPU",
        },
        PerClass {
            class: Class::Pix,
            latency_us: 0.85,
            fence_us: 1.0,
            source: "rtx6kpro: flag 0.63-0.73 us through one switch",
        },
        PerClass {
            class: Class::Pxb,
            latency_us: 0.85,
            fence_us: 1.0,
            source: "rtx6kpro: read via a root switch 1.14-1.18 us, via one switch 0.71-0.73",
        },
        PerClass {
            class: Class::Phb,
            latency_us: 1.0,
            fence_us: 1.0,
            source: "rtx6kpro: read on one NUMA node 0.71-0.74 us, direct",
        },
        PerClass {
            class: Class::Node,
            latency_us: 1.0,
            fence_us: 1.0,
            source: "rtx6kpro: 10 ns more per quadrant; flag 1.04-1.12 us behind two switches",
        },
        PerClass {
            class: Class::Sys,
            latency_us: 1.5,
            fence_us: 1.5,
            source: "rtx6kpro: read across NUMA nodes 1.27-1.36 us",
        },
    ],
    // rtx6kpro: behind two switches 0.4 us more than behind one.
    switch_us: 0.15,
    unknown_link: 31.5,
    // flashinfer#4870: one hop 26.3 of 31.5 GB/s (L40S, Gen4) and 53 to 55 of 63 (sm_120, Gen5).
    efficiency: 0.84,
    // rtx6kpro: all-to-all 32 GB/s per GPU of 4, 21.6 of 8, against 53; vllm#56128: 25.4 of 44.8 with 3 peers.
    fan_out: [(1.0, 1.0), (3.0, 0.56), (7.0, 0.42)],
    // flashinfer#4870: all four GPUs of a socket crossing get 9.7 GB/s each (L40S, Gen4), 23.8 (sm_120, Gen5).
    sockets: [(40.0, 38.8), (f64::INFINITY, 95.0)],
    // rtx6kpro collapse report: 37 GB/s fall to 2.7 with two writers behind one switch.
    collapsed: 2.7,
};

impl Constants {
    /// The figures of a class.
    pub fn of(&self, class: Class) -> &PerClass {
        &self.classes[class as usize]
    }

    /// The share of a stream's rate at this fan-out: between the measured ones a straight line, beyond them the last.
    pub fn share(&self, fan_out: usize) -> f64 {
        let at = fan_out as f64;
        let mut below = self.fan_out[0];
        for &point in &self.fan_out[1..] {
            if at <= point.0 {
                let way = ((at - below.0) / (point.0 - below.0)).max(0.0);
                return below.1 + way * (point.1 - below.1);
            }
            below = point;
        }
        below.1
    }

    /// GB/s in one direction between sockets, for GPUs with links of this rate.
    pub fn between_sockets(&self, link: f64) -> f64 {
        self.sockets.iter().find(|(up_to, _)| link <= *up_to).map_or(self.sockets[1].1, |s| s.1)
    }
}
