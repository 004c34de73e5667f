//! From the described box to islands of ranks, and to the text by which ranks compare what they see.

use super::model::Topology;
use crate::error::{Error, Result};
use crate::schedule::Islands;
use crate::types::{MAX_ISLANDS, MAX_RANKS};

/// Islands, and why these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The islands.
    pub islands: Islands,
    /// The crossing between them, or why there is only one; for people.
    pub reason: String,
}

/// Islands of ranks, where rank `r` runs on GPU `gpu_of[r]` of `topology` (several ranks may share one).
///
/// The rule: **an island ends at the outermost crossing that some of its ranks must share.** From the outside in, the box parts at
///
/// 1. sockets (NUMA nodes where the description knows no sockets): all traffic between them shares the sockets' link;
/// 2. ports of the root complex: the GPUs of a switch share its uplink;
/// 3. switches behind switches, level by level: likewise their uplinks;
/// 4. GPUs: ranks on one GPU share its link.
///
/// The first of these levels that parts the ranks into two to four groups, at least one of them with two ranks or more,
/// gives the islands. If every rank is alone in its group, the level has no shared crossing and nothing is gained by reducing
/// first in a group. NUMA nodes inside a socket are no level: between them lies no narrower link than to the socket's own root
/// complexes. Where a level has more than four groups the next one has still more, so the ranks are one island.
///
/// The rule looks at the description alone, so that the same box gives the same islands, the same order of summation and
/// the same bits in every run.
///
/// # Errors
/// [`Error::InvalidArgument`] for no or too many ranks, or a GPU that is not there.
pub fn islands(topology: &Topology, gpu_of: &[usize]) -> Result<Found> {
    let n = gpu_of.len();
    if n == 0 || n > MAX_RANKS {
        return Err(Error::InvalidArgument(format!(
            "{n} ranks; a communicator has 1 to {MAX_RANKS}"
        )));
    }
    if let Some((rank, gpu)) =
        gpu_of.iter().enumerate().find(|(_, gpu)| **gpu >= topology.gpus.len())
    {
        return Err(Error::InvalidArgument(format!(
            "rank {rank} is to run on GPU {gpu}, but {} describes {} GPU(s)",
            topology.source,
            topology.gpus.len()
        )));
    }
    let mut too_many = None;
    for level in levels(topology, gpu_of) {
        let groups = group_by(&level.keys);
        if groups.len() > MAX_ISLANDS {
            too_many.get_or_insert((groups.len(), level.crossing));
            continue;
        }
        if groups.len() > 1 && groups.iter().any(|group| group.len() > 1) {
            let reason = format!(
                "{} share {}",
                if groups.len() == 2 { "both islands" } else { "the islands" },
                level.crossing
            );
            return Ok(Found { islands: Islands::new(n, groups)?, reason });
        }
    }
    let reason = match too_many {
        Some((count, crossing)) => format!(
            "{count} groups share {crossing}, and more than {MAX_ISLANDS} islands are not made"
        ),
        None if n == 1 => "one rank".into(),
        None => "no shared crossing parts the ranks".into(),
    };
    Ok(Found { islands: Islands::single(n)?, reason })
}

struct Level {
    crossing: &'static str,
    /// By rank; equal keys are on the same side.
    keys: Vec<Vec<usize>>,
}

fn levels(topology: &Topology, gpu_of: &[usize]) -> Vec<Level> {
    let gpus = || gpu_of.iter().map(|&g| &topology.gpus[g]);
    let by_socket = gpus().all(|gpu| gpu.socket.is_some());
    let side = |gpu: &super::Gpu| -> Vec<usize> {
        let known = if by_socket { gpu.socket } else { gpu.node };
        known.map(|id| id as usize).into_iter().collect()
    };
    let mut levels = vec![Level {
        crossing: if by_socket {
            "the link between sockets"
        } else {
            "the link between NUMA nodes"
        },
        keys: gpus().map(side).collect(),
    }];
    // From the root complex down to the GPU; the root complex itself is no crossing that its ports share.
    let ways: Vec<Vec<usize>> = gpu_of
        .iter()
        .map(|&gpu| {
            let mut way = topology.way(gpu);
            way.reverse();
            way
        })
        .collect();
    let deepest = ways.iter().map(Vec::len).max().unwrap_or(0);
    for depth in 2..=deepest {
        levels.push(Level {
            crossing: if depth == 2 {
                "an uplink to the root complex"
            } else {
                "an uplink between switches"
            },
            keys: ways
                .iter()
                .zip(gpu_of)
                .map(|(way, gpu)| match way.len() >= depth {
                    true => way[..depth].to_vec(),
                    // A GPU that hangs higher up is on a side of its own.
                    false => [&way[..], &[usize::MAX, *gpu]].concat(),
                })
                .collect(),
        });
    }
    levels.push(Level {
        crossing: "the link of a GPU",
        keys: gpu_of.iter().map(|&g| vec![g]).collect(),
    });
    levels
}

/// Ranks with equal keys, in order of their lowest rank.
fn group_by(keys: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (rank, key) in keys.iter().enumerate() {
        match groups.iter_mut().find(|group| keys[group[0]] == *key) {
            Some(group) => group.push(rank),
            None => groups.push(vec![rank]),
        }
    }
    groups
}

