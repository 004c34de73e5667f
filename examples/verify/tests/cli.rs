//! The runner as a program: what it reports, and what it says to bad input.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use safetensors::tensor::{Dtype, TensorView};
use safetensors::SafeTensors;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/dsv3_tiny");

fn runner(arguments: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_peerlane-verify"))
        .args(arguments.split_whitespace())
        .env("PEERLANE_LOG", "off")
        .output()
        .unwrap()
}

/// A run of the golden model; its JSON.
fn report(arguments: &str) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json");
    let output = runner(&format!(
        "--weights {GOLDEN} --context 5-9 --passes 2 {arguments} --json {}",
        file.display()
    ));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

/// What the runner says to bad input: one line.
fn refusal(arguments: &str) -> String {
    let output = runner(arguments);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{arguments}: {text}");
    assert_eq!(text.lines().count(), 1, "{arguments}: {text}");
    assert!(output.stdout.is_empty(), "{arguments}");
    text
}

fn is_refused(arguments: &str, parts: &[&str]) {
    let text = refusal(arguments);
    for part in parts {
        assert!(text.contains(part), "{arguments}: {text}");
    }
}

/// A copy of the golden model in which `change` may replace its tensors.
#[allow(clippy::type_complexity)]
fn changed(
    change: impl Fn(&str, Dtype, &[usize], &[u8]) -> Option<(Dtype, Vec<usize>, Vec<u8>)>,
) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let golden = Path::new(GOLDEN);
    std::fs::copy(golden.join("config.json"), folder.path().join("config.json")).unwrap();
    let bytes = std::fs::read(golden.join("model.safetensors")).unwrap();
    let model = SafeTensors::deserialize(&bytes).unwrap();
    let tensors: Vec<_> = model
        .iter()
        .filter_map(|(name, t)| Some((name, change(name, t.dtype(), t.shape(), t.data())?)))
        .collect();
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (*name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    folder
}

fn config(folder: &Path, from: &str, to: &str) -> PathBuf {
    let file = folder.join("config.json");
    let text = std::fs::read_to_string(Path::new(GOLDEN).join("config.json")).unwrap();
    assert!(text.contains(from), "{from}");
    std::fs::write(&file, text.replace(from, to)).unwrap();
    file
}

#[test]
fn a_perfect_draft_is_committed_whole_and_a_hopeless_one_costs_all_but_one_token() {
    let perfect = report("--tp 2 --draft 4 --hits 1");
    let widths = perfect["widths"].as_array().unwrap();
    let rows: Vec<_> = widths.iter().map(|width| width["draft"].as_u64().unwrap()).collect();
    assert_eq!(rows, [1, 2, 4]);
    for width in widths {
        assert_eq!(width["accepted"], width["draft"].as_f64().unwrap());
        // Two all-reduces a layer, four layers; two sequences of rows of 256 floats each.
        assert_eq!(width["all_reduces"], 8);
        assert_eq!(width["all_reduce_bytes"], width["draft"].as_u64().unwrap() * 2 * 256 * 4);
        let experts = width["experts_mean"].as_f64().unwrap();
        assert!((4.0..=16.0).contains(&experts), "{experts}");
    }
    let hopeless = report("--tp 2 --draft 4 --hits 0");
    for width in hopeless["widths"].as_array().unwrap() {
        assert_eq!(width["accepted"], 1.0);
    }
}

