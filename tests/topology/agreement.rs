//! Islands at creation: from the description that all ranks see alike; a rank that sees another box is named.

use crate::fixture;
use peerlane::bootstrap::UniqueId;
use peerlane::comm::{create_all, Communicator, Config, Creation};
use peerlane::env::Env;
use peerlane::schedule::Islands;
use peerlane::{DType, Error};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::Duration;

fn config(n: usize, name: &str, file: Option<&str>) -> Config {
    let run_dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("topology-run-{name}"));
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&run_dir).unwrap();
    Config {
        topology: file.map(fixture),
        run_dir: Some(run_dir),
        setup_deadline: Duration::from_secs(120),
        ..Config::from_vars(n, &Env::default()).unwrap()
    }
}

fn create(configs: Vec<Config>) -> Vec<Result<String, Error>> {
    let n = configs.len();
    let id = UniqueId::in_dir(configs[0].run_dir.as_deref()).unwrap();
    let creations: Vec<Creation> = configs
        .into_iter()
        .enumerate()
        .map(|(rank, config)| Creation { id, n, rank, config })
        .collect();
    let created = create_all(&creations).unwrap();
    // All live until all are looked at, so that no goodbye reaches a rank that is still at work.
    let shown = |c: &Communicator| {
        let text = c.explain(1024, DType::F32).unwrap();
        text.lines().find_map(|l| l.strip_prefix("islands ")).unwrap().to_owned()
    };
    created.iter().map(|c| c.as_ref().map(shown).map_err(Clone::clone)).collect()
}

#[test]
fn ranks_of_a_described_box_get_its_islands() {
    let box_file = Some("1-socket-4-gpu-2-switches.xml");
    for created in create(vec![config(4, "islands", box_file); 4]) {
        assert_eq!(created.unwrap(), "0-1,2-3");
    }
    let named = Config {
        islands: Some(Islands::parse(4, "0-2,3").unwrap()),
        ..config(4, "named", box_file)
    };
    for created in create(vec![named; 4]) {
        assert_eq!(created.unwrap(), "0-2,3", "what is asked for wins");
    }
    for created in create(vec![config(4, "plain", None); 4]) {
        assert_eq!(created.unwrap(), "0-3", "ranks of the CPU are one island");
    }
}

#[test]
fn a_rank_that_sees_another_box_is_named_on_all() {
    for other in [Some("1-socket-4-gpu-1-switch.xml"), Some("2-socket-8-gpu-direct.xml"), None] {
        let mut configs = vec![config(4, "differ", Some("1-socket-4-gpu-2-switches.xml")); 4];
        configs[2].topology = other.map(fixture);
        let created = create(configs);
        let first = created[0].clone().unwrap_err();
        for error in created {
            assert_eq!(error.unwrap_err(), first, "all fail alike");
        }
        let Error::Setup { rank, reason, .. } = &first else { panic!("{first}") };
        assert_eq!(*rank, 2, "{first}");
        assert!(reason.contains("topology is"), "{first}");
    }
}

#[test]
fn a_description_with_too_few_gpus_gives_one_island() {
    for created in create(vec![config(5, "few", Some("1-socket-4-gpu-2-switches.xml")); 5]) {
        assert_eq!(created.unwrap(), "0-4");
    }
}

#[test]
fn a_description_that_cannot_be_read_fails_on_all() {
    let mut configs = vec![config(2, "unread", None); 2];
    configs[1].topology = Some(fixture("README.md"));
    for created in create(configs) {
        let error = created.unwrap_err().to_string();
        assert!(
            error.contains("rank 1") && error.contains("README.md:1: no table of GPUs"),
            "{error}"
        );
    }
}
