//! What goes between the host and the device.

use super::launch::Fill;
use super::ops::striding;
use super::{Buffer, Chosen, Cuda, Weight};
use crate::device::Routed;
use crate::weights::{Drawn, Part as Tensor, Random};
use anyhow::Result;
use half::bf16;

/// Of an element.
pub(super) fn size(wide: bool) -> usize {
    if wide {
        size_of::<f32>()
    } else {
        size_of::<bf16>()
    }
}

fn bytes_of(values: &[f32], wide: bool) -> Vec<u8> {
    match wide {
        true => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        false => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
    }
}

pub(super) fn words(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes))
}

pub(super) fn long_words(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes))
}

impl Cuda {
    pub(super) fn weight_of(
        &mut self,
        values: &[f32],
        columns: usize,
        wide: bool,
    ) -> Result<Weight> {
        let rows = values.len() / columns.max(1);
        let memory = self.take(values.len() * size(wide))?;
        self.write_bytes(&memory, &bytes_of(values, wide))?;
        Ok(Weight { memory, rows, columns })
    }

    pub(super) fn drawn(
        &mut self,
        random: &Random,
        parts: &[Tensor],
        wide: bool,
    ) -> Result<Weight> {
        let columns = parts[0].columns.len();
        let rows: usize = parts.iter().map(|part| part.rows.len()).sum();
        let memory = self.take(rows * columns * size(wide))?;
        let mut out = memory.ptr();
        for part in parts {
            let Drawn { key, centre, reach } = random.drawn(part);
            let count = part.rows.len() * columns;
            let arguments = Fill {
                blocks: striding(count, 256 * 8),
                wide: wide.into(),
                out,
                key,
                first: (part.rows.start * part.shape[1] + part.columns.start) as u64,
                columns: columns as u64,
                between: part.shape[1] as u64,
                count: count as u64,
                centre,
                reach,
            };
            self.launch(&self.gpu.kernels.fill, &arguments)?;
            out += (count * size(wide)) as u64;
        }
        Ok(Weight { memory, rows, columns })
    }

    pub(super) fn floats(&self, buffer: &Buffer, elements: usize) -> Result<Vec<f32>> {
        let bytes = self.read_bytes(&buffer.memory, elements * size(buffer.wide))?;
        Ok(match buffer.wide {
            true => words(&bytes).map(f32::from_bits).collect(),
            false => {
                let halves = bytes.as_chunks().0.iter();
                halves.map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect()
            }
        })
    }

    pub(super) fn routed(&self, routing: &Chosen, rows: usize) -> Result<Routed> {
        let bytes = 4 * rows * self.dims.experts_per_token;
        let experts = self.read_bytes(&routing.experts, bytes)?;
        let weights = self.read_bytes(&routing.weights, bytes)?;
        Ok(Routed {
            experts: words(&experts).collect(),
            weights: words(&weights).map(f32::from_bits).collect(),
        })
    }

    pub(super) fn put_routed(&self, routing: &Chosen, routed: &Routed) -> Result<()> {
        let experts: Vec<u8> = routed.experts.iter().flat_map(|e| e.to_le_bytes()).collect();
        self.write_bytes(&routing.experts, &experts)?;
        self.write_bytes(&routing.weights, &bytes_of(&routed.weights, true))
    }
}