#[test]
fn ranks_as_processes_choose_what_ranks_as_threads_choose() {
    let run = |how: &str| report(&format!("--tp 4 --draft 4 --sums bf16 {how}"));
    let (threads, processes) = (run(""), run("--processes"));
    assert_eq!((&threads["processes"], &processes["processes"]), (&false.into(), &true.into()));
    for (a, b) in
        threads["widths"].as_array().unwrap().iter().zip(processes["widths"].as_array().unwrap())
    {
        for key in ["accepted", "experts_mean", "all_reduces"] {
            assert_eq!(a[key], b[key], "{key}");
        }
        assert!(b["pass_ms"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn what_is_wrong_with_ranks_as_processes_is_said_in_a_line() {
    is_refused("--processes --tp 2 --memory 1K", &["too little memory: the model needs"]);
    is_refused("--processes --tp 2 --weights /nonexistent --config small", &["/nonexistent"]);
}

#[test]
fn of_a_tree_the_deepest_right_path_is_committed() {
    let report = report("--tp 4 --tree -1,0,0,1,1,2 --hits 1");
    let tree = report["widths"].as_array().unwrap().last().unwrap();
    assert_eq!((&tree["tree"], &tree["draft"]), (&Value::Bool(true), &6.into()));
    assert_eq!(tree["accepted"], 3.0);
}

#[test]
fn times_and_worth_fit_together() {
    let report = report("--tp 2 --draft 4 --draft-time 3 --acceptance 2.5");
    let widths = report["widths"].as_array().unwrap();
    let number = |value: &Value| value.as_f64().unwrap();
    let plain = number(&widths[0]["pass_ms"]);
    for width in widths {
        let (pass, most) = (number(&width["pass_ms"]), number(&width["draft"]));
        let step = pass + if most > 1.0 { 3.0 } else { 0.0 };
        let worth = &width["worth"];
        let tokens = number(&worth["tokens_per_pass"]);
        assert_eq!(tokens, most.min(2.5));
        let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-9;
        assert!(near(number(&worth["break_even"]), step / plain));
        assert!(near(number(&worth["tokens_per_second"]), tokens / step * 1e3));
        assert!(near(number(&worth["gain"]), tokens * plain / step));
        let (share, in_step) = (&width["all_reduce_share"], &width["all_reduce_in_step_share"]);
        for share in [share, in_step] {
            assert!((0.0..1.0).contains(&number(share)) && number(share) > 0.0, "{share}");
        }
        assert!(number(&width["bare_ms"]) > 0.0);
    }
}

#[test]
fn sums_in_bf16_are_fused_with_the_norm_unless_told_otherwise() {
    let norms = |report: &Value| {
        let parts = report["widths"][0]["parts"].as_array().unwrap();
        parts.iter().any(|stretch| stretch["part"] == "norm")
    };
    let fused = report("--tp 4 --draft 2 --hits 1 --sums bf16");
    assert_eq!((&fused["fused"], norms(&fused)), (&true.into(), false));
    assert_eq!(fused["widths"][1]["all_reduce_bytes"], 2 * 2 * 256 * 2);
    assert_eq!(fused["widths"][1]["all_reduces"], 8);
    let apart = report("--tp 4 --draft 2 --hits 1 --sums bf16 --fused off");
    assert_eq!((&apart["fused"], norms(&apart)), (&false.into(), true));
    let full = report("--tp 4 --draft 2 --hits 1");
    assert_eq!((&full["fused"], norms(&full)), (&false.into(), true));
    assert!(full["notes"].to_string().contains("--sums bf16"), "{}", full["notes"]);
}

#[test]
fn with_nobody_summing_nothing_is_said_of_acceptance() {
    let report = report("--tp 2 --draft 2 --all-reduce none");
    let width = &report["widths"][1];
    assert!(width["accepted"].is_null() && width["all_reduces"] == 0, "{width}");
    assert!(report["notes"].to_string().contains("nonsense"), "{}", report["notes"]);
}

#[test]
fn where_memory_is_short_layers_share_experts_and_the_report_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json");
    // 6 layers with experts of 50.3 MB each.
    let output = runner(&format!(
        "--layers 7 --tp 2 --draft 1 --passes 1 --context 4 --memory 360M --json {}",
        file.display()
    ));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let pools = report["expert_pools"].as_u64().unwrap();
    assert!((4..6).contains(&pools), "{pools}");
    assert!(report["bytes"].as_u64().unwrap() <= 360 << 20);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains(&format!("6 MoE layers share {pools} pools")), "{text}");
}

#[test]
fn the_page_stands_alone() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.html");
    let output = runner(&format!(
        "--weights {GOLDEN} --tp 2 --draft 4 --passes 1 --context 5 --report {}",
        page.display()
    ));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let html = std::fs::read_to_string(page).unwrap();
    assert_eq!(html.matches("<svg ").count(), 3);
    assert_eq!(html.matches("</svg>").count(), 3);
    // A bar for each of two kinds of layer, in the colours of attention, experts and all-reduce.
    for colour in ["#1B5E9E", "#1A936F", "#C44536"] {
        let bars =
            html.split("<svg ").nth(1).unwrap().matches(&format!("fill=\"{colour}\"")).count();
        assert!(bars >= 2, "{colour}: {bars}");
    }
    assert_eq!(html.matches("<th scope=\"row\">").count(), 3);
    for outside in ["<script", "http://", "src=", "url("] {
        let found = html.replace("http://www.w3.org/2000/svg", "");
        assert!(!found.contains(outside), "{outside}");
    }
}

#[test]
fn a_missing_tensor_is_named() {
    let gone = "model.layers.2.mlp.experts.3.up_proj.weight";
    let folder = changed(|name, dtype, shape, data| {
        (name != gone).then(|| (dtype, shape.to_vec(), data.to_vec()))
    });
    let weights = folder.path().display();
    is_refused(&format!("--weights {weights}"), &["no tensor", gone]);
}

#[test]
fn a_wrong_shape_is_told_with_the_right_one() {
    let folder = changed(|name, dtype, shape, data| {
        let shape = match name {
            "model.layers.1.self_attn.q_a_proj.weight" => vec![shape[1], shape[0]],
            _ => shape.to_vec(),
        };
        Some((dtype, shape, data.to_vec()))
    });
    let weights = folder.path().display();
    is_refused(
        &format!("--weights {weights}"),
        &["model.layers.1.self_attn.q_a_proj.weight", "[256, 96]", "[96, 256]"],
    );
}

#[test]
fn a_file_cut_short_is_refused_before_anything_is_read() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(Path::new(GOLDEN).join("config.json"), folder.path().join("config.json"))
        .unwrap();
    let bytes = std::fs::read(Path::new(GOLDEN).join("model.safetensors")).unwrap();
    let file = folder.path().join("model.safetensors");
    let weights = folder.path().display();
    for length in [bytes.len() - 1, bytes.len() / 2, 1000, 4, 0] {
        std::fs::write(&file, &bytes[..length]).unwrap();
        let text = refusal(&format!("--weights {weights}"));
        assert!(text.contains("model.safetensors"), "{length}: {text}");
    }
    std::fs::write(&file, b"this is no header at all").unwrap();
    is_refused(&format!("--weights {weights}"), &["model.safetensors", "not a"]);
    std::fs::remove_file(&file).unwrap();
    is_refused(&format!("--weights {weights}"), &["no .safetensors file"]);
}

