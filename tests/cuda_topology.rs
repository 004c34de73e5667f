//! Ranks on GPUs find their places on the described box by the addresses that the driver gives.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "topology/fake_box.rs"]
mod fake_box;
#[path = "common/fakecuda.rs"]
mod fakecuda;
#[path = "common/gpu.rs"]
mod gpu;
#[path = "../examples/gpu_smoke/support.rs"]
mod support;

use fake_box::FakeBox;
use fakecuda::in_child;
use gpu::{case, config, create, on_ranks, KERNELS};
use peerlane::comm::Config;
use peerlane::plan::{Model, NOMINAL};
use peerlane::schedule::Islands;
use peerlane::topology::from_path;
use peerlane::{DType, Error, Op};
use std::path::Path;
use support::Rank;

/// The stand-in driver's four GPUs, two on either socket, at the addresses that it gives them.
fn two_sockets(name: &str) -> FakeBox {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-topology").join(name);
    let _ = std::fs::remove_dir_all(&root);
    let fake = FakeBox { root };
    for node in 0..2 {
        fake.put(&format!("sys/devices/system/node/node{node}/cpulist"), format!("{node}\n"));
    }
    for number in 0..4u8 {
        let (host, bus) = (if number < 2 { 0x00 } else { 0x80 }, 0x10 + number);
        let port = number % 2 + 1;
        let way = format!("pci0000:{host:02x}/0000:{host:02x}:{port:02x}.0/0000:{bus:02x}:00.0");
        fake.gpu(&way, i64::from(number / 2), number.into());
    }
    fake
}

#[test]
fn islands_and_schedules_follow_the_gpus_not_the_rank_numbers() {
    let name = "islands_and_schedules_follow_the_gpus_not_the_rank_numbers";
    in_child(name, &[KERNELS, ("FAKECUDA_DEVICES", "4")], || {
        let root = two_sockets("follow").root;
        let gpu = |rank: usize| [0u32, 2, 1, 3][rank];
        let islands = Islands::parse(4, "0+2,1+3").unwrap();
        let described = from_path(&root).unwrap();
        let model = Model::new(&described, &[0, 2, 1, 3], &islands, &NOMINAL).unwrap();
        let config = Config { topology: Some(root), ..config(4) };
        let comms: Vec<_> = create(4, &config, gpu).into_iter().map(Result::unwrap).collect();
        for count in [512usize, 7168, 57_344, 1 << 19] {
            let choice = model.choose(count * 2, DType::BF16, |_| true).unwrap().choice;
            for comm in &comms {
                let text = comm.explain(count * 2, DType::BF16).unwrap();
                assert!(text.contains("islands 0+2,1+3\n"), "{text}");
                let served =
                    format!("{} by {}, {}", choice.algorithm, choice.protocol, choice.direction);
                assert!(text.contains(&served), "{served}: {text}");
            }
        }
        let case = case(DType::BF16, Op::Sum, 7168, 1);
        let named = Config { islands: Some(islands), topology: None, ..config };
        let expected = case.expected(4, &named).unwrap();
        on_ranks(comms, |comm| {
            let rank = Rank::new(&comm, gpu(comm.rank()), case.bytes()).unwrap();
            assert!(rank.reduce(&case).unwrap() == expected);
        });
    });
}

#[test]
fn a_gpu_that_the_description_does_not_know_leaves_one_island_and_another_box_is_refused() {
    let name =
        "a_gpu_that_the_description_does_not_know_leaves_one_island_and_another_box_is_refused";
    in_child(name, &[KERNELS, ("FAKECUDA_DEVICES", "4")], || {
        let fake = two_sockets("unknown");
        std::fs::remove_file(fake.root.join("sys/bus/pci/devices/0000:13:00.0")).unwrap();
        let config = Config { topology: Some(fake.root), ..config(4) };
        for comm in create(4, &config, |rank| rank as u32) {
            let text = comm.unwrap().explain(1024, DType::F32).unwrap();
            assert!(text.contains("islands 0-3\n"), "{text}");
        }
        // One rank looks at a box with the same addresses, whose third GPU sits on the other socket.
        let (one, other) = (two_sockets("one"), two_sockets("other"));
        let directory = "sys/devices/pci0000:80/0000:80:01.0/0000:12:00.0";
        other.put(&format!("{directory}/numa_node"), "0\n");
        let id = peerlane::bootstrap::UniqueId::new().unwrap();
        let creations: Vec<_> = (0..4u32)
            .map(|rank| {
                let root = if rank == 3 { &other.root } else { &one.root };
                let device = peerlane::Device::Cuda { ordinal: Some(rank) };
                let config = Config { topology: Some(root.clone()), device, ..config.clone() };
                peerlane::comm::Creation { id, n: 4, rank: rank as usize, config }
            })
            .collect();
        for created in peerlane::comm::create_all(&creations).unwrap() {
            let error = created.map(drop).unwrap_err();
            assert!(matches!(error, Error::Setup { rank: 3, .. }), "{error}");
            assert!(error.to_string().contains("topology is"), "{error}");
        }
    });
}

