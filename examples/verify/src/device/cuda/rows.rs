//! The batch on the device: one piece of memory for the whole run, written anew before a pass or a replay, so that nothing is
//! allocated while ranks wait for each other.

use super::arena::{Arena, Slice};
use super::launch::{Rows, CHUNK, QUERIES};
use crate::batch::Batch;
use anyhow::{ensure, Result};
use peerlane::device::cuda::{memory, Entered, StreamRef};

/// What no pass of a run exceeds.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub rows: usize,
    pub sequences: usize,
    /// Rows of one sequence.
    pub block: usize,
    /// Keys of one sequence, its own rows included.
    pub length: usize,
    /// Tokens in the cache, over all sequences.
    pub cache: usize,
}

impl Limits {
    /// Blocks of queries of a sequence whose passes have `rows` rows of it.
    pub fn tiles(rows: usize, heads: usize) -> usize {
        (rows * heads).div_ceil(QUERIES)
    }

    /// Blocks of keys.
    pub fn chunks(length: usize) -> usize {
        length.div_ceil(CHUNK)
    }
}

/// `verify_block` of `cuda/launch.h`.
const BLOCK: usize = 16;

/// Where a batch is on the device, and what its launches look like.
#[derive(Clone, Debug)]
pub struct DeviceBatch {
    pub at: Rows,
    pub rows: usize,
    pub sequences: usize,
    /// Most rows of a sequence.
    pub block: usize,
    /// Blocks of keys; contexts may grow within them.
    pub chunks: usize,
}

/// The memory of batches.
pub struct BatchMemory {
    memory: Slice,
    limits: Limits,
}

impl BatchMemory {
    pub fn new(arena: &mut Arena, limits: Limits) -> Result<Self> {
        let bytes = limits.rows * (4 + 4 + 8 + 4 + 4) + limits.sequences * BLOCK;
        Ok(BatchMemory { memory: arena.take(bytes)?, limits })
    }

    /// Brings `batch` there, in the place of the one before it.
    pub fn load(
        &self,
        entered: &Entered<'_>,
        stream: StreamRef,
        batch: &Batch,
    ) -> Result<DeviceBatch> {
        let limits = &self.limits;
        let (rows, sequences) = (batch.rows(), batch.blocks.len());
        let block = batch.blocks.iter().map(|block| block.rows).max().unwrap_or(0);
        let length = batch.blocks.iter().map(|b| b.context + b.rows).max().unwrap_or(0);
        let end = batch.blocks.iter().map(|b| b.cache + b.context + b.rows).max().unwrap_or(0);
        ensure!(
            rows > 0
                && rows <= limits.rows
                && sequences <= limits.sequences
                && block <= limits.block
                && length <= limits.length
                && end <= limits.cache,
            "a batch of {rows} rows, {sequences} sequences, {block} rows of one, {length} keys of one and {end} cache rows, \
             beyond {limits:?}"
        );
        let of_rows = |value: &dyn Fn(usize, usize, usize) -> u32| {
            let blocks = batch.blocks.iter().enumerate();
            blocks
                .flat_map(|(s, block)| (0..block.rows).map(move |at| (s, block, at)))
                .flat_map(|(s, block, at)| value(s, block.cache + block.context, at).to_le_bytes())
                .collect::<Vec<u8>>()
        };
        // The widest first, so that each begins where its type may.
        let parts = [
            batch.visible.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>(),
            batch
                .blocks
                .iter()
                .flat_map(|b| [b.row, b.rows, b.cache, b.context])
                .flat_map(|value| (value as u32).to_le_bytes())
                .collect(),
            batch.tokens.iter().flat_map(|token| token.to_le_bytes()).collect(),
            batch.positions.iter().flat_map(|position| position.to_le_bytes()).collect(),
            of_rows(&|s, _, _| s as u32),
            of_rows(&|_, end, at| (end + at) as u32),
        ];
        let mut addresses = [0; 6];
        let mut at = self.memory.ptr();
        for (address, part) in addresses.iter_mut().zip(&parts) {
            *address = at;
            at += part.len() as u64;
        }
        let bytes = parts.concat();
        ensure!(bytes.len() <= self.memory.bytes(), "a batch of {} bytes", bytes.len());
        // SAFETY: this memory is the batch's, and holds as many bytes; no capture is under way on the stream.
        unsafe { memory::write(entered, self.memory.ptr(), &bytes, stream) }?;
        let [visible, blocks, tokens, positions, sequence, slots] = addresses;
        let (rows_u32, sequences_u32) = (rows as u32, sequences as u32);
        Ok(DeviceBatch {
            at: Rows {
                tokens,
                positions,
                visible,
                sequence,
                slots,
                blocks,
                rows: rows_u32,
                sequences: sequences_u32,
            },
            rows,
            sequences,
            block,
            chunks: Limits::chunks(length),
        })
    }
}
