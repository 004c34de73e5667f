//! What the kernels with unrolled loops get of a step.

use super::random::Random;
use super::step::Step;
use peerlane::lane::{Fan, RowUnits, Unrolled};
use peerlane::launch::*;
use peerlane::{DType, Op, Protocol};

/// Trees over islands of different sizes have another form.
pub(super) fn has_unrolled_form(table: &pl_table) -> bool {
    let mut step = *pl_unrolled_7::zeroed().step();
    (step.geo.slot_bytes, step.base) = (1, [4096; PL_MAX_RANKS as usize]);
    Unrolled::<pl_unrolled_7>::new(table, &step, Protocol::Sentinel).is_some_and(|f| f.is_short())
}

/// Groups of threads in a block that has a row by the short path: what the back end's ROW_PACKS leaves of a fan of 8.
const ROW_GROUPS: u64 = 2;

/// The step for the kernel with unrolled loops, or nothing where there is none for it. Mostly: ranks that walk their tables
/// must understand the others.
pub(super) fn unrolled(
    args: &pl_args,
    step: &Step,
    (blocks, threads): (u32, u32),
    kernels: &mut Random,
) -> pl_unrolled_7 {
    let form = Unrolled::<pl_unrolled_7>::new(&args.table, &args.step, step.protocol);
    let per_pack = 16 / step.dtype.size();
    match form {
        None if step.delta => panic!("a step by delta has the form"),
        Some(mut form) if step.delta => {
            let packs = (step.count / per_pack) as u64;
            let args =
                *form.lay_out(&args.step, &args.table, packs, Some(u64::from(blocks * threads)));
            assert_eq!(args.straight, 1, "on a GPU it is the only path");
            args
        }
        Some(mut form)
            if step.dtype != DType::I32
                && step.count.is_multiple_of(per_pack)
                && !kernels.one_in(5) =>
        {
            let packs = step.norm.map_or(step.count, |norm| norm.width) / per_pack;
            if step.norm.is_none() {
                // As the host does it: the short path where every thread has a pack of each piece at most.
                let plain = step.op == Op::Sum && args.step.check == 0;
                let all = plain.then_some(u64::from(blocks * threads));
                return *form.lay_out(&args.step, &args.table, packs as u64, all);
            }
            // Ranks may hand their packs out in different ways; the last block may have none.
            let (rows, blocks, threads) = (args.step.rows, u64::from(blocks), u64::from(threads));
            let plain = args.step.check == 0;
            let spread = form.lay_out_rows(
                &args.step,
                &args.table,
                packs as u64,
                plain,
                |longest, short| {
                    if short && !kernels.one_in(5) {
                        let whole = args.table.phases == 2;
                        let cluster = rows == 1 && blocks > 1 && !kernels.one_in(3);
                        let block = if whole { longest } else { longest.min(threads) };
                        let row = longest.next_multiple_of(block);
                        let fits = block * if whole { ROW_GROUPS } else { 1 } <= threads;
                        if fits && rows * (row / block) <= blocks {
                            // All blocks of a rank are a cluster, or none.
                            let cluster = cluster && row / block == blocks;
                            let cluster = if cluster { blocks as u32 } else { 0 };
                            return RowUnits { block, row, straight: true, cluster };
                        }
                    }
                    let block = (rows * longest).div_ceil(blocks) + kernels.below(3).min(1);
                    RowUnits { block, row: longest, straight: false, cluster: 0 }
                },
            );
            spread.copied().unwrap_or_else(pl_unrolled_7::zeroed)
        }
        _ => pl_unrolled_7::zeroed(),
    }
}
