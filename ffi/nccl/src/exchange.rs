//! The ranks of a new communicator tell each other where they are, over the communicator itself, and all decide alike.
//!
//! It happens at creation, which all ranks take part in whatever else they do. At the first all-reduce it could not: that
//! may stand in a group beside a send whose receiver comes to its own all-reduce first, and the exchange would wait
//! behind the send, inside NCCL. What it finds out is where to meet; the set-up proper needs NCCL no more.

use crate::forward;
use crate::settings;
use crate::types::*;
use peerlane_core::bootstrap::UniqueId;
use peerlane_core::comm::Config;
use peerlane_core::device::cuda::{Context, Device, DeviceMemory, Driver, RelaxedThread, Stream};
use peerlane_core::env::ServedBytes;
use peerlane_core::plan::nccl::{served_bytes, RING};
use peerlane_core::plan::{Model, NOMINAL};
use peerlane_core::topology::{from_path, from_sysfs, islands, Address, Files, Topology};
use peerlane_core::types::MAX_RANKS;
use peerlane_core::{Error, Result};
use serde::{Deserialize, Serialize};
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A rank's record, padded to this: all send the same number of bytes.
const RECORD_BYTES: usize = 640;
/// Longest reason that fits beside the rest.
const REASON_BYTES: usize = 200;

/// A rank of this process.
pub struct Member {
    /// NCCL's handle.
    pub comm: ncclComm_t,
    /// Number of ranks.
    pub n: usize,
    /// This one.
    pub rank: usize,
    /// Its GPU, by the number in this process.
    pub ordinal: u32,
    /// That GPU's context.
    pub context: Context,
}

impl Member {
    /// Looks a communicator up; `None` for one that NCCL serves whatever its ranks are: one rank, or too many.
    pub fn new(comm: ncclComm_t) -> Result<Option<Self>> {
        let (mut n, mut rank, mut ordinal) = (0, 0, 0);
        // SAFETY: a communicator that NCCL has just made; each call writes one int.
        let results = unsafe {
            [
                forward::ncclCommCount(comm, &mut n),
                forward::ncclCommUserRank(comm, &mut rank),
                forward::ncclCommCuDevice(comm, &mut ordinal),
            ]
        };
        if results != [ncclSuccess; 3] {
            return Err(Error::Internal(format!(
                "NCCL knows nothing of its new communicator: {results:?}"
            )));
        }
        if !(2..=MAX_RANKS as i32).contains(&n) {
            return Ok(None);
        }
        let device = Device::by_ordinal(Driver::load()?, ordinal as u32)?;
        let context = Context::retain(&device)?;
        Ok(Some(Member {
            comm,
            n: n as usize,
            rank: rank as usize,
            ordinal: ordinal as u32,
            context,
        }))
    }
}

/// Where a rank is and what it would do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    version: String,
    place: std::result::Result<Place, String>,
    served: Option<Vec<(u32, u64)>>,
    seat: Option<Seat>,
    id: Vec<u8>,
}

/// Where its GPU is in the box as it sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Seat {
    gpu: String,
    /// Of the whole description.
    hash: u64,
}

/// What ranks must have in common to meet, and to reach each other's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Place {
    boot: String,
    pids: u64,
    user: u32,
    /// Device and inode of the run directory: containers of one box may have different ones under the same path.
    run_dir: (u64, u64),
}

/// The host, so that ranks on several do not try to meet. Sandboxes without a boot id are told apart by their names.
fn host() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    if !boot.trim().is_empty() {
        return boot.trim().to_owned();
    }
    let mut name = [0u8; 64];
    // SAFETY: a buffer of this size; what does not fit is cut off.
    unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let length = name.iter().position(|&byte| byte == 0).unwrap_or(0);
    format!("host {}", String::from_utf8_lossy(&name[..length]))
}

