//! The kernels, as functions of the host, against the host's own arithmetic.

use super::launch::{
    Accept, Dispatch, Fill, Route, Router, Rows, ROUTER_EXPERTS, ROUTER_PARTS, SIZES,
};
use crate::batch::{Batch, Draft};
use crate::config::Config;
use crate::device::cpu::router as cpu;
use crate::weights::{Drawn, Part, Random};
use half::bf16;
use std::ffi::{c_void, CString};

type Kernel = unsafe extern "C" fn(*const c_void);

/// Runs a kernel whose addresses are memory of this process.
fn run<A>(kernel: Kernel, arguments: &A) {
    // SAFETY: the parameter is the kernel's own type, and what it points to is alive and large enough, as each test sees to.
    unsafe { kernel((&raw const *arguments).cast()) };
}

fn address<T>(values: &[T]) -> u64 {
    values.as_ptr() as u64
}

#[test]
fn parameters_are_as_large_as_the_kernels_take_them() {
    for (kernel, bytes) in SIZES {
        let name = CString::new(*kernel).unwrap();
        assert_eq!(verify_standin::parameter_bytes(&name), *bytes as u64, "{kernel}");
    }
    assert_eq!(verify_standin::parameter_bytes(c"verify_nothing"), 0);
}

#[test]
fn a_seed_gives_the_same_weights_on_a_gpu() {
    let random = Random::new(7);
    for (name, shape) in [
        ("model.layers.3.mlp.experts.5.down_proj.weight", [40, 33]),
        ("model.norm.weight", [1, 100]),
        ("model.layers.3.mlp.gate.e_score_correction_bias", [1, 16]),
    ] {
        let part = Part::whole(name, shape);
        let part = if shape[0] > 1 { part.rows(3..17).columns(5..30) } else { part };
        let mut wanted = Vec::new();
        random.append(&mut wanted, &part);
        for wide in [false, true] {
            let mut out = vec![0u32; wanted.len()];
            let Drawn { key, centre, reach } = random.drawn(&part);
            let arguments = Fill {
                blocks: 2,
                wide: wide.into(),
                out: address(&out),
                key,
                first: (part.rows.start * shape[1] + part.columns.start) as u64,
                columns: part.columns.len() as u64,
                between: shape[1] as u64,
                count: wanted.len() as u64,
                centre,
                reach,
            };
            run(verify_standin::standin_fill, &arguments);
            let found: Vec<f32> = match wide {
                true => out.iter().map(|bits| f32::from_bits(*bits)).collect(),
                false => {
                    let halves =
                        out.iter_mut().flat_map(|word| [*word as u16, (*word >> 16) as u16]);
                    halves.take(wanted.len()).map(|bits| bf16::from_bits(bits).to_f32()).collect()
                }
            };
            assert_eq!(found, wanted, "{name}, wide {wide}");
        }
    }
}

#[test]
fn rows_go_to_the_experts_that_the_host_picks() {
    for (name, changes) in [("deepseek-v3", 0), ("kimi-k2", 0), ("small", 0), ("deepseek-v3", 300)]
    {
        let mut config = Config::preset(name).unwrap();
        if changes > 0 {
            // Groups whose size is no power of two, over more lanes than a warp has.
            (config.n_routed_experts, config.n_group, config.topk_group) = (changes, 50, 7);
        }
        let (experts, kept, rows) = (config.n_routed_experts, config.num_experts_per_tok, 40);
        let mut random = fastrand::Rng::with_seed(3);
        // A few values only, so that there are many equals.
        let mut draw = |from: i32, to: i32| random.i32(from..to) as f32 / 4.0;
        let logits: Vec<f32> = (0..rows * experts).map(|_| draw(-9, 9)).collect();
        let bias: Vec<f32> = (0..experts).map(|_| draw(-3, 3)).collect();
        let (chosen, weights) = (vec![0u32; rows * kept], vec![0f32; rows * kept]);
        let arguments = Route {
            blocks: rows.div_ceil(8) as u32,
            rows: rows as u32,
            experts: experts as u32,
            unused: 0,
            groups: config.n_group as u32,
            kept_groups: config.topk_group as u32,
            kept: kept as u32,
            scale: config.routed_scaling_factor,
            logits: address(&logits),
            bias: address(&bias),
            chosen: address(&chosen),
            weights: address(&weights),
        };
        run(verify_standin::standin_choice, &arguments);
        let router = cpu::Router::new(&config);
        let (mut picked, mut weighed) = (vec![0; kept], vec![0.0; kept]);
        for row in 0..rows {
            router.route(&logits[row * experts..][..experts], &bias, &mut picked, &mut weighed);
            assert_eq!(chosen[row * kept..][..kept], picked, "{name}, row {row}");
            for (found, wanted) in weights[row * kept..].iter().zip(&weighed) {
                assert!((found - wanted).abs() < 1e-6, "{name}, row {row}: {found} {wanted}");
            }
        }

        let pairs = rows * kept;
        let (slots, order) = (vec![0u32; 2 * experts + 2], vec![0u32; pairs]);
        let arguments = Dispatch {
            blocks: 1,
            experts: experts as u32,
            pairs: pairs as u32,
            unused: 0,
            chosen: address(&chosen),
            slots: address(&slots),
            order: address(&order),
        };
        run(verify_standin::standin_dispatch, &arguments);
        let mut seen = Vec::new();
        for slot in 0..slots[0] as usize {
            let (first, end) =
                (slots[1 + experts + slot] as usize, slots[2 + experts + slot] as usize);
            assert!(first < end, "{name}: an empty slot");
            seen.extend(order[first..end].iter().map(|pair| (slots[1 + slot], *pair)));
        }
        let mut wanted: Vec<(u32, u32)> = chosen.iter().copied().zip(0..).collect();
        wanted.sort_unstable();
        assert_eq!(seen, wanted, "{name}");
    }
}

