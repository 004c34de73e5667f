//! Where a rank's host memory and the library's own threads live: near its GPU. Memory on another NUMA node costs every
//! staged byte a crossing between sockets, and a watching thread there costs every look at it one.
//!
//! All of it is a wish. A container often forbids it, and a process may be confined to other CPUs; what is far is slower,
//! not wrong, so a refusal is said once in the log, at `debug`. Threads of the application are never touched.

use crate::lane::Mapping;
use crate::log::log;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Once;

/// The highest CPU number and NUMA node that Linux can be built for, and more.
const MOST_CPUS: usize = 8192;
const MOST_NODES: usize = 1024;
const BITS: usize = u64::BITS as usize;

/// A rank's place; nothing where it is not known or not wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Placement {
    node: Option<u32>,
    cpus: BTreeSet<u32>,
}

impl Placement {
    /// On NUMA node `node`, near the CPUs of a list such as `0-15,32-47`.
    pub fn new(node: Option<u32>, cpus: &str) -> Self {
        let node = node.filter(|node| (*node as usize) < MOST_NODES);
        Placement { node, cpus: cpu_list(cpus) }
    }

    /// The NUMA node for host memory.
    pub fn node(&self) -> Option<u32> {
        self.node
    }

    /// The same with `node` where none is known.
    pub fn or_node(self, node: Option<u32>) -> Self {
        Placement { node: self.node.or(node), ..self }
    }

    /// Keeps the calling thread, which is the library's own, to those CPUs of the place that it may use; where there are none
    /// it stays as it is.
    pub fn keep_thread(&self) {
        let mut allowed = [0u64; MOST_CPUS / BITS];
        // SAFETY: the kernel writes at most the bytes announced, into a mask of that size.
        let known = unsafe {
            libc::sched_getaffinity(0, size_of_val(&allowed), allowed.as_mut_ptr().cast())
        };
        if known != 0 {
            return refused("sched_getaffinity");
        }
        let mut near = [0u64; MOST_CPUS / BITS];
        for cpu in self.cpus.iter().map(|cpu| *cpu as usize) {
            near[cpu / BITS] |= allowed[cpu / BITS] & 1 << (cpu % BITS);
        }
        if near == [0; MOST_CPUS / BITS] || near == allowed {
            return;
        }
        // SAFETY: a mask of the size announced; 0 is the calling thread.
        let set = unsafe { libc::sched_setaffinity(0, size_of_val(&near), near.as_ptr().cast()) };
        if set != 0 {
            refused("sched_setaffinity");
        }
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.node {
            Some(node) => write!(f, "host memory on NUMA node {node}")?,
            None => f.write_str("host memory anywhere")?,
        }
        match (self.cpus.first(), self.cpus.last()) {
            (Some(first), Some(last)) => {
                write!(f, ", own threads on {} CPUs of {first} to {last}", self.cpus.len())
            }
            _ => f.write_str(", own threads anywhere"),
        }
    }
}

/// Asks for a mapping's pages on `node`, before anybody has touched them; elsewhere when it is full.
pub(crate) fn prefer_node(mapping: &Mapping, node: u32) {
    const MPOL_PREFERRED: libc::c_long = 1;
    let mut mask = [0u64; MOST_NODES / BITS];
    let Some(word) = mask.get_mut(node as usize / BITS) else { return };
    *word = 1 << (node as usize % BITS);
    // SAFETY: the range is this mapping, and the mask has the bits announced (the kernel counts one more).
    let set = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            mapping.base().as_ptr(),
            mapping.bytes(),
            MPOL_PREFERRED,
            mask.as_ptr(),
            MOST_NODES as libc::c_ulong + 1,
            0 as libc::c_uint,
        )
    };
    if set != 0 {
        refused("mbind");
    }
}

/// Said once: every communicator would say the same.
fn refused(call: &str) {
    static SAID: Once = Once::new();
    let error = std::io::Error::last_os_error();
    SAID.call_once(|| log!(Debug, "no placement near the GPU: {call}: {error}"));
}

