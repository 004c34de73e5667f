//! Distance classes, with the names and the meaning that `nvidia-smi topo -m` gives them.

use super::model::{BridgeKind, Topology};
use serde::Serialize;
use std::fmt;

/// How far apart two GPUs are; nearer is less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Class {
    /// The same GPU.
    X,
    /// One switch between them.
    Pix,
    /// Several switches, but no root complex.
    Pxb,
    /// The root complex that both hang on.
    Phb,
    /// Two root complexes of one NUMA node.
    Node,
    /// The link between NUMA nodes.
    Sys,
}

impl Class {
    /// Every class, nearest first.
    pub const ALL: [Class; 6] =
        [Class::X, Class::Pix, Class::Pxb, Class::Phb, Class::Node, Class::Sys];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Class::X => "X",
            Class::Pix => "PIX",
            Class::Pxb => "PXB",
            Class::Phb => "PHB",
            Class::Node => "NODE",
            Class::Sys => "SYS",
        }
    }

    /// What lies between, for people.
    pub const fn meaning(self) -> &'static str {
        match self {
            Class::X => "the same GPU",
            Class::Pix => "one PCIe switch",
            Class::Pxb => "several PCIe switches",
            Class::Phb => "a root complex",
            Class::Node => "two root complexes of one NUMA node",
            Class::Sys => "the link between NUMA nodes",
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Topology {
    /// The distance between two GPUs, by their places in [`gpus`](Self::gpus).
    ///
    /// Below one bridge, at most one more bridge on either way down is one switch: its downstream ports. Where a NUMA node
    /// is unknown the answer is `NODE` on a box with one node and `SYS`, the worse, on any other.
    pub fn class(&self, a: usize, b: usize) -> Class {
        if a == b {
            return Class::X;
        }
        let (Some(one), Some(other)) = (self.gpus.get(a), self.gpus.get(b)) else {
            return Class::Sys;
        };
        let (up, over) = (self.way(a), self.way(b));
        let meet = up.iter().rev().zip(over.iter().rev()).take_while(|(x, y)| x == y).count();
        if meet > 0 {
            // Ways end at the root complex, so the last bridge they share is the nearest one.
            let nearest = up[up.len() - meet];
            let below = (up.len() - meet).max(over.len() - meet);
            return match self.bridges[nearest].kind {
                BridgeKind::Host => Class::Phb,
                BridgeKind::Port if below <= 1 => Class::Pix,
                BridgeKind::Port => Class::Pxb,
            };
        }
        match (one.node, other.node) {
            (Some(x), Some(y)) if x == y => Class::Node,
            (Some(_), Some(_)) => Class::Sys,
            _ if self.nodes.len() <= 1 => Class::Node,
            _ => Class::Sys,
        }
    }

    /// Bridges from a GPU up to its root complex, nearest first.
    pub fn way(&self, gpu: usize) -> Vec<usize> {
        let mut way = Vec::new();
        let mut at = self.gpus.get(gpu).and_then(|g| g.parent);
        // Parents stand before their children, so that this ends.
        while let Some(bridge) = at {
            way.push(bridge);
            at = self.bridges[bridge].parent.filter(|parent| *parent < bridge);
        }
        way
    }

    /// The port of the root complex below which a GPU hangs: its uplink, which it shares with all others below it.
    pub fn uplink(&self, gpu: usize) -> Option<usize> {
        self.way(gpu).into_iter().rev().find(|&b| self.bridges[b].kind == BridgeKind::Port)
    }

    /// The root complex of a GPU.
    pub fn root_complex(&self, gpu: usize) -> Option<usize> {
        self.way(gpu).last().copied().filter(|&b| self.bridges[b].kind == BridgeKind::Host)
    }

    /// The classes between all GPUs as `nvidia-smi topo -m` prints them, without its columns for CPUs.
    pub fn matrix(&self) -> String {
        let mut text = String::from("     ");
        let all = 0..self.gpus.len();
        text.extend(all.clone().map(|b| format!(" {:>5}", format!("GPU{b}"))));
        text.push('\n');
        for a in all.clone() {
            text.push_str(&format!("{:<5}", format!("GPU{a}")));
            text.extend(all.clone().map(|b| format!(" {:>5}", self.class(a, b))));
            text.push('\n');
        }
        text
    }
}