/// The CPUs that this process may use.
fn allowed(status: &Path) -> Option<String> {
    let text = std::fs::read_to_string(status).ok()?;
    text.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).map(|l| l.trim().to_owned())
}

/// The CPUs of every thread of this process whose name begins with `name`, in order.
fn cpus_of_threads(name: &str) -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let named = |task: &std::path::PathBuf| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.starts_with(name))
    };
    let mut all: Vec<String> =
        tasks.filter(named).filter_map(|task| allowed(&task.join("status"))).collect();
    all.sort();
    all
}

/// The policies under which the kernel takes pages for mappings of slabs; empty where it does not say.
fn policies() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap_or_default();
    let slabs = maps.lines().filter(|line| line.contains("peerlane-slab"));
    slabs.filter_map(|line| line.split(' ').nth(1)).map(str::to_owned).collect()
}

#[test]
fn host_memory_and_own_threads_stay_near_the_gpu_unless_told_otherwise() {
    let name = "host_memory_and_own_threads_stay_near_the_gpu_unless_told_otherwise";
    in_child(name, &[KERNELS, ("FAKECUDA_DEVICES", "4")], || {
        let mine = allowed(Path::new("/proc/self/status")).unwrap();
        let ends = mine.split([',', '-']).collect::<Vec<_>>();
        let (first, last) = (ends[0], ends[ends.len() - 1]);
        // GPUs 0 and 1 are near the first CPU of this process, GPUs 2 and 3 near the last; node 0 is the only one there is
        // anywhere.
        let fake = two_sockets("placement");
        for number in 0..4u8 {
            let (host, bus) = (if number < 2 { 0x00 } else { 0x80 }, 0x10 + number);
            let port = number % 2 + 1;
            let directory = format!(
                "sys/devices/pci0000:{host:02x}/0000:{host:02x}:{port:02x}.0/0000:{bus:02x}:00.0"
            );
            fake.put(&format!("{directory}/numa_node"), "0\n");
            let near = if number < 2 { first } else { last };
            fake.put(&format!("{directory}/local_cpulist"), format!("{near},9000\n"));
        }
        let near = Config { topology: Some(fake.root), lane: peerlane::Lane::Host, ..config(4) };
        let anywhere = Config { numa: false, ..near.clone() };
        let before = cpus_of_threads("");
        for (config, watch, policy) in [
            (&near, [first, first, last, last], "prefer:0"),
            (&anywhere, [mine.as_str(); 4], "default"),
        ] {
            let comms: Vec<_> =
                create(4, config, |rank| rank as u32).into_iter().map(Result::unwrap).collect();
            assert_eq!(cpus_of_threads("peerlane-watch"), watch);
            let found = policies();
            match found.is_empty() {
                true => println!("skipped: this kernel shows no policies of pages"),
                false => assert!(found.iter().all(|p| p == policy), "{policy}: {found:?}"),
            }
            let text = comms[3].explain(1024, DType::F32).unwrap();
            let said = format!("host memory on NUMA node 0, own threads on 1 CPUs of {last}");
            assert_eq!(text.contains(&said), config.numa, "{text}");
        }
        // Nobody else's thread has moved.
        assert!(before.iter().all(|cpus| *cpus == mine), "{before:?}");
        assert_eq!(allowed(Path::new("/proc/thread-self/status")).unwrap(), mine);
        assert!(cpus_of_threads("fakecuda").iter().all(|cpus| *cpus == mine));
    });
}