fn own_record(member: &Member) -> Record {
    let look = || -> Result<(Place, UniqueId)> {
        let env =
            settings::get().env.as_ref().map_err(|why| Error::InvalidArgument(why.clone()))?;
        Config::from_vars(member.n, env)?;
        let id = UniqueId::new()?;
        let stat = |path: &std::path::Path| {
            std::fs::metadata(path).map_err(|e| Error::os(format!("stat({})", path.display()), &e))
        };
        let run_dir = stat(id.run_dir())?;
        let place = Place {
            boot: host(),
            pids: stat("/proc/self/ns/pid".as_ref())?.ino(),
            user: run_dir.uid(),
            run_dir: (run_dir.dev(), run_dir.ino()),
        };
        Ok((place, id))
    };
    let (place, id) = match look() {
        Ok((place, id)) => (Ok(place), id.as_bytes().to_vec()),
        Err(error) => {
            let mut why = error.to_string();
            let end = (0..=REASON_BYTES.min(why.len())).rev().find(|&at| why.is_char_boundary(at));
            why.truncate(end.unwrap_or(0));
            (Err(why), Vec::new())
        }
    };
    Record {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        place,
        // Longer tables would not fit; ranks that differ only beyond this meet, and find that their calls differ.
        served: settings::get()
            .served
            .as_ref()
            .map(|served| served.steps().iter().take(MAX_RANKS).copied().collect()),
        seat: described().map(|(_, hash)| Seat {
            gpu: member.context.device().facts().pci_bus_id.clone(),
            hash: *hash,
        }),
        id,
    }
}

/// The box, as `PEERLANE_TOPOLOGY` or sysfs describe it, and its hash; none where it shows no GPUs.
fn described() -> Option<&'static (Topology, u64)> {
    static BOX: OnceLock<Option<(Topology, u64)>> = OnceLock::new();
    let look = || {
        let named = settings::get().env.as_ref().ok().and_then(|env| env.topology.clone());
        let found = match named {
            Some(path) => from_path(&path),
            None => from_sysfs(&Files::directory("/")),
        };
        let topology = found.ok().filter(|topology| !topology.gpus.is_empty())?;
        let all: Vec<usize> = (0..topology.gpus.len()).collect();
        let hash = topology.hash64(&all);
        Some((topology, hash))
    };
    BOX.get_or_init(look).as_ref()
}

/// Up to how many bytes a communicator of these ranks serves: what the user says, else what is predicted where all see one box and
/// sit on several of its GPUs, else a table. The same on all ranks: they have the same records, and equal hashes are equal boxes.
fn most_bytes(records: &[Option<Record>], described: Option<&(Topology, u64)>) -> u64 {
    let n = records.len();
    if let Some(served) = records.iter().flatten().find_map(|record| record.served.clone()) {
        return ServedBytes::new(served).of(n);
    }
    let predicted = described.and_then(|(topology, hash)| {
        let seat = |record: &Option<Record>| {
            let seat = record.as_ref()?.seat.as_ref().filter(|seat| seat.hash == *hash)?;
            topology.at(Address::parse(&seat.gpu)?)
        };
        let gpu_of = records.iter().map(seat).collect::<Option<Vec<usize>>>()?;
        let islands = islands(topology, &gpu_of).ok()?.islands;
        let model = Model::new(topology, &gpu_of, &islands, &NOMINAL).ok()?;
        // On one GPU none of the model's bytes would count.
        (model.fabric.gpus() > 1).then(|| served_bytes(&model, &RING) as u64)
    });
    predicted.unwrap_or_else(|| settings::undescribed_bytes().of(n))
}

/// What all ranks conclude from the same records: where to meet, or why NCCL serves.
fn decide(records: &[Option<Record>]) -> std::result::Result<UniqueId, String> {
    let mut first: Option<(&Record, &Place)> = None;
    for (rank, record) in records.iter().enumerate() {
        let Some(record) = record else {
            return Err(format!("rank {rank} sent something that is no record of this version"));
        };
        let place =
            record.place.as_ref().map_err(|why| format!("rank {rank} cannot take part: {why}"))?;
        let Some((zero, theirs)) = first else {
            first = Some((record, place));
            continue;
        };
        if record.version != zero.version {
            return Err(format!(
                "rank {rank} has peerlane {}, rank 0 {}",
                record.version, zero.version
            ));
        }
        if place.boot != theirs.boot {
            return Err(format!("rank {rank} is on another host than rank 0"));
        }
        if place != theirs {
            return Err(format!(
                "rank {rank} shares no run directory, user or process namespace with rank 0 (set PEERLANE_RUN_DIR to one \
                 directory for all, and run the containers with one pid namespace)"
            ));
        }
        if record.served != zero.served {
            return Err(format!("PEERLANE_NCCL_BYTES differs between rank {rank} and rank 0"));
        }
    }
    let id = first.map(|(zero, _)| zero.id.clone()).unwrap_or_default();
    let id: [u8; 128] = id.try_into().map_err(|_| "rank 0 sent no place to meet".to_owned())?;
    UniqueId::from_bytes(id).map_err(|error| error.to_string())
}