/// Few rows in one launch: the last block routes by what the others have left, and leaves the counter as it was.
#[test]
fn the_router_of_few_rows_picks_by_its_own_logits() {
    let config = Config::preset("small").unwrap();
    let (experts, kept, hidden) = (config.n_routed_experts, config.num_experts_per_tok, 136);
    let mut random = fastrand::Rng::with_seed(5);
    let mut draw = |n: usize| -> Vec<bf16> {
        (0..n).map(|_| bf16::from_f32(random.i32(-8..8) as f32 / 8.0)).collect()
    };
    let gate = draw(experts * hidden);
    let bias = vec![0f32; experts];
    for rows in [1, 8, 9, 16] {
        let x = draw(rows * hidden);
        let logits = vec![0f32; ROUTER_PARTS * rows * experts];
        let (chosen, weights) = (vec![0u32; rows * kept], vec![0f32; rows * kept]);
        let arrived = [0u32];
        let route = Route {
            blocks: 0,
            rows: rows as u32,
            experts: experts as u32,
            groups: config.n_group as u32,
            kept_groups: config.topk_group as u32,
            kept: kept as u32,
            unused: 0,
            scale: config.routed_scaling_factor,
            logits: address(&logits),
            bias: address(&bias),
            chosen: address(&chosen),
            weights: address(&weights),
        };
        let arguments = Router {
            blocks: (experts.div_ceil(ROUTER_EXPERTS) * ROUTER_PARTS) as u32,
            hidden: hidden as u32,
            route,
            x: address(&x),
            gate: address(&gate),
            arrived: address(&arrived),
        };
        run(verify_standin::standin_router, &arguments);
        let left = std::hint::black_box(&arrived)[0];
        assert_eq!(left, 0);
        let router = cpu::Router::new(&config);
        let (mut picked, mut weighed) = (vec![0; kept], vec![0.0; kept]);
        for row in 0..rows {
            let dot = |e: usize| -> f32 {
                let (x, w) = (&x[row * hidden..][..hidden], &gate[e * hidden..][..hidden]);
                x.iter().zip(w).map(|(x, w)| x.to_f32() * w.to_f32()).sum()
            };
            let logits: Vec<f32> = (0..experts).map(dot).collect();
            router.route(&logits, &bias, &mut picked, &mut weighed);
            assert_eq!(chosen[row * kept..][..kept], picked, "row {row} of {rows}");
        }
    }
}

#[test]
fn a_gpu_accepts_what_the_host_accepts() {
    let drafts = [
        Draft::chain(1).unwrap(),
        Draft::chain(64).unwrap(),
        Draft::tree(vec![-1, 0, 0, 1, 1, 2, 2, 5]).unwrap(),
    ];
    let mut random = fastrand::Rng::with_seed(11);
    let mut most = 0;
    for _ in 0..200 {
        let mut batch = Batch::default();
        for draft in &drafts {
            // Two tokens only, so that paths become long.
            let tokens: Vec<u32> = (0..draft.rows()).map(|_| random.u32(0..2)).collect();
            batch.push(0, 5, draft, &tokens);
        }
        let chosen: Vec<u32> = (0..batch.rows()).map(|_| random.u32(0..2)).collect();
        let keys: Vec<u64> = chosen.iter().map(|token| 1 << 63 | u64::from(!token)).collect();
        let blocks: Vec<u32> = batch
            .blocks
            .iter()
            .flat_map(|b| [b.row, b.rows, b.cache, b.context])
            .map(|value| value as u32)
            .collect();
        let accepted = vec![0u32; drafts.len()];
        let rows = Rows {
            tokens: address(&batch.tokens),
            visible: address(&batch.visible),
            blocks: address(&blocks),
            rows: batch.rows() as u32,
            sequences: drafts.len() as u32,
            ..Rows::default()
        };
        let (keys, out) = (address(&keys), address(&accepted));
        run(
            verify_standin::standin_accept,
            &Accept { blocks: 1, unused: 0, batch: rows, keys, accepted: out },
        );
        assert_eq!(accepted, batch.accepted(&chosen));
        most = most.max(accepted[2]);
    }
    assert_eq!(most, 4, "no path to the deepest leaf was tried");
}
