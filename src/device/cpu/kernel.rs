//! The kernels as the CPU device runs them: the same source as on a GPU, compiled by the host's compiler.

use crate::error::{Error, Result};
use crate::launch::{pl_args, pl_probe, pl_step};
use crate::types::{DType, Op, Protocol, MAX_RANKS};

extern "C" {
    fn pl_host_all_reduce(args: *const pl_args);
    fn pl_host_add_rms_norm(step: *const pl_step);
    fn pl_host_probe(probe: *const pl_probe);
}

/// Most packs of a chunk: its bytes, widened to fp32, are counted in 32 bits.
pub const MAX_CHUNK_PACKS: u32 = 1 << 24;

/// Bytes of scratch (`pl_args::partial`) for a step of `count` elements: whole packs of accumulators, so that 16-bit
/// floats take 32 bytes a pack and all other types 16. A schedule that keeps no partials needs none.
pub const fn partial_bytes(dtype: DType, count: u64) -> u64 {
    let per_pack = (crate::types::PACK_BYTES / dtype.size()) as u64;
    count.div_ceil(per_pack) * per_pack * dtype.acc_size() as u64
}

/// Runs one step for one rank on the calling thread, and returns when it has finished or given up. With `args.step.rows` it is
/// the fused one, and norms the rows that it has reduced.
///
/// A step that gives up is no error here: it has filled its output and set `pl_state`, which the caller looks at.
///
/// # Errors
/// `args` names a combination that no kernel exists for, or breaks a limit; nothing has been touched then.
///
/// # Safety
/// - `args.table` has passed the checker, which bounds the stack of every fold by `PL_FOLD_STACK`.
/// - `args.step.base` holds, for every rank of the table, the address of a slab at least as large as `args.step.geo` reaches with
///   the table's slots, mapped for reading and writing, aligned to 64 bytes, and armed for the protocol (`sentinel`: all
///   ones, others: zero) before any rank's first step.
/// - `args.step.state` and `args.step.channel` live as long as the call; only this rank's launches and its host touch them.
/// - `args.step.input` can be read and `args.step.output` written for `args.step.count` elements; they are the same or do not overlap.
/// - Where the table keeps partial sums, `args.step.partial` can be written for [`partial_bytes`], is aligned to 16 bytes, and
///   belongs to this channel alone.
/// - Each piece fits its slot: `slot_bytes` is at least the piece's packs times 16 (32 where it travels as fp32), twice
///   that for `ll`; `flag_chunks` is at least the piece's packs divided by `chunk_packs`, rounded up. With rows: a slot
///   holds the piece's packs of all rows, and `flag_chunks` is at least `rows`.
/// - With rows, [`add_rms_norm`]'s demands on the buffers hold as well; `residual_out` may also be the input, and `output`
///   must not overlap the residual.
pub unsafe fn all_reduce(args: &pl_args) -> Result<()> {
    check(args)?;
    // SAFETY: the caller vouches for every address in `args` and for the table; `check` has just refused whatever the
    // kernels have no code for.
    unsafe { pl_host_all_reduce(args) };
    Ok(())
}

/// Adds the residual to sums that are in `step.output`, norms the rows into the same place, and writes what the norm was
/// taken of to `step.residual_out`. No other rank takes part.
///
/// # Errors
/// As for [`all_reduce`].
///
/// # Safety
/// `step.output` and `step.residual_out` can be written and `step.residual` read for `step.count` elements, `step.gamma`
/// read for `step.width`; `residual_out` may be the residual, and nothing else that is written overlaps another.
pub unsafe fn add_rms_norm(step: &pl_step) -> Result<()> {
    check_rows(step, DType::from_raw(step.dtype)?)?;
    // SAFETY: the caller vouches for every address; the type and the width are such as there is code for.
    unsafe { pl_host_add_rms_norm(step) };
    Ok(())
}

fn check_rows(step: &pl_step, dtype: DType) -> Result<()> {
    let fits = step.rows.checked_mul(step.width) == Some(step.count);
    if !matches!(dtype, DType::F16 | DType::BF16)
        || step.width == 0
        || !step.width.is_multiple_of(8)
        || step.width > u32::MAX.into()
        || !fits
    {
        return Err(Error::Internal(format!(
            "kernel arguments: {} rows of {} {dtype} for {} elements",
            step.rows, step.width, step.count
        )));
    }
    Ok(())
}

/// Runs one launch of the probe for one rank on the calling thread, as a grid of one block.
///
/// # Safety
/// As for [`all_reduce`], for `probe.step` without its buffers. Besides: in every slab of `to`, and in this rank's own, the
/// flags and a slot per rank lie inside what nobody else uses meanwhile; `result` can be written for 1 + 2 * `rounds` words,
/// `barrier` for two, and both belong to this launch.
pub unsafe fn probe(probe: &pl_probe) -> Result<()> {
    let bytes = crate::types::PACK_BYTES as u64 * 64;
    if !probe.bytes.is_multiple_of(bytes) || probe.bytes > probe.slot_bytes {
        return Err(Error::Internal(format!(
            "a probe of {} bytes in slots of {}; it takes a multiple of {bytes}",
            probe.bytes, probe.slot_bytes
        )));
    }
    // SAFETY: the caller vouches for every address.
    unsafe { pl_host_probe(probe) };
    Ok(())
}

fn check(args: &pl_args) -> Result<()> {
    let dtype = DType::from_raw(args.step.dtype)?;
    if args.step.rows != 0 {
        check_rows(&args.step, dtype)?;
    }
    Op::from_raw(args.step.op)?;
    let protocol = Protocol::from_raw(args.step.proto)?;
    if protocol == Protocol::Sentinel && !dtype.has_sentinel() {
        return Err(Error::Unsupported(format!(
            "protocol sentinel cannot carry {dtype}: a word of all ones is a number there; use ll or flagged"
        )));
    }
    let table = &args.table;
    if table.pull != 0 && protocol != Protocol::Flagged {
        return Err(Error::Unsupported(format!(
            "protocol {protocol} cannot pull, it polls the words themselves; use flagged"
        )));
    }
    let internal = |what: String| Err(Error::Internal(format!("kernel arguments: {what}")));
    if u32::from(table.n) != args.step.n || u32::from(table.rank) != args.step.rank {
        return internal(format!(
            "rank {} of {} with the table of rank {} of {}",
            args.step.rank, args.step.n, table.rank, table.n
        ));
    }
    if table.n == 0 || table.n as usize > MAX_RANKS || table.rank >= table.n {
        return internal(format!("rank {} of {}", table.rank, table.n));
    }
    if table.pieces == 0 || table.cut_den == 0 {
        return internal(format!("{} pieces over {}", table.pieces, table.cut_den));
    }
    if args.step.chunk_packs == 0 || args.step.chunk_packs > MAX_CHUNK_PACKS {
        return internal(format!(
            "chunk_packs is {}, must be 1 to {MAX_CHUNK_PACKS}",
            args.step.chunk_packs
        ));
    }
    if args.step.launch == 0 {
        return internal("launch id 0 means idle".into());
    }
    Ok(())
}
