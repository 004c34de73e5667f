//! Every fixture's classes, islands and choices, as reviewed text. `PEERLANE_SNAPSHOTS=write cargo test --features cli --test
//! topology` writes them anew; look at the difference before you commit it.

use crate::fixture;
use peerlane::plan::{Model, NOMINAL};
use peerlane::topology::{from_path, islands, BridgeKind, Topology};
use peerlane::{Algorithm, DType};
use std::fmt::Write;
use std::path::Path;

pub const DESCRIBED: [&str; 5] = [
    "1-socket-4-gpu-1-switch",
    "1-socket-4-gpu-2-switches",
    "1-socket-16-gpu-4-switches",
    "2-socket-8-gpu-4-switches",
    "2-socket-8-gpu-direct",
];
pub const REAL: [&str; 2] = ["hwloc-96em64t-4n4d3ca2co-pci", "hwloc-nvidiaDGX2"];
/// The sizes below as the tool's users write them.
pub const SIZES_TEXT: [&str; 6] = ["1K", "14336", "57344", "114688", "458752", "1M"];
/// 1 KB and 1 MB, and the sizes of one to 32 rows of a 7168-wide model in bfloat16.
const SIZES: [usize; 6] = [1024, 14_336, 57_344, 114_688, 458_752, 1 << 20];

pub fn read(name: &str) -> Topology {
    from_path(&fixture(&format!("{name}.xml"))).unwrap()
}

fn snapshot(name: &str) -> String {
    let t = read(name);
    let bridges = |kind| t.bridges.iter().filter(|b| b.kind == kind).count();
    let mut text = format!(
        "{} GPUs, {} NUMA nodes, {} root complexes, {} ports\n{}",
        t.gpus.len(),
        t.nodes.len(),
        bridges(BridgeKind::Host),
        bridges(BridgeKind::Port),
        t.matrix()
    );
    for note in &t.notes {
        writeln!(text, "note: {note}").unwrap();
    }
    if t.gpus.is_empty() {
        return text;
    }
    let ranks: Vec<usize> = (0..t.gpus.len()).collect();
    let found = islands(&t, &ranks).unwrap();
    let model = Model::new(&t, &ranks, &found.islands, &NOMINAL).unwrap();
    writeln!(text, "islands {}: {}", found.islands, found.reason).unwrap();
    writeln!(text, "collapse-prone: {}\n", model.fabric.collapse_prone).unwrap();
    writeln!(text, "bfloat16, microseconds by algorithm with its best protocol; * may collapse")
        .unwrap();
    write!(text, "{:>8} {:<24}", "bytes", "chosen").unwrap();
    Algorithm::ALL.iter().for_each(|a| write!(text, " {:>14}", a.name()).unwrap());
    text.push('\n');
    for bytes in SIZES {
        let chosen = model.choose(bytes, DType::BF16, |_| true).unwrap();
        let name = format!("{} {}", chosen.choice.algorithm, chosen.choice.protocol);
        write!(text, "{bytes:>8} {name:<24}").unwrap();
        let candidates = model.candidates(bytes, DType::BF16);
        for algorithm in Algorithm::ALL {
            let line = candidates.iter().find(|l| l.choice.algorithm == *algorithm);
            let cell = line.map_or("-".into(), |l| {
                format!("{:.1}{}", l.us(bytes), if l.may_collapse() { "*" } else { " " })
            });
            write!(text, " {cell:>14}").unwrap();
        }
        text.push('\n');
    }
    text.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[test]
fn every_fixture_gives_the_reviewed_classes_islands_and_choices() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/topology/snapshots");
    let write = std::env::var_os("PEERLANE_SNAPSHOTS").is_some_and(|v| v == "write");
    for name in DESCRIBED.iter().chain(&REAL) {
        let path = folder.join(format!("{name}.txt"));
        let found = snapshot(name);
        if write {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&path, &found).unwrap();
        }
        let reviewed = std::fs::read_to_string(&path).unwrap();
        assert_eq!(found, reviewed, "{}", path.display());
    }
}

#[test]
fn the_same_box_in_the_drivers_words_has_the_same_classes_and_islands() {
    for name in DESCRIBED {
        let (xml, text) = (read(name), from_path(&fixture(&format!("{name}.topo.txt"))).unwrap());
        assert_eq!(xml.matrix(), text.matrix(), "{name}");
        let ranks: Vec<usize> = (0..xml.gpus.len()).collect();
        assert_eq!(
            islands(&xml, &ranks).unwrap().islands,
            islands(&text, &ranks).unwrap().islands,
            "{name}"
        );
        let nodes = |t: &Topology| t.gpus.iter().map(|g| g.node).collect::<Vec<_>>();
        assert_eq!(nodes(&xml), nodes(&text), "{name}");
        assert_eq!(
            xml.nodes.iter().map(|n| &n.cpus).collect::<Vec<_>>(),
            text.nodes.iter().map(|n| &n.cpus).collect::<Vec<_>>(),
            "{name}"
        );
    }
}

#[test]
fn where_writes_may_collapse_one_stream_per_gpu_is_preferred() {
    let (mut prone, mut others) = (0, 0);
    for name in DESCRIBED.iter().chain(&["hwloc-nvidiaDGX2"]) {
        let t = read(name);
        let ranks: Vec<usize> = (0..t.gpus.len()).collect();
        let found = islands(&t, &ranks).unwrap();
        let model = Model::new(&t, &ranks, &found.islands, &NOMINAL).unwrap();
        // From 14 KB; below that a collapsed phase still ends before another hop would.
        for bytes in &SIZES[1..] {
            let line = model.choose(*bytes, DType::BF16, |_| true).unwrap();
            let single = matches!(line.choice.algorithm, Algorithm::Pairwise | Algorithm::Staged);
            let candidates = model.candidates(*bytes, DType::BF16);
            let safe = candidates.iter().find(|l| !l.may_collapse()).unwrap();
            // Unless it is far faster even when collapsed, as for 16 GPUs with slow links.
            let far = line.may_collapse() && line.us(*bytes) * 1.5 <= safe.us(*bytes);
            assert!(
                single || far || !model.fabric.collapse_prone,
                "{name} {bytes}: {:?}",
                line.choice
            );
            assert!(!far || name.contains("DGX"), "{name} {bytes}: {:?}", line.choice);
        }
        if model.fabric.collapse_prone {
            prone += 1
        } else {
            others += 1
        }
    }
    assert!(prone >= 2 && others >= 2, "{prone} prone, {others} not");
}
