//! The text of `nvidia-smi topo -m`: classes between GPUs and their NUMA nodes, from which a tree is built that has the
//! same classes.

use super::files::MOST_BYTES;
use super::model::*;
use super::{mistake, Acs, Class, Link, MAX_GPUS};
use crate::error::Result;

/// A cell: a class, or NVLink, which hides it.
type Cell = Option<Class>;

struct Row {
    line: u32,
    cells: Vec<Cell>,
    cpus: String,
    node: Option<u32>,
}

/// Reads the text that the file `name` holds.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) with the line: no table, an unknown word, a row too short, GPUs that disagree about their
/// distance, or distances that no PCIe tree has.
pub fn from_matrix(name: &str, text: &str) -> Result<Topology> {
    if text.len() as u64 > MOST_BYTES {
        return Err(mistake(name, 1, "longer than any table of GPUs"));
    }
    let rows = table(name, text)?;
    let mut notes = Vec::new();
    for (a, row) in rows.iter().enumerate() {
        for (b, other) in rows.iter().enumerate().take(a) {
            let (there, back) = (other.cells[a], row.cells[b]);
            if there != back {
                let shown = |cell: Cell| cell.map_or("NV", Class::name);
                return Err(mistake(
                    name,
                    row.line,
                    format!(
                        "GPU{a} is {} to GPU{b}, but line {} says {}; a link has one class",
                        shown(back),
                        other.line,
                        shown(there)
                    ),
                ));
            }
        }
    }
    if rows.iter().any(|row| row.cells.contains(&None)) {
        notes.push("some GPUs are joined by NVLink: peerlane is made for PCIe, and their PCIe distance is a guess".into());
    }
    let topology = tree(name, &rows, notes);
    for (a, row) in rows.iter().enumerate() {
        for (b, cell) in row.cells.iter().enumerate().filter(|(_, c)| c.is_some()) {
            let built = topology.class(a, b);
            if *cell != Some(built) {
                return Err(mistake(name, row.line, format!(
                    "GPU{a} is {} to GPU{b}, but by the other entries they are {built} apart; no PCIe tree has these distances",
                    cell.map_or("", Class::name)
                )));
            }
        }
    }
    Ok(topology)
}

/// The rows of GPUs, with as many cells as there are rows.
fn table(name: &str, text: &str) -> Result<Vec<Row>> {
    let mut lines = text.lines().zip(1u32..).map(|(line, number)| (plain(line), number));
    let is_gpu = |word: &str, number: usize| word == format!("GPU{number}");
    let Some((header, at)) =
        lines.by_ref().find(|(line, _)| line.split_whitespace().next() == Some("GPU0"))
    else {
        return Err(mistake(name, 1, "no table of GPUs: expected the output of `nvidia-smi topo -m`, whose first line begins with GPU0"));
    };
    let columns: Vec<&str> = header.split_whitespace().take_while(|word| *word != "CPU").collect();
    let gpus = columns.iter().enumerate().take_while(|(i, word)| is_gpu(word, *i)).count();
    if gpus > MAX_GPUS {
        return Err(mistake(name, at, format!("{gpus} GPUs; at most {MAX_GPUS} are described")));
    }
    // A header may be a row of a table whose own header was cut off.
    if header.split_whitespace().nth(1) == Some("X") {
        return Err(mistake(
            name,
            at,
            "the line above this one, with the names of the columns, is missing",
        ));
    }
    let has_numa = header.contains("NUMA Affinity");
    let mut rows: Vec<Row> = Vec::new();
    for (line, number) in lines {
        let mut words = line.split_whitespace();
        let Some(label) = words.next().filter(|label| label.starts_with("GPU")) else {
            if rows.len() >= gpus {
                break;
            }
            continue;
        };
        if !is_gpu(label, rows.len()) || rows.len() == gpus {
            return Err(mistake(
                name,
                number,
                format!(
                    "row '{}' where GPU{} should be",
                    label.chars().take(20).collect::<String>(),
                    rows.len()
                ),
            ));
        }
        let words: Vec<&str> = words.collect();
        if words.len() < columns.len() {
            return Err(mistake(
                name,
                number,
                format!(
                    "{} entries for {} columns; is the line cut off?",
                    words.len(),
                    columns.len()
                ),
            ));
        }
        let mut cells = Vec::with_capacity(gpus);
        for (column, word) in words.iter().enumerate().take(gpus) {
            let cell = cell(word).ok_or_else(|| {
                mistake(name, number, format!("'{}' is no class; known are X, PIX, PXB, PHB, NODE, SYS and NV with a number", word.chars().take(20).collect::<String>()))
            })?;
            if (cell == Some(Class::X)) != (column == rows.len()) {
                return Err(mistake(
                    name,
                    number,
                    format!(
                        "'{word}' between GPU{} and GPU{column}; X stands on the diagonal alone",
                        rows.len()
                    ),
                ));
            }
            cells.push(cell);
        }
        let rest = &words[columns.len()..];
        let cpus = rest.first().filter(|w| w.starts_with(|c: char| c.is_ascii_digit()));
        let node = rest.get(1).filter(|_| has_numa).and_then(|w| w.parse().ok());
        rows.push(Row {
            line: number,
            cells,
            cpus: cpus.map_or(String::new(), |w| (*w).to_owned()),
            node,
        });
    }
    if rows.len() < gpus || gpus == 0 {
        return Err(mistake(
            name,
            at,
            format!("{gpus} columns of GPUs but {} rows; is the text cut off?", rows.len()),
        ));
    }
    Ok(rows)
}