#[test]
fn what_does_not_fit_the_model_or_the_machine_is_refused() {
    let golden = format!("--weights {GOLDEN}");
    for (arguments, parts) in [
        ("--tp 3".to_string(), &["--tp 3", "16 attention heads", "1, 2, 4, 8, 16"][..]),
        ("--tp 32".into(), &["--tp 32", "1 to 16"]),
        ("--draft 65".into(), &["--draft 65", "at most 64"]),
        ("--sequences 200 --draft 8".into(), &["1600 rows", "at most 1024"]),
        ("--config deepseek-v3 --memory 100G".into(), &["too little memory", "107.4 GB"]),
        (format!("{golden} --memory 1M"), &["too little memory", "--layers"]),
        (format!("{golden} --layers 5"), &["--layers 5", "has 4"]),
        ("--weights /nowhere".into(), &["/nowhere"]),
        ("--weights random:x".into(), &["no seed"]),
        ("--config /nowhere/config.json".into(), &["no such file", "deepseek-v3"]),
        ("--tree 0,1".into(), &["--tree", "-1"]),
        ("--tree -1,0,5".into(), &["--tree", "node 2"]),
        ("--context 0".into(), &["--context"]),
        ("--context 200000".into(), &["163840"]),
        ("--draft 4 --acceptance 5".into(), &["1 to 4"]),
        ("--passes 0".into(), &["--passes"]),
        ("--json /nowhere/x.json".into(), &["--json", "/nowhere/x.json"]),
        ("--tp 4 --islands 0-1".into(), &["--islands 0-1"]),
    ] {
        is_refused(&arguments, parts);
    }
}

#[test]
fn a_config_that_would_be_computed_wrongly_is_refused_by_key() {
    let folder = tempfile::tempdir().unwrap();
    for (from, to, what) in [
        ("\"sigmoid\"", "\"softmax\"", "scoring_func"),
        ("\"hidden_size\": 256,", "", "hidden_size"),
        ("\"n_group\": 4", "\"n_group\": 5", "5 equal groups"),
        ("{", "[", "not JSON"),
    ] {
        let file = config(folder.path(), from, to);
        is_refused(&format!("--config {}", file.display()), &["config.json", what]);
    }
}
