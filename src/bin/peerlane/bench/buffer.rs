//! Memory of one message on the host, and the check of what a call has left in it.

use super::orders::Call;
use super::payload::Payload;
use anyhow::{ensure, Context, Result};
use bytemuck::{Pod, Zeroable};

/// Elements beyond the message that a call must leave alone, as cache lines.
const GUARD_LINES: usize = 2;
/// No integer result is this byte repeated, nor is any float result.
pub const POISON: u8 = 0xa5;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Memory of one message, aligned as an allocator of tensors would, with a guard behind it.
#[derive(Default)]
pub struct Buffer {
    lines: Vec<Line>,
    bytes: usize,
}

impl Buffer {
    /// Makes room for `bytes` bytes and fills all of it with poison.
    pub fn resize(&mut self, bytes: usize) -> Result<()> {
        let lines = bytes.div_ceil(64) + GUARD_LINES;
        self.lines.clear();
        self.lines
            .try_reserve_exact(lines)
            .with_context(|| format!("no memory for a message of {bytes} bytes"))?;
        self.lines.resize(lines, Line([POISON; 64]));
        self.bytes = bytes;
        Ok(())
    }

    /// Whether it holds a message of `bytes` bytes.
    pub fn fits(&self, bytes: usize) -> bool {
        !self.lines.is_empty() && self.bytes == bytes
    }

    /// The message.
    pub fn message(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.bytes]
    }

    /// The message and its guard.
    #[cfg(feature = "cuda")]
    pub fn all(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.lines)
    }

    /// Forgets the last result and re-arms the guard.
    pub fn poison(&mut self) {
        self.lines.fill(Line([POISON; 64]));
    }

    /// Whether nothing behind the message was written to.
    pub fn guard_intact(&self) -> bool {
        bytemuck::cast_slice::<Line, u8>(&self.lines)[self.bytes..].iter().all(|&b| b == POISON)
    }
}

/// How many elements of a call's result are wrong; an error if it touched what it must not.
pub fn compare(
    rank: usize,
    call: &Call,
    payload: &Payload,
    input: &mut Buffer,
    output: &mut Buffer,
) -> Result<u64> {
    for (name, buffer) in [("input", &*input), ("output", &*output)] {
        ensure!(
            buffer.guard_intact(),
            "an all-reduce of {} bytes wrote beyond the end of its {name}",
            call.bytes()
        );
    }
    if call.in_place {
        return Ok(payload.wrong_output(input.message()));
    }
    let changed = payload.wrong_input(rank, input.message());
    ensure!(
        changed == 0,
        "an out-of-place all-reduce of {} bytes changed {changed} elements of its input",
        call.bytes()
    );
    Ok(payload.wrong_output(output.message()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_behind_the_message_is_seen() {
        let mut buffer = Buffer::default();
        buffer.resize(100).unwrap();
        buffer.message().fill(1);
        assert!(buffer.guard_intact());
        bytemuck::cast_slice_mut::<Line, u8>(&mut buffer.lines)[100] = 1;
        assert!(!buffer.guard_intact());
        buffer.poison();
        assert!(buffer.guard_intact());
    }
}