fn encode(record: &Record) -> Result<Vec<u8>> {
    let mut bytes = postcard::to_stdvec(record).map_err(|e| Error::Internal(e.to_string()))?;
    if bytes.len() > RECORD_BYTES {
        return Err(Error::Internal(format!("a record of {} bytes", bytes.len())));
    }
    bytes.resize(RECORD_BYTES, 0);
    Ok(bytes)
}

fn decode(bytes: &[u8]) -> Option<Record> {
    postcard::take_from_bytes(bytes).ok().map(|(record, _)| record)
}

/// What an exchange needs on the GPU. It is kept as long as the communicator: freeing waits for the whole GPU, on which work may be
/// under way that waits for what this process does next.
pub type Kept = (Stream, DeviceMemory);

/// What the ranks of a communicator have agreed on.
#[derive(Clone, Debug)]
pub struct Agreed {
    /// Where they meet.
    pub id: UniqueId,
    /// Larger messages are NCCL's.
    pub most_bytes: u64,
}

/// What they have agreed on, or why NCCL serves.
pub type Decided = std::result::Result<Agreed, String>;

/// Exchanges and decides, for all local ranks of the communicators at once. An error means that a rank may wait for this
/// process in vain: the communicators are to be given up.
pub fn exchange(members: &[Member]) -> Result<Vec<(Decided, Kept)>> {
    let mut prepared: Vec<Kept> = Vec::with_capacity(members.len());
    for member in members {
        let entered = member.context.enter()?;
        // Somebody else in the process may be capturing.
        let _relaxed = RelaxedThread::new(&entered)?;
        let stream = Stream::new(&member.context, 0)?;
        let memory = DeviceMemory::new(&member.context, RECORD_BYTES * member.n)?;
        memory.write(&stream, RECORD_BYTES * member.rank, &encode(&own_record(member))?)?;
        prepared.push((stream, memory));
    }
    let gather = |(member, (stream, memory)): (&Member, &Kept)| {
        let to = memory.ptr() as *mut u8;
        let from = to.wrapping_add(RECORD_BYTES * member.rank);
        // SAFETY: in place, in an allocation of n records, on a stream of the communicator's GPU; both outlive the wait below.
        unsafe {
            forward::ncclAllGather(
                from.cast(),
                to.cast(),
                RECORD_BYTES,
                ncclUint8,
                member.comm,
                stream.as_ref().as_raw().cast(),
            )
        }
    };
    // SAFETY: a group around the local ranks, as NCCL asks for where a thread has several.
    let results = unsafe {
        let mut results = vec![forward::ncclGroupStart()];
        results.extend(members.iter().zip(&prepared).map(gather));
        results.push(forward::ncclGroupEnd());
        results
    };
    if let Some(code) = results.into_iter().find(|&code| code != ncclSuccess) {
        return Err(Error::Internal(format!(
            "NCCL's all-gather of the ranks' places failed with code {code}"
        )));
    }
    let patience = settings::get().env.as_ref().ok().and_then(|env| env.setup_deadline);
    let until = Instant::now() + patience.unwrap_or(Duration::from_secs(120));
    let wait = |(member, (stream, memory)): (&Member, &Kept)| -> Result<_> {
        let entered = member.context.enter()?;
        let _relaxed = RelaxedThread::new(&entered)?;
        let mut pause = Duration::from_micros(20);
        while !stream.as_ref().is_idle(&entered)? {
            if Instant::now() >= until {
                return Err(Error::Unsupported(
                    "not all ranks answered at the communicator's creation: every rank must run with peerlane, or none \
                     (PEERLANE_DISABLE=1)"
                        .into(),
                ));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
        let mut bytes = vec![0; RECORD_BYTES * member.n];
        memory.read(stream, 0, &mut bytes)?;
        let records: Vec<_> = bytes.chunks(RECORD_BYTES).map(decode).collect();
        let agreed = |id| Agreed { id, most_bytes: most_bytes(&records, described()) };
        Ok(decide(&records).map(agreed))
    };
    let decided: Result<Vec<_>> = members.iter().zip(&prepared).map(wait).collect();
    match decided {
        Ok(decided) => Ok(decided.into_iter().zip(prepared).collect()),
        Err(error) => {
            // NCCL's kernels may still write there: the memory stays until its communicator has been aborted, hence for good.
            std::mem::forget(prepared);
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let place = Place { boot: "b".into(), pids: 1, user: 0, run_dir: (1, 2) };
        let id = UniqueId::in_dir(Some(&std::env::temp_dir().join("pl-exchange"))).unwrap();
        Record {
            version: "1".into(),
            place: Ok(place),
            served: Some(vec![(2, 4096)]),
            seat: None,
            id: id.as_bytes().to_vec(),
        }
    }

    fn changed(change: impl Fn(&mut Record, &mut Place)) -> Record {
        let mut record = record();
        let mut place = record.place.clone().unwrap();
        change(&mut record, &mut place);
        record.place = record.place.clone().map(|_| place);
        record
    }

    #[test]
    fn ranks_of_one_box_meet_where_rank_0_says() {
        let (zero, other) = (record(), record());
        let met = decide(&[Some(zero.clone()), Some(other)]).unwrap();
        assert_eq!(met.as_bytes().to_vec(), zero.id);
    }

    #[test]
    fn every_difference_leaves_the_communicator_to_nccl_and_names_the_rank() {
        for (other, what) in [
            (None, "no record"),
            (Some(changed(|_, p| p.boot = "c".into())), "another host"),
            (Some(changed(|_, p| p.pids = 2)), "namespace"),
            (Some(changed(|_, p| p.run_dir = (1, 3))), "run directory"),
            (Some(changed(|_, p| p.user = 1)), "user"),
            (Some(changed(|r, _| r.version = "2".into())), "peerlane 2"),
            (Some(changed(|r, _| r.served = None)), "PEERLANE_NCCL_BYTES"),
            (Some(changed(|r, _| r.place = Err("no driver".into()))), "no driver"),
        ] {
            let why = decide(&[Some(record()), other]).unwrap_err();
            assert!(why.contains(what) && why.contains("rank 1"), "{why}");
        }
    }

    /// Two GPUs of a box that is read from a copy of sysfs, then one of them twice, then ranks that see different boxes.
    #[test]
    fn how_much_is_served_follows_from_the_box_where_all_see_it() {
        let matrix = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPIX\t0-7\t0\nGPU1\tPIX\t X \t0-7\t0\n";
        let mut topology = peerlane_core::topology::from_matrix("box", matrix).unwrap();
        let addresses = ["0000:11:00.0", "0000:12:00.0"];
        for (gpu, address) in topology.gpus.iter_mut().zip(addresses) {
            gpu.address = Address::parse(address);
        }
        let described = (topology, 7);
        let at = |gpu: &str, hash| {
            let seat = Some(Seat { gpu: gpu.into(), hash });
            Some(Record { seat, served: None, ..record() })
        };
        let of = |records: &[Option<Record>]| most_bytes(records, Some(&described));
        assert_eq!(of(&[at(addresses[0], 7), at(addresses[1], 7)]), 2 << 20, "predicted");
        let table = settings::undescribed_bytes().of(2);
        assert_ne!(table, 2 << 20);
        assert_eq!(of(&[at(addresses[0], 7), at(addresses[0], 7)]), table, "one GPU");
        assert_eq!(of(&[at(addresses[0], 7), at(addresses[1], 8)]), table, "another box");
        assert_eq!(of(&[at(addresses[0], 7), at("0000:13:00.0", 7)]), table, "no such GPU");
        let user = Some(Record { seat: None, ..record() });
        assert_eq!(of(&[user.clone(), user]), 4096, "what the user says wins");
    }

    #[test]
    fn the_longest_record_fits_and_survives() {
        let mut longest = record();
        longest.id = vec![0xff; 128];
        longest.served = Some(vec![(u32::MAX, u64::MAX); MAX_RANKS]);
        longest.seat = Some(Seat { gpu: "ffffffff:ff:1f.7".into(), hash: u64::MAX });
        longest.version = "100.100.100".into();
        longest.place.as_mut().unwrap().boot = "x".repeat(host().len().max(68));
        assert_eq!(decode(&encode(&longest).unwrap()), Some(longest.clone()));
        longest.place = Err("x".repeat(REASON_BYTES));
        assert_eq!(decode(&encode(&longest).unwrap()), Some(longest));
        assert_eq!(decode(&[0xff; RECORD_BYTES]), None);
    }
}