impl Topology {
    /// What ranks on these GPUs must see alike: their addresses, sockets, nodes and ways to the root complexes. What differs
    /// between containers of one box (hidden GPUs), or from moment to moment (link rates), is not in it.
    pub fn fingerprint(&self, gpu_of: &[usize]) -> String {
        let mut text = String::new();
        for (rank, &at) in gpu_of.iter().enumerate() {
            let Some(gpu) = self.gpus.get(at) else { continue };
            let place = gpu.address.map_or_else(|| format!("GPU{at}"), |a| a.to_string());
            let number = |n: Option<u32>| n.map_or("?".into(), |n| n.to_string());
            text.push_str(&format!(
                "rank {rank} on {place}, socket {}, node {}",
                number(gpu.socket),
                number(gpu.node)
            ));
            for bridge in self.way(at) {
                text.push_str(&format!(" < {}", self.bridges[bridge].name));
            }
            text.push('\n');
        }
        text
    }

    /// The 64-bit FNV-1a hash of [`fingerprint`](Self::fingerprint).
    pub fn hash64(&self, gpu_of: &[usize]) -> u64 {
        self.fingerprint(gpu_of)
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::from_matrix;

    /// A box of `groups` GPUs each behind a switch, `sockets` lists of such switches.
    fn switches(sockets: &[&[usize]]) -> Topology {
        let place: Vec<(usize, usize)> = sockets
            .iter()
            .enumerate()
            .flat_map(|(s, sizes)| {
                sizes.iter().enumerate().flat_map(move |(w, size)| vec![(s, w); *size])
            })
            .collect();
        let mut text = String::from(" ");
        text.extend((0..place.len()).map(|g| format!("GPU{g} ")));
        text.push_str("CPU Affinity NUMA Affinity\n");
        for (a, one) in place.iter().enumerate() {
            text.push_str(&format!("GPU{a} "));
            for (b, other) in place.iter().enumerate() {
                text.push_str(match (a == b, one == other, one.0 == other.0) {
                    (true, ..) => "X ",
                    (_, true, _) => "PIX ",
                    (_, _, true) => "NODE ",
                    _ => "SYS ",
                });
            }
            text.push_str(&format!("0-3 {}\n", one.0));
        }
        from_matrix("box", &text).unwrap()
    }

    fn found(topology: &Topology, gpu_of: &[usize]) -> String {
        islands(topology, gpu_of).unwrap().islands.to_string()
    }

    #[test]
    fn the_outermost_shared_crossing_makes_the_islands() {
        let all = |t: &Topology| (0..t.gpus.len()).collect::<Vec<_>>();
        for (sockets, expected) in [
            (&[&[2usize, 2] as &[usize], &[2, 2]] as &[&[usize]], "0-3,4-7"),
            (&[&[1, 1, 1, 1], &[1, 1, 1, 1]], "0-3,4-7"),
            (&[&[2, 2]], "0-1,2-3"),
            (&[&[4, 4, 4, 4]], "0-3,4-7,8-11,12-15"),
            (&[&[4]], "0-3"),
            (&[&[1, 1, 1, 1]], "0-3"),
            (&[&[3, 2, 1]], "0-2,3-4,5"),
            (&[&[2, 2, 2, 2, 2, 2]], "0-11"),
            (&[&[7], &[1]], "0-6,7"),
            (&[&[1], &[1]], "0-1"),
        ] {
            let t = switches(sockets);
            assert_eq!(found(&t, &all(&t)), expected, "{sockets:?}");
        }
    }

    #[test]
    fn rank_numbers_do_not_matter_and_gpus_may_be_shared_or_left_out() {
        let t = switches(&[&[2, 2], &[2, 2]]);
        assert_eq!(found(&t, &[0, 4, 1, 5, 2, 6, 3, 7]), "0+2+4+6,1+3+5+7");
        assert_eq!(found(&t, &[0, 1, 2, 3]), "0-1,2-3", "only one socket is used");
        assert_eq!(found(&t, &[0, 1]), "0-1");
        assert_eq!(found(&t, &[0, 0, 0]), "0-2", "virtual ranks");
        assert_eq!(found(&t, &[0, 0, 1, 1]), "0-1,2-3", "two ranks on either GPU");
        assert_eq!(found(&t, &[5]), "0");
    }

    #[test]
    fn ranks_that_cannot_be_are_refused() {
        let t = switches(&[&[2]]);
        for (gpu_of, what) in [
            (vec![], "0 ranks"),
            (vec![0; 17], "17 ranks"),
            (vec![0, 2], "rank 1 is to run on GPU 2"),
        ] {
            let error = islands(&t, &gpu_of).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
    }

    #[test]
    fn the_hash_tells_boxes_apart_and_ignores_what_ranks_do_not_use() {
        let (one, other) = (switches(&[&[2, 2]]), switches(&[&[2, 1, 1]]));
        assert_ne!(one.hash64(&[0, 1, 2, 3]), other.hash64(&[0, 1, 2, 3]));
        assert_eq!(one.hash64(&[0, 1]), other.hash64(&[0, 1]));
        assert_ne!(one.hash64(&[0, 1]), one.hash64(&[1, 0]));
    }
}