/// Without the escape sequences that underline the header.
fn plain(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match c {
            '\u{1b}' => {
                let _ = chars.by_ref().find(|c| c.is_ascii_alphabetic());
            }
            c => text.push(c),
        }
    }
    text
}

fn cell(word: &str) -> Option<Cell> {
    let nvlink = |w: &str| {
        w.strip_prefix("NV").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    match word {
        // Drivers before 396 said SOC.
        "SOC" => Some(Some(Class::Sys)),
        w if nvlink(w) => Some(None),
        w => Class::ALL.into_iter().find(|c| c.name() == w).map(Some),
    }
}

/// Groups of GPUs that some chain of known entries up to `class` joins: the group of each GPU is its lowest member.
fn groups(rows: &[Row], class: Class) -> Vec<usize> {
    let mut group: Vec<usize> = (0..rows.len()).collect();
    for (a, row) in rows.iter().enumerate() {
        for (b, cell) in row.cells.iter().enumerate() {
            if cell.is_some_and(|c| c <= class) && group[a] != group[b] {
                let (keep, drop) = (group[a].min(group[b]), group[a].max(group[b]));
                group.iter_mut().filter(|g| **g == drop).for_each(|g| *g = keep);
            }
        }
    }
    group
}

/// A tree with these classes: NUMA nodes, root complexes, and switches of an upstream port with one downstream port a GPU.
fn tree(name: &str, rows: &[Row], mut notes: Vec<String>) -> Topology {
    let [pix, pxb, phb, mut node] =
        [Class::Pix, Class::Pxb, Class::Phb, Class::Node].map(|c| groups(rows, c));
    // Where NVLink hides every distance, the affinity is all there is.
    for (a, row) in rows.iter().enumerate() {
        let same =
            |b: &usize| row.node.is_some() && rows[*b].node == row.node && row.cells[*b].is_none();
        if let Some(b) = (0..a).find(same) {
            let (keep, drop) = (node[a].min(node[b]), node[a].max(node[b]));
            node.iter_mut().filter(|g| **g == drop).for_each(|g| *g = keep);
        }
    }
    let ids = node_ids(rows, &node, &mut notes);
    let mut bridges: Vec<Bridge> = Vec::new();
    let mut add = |kind, label: String, parent| -> usize {
        let known = bridges.iter().position(|b: &Bridge| b.name == label);
        known.unwrap_or_else(|| {
            bridges.push(Bridge {
                kind,
                name: label,
                parent,
                ids: None,
                link: Link::default(),
                acs: Acs::Unknown,
            });
            bridges.len() - 1
        })
    };
    let shared = |group: &[usize], a: usize| group.iter().filter(|g| **g == group[a]).count() > 1;
    let mut gpus = Vec::new();
    for (a, row) in rows.iter().enumerate() {
        let host = add(BridgeKind::Host, format!("root complex {}", phb[a]), None);
        let mut parent = add(BridgeKind::Port, format!("root port {}", pxb[a]), Some(host));
        for (what, group, used) in [
            (
                "outer switch",
                &pxb,
                shared(&pxb, a) && pxb.iter().zip(&pix).any(|(x, i)| *x == pxb[a] && *i != pix[a]),
            ),
            ("switch", &pix, shared(&pix, a)),
        ] {
            if used {
                // Two GPUs below different ports of the outer switch are two bridges from it: that makes them PXB.
                let below = if what == "switch" { a } else { pix[a] };
                parent = add(BridgeKind::Port, format!("{what} {}", group[a]), Some(parent));
                parent = add(
                    BridgeKind::Port,
                    format!("{what} {} port {below}", group[a]),
                    Some(parent),
                );
                if what == "outer switch" && !shared(&pix, a) {
                    parent = add(BridgeKind::Port, format!("bridge {a}"), Some(parent));
                }
            }
        }
        gpus.push(Gpu {
            address: None,
            name: format!("GPU{a}"),
            parent: Some(parent),
            node: ids[a],
            socket: None,
            ids: None,
            link: Link::default(),
            bar1: None,
            cpus: row.cpus.clone(),
        });
    }
    let mut nodes: Vec<Node> = Vec::new();
    for gpu in &gpus {
        if let Some(id) = gpu.node.filter(|id| nodes.iter().all(|n| n.id != *id)) {
            nodes.push(Node { id, socket: None, cpus: gpu.cpus.clone() });
        }
    }
    Topology { source: name.to_owned(), nodes, bridges, gpus, peer_access: None, notes }.finish()
}

/// The NUMA node of each GPU: as the table says where that agrees with its classes, else numbered by them.
fn node_ids(rows: &[Row], groups: &[usize], notes: &mut Vec<String>) -> Vec<Option<u32>> {
    let agrees = (0..rows.len()).all(|a| {
        rows[a].node.is_some()
            && (0..a).all(|b| (groups[a] == groups[b]) == (rows[a].node == rows[b].node))
    });
    if agrees {
        return rows.iter().map(|row| row.node).collect();
    }
    if rows.iter().any(|row| row.node.is_some()) {
        notes.push(
            "the column NUMA Affinity does not agree with the classes, which are believed".into(),
        );
    }
    let mut seen: Vec<usize> = Vec::new();
    groups
        .iter()
        .map(|group| {
            let known = seen.iter().position(|s| s == group);
            Some(known.unwrap_or_else(|| {
                seen.push(*group);
                seen.len() - 1
            }) as u32)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As driver 570 prints it, escape sequences included.
    const FOUR: &str =
        "\t\u{1b}[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\u{1b}[0m
GPU0\t X \tPIX\tNODE\tSYS\tNODE\t0-15\t0\t\tN/A
GPU1\tPIX\t X \tNODE\tSYS\tNODE\t0-15\t0\t\tN/A
GPU2\tNODE\tNODE\t X \tSYS\tPHB\t0-15\t0\t\tN/A
GPU3\tSYS\tSYS\tSYS\t X \tSYS\t16-31\t1\t\tN/A
NIC0\tNODE\tNODE\tPHB\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
";

    #[test]
    fn the_text_of_the_driver_is_read() {
        let t = from_matrix("topo.txt", FOUR).unwrap();
        assert_eq!(t.gpus.len(), 4);
        assert_eq!(
            [t.class(0, 1), t.class(0, 2), t.class(2, 3)],
            [Class::Pix, Class::Node, Class::Sys]
        );
        assert_eq!((t.gpus[3].node, t.gpus[3].cpus.as_str()), (Some(1), "16-31"));
        assert!(t.notes.is_empty(), "{:?}", t.notes);
    }

    #[test]
    fn a_matrix_of_any_tree_is_read_as_that_tree() {
        // PXB alone, PXB around PIX, PHB, and a GPU of its own.
        let text = "\tGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tCPU Affinity
GPU0 X PIX PXB PXB PHB 0-1
GPU1 PIX X PXB PXB PHB 0-1
GPU2 PXB PXB X PXB PHB 0-1
GPU3 PXB PXB PXB X PHB 0-1
GPU4 PHB PHB PHB PHB X 0-1
";
        let t = from_matrix("t", text).unwrap();
        assert_eq!(
            [t.class(0, 1), t.class(2, 3), t.class(0, 3), t.class(3, 4)],
            [Class::Pix, Class::Pxb, Class::Pxb, Class::Phb]
        );
    }

    #[test]
    fn nvlink_hides_the_distance_and_a_note_says_so() {
        let text = "  GPU0 GPU1 CPU Affinity NUMA Affinity\nGPU0 X NV18 0-3 0\nGPU1 NV18 X 0-3 0\n";
        let t = from_matrix("t", text).unwrap();
        assert_eq!(t.class(0, 1), Class::Node);
        assert!(t.notes[0].contains("NVLink"));
    }

    #[test]
    fn broken_tables_are_refused_with_line_and_remedy() {
        let edit = |from: &str, to: &str| FOUR.replacen(from, to, 1);
        for (text, what) in [
            (String::new(), "topo.txt:1: no table"),
            ("Failed to initialize NVML".into(), "topo.txt:1: no table"),
            (
                edit("GPU2\tNODE\tNODE\t X \tSYS\tPHB\t0-15\t0\t\tN/A", "GPU2\tNODE"),
                "topo.txt:4: 1 entries for 5 columns",
            ),
            (edit("\tPIX\tNODE\tSYS", "\tPIG\tNODE\tSYS"), "topo.txt:2: 'PIG' is no class"),
            (
                edit("\tPIX\tNODE\tSYS", "\tPXB\tNODE\tSYS"),
                "topo.txt:3: GPU1 is PIX to GPU0, but line 2 says PXB",
            ),
            (edit("GPU1\tPIX\t X ", "GPU1\tPIX\tPIX"), "topo.txt:3: 'PIX' between GPU1 and GPU1"),
            (
                edit("GPU2\t", "GPU7\t").replacen("GPU7\tGPU3", "GPU2\tGPU3", 1).replacen(
                    "GPU2\tNODE",
                    "GPU7\tNODE",
                    1,
                ),
                "topo.txt:4: row 'GPU7' where GPU2",
            ),
            (
                FOUR.lines().take(3).collect::<Vec<_>>().join("\n"),
                "topo.txt:1: 4 columns of GPUs but 2 rows",
            ),
            (FOUR.lines().skip(1).collect::<Vec<_>>().join("\n"), "topo.txt:1: the line above"),
        ] {
            let error = from_matrix("topo.txt", &text).unwrap_err().to_string();
            assert!(error.contains(what), "wanted {what}: {error}\n{text}");
        }
    }

    #[test]
    fn distances_that_no_tree_has_are_refused() {
        let text = "\tGPU0\tGPU1\tGPU2\tCPU Affinity\nGPU0 X PIX PIX 0\nGPU1 PIX X SYS 0\nGPU2 PIX SYS X 0\n";
        let error = from_matrix("t", text).unwrap_err().to_string();
        assert!(
            error.contains("t:3: GPU1 is SYS to GPU2") && error.contains("no PCIe tree"),
            "{error}"
        );
    }
}