/// `0-15,32-47` as a set; what is no list, or names CPUs that no Linux has, is empty or cut.
fn cpu_list(list: &str) -> BTreeSet<u32> {
    let number = |text: &str| text.trim().parse::<u32>().ok();
    let ranges = list.split(',').filter_map(|part| match part.split_once('-') {
        Some((a, b)) => Some((number(a)?, number(b)?)),
        None => number(part).map(|one| (one, one)),
    });
    ranges.flat_map(|(a, b)| a..=b.min(MOST_CPUS as u32 - 1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::HostSlab;

    /// Policy and node mask of the pages at an address, then the node that the first of them is on.
    fn policy(at: *const u8) -> Option<(i32, u64, i32)> {
        const MPOL_F_NODE: libc::c_ulong = 1;
        const MPOL_F_ADDR: libc::c_ulong = 2;
        let (mut mode, mut mask, mut node) = (-1i32, [0u64; MOST_NODES / BITS], -1i32);
        // SAFETY: both write what they are given room for; the address is mapped.
        unsafe {
            let all = MOST_NODES as libc::c_ulong + 1;
            let none = std::ptr::null_mut::<u64>();
            let first = libc::syscall(
                libc::SYS_get_mempolicy,
                &mut mode,
                mask.as_mut_ptr(),
                all,
                at,
                MPOL_F_ADDR,
            );
            let second = libc::syscall(
                libc::SYS_get_mempolicy,
                &mut node,
                none,
                0 as libc::c_ulong,
                at,
                MPOL_F_ADDR | MPOL_F_NODE,
            );
            (first == 0 && second == 0).then_some((mode, mask[0], node))
        }
    }

    #[allow(clippy::print_stdout)]
    #[test]
    fn a_slabs_pages_lie_on_the_node_that_was_asked_for() {
        let mut slab = HostSlab::create(1 << 20).unwrap();
        let at = slab.mapping().base().as_ptr().cast_const();
        let Some((mode, ..)) = policy(at) else {
            println!("skipped: get_mempolicy is refused: {}", std::io::Error::last_os_error());
            return;
        };
        assert_eq!(mode, 0, "a control: nobody has asked for anything");
        prefer_node(slab.mapping(), 0);
        if policy(at).is_some_and(|(mode, ..)| mode == 0) {
            println!("skipped: mbind is refused here");
            return;
        }
        slab.arm(0, 1 << 20).unwrap();
        for page in (0..1 << 20).step_by(4096) {
            // Preferred, the mask names node 0, and there it is.
            assert_eq!(policy(at.wrapping_add(page)), Some((1, 1, 0)), "{page}");
        }
        // A node that no machine has changes nothing.
        prefer_node(slab.mapping(), 1_000_000);
        prefer_node(slab.mapping(), 1023);
        assert_eq!(policy(at), Some((1, 1, 0)));
    }

    fn allowed() -> Vec<u32> {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).unwrap();
        cpu_list(list).into_iter().collect()
    }

    #[test]
    fn a_thread_keeps_to_the_near_cpus_that_it_may_use() {
        let mine = allowed();
        let (first, last) = (mine[0], mine[mine.len() - 1]);
        let kept = |placement: Placement| {
            std::thread::spawn(move || {
                placement.keep_thread();
                allowed()
            })
            .join()
            .unwrap()
        };
        // Those near that the process may not use are left out.
        assert_eq!(kept(Placement::new(None, &format!("{last},8000-8191"))), [last]);
        assert_eq!(kept(Placement::new(None, &first.to_string())), [first]);
        // None that it may use, or none known: as it was.
        for list in ["8000-8191", "", "99999999", "near"] {
            assert_eq!(kept(Placement::new(Some(0), list)), mine, "{list}");
        }
        assert_eq!(allowed(), mine, "the thread that asked has not moved");
    }

    #[test]
    fn lists_of_cpus_are_sets() {
        assert_eq!(cpu_list("0-2,5\n").into_iter().collect::<Vec<_>>(), [0, 1, 2, 5]);
        assert!(cpu_list("x-y").is_empty() && cpu_list("").is_empty());
        assert_eq!(cpu_list("0-4294967295").len(), MOST_CPUS);
        let text = Placement::new(Some(1), "16-31").to_string();
        assert_eq!(text, "host memory on NUMA node 1, own threads on 16 CPUs of 16 to 31");
        assert_eq!(Placement::new(Some(5000), "").node(), None);
    }
}
