//! Device memory in large pieces: a model is thousands of tensors, and each allocation is a call into the driver.

use anyhow::{Context as _, Result};
use peerlane::device::cuda::{Context, DeviceMemory};
use std::sync::Arc;

/// Of a piece. What is larger than half of it gets an allocation of its own.
pub const PIECE: usize = 64 << 20;
/// Every slice begins at a multiple of so many bytes, which serves any load of any kernel, cuBLAS's too.
const ALIGNMENT: usize = 256;

/// Part of an allocation, which lives as long as any part of it.
#[derive(Clone)]
pub struct Slice {
    memory: Arc<DeviceMemory>,
    offset: usize,
    bytes: usize,
}

impl Slice {
    /// Its address on the device.
    pub fn ptr(&self) -> u64 {
        self.memory.ptr() + self.offset as u64
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Hands out slices, and never takes one back.
pub struct Arena {
    context: Context,
    /// The piece that is being handed out, and how much of it has been.
    piece: Option<(Arc<DeviceMemory>, usize)>,
}

impl Arena {
    pub fn new(context: &Context) -> Self {
        Arena { context: context.clone(), piece: None }
    }

    /// `bytes` bytes with whatever was there before.
    pub fn take(&mut self, bytes: usize) -> Result<Slice> {
        let room = bytes.max(1).next_multiple_of(ALIGNMENT);
        if room > PIECE / 2 {
            return Ok(Slice { memory: self.allocate(room)?, offset: 0, bytes });
        }
        let fits = self.piece.as_ref().is_some_and(|(_, used)| used + room <= PIECE);
        if !fits {
            self.piece = Some((self.allocate(PIECE)?, 0));
        }
        let (memory, used) = self.piece.as_mut().context("an arena without a piece")?;
        let slice = Slice { memory: Arc::clone(memory), offset: *used, bytes };
        *used += room;
        Ok(slice)
    }

    fn allocate(&self, bytes: usize) -> Result<Arc<DeviceMemory>> {
        let memory = DeviceMemory::new(&self.context, bytes);
        Ok(Arc::new(memory.with_context(|| format!("allocating {bytes} bytes on the GPU"))?))
    }
}
